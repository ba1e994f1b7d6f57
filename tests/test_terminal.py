"""Ctrl-C at a real terminal: it stops an answer and not the chat, and ends a run with nothing left behind."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.usefixtures("default_model_path")
PATIENCE_S = 90.0
LONG = "Write a very long story about a dragon and a princess."


class Terminal:
    """A command at a terminal of its own, as its session's leader; what it shows, and keys pressed."""

    def __init__(self, *arguments: str):
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            # What a shell starts in the background ignores Ctrl-C, and passes that on.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.execv(sys.executable, [sys.executable, "-m", "hotneuron.deploy.cli", *arguments])
        self.shown = ""

    def press(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def wait_for(self, text: str, limit_s: float = PATIENCE_S) -> str:
        """What was shown until `text` came, after which nothing counts as shown."""
        end = time.monotonic() + limit_s
        while text not in self.shown:
            left_s = end - time.monotonic()
            assert left_s > 0 and select.select([self._fd], [], [], left_s)[0], f"no {text!r} in {self.shown[-2000:]!r}"
            self.shown += os.read(self._fd, 65536).decode(errors="replace")
        before, _, self.shown = self.shown.partition(text)
        return before

    def end(self, limit_s: float = 15.0) -> int:
        """The exit code."""
        stop = time.monotonic() + limit_s
        while (found := os.waitpid(self.pid, os.WNOHANG))[0] == 0:
            assert time.monotonic() < stop, f"still there; shown: {self.shown[-2000:]!r}"
            if select.select([self._fd], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):  # the terminal has gone with its command
                    self.shown += os.read(self._fd, 65536).decode(errors="replace")
        return os.waitstatus_to_exitcode(found[1])


@contextlib.contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    started = Terminal(*arguments)
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(started.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(started.pid, 0)


def family_of(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def test_ctrl_c_stops_the_answer_and_not_the_chat(default_model_path: Path) -> None:
    with terminal("chat", "-m", str(default_model_path), "--temp", "0", "-t", "1", "-n", "3000") as chat:
        chat.wait_for("> ")
        actors = {p.pid for p in family_of(chat.pid)}
        for _ in range(2):
            chat.press(f"{LONG}\r")
            chat.wait_for(LONG)
            chat.wait_for("\n")
            chat.wait_for(" and ")  # it answers
            pressed_s = time.monotonic()
            chat.press("\x03")
            chat.wait_for("(stopped)", 5)
            assert time.monotonic() - pressed_s < 2
            chat.wait_for("> ", 5)
        time.sleep(0.5)  # a signal between readline's prompt and its wait for a key would wait for that key
        chat.press("\x03")  # with nothing to stop
        chat.wait_for("/exit", 5)
        chat.press("/reset\rSay hello.\r")
        chat.wait_for("tokens/s")  # a whole answer
        assert actors <= {p.pid for p in family_of(chat.pid)}
        chat.press("/exit\r")
        assert chat.end() == 0


def test_ctrl_c_ends_a_run(default_model_path: Path) -> None:
    with terminal("run", "-m", str(default_model_path), "-p", LONG, "-n", "3000", "--ignore-eos", "-t", "1") as run:
        run.wait_for(" and ")  # it answers
        family = family_of(run.pid)
        assert len(family) >= 5  # Ray's own processes, the driver and two workers
        run.press("\x03")
        assert run.end(10) == 130
        assert "Traceback" not in run.shown
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
