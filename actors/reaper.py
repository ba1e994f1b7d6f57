"""A small process that outlives a killed program for a moment, to end what Ray would leave for a minute.

Linux ends Ray's processes and our actors with the program that started them, however it ends. Two of Ray's agents
notice too, but then try for 60 s to tell their dead server. The reaper has the read end of a pipe whose write end
only the program has: when that closes, it kills those of the processes it was told of that are still there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path


def _started(pid: int) -> str:
    """When a process was started, in clock ticks since boot; with its id this names it. Empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


class Reaper:
    """Runs from here to `stop`, or to the end of this process."""

    def __init__(self, pids: Iterable[int]):
        told = [f"{pid}:{_started(pid)}" for pid in pids]
        # A session of its own: Ctrl-C and the end of the terminal are for the program.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *told],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def stop(self) -> None:
        """Let it do its work now."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


def ray_processes() -> list[int]:
    """Everything of a Ray that this process has started: its servers, and what these have started."""
    import psutil

    servers = [p for p in psutil.Process().children() if p.name() in ("raylet", "gcs_server")]
    return [p.pid for server in servers for p in (server, *server.children(recursive=True))]


def main(told: list[str]) -> None:
    sys.stdin.read()
    for entry in told:
        pid, _, started = entry.partition(":")
        if started and _started(int(pid)) == started:
            with contextlib.suppress(OSError):
                os.kill(int(pid), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
