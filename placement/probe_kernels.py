"""What the probe runs: the kernels of a decode step over one large buffer, a team's barrier, a row's norm."""

from __future__ import annotations

import time

import numpy as np

from hotneuron.kernels import formats, rows
from hotneuron.kernels.activations import group_bytes, quantize_row
from hotneuron.kernels.elementwise import rms_norm
from hotneuron.kernels.jit import call, njit
from hotneuron.kernels.matmul import AHEAD_BYTES, tile_address
from hotneuron.kernels.sync import team_barrier

_DEADLINE_NS = 10_000_000_000
_NORMS = 2000


@njit
def _tiles(kernel, w, n_tiles, tile_bytes, x, columns, y):
    for t in range(n_tiles):
        call(kernel, (w + t * tile_bytes, x, columns, y, 64, AHEAD_BYTES))


@njit
def _rows(gather, kernel, format_id, addresses, x, columns, scratch, y):
    """addresses: int64 [groups + 1, 16]."""
    for g in range(len(addresses) - 1):
        call(gather, (format_id, addresses[g].ctypes.data, addresses[g + 1].ctypes.data, columns, scratch))
        call(kernel, (scratch, x, columns, y, 64, 0))


@njit
def _barriers(counter, count, n_threads):
    for turn in range(1, count + 1):
        team_barrier(counter, n_threads, turn, counter + 64, _DEADLINE_NS)


@njit
def _norms(x, weight, out, group, width, count):
    for _ in range(count):
        rms_norm(x, weight, out, width, width, np.float32(1e-5))
        quantize_row(out, group, width, 1, 0)


class Stream:
    """4-bit products of one token with a buffer of weights; `me` of `count` threads takes its part."""

    def __init__(self, address: int, n_bytes: int, columns: int, most: int, share: float):
        self._address, self._columns, self._format = address, columns, formats.NIBBLE
        self._kernel, self._tile_stride = tile_address(self._format, 1), formats.tile_bytes(self._format, columns)
        self._n_tiles = n_bytes // self._tile_stride
        self.tile_bytes = self._n_tiles * self._tile_stride
        stride = rows.row_bytes(self._format, columns)
        chosen = np.sort(np.random.default_rng(0).permutation(n_bytes // stride)[: int(share * (n_bytes // stride))])
        groups = len(chosen) // 16
        self._addresses = address + chosen[: 16 * groups].reshape(groups, 16).astype(np.int64) * stride
        self.row_bytes = 16 * groups * stride
        self._x = np.zeros(group_bytes(columns, 1), np.uint8)
        self._y = np.zeros((most, 64), np.float32)
        self._scratch = np.zeros((most, rows.scratch_bytes(self._format, columns) + 256), np.uint8)

    def tiles(self, me: int, count: int) -> None:
        low, high = self._n_tiles * me // count, self._n_tiles * (me + 1) // count
        at, x, y = self._address + low * self._tile_stride, self._x.ctypes.data, self._y[me].ctypes.data
        _tiles(self._kernel, at, high - low, self._tile_stride, x, self._columns, y)

    def rows(self, me: int, count: int) -> None:
        groups = len(self._addresses)
        mine = self._addresses[groups * me // count : groups * (me + 1) // count]
        mine = np.concatenate([mine, mine[-1:]])
        x, y, scratch = self._x.ctypes.data, self._y[me].ctypes.data, self._scratch[me].ctypes.data
        _rows(rows.gather.address, self._kernel, self._format, mine, x, self._columns, scratch, y)


class Meeting:
    def __init__(self, n_threads: int):
        self._memory, self._n_threads = np.zeros(64, np.int64), n_threads

    def run(self, me: int, count: int) -> None:
        alone = count == 1
        self._memory[0] = 0 if alone else self._memory[0]
        _barriers(self._memory.ctypes.data, count, 1 if alone else self._n_threads)


def norm_ns(width: int) -> float:
    """Of one float of a row, normed and quantized."""
    x, weight, out = np.ones(width, np.float32), np.ones(width, np.float32), np.zeros(width, np.float32)
    group = np.zeros(group_bytes(width, 1), np.uint8)
    addresses = [array.ctypes.data for array in (x, weight, out, group)]
    x_at, weight_at, out_at, group_at = addresses
    _norms(x_at, weight_at, out_at, group_at, width, 1)
    start_s = time.perf_counter()
    _norms(x_at, weight_at, out_at, group_at, width, _NORMS)
    return (time.perf_counter() - start_s) / _NORMS / width * 1e9
