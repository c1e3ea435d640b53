"""Where chat templates run: jinja2's immutable sandbox, with a bound on the work and on the memory of one rendering.

A template comes with a model somebody downloaded. The sandbox keeps it away from Python's internals; the bounds keep it
from occupying the server: every iteration and call spends a step, and no string may outgrow :data:`MAX_CHARACTERS`.
Steps are counted, not timed, so that a template behaves alike on a slow and a fast machine.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_STEPS = 200_000
"""Iterations, calls and pieces of output in one rendering; a chat of 10,000 messages needs less than half of it."""
MAX_CHARACTERS = 16 * 2**20
"""Of any string that a template makes, and of its output: far more than fits into any model's context."""
MAX_REPEAT = 100_000
"""Of any number that says how long something shall become."""
_UNBOUNDED_FILTERS = ("center", "format", "pprint", "urlize", "wordwrap", "xmlattr")
"""Filters whose output is not bounded by their input's size, and which chat templates do not use."""


class TemplateLimitError(TemplateError):
    """A template needs more steps or memory than one rendering may have."""


_steps_left: ContextVar[int] = ContextVar("steps_left", default=MAX_STEPS)


def _spend(steps: int) -> None:
    left = _steps_left.get() - steps
    _steps_left.set(left)
    if left < 0:
        raise TemplateLimitError(f"the template takes more than {MAX_STEPS} steps")


def _bounded_length(length: int) -> None:
    if length > MAX_CHARACTERS:
        raise TemplateLimitError(f"the template makes a text of more than {MAX_CHARACTERS} characters")


def _bounded_iteration(iterable: Iterable[Any]) -> Iterable[Any]:
    """Sized things are paid for at once and stay what they are (``loop.last`` needs the size); others as they go."""
    if isinstance(iterable, (Sequence, Mapping, set)):
        _spend(len(iterable))
        return iterable
    return _paid_one_by_one(iterable)


def _paid_one_by_one(iterable: Iterable[Any]) -> Iterator[Any]:
    for item in iterable:
        _spend(1)
        yield item


def _range(*args: int) -> range:
    numbers = range(*args)
    _spend(len(numbers))
    return numbers


def _concatenated(values: Sequence[Any]) -> str:
    return _joined(values)


def _joined(values: Iterable[Any], separator: str = "", attribute: str | None = None) -> str:
    if attribute is not None:
        values = [value.get(attribute, "") for value in values]
    parts = [str(value) for value in values]
    _bounded_length(sum(map(len, parts)) + len(separator) * len(parts))
    return str(separator).join(parts)


def _replaced(text: str, old: str, new: str, count: int = -1) -> str:
    text = str(text)
    _bounded_length(len(text) + (text.count(old) if old else len(text) + 1) * len(new))
    return text.replace(old, new, -1 if count is None else count)


def _indented(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    indent = width if isinstance(width, str) else " " * min(width, MAX_REPEAT)
    lines = str(text).splitlines(keepends=True)
    _bounded_length(len(text) + len(indent) * len(lines))
    return "".join(
        indent + line if (index or first) and (blank or line.strip()) else line for index, line in enumerate(lines)
    )


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:
    """JSON as it is, not escaped for HTML: it goes into a prompt."""
    if indent is not None and indent > 16:
        raise TemplateLimitError(f"tojson takes an indent of up to 16, not {indent}")
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    _bounded_length(len(text))
    return text


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


class _Instrument(NodeTransformer):
    """Puts the bounds around loops and concatenations, for which the sandbox has no hook."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "hotswap_bounded", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, "hotswap_concatenated", [], [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """``{% generation %}`` marks what an assistant wrote, for training; here its body is just rendered."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment that transformers' chat templates expect: its whitespace rules, tags, filters and functions."""

    intercepted_binops = frozenset(["*", "**", "%", "+"])

    def __init__(self, now: Callable[[], datetime] = datetime.now) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        for name in _UNBOUNDED_FILTERS:
            del self.filters[name]
        self.filters.update(
            tojson=_to_json, join=_joined, replace=_replaced, indent=_indented,
            hotswap_bounded=_bounded_iteration, hotswap_concatenated=_concatenated,
        )
        self.globals = {
            "range": _range, "dict": dict, "namespace": self.globals["namespace"],
            "raise_exception": _raise_exception, "strftime_now": lambda format: now().strftime(str(format)[:100]),
        }

    def compiled(self, source: str) -> Callable[[Mapping[str, Any]], str]:
        """A function from a template's variables to its output. Raises TemplateError, TemplateLimitError."""
        if len(source) > MAX_CHARACTERS // 16:
            raise TemplateLimitError(f"the template has {len(source)} characters, the limit is {MAX_CHARACTERS // 16}")
        tree = _Instrument().visit(self.parse(source))
        template = self.template_class.from_code(self, self.compile(tree), self.globals)

        def render(variables: Mapping[str, Any]) -> str:
            token = _steps_left.set(MAX_STEPS)
            parts, length = [], 0
            try:
                for part in template.generate(variables):
                    _spend(1)
                    length += len(part)
                    _bounded_length(length)
                    parts.append(part)
            finally:
                _steps_left.reset(token)
            return "".join(parts)

        return render

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _spend(1)
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            _check_string_method(owner, __obj.__name__, args)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        raise TemplateError("str.format is not available in chat templates; use ~ to put texts together")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            if isinstance(left, (str, list)) and isinstance(right, (str, list)):
                _bounded_length(len(left) + len(right))
        elif operator == "%":
            if isinstance(left, str):
                raise TemplateError("% on texts is not available in chat templates; use ~ to put texts together")
        elif operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, (str, list, tuple)) and isinstance(other, int):
                    _bounded_length(len(one) * other)
            _bounded_number(left, right)
        else:
            _bounded_number(left, right)
            if right > 64:
                raise TemplateLimitError(f"the template raises to the power of {right}, the limit is 64")
        return super().call_binop(context, operator, left, right)


def _bounded_number(*values: Any) -> None:
    if any(isinstance(value, int) and abs(value) > 2**64 for value in values):
        raise TemplateLimitError("the template computes with numbers beyond 64 bits")


def _check_string_method(text: str, method: str, args: tuple[Any, ...]) -> None:
    """Refuse methods that would make a text much longer than what goes in."""
    if any(isinstance(arg, int) and arg > MAX_REPEAT for arg in args):
        raise TemplateLimitError(f"{method}() is called with a number above {MAX_REPEAT}")
    if method == "replace" and len(args) > 1:
        old, new = str(args[0]), str(args[1])
        _bounded_length(len(text) + (text.count(old) if old else len(text) + 1) * len(new))
    elif method == "join" and args:
        _bounded_length(sum(len(part) + len(text) for part in args[0]))
