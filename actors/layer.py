"""One layer of the step program, phase by phase; returns OK or why it left.

Attention and FFN read their inputs one after the other, with a meeting after each; where they stand side by side both
read the layer's input, their partial sums are added in the slot, and there is one meeting.
"""

from __future__ import annotations

from hotneuron.actors.attention_layer import attend_to_slot
from hotneuron.actors.ffn_layer import neurons_to_slot
from hotneuron.actors.fields import (
    ATTENTION_MASK,
    ATTN_NORM,
    ATTN_NORM_BIAS,
    FFN_INPUT,
    FFN_NORM,
    FFN_NORM_BIAS,
    FIRST_HEAD,
    FIRST_NEURON,
    HAS_PREDICTOR,
    IN_BIAS,
    IS_SPARSE,
    LAST_HEAD,
    LAST_NEURON,
    MASK_BEFORE,
    MEETING,
    N8,
    NF,
    NORM,
    O_BIAS,
    PARALLEL,
    QKV_INPUT,
    X8,
    XF,
)  # fmt: skip
from hotneuron.actors.meeting import barrier, mark, meet
from hotneuron.actors.products import normed_rows
from hotneuron.actors.sparse_layer import active_to_slot, predict
from hotneuron.kernels.jit import njit
from hotneuron.kernels.sync import OK


@njit
def run_layer(p, layer, depth, state, thread, n_rows, step):
    has_heads, parallel = p[LAST_HEAD] > p[FIRST_HEAD], p[PARALLEL] != 0
    mask, norm, norm_bias = layer[MASK_BEFORE], layer[ATTN_NORM], layer[ATTN_NORM_BIAS]
    normed_rows(p, state, thread, n_rows, mask, layer[IN_BIAS], norm, norm_bias, layer[QKV_INPUT], p[X8], p[XF])
    norm, norm_bias = layer[FFN_NORM], layer[FFN_NORM_BIAS]
    if parallel and p[N8] != p[X8]:
        normed_rows(p, state, thread, n_rows, 0, 0, norm, norm_bias, layer[FFN_INPUT], p[N8], p[NF])
    code = barrier(p, state)
    if code != OK:
        return code
    mark(p, state, thread, NORM)
    if parallel and p[HAS_PREDICTOR] != 0:  # NOTE before attention writes to the slot of the next meeting
        code = predict(p, layer, state, thread, n_rows)
        if code != OK:
            return code
    if has_heads:
        code = attend_to_slot(p, layer, depth, state, thread, n_rows, step)
        if code != OK:
            return code
    if not parallel:
        code = meet(p, state, thread)
        if code != OK:
            return code
        mark(p, state, thread, MEETING)
        mask, bias = p[ATTENTION_MASK], layer[O_BIAS]
        normed_rows(p, state, thread, n_rows, mask, bias, norm, norm_bias, layer[FFN_INPUT], p[N8], p[NF])
        code = barrier(p, state)
        if code != OK:
            return code
        mark(p, state, thread, NORM)
        if p[HAS_PREDICTOR] != 0:
            code = predict(p, layer, state, thread, n_rows)
            if code != OK:
                return code
    if layer[LAST_NEURON] > layer[FIRST_NEURON]:
        if p[IS_SPARSE] != 0:
            code = active_to_slot(p, layer, state, thread, n_rows, parallel and has_heads)
        else:
            code = neurons_to_slot(p, layer, state, thread, n_rows, parallel and has_heads)
        if code != OK:
            return code
    code = meet(p, state, thread)
    mark(p, state, thread, MEETING)
    return code
