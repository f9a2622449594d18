"""Find the rows for which a condition, a template that gives true or false, is true."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ensemble.common.errors import DataError
from ensemble.data.json_cells import TemplateProblem
from ensemble.data.table import InputTable, row_text
from ensemble.data.template import PromptTemplate, compile_template

_TRUE, _FALSE = ("true", "1"), ("false", "0", "")
_ADVICE = "a condition gives true or false, as in {{ a == b }}"
_SHOWN_CHARACTERS = 60


def compile_condition(source: str) -> PromptTemplate:
    """Compile a condition; raise TemplateProblem as ``compile_template`` does, or if it reads no column."""
    compiled = compile_template(source)
    if not compiled.columns:
        raise TemplateProblem(f"reads no column of the table; {_ADVICE}")
    return compiled


def rows_that_meet(table: InputTable, condition: PromptTemplate) -> npt.NDArray[np.bool_]:
    """Return for which rows the condition is true, bool [rows].

    Raises:
        DataError: the condition fails for a row, or gives neither true nor false.
    """
    is_met = np.zeros(table.rows, dtype=np.bool_)
    for row, cells in enumerate(table.python_rows(condition.columns)):
        try:
            is_met[row] = _as_bool(condition.render(cells))
        except TemplateProblem as problem:
            raise DataError(f"{row_text(row, table.ids)}: {problem}") from None
    return is_met


def _as_bool(text: str) -> bool:
    word = text.strip().lower()
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    excerpt = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
    raise TemplateProblem(f"gives {excerpt!r}; {_ADVICE}")
