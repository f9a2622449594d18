"""The sandbox in which prompt templates run.

Templates can reach their row and the methods that are named here. That is stricter than Jinja2's sandbox, which
refuses what is known to be dangerous. The time and memory of a template are not limited: like the rest of a config,
it is trusted not to waste the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from jinja2 import StrictUndefined, Undefined, nodes
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Namespace

from ensemble.data.json_cells import TemplateProblem

_REACHABLE: Final[dict[type, list[str]]] = {
    # Not format, which reaches attributes by itself, nor methods that pad to any width.
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


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja2's sandbox, limited to the reachable methods.

    Args:
        filters: filters by name, in addition to Jinja2's or instead of them.
        tests: tests by name, likewise.
    """

    def __init__(self, filters: dict[str, Callable[..., Any]], tests: dict[str, Callable[..., Any]]) -> None:
        super().__init__(
            autoescape=False, undefined=StrictUndefined, keep_trailing_newline=True, finalize=_output
        )
        # Randomness, because the same row must give the same prompt in every run; HTML; and padding to any width.
        del self.globals["lipsum"]
        for name in ("random", "center", "urlize", "wordwrap", "xmlattr"):
            del self.filters[name]
        self.filters |= filters
        self.tests |= tests

    def compile_tree(self, tree: nodes.Template) -> Any:
        """Return the renderable template of a parsed one."""
        template = self.from_string(tree)
        # Jinja2 copies the globals for each row, and its ChainMap is slow at that.
        template.globals = dict(template.globals)
        return template

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        if attr.startswith("_"):
            return False
        if type(obj) is Namespace:  # its attributes were set by the template itself
            return True
        return any(isinstance(obj, kind) and attr in names for kind, names in _REACHABLE.items())

    def wrap_str_format(self, value: object) -> None:
        """Leave ``str.format`` to ``is_safe_attribute``; Jinja2 calls this since 3.1.6."""

    def unsafe_undefined(self, obj: object, attribute: str) -> Undefined:
        """Refuse at once; Jinja2 waits until the value is used."""
        hint = "; write '%.2f' | format(x) instead" if attribute.startswith("format") else ""
        raise TemplateProblem(f"{attribute!r} of type {type(obj).__name__} cannot be reached{hint}")


def _output(value: object) -> object:
    """Return what a value becomes in the text: nothing for None.

    Raises:
        TemplateProblem: the value is no text, number, list or mapping.
    """
    if not isinstance(value, str | int | float | list | tuple | dict | Undefined | None):
        hint = "; add | list or | join(' ')" if isinstance(value, Iterator) else ""
        raise TemplateProblem(f"a value of type {type(value).__name__} cannot be put into the text{hint}")
    return "" if value is None else value
