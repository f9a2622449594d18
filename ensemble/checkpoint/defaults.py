"""What a tokenizer's own files set where the config does not say: only what they say for certain.

So a key that spells out what would be so without it is known to change nothing.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ensemble.protocol import DEFAULT_MAX_LENGTH, NO_LENGTH_LIMIT

# Its beginning: all of it can be many megabytes.
_HEAD_BYTES = 4_096


def own_max_length(folder: Path) -> int | None:
    """Tokens that a row may have where the config names no ``max_length`` (worker/load.py, max_length).

    None: the files do not tell, as where the limit stands in a tokenizer's class.
    """
    own = _tokenizer_config(folder).get("model_max_length")
    if isinstance(own, bool) or not isinstance(own, int | float):
        return None
    return min(DEFAULT_MAX_LENGTH, int(own)) if own < NO_LENGTH_LIMIT else DEFAULT_MAX_LENGTH


def own_truncation_side(folder: Path) -> str | None:
    """The end that is cut where the config names no ``truncation_side``; None: the files do not tell.

    tokenizer_config.json goes first, then tokenizer.json, and else it is the right one (transformers,
    tokenization_utils_tokenizers.py and tokenization_utils_base.py).
    """
    config = _tokenizer_config(folder)
    if "truncation_side" in config:
        return str(config["truncation_side"])
    try:
        with (folder / "tokenizer.json").open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return None
    return "right" if config and re.search(rb'^[^{}\[\]]*\{[^{}\[\]]*"truncation":\s*null', head) else None


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}
