"""Fixtures that several test files share. Run all tests with `make test`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hotneuron.models.catalog import default_model_path as fetched_model_path
from hotneuron.models.gguf_file import GGUFFile

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's file: $HOTNEURON_TEST_MODEL, or the one in the cache; without it the test is skipped."""
    named = os.environ.get("HOTNEURON_TEST_MODEL")
    path = Path(named) if named else fetched_model_path()
    if path is not None and path.is_file():
        return path
    message = f"the default model is not on this machine ({path or 'never fetched'}); `make run` fetches it"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture(scope="session")
def default_metadata(default_model_path: Path) -> dict[str, Any]:
    return GGUFFile.open(default_model_path).metadata


@pytest.fixture(scope="session")
def reference() -> dict[str, Any]:
    """What llama.cpp answers for the default model; `peer` in the file says which build."""
    return json.loads((DATA / "smollm2-135m-q4_1.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def text_a() -> str:
    return (DATA / "text_a.txt").read_text(encoding="utf-8")
