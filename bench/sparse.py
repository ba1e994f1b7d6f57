"""Sparse beside dense: the same model with its predictor, exactly, densely, and by llama.cpp, taking turns in one run.

    python bench/sparse.py --llama-bench PATH [--shape relu-7b-half ...] [--threads 2] [--rounds 3] [--json OUT]

A round measures each of them, and the memory's read bandwidth before and after it; figures are medians. The bound is
that bandwidth divided by the bytes that a token touches: everything but the rows of neurons that are left out.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import host
import report
import subjects
from bandwidth import read_gb_s
from runs import hotneuron_bench, llama_cpp
from shapes import SHAPES
from synthetic import write_synthetic

from hotneuron.kernels.cpu import cache_folder

DEFAULT_SHAPES = ("relu-7b-half", "falcon-40b-layer", "opt-6.7b-quarter")
LLAMA_CPP_KNOWS = ("llama", "falcon")
BOUND_TARGET = 0.75
EXACT_TARGET = 1.4  # of our own dense decode
FLAGS = {"predictor": ("--sparse", "predictor"), "exact": ("--sparse", "exact"), "dense": ("--sparse", "off")}
HEADER = ("shape and run", "tokens/s", "GB a token", "active", "bound", "of bound", "of peer", "of dense", "")


@dataclass(slots=True)
class Run:
    """One way to run one shape: tokens/s of every repetition, and what a token touches."""

    shape: str
    way: str  # llama.cpp, dense, exact, predictor
    n_bytes: float
    active_share: float = 1.0
    rates: list[float] = field(default_factory=list)
    read_gb_s: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    @property
    def bound(self) -> float:
        """Tokens/s that the memory allows."""
        return statistics.median(self.read_gb_s) * 1e9 / self.n_bytes

    @property
    def bound_share(self) -> float:
        return self.rate / self.bound


@dataclass(slots=True)
class Comparison:
    """All runs of one shape."""

    runs: dict[str, Run]

    def ratio(self, run: Run, way: str) -> float | None:
        return run.rate / self.runs[way].rate if way in self.runs and way != run.way else None

    def targets(self, run: Run) -> Iterator[tuple[str, float, float]]:
        """What is asked of a run, how much, and how much it shows."""
        if run.way == "predictor":
            yield "of bound", BOUND_TARGET, run.bound_share
            if run.shape == "relu-7b-half" and (ratio := self.ratio(run, "llama.cpp")) is not None:
                yield "of llama.cpp", 3.0 if self.runs["llama.cpp"].bound_share < 0.5 else 1.5, ratio
        if run.way == "exact" and run.shape == "relu-7b-half" and (ratio := self.ratio(run, "dense")) is not None:
            yield "of dense", EXACT_TARGET, ratio

    def verdict(self, run: Run) -> str:
        """Each target that is missed, or ok; empty where none is set."""
        asked = [*self.targets(run)]
        missed = [f"short: {target:g} {name}" for name, target, shown in asked if shown < target]
        return "; ".join(missed) or ("ok" if asked else "")

    def cells(self, run: Run) -> list[str]:
        ratios = [self.ratio(run, way) for way in ("llama.cpp", "dense")]
        return [
            f"{run.shape} {run.way}",
            f"{run.rate:.1f}",
            f"{run.n_bytes / 1e9:.3f}",
            f"{run.active_share:.1%}",
            f"{run.bound:.1f}",
            f"{run.bound_share:.0%}",
            *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
            self.verdict(run),
        ]

    def as_json(self, run: Run) -> dict[str, Any]:
        found: dict[str, Any] = {"rate": run.rate, "bound": run.bound, "bound_share": run.bound_share}
        found |= {f"of_{way}": self.ratio(run, way) for way in ("llama.cpp", "dense")}
        return asdict(run) | found | {"targets": [*self.targets(run)], "verdict": self.verdict(run)}


def find(shape: str, folder: Path) -> dict[str, Path]:
    """The PWRI and the dense file of a shape; writes both where one is missing."""
    files = {"PWRI": folder / f"{shape}.powerinfer.gguf", "GGUF": folder / f"{shape}.gguf"}
    if not all(path.exists() for path in files.values()):
        folder.mkdir(parents=True, exist_ok=True)
        write_synthetic(files, SHAPES[shape], shape)  # type: ignore[arg-type]
    return {"predictor": files["PWRI"], "exact": files["GGUF"], "dense": files["GGUF"]}


def measure_once(comparison: Comparison, shape: str, files: dict[str, Path], arguments: argparse.Namespace) -> int:
    """One round of one shape; returns how many measurements began on busy cores.

    The memory is read before and after each, since neighbours on the same machine take more or less of it.
    """
    disturbed, runs, tokens = 0, comparison.runs, arguments.tokens
    order = [*files]
    if arguments.llama_bench and SHAPES[shape].architecture in LLAMA_CPP_KNOWS:
        order.insert(0, "llama.cpp")
    before = _read(arguments)
    for way in order:
        disturbed += not host.settle()
        if way == "llama.cpp":
            path, test = files["dense"], f"tg{tokens}"
            found, _ = llama_cpp(arguments.llama_bench, path, [test], arguments.threads, arguments.repetitions)
            rates, facts = found[test], (subjects.weight_bytes_per_token(path), 1.0)
        else:
            flags = (*FLAGS[way], "-p", "0", "-n", str(tokens))
            found = hotneuron_bench(files[way], arguments.threads, arguments.workers, arguments.repetitions, *flags)
            rates, sparse = found["tg"]["rates"], found["sparse"]
            facts = sparse["touched_bytes_per_token"], sparse["active_share"]
        disturbed += not host.settle()
        after = _read(arguments)
        run = runs.setdefault(way, Run(shape, way, *facts))
        run.rates += rates
        run.read_gb_s += before + after
        before = after
        moved = statistics.median(rates) * run.n_bytes / 1e9
        read = statistics.median(run.read_gb_s[-6:])
        report.note(f"{shape} {way}: {statistics.median(rates):.1f} tokens/s, {moved:.1f} of {read:.1f} GB/s")
    return disturbed


def _read(arguments: argparse.Namespace) -> list[float]:
    return read_gb_s(arguments.threads, repetitions=3)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-bench", type=Path, help="your build of llama.cpp's llama-bench; without it, no peer")
    parser.add_argument("--shape", nargs="+", default=list(DEFAULT_SHAPES), choices=SHAPES)
    parser.add_argument("--folder", type=Path, default=cache_folder() / "bench", help="where the models are, or go")
    parser.add_argument("--threads", type=int, default=2, help="in all, for both")
    parser.add_argument("--workers", type=int, default=0, help="hotneuron's cold workers (default: 0)")
    parser.add_argument("--tokens", type=int, default=32, help="generated in a repetition (default: 32)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repetitions", type=int, default=3, help="of each in a round (default: 3)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="default: bench/results/<date>-<cpu>-sparse.json")
    arguments = parser.parse_args()
    if arguments.llama_bench is not None and not arguments.llama_bench.is_file():
        parser.error(f"--llama-bench {arguments.llama_bench}: no such file; build llama.cpp's target llama-bench")
    if arguments.threads < 1 or arguments.workers < 0 or arguments.threads % (arguments.workers + 1):
        parser.error(f"--threads {arguments.threads} must divide evenly among {arguments.workers} + 1 workers")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    machine = host.describe()
    files = {shape: find(shape, arguments.folder) for shape in arguments.shape}
    comparisons = {shape: Comparison({}) for shape in files}
    disturbed = 0
    for _ in range(arguments.rounds):
        for shape, paths in files.items():
            disturbed += measure_once(comparisons[shape], shape, paths, arguments)
    rows = [(comparison, run) for comparison in comparisons.values() for run in comparison.runs.values()]
    read = statistics.median(rate for _, run in rows for rate in run.read_gb_s)
    notes = f"Memory read by {arguments.threads} threads in the same run: {read:.1f} GB/s."
    if disturbed:
        notes += f" NOT VALID: other programs used the cores before {disturbed} measurements; repeat on idle cores."
    data = {
        "machine": machine,
        "read_gb_s": read,
        "threads": arguments.threads,
        "cold_workers": arguments.workers,
        "disturbed_measurements": disturbed,
        "rows": [comparison.as_json(run) for comparison, run in rows],
    }
    report.publish(
        arguments.json or report.default_path(machine, "sparse"),
        data,
        f"tg{arguments.tokens}, {arguments.threads} threads, medians of {arguments.rounds} rounds",
        HEADER,
        [comparison.cells(run) for comparison, run in rows],
        notes,
    )


if __name__ == "__main__":
    main()
