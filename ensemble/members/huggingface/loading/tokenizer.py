"""Load a member's tokenizer from its adapters' files or the checkpoint's."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from ensemble.members.huggingface.checkpoint.digests import own_tokenizers
from ensemble.members.huggingface.checkpoint.several_adapters import tokenizer_problems
from ensemble.members.huggingface.loading.adapter import adapter_folder
from ensemble.members.huggingface.spec import ModelSpec, default_max_length


def load_tokenizer(spec: ModelSpec) -> Any:
    """Load the tokenizer that lies beside the adapters, or else the checkpoint's, with the settings of the config.

    Raises:
        ValueError: it cannot be made of its files, or those of several adapters make other tokens of a text.
    """
    names = [name for source in spec.view_adapters for name in (("",) if source is None else source.names)]
    own = own_tokenizers({name: adapter_folder(name, spec.allow_pickle) for name in names if name})
    tokenizers = {folder: _load(spec, folder) for folder in dict.fromkeys(map(own.get, names))}
    if len(tokenizers) > 1:
        ignores_limit = "max_length" in spec.asked
        chats = bool(getattr(spec, "apply_chat_template", False))
        makes = {
            folder: what_it_makes(tokenizer, ignores_limit, chats) for folder, tokenizer in tokenizers.items()
        }
        problems = [
            *tokenizer_problems({name or spec.model_name_or_path: makes[own.get(name)] for name in names})
        ]
        if problems:
            raise ValueError("; ".join(problems))
    return tokenizers[own.get(names[0])]


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
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name,
            revision=spec.revision or "main",
            # Adapters are not pinned, so that their code might change.
            trust_remote_code=spec.trust_remote_code and folder is None,
            **spec.tokenizer_kwargs,
        )
    except OSError:
        raise
    except Exception as error:  # a class that is not for this vocabulary fails in any way
        # Releases before 5.12 ask for a missing protobuf after any other error.
        if isinstance(error, ImportError) and isinstance(error.__context__, Exception):
            error = error.__context__
        if spec.trust_remote_code or isinstance(error, ImportError):
            raise  # perhaps by the checkpoint's own code, whose message says more
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        raise ValueError(
            f"the tokenizer of {name} cannot be made of its files ({type(error).__name__}: "
            f"{reason}); copy tokenizer.json and tokenizer_config.json again, see that its tokenizer_class is the "
            "one that the vocabulary is for, and look at tokenizer_kwargs"
        ) from error
    tokenizer.name_or_path = name  # from where its checks take it
    if spec.truncation_side is not None:
        tokenizer.truncation_side = spec.truncation_side
    return tokenizer
