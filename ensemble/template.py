"""Prompt templates: Jinja2 source in, checked and renderable template out.

Shared by the parent, which compiles a template only to find its mistakes and the columns it reads, and by the
worker, which renders it row by row.  What a template may reach and how much it may make is for ``sandbox`` to
say; what can be refused before any row is rendered is refused here.

A null cell reads as empty text (``x is none`` is still true for it), so that no prompt ever says "None".
Nothing here reads tables, tokenizes or truncates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, meta, nodes

from ensemble.sandbox import Sandbox, TemplateProblem, metered

__all__ = [
    "MOST_JSON_LEVELS",
    "PromptTemplate",
    "TemplateProblem",
    "compile_template",
    "is_too_deep",
    "json_detail",
    "parse_json_cell",
    "replace_lone_surrogates",
]

# Of lists and objects in JSON. Python's own limit depends on who asks, so that what the parent has read a worker
# might refuse.
MOST_JSON_LEVELS = 100
_EXCERPT_CHARACTERS = 60
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


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
        if text.count("[") + text.count("{") <= MOST_JSON_LEVELS or not is_too_deep(value):
            return [] if value is None else _without_nulls(value) if "null" in text else value
        detail = f"nested more than {MOST_JSON_LEVELS} levels deep"
    except (ValueError, RecursionError) as error:
        detail = json_detail(error)
    raise TemplateProblem(f"not valid JSON ({detail}): {_excerpt(text)}")


def is_too_deep(value: object, most: int = MOST_JSON_LEVELS) -> bool:
    """Whether lists and objects stand in each other more than ``most`` levels deep."""
    level = [value]
    for _ in range(most + 1):
        outer = [item for item in level if isinstance(item, list | dict)]
        if not outer:
            return False
        level = [inner for item in outer for inner in (item.values() if isinstance(item, dict) else item)]
    return True


def json_detail(error: ValueError | RecursionError) -> str:
    """What is wrong with JSON, by what Python's decoder has raised."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"
    if isinstance(error, RecursionError):
        return f"nested more than {MOST_JSON_LEVELS} levels deep"
    # From Python itself comes advice on how to allow for more.
    return "a number of too many digits" if "set_int_max_str_digits" in str(error) else str(error)


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
