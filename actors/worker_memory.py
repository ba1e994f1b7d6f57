"""Memory of a worker besides its weights, and how the words of its tables name what a product's input is made as."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

from hotneuron.actors import fields as P
from hotneuron.kernels import formats


class Memory:
    """Zeroed memory on 64-byte borders that lives as long as this object; pages are taken when first written."""

    def __init__(self) -> None:
        self._maps: list[mmap.mmap] = []
        self.n_bytes = 0

    def take(self, n_bytes: int) -> int:
        """The address of n_bytes of zeros."""
        return self.take_array(n_bytes).ctypes.data

    def take_array(self, n_bytes: int) -> np.ndarray:
        """The same as u8 [n_bytes]."""
        area = mmap.mmap(-1, max(n_bytes, mmap.PAGESIZE))
        self._maps.append(area)
        self.n_bytes += n_bytes
        return np.frombuffer(area, np.uint8)[:n_bytes]


def inputs_of(*format_ids: int) -> int:
    """What a product's input must be made as, for matrices of these formats."""
    return (P.INT8 if min(format_ids) < formats.HALF else 0) | (P.FLOATS if max(format_ids) >= formats.HALF else 0)


def copy_to(address: int, values: np.ndarray) -> None:
    source = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
    np.ctypeslib.as_array((ctypes.c_uint8 * source.nbytes).from_address(address))[:] = source
