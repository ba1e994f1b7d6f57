"""An engine for one command: the model found or fetched, the actors started, everything gone at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotneuron.deploy.console import Steps
from hotneuron.deploy.options import EngineOptions, parse_split

if TYPE_CHECKING:
    from hotneuron.actors.engine import Engine, EngineConfig


@contextlib.contextmanager
def engine_for(model: str, options: EngineOptions, *, max_slots: int = 1, **further: Any) -> Iterator[Engine]:
    """Starts an engine for `model` (as -m takes it); raises the errors of the catalog, the file and the engine."""
    from hotneuron.models import catalog

    with Steps() as steps:
        path = catalog.resolve(model, steps)
        steps("loading the engine", 0, None)
        from hotneuron.actors.engine import Engine

        config = engine_config_of(path, options, max_slots=max_slots, **further)
        started = Engine.start(config, on_progress=steps)
    with started as engine:
        yield engine


def engine_config_of(path: Path, options: EngineOptions, **further: Any) -> EngineConfig:
    """The flags of one call as the engine takes them. Raises RequestError."""
    from hotneuron.actors.engine import EngineConfig

    budget = options.hot_budget
    return EngineConfig(
        model_path=path,
        workers=options.workers,
        threads=options.threads,
        context_tokens=options.context,
        split=parse_split(options.split),
        activation=options.activation,
        sparse=options.sparse,
        sparsity=options.sparsity,
        sparse_threshold=options.sparse_threshold,
        statistics_path=options.statistics,
        hot_budget_bytes=None if budget is None else round(budget * (1 << 30)),
        plan_path=options.plan,
        **further,
    )
