"""Compile, check and render prompt templates, in Jinja's immutable sandbox.

The parent compiles a template to find its mistakes and the columns it reads; the worker renders it row by row.
A null cell is empty text (``x is none`` is still true for it), so that no prompt ever says "None".
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from jinja2 import StrictUndefined, Template, TemplateError, TemplateSyntaxError, Undefined, meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ensemble.common.text import error_text
from ensemble.data.json_cells import TemplateProblem, parse_json_cell, replace_lone_surrogates, without_nulls

_TRUE, _FALSE = ("true", "1"), ("false", "0", "")
_ADVICE = "a condition gives true or false, as in {{ a == b }}"
_SHOWN_CHARACTERS = 60


class _Null(str):
    """Stand for a null cell: empty text, for which ``x is none`` is true."""

    __slots__ = ()


_NULL = _Null()


@dataclass(frozen=True)
class PromptTemplate:
    """Render a checked template; :func:`compile_template` makes it.

    Attributes:
        columns: the columns it reads, sorted.
        json_columns: those columns to which ``fromjson`` is applied directly, sorted.
        fixed_texts: the text that every prompt has whatever the row, in order.
        reads_by_number: whether it reads items by a computed number, such as ``a[loop.index0]``, so that truncation
            must not leave out items before others.
    """

    source: str
    columns: tuple[str, ...]
    json_columns: tuple[str, ...]
    fixed_texts: tuple[str, ...]
    reads_by_number: bool
    _template: Template

    def render(self, row: Mapping[str, object]) -> str:
        """Render one row; raise TemplateProblem with the line if a column is missing or rendering fails."""
        try:
            cells = {name: without_nulls(row[name], _NULL) for name in self.columns}
        except KeyError as error:
            raise TemplateProblem(f"the row has no column {error}") from None
        try:
            return replace_lone_surrogates(self._template.render(cells))
        except Exception as error:
            # Jinja2 rewrites frames, so that they show the line of the template.
            frames = traceback.walk_tb(error.__traceback__)
            lines = [line for frame, line in frames if frame.f_code.co_filename == "<template>"]
            where = f"line {lines[-1]}: " if lines else ""
            kind = "" if isinstance(error, TemplateProblem) else f"{type(error).__name__}: "
            raise TemplateProblem(f"{where}{kind}{_sentence(error)}") from error


def compile_template(source: str) -> PromptTemplate:
    """Compile and check a prompt template; raise TemplateProblem with the line of a mistake."""
    environment = _environment()
    try:
        tree = environment.parse(source)
        _check_tree(tree, environment)
        columns = meta.find_undeclared_variables(tree)
        parsed = {
            node.node.name
            for node in tree.find_all(nodes.Filter)
            if node.name == "fromjson" and isinstance(node.node, nodes.Name)
        }
        outputs = [part for node in tree.body if isinstance(node, nodes.Output) for part in node.nodes]
        by_number = any(
            not isinstance(item.arg, nodes.Const | nodes.Neg | nodes.Slice)
            for item in tree.find_all(nodes.Getitem)
        )
        template = environment.from_string(tree)
    except TemplateSyntaxError as error:
        raise TemplateProblem(f"line {error.lineno}: {_sentence(error)}") from None
    # Python refuses numbers of too many digits, and too many nested loops.
    except (TemplateError, RecursionError, MemoryError, SyntaxError, ValueError) as error:
        if isinstance(error, TemplateProblem):
            raise
        raise TemplateProblem(f"the template cannot be compiled: {_sentence(error)}") from None
    # Jinja2 copies the globals for each row, and its ChainMap is slow at that.
    template.globals = dict(template.globals)
    return PromptTemplate(
        source=source,
        columns=tuple(sorted(columns)),
        json_columns=tuple(sorted(parsed & columns)),
        fixed_texts=tuple(part.data for part in outputs if isinstance(part, nodes.TemplateData)),
        reads_by_number=by_number,
        _template=template,
    )


def compile_condition(source: str) -> PromptTemplate:
    """Compile a condition; raise TemplateProblem as ``compile_template`` does, or if it reads no column."""
    compiled = compile_template(source)
    if not compiled.columns:
        raise TemplateProblem(f"reads no column of the table; {_ADVICE}")
    return compiled


def is_true(text: str) -> bool:
    """Return whether a condition's text says true; raise TemplateProblem if it says neither true nor false."""
    word = text.strip().lower()
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    excerpt = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
    raise TemplateProblem(f"gives {excerpt!r}; {_ADVICE}")


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        autoescape=False, undefined=StrictUndefined, keep_trailing_newline=True, finalize=_output
    )
    # The same row must give the same prompt in every run.
    del environment.globals["lipsum"], environment.filters["random"]
    environment.filters["fromjson"] = parse_json_cell
    # Jinja2's tojson escapes < > & ' for HTML; a prompt would have \u003c.
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    environment.tests["none"] = lambda value: value is None or value is _NULL
    return environment


def _output(value: object) -> object:
    """Return what a value becomes in the text: nothing for None; refuse functions and the like."""
    if not isinstance(value, str | int | float | list | tuple | dict | Undefined | None):
        hint = "; add | list or | join(' ')" if isinstance(value, Iterator) else ""
        raise TemplateProblem(f"a value of type {type(value).__name__} cannot be put into the text{hint}")
    return "" if value is None else value


def _check_tree(tree: nodes.Template, environment: ImmutableSandboxedEnvironment) -> None:
    """Raise TemplateProblem for mistakes that Jinja2 reports only when their branch is reached."""
    for node in tree.find_all(nodes.Node):
        problem = None
        match node:
            case nodes.Include() | nodes.Import() | nodes.FromImport() | nodes.Extends():
                problem = "a prompt template cannot include, import or extend another one"
            case nodes.Filter(name=name) if name not in environment.filters:
                problem = f"no filter named '{name}'"
            case nodes.Test(name=name) if name not in environment.tests:
                problem = f"no test named '{name}'"
        if problem:
            raise TemplateProblem(f"line {node.lineno}: {problem}")


def _sentence(error: Exception) -> str:
    # The message of Jinja2 or Python may show a whole cell.
    return error_text(error, 1_000).rstrip(".") or "no further detail"
