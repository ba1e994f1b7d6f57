"""Compile the kernels that a model needs once a machine, with progress, before any actor needs them."""

from __future__ import annotations

import shutil
from collections.abc import Callable

from hotneuron.kernels import cpu, formats, knobs
from hotneuron.models.pack import Pack

TOKEN_GROUPS = (1, 4, 8)
KEPT_VERSIONS = 8


def ensure_kernels(pack: Pack, progress: Callable[[str, int, int | None], None]) -> None:
    """Fill the kernel cache for this processor, these sources and the compute formats of a pack."""
    if knobs.REFERENCE.get():
        return
    matrices = pack.matrices.values()
    wanted = sorted({m.format_id for m in matrices if m.layout in ("tiles", "rows")})
    downs = sorted({(m.down.format_id, m.down.scaling) for m in matrices if m.layout.startswith("down")})
    names = [formats.NAMES[f] for f in wanted] + [f"down{scaling}_{formats.NAMES[f]}" for f, scaling in downs]
    marker = cpu.kernel_cache() / ("ready-" + "-".join(names))
    if marker.exists():
        return
    stage = "compiling kernels (once on this machine)"
    progress(stage, 0, None)
    from hotneuron.actors.worker import compile_program
    from hotneuron.kernels.attention import GROUP_SIZES, attend_address
    from hotneuron.kernels.down import down_address
    from hotneuron.kernels.matmul import tile_address
    from hotneuron.kernels.sampling import sample_address

    jobs: list[Callable[[], object]] = [lambda f=f, n=n: tile_address(f, n) for f in wanted for n in TOKEN_GROUPS]  # type: ignore[misc]
    jobs += [lambda d=d: down_address(*d) for d in downs]  # type: ignore[misc]
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
