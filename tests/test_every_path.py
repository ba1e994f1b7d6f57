"""The kernels' tests again on each lesser instruction path; a path is fixed when the kernels are imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hotneuron.kernels import cpu

TESTS = Path(__file__).parent
KERNEL_TESTS = (
    "test_simd.py",
    "test_matmul.py",
    "test_rows.py",
    "test_down.py",
    "test_attention.py",
    "test_sampling.py",
)
PROGRAM_TESTS = ("test_program.py", "test_answers.py")


@pytest.mark.parametrize(
    ("path", "tests"),
    [
        *[pytest.param(path, KERNEL_TESTS, id=f"kernels-{path}") for path in cpu.PATHS],
        *[pytest.param(path, PROGRAM_TESTS, id=f"program-{path}", marks=pytest.mark.slow) for path in cpu.PATHS],
    ],
)
def test_on_path(path, tests):
    if path == cpu.path():
        pytest.skip("this run's own path")
    if cpu.PATHS.index(path) < cpu.PATHS.index(cpu.best_path()):
        pytest.skip(f"this processor lacks {path}")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(
        command, cwd=TESTS, env=os.environ | {"HOTNEURON_SIMD": path}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
