"""Placing a model: what each worker holds, from its statistics, this machine's speeds and a budget, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hotneuron.kernels.formats import TILE_ROWS, padded
from hotneuron.models.errors import RequestError
from hotneuron.models.model_config import ModelConfig
from hotneuron.models.pack import Matrix
from hotneuron.placement.budget import ProcessBytes, process_bytes
from hotneuron.placement.cost import ModelBytes, StepCost, step_cost, unit_fires
from hotneuron.placement.plan import NEURON_UNIT, Cuts, Plan, Range, deal, kv_token_bytes, weigh
from hotneuron.placement.probe import Probe
from hotneuron.placement.solver import Problem, solve
from hotneuron.placement.statistics import Statistics
from hotneuron.placement.worker_areas import BatchSizes, is_sparse

ASSUMED_SHARE = 0.12  # of the neurons, that fire for a token where no statistics say so
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Demand:
    """What an engine asks of a placement."""

    n_workers: int  # the hot one first
    n_threads: int  # of each
    context_tokens: int
    kv_tokens: int
    batch: BatchSizes
    exchange_bytes: int
    hot_budget_bytes: int | None = None  # of the hot worker's process; None: as much as is fastest


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    plan: Plan
    cuts: Cuts
    order: np.ndarray | None  # int64 [layers, ffn]: the file's neurons, most active first; None: as in the file
    n_bytes: tuple[ProcessBytes, ...]  # of each worker
    cost: StepCost
    hot_work_share: float  # of the neurons that are computed, those on the hot worker
    why: tuple[str, ...]

    @property
    def tokens_per_s(self) -> float:
        return 1 / self.cost.total_s


def order_unit(matrices: Mapping[str, Matrix]) -> int:
    """Neurons that must stay together: 32 where they share scales."""
    return 32 if matrices["0.ffn_down"].layout == "down_shared" else 1


def fires_in_order(
    matrices: Mapping[str, Matrix], config: ModelConfig, statistics: Statistics | None
) -> tuple[np.ndarray | None, np.ndarray]:
    """The order of the neurons, and how many are computed for a token, f64 [layers, units], in that order."""
    order = statistics.order(order_unit(matrices)) if statistics is not None and is_sparse(matrices) else None
    return order, fires_of(matrices, config, statistics, order)


def fires_of(
    matrices: Mapping[str, Matrix], config: ModelConfig, statistics: Statistics | None, order: np.ndarray | None
) -> np.ndarray:
    """How many neurons of each unit are computed for a token, f64 [layers, units], in an order."""
    if not is_sparse(matrices):
        return unit_fires(np.ones((config.n_layers, config.ffn), np.float32))
    if statistics is None:
        return unit_fires(np.full((config.n_layers, config.ffn), ASSUMED_SHARE, np.float32))
    return unit_fires(statistics.fires if order is None else np.take_along_axis(statistics.fires, order, axis=1))


def place(
    matrices: Mapping[str, Matrix], config: ModelConfig, statistics: Statistics | None, probe: Probe, demand: Demand
) -> Placement:
    """The fastest placement within the budget. Raises RequestError for a budget that is too small, naming the least."""
    order, fires = fires_in_order(matrices, config, statistics)
    n_bytes = ModelBytes.of(matrices, config)
    problem = _problem(matrices, config, n_bytes, fires, probe, demand)
    found = solve(problem)
    cuts = _cuts(config, fires, n_bytes, found.groups, found.tiles, found.units, demand.n_workers)
    why = _why(problem, found.groups, found.units, statistics, n_bytes.listed, demand)
    return evaluate(matrices, config, cuts, order, fires, probe, demand, why)


def evaluate(
    matrices: Mapping[str, Matrix],
    config: ModelConfig,
    cuts: Cuts,
    order: np.ndarray | None,
    fires: np.ndarray,
    probe: Probe,
    demand: Demand,
    why: tuple[str, ...] = (),
) -> Placement:
    """What given cuts cost. fires: f64 [layers, units]."""
    plan = weigh(matrices, config, cuts, demand.context_tokens, demand.kv_tokens)
    planned = tuple(
        process_bytes(matrices, config, plan, me, demand.batch, demand.n_threads, demand.exchange_bytes)
        for me in range(plan.n_workers)
    )
    cost = step_cost(plan, config, ModelBytes.of(matrices, config), fires, probe, demand.n_threads)
    hot = sum(fires[layer, : last // NEURON_UNIT].sum() for layer, (_, last) in enumerate(plan.shards[0].neurons))
    return Placement(plan, cuts, order, planned, cost, float(hot / max(fires.sum(), 1e-9)), why)


def _problem(
    matrices: Mapping[str, Matrix],
    config: ModelConfig,
    n_bytes: ModelBytes,
    fires: np.ndarray,
    probe: Probe,
    demand: Demand,
) -> Problem:
    n_cold, threads = demand.n_workers - 1, demand.n_threads
    hot_tiles, hot_rows = probe.tiles_bytes_per_s(threads), probe.rows_bytes_per_s(threads)
    cold_tiles, cold_rows = probe.tiles_bytes_per_s(threads * n_cold), probe.rows_bytes_per_s(threads * n_cold)
    always, listed = NEURON_UNIT * n_bytes.always[:, None], n_bytes.listed[:, None] * fires
    groups = config.n_kv_heads
    tiles = padded(config.vocab, TILE_ROWS) // TILE_ROWS
    attention, tile_bytes = float(n_bytes.attention.sum()) / groups, n_bytes.head / tiles
    together = probe.tiles_together_bytes_per_s, probe.rows_together_bytes_per_s
    floors = (always.sum(axis=1) * fires.shape[1] / together[0]) + listed.sum(axis=1) / together[1]
    never = 1e3  # seconds: where there is no cold worker, all must be hot
    fixed = _fixed_bytes(matrices, config, demand)
    budget = np.inf if demand.hot_budget_bytes is None else demand.hot_budget_bytes - fixed
    kv_bytes = kv_token_bytes(config) * demand.kv_tokens / groups
    whole = fixed + groups * (attention + kv_bytes) + (0 if config.tied_embeddings else n_bytes.head)
    whole += float(((n_bytes.always + n_bytes.listed) * NEURON_UNIT * fires.shape[1]).sum())
    least = fixed if n_cold else whole
    if demand.hot_budget_bytes is not None and demand.hot_budget_bytes < least:
        without = (
            "the hot worker's process, scratch and exchange" if n_cold else "all of the model, with no cold worker"
        )
        least_gib = np.ceil(least / GIB * 1000) / 1000
        raise RequestError(
            f"hot budget {demand.hot_budget_bytes / GIB:.3f} GiB: too small for {without}; "
            f"the smallest that works here is {least_gib:.3f} GiB"
        )
    return Problem(
        head_groups=groups,
        group_hot_s=attention / hot_tiles,
        group_cold_s=attention / cold_tiles if n_cold else never,
        group_bytes=attention + kv_bytes,
        tiles=tiles,
        tile_hot_s=tile_bytes / hot_tiles,
        tile_cold_s=tile_bytes / cold_tiles if n_cold else never,
        tile_bytes=0 if config.tied_embeddings else tile_bytes,  # else in the embedding, which every worker has
        unit_hot_s=always / hot_tiles + listed / hot_rows,
        unit_cold_s=always / cold_tiles + listed / cold_rows if n_cold else np.full(fires.shape, never),
        unit_bytes=(n_bytes.always + n_bytes.listed) * NEURON_UNIT,
        floor_s=np.array([*floors, attention * groups / together[0], n_bytes.head / together[0]]),
        budget_bytes=float(min(budget, whole)),
    )


def _fixed_bytes(matrices: Mapping[str, Matrix], config: ModelConfig, demand: Demand) -> float:
    """Of the hot worker's process, whatever it holds: its scratch is taken as if it held every neuron."""
    units = padded(config.ffn, NEURON_UNIT)
    others = ((0, 0),) * (demand.n_workers - 1)
    neurons = (((0, units), *others),) * config.n_layers
    cuts = Cuts(((0, config.n_heads), *others), neurons, ((0, 0), *others))
    plan = weigh(matrices, config, cuts, demand.context_tokens, demand.kv_tokens)
    found = process_bytes(matrices, config, plan, 0, demand.batch, demand.n_threads, demand.exchange_bytes)
    return found.total - found.weights - found.kv


