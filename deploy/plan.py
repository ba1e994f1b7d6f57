"""`hotneuron plan`: who will hold what, what it costs in bytes and time, and why, before anything is loaded."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotneuron.deploy import options as opt
from hotneuron.deploy.console import Steps, human_bytes, note, print_json
from hotneuron.models.errors import NotFoundError, RequestError

if TYPE_CHECKING:
    import numpy as np

    from hotneuron.placement.place import Placement


@opt.takes_engine_options()
def plan(
    model: opt.Model = opt.DEFAULT_MODEL,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the plan, for --plan.")] = None,
    figure: Annotated[Path | None, typer.Option("--figure", help="Draw the plan into this .png or .svg.")] = None,
    slots: Annotated[int, typer.Option("--slots", min=1, max=256, help="Sequences at once, whose KV counts.")] = 1,
    from_live: Annotated[
        bool, typer.Option("--from-live", help="Plan by what fired in the last run, and compare with the plan before.")
    ] = False,
    measure: Annotated[bool, typer.Option("--probe", help="Measure this machine again.")] = False,
    as_json: opt.Json = False,
    *,
    options: opt.EngineOptions,
) -> None:
    """Show what each worker would hold, bytes by kind, tokens per second, and why; nothing is loaded."""
    from hotneuron.actors.preparation import kind_of, mode_of, place_model, statistics_or_none
    from hotneuron.deploy.session import engine_config_of
    from hotneuron.models import catalog
    from hotneuron.models.gguf_file import GGUFFile
    from hotneuron.models.model_config import ModelConfig
    from hotneuron.placement.figures import check_figure_path, draw_plan
    from hotneuron.placement.plan_file import PlanFile
    from hotneuron.placement.probe import probe
    from hotneuron.placement.statistics import Statistics, default_path, live_path

    if figure is not None:
        check_figure_path(figure)
    with Steps() as steps:
        path = catalog.resolve(model, steps)
        file = GGUFFile.open(path)
        config = ModelConfig.from_file(file, options.activation)
        before = options
        if from_live:
            if options.plan is not None or options.statistics is not None:
                raise RequestError("--from-live plans by the last run; give no --plan or --statistics besides")
            if not live_path(file).exists():
                raise NotFoundError(f"{path}: no run of this model has left what fired; `run` or `chat` sparse first")
            options = replace(options, statistics=live_path(file))
        engine_config = engine_config_of(path, options, max_slots=slots)
        mode = mode_of(file, config, engine_config_of(path, before, max_slots=slots))
        n_workers, n_threads = engine_config.team()
        if measure:
            probe(steps, again=True)
        placed = place_model(file, config, mode, engine_config, n_workers, n_threads, steps, always=True)
        old = None
        if from_live:
            usual = engine_config_of(path, before, max_slots=slots)
            old = place_model(file, config, mode, usual, n_workers, n_threads, steps, always=True)
    assert placed is not None
    facts = describe(placed) | {"model": str(path), "mode": mode.name, "threads": n_threads}
    if old is not None:
        facts |= {"from_live": compare(placed, old, Statistics.load(live_path(file)).fires)}
    if output is not None:
        kind = kind_of(mode, engine_config)
        has_statistics = statistics_or_none(file, config, kind, options.statistics) is not None
        used = (options.statistics or default_path(file)).absolute()
        if from_live and has_statistics:  # the next run leaves others there, and the plan counts by these
            kept = output.absolute().with_suffix(".npz")
            Statistics.load(used).save(kept)
            used = kept
        statistics = str(used) if has_statistics else None
        PlanFile(file.content_key(), mode.name, statistics, placed.cuts).save(output, facts)
    if figure is not None:
        draw_plan(placed, figure, title=path.stem)
    if as_json:
        print_json(facts)
        return
    _print(facts)
    if (live := facts.get("from_live")) is not None:
        kept, was, now = live["kept_share"], live["before_hot_work_share"], live["hot_work_share"]
        print(f"for what fired in the last run: {now:.1%} of the work is hot, {was:.1%} by the plan before")
        print(f"{kept:.1%} of the hot neurons stay; {live['moved_neurons']} would move")
    note(f"[written to {output}; use it by --plan {output}]" if output else "[-o FILE keeps this plan, for --plan]")


def compare(now: Placement, before: Placement, live: np.ndarray) -> dict[str, Any]:
    """What a new placement changes: hot neurons that stay, and each plan's hot share of what fires now.

    live: f32 [layers, ffn], share of the last run's tokens that each neuron fired for.
    """
    kept = moved = 0
    was_hot = is_hot = total = 0.0
    for layer, fires in enumerate(live):
        new, old = (_hot(placed, layer, len(fires)) for placed in (now, before))
        kept += len(new & old)
        moved += len(new - old)
        total += float(fires.sum())
        was_hot += float(fires[list(old)].sum())
        is_hot += float(fires[list(new)].sum())
    return {
        "kept_share": kept / max(1, kept + moved),
        "moved_neurons": moved,
        "hot_work_share": is_hot / max(total, 1e-9),
        "before_hot_work_share": was_hot / max(total, 1e-9),
    }


def _hot(placed: Placement, layer: int, ffn: int) -> set[int]:
    """The file's neurons that the hot worker holds."""
    last = min(placed.plan.shards[0].neurons[layer][1], ffn)
    return set(range(last)) if placed.order is None else set(placed.order[layer, :last].tolist())


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

    kinds = ("weights", "embedding", "kv", "scratch", "exchange", "process", "total")
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
