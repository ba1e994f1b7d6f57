"""Where listing the neurons of a batch stops to pay: gate and up by list beside gate and up of all neurons.

    python bench/crossover.py --model relu=PATH [--sparse auto exact predictor]

One thread, batches of 32 rows over all layers of a model, lists of random neurons. `sparse_layer.DENSE_FROM` and
`DENSE_FROM_OF_TWO` are what it found.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import host
import numpy as np
import report
import subjects

from hotneuron.actors import fields as P
from hotneuron.actors import sparse_layer, tables
from hotneuron.actors.arena import LINE
from hotneuron.actors.engine import EngineConfig
from hotneuron.actors.preparation import Launch, ensure, lay_out
from hotneuron.kernels.active import list_active
from hotneuron.kernels.batches import SPARSE_BATCH, UNIT
from hotneuron.kernels.jit import njit
from hotneuron.models.gguf_file import GGUFFile
from hotneuron.models.model_config import ModelConfig
from hotneuron.models.pack import Pack
from hotneuron.models.sparse_mode import sparse_mode

HEADER = ("model", "mode", "neurons listed", "us a layer by list", "us a layer of all", "list / all")
SHARES = (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
DEADLINE_NS = 5_000_000_000


@njit
def _by_list(p, layer, count):
    sparse_layer._products(p, layer, 0, 0, count, 8)


@njit
def _of_all(p, layer, count):
    sparse_layer._products_of_all(p, layer, 0, 0, count, 8)


def _tables(path: Path, asked: str) -> tuple[str, tables.Tables, Any]:
    """Of one worker that holds all of a model; and what its addresses point to."""
    file = GGUFFile.open(path)
    config = ModelConfig.from_file(file)
    mode = sparse_mode(config, asked)
    engine_config = EngineConfig(path, workers=0, threads=1, context_tokens=64, max_slots=1, sparse=asked)
    pack = Pack(ensure(file, config, mode.kind, lambda *_: None))
    plan, arena = lay_out(pack, Launch(engine_config, config, mode, pack.path, None), 1)
    raw = np.ones(arena.n_bytes + LINE, np.uint8)
    address = -(-raw.ctypes.data // LINE) * LINE
    return mode.name, tables.build(pack, config, plan, 0, 1, arena, address, DEADLINE_NS), (raw, pack)


def _mark(t: tables.Tables, layer: np.ndarray, active: np.ndarray, share: float, rng: np.random.Generator) -> None:
    """List this share of a layer's neurons, each active for some of the rows."""
    real = layer[P.REAL_NEURONS]
    listed = rng.random(real) < share
    active[:] = 0
    active[:, :real] = listed * (rng.random((SPARSE_BATCH, real)) < 0.25)
    active[rng.integers(SPARSE_BATCH, size=int(listed.sum())), np.flatnonzero(listed)] = 1
    units = (layer[P.LAST_NEURON] - layer[P.FIRST_NEURON]) // UNIT
    count = list_active(t.p[P.ACTIVE], t.p[P.ACTIVE_STRIDE], SPARSE_BATCH, 0, units, t.p[P.ACTIVE_LISTS])
    np.ctypeslib.as_array((np.ctypeslib.ctypes.c_int64 * 1).from_address(int(t.p[P.ACTIVE_COUNTS])))[0] = count


def measure(path: Path, asked: str, rounds: int) -> list[dict[str, Any]]:
    name, t, keep = _tables(path, asked)
    stride = int(t.p[P.ACTIVE_STRIDE]) // 4
    flat = (np.ctypeslib.ctypes.c_float * (stride * SPARSE_BATCH)).from_address(int(t.p[P.ACTIVE]))
    active = np.ctypeslib.as_array(flat).reshape(SPARSE_BATCH, stride)
    rng, rows = np.random.default_rng(0), []
    for share in SHARES:
        times: dict[Any, list[float]] = {_by_list: [], _of_all: []}
        for _ in range(rounds):
            for layer in t.layers:
                for run, taken in times.items():
                    _mark(t, layer, active, share, rng)
                    began = time.perf_counter()
                    run(t.p, layer, SPARSE_BATCH)
                    taken.append(time.perf_counter() - began)
        by_list, of_all = (1e6 * statistics.median(times[run][1:]) for run in (_by_list, _of_all))
        rows.append({"mode": name, "share": share, "by_list_us": by_list, "of_all_us": of_all})
    del keep
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", required=True, help=subjects.HELP)
    parser.add_argument("--sparse", nargs="+", default=["auto"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="OUT", help="default: bench/results/<date>-<cpu>-crossover.json")
    arguments = parser.parse_args()
    machine = host.describe()
    found = [
        {"model": name} | row
        for name, path in map(subjects.find, arguments.model)
        for asked in arguments.sparse
        for row in measure(path, asked, arguments.rounds)
    ]
    table = [
        [r["model"], r["mode"], f"{r['share']:.0%}", f"{r['by_list_us']:.0f}", f"{r['of_all_us']:.0f}",
         f"{r['by_list_us'] / r['of_all_us']:.2f}"] for r in found
    ]  # fmt: skip
    out = arguments.json or report.default_path(machine, "crossover")
    report.publish(out, {"machine": machine, "rows": found}, "Gate and up by list, and of all neurons", HEADER, table)


if __name__ == "__main__":
    main()
