"""Plans beside what happens: predicted tokens per second, and bytes of each worker's process, planned and measured.

    python bench/placement.py [--model smollm2-135m relu=PATH ...] [--sparse auto exact off] [--hot-budget 1.2]

Speeds are predicted from a probe just before a run. A process is measured (resident set) after a prompt that fills the
context, in chunks of the largest batch.
"""

from __future__ import annotations

import argparse
import statistics
import uuid
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import host
import report
import subjects

from hotneuron.actors.engine import Engine, EngineConfig
from hotneuron.actors.messages import Request, SamplingParams
from hotneuron.actors.preparation import place_model
from hotneuron.models.gguf_file import GGUFFile
from hotneuron.models.model_config import ModelConfig
from hotneuron.models.sparse_mode import sparse_mode
from hotneuron.placement.plan_file import PlanFile
from hotneuron.placement.probe import probe
from hotneuron.placement.statistics import default_path

HEADER = ("model and mode", "tokens/s planned", "measured", "off by", "worker", "MB planned", "measured", "off by")
CONTEXT_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    mode: str
    planned_tokens_per_s: list[float]
    measured_tokens_per_s: list[float]
    planned_bytes: list[int]
    measured_bytes: list[int]

    def rows(self) -> list[list[str]]:
        planned, measured = (statistics.median(r) for r in (self.planned_tokens_per_s, self.measured_tokens_per_s))
        speed = [f"{planned:.1f}", f"{measured:.1f}", f"{planned / measured - 1:+.0%}"]
        rows = []
        for me, (wanted, had) in enumerate(zip(self.planned_bytes, self.measured_bytes, strict=True)):
            head = [f"{self.name} {self.mode}", *speed] if me == 0 else [""] * 4
            rows.append(
                [*head, "cold" if me else "hot", f"{wanted / 1e6:.0f}", f"{had / 1e6:.0f}", f"{had / wanted - 1:+.1%}"]
            )
        return rows


def measure(name: str, path: Path, sparse: str, hot_budget_gib: float | None, rounds: int) -> Case:
    """Each round: probe, plan, run. The engine is started once, with the first plan."""
    file = GGUFFile.open(path)
    config = ModelConfig.from_file(file)
    mode = sparse_mode(config, sparse)
    budget = None if hot_budget_gib is None else round(hot_budget_gib * (1 << 30))
    asked = {"model_path": path, "sparse": sparse, "context_tokens": CONTEXT_TOKENS, "max_slots": 1}
    engine_config = EngineConfig(**asked, hot_budget_bytes=budget)

    def placed() -> Any:
        probe(lambda *_: None, again=True)
        return place_model(file, config, mode, engine_config, *engine_config.team(), lambda *_: None, always=True)

    host.settle()
    first = placed()
    plan_path = subjects.cache_folder() / "bench" / "placement.plan.json"
    statistics_path = str(default_path(file)) if first.order is not None else None
    PlanFile(file.content_key(), mode.name, statistics_path, first.cuts).save(plan_path, {})
    planned, measured = [], []
    with Engine.start(EngineConfig(**asked, plan_path=plan_path)) as engine:
        for _ in range(rounds):
            planned.append(placed().tokens_per_s)
            measured += engine.bench(0, 64, 3)["tg"]
        random = Random(0)
        prompt = tuple(random.randrange(config.vocab) for _ in range(CONTEXT_TOKENS - 40))
        request = Request(uuid.uuid4().hex, prompt, 32, SamplingParams(temperature=0), ignore_eos=True)
        for _ in engine.generate(request):
            pass
        resident = [worker["resident_bytes"] for worker in engine.describe()["workers"]]
    return Case(name, mode.name, planned, measured, [b.total for b in first.n_bytes], resident)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["smollm2-135m"], help=subjects.HELP)
    parser.add_argument("--sparse", nargs="+", default=["auto"])
    parser.add_argument("--hot-budget", type=float, help="GiB of the hot worker")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="OUT", help="default: bench/results/<date>-<cpu>-placement.json")
    arguments = parser.parse_args()
    machine = host.describe()
    cases = []
    for spec in arguments.model:
        name, path = subjects.find(spec)
        for sparse in arguments.sparse:
            cases.append(measure(name, path, sparse, arguments.hot_budget, arguments.rounds))
            report.note(" ".join(cases[-1].rows()[0]))
    data = {"machine": machine, "cases": [vars_of(case) for case in cases]}
    rows = [row for case in cases for row in case.rows()]
    report.publish(
        arguments.json or report.default_path(machine, "placement"), data, "Plans beside what happens", HEADER, rows
    )


def vars_of(case: Case) -> dict[str, Any]:
    return {name: getattr(case, name) for name in case.__slots__}


if __name__ == "__main__":
    main()
