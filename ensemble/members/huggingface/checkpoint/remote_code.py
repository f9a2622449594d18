"""Code that a checkpoint brings along, and whether the config lets it run.

A ``config.json`` can name classes in Python files of its own (``auto_map``).  transformers prefers its own classes
where it has them; otherwise it runs those files, or refuses to (dynamic_module_utils.py).
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from ensemble.members.huggingface.checkpoint.quantization_keys import transformers_source

_COMMIT: Final = r"[0-9a-fA-F]{40}"
_CLASSIFIER: Final = "AutoModelForSequenceClassification"
_CONFIGS = ("models/auto/auto_mappings.py", "models/auto/configuration_auto.py"), "CONFIG_MAPPING_NAMES"
_CLASSIFIERS = ("models/auto/modeling_auto.py",), "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"
# It has several tables and exceptions; what is named in none of them is unknown.
_TOKENIZERS = ("models/auto/tokenization_auto.py",), ""
_ANY_TOKENIZER = ("PreTrainedTokenizer", "PythonBackend", "TokenizersBackend")
# What a member uses, and the key of the config whose code_revision is for it.
_KINDS = {
    "AutoConfig": "model_kwargs",
    _CLASSIFIER: "model_kwargs",
    "AutoTokenizer": "tokenizer_kwargs",
}


@dataclass(frozen=True)
class Trust:
    """What a member's config lets the files of its checkpoint do.

    The revisions are those of ``model_kwargs`` and ``tokenizer_kwargs``: of code in another repository than the
    checkpoint's.
    """

    allow_pickle: bool = False
    remote_code: bool = False
    code_revision: object = None
    tokenizer_code_revision: object = None


NO_TRUST: Final = Trust()


def code_problems(name: str, folder: Path, config: Mapping[str, Any], trust: Trust) -> Iterator[str]:
    """Why a checkpoint's own code cannot or must not run, one sentence each.

    Args:
        name: what the config calls the checkpoint.
        folder: where its files lie.
        config: its ``config.json``.
    """
    tokenizer_config = _read(folder / "tokenizer_config.json")
    classes = _classes(config) | _classes(tokenizer_config)
    codes = {kind: code for kind, code in classes.items() if kind in _KINDS}
    if trust.remote_code:
        loose = {
            _KINDS[kind]: code for kind, code in codes.items() if not _is_pinned(code, name, kind, trust)
        }
        for key, code in loose.items():
            yield (
                f"{name} takes its code from another repository ({code}), where it can change from one day to the "
                f"next; name the commit to use, as in {key}: {{code_revision: 40 hexadecimal digits}}"
            )
        return
    model_type = str(config.get("model_type", ""))
    if "AutoConfig" in codes and not _is_known(model_type, _CONFIGS):
        yield _refused(name, codes["AutoConfig"], "model")
    elif _CLASSIFIER in codes and not _is_known(model_type, _CLASSIFIERS):
        yield _refused(name, codes[_CLASSIFIER], "model")
    elif "AutoTokenizer" in codes and not _is_own_tokenizer(model_type, tokenizer_config):
        yield _refused(name, codes["AutoTokenizer"], "tokenizer")


def _refused(name: str, code: str, kind: str) -> str:
    return (
        f"{name} needs Python code of its own ({code}), because transformers has no such "
        f"{kind}; it runs only if you allow it: read it, then set trust_remote_code: true"
    )


def _is_pinned(code: str, name: str, kind: str, trust: Trust) -> bool:
    # transformers takes "org/name--module.Class" from that repository, and by the checkpoint's revision only
    # where that is where the checkpoint itself comes from.
    repository, separator, _ = code.partition("--")
    revision = trust.code_revision if _KINDS[kind] == "model_kwargs" else trust.tokenizer_code_revision
    is_commit = isinstance(revision, str) and re.fullmatch(_COMMIT, revision) is not None
    return not separator or repository == name or is_commit


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


def _is_own_tokenizer(model_type: str, config: Mapping[str, Any]) -> bool:
    named = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    return any(name in _ANY_TOKENIZER or _is_known(name, _TOKENIZERS) for name in (model_type, named) if name)


def _is_known(name: str, table: tuple[tuple[str, ...], str]) -> bool:
    known = _names(*table)
    return not known or name in known


@cache
def _names(files: tuple[str, ...], table: str) -> frozenset[str]:
    """What stands in one of transformers' tables, or in the whole files; empty where they are not as expected."""
    found: set[str] = set()
    for file in files:
        for statement in transformers_source(file):
            target = statement.targets[0] if isinstance(statement, ast.Assign) else statement
            if not table or any(isinstance(node, ast.Name) and node.id == table for node in _heads(target)):
                texts = (node.value for node in ast.walk(statement) if isinstance(node, ast.Constant))
                found |= {text for text in texts if isinstance(text, str)}
    return frozenset(found | {name.removesuffix("Fast") for name in found})


def _heads(node: ast.AST) -> Iterator[ast.AST]:
    """The name that a statement assigns to or, as in ``TABLE.update(...)``, calls a method of."""
    yield node
    if isinstance(node, ast.Expr | ast.Attribute):
        yield from _heads(node.value)
    elif isinstance(node, ast.Call):
        yield from _heads(node.func)
    elif isinstance(node, ast.AnnAssign):
        yield from _heads(node.target)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
