"""Check that a checkpoint's folder has its tokenizer's files, and tokenize text with them.

Without the files transformers 5 silently makes a tokenizer of special tokens only.  The source of the installed
release tells which files a class needs.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ensemble.common.files import read_json, unreadable
from ensemble.members.huggingface.checkpoint.transformers_source import sources, table
from ensemble.members.huggingface.spec import default_max_length

# transformers' tokenizers name their files in VOCAB_FILES_NAMES; the rest is in tokenization_utils_base.py.
TOKENIZER_FILES = (
    "tokenizer* *.tokenizer special_tokens_map.json added_tokens.json vocab* *vocab.* merges* *.model *.spm "
    "*.tiktoken *.codes dict.txt tekken.json *_maps.json emoji.json normalizer.json word_*.json chat_template* "
    "*.jinja additional_chat_templates/*.jinja"
).split()
# A whole tokenizer in one file; every class of transformers 5 that is built on tokenizers reads it.
_WHOLE = "tokenizer.json"
# Files that replace those that a class names (tokenization_utils_base.py, from_pretrained).
_INSTEAD = ("tokenizer.model", "tekken.json", "*.tiktoken")
# Files that a class names but does not need.
_OPTIONAL = ("tokenizer_file", "tokenizer_config_file", "normalizer_file", "target_vocab_file")
_VOCABULARIES = ("vocab*", "*.model", "*.txt", "*.codes", "*.spm")
# Classes for any kind of vocabulary, which read only tokenizer.json.
_BACKED = ("TokenizersBackend", "PreTrainedTokenizerFast")
_ANY_VOCABULARY = (*_BACKED, "PreTrainedTokenizer", "PythonBackend")
# Parsing takes 30 ms for a MB, and large vocabularies have 30 MB: of a larger file only the two ends are checked,
# which shows whether it was cut short; other damage stops the worker.
_MAX_PARSED_BYTES = 2 << 20
_END_BYTES = 64


def vocabulary_problems(
    folder: Path, config: Mapping[str, Any], tokenizer_kwargs: Mapping[str, Any], runs_code: bool = False
) -> Iterator[str]:
    """Yield a sentence if a tokenizer's files are certainly missing.

    ``small_file_problems`` has checked before that files can be read.

    Args:
        config: the folder's ``config.json``.
        tokenizer_kwargs: the member's; they can name other files.
        runs_code: whether the tokenizer may be the checkpoint's own code.
    """
    subfolder = tokenizer_kwargs.get("subfolder")
    if isinstance(subfolder, str):
        folder = folder / subfolder
    settings = read_json(folder / "tokenizer_config.json")
    named = any(isinstance(value, str) and os.path.isfile(value) for value in tokenizer_kwargs.values())  # noqa: PTH113
    if named or (runs_code and "auto_map" in settings):
        return
    # tokenizer.4.0.0.json and the like, of which transformers takes the newest that it may.
    versions = settings.get("fast_tokenizer_files")
    wholes = (_WHOLE, *_INSTEAD, *map(str, versions if isinstance(versions, list) else ()))
    if any(next(folder.glob(name), None) for name in wholes):
        return
    # Classes that transformers may choose from, the likeliest first.
    registered = table("TOKENIZER_MAPPING_NAMES", "models/auto/tokenization_auto.py")
    candidates = (
        settings.get("tokenizer_class") or config.get("tokenizer_class"),
        registered.get(str(config.get("model_type", ""))),
    )
    classes = [name.removesuffix("Fast") for name in candidates if isinstance(name, str) and name]
    needs = [_needed_files(name) for name in classes]
    # Bytes or characters, as ByT5's, need none.
    if any(files is not None and all((folder / file).is_file() for file in files) for files in needs):
        return
    needed = next((files for files in needs if files), ())
    if not needed and any(next(folder.glob(pattern), None) for pattern in _VOCABULARIES):
        return  # for a class that this release does not have: the worker will tell
    made_by = f" of {classes[0]}" if classes and needed else ""
    missing = " and ".join(file for file in needed if not (folder / file).is_file())
    has = "but a tokenizer_config.json, which holds no vocabulary; " if settings else ""
    yield (
        f"{folder} has no tokenizer files with the vocabulary{made_by} "
        f"(no {_WHOLE}{missing and f', nor {missing}'}), {has}copy them too"
    )


@cache
def _needed_files(name: str) -> tuple[str, ...] | None:
    """Return the files that a class needs for its vocabulary; None: tokenizer.json, or the class is not known."""
    if name in _ANY_VOCABULARY:
        return None
    for text in sources("models/**/tokenization_*.py").values():
        definition = re.search(rf"^class {name}(?:Fast)?\((\w+)|^{name} = (\w+)", text, re.MULTILINE)
        if definition is None:
            continue
        body = text[definition.end() :].partition("\nclass ")[0]
        stored = re.search(r"^VOCAB_FILES_NAMES[^=]*= *(\{.*?\})", text, re.MULTILINE | re.DOTALL)
        roles = ast.literal_eval(stored[1]) if stored and "vocab_files_names" in body else {}
        files = tuple(file for role, file in roles.items() if role not in _OPTIONAL)
        if files:
            return files
        base = definition[1] or definition[2]
        imported = re.search(rf"import (\w+) as {base}\b", text)
        base = (imported[1] if imported else base).removesuffix("Fast")
        return () if base in _ANY_VOCABULARY and base not in _BACKED else _needed_files(base)
    return None


def small_file_problems(folder: Path) -> Iterator[str]:
    """Yield a sentence for each file of a tokenizer that cannot be read, is empty, or is not JSON."""
    for path in sorted({path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)}):
        if path.is_dir():
            continue
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                content = file.read(_MAX_PARSED_BYTES if size <= _MAX_PARSED_BYTES else _END_BYTES)
                is_whole = size <= len(content)
                if not is_whole:
                    file.seek(-_END_BYTES, 2)
                    content += file.read()
            is_json = path.suffix == ".json"
            ends = (content.lstrip()[:1], content.rstrip()[-1:])
            reason = ""
            if content.startswith(b"version https://git-lfs"):
                reason = "is only a git-lfs pointer to the file"
            elif not content.strip() and path.suffix != ".jinja":
                reason = "is empty"
            elif is_json and is_whole:
                json.loads(content)
            elif is_json and ends != (b"{", b"}"):
                reason = "is not JSON, or was cut short"
        except OSError as error:
            yield unreadable(path, error)
            continue
        except (ValueError, RecursionError) as error:
            reason = f"is not JSON ({error})"
        if reason:
            yield f"{path} {reason}; copy it again"


def own_max_length(folder: Path) -> int | None:
    """Return the tokens that a row may have without the key ``max_length``; None: the files do not tell.

    The limit can also be in a tokenizer's class.
    """
    limit = tokenizer_limit(folder)
    return None if limit is None else default_max_length(limit)


def tokenizer_limit(folder: Path) -> float | None:
    """Return a tokenizer's limit of tokens, an astronomic number for no limit; None: not stored."""
    limit = read_json(folder / "tokenizer_config.json").get("model_max_length")
    return limit if isinstance(limit, int | float) and not isinstance(limit, bool) else None


def stored_encode(folder: Path) -> Callable[[str], list[int]] | None:
    """Return a function that tokenizes text without special tokens, by the folder's ``tokenizer.json``.

    None: there is no such file, or it cannot be read; the worker reports why.  A large vocabulary takes a second.
    """
    path = folder / _WHOLE
    if not path.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception:  # tokenizers raises no other class
        return None
    tokenizer.no_truncation()

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    return encode
