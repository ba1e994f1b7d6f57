"""hotneuron beside llama.cpp: the same files, the same number of threads, one run, taking turns.

    python bench/peers.py --llama-bench PATH [--model M ...] [--threads 2] [--rounds 3] [--json OUT]

Each round measures llama.cpp, hotneuron and the memory's read bandwidth one after the other; figures are medians.
"""

from __future__ import annotations

import argparse
import re
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import host
import report
import subjects
from bandwidth import read_gb_s
from runs import hotneuron, llama_cpp

TESTS = {"3.5b": ("tg32", "pp128")}
OTHER_TESTS = ("tg128", "pp512")
TARGETS = {
    (subjects.DEFAULT[1], "tg128"): 1.8,
    (subjects.DEFAULT[1], "pp512"): 4.5,
    (subjects.Q4_0_COPY, "tg128"): 1.3,
    (subjects.Q4_0_COPY, "pp512"): 1.6,
}
READ_SHARE_TARGET = 0.75
_LARGE_BYTES = 1 << 30  # weights of a token that no cache holds


@dataclass(slots=True)
class Row:
    """One test of one model: tokens/s of every repetition, and what they come to."""

    model: str
    test: str
    weight_bytes: int
    llama_cpp: list[float] = field(default_factory=list)
    hotneuron: list[float] = field(default_factory=list)
    read_gb_s: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return statistics.median(self.hotneuron) / statistics.median(self.llama_cpp)

    @property
    def is_large_decode(self) -> bool:
        return self.test.startswith("tg") and self.weight_bytes >= _LARGE_BYTES

    def moved_gb_s(self, rates: list[float]) -> float:
        return statistics.median(rates) * self.weight_bytes / 1e9

    def read_share(self, rates: list[float]) -> float:
        return self.moved_gb_s(rates) / statistics.median(self.read_gb_s)

    def target(self, cpu: str) -> float | None:
        if self.model == "3.5b" and self.test == "tg32":
            return 1.5 if self.read_share(self.llama_cpp) < 0.5 else 1.0
        if self.model == "3.5b" and self.test == "pp128":
            return 2.0 if "intel" in cpu.lower() else 1.5
        return TARGETS.get((self.model, self.test))

    def verdict(self, cpu: str) -> str:
        target = self.target(cpu)
        if target is None:
            return ""
        short = self.ratio < target or (self.is_large_decode and self.read_share(self.hotneuron) < READ_SHARE_TARGET)
        return "short" if short else "ok"

    def as_json(self, cpu: str) -> dict[str, Any]:
        summary = {"ratio": self.ratio, "target": self.target(cpu), "verdict": self.verdict(cpu)}
        if self.is_large_decode:
            for name, rates in (("llama_cpp", self.llama_cpp), ("hotneuron", self.hotneuron)):
                summary[f"{name}_moved_gb_s"] = self.moved_gb_s(rates)
                summary[f"{name}_read_share"] = self.read_share(rates)
        return asdict(self) | summary

    def cells(self, cpu: str) -> list[str]:
        target = self.target(cpu)
        cells = [f"{self.model} {self.test}"]
        cells += [f"{statistics.median(rates):.1f}" for rates in (self.llama_cpp, self.hotneuron)]
        cells += [f"{self.ratio:.2f}", f"{target:.1f}" if target else "", self.verdict(cpu)]
        for rates in (self.llama_cpp, self.hotneuron):
            moved = f"{self.moved_gb_s(rates):.1f} ({self.read_share(rates):.0%})" if self.is_large_decode else ""
            cells.append(moved)
        return cells


HEADER = ("test", "llama.cpp", "hotneuron", "ratio", "target", "", "llama.cpp GB/s of read", "hotneuron GB/s of read")


def measure(arguments: argparse.Namespace) -> tuple[list[Row], dict[str, Any], int]:
    """All rounds; the rows, the peer's build, and how many measurements began on busy cores."""
    build: dict[str, Any] = {}
    disturbed = 0
    rows: dict[tuple[str, str], Row] = {}
    models = [subjects.find(spec) for spec in arguments.model]
    for round_number in range(1, arguments.rounds + 1):
        for name, path in models:
            tests = arguments.tests or list(TESTS.get(name, OTHER_TESTS))
            disturbed += not host.settle()
            theirs, build = llama_cpp(arguments.llama_bench, path, tests, arguments.threads, arguments.repetitions)
            disturbed += not host.settle()
            ours = hotneuron(path, tests, arguments.threads, arguments.workers, arguments.repetitions)
            disturbed += not host.settle()
            read = read_gb_s(arguments.threads, repetitions=3)
            for test in tests:
                key = (name, test)
                row = rows.setdefault(key, Row(name, test, subjects.weight_bytes_per_token(path)))
                row.llama_cpp += theirs[test]
                row.hotneuron += ours[test]
                row.read_gb_s += read
                report.note(
                    f"round {round_number} of {arguments.rounds}: {name} {test}: llama.cpp {theirs[test][-1]:.1f}, "
                    f"hotneuron {ours[test][-1]:.1f} tokens/s, read {statistics.median(read):.1f} GB/s"
                )
    return list(rows.values()), build, disturbed


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-bench", type=Path, required=True, help="your build of llama.cpp's llama-bench")
    parser.add_argument("--model", nargs="+", default=list(subjects.DEFAULT), metavar="M", help=subjects.HELP)
    parser.add_argument("--threads", type=int, default=2, help="in all, for both")
    parser.add_argument("--workers", type=int, help="hotneuron's cold workers (default: 1, or 0 for one thread)")
    parser.add_argument("--tests", nargs="+", metavar="T", help="such as tg128 pp512 (default: the ones with targets)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repetitions", type=int, default=1, help="of each test in a round")
    parser.add_argument("--json", type=Path, metavar="OUT", help="default: bench/results/<date>-<cpu>-peers.json")
    arguments = parser.parse_args()
    if arguments.workers is None:
        arguments.workers = min(1, arguments.threads - 1)
    if not arguments.llama_bench.is_file():
        parser.error(f"--llama-bench {arguments.llama_bench}: no such file; build llama.cpp's target llama-bench")
    if arguments.threads < 1 or arguments.workers < 0 or arguments.threads % (arguments.workers + 1):
        parser.error(f"--threads {arguments.threads} must divide evenly among {arguments.workers} + 1 workers")
    for test in arguments.tests or []:
        if not re.fullmatch(r"(pp|tg)[1-9]\d*", test):
            parser.error(f"--tests {test}: write pp or tg and a number of tokens, as pp512")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    machine = host.describe()
    rows, build, disturbed = measure(arguments)
    cpu = machine["cpu"]
    read = statistics.median(rate for row in rows for rate in row.read_gb_s)
    notes = f"Memory read by {arguments.threads} threads in the same run: {read:.1f} GB/s."
    if disturbed:
        # llama.cpp's threads spin at its barriers: with a core taken away it loses far more than that core's share.
        notes += f" NOT VALID: other programs used the cores before {disturbed} measurements; repeat on idle cores."
    data = {
        "machine": machine,
        "read_gb_s": read,
        "threads": arguments.threads,
        "cold_workers": arguments.workers,
        "llama_cpp": build,
        "disturbed_measurements": disturbed,
        "rows": [row.as_json(cpu) for row in rows],
    }
    report.publish(
        arguments.json or report.default_path(machine, "peers"),
        data,
        f"tokens/s, {arguments.threads} threads, medians of {arguments.rounds} rounds",
        HEADER,
        [row.cells(cpu) for row in rows],
        notes,
    )


if __name__ == "__main__":
    main()
