"""Compile the kernels that a model needs once a machine, with progress, before any actor needs them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable

from hotneuron.kernels import cpu, formats, knobs

TOKEN_GROUPS = (1, 4, 8)
KEPT_VERSIONS = 8


def ensure_kernels(format_ids: Iterable[int], progress: Callable[[str, int, int | None], None]) -> None:
    """Fill the kernel cache for this processor, these sources and the compute formats of a model."""
    if knobs.REFERENCE.get():
        return
    wanted = sorted(set(format_ids))
    marker = cpu.kernel_cache() / ("ready-" + "-".join(formats.NAMES[f] for f in wanted))
    if marker.exists():
        return
    stage = "compiling kernels (once on this machine)"
    progress(stage, 0, None)
    from hotneuron.actors.worker import compile_program
    from hotneuron.kernels.attention import GROUP_SIZES, attend_address
    from hotneuron.kernels.matmul import tile_address
    from hotneuron.kernels.sampling import sample_address

    jobs: list[Callable[[], object]] = [lambda f=f, n=n: tile_address(f, n) for f in wanted for n in TOKEN_GROUPS]  # type: ignore[misc]
    jobs += [lambda n=n: attend_address(n) for n in GROUP_SIZES]  # type: ignore[misc]
    jobs += [sample_address, compile_program]
    for done, job in enumerate(jobs):
        progress(stage, done, len(jobs))
        job()
    progress(stage, len(jobs), len(jobs))
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.write_text("complete\n")
    _forget_old_versions()


def _forget_old_versions() -> None:
    """Kernels of sources, processors and paths compiled long ago; who still needs them compiles them again."""
    by_age = sorted(cpu.kernel_cache().parent.iterdir(), key=lambda folder: folder.stat().st_mtime)
    for folder in by_age[:-KEPT_VERSIONS]:
        shutil.rmtree(folder, ignore_errors=True)
