"""What attention and neurons share in the step program: rows made into inputs of products, and the products.

NOTE addresses are not checked here. Whatever a file or a request can influence (sizes, token ids, block ids,
positions) is checked by `pack`, `plan`, `scheduler` and `driver` before it reaches the tables.
"""

from __future__ import annotations

from hotneuron.actors.fields import (
    EPS,
    FLOATS,
    GROUP_SIZES,
    HIDDEN,
    INPUT_SIGNS,
    INT8,
    LAYER_NORM,
    ME,
    N_THREADS,
    N_WORKERS,
    SLOT_BYTES,
    SUB_BATCH,
    T_GATE,
    T_ROW,
    THREAD,
    THREAD_BYTES,
    TILE_KERNELS,
    WIDE,
    WIDTH,
    X,
)  # fmt: skip
from hotneuron.actors.meeting import add_partials, bank, padded_rows, part, size_index
from hotneuron.kernels import formats
from hotneuron.kernels.activations import blank_32, clear_block, group_bytes, group_of, interleave_block, quantize_32
from hotneuron.kernels.elementwise import layer_norm, rms_norm
from hotneuron.kernels.jit import njit
from hotneuron.kernels.matmul import AHEAD_BYTES, matmul_tile
from hotneuron.kernels.memory import get_f32, get_i64
from hotneuron.kernels.signs import take_signs
from hotneuron.kernels.simd import add, load_f32, store_f32


@njit
def make_input(kind, values, block, columns, n, token, int8, floats):
    """32 floats as columns 32 block .. of a token of a group, in the kinds that the next product needs.

    values: their address; 0 is a token that is not there, past the rows of the batch.
    """
    if kind & INT8:
        if values != 0:
            quantize_32(values, int8, columns, n, token, block)
        else:
            blank_32(int8, columns, n, token, block)
    if kind & FLOATS:
        if values != 0:
            interleave_block(values, floats, n, token, block)
        else:
            clear_block(floats, n, token, block)


@njit
def row_input(p, kind, values, index, n, int8, floats):
    """A row of WIDE floats (zeros past the hidden size) as row `index` of the inputs there; 0 is a row not there."""
    columns = p[WIDE]
    int8 += index // n * group_bytes(columns, n)
    floats += index // n * 4 * n * columns
    for block in range(columns // 32):
        at = values + 128 * block if values != 0 else 0
        make_input(kind, at, block, columns, n, index % n, int8, floats)


@njit
def norm_row(p, x, weight, bias, out):
    if p[LAYER_NORM] != 0:
        layer_norm(x, weight, bias, out, p[WIDE], p[HIDDEN], get_f32(p[EPS]))
    else:
        rms_norm(x, weight, out, p[WIDE], p[HIDDEN], get_f32(p[EPS]))


@njit
def normed_rows(p, state, thread, n_rows, mask, product_bias, norm, norm_bias, kind, int8, floats):
    """Rows: add the partial sums of the last meeting, norm, and make the next product's input at int8 and floats.

    mask: the workers whose sums the meeting holds; 0: the rows have them already. NOTE a thread takes the same rows
    every time and nobody else's, so only what reads the input needs a barrier first.
    """
    n = group_of(n_rows)
    low, high = part(padded_rows(n_rows), thread, p[N_THREADS])
    row_buffer = p[THREAD] + thread * p[THREAD_BYTES] + p[T_ROW]
    for row in range(low, high):
        if row >= n_rows:
            row_input(p, kind, 0, row, n, int8, floats)
            continue
        x = p[X] + row * 4 * p[WIDE]
        if mask != 0:
            add_partials(p, state, row, mask, product_bias, x)
        norm_row(p, x, norm, norm_bias, row_buffer)
        row_input(p, kind, row_buffer, row, n, int8, floats)
        if p[INPUT_SIGNS] != 0:  # the FFN's input is normed last
            take_signs(row_buffer, p[WIDE], p[INPUT_SIGNS] + row * (p[WIDE] // 8))


@njit
def tile(kernels, format_id, w, int8, floats, columns, n, n_rows, y, y_stride, ahead):
    """One tile times all rows."""
    kernel = get_i64(kernels + 8 * (GROUP_SIZES * format_id + size_index(n)))
    n_groups = (n_rows + n - 1) // n
    if format_id < formats.HALF:
        matmul_tile(kernel, w, int8, group_bytes(columns, n), n, n_groups, columns, y, y_stride, ahead)
    else:
        matmul_tile(kernel, w, floats, 4 * n * columns, n, n_groups, columns, y, y_stride, ahead)


@njit
def _tile_onto(p, thread, format_id, w, int8, floats, columns, n, n_rows, y, ahead):
    """One tile times all rows, added to what is at y, by way of the thread's own memory."""
    product = p[THREAD] + thread * p[THREAD_BYTES] + p[T_GATE]
    for start in range(0, n_rows, SUB_BATCH):
        count, first = min(SUB_BATCH, n_rows - start), start // n
        in8, inf = int8 + first * group_bytes(columns, n), floats + first * 4 * n * columns
        tile(p[TILE_KERNELS], format_id, w, in8, inf, columns, n, count, product, 64, ahead)
        for k in range(count):
            at = y + (start + k) * 4 * p[WIDTH]
            store_f32(at, add(load_f32(at), load_f32(product + 64 * k)))


@njit
def to_slot(p, state, thread, format_id, w, tile_bytes, int8, floats, columns, n_rows, is_second):
    """A product whose rows are the hidden size: my partial sum, into my slot of the next meeting.

    is_second: added to the product that is already there. NOTE a thread takes the same tiles every time, so no barrier
    lies between the two.
    """
    n, out = group_of(n_rows), bank(p, state, 1) + p[ME] * p[SLOT_BYTES]
    # A shard is a part of each row's columns: what is wanted next is the same part of the next tile.
    ahead = tile_bytes if p[N_WORKERS] > 1 else AHEAD_BYTES
    low, high = part((p[WIDTH] + 15) // 16, thread, p[N_THREADS])
    for t in range(low, high):
        at, y = w + t * tile_bytes, out + 64 * t
        if is_second:
            _tile_onto(p, thread, format_id, at, int8, floats, columns, n, n_rows, y, ahead)
        else:
            tile(p[TILE_KERNELS], format_id, at, int8, floats, columns, n, n_rows, y, 4 * p[WIDTH], ahead)
