"""Sampling against its NumPy reference, exact distributions, and logits no model should give."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from hotneuron.kernels import sampling
from hotneuron.kernels.sampling_reference import (
    distribution_reference,
    logprobs_reference,
    penalized_reference,
    uniform_reference,
)

PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
NEUTRAL = {
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "penalty_last_tokens": 64,
    "logit_bias": (),
}
DEFAULTS = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "typical_p": 1.0,
    "seed": 0,
    "logprobs": None,
} | NEUTRAL
GUARD = 0xA5


class Draws:
    """Calls `sample` on copies and checks that it writes nowhere but into its buffers."""

    def __init__(self, logits, history=(), **params):
        self.params = DEFAULTS | params
        self.clean = np.asarray(logits, np.float32)
        self.history = np.asarray([*history, 0], np.int32)
        self.n_history = len(history)
        self.sampling = np.zeros(sampling.SAMPLING_BYTES, np.uint8)
        sampling.write_sampling(self.sampling, **self.params)
        self.scratch_bytes = sampling.scratch_bytes(len(self.clean))
        self.scratch = np.full(self.scratch_bytes + 64, GUARD, np.uint8)
        self.out = np.full(sampling.OUT_BYTES + 64, GUARD, np.uint8)
        self.logits = np.zeros(len(self.clean) + 16, np.float32)
        self.logits[len(self.clean) :] = np.inf  # a kernel that read past the end would choose these

    def __call__(self, position: int = 0) -> int:
        n = len(self.clean)
        self.logits[:n] = self.clean
        token = sampling.sample(
            self.logits.ctypes.data, n, self.sampling.ctypes.data, self.history.ctypes.data, self.n_history, position,
            self.scratch.ctypes.data, self.out.ctypes.data,
        )  # fmt: skip
        assert (self.scratch[self.scratch_bytes :] == GUARD).all() and (self.out[sampling.OUT_BYTES :] == GUARD).all()
        assert np.isposinf(self.logits[n:]).all()
        assert 0 <= token < n
        return token

    def check(self, position: int) -> None:
        """The token is the reference's: the random number falls on its stretch of the running sum, but for rounding."""
        ids, p = distribution_reference(self.clean, self.history[: self.n_history].tolist(), **self.params)
        token = self(position)
        assert token in ids, (token, ids[:10])
        high = np.cumsum(p)
        at = ids.tolist().index(token)
        u = uniform_reference(self.params["seed"], position)
        assert high[at] - p[at] - 1e-5 <= u <= high[at] + 1e-5, (token, u, high[at])
        assert p[at] > 0 or len(ids) == 1


def _normal(rng, n):
    return rng.standard_normal(n) * rng.choice([0.01, 1, 3, 30])


def _with(value):
    def make(rng, n):
        x = _normal(rng, n)
        x[rng.random(n) < 0.3] = value
        return x

    return make


def _one_hot(rng, n):
    x = np.full(n, -np.inf)
    x[rng.integers(n)] = rng.standard_normal()
    return x


LOGITS = {
    "normal": _normal,
    "ties": lambda rng, n: rng.integers(-2, 3, n).astype(float),
    "all equal": lambda rng, n: np.full(n, 1.5),
    "zeros of both signs": lambda rng, n: rng.choice([0.0, -0.0], n),
    "ascending": lambda rng, n: np.arange(n) * 0.01,
    "descending": lambda rng, n: np.arange(n) * -0.01,
    "some NaN": _with(np.nan),
    "some minus infinity": _with(-np.inf),
    "some infinity": _with(np.inf),
    "extremes": lambda rng, n: rng.choice(np.array([3.4028235e38, -3.4028235e38, 0]), n),
    "one hot": _one_hot,
    "all NaN": lambda rng, n: np.full(n, np.nan),
    "all minus infinity": lambda rng, n: np.full(n, -np.inf),
}


