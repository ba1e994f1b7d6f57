"""Drawing one token from a row of logits, inside the token loop.

The chain is llama.cpp's default: logit bias, penalties, top-k, typical, top-p, min-p, temperature, draw. Greedy
(temperature 0) is the largest logit after bias and penalties. Equal logits go by lower id. The random number depends on
seed and position alone, so that a replayed position draws the same token. `sampling_reference` is the same in NumPy.

Parameters lie at an address, SAMPLING_BYTES long; what each field means is in `write_sampling`.
"""

from __future__ import annotations

import ctypes
import math
import struct
from functools import cache
from typing import Any

import numpy as np

from hotneuron.kernels import selection
from hotneuron.kernels.jit import kernel, njit
from hotneuron.kernels.memory import get_f32, get_i32, get_i64, put_f32, put_i32, put_i64
from hotneuron.kernels.selection import (
    MINUS_INFINITY,
    argmax,
    copy_tail,
    exp_sum,
    index_of,
    keys_at_least,
    largest_k,
    max_of,
    pick_by_mass,
    sort_descending,
    value_at,
)

SEED, TOP_K, N_LOGPROBS, N_BIAS = 0, 8, 16, 24
TEMPERATURE, TOP_P, MIN_P, TYPICAL_P = 32, 36, 40, 44
REPEAT, PRESENCE, FREQUENCY, LAST_TOKENS, BIAS = 48, 52, 56, 60, 64
MAX_BIAS, MAX_HISTORY, MAX_TOP = 256, 256, 20
_PACKED = "<Q3q7fi"  # all before the bias
SAMPLING_BYTES = BIAS + 8 * MAX_BIAS
OUT_LOGPROB, OUT_TOP, OUT_BYTES = 0, 4, 192

_TAIL, _COUNTS = 0, 64
_SAVED = _COUNTS + selection.COUNTS_BYTES
_KEYS = _SAVED + 8 * (MAX_BIAS + MAX_HISTORY)


def scratch_bytes(vocab: int) -> int:
    """Bytes of working memory that `sample` needs."""
    return _KEYS + 24 * vocab + 8192


def write_sampling(
    target: int | np.ndarray | bytearray | memoryview,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    typical_p: float,
    repeat_penalty: float,
    presence_penalty: float,
    frequency_penalty: float,
    penalty_last_tokens: int,
    logit_bias: tuple[tuple[int, float], ...],
    seed: int,
    logprobs: int | None,
) -> None:
    """Write parameters (llama.cpp's names and meanings) to an address or a writable buffer of SAMPLING_BYTES.

    top_k 0, top_p 1, min_p 0 and typical_p 1 mean off; penalty_last_tokens is for the caller of `sample`, who cuts the
    history; logprobs: None, or how many of the most likely tokens to report, at most 20.
    """
    if len(logit_bias) > MAX_BIAS:
        raise ValueError(f"logit_bias has {len(logit_bias)} entries; at most {MAX_BIAS}")
    n_logprobs = -1 if logprobs is None else logprobs
    integers = (seed, top_k, n_logprobs, len(logit_bias))
    shape = (temperature, top_p, min_p, typical_p)
    penalties = (repeat_penalty, presence_penalty, frequency_penalty, penalty_last_tokens)
    packed = struct.pack(_PACKED, *integers, *shape, *penalties)
    packed += b"".join(struct.pack("<if", token, bias) for token, bias in logit_bias)
    if isinstance(target, int):
        ctypes.memmove(target, packed, len(packed))
    else:
        memoryview(target).cast("B")[: len(packed)] = packed


def read_sampling(source: bytes | memoryview | np.ndarray) -> dict[str, Any]:
    """What `write_sampling` wrote, by its names."""
    fields = struct.unpack_from(_PACKED, memoryview(source).cast("B"))
    seed, top_k, n_logprobs, n_bias, temperature, top_p, min_p, typical_p, repeat, presence, frequency, last = fields
    pairs = struct.unpack_from("<" + "if" * n_bias, memoryview(source).cast("B"), BIAS)
    return {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "typical_p": typical_p,
        "repeat_penalty": repeat,
        "presence_penalty": presence,
        "frequency_penalty": frequency,
        "penalty_last_tokens": last,
        "logit_bias": tuple(zip(pairs[0::2], pairs[1::2], strict=True)),
        "seed": seed,
        "logprobs": None if n_logprobs < 0 else n_logprobs,
    }


