"""One measurement of llama.cpp or of hotneuron, each in processes of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path
from typing import Any

_TIMEOUT_S = 1800


def llama_cpp(
    binary: Path, path: Path, tests: list[str], threads: int, repetitions: int
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Tokens/s of each repetition by test, and which build it was."""
    prompts, answers = (",".join(_sizes(tests, kind)) or "0" for kind in ("pp", "tg"))
    command = [str(binary), "-m", str(path), "-t", str(threads), "-r", str(repetitions), "-o", "json"]
    results = _run_json([*command, "-p", prompts, "-n", answers])
    rates = {
        f"pp{result['n_prompt']}" if result["n_prompt"] else f"tg{result['n_gen']}": result["samples_ts"]
        for result in results
    }
    return rates, {key: results[0][key] for key in ("build_commit", "build_number", "backends", "repack")}


def hotneuron(path: Path, tests: list[str], threads: int, workers: int, repetitions: int) -> dict[str, list[float]]:
    """Tokens/s of each repetition by test."""
    rates: dict[str, list[float]] = {}
    for prompt, answer in zip_longest(_sizes(tests, "pp"), _sizes(tests, "tg"), fillvalue="0"):
        result = hotneuron_bench(path, threads, workers, repetitions, "-p", prompt, "-n", answer)
        rates |= {f"{kind}{part['tokens']}": part["rates"] for kind in ("pp", "tg") if (part := result[kind])}
    return rates


def hotneuron_bench(path: Path, threads: int, workers: int, repetitions: int, *flags: str) -> dict[str, Any]:
    """What `hotneuron bench` found. The engine lives only while it is measured."""
    team = ("--workers", str(workers), "-t", str(threads // (workers + 1)), "-r", str(repetitions))
    return hotneuron_json("bench", "-m", str(path), *team, *flags)


def hotneuron_json(*arguments: str) -> dict[str, Any]:
    """What one call of the command line answers."""
    return _run_json([str(Path(sys.executable).with_name("hotneuron")), *arguments, "--json"])


def _sizes(tests: list[str], kind: str) -> list[str]:
    return [test[2:] for test in tests if test.startswith(kind)]


def _run_json(command: list[str]) -> Any:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)
