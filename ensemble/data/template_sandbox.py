"""Where prompt templates run: what they may reach, and how much they may make of one row.

Templates come from configs that people pass around.  They see their row, the methods of text and lists that are
named here, and nothing else; that is stricter than Jinja2's sandbox, which refuses what is known to be dangerous.

What they make is metered.  ``_counted`` counts the outcome of every filter and operator, of loops, lists and
slices.  What can make far more than it is given is checked by ``_foresee`` before it does.  The meter stops plain
bombs; it is no proof against somebody who looks for what it does not count.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, MappingView
from contextvars import ContextVar
from typing import Any, Final, cast

from jinja2 import StrictUndefined, Undefined, nodes
from jinja2.runtime import Context, LoopContext, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Namespace
from jinja2.visitor import NodeTransformer

from ensemble.data.json_cells import TemplateProblem

# For one row. A prompt of a million tokens has some five million characters; a cell may have ten million.
MAX_CHARACTERS: Final = 100_000_000
MAX_STEPS: Final = 1_000_000
MAX_BITS: Final = 10_000
_STEPS_PER_CALL = 10  # or filter, or attribute: by the time it takes, beside an item of a loop
_CHARACTERS_PER_PLACE = 64  # of a list or mapping, so that long ones of short values count too

_REACHABLE: Final[dict[type, list[str]]] = {
    # Not format, which reaches attributes by itself, nor what pads to any width.
    str: """capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit isidentifier
        islower isnumeric isprintable isspace istitle isupper join lower lstrip partition removeprefix removesuffix
        replace rfind rindex rpartition rsplit rstrip split splitlines startswith strip swapcase title
        upper""".split(),
    dict: "copy get items keys values".split(),
    list: "copy count index".split(),
    tuple: "count grouper index list".split(),  # two of them are groupby's
    float: ["is_integer"],
    Cycler: "current next reset".split(),
    LoopContext: """changed cycle depth depth0 first index index0 last length nextitem previtem revindex
        revindex0""".split(),
}
# Filters that make no text of their value. Their arguments may still end in the message of an error.
_TEXTLESS = frozenset(
    "abs attr batch count d default dictsort first float fromjson groupby int items last length list map max min "
    "reject rejectattr reverse round select selectattr slice sort sum unique".split()
)
_CONTAINERS: tuple[type[Any], ...] = (list, tuple, dict, MappingView)
_LAZY: tuple[type[Any], ...] = (Iterator, MappingView, range)


class _Meter:
    """What the row in hand has taken so far."""

    steps = 0
    characters = 0

    def spend(self, steps: int = 0, characters: int = 0) -> None:
        self.steps += steps
        self.characters += characters
        if self.steps > MAX_STEPS or self.characters > MAX_CHARACTERS:
            self.foresee()

    def foresee(self, steps: int = 0, characters: int = 0) -> None:
        if self.steps + steps > MAX_STEPS:
            raise TemplateProblem(
                f"it takes more than {MAX_STEPS:,} steps for one row; shorten its loops, or lists"
            )
        if self.characters + characters > MAX_CHARACTERS:
            raise TemplateProblem(f"it makes more than {MAX_CHARACTERS:,} characters of one row; shorten it")


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
        filters: own ones by name, beside Jinja2's or instead of them.
        tests: the same for tests.
    """

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self, filters: dict[str, Callable[..., Any]], tests: dict[str, Callable[..., Any]]) -> None:
        super().__init__(
            autoescape=False, undefined=StrictUndefined, keep_trailing_newline=True, finalize=_output
        )
        # Random numbers, and HTML; the same row must give the same prompt in every run.
        del self.globals["lipsum"]
        for name in ("random", "center", "urlize", "wordwrap", "xmlattr"):
            del self.filters[name]
        self.filters |= filters | {"~": str_join}
        self.filters = {name: _metered(name, made) for name, made in self.filters.items()}
        self.filters |= {"for each": _each, "[ ]": _counted}
        self.tests |= tests
        for name in ("lower", "upper"):  # these make text of what they get
            self.tests[name] = _metered(name, cast(Any, self.tests[name]))

    def compile_tree(self, tree: nodes.Template) -> Any:
        """The renderable template of a parsed one, which is changed by it."""
        template = self.from_string(_Metering().visit(tree).set_environment(self))
        template.globals = dict(
            template.globals
        )  # copied for each row, and Jinja2's ChainMap is slow at that
        return template

    def getattr(self, obj: Any, attribute: str) -> Any:
        # This also bounds how deep a namespace can nest tuples; hash() crashes.
        _METER.get().spend(_STEPS_PER_CALL)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, list | tuple | dict):  # the message shows it where there is no such item
            _METER.get().foresee(characters=_characters(argument))
        return super().getitem(obj, argument)

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        if attr.startswith("_"):
            return False
        if type(obj) is Namespace:  # holds what the template itself has put there
            return True
        return any(isinstance(obj, kind) and attr in names for kind, names in _REACHABLE.items())

    def wrap_str_format(self, value: object) -> None:
        """Leaves ``str.format`` to ``is_safe_attribute``; releases before 3.1.6 have no such method."""

    def unsafe_undefined(self, obj: object, attribute: str) -> Undefined:
        """Refuses at once, where Jinja2 waits until the value is used."""
        hint = "; write '%.2f' | format(x) instead" if attribute.startswith("format") else ""
        raise TemplateProblem(f"{attribute!r} of type {type(obj).__name__} cannot be reached{hint}")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _foresee("format", left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * right)
        elif operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(count, int) and isinstance(sequence, str):
                    _METER.get().foresee(characters=len(sequence) * count)
                elif isinstance(count, int) and isinstance(sequence, list | tuple):
                    _METER.get().foresee(steps=len(sequence) * count)
        return _counted(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        meter = _METER.get()
        meter.spend(_STEPS_PER_CALL + len(args) + len(kwargs))
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(obj, LoopContext):  # "for ... recursive"
            args = tuple(map(_each, args))
        elif isinstance(obj, type) or name == "copy":  # dict and namespace copy what they are given
            meter.spend(sum(len(value) for value in (*args, owner) if isinstance(value, list | tuple | dict)))
        elif isinstance(owner, str) and name == "join" and args:
            args = (_listed(args[0]), *args[1:])
            _foresee(name, args[0], owner)
        elif isinstance(owner, str) and name == "replace":
            _foresee(name, owner, *args)
        elif name == "index":  # the message shows what is not found
            meter.foresee(characters=_characters(args))
        result = super().call(context, obj, *args, **kwargs)
        if isinstance(owner, str) and isinstance(result, str | list | tuple):  # new text, or pieces of it
            pieces = [result] if isinstance(result, str) else result
            meter.spend(characters=sum(map(len, pieces)) + len(pieces))
        return result

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """The text of a template, a macro or a block."""
        return "".join(map(_counted, parts))


class _Metering(NodeTransformer):
    """Leads through filters what Jinja2 shows to no environment.  No source can spell the names of these."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        super().generic_visit(node)
        match node:
            case nodes.For():
                node.iter = self._filter(node.iter, "for each")
            case nodes.Concat():
                return self._filter(nodes.List(node.nodes), "~")
            case nodes.List() | nodes.Dict() | nodes.Tuple(ctx="load") | nodes.Getitem(arg=nodes.Slice()):
                return self._filter(node, "[ ]")
        return node

    @staticmethod
    def _filter(node: Any, name: str) -> nodes.Filter:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _metered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    # Some take one of Jinja2's own objects first; wraps() takes over the mark that says so.
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        _METER.get().spend(_STEPS_PER_CALL)
        given = args[first:]
        if name in _COSTS:
            given = (_listed(given[0]), *given[1:])
        _foresee(name, *given, **kwargs)
        return _counted(function(*args[:first], *given, **kwargs))

    return call


def _counted(value: Any) -> Any:
    """The same value; of an iterator, each item will be counted."""
    if isinstance(value, str):
        _METER.get().spend(characters=len(value))
    elif isinstance(value, int):
        _check_bits(value.bit_length())
    elif isinstance(value, list | tuple | dict):
        _METER.get().spend(steps=len(value))
    elif isinstance(value, Iterator):
        return _each(value)
    return value


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise TemplateProblem(f"a number of more than {MAX_BITS:,} bits is too large")


def _each(values: Iterable[Any]) -> Iterator[Any]:
    meter = _METER.get()
    for value in values:
        meter.spend(steps=1)
        yield value


def _listed(value: Any) -> Any:
    """What has a length and can be read twice."""
    return list(value) if isinstance(value, _LAZY) else value


def _foresee(name: str, /, *args: Any, **kwargs: Any) -> None:
    """Refuses what a filter would make too much of."""
    meter = _METER.get()
    given = sum(map(_characters, (*args[name in _TEXTLESS :], *kwargs.values())))
    meter.foresee(characters=given)  # before the costs make text of them
    if name in _COSTS:
        steps, characters = _COSTS[name](*args, **kwargs)
        meter.spend(steps)
        meter.foresee(characters=given + characters)


def _format_costs(value: object, *args: object, **kwargs: object) -> tuple[int, int]:
    # A name may hold a width back; how far it goes is plain without brackets in it.
    if re.search(r"%(\([^()]*\))?[^a-zA-Z%]*(\d{4}|\*)|%\([^)]*\(", str(value)):
        raise TemplateProblem("a width in a format must be a number of at most three digits")
    return 0, str(value).count("%") * (1000 + max(map(_characters, (*args, *kwargs.values())), default=0))


def _width(value: int | str) -> int:
    return value if isinstance(value, int) else len(value)


# What filters cost beyond what they are given and what they make: steps, and characters at most. The names and
# defaults are Jinja2's.
_COSTS: dict[str, Callable[..., tuple[int, int]]] = {
    "batch": lambda value, linecount=0, *_, **__: (len(value) + max(linecount, 0), 0),
    "format": _format_costs,
    "fromjson": lambda text: (_characters(text) // _CHARACTERS_PER_PLACE, 0),
    "groupby": lambda value, *_, **__: (len(value), 0),
    "indent": lambda s, width=4, *_, **__: (0, (str(s).count("\n") + 2) * _width(width)),
    "join": lambda value, d="", *_, **__: (len(value), len(value) * len(str(d))),
    "replace": lambda s, old="", new="", *_, **__: (0, str(s).count(str(old)) * len(str(new))),
    "round": lambda _, precision=0, *__, **___: (abs(precision), 0),
    "slice": lambda value, slices=0, *_, **__: (len(value) + max(slices, 0), 0),
    "sum": lambda iterable, *_, **__: (_characters(iterable) // _CHARACTERS_PER_PLACE, 0),  # of lists, too
    "tojson": lambda value, indent=None: (0, _characters(value) * _width(indent or 0)),
}


def _characters(value: Any) -> int:
    """About how long a value is as text; no further than the meter goes."""
    if isinstance(value, str):
        return len(value)
    found, pending = 0, [value]
    while pending and found <= MAX_CHARACTERS:
        item = pending.pop()
        if isinstance(item, str):
            found += len(item)
        elif isinstance(item, int):
            found += item.bit_length() // 3
        elif isinstance(item, _CONTAINERS):
            found += _CHARACTERS_PER_PLACE * len(item)
            pending += [*item, *item.values()] if isinstance(item, dict) else item
        elif isinstance(item, Namespace):  # shows all that is in it
            raise TemplateProblem("a value of type Namespace cannot be put into the text")
    return found


def _output(value: object) -> object:
    """What becomes of a value that is put into the text."""
    if isinstance(value, int | list | tuple | dict):
        _METER.get().spend(characters=_characters(value))
    elif not isinstance(value, str | float | Undefined | None):
        hint = "; add | list or | join(' ')" if isinstance(value, Iterator) else ""
        raise TemplateProblem(f"a value of type {type(value).__name__} cannot be put into the text{hint}")
    return "" if value is None else value
