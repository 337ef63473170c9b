"""A checkpoint's own chat template, run within bounds. Knows Jinja; knows no tokens and no messages.

A template is a program that came with the weights. It sees only what it is given (the sandbox), ends in time, and
makes no more text than a prompt could need: loops, calls, filters and operators ask before they go on.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import lru_cache, wraps
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tinyloop.errors import RequestError

MAX_SOURCE = 1 << 18  # characters of a template; long ones in use have a tenth of it
MAX_RENDERED = 1 << 24  # characters; far above any context, so only a runaway template meets it
MAX_MADE = 1 << 28  # characters and items of all values that are made on the way
MAX_ITEMS = 1 << 20  # items of a nested value, each counted as often as it stands there
MAX_BITS = 1 << 12  # of an integer
MAX_SECONDS = 5.0  # of the thread's own time
KEPT = 1000, 64  # of so many values, each of more items than that, it is remembered that they are not too large
# A width of six digits, or one that is computed, in either kind of format string.
_WIDE = re.compile(r"%[^%a-zA-Z]*(?:\d{6}|\*)|\{[^{}]*:[^{}]*(?:\d{6}|\{)")


def render(source: str, **variables: Any) -> str:
    """What the template writes. Raises RequestError("messages") if it is broken, refuses, or does not end."""
    try:
        with _Work():
            return _bounded(_compiled(source), variables)
    except _Refused as error:
        raise RequestError("messages", f"the chat template refuses these messages: {str(error)[:200]}") from error
    except TooMuch as error:
        raise RequestError("messages", f"the chat template {error}") from error
    except TemplateSyntaxError as error:
        raise RequestError("messages", f"the model's chat template is broken at line {error.lineno}") from error
    except Exception as error:  # a template is a program: it can fail in any way on messages it does not expect
        kind = type(error).__name__
        raise RequestError("messages", f"the model's chat template cannot render these messages ({kind})") from error


class _Refused(TemplateError):
    """The template itself called raise_exception; its message is meant for the caller."""


class TooMuch(TemplateError):
    """The template wants more than it may have."""


def _bounded(template: Template, variables: dict[str, Any]) -> str:
    parts, size = [], 0
    for part in template.generate(variables):
        _Work.tick()
        parts.append(part)
        size += len(part)
        if size > MAX_RENDERED:
            raise TooMuch(f"writes more than {MAX_RENDERED} characters")
    return "".join(parts)


@lru_cache(maxsize=16)
def _compiled(source: str) -> Template:
    if len(source) > MAX_SOURCE:
        raise TooMuch(f"is longer than {MAX_SOURCE} characters")
    environment = _Environment()
    return environment.from_string(environment.watched(source))


# What has been used up.


class _Work:
    """The work of one rendering, on its thread."""

    _now = threading.local()

    def __enter__(self) -> None:
        self._now.end, self._now.made, self._now.weighed = time.thread_time() + MAX_SECONDS, 0, {}

    def __exit__(self, *_: object) -> None:
        self._now.__dict__.clear()

    @classmethod
    def tick(cls) -> None:
        if time.thread_time() > cls._now.end:
            raise TooMuch(f"does not end within {MAX_SECONDS:g} seconds")

    @classmethod
    def make(cls, size: int) -> None:
        """Ask for room for a value, or account for one."""
        cls._now.made += size
        if size > MAX_RENDERED or cls._now.made > MAX_MADE:
            raise TooMuch(f"makes more than {MAX_RENDERED} characters of one value, or {MAX_MADE} of all")

    @classmethod
    def is_weighed(cls, value: Any) -> bool:
        return id(value) in cls._now.weighed

    @classmethod
    def remember(cls, value: Any, items: int) -> None:
        """The sandbox lets no template change a list or a mapping, so what was weighed stays so."""
        if items > KEPT[1] and len(cls._now.weighed) < KEPT[0]:
            cls._now.weighed[id(value)] = value


def _weigh(value: Any) -> Any:
    """The value, if it is not so deeply nested that writing or comparing it would take for ever."""
    if isinstance(value, list | tuple | Mapping) and not _Work.is_weighed(value):
        left, pending = MAX_ITEMS, [value]
        while pending:
            one = pending.pop()
            left -= len(one)
            if left < 0:
                raise TooMuch(f"nests more than {MAX_ITEMS} items in one value")
            parts: Iterable[Any] = one.values() if isinstance(one, Mapping) else one
            pending += [part for part in parts if isinstance(part, list | tuple | Mapping)]
        _Work.remember(value, MAX_ITEMS - left)
    return value


def _made(value: Any) -> Any:
    """A value that an operation has made."""
    if isinstance(value, str | list | tuple):
        _Work.make(len(value))
    return value


def _small(values: Iterable[Any]) -> None:
    """Widths, counts and indents are small numbers."""
    if any(isinstance(value, int) and value > MAX_ITEMS for value in values):
        raise TooMuch(f"asks for more than {MAX_ITEMS} of something")


def _plain_format(text: Any, *_: Any, **__: Any) -> None:
    if isinstance(text, str) and _WIDE.search(text):
        raise TooMuch("formats to a width that is too large or computed")


def _grow(operator: str, left: Any, right: Any) -> None:
    """Ask for room for what an operator is about to make."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if bits > MAX_BITS:
            raise TooMuch(f"makes numbers of more than {MAX_BITS} bits")
    elif operator == "*":
        sized, times = (left, right) if isinstance(right, int) else (right, left)
        if isinstance(sized, str | list | tuple) and isinstance(times, int):
            _Work.make(len(sized) * max(times, 0))
    elif operator == "%":
        _plain_format(left)


