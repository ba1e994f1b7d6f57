"""An engine for one command: the model found or fetched, the actors started, everything gone at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotneuron.deploy.console import Steps, note, one_line
from hotneuron.deploy.options import EngineOptions, parse_split
from hotneuron.models.errors import StorageError

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
        if not further.get("is_profiling"):
            _keep_live(engine, path)


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


def _keep_live(engine: Engine, path: Path) -> None:
    """Leave what fired in this run, if it was enough to plan by, for `plan --from-live`."""
    if engine.mode.name == "dense":
        return
    from hotneuron.actors.activity import ENOUGH_TOKENS
    from hotneuron.models.gguf_file import GGUFFile
    from hotneuron.placement.statistics import live_path

    seen = engine.activity()
    if seen.n_tokens < ENOUGH_TOKENS:
        return
    file = GGUFFile.open(path)
    try:
        seen.statistics(file.content_key()).save(live_path(file))
    except StorageError as error:  # the answer was given; what is lost is a proposal
        note(f"hotneuron: what fired is not kept: {one_line(error)}")
