"""Read what the installed transformers has from its source, since importing it takes seconds.

Where a file or a table is not as expected, the answer is empty, and callers assume nothing.
"""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path

from ensemble.members.huggingface.spec import BACKBONE, CLASSIFIER, IMAGE_CLASSIFIER, LANGUAGE_MODEL

# Of newer and of older releases.
CONFIGS = ("models/auto/auto_mappings.py", "models/auto/configuration_auto.py")
# The table of each class that loads models, and its file.
MODELS = {
    CLASSIFIER: ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", "models/auto/modeling_auto.py"),
    IMAGE_CLASSIFIER: ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", "models/auto/modeling_auto.py"),
    LANGUAGE_MODEL: ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "models/auto/modeling_auto.py"),
    BACKBONE: ("MODEL_MAPPING_NAMES", "models/auto/modeling_auto.py"),
}


@cache
def sources(*patterns: str) -> dict[str, str]:
    """Return the texts of transformers' files that match a pattern, by the files' names."""
    spec = importlib.util.find_spec("transformers")
    folders = map(Path, (spec.submodule_search_locations or ()) if spec is not None else ())
    files = (file for folder in folders for pattern in patterns for file in sorted(folder.glob(pattern)))
    return {file.name: file.read_text(encoding="utf-8") for file in files}


@cache
def table(name: str, *files: str) -> dict[str, str]:
    """Return a dictionary in transformers' source: for each key that is text the first name in its value."""
    entries: dict[str, str] = {}
    for text in sources(*files).values():
        for block in re.findall(rf"^{name}\b.*?^[\])}}]", text, re.MULTILINE | re.DOTALL):
            entries |= dict(re.findall(r'"([\w.-]+)"\s*[,:]\s*\(?\s*"?(?!None\b)(\w+)', block))
    return entries


@cache
def modeling_source(model_type: str, auto_class: str = CLASSIFIER) -> str | None:
    """Return the source of the class that ``auto_class`` loads for a model type; None where there is none."""
    name = table(*MODELS[auto_class]).get(model_type)
    # The folder has the model type's name, with exceptions in a table.
    folder = table("SPECIAL_MODEL_TYPE_TO_MODULE_NAME", *CONFIGS).get(model_type) or model_type.replace(
        "-", "_"
    )
    files = sources(f"models/{folder}/modeling_*.py", f"models/deprecated/{folder}/modeling_*.py")
    # A folder may hold other models too, such as ESMFold.
    return next((text for text in files.values() if f"\nclass {name}(" in text), None)
