"""How much of a model the hot worker takes, so that a token takes the least time within a budget.

An integer program: for each layer the number of hot neurons (of those that fire most), for all layers the heads, and
the vocabulary's tiles. A layer's FFN takes as long as the slower side; the sum over layers is minimised by HiGHS.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hotneuron.models.errors import EngineError

_TIME_LIMIT_S, _GAP = 20.0, 1e-4
_MOST_BLOCKS = 6000  # binary variables; more units than that are taken several at a time
_BALANCE = 1e-3  # weight of the slower side where the shared memory is slower still


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Seconds and bytes, all linear in what the hot worker takes."""

    head_groups: int  # groups of heads, which share KV heads
    group_hot_s: float  # of all layers, one group, were it hot
    group_cold_s: float
    group_bytes: float  # that a hot group takes, with its KV
    tiles: int  # of the vocabulary
    tile_hot_s: float
    tile_cold_s: float
    tile_bytes: float
    unit_hot_s: np.ndarray  # f64 [layers, units], most active units first
    unit_cold_s: np.ndarray
    unit_bytes: np.ndarray  # f64 [layers]
    floor_s: np.ndarray  # f64 [layers + 2]: below which no split brings a layer's FFN, attention, the vocabulary
    budget_bytes: float  # what is left for all of these


@dataclass(frozen=True, slots=True)
class Solution:
    groups: int
    tiles: int
    units: tuple[int, ...]  # of each layer
    seconds: float


def seconds_of(problem: Problem, groups: int, tiles: int, units: tuple[int, ...]) -> float:
    """What the program minimises, of any choice."""
    p = problem
    total = max(p.floor_s[-2], groups * p.group_hot_s, (p.head_groups - groups) * p.group_cold_s)
    total += max(p.floor_s[-1], tiles * p.tile_hot_s, (p.tiles - tiles) * p.tile_cold_s)
    for layer, count in enumerate(units):
        hot, cold = p.unit_hot_s[layer, :count].sum(), p.unit_cold_s[layer, count:].sum()
        total += max(p.floor_s[layer], hot, cold)
    return float(total)


def bytes_of(problem: Problem, groups: int, tiles: int, units: tuple[int, ...]) -> float:
    return float(groups * problem.group_bytes + tiles * problem.tile_bytes + np.dot(units, problem.unit_bytes))


def solve(problem: Problem) -> Solution:
    """The best choice within the budget, to a ten-thousandth. Raises EngineError if HiGHS gives up."""
    assert problem.budget_bytes >= 0
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    layers, units = problem.unit_hot_s.shape
    step = -(-layers * units // _MOST_BLOCKS)
    starts = np.arange(0, units, step)
    hot, cold = (np.add.reduceat(s, starts, axis=1) for s in (problem.unit_hot_s, problem.unit_cold_s))
    sizes = np.diff(np.append(starts, units))
    blocks = len(starts)
    # Columns: groups, tiles, then for each layer, attention and the vocabulary: seconds, the slower side's seconds;
    # then a binary for each block.
    phases, first_block = layers + 2, 2 + 2 * (layers + 2)
    n = first_block + layers * blocks
    rows: list[tuple[np.ndarray, np.ndarray, float, float]] = []  # columns, coefficients, low, high

    def at_least(columns: list[int], coefficients: list[float], low: float) -> None:
        rows.append((np.array(columns), np.array(coefficients), low, np.inf))

    for phase in range(phases):
        seconds, slower = 2 + phase, 2 + phases + phase
        at_least([seconds, slower], [1.0, -1.0], 0.0)
        if phase < layers:
            mine = first_block + phase * blocks + np.arange(blocks)
            at_least([slower, *mine], [1.0, *(-hot[phase])], 0.0)
            at_least([slower, *mine], [1.0, *cold[phase]], float(cold[phase].sum()))
            for block in range(blocks - 1):
                at_least([mine[block], mine[block + 1]], [1.0, -1.0], 0.0)
        else:
            is_heads = phase == layers
            column, count = (0, problem.head_groups) if is_heads else (1, problem.tiles)
            hot_s, cold_s = (
                (problem.group_hot_s, problem.group_cold_s) if is_heads else (problem.tile_hot_s, problem.tile_cold_s)
            )
            at_least([slower, column], [1.0, -hot_s], 0.0)
            at_least([slower, column], [1.0, cold_s], count * cold_s)
    taken = np.concatenate([[problem.group_bytes, problem.tile_bytes], np.zeros(2 * phases),
                            (problem.unit_bytes[:, None] * sizes).reshape(-1)])  # fmt: skip
    scale = max(problem.budget_bytes, 1.0)
    rows.append((np.arange(n), taken / scale, -np.inf, problem.budget_bytes / scale))

    unit_s = max(float(problem.floor_s.max()), float(cold.sum(axis=1).max()), 1e-12)  # near 1, as HiGHS likes numbers
    columns, values, low, high = zip(*rows, strict=True)
    indptr = np.concatenate([[0], np.cumsum([len(c) for c in columns])])
    matrix = csr_array((np.concatenate(values), np.concatenate(columns), indptr), shape=(len(rows), n))
    scales = np.ones(n)
    scales[2:first_block] = unit_s
    matrix = csr_array(matrix * scales[None, :])
    objective = np.zeros(n)
    objective[2 : 2 + phases], objective[2 + phases : first_block] = 1.0, _BALANCE
    lower, upper = np.zeros(n), np.ones(n)
    lower[2 : 2 + phases] = problem.floor_s / unit_s
    upper[:first_block] = np.inf
    upper[0], upper[1] = problem.head_groups, problem.tiles
    is_whole = np.ones(n)
    is_whole[2:first_block] = 0
    found = milp(
        objective,
        integrality=is_whole,
        bounds=Bounds(lower, upper),
        constraints=LinearConstraint(matrix, np.array(low), np.array(high)),
        options={"time_limit": _TIME_LIMIT_S, "mip_rel_gap": _GAP},
    )
    if found.x is None:
        raise EngineError(f"the solver found no plan: {found.message}")
    chosen = np.rint(found.x[first_block:]).astype(np.int64).reshape(layers, blocks)
    counts = tuple(int(c) for c in (chosen * sizes).sum(axis=1))
    groups, tiles = (round(float(x)) for x in found.x[:2])
    return Solution(groups, tiles, counts, seconds_of(problem, groups, tiles, counts))
