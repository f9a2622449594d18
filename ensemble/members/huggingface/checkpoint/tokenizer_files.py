"""Whether a checkpoint's folder has the files that its tokenizer's class needs; nothing is imported.

Without them transformers 5 makes a tokenizer that knows special tokens only, and says nothing.  Which files a class
needs is read from the source of the installed release.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ensemble.common.files import load_json, read_json, unreadable
from ensemble.members.huggingface.checkpoint.transformers_source import source_files
from ensemble.members.huggingface.spec import default_max_length

# All of a tokenizer in one file; every class of transformers 5 that is built on tokenizers reads it.
_WHOLE = "tokenizer.json"
# What a class takes instead of the files that it names (tokenization_utils_base.py, from_pretrained).
_INSTEAD = ("tokenizer.model", "tekken.json", "tiktoken.model")
# Files that a class names and does without.
_OPTIONAL = ("tokenizer_file", "tokenizer_config_file", "normalizer_file", "target_vocab_file")
_VOCABULARIES = ("vocab*", "*.model", "*.txt", "*.codes", "*.spm")
# They are not made for one kind of vocabulary: all they have is tokenizer.json.
_ANY_VOCABULARY = ("TokenizersBackend", "PreTrainedTokenizerFast", "PreTrainedTokenizer", "PythonBackend")
_KIND = re.compile(rb'"model":\s*\{\s*(?:"[a-z_]+":\s*[^{\[,]*,\s*)*?"type":\s*"(\w+)"')
# Parsing takes 30 ms for a MB, and big vocabularies have 30 of them: of a larger file only its two ends are looked
# at, which shows one that was cut short; any other damage stops the worker.
_MAX_PARSED_BYTES = 2 << 20
_END_BYTES = 64


@dataclass(frozen=True)
class _Class:
    """A tokenizer's class in transformers' source: its files by their roles, and its kind of vocabulary."""

    files: Mapping[str, str]
    kind: str
    reads_whole: bool


def vocabulary_problems(
    folder: Path, config: Mapping[str, Any], tokenizer_kwargs: Mapping[str, Any], runs_code: bool = False
) -> Iterator[str]:
    """What is missing of a tokenizer's files, or is not for its class; nothing where nobody can tell.

    That the files can be read is looked at before (``small_file_problems``).

    Args:
        config: the folder's ``config.json``.
        tokenizer_kwargs: the member's; they can name other files.
        runs_code: the tokenizer may be one that the checkpoint brings along.
    """
    subfolder = tokenizer_kwargs.get("subfolder")
    if isinstance(subfolder, str):
        folder = folder / subfolder
    settings: dict[str, Any] = {}
    if (path := folder / "tokenizer_config.json").is_file():
        try:
            settings = load_json(path)
        except (ValueError, TypeError) as error:
            yield f"{path} cannot be read ({error}); copy it again"
            return
    if any(isinstance(value, str) and os.path.isfile(value) for value in tokenizer_kwargs.values()):  # noqa: PTH113
        return
    if runs_code and "auto_map" in settings:
        return
    # tokenizer.4.0.0.json and the like, of which transformers takes the newest that it may.
    versions = settings.get("fast_tokenizer_files")
    names = [_WHOLE, *(versions if isinstance(versions, list) else ())]
    whole = [folder / name for name in names if isinstance(name, str) and (folder / name).is_file()]
    if whole:
        yield from _whole_problems(whole[0], settings, config)
        return
    if any((folder / name).is_file() for name in _INSTEAD) or next(folder.glob("*.tiktoken"), None):
        return
    # Classes of which transformers may take one, the likeliest first.
    named = (settings.get("tokenizer_class") or config.get("tokenizer_class"), _registered(config))
    classes = [name.removesuffix("Fast") for name in named if isinstance(name, str) and name]
    needs = [_needed(name) for name in classes]
    for files in needs:
        if files and all((folder / file).is_file() for file in files):
            for file in files:
                if not (folder / file).stat().st_size:
                    yield f"{folder / file} is empty; copy it again"
            return
    if any(files is not None and not files for files in needs):  # bytes or characters, as ByT5's
        return
    wanted = next((files for files in needs if files), ())
    if not wanted and any(next(folder.glob(pattern), None) for pattern in _VOCABULARIES):
        return  # of a class that this release does not have: the worker will see
    missing = [file for file in wanted if not (folder / file).is_file()]
    made_by = f" of {classes[0]}" if classes and wanted else ""
    or_these = f", nor {' and '.join(missing)}" if missing else ""
    has = "but a tokenizer_config.json, which holds no vocabulary; " if settings else ""
    yield (
        f"{folder} has no tokenizer files with the vocabulary{made_by} (no {_WHOLE}{or_these}), {has}copy "
        "them too"
    )


def _whole_problems(path: Path, settings: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[str]:
    name = str(settings.get("tokenizer_class") or "").removesuffix("Fast")
    if name in ("", *_ANY_VOCABULARY):
        return
    # For some kinds of model transformers does not go by a tokenizer_config.json's class.
    exempt = _table("MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS").partition("}")[0]
    is_exempt = f'"{config.get("model_type", "")}"' in exempt
    if is_exempt or _registered(config) in (*_ANY_VOCABULARY, "MistralCommonBackend"):
        return
    made = _class_of(name)
    found = _KIND.search(path.read_bytes()) if made is not None and made.kind else None
    if made is not None and found and (kind := found[1].decode("ascii", "replace")) != made.kind:
        yield (
            f"{path} holds a vocabulary of the kind {kind}, and tokenizer_config.json names the tokenizer_class "
            f"{settings['tokenizer_class']}, which is for {made.kind}; they do not belong together: copy both "
            "again, or set tokenizer_class to PreTrainedTokenizerFast, which takes tokenizer.json as it is"
        )


def _table(name: str) -> str:
    """The source of tokenization_auto.py from a table on."""
    return _texts().get("tokenization_auto.py", "").partition(f"\n{name}")[2]


def _registered(config: Mapping[str, Any]) -> str | None:
    model_type = re.escape(str(config.get("model_type", "")))
    found = re.search(rf'\("{model_type}",\s*\(?\s*"(\w+)"', _table("TOKENIZER_MAPPING_NAMES"))
    return found[1] if found else None


def _needed(name: str) -> tuple[str, ...] | None:
    """Files without which a class has no vocabulary; None of a class that needs all in one file."""
    found = None if name in _ANY_VOCABULARY else _class_of(name)
    if found is None:
        return None
    files = tuple(file for role, file in found.files.items() if role not in _OPTIONAL)
    return files or (None if found.reads_whole else ())


@cache
def _class_of(name: str, depth: int = 0) -> _Class | None:
    """What the source says of a class, or of the one that it is derived from."""
    for text in _texts().values():
        found = re.search(rf"^class {name}(?:Fast)?\((\w+)|^{name} = (\w+)", text, re.MULTILINE)
        if found is None:
            continue
        base = found[1] or found[2]
        imported = re.search(rf"import (\w+) as {base}\b", text)
        base = (imported[1] if imported else base).removesuffix("Fast")
        above = _class_of(base, depth + 1) if depth < 4 and base not in _ANY_VOCABULARY else None
        body = text[found.end() :].partition("\nclass ")[0]
        kind = re.search(r"^    model = (?:models\.)?(\w+)$", body, re.MULTILINE)
        stored = re.search(r"^VOCAB_FILES_NAMES[^=]*= *(\{.*?\})", text, re.MULTILINE | re.DOTALL)
        files = ast.literal_eval(stored[1]) if stored and "vocab_files_names" in body else None
        reads_whole = base in ("TokenizersBackend", "PreTrainedTokenizer") and "TokenizersBackend" in text
        if above is None:
            return _Class(files or {}, kind[1] if kind else "", reads_whole)
        return _Class(
            above.files if files is None else files, kind[1] if kind else above.kind, above.reads_whole
        )
    return None


@cache
def _texts() -> dict[str, str]:
    """The files of the installed transformers that define tokenizers, by name."""
    files = source_files("models/**/tokenization_*.py")
    return {file.name: file.read_text(encoding="utf-8") for file in files}


def small_file_problems(folder: Path, patterns: Sequence[str]) -> Iterator[str]:
    """A sentence for each file that may not be read, is a link to nothing, or is called JSON and is none.

    Args:
        patterns: of the files' names, such as ``tokenizer*``.
    """
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern)}):
        try:
            reason = "" if path.is_dir() else _damage(path)
        except OSError as error:
            yield unreadable(path, error)
        else:
            if reason:
                yield f"{path} {reason}; copy it again"


def _damage(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as file:
        content = file.read(_MAX_PARSED_BYTES if size <= _MAX_PARSED_BYTES else _END_BYTES)
        is_whole = size <= len(content)
        if not is_whole:
            file.seek(-_END_BYTES, 2)
            content += file.read()
    if content.startswith(b"version https://git-lfs"):
        return "is only a git-lfs pointer to the file"
    if path.suffix != ".json":
        return ""
    if not content.strip():
        return "is empty"
    if not is_whole:
        is_closed = content.lstrip().startswith(b"{") and content.rstrip().endswith(b"}")
        return "" if is_closed else "is not JSON, or was cut short"
    try:
        json.loads(content)
    except (ValueError, RecursionError) as error:
        return f"is not JSON ({error})"
    return ""


def own_max_length(folder: Path) -> int | None:
    """Tokens that a row may have where the config names no ``max_length``; None: the files do not tell.

    The limit can also stand in a tokenizer's class.
    """
    own = read_json(folder / "tokenizer_config.json").get("model_max_length")
    return default_max_length(own) if isinstance(own, int | float) and not isinstance(own, bool) else None
