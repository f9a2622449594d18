"""Whether a checkpoint's ``config.json`` and its weights are of one model, as far as names and shapes tell.

Only what is certain is said: of families whose tensors have been looked at, of numbers that stand in the file, of
tensors that are stored as floating-point numbers.  The worker compares the rest once it has built the model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from itertools import product
from typing import Any, Final

from ensemble.common.packages import installed_versions
from ensemble.members.huggingface.checkpoint.adapter_files import head_rows
from ensemble.members.huggingface.checkpoint.architecture import (
    LAYER_KEYS,
    LOOKED_AT,
    read_architecture,
    text_settings,
)
from ensemble.members.huggingface.checkpoint.transformers_source import sources, table
from ensemble.members.huggingface.checkpoint.weight_files import Tensor

_LAYER: Final = re.compile(r"(.*?\b(?:layers?|h))\.(\d+)\.")
# A dimension is a product of numbers of config.json, each by the names that families give it.
_KEYS: Final = {
    "hidden": ("hidden_size", "n_embd", "dim"),
    "embedding": ("embedding_size", "word_embed_proj_dim", "hidden_size", "n_embd", "dim"),
    "vocabulary": ("vocab_size",),
    "inner": ("intermediate_size", "n_inner", "ffn_dim", "hidden_dim"),
    "positions": ("max_position_embeddings", "n_positions"),
    "types": ("type_vocab_size",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
}
# Ends of names of 2-dimensional tensors, and what their rows and columns are; None: anything.
_SHAPES: Final[tuple[tuple[str, str | None, str | None], ...]] = (
    (r"(embed_tokens|word_embeddings|wte)\.weight", "vocabulary", "embedding"),
    (r"embeddings\.position_embeddings\.weight|\.?wpe\.weight", "positions", None),
    (r"embeddings\.token_type_embeddings\.weight", "types", None),
    (r"mlp\.(gate|up)_proj\.weight", "inner", "hidden"),
    (r"mlp\.down_proj\.weight", "hidden", "inner"),
    (r"\.intermediate\.dense\.weight", "inner", "hidden"),
    (r"layer\.\d+\.output\.dense\.weight", "hidden", "inner"),
    (r"ffn\.lin1\.weight|\.fc1\.weight", "inner", "hidden"),
    (r"h\.\d+\.mlp\.c_fc\.weight", "hidden", "inner"),
    (r"attention\.self\.(query|key|value)(_proj)?\.weight", "hidden", "hidden"),
    (r"self_attn\.q_proj\.weight", "heads*head_dim", "hidden"),
    (r"self_attn\.[kv]_proj\.weight", "kv_heads*head_dim", "hidden"),
    (r"self_attn\.o_proj\.weight", "hidden", "heads*head_dim"),
)
# Kinds of rotary positions that stand in no table, or under an older name.
_ROPE_EVERYWHERE: Final = ("default", "mrope", "su")


def config_problems(
    name: str, config: Mapping[str, Any], tensors: Sequence[Tensor], labels: int | None
) -> Iterator[str]:
    """What a ``config.json`` asks for that this transformers does not know, or that the weights contradict.

    Args:
        name: the checkpoint's.
        tensors: of its safetensors files.
        labels: that the config.json has; None where an adapter may bring another head.
    """
    texts = [text for text in (config, config.get("text_config")) if isinstance(text, Mapping)]
    for text, key in product(texts, ("rope_parameters", "rope_scaling")):
        stored = text.get(key)
        for part in (stored, *stored.values()) if isinstance(stored, Mapping) else ():
            kind = part.get("rope_type", part.get("type")) if isinstance(part, Mapping) else None
            if not isinstance(kind, str) or kind in _ROPE_EVERYWHERE:
                continue
            if (known := table("ROPE_INIT_FUNCTIONS", "modeling_rope_utils.py")) and kind not in known:
                yield (
                    f"{name}: {key} in its config.json asks for the rope_type {kind!r}, which transformers "
                    f"{metadata.version('transformers')} does not know; install a newer release"
                )
                break
    architecture = read_architecture(config)
    if architecture is None or architecture.model_type not in LOOKED_AT:
        return
    # Beside a text_config stands a tower for images, with numbers of its own.
    if isinstance(config.get("text_config"), Mapping):
        tensors = [tensor for tensor in tensors if "language_model" in tensor.name]
    for contradiction in _contradictions(text_settings(config), tensors, labels):
        yield f"{name}: its config.json does not fit its weights: {contradiction}; they are of two models"


def _contradictions(text: Mapping[str, Any], tensors: Sequence[Tensor], labels: int | None) -> Iterator[str]:
    key = next((key for key in LAYER_KEYS if isinstance(text.get(key), int)), None)
    stacks: dict[str, int] = {}
    for tensor in tensors:
        if found := _LAYER.match(tensor.name):
            stacks[found[1]] = max(stacks.get(found[1], 0), int(found[2]) + 1)
    if key is not None and len(stacks) == 1:  # what another stack is, nobody can tell here
        ((stack, layers),) = stacks.items()
        if layers != text[key]:
            last = f"{stack}.{layers - 1}"
            yield f"{key} is {text[key]}, and the file holds {layers} layers (up to {last})"
    rows = head_rows({tensor.name: tensor.shape for tensor in tensors if tensor.is_float})
    if None not in (labels, rows) and rows != labels:
        head = f"the classification head has {rows} rows in the file"
        yield f"it has {labels} labels (id2label, num_labels), and {head}"
    seen: set[str] = set()
    for tensor in tensors:
        if not tensor.is_float or len(tensor.shape) != 2:
            continue
        fitting = (axes for pattern, *axes in _SHAPES if re.search(rf"(^|\.|\b)({pattern})$", tensor.name))
        for what, stored, meant in zip(("rows", "columns"), tensor.shape, next(fitting, ()), strict=False):
            wanted, keys = _size(meant, text)
            if wanted is not None and wanted != stored and keys not in seen:
                seen.add(keys)
                yield f"{keys}, and {tensor.name} has {stored:,} {what} in the file"


def _size(meant: str | None, text: Mapping[str, Any]) -> tuple[int | None, str]:
    """What a dimension should be by the numbers that stand in the file, and how to say it; None: not known."""
    found: list[tuple[str, int]] = []
    for part in meant.split("*") if meant else ():
        key = next((key for key in _KEYS[part] if text.get(key) is not None), "")
        if type(text.get(key)) is not int:
            return None, ""
        found.append((key, text[key]))
    total = math.prod(size for _, size in found) if found else None
    return total, " and ".join(f"{key} is {size:,}" for key, size in found)


def release_warning(name: str, config: Mapping[str, Any]) -> Iterator[str]:
    """What to say of a checkpoint that a newer transformers has written than the one that is installed."""
    written = config.get("transformers_version")
    installed = installed_versions(("transformers",)).get("transformers")
    if not isinstance(written, str) or installed is None or _release(written) <= _release(installed):
        return
    # Keys that stand nowhere in the source of the family and of what all configs share.
    family = str(config.get("model_type", "")).replace("-", "_")
    shared = sources("configuration_utils.py", "modeling_rope_utils.py")
    own = sources(f"models/{family}/*.py")  # or the family's code is elsewhere, or not there
    words = set(re.findall(r"\w+", " ".join((*shared.values(), *own.values())))) if own else set()
    unknown = sorted(key for key in config if words and not key.startswith("_") and key not in words)
    hint = f", which knows nothing of its {', '.join(unknown)}" if unknown else ""
    yield (
        f"{name} was saved by transformers {written}, and {installed} is installed{hint}; what is unknown there is "
        f"left out silently, and probabilities can differ: install transformers {written}"
    )


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("dev")[0])[:3])