@pytest.mark.parametrize("name", LOGITS)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_draws_what_the_reference_draws(name, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    n = data.draw(st.sampled_from([1, 2, 15, 16, 17, 63, 100, 511, 1025, 3001]))
    params = {
        "temperature": data.draw(st.sampled_from([0.0, 1e-6, 0.8, 1.0, 5.0])),
        "top_k": data.draw(st.sampled_from([0, 1, 2, 40, 700, 3001, 1 << 20])),
        "top_p": data.draw(st.sampled_from([0.0, 0.3, 0.95, 1.0])),
        "min_p": data.draw(st.sampled_from([0.0, 1e-9, 0.05, 1.0])),
        "typical_p": data.draw(st.sampled_from([0.2, 0.9, 1.0, 1.0])),
        "seed": data.draw(st.integers(0, 2**64 - 1)),
    }
    Draws(LOGITS[name](rng, n), **params).check(data.draw(st.integers(0, 1 << 20)))


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.5},
        {"top_k": 3},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"typical_p": 0.5},
        {"top_k": 6, "typical_p": 0.95, "top_p": 0.9, "min_p": 0.05, "temperature": 1.5},
        {"repeat_penalty": 1.5, "presence_penalty": 0.3, "frequency_penalty": 0.1},
        {"logit_bias": ((3, 2.0), (0, -1.0))},
    ],
    ids=str,
)
@pytest.mark.parametrize("p", [[0.4, 0.3, 0.2, 0.1], [0.02, 0.3, 0.03, 0.15, 0.05, 0.2, 0.01, 0.1, 0.04, 0.1]], ids=len)
def test_exact_probabilities(p, params):
    history = [1, 1, 3]
    draws = Draws(np.log(p), history, **(PLAIN | params | {"seed": 7}))
    tokens = np.array([draws(position) for position in range(20_000)])
    ids, expected = distribution_reference(np.log(p), history, **draws.params)
    assert set(tokens.tolist()) == set(ids.tolist())
    counts = np.array([(tokens == i).sum() for i in ids])
    if len(ids) > 1:
        assert stats.chisquare(counts, expected * len(tokens)).pvalue > 1e-3


def test_known_truncations():
    """By hand, so that the reference is not its own judge."""
    p = [0.1, 0.4, 0.2, 0.3]

    def support(**params):
        draws = Draws(np.log(p), **(PLAIN | params))
        return {draws(position) for position in range(300)}

    assert support() == {0, 1, 2, 3}
    assert support(top_k=2) == {1, 3}
    assert support(top_p=0.65) == {1, 3}
    assert support(top_p=0.75) == {1, 3, 2}
    assert support(min_p=0.6) == {1, 3}
    assert support(min_p=0.4) == {1, 2, 3}
    # Entropy 1.28: surprises 2.30, 0.92, 1.61, 1.20, so 3 is nearest, then 2, then 1.
    assert support(typical_p=0.25) == {3}
    assert support(typical_p=0.45) == {3, 2}
    assert support(typical_p=0.85) == {3, 2, 1}
    assert support(temperature=0.0) == {1}


def test_greedy_takes_the_lowest_of_equal_ids_anywhere():
    rng = np.random.default_rng(1)
    for n in (5, 16, 33, 64, 1000, 49152):
        for _ in range(20):
            x = rng.standard_normal(n)
            x[rng.integers(0, n, 3)] = 9
            assert Draws(x, temperature=0.0)() == int(np.argmax(x))


def test_top_k_of_equal_logits_takes_the_lowest_ids():
    draws = Draws(np.zeros(1000), **(PLAIN | {"top_k": 7}))
    assert {draws(position) for position in range(300)} == set(range(7))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1000),
    repeat=st.sampled_from([1.0, 0.7, 1.3]),
    presence=st.sampled_from([0.0, 0.4, -2.0]),
    frequency=st.sampled_from([0.0, 0.11, -0.5]),
    n_history=st.integers(0, 256),
    n_bias=st.sampled_from([0, 1, 5, 256]),
)
def test_penalties_and_bias_to_the_bit(seed, repeat, presence, frequency, n_history, n_bias):
    rng = np.random.default_rng(seed)
    history = rng.integers(0, 60, n_history).tolist()  # some past the vocabulary: ignored
    bias = tuple(zip(rng.integers(0, 60, n_bias).tolist(), rng.standard_normal(n_bias).tolist(), strict=True))
    params = {
        "repeat_penalty": repeat,
        "presence_penalty": presence,
        "frequency_penalty": frequency,
        "logit_bias": bias,
    }
    x = np.append(rng.standard_normal(49), 0).astype(np.float32)
    draws = Draws(x, history, temperature=0.0, **params)
    token = draws()
    expected = penalized_reference(x, history, **params)
    np.testing.assert_array_equal(draws.logits[:50], expected)
    assert token == expected.argmax()


