"""One layer's meeting of two workers: hotneuron's exchange beside plain Ray calls.

    python bench/exchange.py [--widths 4096 576] [--json OUT]

A meeting: each worker writes a partial sum of `width` floats, waits for the other, and adds both to its row.
hotneuron's is the step program's own code on two threads; Ray's is `ray.put`, two actor calls and `ray.get`.
"""

from __future__ import annotations

import argparse
import threading
import time
from pathlib import Path

import host
import numpy as np
import ray
import report

from hotneuron.actors import arena, fields
from hotneuron.actors.meeting import add_partials, bank, meet
from hotneuron.kernels.jit import njit
from hotneuron.kernels.simd import load_f32, store_f32
from hotneuron.kernels.sync import OK, now_ns

TARGETS_US = {4096: 6.0}
_DEADLINE_NS = 5_000_000_000


@njit
def _meetings(p, state, partial, x, times_ns):
    for n in range(len(times_ns)):
        start_ns = now_ns()
        slot = bank(p, state, 1) + p[fields.ME] * p[fields.SLOT_BYTES]
        for i in range(0, 4 * p[fields.WIDTH], 64):
            store_f32(slot + i, load_f32(partial + i))
        code = meet(p, state, 0)
        if code != OK:
            return code
        add_partials(p, state, 0, 3, 0, x)
        times_ns[n] = now_ns() - start_ns
    return OK


def our_meetings_us(width: int, count: int) -> np.ndarray:
    """f64[count], as the first of two workers saw them. Raises RuntimeError where a sum is wrong or nobody comes."""
    slot_bytes = 4 * width
    at = {name: n * arena.PAGE for n, name in enumerate(("header", "counters", "state", "slots"))}
    memory = _aligned(at["slots"] + 8 * slot_bytes)
    base = memory.ctypes.data
    codes = [-1, -1]
    times_ns = np.zeros((2, count), np.int64)
    partials, rows = _aligned(2 * slot_bytes).view(np.float32), _aligned(2 * slot_bytes).view(np.float32)
    partials[:width], partials[width:] = 1, 2

    def body(me: int) -> None:
        p = np.zeros(fields.P_SIZE, np.int64)
        p[fields.ARENA] = base + at["header"]
        p[fields.COUNTERS] = base + at["counters"]
        p[fields.SLOTS] = base + at["slots"]
        p[fields.BANK_BYTES], p[fields.SLOT_BYTES] = 2 * slot_bytes, slot_bytes
        p[fields.N_WORKERS], p[fields.ME], p[fields.N_THREADS], p[fields.WIDTH] = 2, me, 1, width
        p[fields.DEADLINE_NS] = _DEADLINE_NS
        state, mine = base + at["state"] + me * arena.LINE, me * slot_bytes
        codes[me] = _meetings(p, state, partials.ctypes.data + mine, rows.ctypes.data + mine, times_ns[me])

    team = [threading.Thread(target=body, args=(me,)) for me in range(2)]
    for thread in team:
        thread.start()
    for thread in team:
        thread.join()
    if codes != [OK, OK] or not (rows == 3 * count).all():
        raise RuntimeError(f"the exchange failed: codes {codes}, sums {rows.min()} to {rows.max()} of {3 * count}")
    return times_ns[0] / 1e3


def _aligned(n_bytes: int) -> np.ndarray:
    memory = np.zeros(n_bytes + arena.PAGE, np.uint8)
    start = -memory.ctypes.data % arena.PAGE
    return memory[start : start + n_bytes]


@ray.remote(num_cpus=0)
class Worker:
    def partial(self, x: np.ndarray) -> np.ndarray:
        return x * np.float32(0.5)


def ray_meetings_us(width: int, count: int) -> np.ndarray:
    """f64[count]; needs ray.init."""
    workers = [Worker.remote(), Worker.remote()]
    x = np.ones(width, np.float32)
    times_us = np.zeros(count)
    for n in range(-20, count):  # the first ones warm up
        start_ns = time.perf_counter_ns()
        ref = ray.put(x)
        first, second = ray.get([worker.partial.remote(ref) for worker in workers])
        x = first + second
        times_us[max(n, 0)] = (time.perf_counter_ns() - start_ns) / 1e3
    for worker in workers:
        ray.kill(worker)
    return times_us


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[4096, 576], help="floats, in multiples of 16")
    parser.add_argument("--meetings", type=int, default=100_000)
    parser.add_argument("--ray-meetings", type=int, default=500)
    parser.add_argument("--json", type=Path, metavar="OUT")
    arguments = parser.parse_args()
    machine = host.describe()
    our_meetings_us(arguments.widths[0], 1000)
    found = {("hotneuron", width): our_meetings_us(width, arguments.meetings) for width in arguments.widths}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    found |= {("plain Ray", width): ray_meetings_us(width, arguments.ray_meetings) for width in arguments.widths}
    ray.shutdown()
    rows, results = [], []
    for (way, width), times_us in found.items():
        p50, p95 = (float(q) for q in np.percentile(times_us, (50, 95)))
        target = TARGETS_US.get(width) if way == "hotneuron" else None
        verdict = "" if target is None else "ok" if p50 <= target else "short"
        rows.append([f"{way}, {width} floats", f"{p50:.2f}", f"{p95:.2f}", f"{target:g}" if target else "", verdict])
        results.append({"way": way, "width": width, "p50_us": p50, "p95_us": p95, "target": target, "verdict": verdict})
    report.publish(
        arguments.json or report.default_path(machine, "exchange"),
        {"machine": machine, "rows": results},
        "One meeting of two workers, us",
        ("exchange", "p50", "p95", "target", ""),
        rows,
    )


if __name__ == "__main__":
    main()
