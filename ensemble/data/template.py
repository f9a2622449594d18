"""Prompt templates: Jinja2 source in, checked and renderable template out.

Shared by the parent, which compiles a template only to find its mistakes and the columns it reads, and by the
worker, which renders it row by row.  What a template may reach and how much it may make is for ``sandbox`` to
say; what can be refused before any row is rendered is refused here.

A null cell reads as empty text (``x is none`` is still true for it), so that no prompt ever says "None".
Nothing here reads tables, tokenizes or truncates.  Whoever needs no template does not import this: Jinja2 takes a
tenth of the parent's start-up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache

from jinja2 import Template, TemplateError, TemplateSyntaxError, meta, nodes

from ensemble.data.json_cells import TemplateProblem, parse_json_cell, replace_lone_surrogates, without_nulls
from ensemble.data.template_sandbox import Sandbox, metered


class _Null(str):
    """A null cell: empty text everywhere, and still ``none`` to the test of that name."""

    __slots__ = ()


_NULL = _Null()


class PromptTemplate:
    """A checked template; made by :func:`compile_template`.

    Attributes:
        source: the template's text.
        columns: the columns it reads, sorted.
        json_columns: those of them that ``fromjson`` is applied to directly, sorted.
    """

    def __init__(
        self, source: str, template: Template, columns: tuple[str, ...], json_columns: tuple[str, ...]
    ) -> None:
        self.source = source
        self.columns = columns
        self.json_columns = json_columns
        self._template = template

    def render(self, row: Mapping[str, object]) -> str:
        """Renders one row; columns that the template does not read are ignored.

        Raises:
            TemplateProblem: a column is missing, or rendering failed; names the exception and the line.
        """
        try:
            cells = {name: without_nulls(row[name], _NULL) for name in self.columns}
        except KeyError as error:
            raise TemplateProblem(f"the row has no column {error}") from None
        try:
            with metered():
                return replace_lone_surrogates(self._template.render(cells))
        except Exception as error:
            raise _render_problem(error) from error


def compile_template(source: str) -> PromptTemplate:
    """Compiles and checks a prompt template.

    Raises:
        TemplateProblem: a syntax error (with its line), an unknown filter or test, an include or import, an
            attribute or item that starts with an underscore.
    """
    environment = _environment()
    try:
        tree = environment.parse(source)
        _check_tree(tree, environment)
        columns = meta.find_undeclared_variables(tree)
        parsed = _parsed_as_json(tree)
        template = environment.compile_tree(tree)
    except TemplateSyntaxError as error:
        raise TemplateProblem(f"line {error.lineno}: {_sentence(error)}") from None
    except (TemplateError, RecursionError) as error:
        raise TemplateProblem(f"the template cannot be compiled: {_sentence(error)}") from None
    return PromptTemplate(source, template, tuple(sorted(columns)), tuple(sorted(parsed & columns)))


def _parsed_as_json(tree: nodes.Template) -> set[str]:
    return {
        node.node.name
        for node in tree.find_all(nodes.Filter)
        if node.name == "fromjson" and isinstance(node.node, nodes.Name)
    }


@lru_cache(maxsize=1)
def _environment() -> Sandbox:
    environment = Sandbox(_finalize)
    environment.add_filter("fromjson", parse_json_cell)
    # Jinja2's own tojson escapes < > & ' for HTML, which a prompt would show as \u003c.
    environment.add_filter("tojson", _to_json)
    environment.tests["none"] = _is_none
    return environment


def _finalize(value: object) -> object:
    return "" if value is None else value


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _is_none(value: object) -> bool:
    return value is None or value is _NULL


def _check_tree(tree: nodes.Template, environment: Sandbox) -> None:
    """Refuses what can be seen before any row is rendered.

    Jinja2 itself reports an unknown filter inside an ``if`` only when that branch is reached.
    """
    for node in tree.find_all(nodes.Node):
        where = f"line {node.lineno}"
        if isinstance(node, (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)):
            raise TemplateProblem(f"{where}: a prompt template cannot include, import or extend another one")
        if isinstance(node, nodes.Filter) and node.name not in environment.filters:
            raise TemplateProblem(f"{where}: no filter named '{node.name}'")
        if isinstance(node, nodes.Test) and node.name not in environment.tests:
            raise TemplateProblem(f"{where}: no test named '{node.name}'")
        name = _reached_name(node)
        if isinstance(name, str) and name.startswith("_"):
            raise TemplateProblem(
                f"{where}: '{name}' cannot be reached, names with an underscore are private"
            )


def _reached_name(node: nodes.Node) -> object:
    """The attribute or item that ``node`` takes from another value, where the source spells it out."""
    if isinstance(node, nodes.Getattr):
        return node.attr
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return node.arg.value
    if isinstance(node, nodes.Filter) and node.name == "attr" and node.args:
        argument = node.args[0]
        return argument.value if isinstance(argument, nodes.Const) else None
    return None


def _render_problem(error: Exception) -> TemplateProblem:
    """Names the exception and, from the frames that Jinja2 rewrites, the line of the template."""
    line, frame = None, error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == "<template>":
            line = frame.tb_lineno
        frame = frame.tb_next
    where = "" if line is None else f"line {line}: "
    if isinstance(error, TemplateProblem):
        return TemplateProblem(f"{where}{error}")
    return TemplateProblem(f"{where}{type(error).__name__}: {_sentence(error)}")


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text.rstrip(".") or "no further detail"
