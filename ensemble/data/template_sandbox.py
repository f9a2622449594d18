"""Where prompt templates run: what they may reach, and how much they may make of one row.

Templates come from configs that people pass around.  They see their row, the methods of text and lists that are
named here, and nothing else; that is stricter than Jinja2's sandbox, which refuses what is known to be dangerous.
What they make is metered: products, loops and the like end with a sentence before they fill the memory.  The meter
stops plain bombs; it is no proof against somebody who looks for what it does not count.

Shared by the parent, which renders the first rows, and by the worker.  Does not know what a row is.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, Final

from jinja2 import StrictUndefined, Undefined, nodes
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Namespace
from jinja2.visitor import NodeTransformer

from ensemble.data.json_cells import TemplateProblem

# For one row. A prompt of a million tokens has some five million characters; a cell may have ten million.
MOST_CHARACTERS: Final = 100_000_000
MOST_STEPS: Final = 1_000_000
MOST_BITS: Final = 10_000
_STEPS_A_CALL = 10  # or filter, or attribute: by the time it takes, beside an item of a loop
_CHARACTERS_A_PLACE = 64  # of a list or mapping, so that long ones of short values count too

_REACHABLE: tuple[tuple[type, frozenset[str]], ...] = (
    (
        str,  # without format, which reaches attributes by itself, and those that pad to any width
        frozenset(
            "capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit isidentifier "
            "islower isnumeric isprintable isspace istitle isupper join lower lstrip partition removeprefix "
            "removesuffix replace rfind rindex rpartition rsplit rstrip split splitlines startswith strip swapcase "
            "title upper".split()
        ),
    ),
    (dict, frozenset("copy get items keys values".split())),
    (list, frozenset("copy count index".split())),
    (tuple, frozenset("count grouper index list".split())),  # two of them are groupby's
    (float, frozenset(["is_integer"])),
    (Cycler, frozenset("current next reset".split())),
    (
        LoopContext,
        frozenset(
            "changed cycle depth depth0 first index index0 last length nextitem previtem revindex revindex0".split()
        ),
    ),
)
# Random numbers, and HTML; the same row must give the same prompt in every run.
_LEFT_OUT = {"globals": ("lipsum",), "filters": ("random", "center", "urlize", "wordwrap", "xmlattr")}
# Jinja2 calls these for what the source writes as "for" and "~". No source can name them.
_EACH, _TILDE = "each item", "put together"
_OF_TEXT = frozenset(
    "capitalize e escape forceescape lower pprint safe string striptags title trim truncate upper urlencode "
    "wordcount".split()
)


class _Meter:
    """What the row in hand has taken so far."""

    def __init__(self) -> None:
        self.characters = 0
        self.steps = 0

    def step(self, count: int = 1) -> None:
        self.steps += count
        if self.steps > MOST_STEPS:
            raise TemplateProblem(
                f"it takes more than {MOST_STEPS:,} steps for one row; shorten its loops, or lists"
            )

    def spend(self, characters: int) -> None:
        self.characters += characters
        if self.characters > MOST_CHARACTERS:
            raise TemplateProblem(f"it makes more than {MOST_CHARACTERS:,} characters of one row; shorten it")


_METER: ContextVar[_Meter] = ContextVar("meter")


@contextlib.contextmanager
def metered() -> Iterator[None]:
    """The time in which one row is rendered; outside of it nothing that is metered can run."""
    token = _METER.set(_Meter())
    try:
        yield
    finally:
        _METER.reset(token)


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja2's environment with an end.

    Args:
        finalize: what becomes of a value that is put into the text, before it is checked.
    """

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, finalize: Callable[[object], object]) -> None:
        def checked(value: object) -> object:
            return _checked_output(finalize(value))

        super().__init__(
            autoescape=False, undefined=StrictUndefined, keep_trailing_newline=True, finalize=checked
        )
        for name in _LEFT_OUT["globals"]:
            del self.globals[name]
        for name in _LEFT_OUT["filters"]:
            del self.filters[name]
        for name, made in list(self.filters.items()):
            self.add_filter(name, made)
        self.filters |= {_EACH: _each, _TILDE: _put_together}

    def add_filter(self, name: str, made: Callable[..., Any]) -> None:
        self.filters[name] = _metered_filter(name, made)

    def compile_tree(self, tree: nodes.Template) -> Any:
        """The renderable template of a parsed one, which is changed by it."""
        _Meters().visit(tree)
        return self.from_string(tree)

    def getattr(self, obj: Any, attribute: str) -> Any:
        _METER.get().step(_STEPS_A_CALL)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        if attr.startswith("_"):
            return False
        if type(obj) is Namespace:  # holds what the template itself has put there
            return True
        return any(isinstance(obj, kind) and attr in names for kind, names in _REACHABLE)

    def wrap_str_format(self, value: object) -> None:
        """Leaves ``str.format`` to ``is_safe_attribute``; releases before 3.1.6 have no such method."""

    def unsafe_undefined(self, obj: object, attribute: str) -> Undefined:
        """Refuses at once, where Jinja2 waits until the value is used."""
        hint = "; write '%.2f' | format(x) instead" if attribute.startswith("format") else ""
        raise TemplateProblem(f"{attribute!r} of type {type(obj).__name__} cannot be reached{hint}")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _before_format(left, right)
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length(), right.bit_length()
            grown = {"*": sum(bits), "**": bits[0] * max(right, 0)}.get(operator, max(bits))
            if grown > MOST_BITS:
                raise TemplateProblem(f"a number of more than {MOST_BITS:,} bits is too large")
        elif operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and isinstance(count, int):
                    _spend_on(sequence, max(count, 0))
        elif isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            _spend_on(left)
            _spend_on(right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _METER.get().step(_STEPS_A_CALL)
        if isinstance(obj, LoopContext):  # "for ... recursive"
            args = tuple(map(_each, args))
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str) and name == "join" and args:
            args = (_before_join(args[0], owner), *args[1:])
        elif isinstance(owner, str) and name == "replace":
            _before_replace(owner, *args)
        return super().call(context, obj, *args, **kwargs)

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """The text of a template, a macro or a block."""
        meter, kept = _METER.get(), []
        for part in parts:
            meter.spend(len(part))
            kept.append(part)
        return "".join(kept)


