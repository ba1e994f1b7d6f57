"""What a neuron makes of its products: an activation of its gate, times its up. Rows as in `elementwise`."""

from __future__ import annotations

import numpy as np

from hotneuron.kernels.elementwise import ONE, exp
from hotneuron.kernels.jit import njit
from hotneuron.kernels.simd import add, div, fma, load_f32, maximum, mul, splat, store_f32, sub

SILU, GELU, RELU = 0, 1, 2
GATED, UP_RELU = 4, 8  # bits beside them: out = f(gate) * up, and its up is max(0, up)
# gelu(x) = x / (1 + e^(-2 u)) with u = sqrt(2 / pi) (x + 0.044715 x^3), which is 0.5 x (1 + tanh u).
_LINEAR, _CUBIC = (np.float32(-2 * np.sqrt(2 / np.pi) * c) for c in (1, 0.044715))


def kind_of(activation: str, up_activation: str, gated: bool) -> int:
    """The `kind` of a model's `activation`, `up_activation` and `gated`."""
    bits = (GATED if gated else 0) | (UP_RELU if up_activation == "relu" else 0)
    return {"silu": SILU, "gelu": GELU, "relu": RELU}[activation] | bits


@njit
def _function(kind, v):
    zero = splat(np.float32(0))
    if kind == RELU:
        return maximum(v, zero)
    if kind == GELU:
        power = mul(v, fma(splat(_CUBIC), mul(v, v), splat(_LINEAR)))
    else:
        power = sub(zero, v)
    return div(v, add(splat(ONE), exp(power)))


@njit
def activate(kind, gate, up, out, width):
    """out = f(gate), times up where the kind is gated; `up` is not read where it is not."""
    function, is_gated, zero = kind & 3, kind & GATED, splat(np.float32(0))
    for i in range(0, 4 * width, 64):
        v = _function(function, load_f32(gate + i))
        if is_gated:
            u = load_f32(up + i)
            v = mul(v, maximum(u, zero) if kind & UP_RELU else u)
        store_f32(out + i, v)


def activate_reference(kind: int, gate: np.ndarray, up: np.ndarray | None) -> np.ndarray:
    """`activate` of arrays of the same shape."""
    if kind & 3 == RELU:
        out = np.maximum(gate, 0)
    elif kind & 3 == GELU:
        out = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    else:
        out = gate / (1 + np.exp(-gate))
    if not kind & GATED or up is None:
        return out
    return out * (np.maximum(up, 0) if kind & UP_RELU else up)