def test_only_the_last_tokens_of_a_too_long_history_count():
    history = [0] * 10 + [1] * sampling.MAX_HISTORY
    draws = Draws([1.0, 0.9], history, temperature=0.0, presence_penalty=5.0)
    assert draws() == 0


def test_same_seed_and_position_draw_the_same():
    x = np.random.default_rng(3).standard_normal(500)
    first = Draws(x, **PLAIN, seed=11)
    tokens = [first(position) for position in range(200)]
    again = Draws(x, **PLAIN, seed=11)
    assert [again(position) for position in reversed(range(200))] == tokens[::-1]
    other = Draws(x, **PLAIN, seed=12)
    assert sum(other(position) == tokens[position] for position in range(200)) < 20
    assert len(set(tokens)) > 50


def test_random_numbers():
    for seed, position in [(0, 0), (1, 0), (0, 1), (2**63 - 1, 7), (123, 2**40)]:
        assert sampling.uniform(seed, position) == uniform_reference(seed, position)
    u = np.array([[uniform_reference(seed, position) for position in range(100)] for seed in range(100)])
    assert stats.kstest(u.ravel(), "uniform").pvalue > 1e-3
    assert stats.kstest(u[:, 0], "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(u[:, :-1].ravel(), u[:, 1:].ravel())[0, 1]) < 0.03


@pytest.mark.parametrize("name", LOGITS)
@pytest.mark.parametrize("n", [1, 3, 17, 2000])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logprobs_are_the_models_own(name, n, temperature):
    x = LOGITS[name](np.random.default_rng(n), n).astype(np.float32)
    for top in (0, 1, 5, 20):
        bias = ((0, 3.0), (n // 2, 2.0), (n // 2, 0.5))
        draws = Draws(x, [n - 1], temperature=temperature, logprobs=top, logit_bias=bias, repeat_penalty=1.2)
        token = draws()
        with np.errstate(over="ignore"):  # a difference of extremes is minus infinity
            expected = logprobs_reference(x).astype(np.float32)
        logprob, listed = sampling.read_logprobs(draws.out)
        order = np.argsort(-penalized_reference(x), kind="stable")[:top]
        assert [i for i, _ in listed] == order.tolist()
        np.testing.assert_allclose([v for _, v in listed], expected[order], rtol=1e-6, atol=2e-5)
        np.testing.assert_allclose(logprob, expected[token], rtol=1e-6, atol=2e-5)


def test_without_logprobs_nothing_is_written():
    draws = Draws(np.zeros(40))
    draws()
    assert (draws.out == GUARD).all()


def test_parameters_by_address_or_buffer():
    by_buffer = bytearray(sampling.SAMPLING_BYTES)
    by_address = np.zeros(sampling.SAMPLING_BYTES, np.uint8)
    params = DEFAULTS | {"logit_bias": ((5, 1.5),), "seed": 2**64 - 1, "logprobs": 3}
    sampling.write_sampling(by_buffer, **params)
    sampling.write_sampling(by_address.ctypes.data, **params)
    assert bytes(by_buffer) == by_address.tobytes()
    assert by_address[sampling.LAST_TOKENS :].view(np.int32)[0] == 64
    with pytest.raises(ValueError, match="logit_bias has 257 entries"):
        sampling.write_sampling(by_buffer, **(params | {"logit_bias": ((0, 0.0),) * 257}))
