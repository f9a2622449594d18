"""What the installed transformers has, read from its source: importing it takes seconds.

Where a file or a table is not as expected, the answer is empty, and whoever asks takes nothing for certain.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path

CONFIGS = ("models/auto/auto_mappings.py", "models/auto/configuration_auto.py")  # of transformers 5 and 4
CLASSIFIERS = "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"  # in models/auto/modeling_auto.py


def source_files(*patterns: str) -> list[Path]:
    """The files of transformers that fit one of these patterns."""
    spec = importlib.util.find_spec("transformers")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or () if spec is not None else ())]
    return [file for folder in folders for pattern in patterns for file in sorted(folder.glob(pattern))]


@cache
def statements(file: str) -> tuple[ast.stmt, ...]:
    """The statements of a file; none where there is no such file."""
    for path in source_files(file):
        try:
            return tuple(ast.parse(path.read_text(encoding="utf-8")).body)
        except (OSError, SyntaxError):
            continue
    return ()


def table(file: str, name: str) -> dict[str, ast.expr]:
    """The dictionary that a file assigns to a name, by its keys that are text."""
    for statement in statements(file):
        if isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(statement.value, ast.Dict):
            target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
            if isinstance(target, ast.Name) and target.id == name:
                pairs = zip(statement.value.keys, statement.value.values, strict=True)
                return {str(key.value): item for key, item in pairs if isinstance(key, ast.Constant)}
    return {}


@cache
def modeling_source(model_type: str) -> str | None:
    """The file that defines the classifier of a kind of model; None where there is none."""
    name = _entry("models/auto/modeling_auto.py", CLASSIFIERS, model_type)
    # The source is in a folder of the kind's own name, but for those in a table.
    special = (_entry(file, "SPECIAL_MODEL_TYPE_TO_MODULE_NAME", model_type) for file in CONFIGS)
    folder = next(filter(None, special), None) or model_type.replace("-", "_")
    for file in source_files(f"models/{folder}/modeling_*.py", f"models/deprecated/{folder}/modeling_*.py"):
        text = file.read_text(encoding="utf-8")
        if f"\nclass {name}(" in text:  # a folder may hold other models too, such as ESMFold
            return text
    return None


def _entry(file: str, table: str, model_type: str) -> str | None:
    """What stands for a kind of model in a table, or after it; None for nothing."""
    for path in source_files(file):
        rest = path.read_text(encoding="utf-8").partition(f"\n{table}")[2]
        found = re.search(rf'\("{re.escape(model_type)}",\s*\(?\s*"(\w+)"', rest)
        return found[1] if found else None
    return None
