"""`hotneuron plan`: who will hold what, what it costs in bytes and time, and why, before anything is loaded."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotneuron.deploy import options as opt
from hotneuron.deploy.console import Steps, human_bytes, note, print_json

if TYPE_CHECKING:
    from hotneuron.placement.place import Placement


@opt.takes_engine_options()
def plan(
    model: opt.Model = opt.DEFAULT_MODEL,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the plan, for --plan.")] = None,
    figure: Annotated[Path | None, typer.Option("--figure", help="Draw the plan into this .png or .svg.")] = None,
    slots: Annotated[int, typer.Option("--slots", min=1, max=256, help="Sequences at once, whose KV counts.")] = 1,
    measure: Annotated[bool, typer.Option("--probe", help="Measure this machine again.")] = False,
    as_json: opt.Json = False,
    *,
    options: opt.EngineOptions,
) -> None:
    """Show what each worker would hold, bytes by kind, tokens per second, and why; nothing is loaded."""
    from hotneuron.actors.preparation import kind_of, place_model, statistics_or_none
    from hotneuron.deploy.session import engine_config_of
    from hotneuron.models import catalog
    from hotneuron.models.gguf_file import GGUFFile
    from hotneuron.models.model_config import ModelConfig
    from hotneuron.models.sparse_mode import sparse_mode
    from hotneuron.placement.figures import check_figure_path, draw_plan
    from hotneuron.placement.plan_file import PlanFile
    from hotneuron.placement.probe import probe
    from hotneuron.placement.statistics import default_path

    if figure is not None:
        check_figure_path(figure)
    with Steps() as steps:
        path = catalog.resolve(model, steps)
        file = GGUFFile.open(path)
        config = ModelConfig.from_file(file, options.activation)
        mode = sparse_mode(config, options.sparse, options.sparsity)
        engine_config = engine_config_of(path, options, max_slots=slots)
        n_workers, n_threads = engine_config.team()
        if measure:
            probe(steps, again=True)
        placed = place_model(file, config, mode, engine_config, n_workers, n_threads, steps, always=True)
    assert placed is not None
    facts = describe(placed) | {"model": str(path), "mode": mode.name, "threads": n_threads}
    if output is not None:
        kind = kind_of(mode, engine_config)
        has_statistics = statistics_or_none(file, config, kind, options.statistics) is not None
        statistics = str((options.statistics or default_path(file)).absolute()) if has_statistics else None
        PlanFile(file.content_key(), mode.name, statistics, placed.cuts).save(output, facts)
    if figure is not None:
        draw_plan(placed, figure, title=path.stem)
    if as_json:
        print_json(facts)
        return
    _print(facts)
    note(f"[written to {output}; use it by --plan {output}]" if output else "[-o FILE keeps this plan, for --plan]")


def describe(placed: Placement) -> dict[str, Any]:
    """A placement for people and programs."""
    workers = []
    for me, (shard, n_bytes) in enumerate(zip(placed.plan.shards, placed.n_bytes, strict=True)):
        workers.append(
            {
                "kind": "cold" if me else "hot",
                "heads": shard.heads[1] - shard.heads[0],
                "neurons": [last - first for first, last in shard.neurons],
                "vocab_tiles": shard.vocab_tiles[1] - shard.vocab_tiles[0],
                "bytes": asdict(n_bytes) | {"total": n_bytes.total},
            }
        )
    return {
        "tokens_per_s": placed.tokens_per_s,
        "step": asdict(placed.cost),
        "hot_work_share": placed.hot_work_share,
        "workers": workers,
        "why": list(placed.why),
    }


def _print(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    kinds = ("weights", "neighbours", "kv", "scratch", "exchange", "process", "total")
    table = Table("worker", "heads", "neurons a layer", *kinds)
    for me, worker in enumerate(facts["workers"]):
        low, high = min(worker["neurons"]), max(worker["neurons"])
        neurons = str(low) if low == high else f"{low} to {high}"
        sizes = (human_bytes(worker["bytes"][kind]) for kind in kinds)
        table.add_row(f"{me} {worker['kind']}", str(worker["heads"]), neurons, *sizes)
    Console().print(table)
    step = facts["step"]
    print(f"{facts['tokens_per_s']:.1f} tokens/s predicted: {step['touched_bytes'] / 1e9:.3f} GB read a token")
    parts = {name[:-2]: seconds for name, seconds in step.items() if name.endswith("_s")}
    total = sum(parts.values())
    print("time: " + ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in parts.items() if seconds))
    print(f"hot worker: {facts['hot_work_share']:.1%} of the neurons that are computed")
    for reason in facts["why"]:
        print(f"- {reason}")
