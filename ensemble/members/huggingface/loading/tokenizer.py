"""Load a member's tokenizer from the checkpoint's files, or from the vocabulary of its GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from ensemble.members.huggingface.spec import ModelSpec

# A folder with one of these has a tokenizer beside its GGUF file.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")


def load_tokenizer(spec: ModelSpec) -> Any:
    """Load the tokenizer, with the settings of the config."""
    options = dict(spec.tokenizer_kwargs)
    # Files beside the GGUF file go first: a tokenizer converted from its vocabulary may lack some of their rules.
    folder = Path(spec.model_name_or_path)
    if spec.gguf_file is not None and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        options.setdefault("gguf_file", spec.gguf_file)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            spec.model_name_or_path,
            revision=spec.revision or "main",
            trust_remote_code=spec.trust_remote_code,
            **options,
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
            f"the tokenizer of {spec.model_name_or_path} cannot be made of its files ({type(error).__name__}: "
            f"{reason}); copy tokenizer.json and tokenizer_config.json again, see that its tokenizer_class is the "
            "one that the vocabulary is for, and look at tokenizer_kwargs"
        ) from error
    if "gguf_file" in options:
        # transformers builds each byte-level vocabulary as GPT-2's, and that class adds its own <|endoftext|>
        # behind the file's vocabulary (integrations/gguf/gguf_tokenizer_mapping.py): the model has no row for it.
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        kept = [token for token in state["added_tokens"] if token["id"] < len(state["model"]["vocab"])]
        if len(kept) < len(state["added_tokens"]):
            tokenizer._tokenizer = Tokenizer.from_str(json.dumps({**state, "added_tokens": kept}))
    if spec.truncation_side is not None:
        tokenizer.truncation_side = spec.truncation_side
    return tokenizer
