"""Compile, check and render prompt templates.

The parent compiles a template to find its mistakes and the columns it reads; the worker renders it row by row.
``template_sandbox`` says what a template may reach.

A null cell is empty text (``x is none`` is still true for it), so that no prompt ever says "None".
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from jinja2 import Template, TemplateError, TemplateSyntaxError, meta, nodes

from ensemble.common.text import error_text
from ensemble.data.json_cells import TemplateProblem, parse_json_cell, replace_lone_surrogates, without_nulls
from ensemble.data.template_sandbox import Sandbox

_MAX_MESSAGE: Final = 1000  # characters of Jinja2's or Python's, which may show a whole cell


class _Null(str):
    """A null cell: empty text, for which ``x is none`` is true."""

    __slots__ = ()


_NULL = _Null()


class PromptTemplate:
    """A checked template; made by :func:`compile_template`.

    Attributes:
        source: the template's text.
        columns: the columns it reads, sorted.
        json_columns: those columns to which ``fromjson`` is applied directly, sorted.
        fixed_texts: the text that every prompt has whatever the row, in order.
        reads_by_number: whether it reads items by a computed number, such as ``a[loop.index0]``, so that truncation
            must not leave out items before others.
    """

    def __init__(
        self,
        source: str,
        template: Template,
        columns: tuple[str, ...],
        json_columns: tuple[str, ...],
        fixed_texts: tuple[str, ...],
        reads_by_number: bool,
    ) -> None:
        self.source = source
        self.columns = columns
        self.json_columns = json_columns
        self.fixed_texts = fixed_texts
        self.reads_by_number = reads_by_number
        self._template = template

    def render(self, row: Mapping[str, object]) -> str:
        """Render one row; columns that the template does not read are ignored.

        Raises:
            TemplateProblem: a column is missing, or rendering failed; names the exception and the line.
        """
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
            if isinstance(error, TemplateProblem):
                raise TemplateProblem(f"{where}{error}") from error
            raise TemplateProblem(f"{where}{type(error).__name__}: {_sentence(error)}") from error


def compile_template(source: str) -> PromptTemplate:
    """Compile and check a prompt template.

    Raises:
        TemplateProblem: a syntax error (with its line), an unknown filter or test, an include or import, an
            attribute or item that starts with an underscore.
    """
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
        fixed = tuple(part.data for part in outputs if isinstance(part, nodes.TemplateData))
        by_number = any(
            not isinstance(item.arg, nodes.Const | nodes.Neg | nodes.Slice)
            for item in tree.find_all(nodes.Getitem)
        )
        template = environment.compile_tree(tree)
    except TemplateProblem:
        raise
    except TemplateSyntaxError as error:
        raise TemplateProblem(f"line {error.lineno}: {_sentence(error)}") from None
    # Python refuses numbers of too many digits, and too many nested loops.
    except (TemplateError, RecursionError, MemoryError, SyntaxError, ValueError) as error:
        raise TemplateProblem(f"the template cannot be compiled: {_sentence(error)}") from None
    json_columns = tuple(sorted(parsed & columns))
    return PromptTemplate(
        source=source,
        template=template,
        columns=tuple(sorted(columns)),
        json_columns=json_columns,
        fixed_texts=fixed,
        reads_by_number=by_number,
    )


@lru_cache(maxsize=1)
def _environment() -> Sandbox:
    # Jinja2's tojson escapes < > & ' for HTML; a prompt would have \u003c.
    return Sandbox(
        {
            "fromjson": parse_json_cell,
            "tojson": lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent),
        },
        {"none": lambda value: value is None or value is _NULL},
    )


def _check_tree(tree: nodes.Template, environment: Sandbox) -> None:
    """Raise TemplateProblem for mistakes that show before any row is rendered.

    Jinja2 reports an unknown filter inside an ``if`` only when that branch is reached.
    """
    for node in tree.find_all(nodes.Node):
        problem = None
        match node:
            case nodes.Include() | nodes.Import() | nodes.FromImport() | nodes.Extends():
                problem = "a prompt template cannot include, import or extend another one"
            case nodes.Filter(name=name) if name not in environment.filters:
                problem = f"no filter named '{name}'"
            case nodes.Test(name=name) if name not in environment.tests:
                problem = f"no test named '{name}'"
            case (
                nodes.Getattr(attr=str(name))
                | nodes.Getitem(arg=nodes.Const(value=str(name)))
                | nodes.Filter(name="attr", args=[nodes.Const(value=str(name)), *_])
            ) if name.startswith("_"):
                problem = f"'{name}' cannot be reached, names with an underscore are private"
        if problem:
            raise TemplateProblem(f"line {node.lineno}: {problem}")


def _sentence(error: Exception) -> str:
    return error_text(error, _MAX_MESSAGE).rstrip(".") or "no further detail"
