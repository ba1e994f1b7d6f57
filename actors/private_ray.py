"""Ray for one engine: a running one if RAY_ADDRESS names it, else a small private one that ends with this process."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from hotneuron.actors.reaper import Reaper, ray_processes
from hotneuron.models.errors import EngineError

MIN_STORE_BYTES = 80 << 20  # Ray takes no less than 75 MB


@dataclass(frozen=True, slots=True)
class Hold:
    """What an engine has of Ray: nothing (it is somebody else's), a connection, or a Ray of its own with its reaper."""

    connected: bool
    reaper: Reaper | None = None

    @property
    def is_private(self) -> bool:
        return self.reaper is not None

    def release(self) -> None:
        """Give it back; a private Ray ends."""
        import ray

        if self.connected:
            ray.shutdown()
        if self.reaper is not None:
            self.reaper.stop()


def load() -> None:
    """Import Ray, which looks at most of its environment then."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # no call may start a second Ray behind our back
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # workers wait for each other: one that is put off holds up all
    import ray  # noqa: F401


def start(n_actors: int, store_bytes: int, is_service: bool = False) -> Hold:
    """Use the Ray of this process, or else the one that RAY_ADDRESS names, or else start a private one.

    is_service: with Ray's dashboard, which takes jobs and exports metrics. Raises EngineError.
    """
    load()
    import ray

    if ray.is_initialized():
        return Hold(connected=False)
    try:
        if not os.environ.get("RAY_ADDRESS"):
            return _start_private(n_actors, store_bytes, is_service)
        ray.init(logging_level=logging.ERROR, log_to_driver=False)
        return Hold(connected=True)
    except Exception as error:
        problem = (str(error) or type(error).__name__).splitlines()[0]
        raise EngineError(f"Ray could not start: {problem}; `hotneuron doctor` says what this machine lacks") from error


def start_service(store_bytes: int) -> Hold:
    """Join the Ray that RAY_ADDRESS names, or start one for a service, as `start` does for an engine.

    Models are placed by their bytes and share the cores by turns, so Ray's count of CPUs bounds nothing.
    """
    return start(max(4, os.cpu_count() or 1), store_bytes, is_service=True)


def _start_private(n_actors: int, store_bytes: int, is_service: bool) -> Hold:
    import ray

    hold = Hold(connected=True)
    try:
        with _signals_kept(), contextlib.nullcontext() if is_service else _without_needless_processes():
            # Ray starts as many processes ahead as it has CPUs: one for each actor, whatever its number of threads.
            ray.init(
                address="local",
                num_cpus=n_actors,
                object_store_memory=max(MIN_STORE_BYTES, store_bytes),
                include_dashboard=is_service,
                dashboard_host="127.0.0.1",
                logging_level=logging.ERROR,
                log_to_driver=False,
            )
            hold = Hold(connected=True, reaper=Reaper(ray_processes()))
    except BaseException:
        hold.release()
        raise
    return hold


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Hold back Ctrl-C, and leave the answer to SIGTERM as it was.

    A Ray that is interrupted while it starts leaves processes behind, or crashes. SIGTERM by itself is enough: the
    kernel and the reaper end the rest, while Ray's own handler writes a stack to the terminal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    interrupt = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    terminate = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGTERM, terminate)
        if came:
            os.kill(os.getpid(), signal.SIGINT)


@contextlib.contextmanager
def _without_needless_processes() -> Iterator[None]:
    """Keep Ray from starting its autoscaler, log monitor and dashboard, and its agent from measuring the machine.

    They are half of its start, most of its stop, and a part of what it does when idle. NOTE: `ray.init` has no switch
    for them. A Ray that names these functions otherwise starts them all: only slower.
    """
    from ray._private import utils
    from ray._private.node import Node

    def nothing(self: Node, **_: object) -> None:
        return None

    names = ("start_monitor", "start_log_monitor", "start_api_server")
    found = {name: getattr(Node, name) for name in names if hasattr(Node, name)}
    agent_lacks = getattr(utils, "get_dashboard_dependency_error", None)
    try:
        for name in found:
            setattr(Node, name, nothing)
        utils.get_dashboard_dependency_error = lambda: ImportError("a private Ray takes the small agent")
        yield
    finally:
        if agent_lacks is not None:
            utils.get_dashboard_dependency_error = agent_lacks
        for name, method in found.items():
            setattr(Node, name, method)
