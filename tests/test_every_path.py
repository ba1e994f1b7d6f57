"""The kernels' tests again on each lesser instruction path; a path is fixed when the kernels are imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hotneuron.kernels import cpu

TESTS = Path(__file__).parent
KERNEL_TESTS = ("test_simd.py", "test_matmul.py", "test_sampling.py")


@pytest.mark.parametrize("path", cpu.PATHS)
def test_kernels_on_path(path):
    if path == cpu.path():
        pytest.skip("this run's own path")
    if cpu.PATHS.index(path) < cpu.PATHS.index(cpu.best_path()):
        pytest.skip(f"this processor lacks {path}")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *KERNEL_TESTS]
    done = subprocess.run(
        command, cwd=TESTS, env=os.environ | {"HOTNEURON_SIMD": path}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
