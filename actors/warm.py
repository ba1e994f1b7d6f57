"""Compile the kernels once a machine, with progress, before any actor needs them."""

from __future__ import annotations

from collections.abc import Callable

from hotneuron.kernels import cpu

N_FUNCTIONS = 150  # about how many the step program is made of; only the progress bar needs it
_MARKER = "ready"


def are_ready() -> bool:
    return (cpu.kernel_cache() / _MARKER).exists()


def ensure_kernels(progress: Callable[[str, int, int | None], None]) -> None:
    """Fill the kernel cache for this processor and these sources if it is not. Takes most of a minute the first time."""
    if are_ready():
        return
    progress("compiling kernels (once on this machine)", 0, N_FUNCTIONS)
    from numba.core import event

    from hotneuron.actors.worker import compile_program

    done = 0

    class Counter(event.Listener):
        def on_start(self, event: object) -> None: ...

        def on_end(self, event: object) -> None:
            nonlocal done
            done += 1
            progress("compiling kernels (once on this machine)", min(done, N_FUNCTIONS), N_FUNCTIONS)

    with event.install_listener("numba:compile", Counter()):
        compile_program()
    folder = cpu.kernel_cache()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARKER).write_text("complete\n")
