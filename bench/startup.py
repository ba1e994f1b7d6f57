"""How long until the first token, how much of an answer is not computing, and what an idle engine costs.

python bench/startup.py [--model M] [--rounds 5] [--json OUT]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

import host
import psutil
import report
import subjects

from hotneuron.actors.engine import Engine, EngineConfig
from hotneuron.actors.messages import Request, SamplingParams

START_TARGET_S = 3.0
IDLE_TARGET_PERCENT = 1.0
OUTSIDE_TARGET_PERCENT = 5.0
ANSWER_TOKENS = 256
_ACTOR_TITLES = ("ray::DriverActor", "ray::WorkerActor")  # Ray's own agents are ray:: too
_RAY_INIT = (
    "import time, ray; start = time.perf_counter(); "
    "ray.init(address='local', include_dashboard=False, log_to_driver=False, logging_level='ERROR'); "
    "print(time.perf_counter() - start)"
)


def first_token_s(path: Path) -> float:
    """From the start of the command until the first character of the answer."""
    command = [str(Path(sys.executable).with_name("hotneuron")), "run", "-m", str(path)]
    command += ["-p", "The capital of France is", "-n", "8", "--temp", "0", "--ignore-eos"]
    start_s = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        first = process.stdout.read(1)
        time_s = time.perf_counter() - start_s
        errors = process.stderr.read()
    if process.returncode or not first:
        raise SystemExit(f"{' '.join(command)}\nended with {process.returncode}:\n{errors.decode()[-2000:]}")
    return time_s


def ray_init_s() -> float:
    """The call alone, in a process of its own, without the import."""
    done = subprocess.run([sys.executable, "-c", _RAY_INIT], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def outside_share(engine: Engine) -> float:
    """Share of one long answer's time, as its reader sees it, in which the workers were not computing."""
    _answer(engine, 16)
    before_s, start_s = engine.stats()["step_s"], time.perf_counter()
    _answer(engine, ANSWER_TOKENS)
    whole_s = time.perf_counter() - start_s
    return 1 - (engine.stats()["step_s"] - before_s) / whole_s


def _answer(engine: Engine, tokens: int) -> None:
    request = Request(f"bench-{tokens}", (100, 200, 300), tokens, SamplingParams(), ignore_eos=True)
    for _ in engine.generate(request):
        pass


def idle_percent(seconds: float) -> dict[str, float]:
    """Per cent of one core while nothing is asked: the engine's actors, this process, and Ray's own processes."""
    time.sleep(3.0)  # Ray sees to its own start for a while
    before = _cpu_s()
    time.sleep(seconds)
    spent = dict.fromkeys(("actors", "this process", "ray"), 0.0)
    for process, cpu_s in _cpu_s().items():
        spent[process[1]] += cpu_s - before.get(process, 0.0)
    return {kind: 100 * cpu_s / seconds for kind, cpu_s in spent.items()}


def _cpu_s() -> dict[tuple[int, str], float]:
    """CPU seconds so far of this process and all below it, by process id and kind."""
    me = psutil.Process()
    found = {}
    for process in [me, *me.children(recursive=True)]:
        try:
            title = " ".join(process.cmdline())
            times = process.cpu_times()
        except psutil.Error:
            continue
        kind = "this process" if process == me else "actors" if title.startswith(_ACTOR_TITLES) else "ray"
        found[process.pid, kind] = times.user + times.system
    if not any(kind == "actors" for _, kind in found):
        raise SystemExit(f"no process is titled {' or '.join(_ACTOR_TITLES)}: its idle use cannot be told apart")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=subjects.DEFAULT[1], metavar="M", help=subjects.HELP)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--idle-seconds", type=float, default=10.0)
    parser.add_argument("--json", type=Path, metavar="OUT")
    arguments = parser.parse_args()
    name, path = subjects.find(arguments.model)
    machine = host.describe()
    first_token_s(path)  # packs and compiles where that has not been done
    starts_s, inits_s = [], []
    for round_number in range(arguments.rounds):
        host.settle()
        inits_s.append(ray_init_s())
        host.settle()
        starts_s.append(first_token_s(path))
        report.note(f"round {round_number + 1}: ray.init {inits_s[-1]:.2f} s, first token {starts_s[-1]:.2f} s")
    host.settle()
    with Engine.start(EngineConfig(model_path=path)) as engine:
        outside = statistics.median(outside_share(engine) for _ in range(arguments.rounds))
        idle = idle_percent(arguments.idle_seconds)
    start_s, init_s = statistics.median(starts_s), statistics.median(inits_s)
    engine_idle = idle["actors"] + idle["this process"]

    def verdict(value: float, target: float) -> list[str]:
        return [f"{target:g}", "ok" if value <= target else "short"]

    rows = [
        ["ray.init alone, s", f"{init_s:.2f}", "", ""],
        ["command to first token, s", f"{start_s:.2f}", "", ""],
        ["more than ray.init, s", f"{start_s - init_s:.2f}", *verdict(start_s - init_s, START_TARGET_S)],
        ["outside the workers, % of time", f"{100 * outside:.2f}", *verdict(100 * outside, OUTSIDE_TARGET_PERCENT)],
        ["idle engine, % of a core", f"{engine_idle:.2f}", *verdict(engine_idle, IDLE_TARGET_PERCENT)],
        ["Ray's own processes meanwhile, %", f"{idle['ray']:.2f}", "", ""],
    ]
    report.publish(
        arguments.json or report.default_path(machine, "startup"),
        {
            "machine": machine,
            "model": name,
            "first_token_s": starts_s,
            "ray_init_s": inits_s,
            "outside_percent": 100 * outside,
            "idle_percent": idle,
        },
        f"{name}: start, time outside the workers, and an idle engine",
        ("measured", "median", "target", ""),
        rows,
    )


if __name__ == "__main__":
    main()
