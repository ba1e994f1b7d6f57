"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any


def describe() -> dict[str, Any]:
    """Processor, instruction path, cores, memory in bytes, and the versions that matter for speed."""
    import psutil

    from hotneuron.kernels import cpu

    return {
        "cpu": cpu.model_name(),
        "simd": cpu.path(),
        "cores_usable": usable_cores(),
        "cores_logical": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in ("hotneuron", "ray", "numba", "numpy")},
    }


def usable_cores() -> int:
    """Cores that this process may run on; containers and taskset allow fewer than there are."""
    from hotneuron.kernels import cpu

    return cpu.usable_cores()


def version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
