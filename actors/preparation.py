"""What comes before the first step: packed weights, compiled kernels, a plan, the arena's layout.

`ensure` and `store_bytes` are for the engine's own process, and need no Numba once everything is in the cache;
`lay_out` is for the driver's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hotneuron.actors.arena import Arena
from hotneuron.kernels.formats import padded
from hotneuron.models.errors import NotFoundError, RequestError
from hotneuron.models.gguf_file import GGUFFile
from hotneuron.models.model_config import ModelConfig
from hotneuron.models.pack import Pack
from hotneuron.models.pack_sources import Kind
from hotneuron.models.pack_table import matrices_of
from hotneuron.models.pack_writer import ensure_pack
from hotneuron.models.sparse_mode import SparseMode, sparse_mode
from hotneuron.placement.histogram import BINS
from hotneuron.placement.statistics import Statistics

if TYPE_CHECKING:
    import numpy as np

    from hotneuron.actors.engine import EngineConfig
    from hotneuron.placement.place import Demand, Placement
    from hotneuron.placement.plan import Cuts, Plan
    from hotneuron.placement.sign_choice import SignChoice

Progress = Callable[[str, int, int | None], None]

DEFAULT_CONTEXT_TOKENS = 8192
KV_BUDGET_BYTES = 2 << 30  # what the default number of sequences may take; one sequence's context is always given
LOGIT_ROWS = 32
SAFE_SIGNS = -1.0  # the score of `kernels.signs` that nearly all neurons that fire reach
_STORE_BYTES = 32 << 20  # of the object store, beside the arena's rows: tables, messages


@dataclass(frozen=True, slots=True)
class Launch:
    """What a driver starts from."""

    engine_config: EngineConfig
    config: ModelConfig
    mode: SparseMode
    pack_path: Path
    cuts: Cuts | None  # None: equal shares, or the split asked for


def kind_of(mode: SparseMode, engine_config: EngineConfig) -> Kind:
    """The kind of pack to run from. Profiling measures what fires, whatever predicts it; and how well signs would."""
    return "gated" if engine_config.is_profiling and mode.name != "sign" else mode.kind


def mode_of(file: GGUFFile, config: ModelConfig, engine_config: EngineConfig) -> SparseMode:
    """What decides which neurons are computed; by itself, signs do only where a profile shows that they pay.

    Raises RequestError, as `models.sparse_mode`.
    """
    mode = sparse_mode(config, engine_config.sparse, engine_config.sparsity)
    if mode.name != "exact" or engine_config.sparse != "auto" or engine_config.is_profiling:
        return mode
    choice = _sign_choice(file, config, engine_config)
    return SparseMode("sign") if choice is not None and choice.pays else mode


def _sign_choice(file: GGUFFile, config: ModelConfig, engine_config: EngineConfig) -> SignChoice | None:
    """What a profile says of signs; None where none has measured them."""
    from hotneuron.placement.sign_choice import choose_signs

    statistics = statistics_or_none(file, config, "signed", engine_config.statistics_path)
    return None if statistics is None or not len(statistics.signs) else choose_signs(file, config, statistics)


def place_model(
    file: GGUFFile,
    config: ModelConfig,
    mode: SparseMode,
    engine_config: EngineConfig,
    n_workers: int,
    n_threads: int,
    progress: Progress,
    always: bool = False,
) -> Placement | None:
    """Where a plan or a budget puts each part of the model; None where neither is given, unless `always`: fastest.

    Raises RequestError: a budget that is too small, a plan or statistics of another model, a split besides.
    """
    if engine_config.plan_path is None and engine_config.hot_budget_bytes is None and not always:
        return None
    if engine_config.split is not None:
        raise RequestError("a split and a plan or a hot budget both say who holds what; give one of them")
    from hotneuron.placement.gpu_index import GPUIndex
    from hotneuron.placement.index_split import split_by_index
    from hotneuron.placement.place import evaluate, fires_in_order, fires_of, place
    from hotneuron.placement.plan_file import PlanFile
    from hotneuron.placement.probe import probe

    kind, wanted = kind_of(mode, engine_config), demand_of(config, mode, engine_config, n_workers, n_threads)
    matrices, statistics_path = matrices_of(file, config, kind), engine_config.statistics_path
    if engine_config.plan_path is None:
        statistics = statistics_or_none(file, config, kind, statistics_path)
        progress("planning", 0, None)
        return place(matrices, config, statistics, probe(progress), wanted)
    if engine_config.plan_path.suffix == ".gpuidx":
        index = GPUIndex.load(engine_config.plan_path, config.n_layers, config.ffn)
        cuts, moved = split_by_index(index, matrices, config, n_workers)
        fires = fires_of(matrices, config, statistics_or_none(file, config, kind, statistics_path), moved)
        return evaluate(matrices, config, cuts, moved, fires, probe(progress), wanted)
    plan_file = PlanFile.load(engine_config.plan_path, file, config, n_workers)
    if plan_file.mode != mode.name:
        raise RequestError(
            f"{engine_config.plan_path}: a plan for {plan_file.mode}, but the model runs as {mode.name}; see --sparse"
        )
    statistics = Statistics.of_model(file, config, Path(plan_file.statistics)) if plan_file.statistics else None
    order, fires = fires_in_order(matrices, config, statistics)
    return evaluate(matrices, config, plan_file.cuts, order, fires, probe(progress), wanted)


def statistics_or_none(file: GGUFFile, config: ModelConfig, kind: Kind, path: Path | None) -> Statistics | None:
    """A model's statistics; None where all neurons are computed, or nobody has measured any."""
    if kind == "dense":
        return None
    try:
        return Statistics.of_model(file, config, path)
    except NotFoundError:
        if path is not None:
            raise
        return None


