"""What people see while they wait and when something fails: always on stderr, so that stdout is the answer alone."""

from __future__ import annotations

import json
import sys
import threading
import time
from types import TracebackType
from typing import Any

_PATIENCE_S, _LINE_EVERY_S = 0.7, 5.0
_BYTES_FROM = 100_000  # larger totals are bytes, smaller ones are counts


def print_json(answer: dict[str, Any]) -> None:
    """The one JSON object of a --json call, on stdout."""
    sys.stdout.write(json.dumps(answer, allow_nan=False) + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """One line for the person at the terminal."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def human_bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


class Steps:
    """Shows the steps of a slow start or download: a bar on a terminal, else a line when a step takes its time.

    Call it as on_progress(stage, done, total); total None where the end is unknown.
    """

    def __init__(self) -> None:
        self._now = ("", "")  # stage, amount
        self._over = threading.Event()
        self._watcher: threading.Thread | None = None
        self._progress: Any = None
        self._task: Any = None

    def __enter__(self) -> Steps:
        if not sys.stderr.isatty():
            self._watcher = threading.Thread(target=self._watch, daemon=True)
            self._watcher.start()
            return self
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[amount]}", markup=False),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._watcher is not None:
            self._watcher.join()
        if self._progress is not None:
            self._progress.stop()

    def __call__(self, stage: str, done: int, total: int | None, detail: str = "") -> None:
        amount = f"{_amount(done, total)} {detail}".strip()
        new, self._now = stage != self._now[0], (stage, amount)
        if self._progress is None:
            return
        if new:
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._task = self._progress.add_task(stage, total=total, amount=amount)
        self._progress.update(self._task, completed=done, total=total, amount=amount)

    def _watch(self) -> None:
        """Speaks of a step once it has lasted a second, and every few seconds from then on."""
        seen, spoken_s = "", 0.0
        while not self._over.wait(_PATIENCE_S):
            stage, amount = self._now
            if stage and stage == seen and time.monotonic() - spoken_s >= _LINE_EVERY_S:
                note(f"{stage} {amount}".rstrip() + " ...")
                spoken_s = time.monotonic()
            elif stage != seen:
                seen, spoken_s = stage, 0.0


def _amount(done: int, total: int | None) -> str:
    if (total or done) >= _BYTES_FROM:
        return f"{human_bytes(done)} of {human_bytes(total)}" if total else human_bytes(done)
    return f"{done}/{total}" if total else ""


def one_line(error: BaseException) -> str:
    """An error's message on a single line, without control characters that a hostile file may have put there."""
    text = " ".join(str(error).split()) or type(error).__name__
    return "".join(c if c.isprintable() else "?" for c in text)
