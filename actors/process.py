"""What a process of an engine does before anything else."""

from __future__ import annotations

import ctypes
import signal
import sys


def begin() -> None:
    """Tie this actor's process to Ray's, and keep Numba from loading SciPy. NOTE: import Numba after this only."""
    _die_with_parent()
    # Numba looks for SciPy's BLAS, which takes it a third of a second, and no kernel uses it.
    sys.modules.setdefault("scipy", None)  # type: ignore[arg-type]


def _die_with_parent() -> None:
    """Let the kernel end this process when its parent ends, however that happens (Linux)."""
    PR_SET_PDEATHSIG = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        return
