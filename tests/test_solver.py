"""The solver: as good as trying everything, better than greedy or random, never beyond its budget."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotneuron.placement.solver import Problem, Solution, bytes_of, seconds_of, solve


def problem(
    seed: int, layers: int = 2, units: int = 4, groups: int = 2, tiles: int = 3, budget: float = 0.5, skew: float = 1.5
) -> Problem:
    """Random speeds; firing falls off as a power law, at another rate in each layer. budget: share of all bytes."""
    rng = np.random.default_rng(seed)
    fires = np.arange(1, units + 1)[None, :] ** -(skew * rng.uniform(0.2, 2, (layers, 1))) * rng.uniform(
        1, 4, (layers, 1)
    )
    hot = rng.uniform(0.2, 1.0)
    whole = Problem(
        groups, hot * 2, 2.0, 3.0, tiles, hot, 1.0, 2.0, hot * fires, fires, rng.uniform(1, 2, layers),
        np.full(layers + 2, rng.uniform(0, 0.3)), 0.0,
    )  # fmt: skip
    return replace(whole, budget_bytes=budget * bytes_of(whole, groups, tiles, (units,) * layers))


def best_of_all(p: Problem) -> float:
    layers, units = p.unit_hot_s.shape
    choices = itertools.product(range(p.head_groups + 1), range(p.tiles + 1), *[range(units + 1)] * layers)
    return min(
        seconds_of(p, groups, tiles, counts)
        for groups, tiles, *counts_ in choices
        for counts in [tuple(counts_)]
        if bytes_of(p, groups, tiles, counts) <= p.budget_bytes + 1e-9
    )


def within(p: Problem, s: Solution) -> bool:
    return bytes_of(p, s.groups, s.tiles, s.units) <= p.budget_bytes * (1 + 1e-6) + 1e-9


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.floats(0, 1), st.integers(1, 3), st.floats(0, 2.5))
def test_the_optimum_is_that_of_brute_force(seed: int, budget: float, layers: int, skew: float) -> None:
    p = problem(seed, layers, budget=budget, skew=skew)
    found = solve(p)
    assert within(p, found)
    assert found.seconds == pytest.approx(best_of_all(p), rel=2e-3)


def filled(p: Problem, order: list[tuple[int, int]]) -> float:
    """Seconds when units are taken in an order until the budget is full, the heads and tiles before them."""
    groups, tiles = p.head_groups, p.tiles
    counts = [0] * len(p.unit_bytes)
    for layer, _ in order:
        counts[layer] += 1
        if bytes_of(p, groups, tiles, tuple(counts)) > p.budget_bytes:
            counts[layer] -= 1
            break
    return seconds_of(p, groups, tiles, tuple(counts))


def test_it_beats_greedy_by_frequency_and_random_on_a_skewed_model() -> None:
    p = problem(3, layers=6, units=40, groups=4, tiles=4, budget=0.55, skew=1.2)
    units = list(itertools.product(range(6), range(40)))
    greedy = filled(p, sorted(units, key=lambda u: -p.unit_cold_s[u]))
    rng = np.random.default_rng(0)
    by_chance = min(filled(p, [units[i] for i in rng.permutation(len(units))]) for _ in range(50))
    best = solve(p)
    assert within(p, best)
    assert best.seconds < 0.98 * greedy and best.seconds < 0.98 * by_chance


def test_sizes_of_real_models_are_solved_in_seconds() -> None:
    import time

    p = problem(1, layers=48, units=448, groups=8, tiles=2000, budget=0.4)
    start_s = time.monotonic()
    found = solve(p)
    assert within(p, found) and time.monotonic() - start_s < 40
