"""Attention over a paged f16 KV cache.

A KV block holds 16 positions. For one layer and KV head it is K [head_dim][16] (lane = position), then V [16][head_dim], in halves.
Queries of one KV head come in groups of n = 1, 2, 3, 4 or 8, interleaved f32 [head_dim][n] and already scaled. The scores of a query are
made for whole blocks from the group's first to its last; positions it may not see get weight 0, which changes no sum: a query's
result is the same bits in any group, chunk or batch.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from hotneuron.kernels.elementwise import exp
from hotneuron.kernels.jit import kernel, njit
from hotneuron.kernels.memory import get_i32
from hotneuron.kernels.simd import (
    add,
    drop_first,
    keep_first,
    load_f16,
    load_f32,
    max_lanes,
    maximum,
    mul,
    prefetch,
    scatter_f16,
    splat,
    store_f16,
    store_f32,
    sub,
    sum_lanes,
)
from hotneuron.kernels.tokens import add_each, fma_each, fma_near, store_each, zeros_f32

BLOCK_POSITIONS = 16
GROUP_SIZES = (1, 2, 3, 4, 8)
MINUS_INFINITY = np.float32(-np.inf)


def head_block_bytes(head_dim: int) -> int:
    """Bytes of one block of one layer and KV head."""
    return 2 * BLOCK_POSITIONS * head_dim * 2


@njit
def store_kv(block, position, k, v, head_dim):
    """Write one position's f32 key and value (addresses) into its KV block (address of this head's part)."""
    lane = position % 16
    from_k = block + 2 * lane
    from_v = block + 32 * head_dim + 2 * head_dim * lane
    for d in range(0, head_dim, 16):
        scatter_f16(from_k + 32 * d, 32, load_f32(k + 4 * d))
        store_f16(from_v + 2 * d, load_f32(v + 4 * d))


@njit
def softmax(scores, first, seen, n_blocks):
    """Scores of 16 * n_blocks positions to weights that sum to 1, 0 outside first..seen-1. first < seen."""
    largest = splat(MINUS_INFINITY)
    for b in range(n_blocks):
        v = load_f32(scores + 64 * b)
        if seen < 16 * (b + 1):
            v = keep_first(v, max(seen - 16 * b, 0))
        if first > 16 * b:
            v = drop_first(v, min(first - 16 * b, 16))
        store_f32(scores + 64 * b, v)
        largest = maximum(largest, v)
    top = splat(max_lanes(largest))
    total = splat(np.float32(0))
    for b in range(n_blocks):
        v = exp(sub(load_f32(scores + 64 * b), top))
        store_f32(scores + 64 * b, v)
        total = add(total, v)
    inverse = splat(np.float32(1) / sum_lanes(total))
    for b in range(n_blocks):
        store_f32(scores + 64 * b, mul(load_f32(scores + 64 * b), inverse))


@cache
def attend_address(n: int) -> int:
    """The compiled kernel for groups of n queries of one KV head:

        attend(count, queries, positions, window, cache, table, block_stride, head_dim, scores, stride, out)

    count <= n: how many are real. queries: f32 [head_dim][n], scaled. positions: int32 [n], ascending; those past `count` repeat
    the last. window: positions each sees, itself included; 0 is all. cache: address of this layer's and head's part of block 0,
    block_stride bytes from block to block. table: int32 block ids of the sequence. head_dim: a multiple of 16. scores: scratch
    f32 [n][stride / 4]. out: f32 [n][head_dim], written for all n.
    """

    @kernel(11)
    def attend(count, queries, positions, window, cache, table, block_stride, head_dim, scores, stride, out):
        last = np.int64(get_i32(positions + 4 * (count - 1)))
        start = max(np.int64(get_i32(positions)) + 1 - window, 0) if window > 0 else 0
        first_block, end_block = start // 16, last // 16 + 1
        for b in range(first_block, end_block):
            key = cache + get_i32(table + 4 * b) * block_stride
            coming = cache + get_i32(table + 4 * min(b + 1, end_block - 1)) * block_stride
            even, odd = zeros_f32(n), zeros_f32(n)  # two sums a query: one chain of multiply-adds would wait for itself
            for d in range(0, head_dim, 2):
                # Blocks lie apart and are short, so hardware does not see them coming: the next keys, and these values.
                prefetch(coming + 32 * d)
                prefetch(key + 32 * head_dim + 32 * d)
                even = fma_near(even, load_f16(key + 32 * d), queries + 4 * n * d)
                odd = fma_near(odd, load_f16(key + 32 * d + 32), queries + 4 * n * d + 4 * n)
            store_each(scores + 64 * (b - first_block), stride, add_each(even, odd))
        for k in range(count):
            position = np.int64(get_i32(positions + 4 * k))
            visible_from = max(position + 1 - window, 0) if window > 0 else 0
            softmax(scores + k * stride, visible_from - 16 * first_block, position + 1 - 16 * first_block, end_block - first_block)
        d = 0
        while d < head_dim:
            pair = d + 32 <= head_dim
            low, high = zeros_f32(n), zeros_f32(n)
            for b in range(first_block, end_block):
                value = cache + get_i32(table + 4 * b) * block_stride + 32 * head_dim + 2 * d
                w = scores + 64 * (b - first_block)
                for _ in range(16):
                    low = fma_each(low, load_f16(value), w, stride)
                    if pair:
                        high = fma_each(high, load_f16(value + 32), w, stride)
                    value += 2 * head_dim
                    w += 4
            store_each(out + 4 * d, 4 * head_dim, low)
            if pair:
                store_each(out + 4 * d + 64, 4 * head_dim, high)
            d += 32

    _KEPT.append(attend)
    return attend.address


_KEPT: list[object] = []  # NOTE compiled code lives only as long as the object that holds it


def attention_reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, positions: np.ndarray, window: int = 0) -> np.ndarray:
    """q [queries, head_dim] (scaled), k and v [context, head_dim], positions [queries]: each sees itself and what came before."""
    context = np.arange(len(k))
    s = q.astype(np.float64) @ k.T.astype(np.float64)
    hidden = context > positions[:, None]
    if window:
        hidden |= context <= positions[:, None] - window
    s[hidden] = -np.inf
    w = np.exp(s - s.max(axis=1, keepdims=True))
    return (w / w.sum(axis=1, keepdims=True) @ v.astype(np.float64)).astype(np.float32)
