"""How long an idle model stays, in Ollama's grammar: seconds, `10m`, `1h30m`, 0 for not at all, negative for ever."""

from __future__ import annotations

import math
import re

from hotneuron.models.errors import RequestError

DEFAULT = "5m"
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)(ns|us|µs|ms|s|m|h)")


def parse_keep_alive(value: str | float) -> float:
    """Seconds; infinity for ever. Raises RequestError."""
    seconds = _seconds(value)
    if seconds is None or math.isnan(seconds):
        raise RequestError(f"keep_alive={str(value)[:40]!r}: give seconds, or a duration as 10m or 1h30m; -1: for ever")
    return math.inf if seconds < 0 else seconds


def _seconds(value: str | float) -> float | None:
    if not isinstance(value, str):
        return float(value)
    text = value.strip()
    sign, digits = (-1.0, text[1:]) if text.startswith("-") else (1.0, text)
    if re.fullmatch(r"\d{1,12}(\.\d{1,9})?", digits):
        return sign * float(digits)
    parts = _PART.findall(digits)
    if not parts or "".join(number + unit for number, unit in parts) != digits:
        return None
    return sign * sum(float(number) * _UNITS_S[unit] for number, unit in parts)
