"""Check whether a checkpoint needs Python code of its own, and whether the config lets it run.

A ``config.json`` can name classes in the checkpoint's Python files (``auto_map``).  transformers prefers its own
classes where it has them; otherwise it runs those files, or refuses to (dynamic_module_utils.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ensemble.common.files import read_json
from ensemble.members.huggingface.checkpoint.transformers_source import CONFIGS, MODELS, sources, table
from ensemble.members.huggingface.settings import COMMIT, HuggingFaceSettings
from ensemble.members.huggingface.spec import IMAGE_CLASSIFIER

_IMAGE_READER = "AutoImageProcessor"
# The class that prepares a model's inputs, and the key with its arguments, where it is not a tokenizer.
_READERS = {IMAGE_CLASSIFIER: (_IMAGE_READER, "processor_kwargs")}
_ANY_TOKENIZER = ("PreTrainedTokenizer", "PythonBackend", "TokenizersBackend")


def code_problems(
    model: HuggingFaceSettings, folder: Path, config: Mapping[str, Any], auto_class: str
) -> Iterator[str]:
    """Yield why a checkpoint's own code cannot or must not run.

    Args:
        folder: holds its files.
        config: its ``config.json``.
        auto_class: the class of transformers that will load it.
    """
    # The classes that a member uses, and the key of the config that has their code_revision.
    reader, key = _READERS.get(auto_class, ("AutoTokenizer", "tokenizer_kwargs"))
    kinds = {"AutoConfig": "model_kwargs", auto_class: "model_kwargs", reader: key}
    tokenizer_config = read_json(folder / "tokenizer_config.json")
    processor_config = read_json(folder / "preprocessor_config.json")
    classes = _classes(config) | _classes(tokenizer_config) | _classes(processor_config)
    codes = {kind: code for kind, code in classes.items() if kind in kinds}
    name = model.model_name_or_path
    if model.trust_remote_code:
        unpinned = {}
        for kind, code in codes.items():
            # transformers takes "org/name--module.Class" from that repository, and by the checkpoint's revision
            # only where that is where the checkpoint itself comes from.
            repository, separator, _ = code.partition("--")
            revision = getattr(model, kinds[kind]).get("code_revision")
            is_pinned = isinstance(revision, str) and re.fullmatch(COMMIT, revision)
            if separator and repository != name and not is_pinned:
                unpinned[kinds[kind]] = code
        for key, code in unpinned.items():
            yield (
                f"{name} takes its code from another repository ({code}), where it can change from one day to the "
                f"next; name the commit to use, as in {key}: {{code_revision: 40 hexadecimal digits}}"
            )
        return
    if not codes:
        return
    model_type = str(config.get("model_type", ""))
    configs, classifiers = table("CONFIG_MAPPING_NAMES", *CONFIGS), table(*MODELS[auto_class])
    # The file has several tables and exceptions; a name in none of them is unknown.
    tokenizers = "".join(sources("models/auto/tokenization_auto.py").values())
    tokenizer = str(tokenizer_config.get("tokenizer_class") or "").removesuffix("Fast")
    knows_tokenizer = not tokenizers or any(
        name in _ANY_TOKENIZER or re.search(rf'"{re.escape(name)}(Fast)?"', tokenizers)
        for name in (model_type, tokenizer)
        if name
    )
    needed = None
    if "AutoConfig" in codes and configs and model_type not in configs:
        needed = "AutoConfig", "model"
    elif auto_class in codes and classifiers and model_type not in classifiers:
        needed = auto_class, "model"
    elif "AutoTokenizer" in codes and not knows_tokenizer:
        needed = "AutoTokenizer", "tokenizer"
    elif _IMAGE_READER in codes and _processor_class(processor_config) not in _image_processors():
        needed = _IMAGE_READER, "image processor"
    if needed is not None:
        yield (
            f"{name} needs Python code of its own ({codes[needed[0]]}), because transformers has no such "
            f"{needed[1]}; it runs only if you allow it: read it, then set trust_remote_code: true"
        )


def _processor_class(config: Mapping[str, Any]) -> str:
    """Return the class that an image processor's settings name, without the backend at its end."""
    name = str(config.get("image_processor_type") or config.get("feature_extractor_type") or "")
    return name.replace("FeatureExtractor", "ImageProcessor").removesuffix("Fast").removesuffix("Pil")


def _image_processors() -> set[str]:
    """Return the image processors of the installed transformers."""
    texts = sources("models/auto/*.py", "models/*/image_processing_*.py").values()
    return {name for text in texts for name in re.findall(r"\b(\w+ImageProcessor)\b", text)}


def _classes(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the ``auto_map``: for each of transformers' Auto classes a name such as ``modeling_x.XModel``."""
    auto_map = config.get("auto_map")
    if isinstance(auto_map, list):  # an older form, only in tokenizer_config.json
        auto_map = {"AutoTokenizer": auto_map}
    if not isinstance(auto_map, dict):
        return {}
    classes = {}
    for kind, code in auto_map.items():
        # A tokenizer has a slow and a fast class.
        names = [name for name in (code if isinstance(code, list) else [code]) if isinstance(name, str)]
        if names:
            classes[str(kind)] = names[-1]
    return classes
