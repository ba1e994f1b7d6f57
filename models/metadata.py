"""Typed access to a model file's metadata: every value is checked for type and range where it is read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NoReturn

from hotneuron.models.errors import ModelFileError
from hotneuron.models.gguf_file import GGUFFile


@dataclass(frozen=True, slots=True)
class Metadata:
    """The keys of one file; a key that starts with a dot is the architecture's own, such as `.block_count`.

    Every method raises ModelFileError naming file and key if the value has the wrong type or is out of range, and if
    it is absent and there is no default.
    """

    file: GGUFFile

    def key(self, key: str) -> str:
        return f"{self.text('general.architecture')}{key}" if key.startswith(".") else key

    def has(self, key: str) -> bool:
        return self.key(key) in self.file.metadata

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            self.fail(key, f"{_short(value)} is not a text")
        return value

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """A whole number from low to high. Some converters write a list, the same for every layer."""
        value = self._value(key, default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool):
            self.fail(key, f"{_short(value)} is not a whole number")
        if not low <= value <= high:
            self.fail(key, f"{value} is out of range; {low} to {high} are supported")
        return value

    def real(self, key: str, low: float, high: float, default: float | None = None) -> float:
        value = self._value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            self.fail(key, f"{_short(value)} is not a number")
        if not (math.isfinite(value) and low <= value <= high):
            self.fail(key, f"{value} is out of range; {low:g} to {high:g} are supported")
        return float(value)

    def fail(self, key: str, problem: str) -> NoReturn:
        raise ModelFileError(self.file.path, self.key(key), problem)

    def _value(self, key: str, default: Any) -> Any:
        value = self.file.metadata.get(self.key(key), default)
        if value is None:
            self.fail(key, "is missing")
        return value


def _short(value: Any) -> str:
    text = repr(value if not isinstance(value, list) else value[:4])
    return text if len(text) <= 60 else text[:57] + "..."