def write_logprobs(target: np.ndarray, logprob: float, top: list[tuple[int, float]]) -> None:
    """What `sample` writes to OUT_BYTES, for `read_logprobs`."""
    pairs = [*top, *[(-1, -math.inf)] * (MAX_TOP - len(top))]
    struct.pack_into("<f" + "if" * MAX_TOP, memoryview(target), 0, logprob, *[value for pair in pairs for value in pair])


def read_logprobs(out: bytes | memoryview | np.ndarray) -> tuple[float, tuple[tuple[int, float], ...]]:
    """What `sample` left in OUT_BYTES: the drawn token's log-probability; (id, log-probability) of the most likely."""
    fields = struct.unpack_from("<f" + "if" * MAX_TOP, memoryview(out).cast("B"))
    pairs = zip(fields[1::2], fields[2::2], strict=True)
    return fields[0], tuple((token, logprob) for token, logprob in pairs if token >= 0)


@njit
def _mix(x):
    """splitmix64's finalizer (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@njit
def uniform(seed, position):
    """A number in [0, 1) that depends on seed and position alone."""
    state = _mix(np.uint64(seed)) + np.uint64(0x9E3779B97F4A7C15) * np.uint64(position + 1)
    return np.float64(np.int64(_mix(state) >> np.uint64(11))) * 2.0**-53


@njit
def _save(logits, token, saved, n_saved):
    """Note a logit before its first change."""
    for i in range(n_saved):
        if get_i32(saved + 8 * i) == token:
            return n_saved
    put_i32(saved + 8 * n_saved, np.int32(token))
    put_f32(saved + 8 * n_saved + 4, get_f32(logits + 4 * token))
    return n_saved + 1


@njit
def _bias_and_penalize(logits, vocab, sampling, history, n_history, saved):
    """Change logits in place; returns how many (id, former logit) it left in `saved`."""
    keep = get_i64(sampling + N_LOGPROBS) >= 0
    n_saved = np.int64(0)
    for i in range(min(get_i64(sampling + N_BIAS), MAX_BIAS)):
        token = np.int64(get_i32(sampling + BIAS + 8 * i))
        if 0 <= token < vocab:
            if keep:
                n_saved = _save(logits, token, saved, n_saved)
            put_f32(logits + 4 * token, get_f32(logits + 4 * token) + get_f32(sampling + BIAS + 8 * i + 4))
    repeat, presence = get_f32(sampling + REPEAT), get_f32(sampling + PRESENCE)
    frequency = get_f32(sampling + FREQUENCY)
    if repeat == np.float32(1) and presence == np.float32(0) and frequency == np.float32(0):
        return n_saved
    history += 4 * max(0, n_history - MAX_HISTORY)
    n_history = min(n_history, MAX_HISTORY)
    for i in range(n_history):
        token = np.int64(get_i32(history + 4 * i))
        count, seen = 0, False
        for j in range(n_history):
            if get_i32(history + 4 * j) == token:
                count += 1
                seen = seen or j < i
        if seen or not 0 <= token < vocab:
            continue
        if keep:
            n_saved = _save(logits, token, saved, n_saved)
        value = get_f32(logits + 4 * token)
        value = value * repeat if value <= np.float32(0) else value / repeat
        put_f32(logits + 4 * token, value - (np.float32(count) * frequency + presence))
    return n_saved


@njit
def _mass(logits, keys, n, largest):
    """Sum of e^(logit - largest) over n candidates."""
    total = 0.0
    for i in range(n):
        total += math.exp(np.float64(value_at(logits + 4 * index_of(get_i64(keys + 8 * i)))) - largest)
    return total


@njit
def _typical(logits, keys, n, other, counts, typical_p, largest):
    """Keep those whose surprise is nearest to the entropy, until their mass passes typical_p (Meister et al. 2022)."""
    total = _mass(logits, keys, n, largest)
    log_total, entropy = math.log(total), 0.0
    for i in range(n):
        surprise = log_total + largest - np.float64(value_at(logits + 4 * index_of(get_i64(keys + 8 * i))))
        p = math.exp(-surprise)
        if p > 0:
            entropy += p * surprise
    for i in range(n):
        surprise = log_total + largest - np.float64(value_at(logits + 4 * index_of(get_i64(keys + 8 * i))))
        # A distance is not negative, so its bits order as integers; they replace the logit in the key for one sort.
        put_f32(counts, np.float32(abs(surprise - entropy)))
        put_i64(other + 8 * i, (-np.int64(get_i32(counts)) << 32) | (0x7FFFFFFF - i))
    scores = other
    sort_descending(scores, n, other + 8 * n, counts)
    kept, running = n, 0.0
    for i in range(n):
        key = get_i64(keys + 8 * index_of(get_i64(scores + 8 * i)))
        put_i64(scores + 8 * i, key)
        running += math.exp(np.float64(value_at(logits + 4 * index_of(key))) - largest)
        if running / total > typical_p:
            kept = i + 1
            break
    for i in range(kept):
        put_i64(keys + 8 * i, get_i64(scores + 8 * i))
    sort_descending(keys, kept, other, counts)
    return kept


@njit
def _top_p(logits, keys, n, top_p, largest, total):
    """How many of the first candidates it takes to hold top_p of the total mass."""
    running = 0.0
    for i in range(n):
        running += math.exp(np.float64(value_at(logits + 4 * index_of(get_i64(keys + 8 * i)))) - largest)
        if running >= top_p * total:
            return i + 1
    return n


@njit
def _draw(logits, keys, n, temperature, largest, u):
    """One of n candidates in descending order, with the probabilities of a softmax at a temperature."""
    total = 0.0
    for i in range(n):
        total += math.exp((np.float64(value_at(logits + 4 * index_of(get_i64(keys + 8 * i)))) - largest) / temperature)
    target, running, chosen = u * total, 0.0, index_of(get_i64(keys))
    for i in range(n):
        index = index_of(get_i64(keys + 8 * i))
        mass = math.exp((np.float64(value_at(logits + 4 * index)) - largest) / temperature)
        if mass > 0:
            chosen = index
            running += mass
            if running > target:
                break
    return chosen


@njit
def _window(logits, vocab, tail, largest, enough):
    """How far below the largest logit (a negative number) candidates reach that hold a mass of `enough`."""
    # All but 1e-7 of the mass lies within this; what is beyond, typical and top-p drop anyway.
    widest = np.float32(-(math.log(np.float64(vocab)) + 16.2))
    window = np.float32(-4)
    while window > widest and exp_sum(logits, vocab, tail, largest, np.float32(1), window) < enough:
        window *= np.float32(1.5)
    return max(window, widest)


@njit
def _choose(logits, vocab, sampling, position, scratch):
    """The token that the chain draws from biased and penalized logits."""
    tail, counts, keys = scratch + _TAIL, scratch + _COUNTS, scratch + _KEYS
    other = keys + 8 * vocab
    copy_tail(logits, vocab, tail)
    temperature = get_f32(sampling + TEMPERATURE)
    if not temperature > np.float32(0):
        return argmax(logits, vocab, tail)
    largest = max_of(logits, vocab, tail)
    if largest == MINUS_INFINITY:
        return 0
    top_k, min_p = get_i64(sampling + TOP_K), get_f32(sampling + MIN_P)
    top_p, typical_p = np.float64(get_f32(sampling + TOP_P)), np.float64(get_f32(sampling + TYPICAL_P))
    u = uniform(get_i64(sampling + SEED), position)
    # How far below the largest min-p reaches.
    reach = np.float32(math.log(np.float64(min_p))) if min_p > np.float32(0) else MINUS_INFINITY
    total = 0.0
    if 0 < top_k < vocab:
        n = top_k
        largest_k(logits, vocab, tail, n, keys)
        total = _mass(logits, keys, n, np.float64(largest))
    elif typical_p < 1 or top_p < 1 or min_p > np.float32(0):
        # Top-p and min-p both keep the first of the sorted candidates: their order is free, min-p's bound goes first.
        window = reach
        if typical_p < 1:
            window = _window(logits, vocab, tail, largest, np.inf)
        elif top_p < 1:
            total = exp_sum(logits, vocab, tail, largest, np.float32(1), np.float32(-87))
            if window == MINUS_INFINITY:
                window = _window(logits, vocab, tail, largest, total * (top_p + 1e-6))
        n = keys_at_least(logits, vocab, tail, max(largest + window, -selection.LARGEST), keys)
        sort_descending(keys, n, other, counts)
    else:
        scale = np.float32(min(1 / np.float64(temperature), 1e30))
        return pick_by_mass(logits, vocab, tail, largest, scale, u, keys)
    if typical_p < 1:
        n = _typical(logits, keys, n, other, counts, typical_p, np.float64(largest))
        largest = value_at(logits + 4 * index_of(get_i64(keys)))
        total = _mass(logits, keys, n, np.float64(largest))
    if top_p < 1:
        n = _top_p(logits, keys, n, top_p, np.float64(largest), total)
    while n > 1 and value_at(logits + 4 * index_of(get_i64(keys + 8 * (n - 1)))) < largest + reach:
        n -= 1
    return _draw(logits, keys, n, np.float64(temperature), np.float64(largest), u)


@njit
def _report_top(logits, vocab, sampling, scratch, out):
    """Write the most likely tokens of the unchanged logits; returns the largest logit and the log of the mass by it."""
    tail, keys = scratch + _TAIL, scratch + _KEYS
    copy_tail(logits, vocab, tail)
    largest, log_mass = max_of(logits, vocab, tail), 0.0
    if largest == MINUS_INFINITY:
        largest = np.float32(0)  # and so every log-probability is minus infinity
    else:
        log_mass = math.log(exp_sum(logits, vocab, tail, largest, np.float32(1), np.float32(-87)))
    n = min(get_i64(sampling + N_LOGPROBS), MAX_TOP, vocab)
    if n > 0:
        largest_k(logits, vocab, tail, n, keys)
    for i in range(MAX_TOP):
        token, logprob = -1, -np.inf
        if i < n:
            token = index_of(get_i64(keys + 8 * i))
            logprob = np.float64(value_at(logits + 4 * token)) - largest - log_mass
        put_i32(out + OUT_TOP + 8 * i, np.int32(token))
        put_f32(out + OUT_TOP + 8 * i + 4, np.float32(logprob))
    return np.float64(largest), log_mass


@njit
def sample(logits, vocab, sampling, history, n_history, position, scratch, out):
    """Draw the token of one position; returns its id.

    logits: f32 [vocab], changed in place by bias and penalties. sampling: see `write_sampling`. history: int32
    [n_history], the tokens that the penalties count, at most MAX_HISTORY. scratch: scratch_bytes(vocab), aligned
    to 8. out: OUT_BYTES, written only where log-probabilities are asked for (see `read_logprobs`); these are of the
    model's own distribution, before bias, penalties, truncation and temperature. NaN logits count as minus infinity;
    where every logit does, the token is 0.
    """
    reported = get_i64(sampling + N_LOGPROBS) >= 0
    largest, log_mass = 0.0, 0.0
    if reported:
        largest, log_mass = _report_top(logits, vocab, sampling, scratch, out)
    saved = scratch + _SAVED
    n_saved = _bias_and_penalize(logits, vocab, sampling, history, n_history, saved)
    token = _choose(logits, vocab, sampling, position, scratch)
    if reported:
        value = value_at(logits + 4 * token)
        for i in range(n_saved):
            if get_i32(saved + 8 * i) == token:
                value = value_at(saved + 8 * i + 4)
        put_f32(out + OUT_LOGPROB, np.float32(np.float64(value) - largest - log_mass))
    return token


@cache
def sample_address() -> int:
    """`sample` as a compiled kernel that writes the token to an int32 address, its last argument."""

    @kernel(9)
    def draw(logits, vocab, sampling, history, n_history, position, scratch, out, token):
        put_i32(token, np.int32(sample(logits, vocab, sampling, history, n_history, position, scratch, out)))

    _KEPT.append(draw)
    return draw.address


_KEPT: list[object] = []  # NOTE compiled code lives only as long as the object that holds it
