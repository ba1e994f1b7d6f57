"""`hotneuron doctor`: whether this machine can run hotneuron well, and what to do where it cannot."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import typer

from hotneuron.deploy import options as opt
from hotneuron.deploy.console import human_bytes, print_json

_SHM_BYTES = 512 << 20
_DISK_BYTES = 1 << 30
_MEMORY_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Check:
    """One finding; the remedy is empty where there is nothing to do."""

    name: str
    status: Literal["ok", "warn", "fail"]
    finding: str
    remedy: str = ""


def doctor(as_json: opt.Json = False) -> None:
    """Check this machine; exit code 1 if something must be put right."""
    checks = run_checks()
    failed = any(check.status == "fail" for check in checks)
    if as_json:
        print_json({"ok": not failed, "checks": [asdict(check) for check in checks]})
    else:
        for check in checks:
            print(f"{check.status:<4}  {check.name:<13} {check.finding}")
            if check.remedy:
                print(f"      {'':<13} -> {check.remedy}")
    if failed:
        raise typer.Exit(1)


def run_checks() -> list[Check]:
    """All checks; one that breaks is itself a failure, and the others still run."""
    results = []
    for check in _CHECKS:
        name = check.__name__.removeprefix("_").replace("_", " ")
        try:
            results.append(check(name))
        except Exception as error:
            results.append(Check(name, "fail", f"cannot be checked: {type(error).__name__}: {error}", "report this"))
    return results


def _python(name: str) -> Check:
    ok = sys.version_info >= (3, 11)
    return Check(name, "ok" if ok else "fail", platform.python_version(), "" if ok else "install Python 3.11 or later")


def _packages(name: str) -> Check:
    from hotneuron.deploy.machine import version_of

    found = {package: version_of(package) for package in ("ray", "numba", "numpy", "tokenizers", "gguf")}
    missing = [package for package, version in found.items() if version is None]
    listed = ", ".join(f"{package} {version}" for package, version in found.items())
    if missing:
        return Check(name, "fail", listed, f"missing: {', '.join(missing)}; install hotneuron again")
    # Before 2.54 a web page in the user's browser could reach Ray's dashboard on localhost (CVE-2026-27482).
    if tuple(int(part) for part in (found["ray"] or "0").split(".")[:2]) < (2, 54):
        return Check(name, "fail", listed, "pip install 'ray>=2.54': earlier ones can be attacked from a web page")
    return Check(name, "ok", listed)


def _cpu(name: str) -> Check:
    from hotneuron.kernels import cpu

    finding = f"{cpu.model_name()}; kernels use {cpu.path()}"
    if cpu.path() != cpu.best_path():
        return Check(name, "warn", finding, f"unset HOTNEURON_SIMD: {cpu.best_path()} is possible here and faster")
    if cpu.path() == "portable" and platform.machine() in ("x86_64", "AMD64"):
        return Check(name, "warn", finding, "a processor (or virtual machine type) with AVX2 is several times faster")
    return Check(name, "ok", finding)


def _cores(name: str) -> Check:
    from hotneuron.deploy.machine import usable_cores

    usable = usable_cores()
    finding = f"{usable} of {os.cpu_count()} usable"
    quota = _quota_cores()
    if quota is not None and quota < usable:
        # A thread that is stopped by the quota makes all others wait for it at the next meeting.
        return Check(name, "warn", f"{finding}, limited to {quota:g}", f"give -t so that all threads fit in {quota:g}")
    return Check(name, "ok", finding)


def _quota_cores() -> float | None:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _memory(name: str) -> Check:
    import psutil

    memory = psutil.virtual_memory()
    finding = f"{human_bytes(memory.available)} of {human_bytes(memory.total)} available"
    if memory.available < _MEMORY_BYTES:
        return Check(name, "warn", finding, "close other programs: a model must fit into the available memory")
    return Check(name, "ok", finding)


def _shared_memory(name: str) -> Check:
    path = Path("/dev/shm")
    if not path.is_dir():
        return Check(name, "warn", "no /dev/shm", "Ray falls back to files, which is slower; Linux has it by default")
    usage = shutil.disk_usage(path)
    finding = f"/dev/shm has {human_bytes(usage.free)} of {human_bytes(usage.total)} free"
    if usage.free < _SHM_BYTES:
        return Check(name, "fail", finding, "make it larger, as with docker run --shm-size=2g, or delete what fills it")
    return Check(name, "ok", finding)


def _cache_folder(name: str) -> Check:
    from hotneuron.models.catalog import cache_folder

    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder) as probe:
            probe.write(b"\0" * 4096)
            probe.flush()
        free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        remedy = "allow writing there, free space, or set HOTNEURON_CACHE to another folder"
        return Check(name, "fail", f"{folder}: {error.strerror or error}", remedy)
    finding = f"{folder}, {human_bytes(free_bytes)} free"
    if free_bytes < _DISK_BYTES:
        return Check(name, "warn", finding, "free some space: a packed model needs as much as its file")
    return Check(name, "ok", finding)


def _models(name: str) -> Check:
    from hotneuron.models import catalog

    fetched = [entry.name for entry in catalog.entries() if entry.path is not None]
    if not fetched:
        return Check(name, "warn", "none fetched yet", f"hotneuron pull {catalog.DEFAULT_MODEL}")
    return Check(name, "ok", ", ".join(fetched))


def _kernel_cache(name: str) -> Check:
    from hotneuron.kernels import cpu

    folder = cpu.kernel_cache()
    compiled = sum(1 for _ in folder.rglob("*.nbc")) if folder.is_dir() else 0
    if not compiled:
        return Check(name, "ok", f"empty; the first run compiles the kernels into {folder}")
    return Check(name, "ok", f"{compiled} compiled kernels in {folder}")


def _huge_pages(name: str) -> Check:
    control = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    try:
        chosen = control.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return Check(name, "ok", "not on this system")
    if chosen == "never":
        return Check(name, "warn", "never", f"as root: echo madvise > {control}; memory is then read a little faster")
    return Check(name, "ok", chosen)


_CHECKS: tuple[Callable[[str], Check], ...] = (
    _python,
    _packages,
    _cpu,
    _cores,
    _memory,
    _shared_memory,
    _cache_folder,
    _models,
    _kernel_cache,
    _huge_pages,
)