def demand_of(
    config: ModelConfig, mode: SparseMode, engine_config: EngineConfig, n_workers: int, n_threads: int
) -> Demand:
    """What this engine asks of a placement. Its exchange is as large whatever the cuts are."""
    from hotneuron.placement.place import Demand
    from hotneuron.placement.worker_areas import BatchSizes

    context, kv_tokens = _context(config, engine_config)
    arena = _arena(config, n_workers, context, engine_config, kind_of(mode, engine_config) != "dense")
    sizes, budget = BatchSizes(arena.max_rows, arena.max_logit_rows), engine_config.hot_budget_bytes
    return Demand(n_workers, n_threads, context, kv_tokens, sizes, arena.n_bytes, budget)


def planned_bytes(engine_config: EngineConfig) -> int:
    """What all processes of an engine will take, before anything is loaded. Raises the errors of file and config."""
    from hotneuron.placement.budget import PROCESS_BYTES, process_bytes
    from hotneuron.placement.plan import cut_by, weigh

    file = GGUFFile.open(engine_config.model_path)
    config = ModelConfig.from_file(file, engine_config.activation)
    mode = mode_of(file, config, engine_config)
    n_workers, n_threads = engine_config.team()
    placed = place_model(file, config, mode, engine_config, n_workers, n_threads, lambda *_: None)
    if placed is not None:
        return PROCESS_BYTES + sum(n_bytes.total for n_bytes in placed.n_bytes)
    wanted = demand_of(config, mode, engine_config, n_workers, n_threads)
    matrices = matrices_of(file, config, kind_of(mode, engine_config))
    cuts = cut_by(config, engine_config.split or (1.0,) * n_workers)
    plan = weigh(matrices, config, cuts, wanted.context_tokens, wanted.kv_tokens)
    sizes = wanted.batch, n_threads, wanted.exchange_bytes
    workers = (process_bytes(matrices, config, plan, me, *sizes).total for me in range(n_workers))
    return PROCESS_BYTES + sum(workers)


def ensure(
    file: GGUFFile, config: ModelConfig, kind: Kind, progress: Progress, order: np.ndarray | None = None
) -> Path:
    """The pack of a model; makes it, and compiles the kernels, where this machine has not yet. Raises StorageError."""
    from hotneuron.actors.warm import ensure_kernels

    pack_path = ensure_pack(file, config, progress, kind=kind, order=order)
    ensure_kernels(Pack(pack_path), progress)
    return pack_path


