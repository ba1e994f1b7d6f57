"""What this machine can do: bytes a second of the kernels, alone and together, and what a meeting costs."""

from __future__ import annotations

import json
import mmap
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path

import numpy as np

from hotneuron.kernels import cpu
from hotneuron.models.errors import ModelFileError

_COLUMNS = 4096
_BUFFER_BYTES = 192 << 20  # more than caches hold
_SPARSE_SHARE = 0.12
_REPETITIONS = 9
_BARRIERS = 20_000


@dataclass(frozen=True, slots=True)
class Probe:
    """Speeds of the single-token kernels over 4-bit weights that come from memory."""

    threads: int  # that "together" means
    tiles_alone_bytes_per_s: float  # one thread, rows in order
    tiles_together_bytes_per_s: float  # all threads
    rows_alone_bytes_per_s: float  # one thread, an eighth of the rows, here and there
    rows_together_bytes_per_s: float
    barrier_us: float  # all threads meet once
    norm_ns_per_float: float  # one row normed and quantized, by one thread

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Probe:
        """Raises ModelFileError."""
        try:
            found = json.loads(path.read_text())
            probe = cls(**{field.name: found[field.name] for field in fields(cls)})
            if not all(isinstance(value, int | float) and 0 < value < 1e15 for value in asdict(probe).values()):
                raise ValueError("a speed is not a number above 0")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelFileError(path, "probe", f"damaged ({error}); delete it and it is measured again") from None
        return probe

    def tiles_bytes_per_s(self, threads: int) -> float:
        """Of some of the machine's threads, when no others read."""
        return min(self.tiles_together_bytes_per_s, threads * self.tiles_alone_bytes_per_s)

    def rows_bytes_per_s(self, threads: int) -> float:
        return min(self.rows_together_bytes_per_s, threads * self.rows_alone_bytes_per_s)


def probe(progress: Callable[[str, int, int | None], None], again: bool = False) -> Probe:
    """This machine's, measured once (seconds) and then kept in the cache."""
    threads = cpu.usable_cores()
    path = cpu.cache_folder() / "probe" / f"{cpu.source_key()}-{threads}.json"
    if path.exists() and not again:
        return Probe.load(path)
    progress("measuring this machine", 0, None)
    found = _measure(threads)
    found.save(path)
    return found


def _measure(threads: int) -> Probe:
    from hotneuron.placement import probe_kernels as kernels

    pages = mmap.mmap(-1, _BUFFER_BYTES)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    weights = np.frombuffer(pages, np.uint8)
    weights[:] = 0x11  # NOTE untouched pages are all one zero page, which stays in the cache
    stream = kernels.Stream(weights.ctypes.data, _BUFFER_BYTES, _COLUMNS, threads, _SPARSE_SHARE)
    rates = {}
    for name, run, n_bytes in (("tiles", stream.tiles, stream.tile_bytes), ("rows", stream.rows, stream.row_bytes)):
        for count, which in ((1, "alone"), (threads, "together")):
            run(0, 1)  # compiled, and its scratch touched
            part = partial(_part, run, count)
            spans = [seconds_together(count, part) for _ in range(_REPETITIONS)]
            rates[f"{name}_{which}_bytes_per_s"] = n_bytes / float(np.median(spans))
    meeting = kernels.Meeting(threads)
    meeting.run(0, 1)
    barrier_s = seconds_together(threads, lambda me: meeting.run(me, _BARRIERS)) / _BARRIERS
    return Probe(threads, **rates, barrier_us=max(barrier_s * 1e6, 0.01), norm_ns_per_float=kernels.norm_ns(_COLUMNS))


def _part(run: Callable[[int, int], None], count: int, me: int) -> None:
    run(me, count)


def seconds_together(threads: int, function: Callable[[int], None]) -> float:
    """Seconds from the first thread's start to the last one's end."""
    ready = threading.Barrier(threads)
    spans: list[tuple[float, float]] = []

    def body(me: int) -> None:
        ready.wait()
        start_s = time.perf_counter()
        function(me)
        spans.append((start_s, time.perf_counter()))

    team = [threading.Thread(target=body, args=(me,)) for me in range(threads)]
    for thread in team:
        thread.start()
    for thread in team:
        thread.join()
    return max(end for _, end in spans) - min(start for start, _ in spans)
