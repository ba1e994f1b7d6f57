"""Ray for one engine: a running one if RAY_ADDRESS names it, else a small private one that ends with this process."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from enum import Enum

MIN_STORE_BYTES = 80 << 20  # Ray takes no less than 75 MB


class Hold(Enum):
    """What an engine has of Ray."""

    NONE = 0  # somebody else's
    CONNECTION = 1
    PRIVATE = 2


def load() -> None:
    """Import Ray, which looks at most of its environment then."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # no call may start a second Ray behind our back
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray  # noqa: F401


def start(n_actors: int, store_bytes: int) -> Hold:
    """Use the Ray of this process, or else the one that RAY_ADDRESS names, or else start a private one."""
    load()
    import ray

    if ray.is_initialized():
        return Hold.NONE
    if os.environ.get("RAY_ADDRESS"):
        ray.init(logging_level=logging.ERROR, log_to_driver=False)
        return Hold.CONNECTION
    with _without_needless_processes():
        # Ray starts as many processes ahead as it has CPUs: one for each actor, whatever its number of threads.
        ray.init(
            address="local",
            num_cpus=n_actors,
            object_store_memory=max(MIN_STORE_BYTES, store_bytes),
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
    return Hold.PRIVATE


def stop(hold: Hold) -> None:
    """Give back what `start` took."""
    import ray

    if hold is not Hold.NONE:
        ray.shutdown()


@contextlib.contextmanager
def _without_needless_processes() -> Iterator[None]:
    """Keep Ray from starting its autoscaler, log monitor and dashboard: half of its start, most of its stop.

    NOTE: `ray.init` has no switch for them. A Ray that names these methods otherwise starts them all: only slower.
    """
    from ray._private.node import Node

    def nothing(self: Node, **_: object) -> None:
        return None

    names = ("start_monitor", "start_log_monitor", "start_api_server")
    found = {name: getattr(Node, name) for name in names if hasattr(Node, name)}
    try:
        for name in found:
            setattr(Node, name, nothing)
        yield
    finally:
        for name, method in found.items():
            setattr(Node, name, method)
