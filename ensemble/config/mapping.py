"""A config that is given as a mapping, such as a dict in Python, in place of a YAML file."""

from __future__ import annotations

import numbers
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ensemble.common.errors import ConfigError
from ensemble.config.document import MAPPING, NOT_TEXT, Loc, place, shown
from ensemble.config.yamlfile import MAX_DEPTH, dump


@dataclass(frozen=True)
class MappingConfig:
    """A mapping as the text of a YAML file; its folder is the working directory."""

    text: str

    def __str__(self) -> str:
        return MAPPING


def mapping_config(mapping: Mapping[Any, Any]) -> MappingConfig:
    """Write a mapping as YAML.

    Raises:
        ConfigError: it holds what YAML cannot hold; names the first such key.
    """
    return MappingConfig(dump(_plain(mapping, ())))


def _plain(value: object, loc: Loc) -> Any:
    if len(loc) > MAX_DEPTH:  # a list may hold itself
        raise ConfigError(f"{place(loc[:3])}: nested more than {MAX_DEPTH} levels deep")
    if value is None:
        return None
    if type(value).__name__ in ("bool", "bool_"):  # also numpy's, without importing it
        return bool(value)
    if isinstance(value, numbers.Real):  # also numpy's
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    if isinstance(value, list | tuple):
        return [_plain(item, (*loc, index)) for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            is_count = type(key) is int and key >= 0  # as one counts GPUs and labels
            if not is_count and (not isinstance(key, str) or re.search(NOT_TEXT, key)):
                raise ConfigError(f"{place(loc)}: the key {shown(repr(key))} must be text")
        return {key: _plain(item, (*loc, str(key))) for key, item in value.items()}
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if isinstance(text, str) and not re.search(NOT_TEXT, text):
        return str.__str__(text)
    what = "this text" if isinstance(text, str) else f"a value of type {type(value).__name__}"
    raise ConfigError(f"{place(loc)}: YAML cannot hold {what}; give texts, numbers, lists and dicts of them")
