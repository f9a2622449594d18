"""Which rows of a table a condition is true for: a template of true or false, in the sandbox of the prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from jinja2 import Environment, nodes

from ensemble.common.errors import DataError
from ensemble.common.text import quoted
from ensemble.data.json_cells import TemplateProblem
from ensemble.data.table import InputTable
from ensemble.data.template import PromptTemplate, compile_template

_TRUE, _FALSE = ("true", "1"), ("false", "0", "")
_ADVICE = "a condition gives true or false, as in {{ a == b }}"
_SHOWN_CHARACTERS = 60
_MAX_LENGTH = 1 << 31
# What str.strip takes away, and nothing else.
_BLANK = (
    "\t\n\v\f\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)
_ARROW: dict[str, Callable[[Any, Any], pa.ChunkedArray]] = {
    "eq": pc.equal,
    "ne": pc.not_equal,
    "lt": pc.less,
    "lteq": pc.less_equal,
    "gt": pc.greater,
    "gteq": pc.greater_equal,
}


def compile_condition(source: str) -> PromptTemplate:
    """Compiles a condition.

    Raises:
        TemplateProblem: as ``compile_template`` says; also one that reads no column.
    """
    compiled = compile_template(source)
    if not compiled.columns:
        raise TemplateProblem(f"reads no column of the table; {_ADVICE}")
    return compiled


def rows_that_meet(table: InputTable, conditions: Sequence[PromptTemplate]) -> npt.NDArray[np.bool_]:
    """Whether each condition is true, bool [conditions, rows]; reads the table once for each, in little memory.

    Raises:
        ConditionProblem: a row for which one fails, or gives neither true nor false.
    """
    found = np.zeros((len(conditions), table.rows), dtype=np.bool_)
    for number, condition in enumerate(conditions):
        if (at_once := _plain_comparisons(table, condition.source)) is not None:
            found[number] = at_once
            continue
        seen: dict[str, bool] = {}
        for row, cells in enumerate(table.python_rows(condition.columns)):
            try:
                text = condition.render(cells)
                if (is_true := seen.get(text)) is None:
                    is_true = seen[text] = _as_bool(text)
            except TemplateProblem as problem:
                place = f"row {row + 1:,} (id {quoted(table.ids[row].as_py())})"
                raise ConditionProblem(number, f"{place}: {problem}") from None
            found[number, row] = is_true
    return found


def _plain_comparisons(table: InputTable, source: str) -> npt.NDArray[np.bool_] | None:
    """Comparisons of columns of text, stripped or not, and of their lengths, for all rows at once, [rows].

    None where a condition is anything more; it is then rendered row by row, which takes a hundred times as long.
    """
    body = Environment(autoescape=False).parse(source).body  # has been compiled in the sandbox
    if len(body) != 1 or not isinstance(body[0], nodes.Output) or len(body[0].nodes) != 1:
        return None

    def value(node: nodes.Node) -> pa.ChunkedArray | str | int | None:
        match node:
            case nodes.Name(name=name):
                return table.plain_text(name)
            case nodes.Const(value=str() | int() as constant) if (
                constant is not True and constant is not False
            ):
                return constant if isinstance(constant, str) or abs(constant) < _MAX_LENGTH else None
            case (
                nodes.Call(node=nodes.Getattr(node=inner, attr="strip"), args=[], kwargs=[])
                | nodes.Filter(node=nodes.Node() as inner, name="trim", args=[], kwargs=[])
            ) if _is_text(cells := value(inner)):
                return pc.utf8_trim(cells, characters=_BLANK)
            case nodes.Filter(node=nodes.Node() as inner, name="length" | "count", args=[], kwargs=[]) if (
                _is_text(cells := value(inner))
            ):
                return pc.utf8_length(cells)
        return None

    def truth(node: nodes.Node) -> pa.ChunkedArray | None:
        match node:
            case nodes.Compare(expr=left, ops=[nodes.Operand(op=operator, expr=right)]):
                return _compared(value(left), operator, value(right))
            case nodes.Not(node=inner):
                if (found := truth(inner)) is not None:
                    return pc.invert(found)
                return _compared(cells, "eq", "") if _is_text(cells := value(inner)) else None
            case nodes.And(left=left, right=right) | nodes.Or(left=left, right=right):
                one, other = truth(left), truth(right)
                if one is None or other is None:
                    return None
                return pc.and_(one, other) if isinstance(node, nodes.And) else pc.or_(one, other)
        return None

    found = truth(body[0].nodes[0])
    return None if found is None else np.asarray(found.to_numpy())


def _is_text(value: object) -> bool:
    return isinstance(value, pa.ChunkedArray) and bool(pa.types.is_large_string(value.type))


def _compared(
    first: pa.ChunkedArray | str | int | None, operator: str, second: pa.ChunkedArray | str | int | None
) -> pa.ChunkedArray | None:
    """Two columns, or one and a constant, as Python compares them; None where Arrow might do it otherwise."""
    if operator in ("in", "notin"):
        if not isinstance(first, str) or not first or not _is_text(second):
            return None
        is_in = pc.match_substring(second, pattern=first)
        return is_in if operator == "in" else pc.invert(is_in)
    are_columns = [isinstance(one, pa.ChunkedArray) for one in (first, second)]
    are_texts = [isinstance(one, str) or _is_text(one) for one in (first, second)]
    if first is None or second is None or not any(are_columns) or are_texts[0] != are_texts[1]:
        return None
    if are_texts[0] and operator not in ("eq", "ne"):
        return None
    return _ARROW[operator](first, second)


class ConditionProblem(DataError):
    """A row that a condition fails for; ``condition`` is its number."""

    def __init__(self, condition: int, problem: str) -> None:
        super().__init__(problem)
        self.condition = condition


def _as_bool(text: str) -> bool:
    word = text.strip().lower()
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    excerpt = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
    raise TemplateProblem(f"gives {excerpt!r}; {_ADVICE}")
