"""Online adaptation: where a running model's neurons should lie by what has fired in it, and the pack for that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hotneuron.actors.activity import ENOUGH_TOKENS, Activity
from hotneuron.actors.preparation import Launch, Progress, ensure, kind_of, place_model
from hotneuron.models.errors import RequestError
from hotneuron.models.gguf_file import GGUFFile
from hotneuron.models.model_config import ModelConfig
from hotneuron.models.sparse_mode import SparseMode
from hotneuron.placement.statistics import live_path

if TYPE_CHECKING:
    from hotneuron.actors.engine import EngineConfig
    from hotneuron.placement.place import Placement


@dataclass(frozen=True, slots=True)
class Adaptation:
    """What a running engine is to go on with."""

    launch: Launch
    placement: Placement


def adapt(
    config: ModelConfig,
    mode: SparseMode,
    engine_config: EngineConfig,
    seen: Callable[[], Activity],
    plan_path: Path | None,
    progress: Progress,
) -> Adaptation:
    """By a plan file, or else by what was `seen` so far, within the budget that the engine was started with.

    Raises RequestError: too little was seen, the engine runs by a plan whose budget nobody knows, a foreign plan.
    """
    file = GGUFFile.open(engine_config.model_path)
    wanted = replace(engine_config, split=None, plan_path=plan_path)
    if plan_path is not None:
        wanted = replace(wanted, hot_budget_bytes=None)
    elif engine_config.plan_path is not None:
        raise RequestError(
            f"this engine runs by {engine_config.plan_path}, so its budget is not known; "
            "`hotneuron plan --from-live -o FILE` makes another plan, which can be given here"
        )
    else:
        activity = seen()
        if activity.n_tokens < ENOUGH_TOKENS:
            raise RequestError(f"{activity.n_tokens} tokens were computed; {ENOUGH_TOKENS} say which neurons fire")
        wanted = replace(wanted, statistics_path=live_path(file))
        activity.statistics(file.content_key()).save(live_path(file))
    n_workers, n_threads = engine_config.team()
    placed = place_model(file, config, mode, wanted, n_workers, n_threads, progress, always=True)
    assert placed is not None
    pack_path = ensure(file, config, kind_of(mode, engine_config), progress, placed.order)
    return Adaptation(Launch(engine_config, config, mode, pack_path, placed.cuts), placed)
