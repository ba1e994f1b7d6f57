"""The machine that a figure was measured on, and whether anything else is using it."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import psutil

from hotneuron.deploy import machine

_QUIET_PERCENT = 8.0


def describe() -> dict[str, Any]:
    """hotneuron's own description, the time, and how busy the cores were before anything was measured."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        **machine.describe(),
        "busy_percent_before": psutil.cpu_percent(interval=1.0),
    }


def settle(deadline_s: float = 30.0) -> bool:
    """Waits until the cores are idle, as the last measurement's processes leave; False where they stay busy."""
    end_s = time.monotonic() + deadline_s
    while time.monotonic() < end_s:
        if psutil.cpu_percent(interval=0.5) < _QUIET_PERCENT:
            return True
    return False
