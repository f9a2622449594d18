"""Check that the small files of a tokenizer can be read, and that none is missing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from ensemble.common.files import read_json, unreadable

# transformers' tokenizers name their files in VOCAB_FILES_NAMES; the rest is in tokenization_utils_base.py.
TOKENIZER_FILES = (
    "tokenizer* *.tokenizer special_tokens_map.json added_tokens.json vocab* *vocab.* merges* *.model *.spm "
    "*.tiktoken *.codes dict.txt tekken.json *_maps.json emoji.json normalizer.json word_*.json chat_template* "
    "*.jinja additional_chat_templates/*.jinja"
).split()
# Those of them that hold a vocabulary.
VOCABULARIES = ("tokenizer.json", "vocab*", "merges.txt", "*.model", "*.tiktoken", "*.spm", "tekken.json")
# A whole tokenizer in one file; every class of transformers 5 that is built on tokenizers reads it.
_WHOLE = "tokenizer.json"
# What a class takes instead of the files that it names (tokenization_utils_base.py, from_pretrained).
_INSTEAD = ("tokenizer.*json", "tokenizer.model", "tekken.json", "*.tiktoken")
# Roles of files that a class names and does without.
_OPTIONAL = (
    "tokenizer_file tokenizer_config_file normalizer_file target_vocab_file spm_file entity_vocab_file"
).split()
# A model may have rows to spare, and not a hundred times as many as its tokenizer has tokens.
_MOST_ROWS_PER_TOKEN = 100
# Classes that gave segment ids (``token_type_ids``) in 4.57 and do not from 5.0 on, where only names in a class's
# ``model_input_names`` are given; TokenizersBackend was PreTrainedTokenizerFast.
_LOSE_SEGMENTS = (
    "AlbertTokenizer BertJapaneseTokenizer FunnelTokenizer HerbertTokenizer PreTrainedTokenizer RemBertTokenizer "
    "RoCBertTokenizer RoFormerTokenizer SplinterTokenizer TokenizersBackend XLNetTokenizer"
).split()
# transformers parses larger files; damage in small ones, which it may overlook, is found here.
_MAX_PARSED_BYTES = 2 << 20


def small_file_problems(folder: Path) -> Iterator[str]:
    """Yield a sentence for each small file of a tokenizer that cannot be read, is empty, or is not JSON."""
    for path in sorted({path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)}):
        if path.is_dir():
            continue
        reason = ""
        try:
            with path.open("rb") as file:
                content = file.read(_MAX_PARSED_BYTES + 1)
            if content.startswith(b"version https://git-lfs"):
                reason = "is only a git-lfs pointer to the file"
            elif not content.strip() and path.suffix != ".jinja":
                reason = "is empty"
            elif path.suffix == ".json" and len(content) <= _MAX_PARSED_BYTES:
                json.loads(content)
        except OSError as error:
            yield unreadable(path, error)
        except (ValueError, RecursionError) as error:
            reason = f"is not JSON ({error})"
        if reason:
            yield f"{path} {reason}; copy it again"


def has_vocabulary(folder: Path) -> bool:
    """Return whether a folder holds a vocabulary, without which its other files make no tokenizer."""
    return any(next(folder.glob(pattern), None) is not None for pattern in VOCABULARIES)


def lacking_vocabulary(folder: Path, names: Mapping[str, str]) -> str:
    """Return, as a clause, the files without which a tokenizer has made its vocabulary up; empty: none lacks.

    Args:
        names: the files that its class reads, by role (``vocab_files_names``); empty for bytes or characters.
    """
    if not names or any(next(folder.glob(pattern), None) is not None for pattern in _INSTEAD):
        return ""
    # BertJapanese reads either; others fail without both.
    if (folder / names.get("spm_file", _WHOLE)).is_file():
        return ""
    needed = [file for role, file in names.items() if role not in _OPTIONAL]
    missing = [file for file in needed if not (folder / file).is_file()]
    if not missing and (needed or has_vocabulary(folder)):
        return ""
    return f"no {_WHOLE}" + (f", nor {' and '.join(missing)}" if missing else "")


def size_problem(name: str | Path, tokens: int, embeddings: int) -> str:
    """Return the sentence that a tokenizer is too small for its model to be the right one; empty: it is not."""
    if not 0 < tokens < embeddings / _MOST_ROWS_PER_TOKEN:
        return ""
    return (
        f"the tokenizer of {name} knows {tokens:,} tokens, and its model has embeddings of {embeddings:,}: its "
        "vocabulary is lost; copy its files again, such as tokenizer.json"
    )


def loses_segments(tokenizer_class: object) -> bool:
    """Return whether a tokenizer of this class gave segment ids in transformers 4, and gives none from 5 on."""
    return str(tokenizer_class or "TokenizersBackend").removesuffix("Fast") in _LOSE_SEGMENTS


def has_learnt_segments(config: Mapping[str, object], release: object, texts: int) -> bool | None:
    """Return whether a model was trained with segment ids that its tokenizer loses, in rows of so many texts.

    Only what was trained with transformers 4 has seen them: the release that wrote the (base's) config decides,
    and every release from 4.2 on writes its number.  None: it reads none.
    """
    kind, segments = config.get("model_type"), config.get("type_vocab_size")
    is_read = texts == 2 and (kind == "funnel" or (isinstance(segments, int) and segments > 1))
    # XLNet's tokenizer marks the token that its head reads, in a single text, too.
    if not is_read and kind != "xlnet":
        return None
    return release is None or str(release).startswith(("2.", "3.", "4."))


def tokenizer_limit(folder: Path) -> float | None:
    """Return a tokenizer's limit of tokens, an astronomic number for no limit; None: not stored."""
    limit = read_json(folder / "tokenizer_config.json").get("model_max_length")
    return limit if isinstance(limit, int | float) and not isinstance(limit, bool) else None
