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
from ensemble.members.huggingface.checkpoint.description import Description, adapter_tokenizers
from ensemble.members.huggingface.settings import COMMIT, HuggingFaceSettings
from ensemble.members.huggingface.spec import IMAGE_CLASSIFIER

_IMAGE_READER = "AutoImageProcessor"
# The class that prepares a model's inputs, and the key with its arguments, where it is not a tokenizer.
_READERS = {IMAGE_CLASSIFIER: (_IMAGE_READER, "processor_kwargs")}
# transformers names this argument where it refuses to run code.
_REFUSED = "trust_remote_code"


def code_problems(
    model: HuggingFaceSettings,
    folder: Path,
    config: Mapping[str, Any],
    auto_class: str,
    described: Description,
) -> Iterator[str]:
    """Yield why a checkpoint's own code cannot or must not run.

    Args:
        folder: holds its files.
        config: its ``config.json``.
        auto_class: the class of transformers that will load it.
        described: what transformers says of it.
    """
    # The classes that a member uses, and the key of the config that has their code_revision.
    reader, key = _READERS.get(auto_class, ("AutoTokenizer", "tokenizer_kwargs"))
    kinds = {"AutoConfig": "model_kwargs", auto_class: "model_kwargs", reader: key}
    name = model.model_name_or_path
    # Each file, and where it was loaded from.
    files = [(name, config)]
    files += [(name, read_json(folder / f"{kind}_config.json")) for kind in ("preprocessor", "tokenizer")]
    for own in filter(None, adapter_tokenizers(model).values()):
        files.append((str(own), read_json(own / "tokenizer_config.json")))
    classes = [
        (place, kind, code) for place, file in files for kind, code in _classes(file).items() if kind in kinds
    ]
    codes = {kind: code for _, kind, code in classes}
    if model.trust_remote_code:
        unpinned = {}
        for place, kind, code in classes:
            # transformers takes "org/name--module.Class" from that repository, and by the checkpoint's revision
            # only where that is where the file itself comes from.
            repository, separator, _ = code.partition("--")
            revision = getattr(model, kinds[kind]).get("code_revision")
            is_pinned = isinstance(revision, str) and re.fullmatch(COMMIT, revision)
            if separator and repository != place and not is_pinned:
                unpinned[kinds[kind]] = code
        for key, code in unpinned.items():
            yield (
                f"{name} takes its code from another repository ({code}), where it can change from one day to the "
                f"next; name the commit to use, as in {key}: {{code_revision: 40 hexadecimal digits}}"
            )
        return
    if not codes:
        return
    needed = None
    if "AutoConfig" in codes and _REFUSED in described.config_error:
        needed = "AutoConfig", "model"
    elif auto_class in codes and not described.has_class:
        needed = auto_class, "model"
    elif reader in codes and _REFUSED in described.reader.problem:
        needed = reader, "image processor" if reader == _IMAGE_READER else "tokenizer"
    if needed is not None:
        yield (
            f"{name} needs Python code of its own ({codes[needed[0]]}), because transformers has no such "
            f"{needed[1]}; it runs only if you allow it: read it, then set trust_remote_code: true"
        )


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
