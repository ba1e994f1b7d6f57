"""A Jinja environment for templates out of model files: nothing to reach, nothing unbounded.

Jinja's immutable sandbox keeps a template away from Python's internals, but not from `'x' * 10**12` or from doubling
a string forty times. Here every value that a template makes is weighed, before it is made where one operation could
make it huge, so that no single operation runs long; and every step looks at a budget of processor time and output.
Methods and filters are those on a list. Apart from these limits it renders as Hugging Face's library does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
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

from hotneuron.models.template_limits import (
    MAX_INT_BITS,
    LimitError,
    budget,
    check_pattern,
    check_size,
    fresh_budget,
    keep,
    text_of,
    weigh,
)

_TEXT_METHODS = frozenset(
    "capitalize count endswith find index isalnum isalpha isascii isdecimal isdigit islower isnumeric isspace istitle "
    "isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip split "
    "splitlines startswith strip swapcase title upper".split()
)
_PATTERN_METHODS = frozenset(["strip", "lstrip", "rstrip", "rfind", "rindex", "rpartition", "rsplit"])
_FILTERS = (
    "abs capitalize count d default dictsort first float int items last length list lower map max min reject "
    "rejectattr reverse select selectattr sort title unique upper wordcount"
).split()
_REFUSED = (
    nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport, nodes.Block, nodes.EvalContextModifier,
)  # fmt: skip


class RefusalError(TemplateError):
    """The template called raise_exception: the messages do not suit it."""


def render(template: Any, context: dict[str, Any]) -> str:
    """Renders what `compile_template` made, within a fresh budget. Raises whatever the template raises."""
    with fresh_budget():
        text = "".join(template.generate(context))
        check_size(len(text))
        return text


def _loop(values: Iterable[Any]) -> Iterator[Any]:
    step = budget().step
    for value in values:
        step()
        yield value


def _concat(*values: Any) -> str:
    texts = [text_of(value) for value in values]
    check_size(sum(map(len, texts)))
    return "".join(texts)


@pass_context
def _finalize(_context: Context, value: Any) -> str:
    # NOTE: only because it takes the context does Jinja leave constants to the rendering, where they are counted.
    left, text = budget(), text_of(value)
    left.step()
    left.write(len(text))
    return text


def _replaced(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = text_of(value), text_of(old), text_of(new)
    times = text.count(old) if count is None or count < 0 else min(count, text.count(old))
    check_size(len(text) + times * (len(new) - len(old)))
    return text.replace(old, new, times)


@pass_environment
def _joined(environment: Any, values: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    pick = make_attrgetter(environment, attribute) if attribute is not None else lambda value: value
    texts, length, d = [], 0, text_of(d)
    for value in values:
        texts.append(text_of(pick(value)))
        length += len(texts[-1]) + len(d)
        check_size(length)
    return d.join(texts)


def _indented(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text = text_of(value)
    check_size(len(text) + (text.count("\n") + 1) * (width if isinstance(width, int) else len(width)))
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
    check_pattern(chars)
    return text_of(value).strip(chars)


def _raise_exception(message: Any) -> None:
    raise RefusalError(text_of(message))


def _strftime_now(form: Any) -> str:
    form = text_of(form)
    # NOTE: the C library takes widths here: `%999999999d` fills memory.
    if len(form) > 100 or re.search(r"%-?[^A-Za-z%-]", form):
        raise LimitError("uses a date format that is not plain")
    return datetime.now().strftime(form)


def _stepping(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)  # keeps the marks that tell Jinja to pass its context
    def stepping(*args: Any, **kwargs: Any) -> Any:
        return keep(function(*args, **kwargs))

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
        node.iter = _filter(node.iter, "_loop")  # type: ignore[arg-type]  # Jinja declares it wider than it is
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
        filters: dict[str, Callable[..., Any]] = {name: DEFAULT_FILTERS[name] for name in _FILTERS} | {
            "e": lambda value: str(escape(text_of(value))),
            "indent": _indented,
            "join": _joined,
            "replace": _replaced,
            "round": _rounded,
            "safe": text_of,
            "string": text_of,
            "tojson": _json,
            "trim": _trimmed,
        }
        filters["escape"] = filters["e"]
        filters["_concat"] = _concat
        ours = {"_loop": _loop, "_keep": keep}
        self.filters = {name: _stepping(function) for name, function in filters.items()} | ours
        tests: dict[str, Any] = dict(DEFAULT_TESTS)
        self.tests = {name: _stepping(test) for name, test in tests.items()}

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
        budget().step()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            for name in ("_loop_vars", "_block_vars"):  # Jinja's own, for functions that take the context
                kwargs.pop(name, None)
            if __obj.__name__ == "replace":
                return keep(_replaced(owner, *args, **kwargs))
            if __obj.__name__ == "join":
                return keep(_joined(__self, args[0] if args else (), owner))
            if __obj.__name__ in _PATTERN_METHODS:
                check_pattern(*args, *kwargs.values())
        return keep(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            raise LimitError("formats text with %")
        if operator == "*" and not (isinstance(left, int | float) and isinstance(right, int | float)):
            times, repeated = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(times, int) and isinstance(repeated, str | list | tuple):
                check_size(times * max(weigh(repeated), 1))
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            check_size(len(left) + len(right))
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * right > MAX_INT_BITS:
                raise LimitError("makes a number that is too large")
        return keep(super().call_binop(context, operator, left, right))
