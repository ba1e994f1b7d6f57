"""A Jinja environment for templates out of model files: nothing to reach, nothing unbounded.

Jinja's immutable sandbox keeps a template away from Python's internals, but not from `'x' * 10**12` or from doubling
a string forty times. Here every value that a template makes is weighed, before it is made where one operation could
make it huge, so that no single operation runs long; and every step looks at a budget of processor time and output.
Methods and filters are those on a list. Apart from these limits it renders as Hugging Face's library does.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import TemplateError, Undefined, nodes, pass_context, pass_environment
from jinja2.defaults import DEFAULT_FILTERS, DEFAULT_TESTS
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from markupsafe import escape

MAX_CHARS = 1 << 22  # of any one value, and of the rendered prompt
MAX_SECONDS = 2.0  # of the rendering thread's processor time
_MAX_DEPTH = 64
_MAX_INT_BITS = 4096
_NODE_CHARS = 64  # what one entry of a list weighs, in characters
_MAX_MADE_CHARS = 1 << 28  # of all values together, since a template can keep each under a name

_TEXT_METHODS = frozenset(
    "capitalize count endswith find index isalnum isalpha isascii isdecimal isdigit islower isnumeric isspace istitle "
    "isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip split "
    "splitlines startswith strip swapcase title upper".split()
)
_MAX_PATTERN_CHARS = 256
_PATTERN_METHODS = frozenset(["strip", "lstrip", "rstrip", "rfind", "rindex", "rpartition", "rsplit"])
_FILTERS = (
    "abs capitalize count d default dictsort first float int items last length list lower map max min reject "
    "rejectattr reverse select selectattr sort title unique upper wordcount"
).split()
_REFUSED = (
    nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport, nodes.Block, nodes.EvalContextModifier,
)  # fmt: skip


class LimitError(SecurityError):
    """The template asked for more than it may have."""


class RefusalError(TemplateError):
    """The template called raise_exception: the messages do not suit it."""


@dataclass(slots=True)
class Budget:
    """What is left for one rendering."""

    end_seconds: float
    output_chars: int = 2 * MAX_CHARS  # text that passes through macros is counted on each way
    made_chars: int = _MAX_MADE_CHARS
    steps: int = 0

    def make(self, chars: int) -> None:
        self.made_chars -= chars
        if self.made_chars < 0:
            raise LimitError(f"makes values of more than {_MAX_MADE_CHARS} characters in all")

    def step(self) -> None:
        self.steps += 1
        if self.steps % 16 == 0 and time.thread_time() > self.end_seconds:
            raise LimitError(f"takes more than {MAX_SECONDS:g} s")


_BUDGET: ContextVar[Budget] = ContextVar("template budget")


def render(template: Any, context: dict[str, Any]) -> str:
    """Renders a template of this environment within a fresh budget. Raises whatever the template raises."""
    token = _BUDGET.set(Budget(time.thread_time() + MAX_SECONDS))
    try:
        text = "".join(template.generate(context))
    finally:
        _BUDGET.reset(token)
    _within(len(text))
    return text


def weigh(value: Any) -> int:
    """Characters in plain data, what is shared counted as often as it occurs. LimitError for what is no data."""
    weight, stack = 0, [(value, 0)]
    while stack:
        item, depth = stack.pop()
        if isinstance(item, str):
            weight += len(item)
        elif isinstance(item, int):
            if item.bit_length() > _MAX_INT_BITS:
                raise LimitError("makes a number that is too large")
        elif isinstance(item, list | tuple | dict):
            children = item if not isinstance(item, dict) else [*item.keys(), *item.values()]
            weight += _NODE_CHARS * len(children)
            if depth == _MAX_DEPTH:
                raise LimitError(f"nests values more than {_MAX_DEPTH} deep")
            _within(weight)
            stack += [(child, depth + 1) for child in children]
        elif item is not None and not isinstance(item, float | Undefined):
            raise LimitError(f"uses a {type(item).__name__} as if it were text or plain data")
        _within(weight)
    return weight


def _within(chars: int) -> None:
    if chars > MAX_CHARS:
        raise LimitError(f"makes a value of more than {MAX_CHARS} characters")


def _keep(value: Any) -> Any:
    """The value, if it is of bounded size; generators, macros and namespaces hold values that were weighed before."""
    budget = _BUDGET.get()
    budget.step()
    if isinstance(value, str):
        _within(len(value))
        budget.make(len(value))
    elif isinstance(value, list | tuple | dict):
        weigh(value)
        budget.make(_NODE_CHARS * len(value))
    elif isinstance(value, int):
        weigh(value)
    return value


def _text(value: Any) -> str:
    weigh(value)
    return str(value)


def _loop(values: Iterable[Any]) -> Iterator[Any]:
    step = _BUDGET.get().step
    for value in values:
        step()
        yield value


def _concat(*values: Any) -> str:
    texts = [_text(value) for value in values]
    _within(sum(map(len, texts)))
    return "".join(texts)


@pass_context
def _finalize(_context: Context, value: Any) -> str:
    budget, text = _BUDGET.get(), _text(value)
    budget.step()
    budget.output_chars -= len(text)
    if budget.output_chars < 0:
        raise LimitError(f"writes more than {MAX_CHARS} characters")
    return text


def _replaced(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = _text(value), _text(old), _text(new)
    times = text.count(old) if count is None or count < 0 else min(count, text.count(old))
    _within(len(text) + times * (len(new) - len(old)))
    return text.replace(old, new, times)


@pass_environment
def _joined(environment: Any, values: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    pick = make_attrgetter(environment, attribute) if attribute is not None else lambda value: value
    texts, length, d = [], 0, _text(d)
    for value in values:
        texts.append(_text(pick(value)))
        length += len(texts[-1]) + len(d)
        _within(length)
    return d.join(texts)


def _indented(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text = _text(value)
    _within(len(text) + (text.count("\n") + 1) * (width if isinstance(width, int) else len(width)))
    return DEFAULT_FILTERS["indent"](text, width, first, blank)


def _json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    weigh(value)
    if not (indent is None or (isinstance(indent, int) and 0 <= indent <= 8)):
        raise LimitError("indents JSON by more than 8")
    if separators is not None and not all(isinstance(text, str) and len(text) <= 8 for text in separators):
        raise LimitError("separates JSON by more than 8 characters")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _rounded(value: Any, precision: int = 0, method: str = "common") -> Any:
    if not -64 <= precision <= 64:
        raise LimitError("rounds to more than 64 places")
    return DEFAULT_FILTERS["round"](value, precision, method)


def _trimmed(value: Any, chars: str | None = None) -> str:
    _check_pattern(chars)
    return _text(value).strip(chars)


def _check_pattern(*patterns: Any) -> None:
    """For methods whose time grows with the product of both lengths."""
    if any(isinstance(pattern, str) and len(pattern) > _MAX_PATTERN_CHARS for pattern in patterns):
        raise LimitError(f"searches for more than {_MAX_PATTERN_CHARS} characters")


def _raise_exception(message: Any) -> None:
    raise RefusalError(_text(message))


def _strftime_now(form: Any) -> str:
    form = _text(form)
    # NOTE: the C library takes widths here: `%999999999d` fills memory.
    if len(form) > 100 or re.search(r"%-?[^A-Za-z%-]", form):
        raise LimitError("uses a date format that is not plain")
    return datetime.now().strftime(form)


def _stepping(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)  # keeps the marks that tell Jinja to pass its context
    def stepping(*args: Any, **kwargs: Any) -> Any:
        return _keep(function(*args, **kwargs))

    return stepping


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; it renders as its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Weighing(NodeTransformer):
    """Sends what the sandbox has no hook for (loops, output, literals, `~`, comparisons) through filters of ours."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.recursive:
            raise LimitError("uses a recursive loop")
        self.generic_visit(node)
        node.iter = _filter(node.iter, "_loop")
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [
            nodes.Const(child.data, lineno=child.lineno) if isinstance(child, nodes.TemplateData) else child
            for child in node.nodes
        ]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node.nodes[0], "_concat", node.nodes[1:])

    def _kept(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, "_keep")

    visit_List = visit_Dict = visit_Compare = _kept

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        return self._kept(node) if isinstance(node.arg, nodes.Slice) else self.generic_visit(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self._kept(node) if node.ctx == "load" else node


def _filter(node: nodes.Expr, name: str, args: list[nodes.Expr] | None = None) -> nodes.Filter:
    return nodes.Filter(node, name, args or [], [], None, None, lineno=node.lineno)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Compiles templates, which `render` then renders. Has no loader."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # constants are not computed while compiling, out of the budget
            finalize=_finalize,
            extensions=[loopcontrols, _Generation],
        )
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        filters = {name: DEFAULT_FILTERS[name] for name in _FILTERS} | {
            "e": lambda value: str(escape(_text(value))),
            "indent": _indented,
            "join": _joined,
            "replace": _replaced,
            "round": _rounded,
            "safe": _text,
            "string": _text,
            "tojson": _json,
            "trim": _trimmed,
        }
        filters["escape"] = filters["e"]
        filters["_concat"] = _concat
        ours = {"_loop": _loop, "_keep": _keep}
        self.filters = {name: _stepping(function) for name, function in filters.items()} | ours
        self.tests = {name: _stepping(function) for name, function in DEFAULT_TESTS.items()}

    def compile_template(self, source: str) -> Any:
        """A template for `render`. Raises jinja2.TemplateError, LimitError, RecursionError."""
        tree = self.parse(source)
        refused = next(tree.find_all(_REFUSED), None)
        if refused is not None:
            raise LimitError(f"line {refused.lineno} uses {type(refused).__name__.lower()}")
        code = self.compile(_Weighing().visit(tree))
        return self.template_class.from_code(self, code, self.make_globals(None))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str):
            return attr in _TEXT_METHODS
        if isinstance(obj, dict):
            return attr in ("get", "items", "keys", "values")
        if isinstance(obj, list | tuple):
            return attr in ("count", "index")
        return isinstance(obj, Namespace | LoopContext | Undefined) and super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        """A key of that name, such as `pop` in a JSON schema; otherwise an error, where Jinja would print nothing."""
        if isinstance(obj, dict) and attribute in obj:
            return obj[attribute]
        raise SecurityError(f"uses {attribute!r} of a {type(obj).__name__}, which is not allowed")

    def wrap_str_format(self, value: Any) -> None:
        """Leaves `str.format` to is_safe_attribute, which refuses it: a format can ask for any width."""

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _BUDGET.get().step()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            for name in ("_loop_vars", "_block_vars"):  # Jinja's own, for functions that take the context
                kwargs.pop(name, None)
            if __obj.__name__ == "replace":
                return _keep(_replaced(owner, *args, **kwargs))
            if __obj.__name__ == "join":
                return _keep(_joined(__self, *args, d=owner, **kwargs))
            if __obj.__name__ in _PATTERN_METHODS:
                _check_pattern(*args, *kwargs.values())
        return _keep(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            raise LimitError("formats text with %")
        if operator == "*" and not (isinstance(left, int | float) and isinstance(right, int | float)):
            times, repeated = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(times, int) and isinstance(repeated, str | list | tuple):
                _within(times * max(weigh(repeated), 1))
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            _within(len(left) + len(right))
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * right > _MAX_INT_BITS:
                raise LimitError("makes a number that is too large")
        return _keep(super().call_binop(context, operator, left, right))
