"""`hotneuron bench`: prompt and generation speed, measured as llama-bench does (warm-up excluded)."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotneuron.deploy import options as opt
from hotneuron.deploy.console import note, print_json
from hotneuron.models.errors import RequestError

if TYPE_CHECKING:
    from hotneuron.actors.engine import Engine


@opt.takes_engine_options()
def bench(
    model: opt.Model = opt.DEFAULT_MODEL,
    prompt_tokens: Annotated[int, typer.Option("-p", "--n-prompt", min=0, help="Prompt tokens; 0: skip.")] = 512,
    generate_tokens: Annotated[int, typer.Option("-n", "--n-gen", min=0, help="Tokens generated; 0: skip.")] = 128,
    repetitions: Annotated[int, typer.Option("-r", "--repetitions", min=1, max=1000)] = 5,
    breakdown: Annotated[bool, typer.Option("--breakdown", help="Show what the time of a step went into.")] = False,
    as_json: opt.Json = False,
    *,
    options: opt.EngineOptions,
) -> None:
    """Measure tokens per second: a prompt of -p tokens, then -n generated ones, each -r times."""
    if not prompt_tokens and not generate_tokens:
        raise RequestError("-p 0 and -n 0 leave nothing to measure")
    options = replace(options, context=options.context or max(prompt_tokens + max(1, generate_tokens), 64))
    from hotneuron.deploy import machine
    from hotneuron.deploy.console import Steps
    from hotneuron.deploy.session import engine_for

    with engine_for(model, options, is_traced=breakdown) as engine:
        rates: dict[str, list[float]] = {}
        times: dict[str, list[dict[str, float]]] = {}
        for test, lengths in (("pp", (prompt_tokens, 0)), ("tg", (0, generate_tokens))):
            before = engine.breakdown()
            with Steps() as steps:
                steps(f"measuring {test} {repetitions} times", 0, None)
                rates[test] = engine.bench(*lengths, repetitions)[test]
            times[test] = difference(engine.breakdown(), before)
        engine_facts, sparse = engine.describe(), sparse_facts(engine)
    result: dict[str, Any] = {
        "model": model,
        "pp": summary(prompt_tokens, rates["pp"]),
        "tg": summary(generate_tokens, rates["tg"]),
        "machine": machine.describe(),
        "engine": engine_facts,
        "sparse": sparse,
    }
    if breakdown:
        result["breakdown"] = times
    if as_json:
        print_json(result)
        return
    note(f"{result['machine']['cpu']}, {result['machine']['simd']}, {result['machine']['cores_usable']} cores")
    for test in ("pp", "tg"):
        if (row := result[test]) is not None:
            print(f"{test}{row['tokens']:<6} {row['mean']:10.2f} ± {row['sd']:.2f} tokens/s")
    if sparse["mode"] != "dense":
        share, n_bytes = sparse["active_share"], sparse["touched_bytes_per_token"] / 1e9
        print(f"{sparse['mode']}: {share:.1%} of the neurons computed, {n_bytes:.3f} GB read a token")
    if breakdown:
        print_breakdown({test: workers for test, workers in times.items() if rates[test]})


def sparse_facts(engine: Engine) -> dict[str, Any]:
    """What decided which neurons were computed, how many of them, and the weights' bytes that a token reads so."""
    plan = engine.describe()["plan"]
    if engine.mode.name == "dense":
        n_bytes = sum(shard["weight_bytes"] for shard in plan["shards"])
        return {"mode": "dense", "active_share": 1.0, "touched_bytes_per_token": n_bytes}
    share = engine.activity().listed_share()
    n_bytes = sum(s["weight_bytes"] - round((1 - share) * s["sparse_bytes"]) for s in plan["shards"])
    return {"mode": engine.mode.name, "active_share": share, "touched_bytes_per_token": n_bytes}


def difference(after: list[dict[str, float]], before: list[dict[str, float]]) -> list[dict[str, float]]:
    """Seconds of each worker's phases between two calls of `Engine.breakdown`."""
    return [{phase: a[phase] - b[phase] for phase in a} for a, b in zip(after, before, strict=True)]


def print_breakdown(tests: dict[str, list[dict[str, float]]]) -> None:
    """What the time of the workers' first threads went into, a column a test and worker, largest first."""
    from rich.console import Console
    from rich.table import Table

    columns = [(f"{test} worker {w}", phases) for test, workers in tests.items() for w, phases in enumerate(workers)]
    table = Table("phase", *(name for name, _ in columns))
    totals = [sum(phases.values()) or 1.0 for _, phases in columns]
    for phase in sorted(columns[-1][1], key=lambda name: -columns[-1][1][name]):
        shares = (phases[phase] / total for (_, phases), total in zip(columns, totals, strict=True))
        table.add_row(phase, *(f"{share:.1%}" for share in shares))
    Console().print(table)


def summary(tokens: int, rates: list[float]) -> dict[str, Any] | None:
    """Mean and sample standard deviation of tokens per second; None where nothing was measured."""
    if not rates:
        return None
    sd = statistics.stdev(rates) if len(rates) > 1 else 0.0
    return {"tokens": tokens, "mean": statistics.fmean(rates), "sd": sd, "repetitions": len(rates), "rates": rates}
