"""What a chat template may use: time, output, and the size of every value that it makes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from jinja2 import Undefined
from jinja2.exceptions import SecurityError

MAX_CHARS = 1 << 22  # of any one value, and of the rendered prompt
MAX_SECONDS = 2.0  # of the rendering thread's processor time
MAX_MADE_CHARS = 1 << 28  # of all values together, since a template can keep each under a name
MAX_PATTERN_CHARS = 256
MAX_DEPTH = 64
MAX_INT_BITS = 4096
NODE_CHARS = 64  # what one entry of a list weighs, in characters


class LimitError(SecurityError):
    """The template asked for more than it may have."""


@dataclass(slots=True)
class Budget:
    """What is left for one rendering; every method raises LimitError when nothing is."""

    end_seconds: float
    output_chars: int = 2 * MAX_CHARS  # text that passes through macros is counted on each way
    made_chars: int = MAX_MADE_CHARS
    steps: int = 0

    def step(self) -> None:
        self.steps += 1
        if self.steps % 16 == 0 and time.thread_time() > self.end_seconds:
            raise LimitError(f"takes more than {MAX_SECONDS:g} s")

    def make(self, chars: int) -> None:
        self.made_chars -= chars
        if self.made_chars < 0:
            raise LimitError(f"makes values of more than {MAX_MADE_CHARS} characters in all")

    def write(self, chars: int) -> None:
        self.output_chars -= chars
        if self.output_chars < 0:
            raise LimitError(f"writes more than {MAX_CHARS} characters")


_BUDGET: ContextVar[Budget] = ContextVar("template budget")


@contextmanager
def fresh_budget() -> Iterator[None]:
    token = _BUDGET.set(Budget(time.thread_time() + MAX_SECONDS))
    try:
        yield
    finally:
        _BUDGET.reset(token)


def budget() -> Budget:
    """The budget of the rendering under way in this thread."""
    return _BUDGET.get()


def weigh(value: Any) -> int:
    """Characters in plain data, what is shared counted as often as it occurs. LimitError for what is no data."""
    weight, stack = 0, [(value, 0)]
    while stack:
        item, depth = stack.pop()
        if isinstance(item, str):
            weight += len(item)
        elif isinstance(item, int):
            if item.bit_length() > MAX_INT_BITS:
                raise LimitError("makes a number that is too large")
        elif isinstance(item, list | tuple | dict):
            children = item if not isinstance(item, dict) else [*item.keys(), *item.values()]
            weight += NODE_CHARS * len(children)
            if depth == MAX_DEPTH:
                raise LimitError(f"nests values more than {MAX_DEPTH} deep")
            check_size(weight)
            stack += [(child, depth + 1) for child in children]
        elif item is not None and not isinstance(item, float | Undefined):
            raise LimitError(f"uses a {type(item).__name__} as if it were text or plain data")
        check_size(weight)
    return weight


def keep(value: Any) -> Any:
    """The value, if it is of bounded size; generators, macros and namespaces hold values that were weighed before."""
    left = budget()
    left.step()
    if isinstance(value, str):
        check_size(len(value))
        left.make(len(value))
    elif isinstance(value, list | tuple | dict):
        weigh(value)
        left.make(NODE_CHARS * len(value))
    elif isinstance(value, int):
        weigh(value)
    return value


def text_of(value: Any) -> str:
    weigh(value)
    return str(value)


def check_size(chars: int) -> None:
    if chars > MAX_CHARS:
        raise LimitError(f"makes a value of more than {MAX_CHARS} characters")


def check_pattern(*patterns: Any) -> None:
    """For methods whose time grows with the product of both lengths."""
    if any(isinstance(pattern, str) and len(pattern) > MAX_PATTERN_CHARS for pattern in patterns):
        raise LimitError(f"searches for more than {MAX_PATTERN_CHARS} characters")
