"""Every environment variable that hotneuron reads: one typed table, one prefix."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PREFIX = "HOTNEURON_"


@dataclass(frozen=True, slots=True)
class Knob:
    name: str
    parse: Callable[[str], Any]
    default: Any
    meaning: str

    def get(self) -> Any:
        """The value in the environment, or the default. Raises ValueError naming the variable and what it takes."""
        text = os.environ.get(PREFIX + self.name)
        if text is None or text == "":
            return self.default
        try:
            return self.parse(text)
        except (ValueError, KeyError) as error:
            raise ValueError(f"{PREFIX}{self.name}={text!r}: {error}; it is: {self.meaning}") from None


def _one_of(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(f"not one of {', '.join(names)}")
        return text

    return parse


def _flag(text: str) -> bool:
    return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[text.lower()]


SIMD = Knob("SIMD", _one_of("avx512", "avx2", "portable"), None, "instruction path: avx512, avx2 or portable")
REFERENCE = Knob("REFERENCE", _flag, False, "1 runs the engine on the slow NumPy reference kernels")
CACHE = Knob("CACHE", str, None, "folder for models, packs and compiled kernels (default: the user's cache folder)")
DEADLINE_MS = Knob("DEADLINE_MS", int, 5000, "milliseconds after which a wait for another worker becomes an error")
OFFLINE = Knob("OFFLINE", _flag, False, "1 forbids every download")

API_KEY = Knob("API_KEY", str, None, "a key that clients of `hotneuron serve` must give")

ALL = (SIMD, REFERENCE, CACHE, DEADLINE_MS, OFFLINE, API_KEY)
