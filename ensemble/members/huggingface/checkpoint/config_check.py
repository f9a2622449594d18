"""Check whether a checkpoint's ``config.json`` and its weights belong to the same model, by names and shapes.

Only certain contradictions are reported: for known families, by numbers in the file, and for floating-point
tensors.  The worker compares the rest once it has built the model.
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
    """Yield what the installed transformers does not know in a ``config.json``, and what contradicts the weights.

    Args:
        name: the checkpoint's.
        tensors: of its safetensors files.
        labels: of the config.json; None where an adapter may bring another head.
    """
    texts = [text for text in (config, config.get("text_config")) if isinstance(text, Mapping)]
    for text, key in product(texts, ("rope_parameters", "rope_scaling")):
        stored = text.get(key)
        if not isinstance(stored, Mapping):
            continue
        for part in (stored, *stored.values()):
            kind = part.get("rope_type", part.get("type")) if isinstance(part, Mapping) else None
            if not isinstance(kind, str) or kind in _ROPE_EVERYWHERE:
                continue
            rope_types = table("ROPE_INIT_FUNCTIONS", "modeling_rope_utils.py")
            if rope_types and kind not in rope_types:
                yield (
                    f"{name}: {key} in its config.json asks for the rope_type {kind!r}, which transformers "
                    f"{metadata.version('transformers')} does not know; install a newer release"
                )
                break
    architecture = read_architecture(config)
    if architecture is None or architecture.model_type not in LOOKED_AT:
        return
    # A config.json with a text_config also describes a part for images, with numbers of its own.
    if isinstance(config.get("text_config"), Mapping):
        tensors = [tensor for tensor in tensors if "language_model" in tensor.name]
    for contradiction in _contradictions(text_settings(config), tensors, labels):
        yield f"{name}: its config.json does not fit its weights: {contradiction}; they are of two models"


def _contradictions(text: Mapping[str, Any], tensors: Sequence[Tensor], labels: int | None) -> Iterator[str]:
    key = next((key for key in LAYER_KEYS if isinstance(text.get(key), int)), None)
    stacks: dict[str, int] = {}
    for tensor in tensors:
        layer = _LAYER.match(tensor.name)
        if layer is not None:
            stacks[layer[1]] = max(stacks.get(layer[1], 0), int(layer[2]) + 1)
    if key is not None and len(stacks) == 1:  # with several stacks it is unclear which of them counts
        ((stack, layers),) = stacks.items()
        if layers != text[key]:
            last = f"{stack}.{layers - 1}"
            yield f"{key} is {text[key]}, and the file holds {layers} layers (up to {last})"
    rows = head_rows({tensor.name: tensor.shape for tensor in tensors if tensor.is_float})
    if None not in (labels, rows) and rows != labels:
        head = f"the classification head has {rows} rows in the file"
        yield f"it has {labels} labels (id2label, num_labels), and {head}"
    reported: set[str] = set()
    for tensor in tensors:
        if not tensor.is_float or len(tensor.shape) != 2:
            continue
        fitting = (axes for pattern, *axes in _SHAPES if re.search(rf"(^|\.|\b)({pattern})$", tensor.name))
        axes = next(fitting, ())
        for axis, stored, dimension in zip(("rows", "columns"), tensor.shape, axes, strict=False):
            expected, keys = _expected_size(dimension, text)
            if expected is not None and expected != stored and keys not in reported:
                reported.add(keys)
                yield f"{keys}, and {tensor.name} has {stored:,} {axis} in the file"


def _expected_size(dimension: str | None, text: Mapping[str, Any]) -> tuple[int | None, str]:
    """Return a dimension's size by the numbers of the file, None if not known, and the words for these numbers."""
    if dimension is None:
        return None, ""
    sizes: dict[str, int] = {}
    for part in dimension.split("*"):
        key = next((key for key in _KEYS[part] if text.get(key) is not None), "")
        if type(text.get(key)) is not int:
            return None, ""
        sizes[key] = text[key]
    return math.prod(sizes.values()), " and ".join(f"{key} is {size:,}" for key, size in sizes.items())


def release_warning(name: str, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a warning if a newer transformers than the installed one has saved the checkpoint."""
    written = config.get("transformers_version")
    installed = installed_versions(("transformers",)).get("transformers")
    if not isinstance(written, str) or installed is None or _release(written) <= _release(installed):
        return
    # Unknown keys occur neither in the family's source nor in that of all configs.
    family = str(config.get("model_type", "")).replace("-", "_")
    shared = sources("configuration_utils.py", "modeling_rope_utils.py")
    of_family = sources(f"models/{family}/*.py")  # empty where its code is elsewhere
    words: set[str] = set()
    if of_family:
        words = set(re.findall(r"\w+", " ".join((*shared.values(), *of_family.values()))))
    unknown = sorted(key for key in config if words and not key.startswith("_") and key not in words)
    hint = f", which knows nothing of its {', '.join(unknown)}" if unknown else ""
    yield (
        f"{name} was saved by transformers {written}, and {installed} is installed{hint}; what is unknown there is "
        f"left out silently, and probabilities can differ: install transformers {written}"
    )


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("dev")[0])[:3])