class _Meters(NodeTransformer):
    """Puts the meter where Jinja2 lets no environment look: into loops and ``~``."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        node.iter = _filter(node.iter, _EACH, node.environment)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        made: nodes.Node = _filter(nodes.List(node.nodes, lineno=node.lineno), _TILDE, node.environment)
        return made


def _filter(node: Any, name: str, environment: Any) -> Any:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno).set_environment(environment)


def _each(value: Iterable[Any]) -> Iterator[Any]:
    meter = _METER.get()
    for item in value:
        meter.step()
        yield item


def _put_together(values: Iterable[object]) -> str:
    """``a ~ b``."""
    meter, parts = _METER.get(), []
    for value in values:
        meter.spend(_characters(value))
        parts.append(str(value))
    return "".join(parts)


def _metered_filter(name: str, made: Callable[..., Any]) -> Callable[..., Any]:
    # Some take one of Jinja2's own objects first; wraps() takes over the mark that says so.
    first = 1 if hasattr(made, "jinja_pass_arg") else 0
    before = _BEFORE.get(name)

    @functools.wraps(made)
    def call(*args: Any, **kwargs: Any) -> Any:
        meter = _METER.get()
        meter.step(_STEPS_A_CALL)
        if before is not None:
            value = before(*args[first:], **kwargs)
            args = (*args[:first], value, *args[first + 1 :])
        result = made(*args, **kwargs)
        if isinstance(result, str):
            meter.spend(len(result))
        elif isinstance(result, list):
            meter.step(len(result))
        elif isinstance(result, Iterator):
            return _each(result)
        return result

    return call


def _before_join(values: Iterable[Any], between: object = "", /, *_: object, d: object = "") -> list[Any]:
    listed, found = list(values), 0
    for value in listed:
        found += len(value) if type(value) is str else _characters(value)
    meter = _METER.get()
    meter.step(len(listed))
    meter.spend(found + len(listed) * len(str(between or d)))
    return listed


def _before_replace(text: object, /, old: object = "", new: object = "", *_: object, **__: object) -> object:
    _METER.get().spend(_characters(text) + str(text).count(str(old)) * len(str(new)))
    return text


def _before_indent(text: object, /, width: object = 4, *_: object, **__: object) -> object:
    each = width if isinstance(width, int) else len(str(width))
    _METER.get().spend(_characters(text) + (str(text).count("\n") + 2) * each)
    return text


def _before_format(text: object, /, *values: object, **named: object) -> object:
    pattern = str(text)
    if re.search(r"%[^a-zA-Z%]*(\d{4}|\*)", pattern):
        raise TemplateProblem("a width in a format must be a number of at most three digits")
    longest = max((_characters(value) for value in (*values, *named.values())), default=0)
    _METER.get().spend(len(pattern) + pattern.count("%") * (longest + 1000))
    return text


def _before_json(value: object, /, indent: int | None = None) -> object:
    _METER.get().spend(_characters(value) * (1 + (indent or 0)))
    return value


def _before_cut(value: object, /, count: int = 1, *_: object, **__: object) -> object:
    _METER.get().step(max(count, 1))
    return value


def _before_text(value: object, /, *_: object, **__: object) -> object:
    """Before a filter that makes text of whatever it gets."""
    if not isinstance(value, str):
        _METER.get().spend(_characters(value))
    return value


def _before_list(value: object, /, *_: object, **__: object) -> object:
    """Before a filter that makes a list of whatever it gets."""
    if isinstance(value, str):
        _METER.get().step(len(value))
    return value


_BEFORE: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(_OF_TEXT, _before_text),
    **dict.fromkeys(("dictsort", "groupby", "list", "reverse", "sort", "unique"), _before_list),
    **dict.fromkeys(("batch", "slice"), _before_cut),
    "format": _before_format,
    "indent": _before_indent,
    "join": _before_join,
    "replace": _before_replace,
    "tojson": _before_json,
}


def _spend_on(sequence: str | list[Any] | tuple[Any, ...], times: int = 1) -> None:
    size = len(sequence) * times
    if isinstance(sequence, str):
        _METER.get().spend(size)
    else:
        _METER.get().step(size)


def _characters(value: object) -> int:
    """About how long a value is as text; no further than the meter goes."""
    if isinstance(value, str):
        return len(value)
    found, waiting = 0, [value]
    while waiting and found <= MOST_CHARACTERS:
        item = waiting.pop()
        if isinstance(item, str):
            found += len(item)
        elif isinstance(item, dict):
            found += _CHARACTERS_A_PLACE * len(item)
            waiting += (*item, *item.values())
        elif isinstance(item, list | tuple):
            found += _CHARACTERS_A_PLACE * len(item)
            waiting += item
    return found


def _checked_output(value: object) -> object:
    if isinstance(value, str | int | float | Undefined):
        return value
    if isinstance(value, dict | list | tuple):
        _METER.get().spend(_characters(value))
        return value
    hint = "; add | list or | join(' ')" if isinstance(value, Iterator) else ""
    raise TemplateProblem(f"a value of type {type(value).__name__} cannot be put into the text{hint}")