def _replaced(text: Any, old: Any = None, new: Any = None, *_: Any, **__: Any) -> None:
    if isinstance(text, str) and isinstance(old, str) and isinstance(new, str):
        _Work.make(len(text) + text.count(old) * len(new))


def _joined(parts: Any, between: Any = "", *_: Any, **__: Any) -> None:
    if isinstance(parts, list | tuple):
        gap = len(between) if isinstance(between, str) else 0
        _Work.make(sum(len(part) + gap if isinstance(part, str) else gap for part in parts))


# The environment.


class _GenerationBlocks(Extension):
    """`{% generation %}` marks what a model wrote, for training; here its content counts alone."""

    tags = {"generation"}  # noqa: RUF012  (Jinja declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a question asked before every piece of work."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlocks], finalize=_weigh
        )
        self.filters["tojson"] = _to_json
        before: dict[str, Callable[..., None]] = {"replace": _replaced, "join": _joined, "format": _plain_format}
        functions: tuple[dict[str, Any], ...] = (self.filters, self.tests)
        for kind in functions:
            kind.update({name: _asking(function, before.get(name)) for name, function in kind.items()})
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

    def watched(self, source: str) -> nodes.Template:
        """The parsed template, in which each turn of a loop is a call, and so are `~` and what is compared."""
        tree = self.parse(source)
        for loop in tree.find_all(nodes.For):
            loop.body.insert(0, nodes.ExprStmt(_call("turn"), lineno=loop.lineno))
            loop.test = loop.test and nodes.And(_call("turn"), loop.test)
        for compare in tree.find_all(nodes.Compare):
            compare.expr = _call("weighed", compare.expr)
        _replace_concats(tree)
        tree.set_environment(self)
        return tree

    def turn(self) -> bool:
        return True

    def weighed(self, value: Any) -> Any:
        return _weigh(value)

    def concat_values(self, *values: Any) -> str:
        return "".join(str(_weigh(value)) for value in values)

    def call(_self, _context: Context, _called: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Any call that a template makes."""
        _Work.tick()
        owner, name = getattr(_called, "__self__", None), getattr(_called, "__name__", "")
        if isinstance(owner, str):
            _small((*args, *kwargs.values()))
            if name == "replace":
                _replaced(owner, *args)
            if name == "join" and args:
                _joined(args[0], owner)
        return _made(super().call(_context, _called, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _Work.tick()
        _grow(operator, left, right)
        return _made(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        found = super().wrap_str_format(value)
        if found is not None:
            _plain_format(value.__self__)
        return found


def _call(method: str, *arguments: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), list(arguments), [], None, None)


def _replace_concats(node: nodes.Node) -> None:
    for field, value in node.iter_fields():
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, nodes.Node):
                _replace_concats(child)
        if isinstance(value, nodes.Concat):
            setattr(node, field, _joining(value))
        elif isinstance(value, list):
            value[:] = [_joining(child) if isinstance(child, nodes.Concat) else child for child in value]


def _joining(concat: nodes.Concat) -> nodes.Call:
    return _call("concat_values", *concat.nodes)


def _asking(function: Callable[..., Any], before: Callable[..., None] | None = None) -> Callable[..., Any]:
    """A filter or test that asks first. Some get the environment or a context before the value."""
    skip = int(hasattr(function, "jinja_pass_arg"))

    @wraps(function)
    def asking(*args: Any, **kwargs: Any) -> Any:
        _Work.tick()
        _weigh(args[skip] if len(args) > skip else None)
        _small((*args[skip + 1 :], *kwargs.values()))
        if before:
            before(*args[skip:], **kwargs)
        found = function(*args, **kwargs)
        return _made(_counted(found) if isinstance(found, Iterator) else found)

    return asking


def _counted(values: Iterator[Any]) -> Iterator[Any]:
    for value in values:
        _Work.tick()
        yield value


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own filter escapes for HTML, which models were not trained on."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> None:
    raise _Refused(message)
