"""Whether a checkpoint's folder has the files that its tokenizer's class needs, and what they make of a text.

Without them transformers 5 makes a tokenizer that knows special tokens only, and says nothing.  Which files a class
needs is read from the source of the installed release.
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
    *("tokenizer*", "*.tokenizer", "special_tokens_map.json", "added_tokens.json", "vocab*", "*vocab.*"),
    *("merges*", "*.model", "*.spm", "*.tiktoken", "*.codes", "dict.txt", "tekken.json", "*_maps.json"),
    *("emoji.json", "normalizer.json", "word_*.json", "chat_template*", "*.jinja"),
    "additional_chat_templates/*.jinja",
)
# All of a tokenizer in one file; every class of transformers 5 that is built on tokenizers reads it.
_WHOLE = "tokenizer.json"
# What a class takes instead of the files that it names (tokenization_utils_base.py, from_pretrained).
_INSTEAD = ("tokenizer.model", "tekken.json", "*.tiktoken")
# Files that a class names and does without.
_OPTIONAL = ("tokenizer_file", "tokenizer_config_file", "normalizer_file", "target_vocab_file")
_VOCABULARIES = ("vocab*", "*.model", "*.txt", "*.codes", "*.spm")
# They are not made for one kind of vocabulary: all they have is tokenizer.json.
_BACKED = ("TokenizersBackend", "PreTrainedTokenizerFast")
_ANY_VOCABULARY = (*_BACKED, "PreTrainedTokenizer", "PythonBackend")
# Parsing takes 30 ms for a MB, and big vocabularies have 30 of them: of a larger file only its two ends are looked
# at, which shows one that was cut short; any other damage stops the worker.
_MAX_PARSED_BYTES = 2 << 20
_END_BYTES = 64


def vocabulary_problems(
    folder: Path, config: Mapping[str, Any], tokenizer_kwargs: Mapping[str, Any], runs_code: bool = False
) -> Iterator[str]:
    """What is missing of a tokenizer's files; nothing where nobody can tell.

    That the files can be read is looked at before (``small_file_problems``).

    Args:
        config: the folder's ``config.json``.
        tokenizer_kwargs: the member's; they can name other files.
        runs_code: the tokenizer may be one that the checkpoint brings along.
    """
    if isinstance(subfolder := tokenizer_kwargs.get("subfolder"), str):
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
    # Classes of which transformers may take one, the likeliest first.
    registered = table("TOKENIZER_MAPPING_NAMES", "models/auto/tokenization_auto.py")
    candidates = (
        settings.get("tokenizer_class") or config.get("tokenizer_class"),
        registered.get(str(config.get("model_type", ""))),
    )
    classes = [name.removesuffix("Fast") for name in candidates if isinstance(name, str) and name]
    needs = [_needed(name) for name in classes]
    # Bytes or characters, as ByT5's, need none.
    if any(files is not None and all((folder / file).is_file() for file in files) for files in needs):
        return
    wanted = next((files for files in needs if files), ())
    if not wanted and any(next(folder.glob(pattern), None) for pattern in _VOCABULARIES):
        return  # of a class that this release does not have: the worker will see
    made_by = f" of {classes[0]}" if classes and wanted else ""
    missing = " and ".join(file for file in wanted if not (folder / file).is_file())
    has = "but a tokenizer_config.json, which holds no vocabulary; " if settings else ""
    yield (
        f"{folder} has no tokenizer files with the vocabulary{made_by} "
        f"(no {_WHOLE}{missing and f', nor {missing}'}), {has}copy them too"
    )


@cache
def _needed(name: str) -> tuple[str, ...] | None:
    """The files without which a class has no vocabulary; None where it needs all in one file, or is not known."""
    for text in () if name in _ANY_VOCABULARY else sources("models/**/tokenization_*.py").values():
        found = re.search(rf"^class {name}(?:Fast)?\((\w+)|^{name} = (\w+)", text, re.MULTILINE)
        if found is None:
            continue
        body = text[found.end() :].partition("\nclass ")[0]
        stored = re.search(r"^VOCAB_FILES_NAMES[^=]*= *(\{.*?\})", text, re.MULTILINE | re.DOTALL)
        roles = ast.literal_eval(stored[1]) if stored and "vocab_files_names" in body else {}
        if files := tuple(file for role, file in roles.items() if role not in _OPTIONAL):
            return files
        base = found[1] or found[2]
        imported = re.search(rf"import (\w+) as {base}\b", text)
        base = (imported[1] if imported else base).removesuffix("Fast")
        return () if base in _ANY_VOCABULARY and base not in _BACKED else _needed(base)
    return None


def small_file_problems(folder: Path) -> Iterator[str]:
    """A sentence for each file of a tokenizer that may not be read, links to nothing, is empty, or is no JSON."""
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
            is_json, ends = path.suffix == ".json", (content.lstrip()[:1], content.rstrip()[-1:])
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
    """Tokens that a row may have where the config names no ``max_length``; None: the files do not tell.

    The limit can also stand in a tokenizer's class.
    """
    own = tokenizer_limit(folder)
    return None if own is None else default_max_length(own)


def tokenizer_limit(folder: Path) -> float | None:
    """Tokens that a tokenizer gives for a row at most, an astronomic number for no limit; None: nobody says."""
    own = read_json(folder / "tokenizer_config.json").get("model_max_length")
    return own if isinstance(own, int | float) and not isinstance(own, bool) else None


def stored_encode(folder: Path) -> Callable[[str], list[int]] | None:
    """Token ids of a text, without special tokens, by the folder's ``tokenizer.json``.

    None where there is none, or it cannot be read; the worker says more.  Reading a big vocabulary takes a second.
    """
    path = folder / _WHOLE
    if not path.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception:  # tokenizers has no kinds of errors
        return None
    tokenizer.no_truncation()

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    return encode