def lay_out(pack: Pack, launch: Launch, n_workers: int) -> tuple[Plan, Arena]:
    """Deal out the work, by cuts or else by shares. Raises RequestError (a split that makes no sense)."""
    from hotneuron.placement.plan import cut_by, weigh

    engine_config, config, mode = launch.engine_config, launch.config, launch.mode
    context, kv_tokens = _context(config, engine_config)
    cuts = launch.cuts or cut_by(config, engine_config.split or (1.0,) * n_workers)
    plan = weigh(pack.matrices, config, cuts, context, kv_tokens)
    plan = replace(plan, thresholds=_thresholds(config, mode, engine_config))
    return plan, _arena(config, n_workers, context, engine_config, kind_of(mode, engine_config) != "dense")


def _thresholds(config: ModelConfig, mode: SparseMode, engine_config: EngineConfig) -> tuple[float, ...]:
    """From which value a neuron of each layer is active; empty: as the file says, or any but 0."""
    given = engine_config.thresholds
    if given and len(given) != config.n_layers:
        raise RequestError(f"thresholds has {len(given)} numbers for {config.n_layers} layers; give one a layer")
    if given or engine_config.is_profiling:
        return given
    if mode.name == "threshold":
        assert engine_config.sparsity is not None
        file = GGUFFile.open(engine_config.model_path)
        statistics = Statistics.of_model(file, config, engine_config.statistics_path)
        return statistics.thresholds(engine_config.sparsity)
    if engine_config.sparse_threshold is not None and mode.name in ("predictor", "sign"):
        return (engine_config.sparse_threshold,) * config.n_layers
    if mode.name == "sign":
        choice = _sign_choice(GGUFFile.open(engine_config.model_path), config, engine_config)
        return choice.dials if choice is not None else (SAFE_SIGNS,) * config.n_layers
    return ()


def store_bytes(config: ModelConfig, engine_config: EngineConfig, n_workers: int) -> int:
    """Room for the arena in the object store, known before there is a plan."""
    rows, logit_rows = _rows(engine_config)
    partial_sums = 2 * n_workers * rows * padded(config.hidden, 16)
    counters = 2 * config.n_layers * (padded(config.ffn, 64) + n_workers * BINS)
    return 4 * (partial_sums + logit_rows * padded(config.vocab, 16) + counters) + _STORE_BYTES


def _rows(engine_config: EngineConfig) -> tuple[int, int]:
    """Rows of a batch, and rows of it that may have logits; both multiples of 8."""
    rows = padded(max(engine_config.chunk_tokens, engine_config.max_slots + 16), 8)
    return rows, padded(max(LOGIT_ROWS, engine_config.max_slots), 8)


def _context(config: ModelConfig, engine_config: EngineConfig) -> tuple[int, int]:
    """Positions of one sequence, and of all together."""
    from hotneuron.placement.plan import kv_token_bytes

    context = engine_config.context_tokens or min(config.context_tokens, DEFAULT_CONTEXT_TOKENS)
    context = -(-context // 16) * 16
    if config.positions == "learned" and engine_config.context_tokens is None:
        context = min(context, max(16, config.context_tokens // 16 * 16))
    affordable = KV_BUDGET_BYTES // kv_token_bytes(config) // 16 * 16
    return context, max(context, min(context * engine_config.max_slots, affordable)) + 16


def _arena(
    config: ModelConfig, n_workers: int, context_tokens: int, engine_config: EngineConfig, counts_activity: bool
) -> Arena:
    rows, logit_rows = _rows(engine_config)
    blocks = context_tokens // 16 + 2
    width, vocab = padded(config.hidden, 16), padded(config.vocab, 16)
    sizes = n_workers, rows, engine_config.max_slots, blocks, logit_rows, width, vocab
    neurons = padded(config.ffn, 64) if counts_activity else 0
    return Arena(*sizes, config.n_layers, neurons, engine_config.is_profiling, engine_config.is_traced)
