"""What comes before the first step: packed weights, compiled kernels, a plan, the arena's layout.

`ensure` and `store_bytes` are for the engine's own process, and need no Numba once everything is in the cache;
`lay_out` is for the driver's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hotneuron.actors.arena import Arena
from hotneuron.kernels.formats import padded
from hotneuron.models.errors import RequestError
from hotneuron.models.gguf_file import GGUFFile
from hotneuron.models.model_config import ModelConfig
from hotneuron.models.pack import Pack
from hotneuron.models.pack_sources import Kind
from hotneuron.models.pack_writer import ensure_pack
from hotneuron.models.sparse_mode import SparseMode
from hotneuron.placement.histogram import BINS
from hotneuron.placement.statistics import Statistics

if TYPE_CHECKING:
    from hotneuron.actors.engine import EngineConfig
    from hotneuron.placement.plan import Plan

DEFAULT_CONTEXT_TOKENS = 8192
KV_BUDGET_BYTES = 2 << 30  # what the default number of sequences may take; one sequence's context is always given
LOGIT_ROWS = 32
SAFE_SIGNS = -1.0  # the score of `kernels.signs` that nearly all neurons that fire reach
_STORE_BYTES = 32 << 20  # of the object store, beside the arena's rows: tables, messages


def kind_of(mode: SparseMode, engine_config: EngineConfig) -> Kind:
    """The kind of pack to run from. Profiling measures what fires, whatever would have predicted it."""
    return "gated" if engine_config.is_profiling else mode.kind


def ensure(file: GGUFFile, config: ModelConfig, kind: Kind, progress: Callable[[str, int, int | None], None]) -> Path:
    """The pack of a model; makes it, and compiles the kernels, where this machine has not yet. Raises StorageError."""
    from hotneuron.actors.warm import ensure_kernels

    pack_path = ensure_pack(file, config, progress, kind=kind)
    ensure_kernels(Pack(pack_path), progress)
    return pack_path


def lay_out(
    pack: Pack, config: ModelConfig, mode: SparseMode, engine_config: EngineConfig, n_workers: int
) -> tuple[Plan, Arena]:
    """Deal out the work. Raises RequestError (a split that makes no sense)."""
    plan = _plan(pack, config, engine_config, n_workers)
    plan = replace(plan, thresholds=_thresholds(config, mode, engine_config))
    return plan, _arena(config, plan, engine_config, kind_of(mode, engine_config) != "dense")


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
    return (SAFE_SIGNS,) * config.n_layers if mode.name == "sign" else ()


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


def _plan(pack: Pack, config: ModelConfig, engine_config: EngineConfig, n_workers: int) -> Plan:
    from hotneuron.placement import plan as placement

    context = engine_config.context_tokens or min(config.context_tokens, DEFAULT_CONTEXT_TOKENS)
    context = -(-context // 16) * 16
    if config.positions == "learned" and engine_config.context_tokens is None:
        context = min(context, max(16, config.context_tokens // 16 * 16))
    affordable = KV_BUDGET_BYTES // placement.kv_token_bytes(config) // 16 * 16
    kv_tokens = max(context, min(context * engine_config.max_slots, affordable)) + 16
    cuts = placement.cut_by(config, engine_config.split or (1.0,) * n_workers)
    return placement.weigh(pack.matrices, config, cuts, context, kv_tokens)


def _arena(config: ModelConfig, plan: Plan, engine_config: EngineConfig, counts_activity: bool) -> Arena:
    rows, logit_rows = _rows(engine_config)
    blocks = plan.context_tokens // 16 + 2
    width, vocab = padded(config.hidden, 16), padded(config.vocab, 16)
    sizes = plan.n_workers, rows, engine_config.max_slots, blocks, logit_rows, width, vocab
    neurons = padded(config.ffn, 64) if counts_activity else 0
    return Arena(*sizes, config.n_layers, neurons, engine_config.is_profiling, engine_config.is_traced)
