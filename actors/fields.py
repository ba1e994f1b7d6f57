"""The words of the step program's two tables, by name, and the constants that its parts share.

`p` is int64, one a worker: where the arena, the shard, the weights and the worker's memory lie. `layers` is int64
[layer][...].
"""

from hotneuron.kernels.batches import SPARSE_BATCH, SUB_BATCH, UNIT
from hotneuron.kernels.batches import TILE_SIZES as GROUP_SIZES

__all__ = ["GROUP_SIZES", "SPARSE_BATCH", "SUB_BATCH", "UNIT"]  # beside all that is defined here

# `p`: sizes of the engine.
(
    ARENA, N_WORKERS, ME, N_THREADS, TEAM, DEADLINE_NS, COUNTERS, COMMAND, SEGMENTS, STOP_IDS, TOKENS, POSITIONS,
    ROW_SLOTS,
    LOGIT_ROWS, LOGIT_SEGMENTS, TABLES, SAMPLING, HISTORY, DRAWN, LOGPROBS, LOGITS, SLOTS, BANK_BYTES, SLOT_BYTES,
    MAX_SLOTS,
    MAX_BLOCKS, HIDDEN, WIDTH, WIDE, VOCAB, LOGIT_STRIDE, N_LAYERS, HEAD_DIM, HEAD, ROPE_DIMS, ROPE, QUERY_SCALE,
    EPS, WINDOW,
    GROUP_HEADS, ATTENTION_MASK, FFN_MASK,  # whose sums to add: FFN_MASK of the last layer
    LAYER_NORM, ACTIVATION, PARALLEL, IS_SPARSE, HAS_PREDICTOR, TALL,
    HISTOGRAM_BYTES,  # of a layer; 0: none is kept
    # The shard.
    FIRST_HEAD, LAST_HEAD, FIRST_KV, LAST_KV, Q_TILES, K_TILES, O_COLUMNS, O_SKEW, NEURON_UNITS, VOCAB_TILE,
    VOCAB_TILES,
    # Weights outside the layers.
    EMBEDDING, EMBEDDING_FORMAT, EMBEDDING_TILE, PLACES, PLACES_FORMAT, PLACES_TILE, LAST_BIAS, OUTPUT_NORM,
    OUTPUT_NORM_BIAS, OUTPUT, OUTPUT_FORMAT, OUTPUT_TILE,
    # Memory of the worker. N8 and NF, which neurons read, are X8 and XF unless attention has a norm of its own.
    X, X8, XF, N8, NF, QKV, QKV_STRIDE, ATTENTION, A8, AF, H8, HF, KV, KV_LAYER_BYTES, KV_BLOCK_BYTES, KV_HEAD_BYTES,
    # Where only active neurons are computed (see `sparse_layer`).
    PREDICTED8, PREDICTEDF, HIDDEN8, HIDDENF, ACTIVE, ACTIVE_STRIDE, ACTIVE_LISTS, ACTIVE_COUNTS, UNIT_LISTS,
    DOWN_VALUES, SUM, INPUT_SIGNS,
    # Memory of a thread: base and size of its stretch, then offsets in it.
    THREAD, THREAD_BYTES, T_ROW, T_QUERIES, T_POSITIONS, T_HEADS, T_SCORES, SCORES_STRIDE, T_GATE, T_UP, T_SAMPLE,
    T_TILE, T_ROWS, T_DOWN,
    # Compiled kernels: int64 addresses [format][group size], [group size], and one.
    TILE_KERNELS, ATTEND_KERNELS, SAMPLE_KERNEL, GATHER_KERNEL,
    TRACE,
    P_SIZE,
) = range(120)  # fmt: skip

# `layers`: a matrix is its address, format and bytes from tile to tile.
(
    ATTN_NORM, FFN_NORM, Q, Q_FORMAT, Q_TILE, K, K_FORMAT, K_TILE, V, V_FORMAT, V_TILE, O, O_FORMAT, O_TILE, GATE,
    GATE_FORMAT,
    GATE_TILE, UP, UP_FORMAT, UP_TILE, DOWN, DOWN_FORMAT, DOWN_TILE, Q_BIAS, K_BIAS, V_BIAS, Q_NORM, K_NORM,
    ATTN_NORM_BIAS, FFN_NORM_BIAS, O_BIAS, UP_BIAS, IN_BIAS,  # IN_BIAS is that of the layer before's down product
    QKV_INPUT, O_INPUT,
    FFN_INPUT, DOWN_INPUT,
    # My neurons of this layer, and whose partial sums the layer before it left to add (bits; 0 before the first).
    FIRST_NEURON, LAST_NEURON, MASK_BEFORE,
    # Where only active neurons are computed: rows by neuron, the down projection (see `kernels.down_layout`), the
    # predictor, addresses of the threshold and of the counters.
    REAL_NEURONS, GATE_ROWS, GATE_ROW_BYTES, UP_ROWS, UP_ROW_BYTES, DOWN_KERNEL, DOWN_ROWS, DOWN_UNIT_BYTES,
    DOWN_ROW_BYTES,
    DOWN_SCALES_AT, DOWN_MINIMUMS_AT, DOWN_OFFSET, DOWN_STRIPE_LINES, FC1, FC1_FORMAT, FC1_TILE, FC1_TILES, FC1_INPUT,
    RANK,
    FC2, FC2_FORMAT, FC2_TILE, FC2_INPUT, SIGNS, SIGNS_TILE, THRESHOLD, FIRES, ADDS, COUNTS, HISTOGRAM, LAYER_SIZE,
) = range(71)  # fmt: skip

INT8, FLOATS = 1, 2  # what a phase's input must be made as: bits of QKV_INPUT ...

# Phases of a step, as `TRACE` counts their nanoseconds (int64 [phase]; first thread of each worker).
(
    EMBED, NORM, QKV_PRODUCT, ROTATE, ATTEND, O_PRODUCT, MEETING, NEURONS, DOWN_PRODUCT, HEAD_PRODUCT, DRAWING,
    PREDICTOR, N_PHASES,
) = range(13)
PHASES = (
    "embed", "norm", "qkv", "rotate", "attention", "output", "exchange", "gate_up", "down", "head", "sample",
    "predictor",
)  # fmt: skip
