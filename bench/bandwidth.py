"""What N threads can read from memory: the limit of every decode that loads all weights for a token.

python bench/bandwidth.py [--threads 1 2] [--gib 1] [--repetitions 5]
"""

from __future__ import annotations

import argparse
import mmap
import statistics

import numpy as np

from hotneuron.kernels.jit import njit
from hotneuron.kernels.simd import fma, load_f32, splat, store_f32
from hotneuron.placement.probe import seconds_together

GIB = 1 << 30
_HUGE_PAGE_BYTES = 2 << 20
_STRIDE_BYTES = 256


@njit
def _read(address, n_bytes, out):
    one = splat(np.float32(1))
    a = splat(np.float32(0))
    b = c = d = a
    for i in range(0, n_bytes, _STRIDE_BYTES):
        a = fma(load_f32(address + i), one, a)
        b = fma(load_f32(address + i + 64), one, b)
        c = fma(load_f32(address + i + 128), one, c)
        d = fma(load_f32(address + i + 192), one, d)
    store_f32(out, fma(a, one, fma(b, one, fma(c, one, d))))


def read_gb_s(threads: int, size_bytes: int = GIB, repetitions: int = 5) -> list[float]:
    """GB/s (1e9 bytes) of each repetition: `threads` threads read together, each its own part of `size_bytes`."""
    # NOTE the memory is written first: untouched pages are all one zero page, which stays in the cache.
    pages = mmap.mmap(-1, size_bytes + _HUGE_PAGE_BYTES)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(pages, np.uint8)
    memory[:] = 7
    start = memory.ctypes.data + -memory.ctypes.data % _HUGE_PAGE_BYTES
    part = size_bytes // threads // _STRIDE_BYTES * _STRIDE_BYTES
    sums = np.empty((threads, 16), np.float32)

    def read(me: int) -> None:
        _read(start + me * part, part, sums[me].ctypes.data)

    read(0)
    return [threads * part / seconds_together(threads, read) / 1e9 for _ in range(repetitions)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    for count in arguments.threads:
        rates = read_gb_s(count, int(arguments.gib * GIB), arguments.repetitions)
        print(f"{count} threads: {statistics.median(rates):.1f} GB/s  (each: {' '.join(f'{r:.1f}' for r in rates)})")