def _cuts(
    config: ModelConfig,
    fires: np.ndarray,
    n_bytes: ModelBytes,
    groups: int,
    tiles: int,
    units: tuple[int, ...],
    n_workers: int,
) -> Cuts:
    """The hot worker's part, and the rest dealt evenly to the cold ones: neurons by the bytes that a token reads."""
    group = config.n_heads // config.n_kv_heads
    n_cold = n_workers - 1
    heads = _rest(groups, config.n_kv_heads, n_cold, group)
    neurons = []
    for layer, hot in enumerate(units):
        work = NEURON_UNIT * n_bytes.always[layer] + n_bytes.listed[layer] * fires[layer, hot:]
        done = np.concatenate([[0.0], np.cumsum(work)])
        wanted = done[-1] * np.arange(1, n_cold) / max(n_cold, 1)
        inner = hot + np.searchsorted(done, wanted)
        at = [0, hot, *inner.tolist(), fires.shape[1]] if n_cold else [0, hot]
        neurons.append(tuple((a * NEURON_UNIT, b * NEURON_UNIT) for a, b in pairwise(at)))
    return Cuts(heads, tuple(neurons), _rest(tiles, padded(config.vocab, TILE_ROWS) // TILE_ROWS, n_cold, 1))


def _rest(hot: int, total: int, n_cold: int, size: int) -> tuple[Range, ...]:
    cold = [(hot + a, hot + b) for a, b in deal(total - hot, (1.0,) * n_cold)] if n_cold else []
    return tuple((a * size, b * size) for a, b in [(0, hot), *cold])


def _why(
    problem: Problem,
    groups: int,
    units: tuple[int, ...],
    statistics: Statistics | None,
    listed: np.ndarray,
    demand: Demand,
) -> tuple[str, ...]:
    found = []
    if statistics is None and any(size > 0 for size in listed):
        found.append("no statistics of this model: neurons are taken to fire alike; `hotneuron profile` measures them")
    if demand.hot_budget_bytes is None:
        found.append("no budget: work is dealt so that hot and cold workers end a layer together")
    else:
        used = groups * problem.group_bytes + float(np.dot(units, problem.unit_bytes))
        is_full = used > 0.97 * problem.budget_bytes
        found.append("the budget is what bounds the hot worker" if is_full else "the budget leaves room: time decides")
        if groups == 0:
            found.append("no head fits beside hot neurons that save more time: all attention is on the cold workers")
    slow = sum(
        problem.floor_s[layer] >= max(hot[:n].sum(), cold[n:].sum())
        for layer, (hot, cold, n) in enumerate(zip(problem.unit_hot_s, problem.unit_cold_s, units, strict=True))
    )
    if slow:
        found.append(f"in {slow} of {len(units)} layers the memory that all workers share is the bound, not the split")
    return tuple(found)
