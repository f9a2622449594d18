"""Load a member's tokenizer from its adapters' files or the checkpoint's."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from ensemble.common.digests import FileDigests
from ensemble.common.text import error_text
from ensemble.members.huggingface.checkpoint.digests import tokenizer_digest
from ensemble.members.huggingface.checkpoint.tokenizer_files import has_vocabulary, lacking_vocabulary
from ensemble.members.huggingface.loading.adapter import adapter_folder
from ensemble.members.huggingface.spec import ModelSpec, default_max_length, tokenizer_names

_MAX_REASON = 500
# A label's text is tokenized behind one of these: alone it would get the space that some tokenizers put before the
# first word of a text.  The first anchor that does not merge with the text decides.
_ANCHORS = (":", "\n", "")


def load_tokenizer(spec: ModelSpec) -> Any:
    """Load the tokenizer that lies beside the adapters, or else the checkpoint's, with the settings of the config.

    Raises:
        ValueError: it cannot be made of its files, or those of several adapters make other tokens of a text.
    """
    folders: dict[str, Path | None] = {}
    for name in tokenizer_names(spec.job_adapters):
        folder = adapter_folder(name, spec.allow_pickle) if name else None
        has_own = folder is not None and has_vocabulary(folder)
        folders[name or spec.model_name_or_path] = folder if has_own else None
    chats = bool(getattr(spec, "apply_chat_template", False))
    return common_tokenizer(partial(_load, spec), folders, spec.max_length is not None, chats)


def common_tokenizer(
    load: Callable[[Path | None], Any], folders: Mapping[str, Path | None], ignores_limit: bool, chats: bool
) -> Any:
    """Return the first of several tokenizers, which must all make the same tokens of a text.

    Args:
        load: makes the tokenizer of an adapter's folder; of None, the checkpoint's.
        folders: of each adapter's own tokenizer, by the adapter's name; None: it has the checkpoint's.
        ignores_limit, chats: as for ``what_it_makes``.

    Raises:
        ValueError: two of them make other tokens.
    """
    files = FileDigests(True)
    contents = {name: folder and tokenizer_digest(folder, {}, files) for name, folder in folders.items()}
    tokenizers: dict[str | Path | None, Any] = {}
    for name, content in contents.items():
        if content not in tokenizers:
            tokenizers[content] = load(folders[name])
    first = next(iter(folders))
    if len(tokenizers) > 1:
        makes = {key: what_it_makes(tokenizer, ignores_limit, chats) for key, tokenizer in tokenizers.items()}
        for name, content in contents.items():
            if makes[content] != makes[contents[first]]:
                raise ValueError(
                    f"the tokenizer of {name} makes other tokens of a text than that of {first}, and all views of "
                    "a member share one; make it a member of its own, or copy into an adapter's folder the "
                    "tokenizer that it was trained with (without one it has its base's)"
                )
    return tokenizers[contents[first]]


def what_it_makes(tokenizer: Any, ignores_limit: bool, chats: bool) -> str:
    """Return a digest of what a tokenizer makes of texts and chats, wherever its files are.

    Args:
        ignores_limit: whether the config says how many tokens a row may have.
        chats: whether its chat template is used.
    """
    if tokenizer.is_fast:
        rules = json.loads(tokenizer.backend_tokenizer.to_str())
        del rules["truncation"], rules["padding"]  # which calls leave there
    else:
        settings = {key: value for key, value in tokenizer.init_kwargs.items() if "name_or_path" not in key}
        settings.pop("chat_template", None)
        rules = [type(tokenizer).__name__, settings, tokenizer.get_vocab()]
    limit = None if ignores_limit else default_max_length(tokenizer.model_max_length)
    has_types = "token_type_ids" in tokenizer.model_input_names
    template = tokenizer.chat_template if chats else None
    makes = [rules, template, tokenizer.truncation_side, has_types, limit]
    return sha256(json.dumps(makes, sort_keys=True, default=str).encode()).hexdigest()


def _load(spec: ModelSpec, folder: Path | None) -> Any:
    """Load the tokenizer in an adapter's folder; None: the checkpoint's."""
    name = spec.model_name_or_path if folder is None else str(folder)
    # Adapters on the hub are not pinned, so that their code might change.
    is_pinned = folder is None or folder in map(Path, tokenizer_names(spec.job_adapters))
    runs_code = spec.trust_remote_code and is_pinned
    settings = spec.tokenizer_kwargs
    tokenizer = make_tokenizer(name, settings, revision=spec.revision or "main", trust_remote_code=runs_code)
    tokenizer.name_or_path = name  # from where its checks take it
    if spec.truncation_side is not None:
        tokenizer.truncation_side = spec.truncation_side
    return tokenizer


def make_tokenizer(name: str, settings: Mapping[str, Any], trust_remote_code: bool, **options: Any) -> Any:
    """Make a tokenizer of the files in a folder, or of a name on the hub.

    Args:
        settings: the member's ``tokenizer_kwargs``.

    Raises:
        ValueError: it cannot be made of the files, or would know no text.
    """
    folder = Path(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name, **{**settings, **options, "trust_remote_code": trust_remote_code}
        )
    except Exception as error:  # a class that is not for this vocabulary fails in any way
        # Releases before 5.12 ask for a missing protobuf after any other error.
        if isinstance(error, ImportError) and isinstance(error.__context__, Exception):
            error = error.__context__
        is_of_hub = isinstance(error, OSError) and not folder.is_dir()
        if trust_remote_code or isinstance(error, ImportError) or is_of_hub:
            raise  # perhaps by the checkpoint's own code, whose message says more
        reason = f"{type(error).__name__}: {error_text(error, _MAX_REASON) or 'no reason given'}"
        problem = (
            f"{name} has no tokenizer files with the vocabulary (no tokenizer.json; {reason}); copy them too"
        )
        if not folder.is_dir() or has_vocabulary(folder):
            problem = (
                f"the tokenizer of {name} cannot be made of its files ({reason}); copy tokenizer.json and "
                "tokenizer_config.json again, see that its tokenizer_class is the one that the vocabulary is for, "
                "and look at tokenizer_kwargs"
            )
        raise ValueError(problem) from error
    # The settings may name other files.
    is_plain = folder.is_dir() and not settings
    lacking = lacking_vocabulary(folder, tokenizer.vocab_files_names or {}) if is_plain else ""
    if lacking or not _knows_text(tokenizer):
        raise ValueError(
            f"{name} has no tokenizer files with the vocabulary of {type(tokenizer).__name__}"
            f"{lacking and f' ({lacking})'}, and the tokenizer would know special tokens only; copy them too"
        )
    return tokenizer


def _knows_text(tokenizer: Any) -> bool:
    """Return whether a tokenizer knows more than special tokens."""
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    # Without a vocabulary, T5's class makes up the token for a space.
    return not tokenizer.get_vocab().keys() <= special | {*tokenizer.all_special_tokens, "▁"}


def label_ids(encode: Callable[[str], Sequence[int]], text: str) -> tuple[int, ...]:
    """Return the tokens of a label's text behind other text."""
    for anchor in _ANCHORS:
        anchor_ids = tuple(encode(anchor)) if anchor else ()
        ids = tuple(encode(anchor + text))
        if ids[: len(anchor_ids)] == anchor_ids:
            return ids[len(anchor_ids) :]
    raise AssertionError("no text at all joins with nothing")
