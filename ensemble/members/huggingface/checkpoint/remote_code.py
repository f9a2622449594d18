"""Code that a checkpoint brings along, and whether the config lets it run.

A ``config.json`` can name classes in Python files of its own (``auto_map``).  transformers prefers its own classes
where it has them; otherwise it runs those files, or refuses to (dynamic_module_utils.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from ensemble.common.files import read_json
from ensemble.members.huggingface.checkpoint.transformers_source import CLASSIFIERS, CONFIGS, sources, table
from ensemble.members.huggingface.settings import COMMIT, HuggingFaceSettings

_CLASSIFIER: Final = "AutoModelForSequenceClassification"
_ANY_TOKENIZER = ("PreTrainedTokenizer", "PythonBackend", "TokenizersBackend")
# What a member uses, and the key of the config whose code_revision is for it.
_KINDS = {"AutoConfig": "model_kwargs", _CLASSIFIER: "model_kwargs", "AutoTokenizer": "tokenizer_kwargs"}


def code_problems(model: HuggingFaceSettings, folder: Path, config: Mapping[str, Any]) -> Iterator[str]:
    """Why a checkpoint's own code cannot or must not run, one sentence each.

    Args:
        folder: where its files lie.
        config: its ``config.json``.
    """
    tokenizer_config = read_json(folder / "tokenizer_config.json")
    classes = _classes(config) | _classes(tokenizer_config)
    codes = {kind: code for kind, code in classes.items() if kind in _KINDS}
    name = model.model_name_or_path
    if model.trust_remote_code:
        unpinned = {}
        for kind, code in codes.items():
            # transformers takes "org/name--module.Class" from that repository, and by the checkpoint's revision
            # only where that is where the checkpoint itself comes from.
            repository, separator, _ = code.partition("--")
            revision = getattr(model, _KINDS[kind]).get("code_revision")
            is_pinned = isinstance(revision, str) and re.fullmatch(COMMIT, revision)
            if separator and repository != name and not is_pinned:
                unpinned[_KINDS[kind]] = code
        for key, code in unpinned.items():
            yield (
                f"{name} takes its code from another repository ({code}), where it can change from one day to the "
                f"next; name the commit to use, as in {key}: {{code_revision: 40 hexadecimal digits}}"
            )
        return
    if not codes:
        return
    model_type = str(config.get("model_type", ""))
    configs, classifiers = table("CONFIG_MAPPING_NAMES", *CONFIGS), table(*CLASSIFIERS)
    # It has several tables and exceptions; what is named in none of them is unknown.
    tokenizers = "".join(sources("models/auto/tokenization_auto.py").values())
    tokenizer = str(tokenizer_config.get("tokenizer_class") or "").removesuffix("Fast")
    knows_tokenizer = not tokenizers or any(
        one in _ANY_TOKENIZER or re.search(rf'"{re.escape(one)}(Fast)?"', tokenizers)
        for one in (model_type, tokenizer)
        if one
    )
    needed = None
    if "AutoConfig" in codes and configs and model_type not in configs:
        needed = "AutoConfig", "model"
    elif _CLASSIFIER in codes and classifiers and model_type not in classifiers:
        needed = _CLASSIFIER, "model"
    elif "AutoTokenizer" in codes and not knows_tokenizer:
        needed = "AutoTokenizer", "tokenizer"
    if needed is not None:
        yield (
            f"{name} needs Python code of its own ({codes[needed[0]]}), because transformers has no such "
            f"{needed[1]}; it runs only if you allow it: read it, then set trust_remote_code: true"
        )


def _classes(config: Mapping[str, Any]) -> dict[str, str]:
    """``auto_map``: what is named for each of transformers' Auto classes, such as ``modeling_x.XModel``."""
    found = config.get("auto_map")
    if isinstance(found, list):  # an older form, in tokenizer_config.json only
        found = {"AutoTokenizer": found}
    classes = {}
    for kind, code in found.items() if isinstance(found, dict) else ():
        # A tokenizer has a slow and a fast class.
        named = [one for one in (code if isinstance(code, list) else [code]) if isinstance(one, str)]
        if named:
            classes[str(kind)] = named[-1]
    return classes
