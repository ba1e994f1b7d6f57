"""`hotneuron bench`: prompt and generation speed, measured as llama-bench does (warm-up excluded)."""

from __future__ import annotations

import statistics
from typing import Annotated, Any

import typer

from hotneuron.deploy import options as opt
from hotneuron.deploy.console import note, print_json
from hotneuron.models.errors import RequestError


def bench(
    model: opt.Model = opt.DEFAULT_MODEL,
    prompt_tokens: Annotated[int, typer.Option("-p", "--n-prompt", min=0, help="Prompt tokens; 0: skip.")] = 512,
    generate_tokens: Annotated[int, typer.Option("-n", "--n-gen", min=0, help="Tokens generated; 0: skip.")] = 128,
    repetitions: Annotated[int, typer.Option("-r", "--repetitions", min=1, max=1000)] = 5,
    as_json: opt.Json = False,
    context: opt.Context = None,
    threads: opt.Threads = None,
    workers: opt.Workers = None,
    split: opt.Split = None,
) -> None:
    """Measure tokens per second: a prompt of -p tokens, then -n generated ones, each -r times."""
    if not prompt_tokens and not generate_tokens:
        raise RequestError("-p 0 and -n 0 leave nothing to measure")
    context = context or max(prompt_tokens + generate_tokens, 64)
    from hotneuron.deploy import machine
    from hotneuron.deploy.console import Steps
    from hotneuron.deploy.session import engine_for

    with engine_for(model, opt.EngineOptions(context, threads, workers, split)) as engine:
        with Steps() as steps:
            steps(f"measuring {repetitions} times", 0, None)
            rates = engine.bench(prompt_tokens, generate_tokens, repetitions)
        engine_facts = engine.describe()
    result: dict[str, Any] = {
        "model": model,
        "pp": summary(prompt_tokens, rates["pp"]),
        "tg": summary(generate_tokens, rates["tg"]),
        "machine": machine.describe(),
        "engine": engine_facts,
    }
    if as_json:
        print_json(result)
        return
    note(f"{result['machine']['cpu']}, {result['machine']['simd']}, {result['machine']['cores_usable']} cores")
    for test in ("pp", "tg"):
        if (row := result[test]) is not None:
            print(f"{test}{row['tokens']:<6} {row['mean']:10.2f} ± {row['sd']:.2f} tokens/s")


def summary(tokens: int, rates: list[float]) -> dict[str, Any] | None:
    """Mean and sample standard deviation of tokens per second; None where nothing was measured."""
    if not rates:
        return None
    sd = statistics.stdev(rates) if len(rates) > 1 else 0.0
    return {"tokens": tokens, "mean": statistics.fmean(rates), "sd": sd, "repetitions": len(rates), "rates": rates}
