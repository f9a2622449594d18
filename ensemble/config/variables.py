"""``${NAME}`` in text values: the environment variables that a config may name.

Owns how a variable is written and what an error may say of it.  It does not know where the variables come
from; ``load`` hands them in.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ensemble.config.document import INVALID, NOT_TEXT, Document, Loc

_VARIABLE = r"\$\$\{|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)\}|\$\{"


def expand(document: Document, variables: Mapping[str, str]) -> dict[str, Any]:
    """The data with ``${NAME}`` replaced in every text value; ``$${`` stands for ``${``.

    What a variable gives is text and stays text.  Keys are left as they are.  An unknown variable is noted as
    a problem and leaves ``INVALID``.  No variable's value gets into a message: it may be a token.
    """

    def expanded(value: object, loc: Loc) -> object:
        if isinstance(value, dict):
            return {key: expanded(item, (*loc, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [expanded(item, (*loc, index)) for index, item in enumerate(value)]
        if not isinstance(value, str):
            return value
        try:
            return re.sub(_VARIABLE, lambda match: _replacement(match, variables), value)
        except LookupError as error:
            document.refuse(loc, str(error.args[0]))
            return INVALID

    return {key: expanded(value, (key,)) for key, value in document.data.items()}


def _replacement(match: re.Match[str], variables: Mapping[str, str]) -> str:
    name = match["name"]
    if match[0] == "$${":
        return "${"
    if name is None:
        raise LookupError("${ is not followed by a variable's name and }; write $${ for a plain ${")
    if name not in variables:
        raise LookupError(
            f"the environment variable {name} is not set; to keep {match[0]}, write ${match[0]}"
        )
    if re.search(NOT_TEXT, variables[name]):
        raise LookupError(f"the value of the environment variable {name} is not UTF-8 text")
    return variables[name]
