"""What this processor can do: the instruction path of the kernels, and Numba set up to compile for it.

Import this before anything that imports Numba: LLVM's target and the compile cache's folder are fixed at Numba's first import.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from functools import cache
from pathlib import Path

import platformdirs

from hotneuron.kernels import knobs

PATHS = ("avx512", "avx2", "portable")
_AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"}
_AVX2 = {"avx2", "fma", "f16c"}
# What LLVM may emit on a path that was chosen below the host's own, so that an override tests the real thing.
_LLVM_CPU = {"avx2": "x86-64-v3", "portable": "x86-64-v2" if platform.machine() in ("x86_64", "AMD64") else "generic"}


@cache
def features() -> frozenset[str]:
    """The processor's feature flags as Linux names them; empty where /proc/cpuinfo has none."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return frozenset(line.split(":", 1)[1].split())
    except OSError:
        pass
    return frozenset()


@cache
def model_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def best_path() -> str:
    if _AVX512 <= features():
        return "avx512"
    return "avx2" if _AVX2 <= features() else "portable"


def usable_cores() -> int:
    """Cores that this process may run on; containers and taskset allow fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def path() -> str:
    """The instruction path in use: HOTNEURON_SIMD, or the best that the processor has."""
    best, wanted = best_path(), knobs.SIMD.get()
    if wanted is None:
        return best
    if PATHS.index(wanted) < PATHS.index(best):
        raise ValueError(f"HOTNEURON_SIMD={wanted}: this processor lacks it; it can run: {', '.join(PATHS[PATHS.index(best):])}")
    return wanted


@cache
def cache_folder() -> Path:
    """The folder for models, packs and compiled kernels."""
    return Path(knobs.CACHE.get() or platformdirs.user_cache_dir("hotneuron"))


@cache
def source_key() -> str:
    """Names the compiled kernels: sources, path and processor. Numba itself looks only at the outermost function's file."""
    import llvmlite

    digest = hashlib.sha256(f"{llvmlite.__version__} {path()} {model_name()} {sorted(features())}".encode())
    here = Path(__file__).parent
    for source in sorted([*here.glob("*.py"), *(here.parent / "actors").glob("*.py")]):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def kernel_cache() -> Path:
    return cache_folder() / "kernels" / f"{path()}-{source_key()}"


def set_up_numba() -> None:
    """Point Numba at the cache folder and, where the path is below the host's best, at a lesser target."""
    settings = {"CACHE_DIR": str(kernel_cache())}
    if path() != best_path():
        settings |= {"CPU_NAME": _LLVM_CPU[path()], "CPU_FEATURES": ""}
    for name, value in settings.items():
        os.environ[f"NUMBA_{name}"] = value
        if "numba" in sys.modules:  # imported first by somebody else, but nothing is compiled yet
            setattr(sys.modules["numba"].config, name, value)


set_up_numba()
