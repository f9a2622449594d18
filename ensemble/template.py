"""Prompt templates: Jinja2 source in, checked and renderable template out.

Shared by the parent, which compiles a template only to find its mistakes and the columns it reads, and by the
worker, which renders it row by row.  Templates come from configs that people pass around, so they run in
Jinja2's immutable sandbox: no imports, no files, no attribute that starts with an underscore.

A null cell reads as empty text (``x is none`` is still true for it), so that no prompt ever says "None".
Nothing here reads tables, tokenizes or truncates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import NoReturn

from jinja2 import StrictUndefined, Template, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

_EXCERPT_CHARACTERS = 60
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
# Both draw random numbers, and the same row must give the same prompt in every run.
_NOT_REPEATABLE = {"globals": ("lipsum",), "filters": ("random",)}


class TemplateProblem(ValueError):
    """A template that cannot be compiled, or a row that it cannot render.  The message is one sentence."""


class _Null(str):
    """A null cell: empty text everywhere, and still ``none`` to the test of that name."""

    __slots__ = ()


_NULL = _Null()


def parse_json_cell(text: object) -> object:
    """Reads a cell that holds JSON: what the ``fromjson`` filter does.

    Args:
        text: JSON text, or a value that has been parsed already (list, dict, number, boolean).

    Returns:
        the parsed value with every null inside it turned into empty text.  A null or blank cell, and the
        JSON text ``null``, give an empty list.

    Raises:
        TemplateProblem: broken JSON, NaN or Infinity, or a value that is none of the above.
    """
    if text is None:
        return []
    if isinstance(text, (bool, int, float, list, dict)):
        return _without_nulls(text)
    if not isinstance(text, str):
        raise TemplateProblem(f"fromjson reads JSON text, not a value of type {type(text).__name__}")
    if not text or text.isspace():
        return []
    try:
        value = _json_decoder().decode(text)
        # Searching the text is much cheaper than walking every value.
        return [] if value is None else _without_nulls(value) if "null" in text else value
    except json.JSONDecodeError as error:
        detail = f"{error.msg} at character {error.pos + 1}"
    except ValueError as error:
        detail = str(error)
    except RecursionError:
        detail = "nested too deeply"
    raise TemplateProblem(f"not valid JSON ({detail}): {_excerpt(text)}")


def replace_lone_surrogates(text: str) -> str:
    """Puts U+FFFD where ``text`` holds half of a surrogate pair, which UTF-8 and tokenizers refuse."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return _LONE_SURROGATE.sub("\ufffd", text)
    return text


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
            cells = {name: _without_nulls(row[name], _NULL) for name in self.columns}
        except KeyError as error:
            raise TemplateProblem(f"the row has no column {error}") from None
        try:
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
        template = environment.from_string(source)
    except TemplateSyntaxError as error:
        raise TemplateProblem(f"line {error.lineno}: {_sentence(error)}") from None
    except (TemplateError, RecursionError) as error:
        raise TemplateProblem(f"the template cannot be compiled: {_sentence(error)}") from None
    parsed = {
        node.node.name
        for node in tree.find_all(nodes.Filter)
        if node.name == "fromjson" and isinstance(node.node, nodes.Name)
    }
    return PromptTemplate(source, template, tuple(sorted(columns)), tuple(sorted(parsed & columns)))


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja2's sandbox, with every underscore name refused and not only the dangerous ones."""

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        return not attr.startswith("_") and super().is_safe_attribute(obj, attr, value)


@lru_cache(maxsize=1)
def _environment() -> _Sandbox:
    environment = _Sandbox(
        autoescape=False, undefined=StrictUndefined, keep_trailing_newline=True, finalize=_finalize
    )
    environment.filters["fromjson"] = parse_json_cell
    # Jinja2's own tojson escapes < > & ' for HTML, which a prompt would show as \u003c.
    environment.filters["tojson"] = _to_json
    environment.tests["none"] = _is_none
    for name in _NOT_REPEATABLE["globals"]:
        del environment.globals[name]
    for name in _NOT_REPEATABLE["filters"]:
        del environment.filters[name]
    return environment


def _finalize(value: object) -> object:
    return "" if value is None else value


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _is_none(value: object) -> bool:
    return value is None or value is _NULL


def _check_tree(tree: nodes.Template, environment: _Sandbox) -> None:
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


def _without_nulls(value: object, null: str = "") -> object:
    if value is None:
        return null
    if isinstance(value, list):
        return [_without_nulls(item, null) for item in value]
    if isinstance(value, dict):
        return {key: _without_nulls(item, null) for key, item in value.items()}
    return value


@lru_cache(maxsize=1)
def _json_decoder() -> json.JSONDecoder:
    return json.JSONDecoder(parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


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


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= _EXCERPT_CHARACTERS else text[:_EXCERPT_CHARACTERS] + "...")
