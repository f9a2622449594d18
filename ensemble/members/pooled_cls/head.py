"""Read the header of a head's file, and order or refuse its layers.

The tensors tell the kind of a layer, by their names in torch's state dicts: a linear layer has a ``weight``
[out, in] and perhaps a ``bias`` [out], a layer norm a ``weight`` and a ``bias`` of one dimension.  Activations are
not in the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ensemble.common.errors import CheckpointError
from ensemble.common.text import listed, plural, similar_file
from ensemble.members.huggingface.checkpoint.weight_files import Tensor, read_file

# Activations that heads use, by their names in transformers' table (ACT2FN).
ACTIVATIONS = tuple(
    "relu gelu gelu_new gelu_pytorch_tanh quick_gelu silu mish leaky_relu tanh sigmoid".split()
)
LINEAR, LAYER_NORM = "linear", "layer_norm"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_MODEL_TENSOR = re.compile(r"(^|\.)(layers?|h|blocks?)\.\d+\.|embed|(^|\.)wte\.")


@dataclass(frozen=True)
class Head:
    """Hold a head: ``steps`` are "linear" or "layer_norm" with a layer's name, or an activation's name twice."""

    tensors: tuple[Tensor, ...]
    steps: tuple[tuple[str, str], ...]


def read_head(path: Path, steps: Sequence[str] | None, width: int | None, backbone: str, labels: int) -> Head:
    """Read the header of a head's file, or raise CheckpointError with what does not fit.

    Args:
        steps: the names of its layers and of activations, in order; None: a single linear layer, perhaps with a
            layer norm before it.
        width: of the hidden states of the ``backbone``; None: not known.
    """
    if not path.is_file():
        problem = (
            " is a folder; name the file in it" if path.is_dir() else f": no such file{similar_file(path)}"
        )
        raise CheckpointError(f"head: {path}{problem}")
    if path.suffix in _PICKLES:
        raise CheckpointError(
            f"head: {path} is a pickle; load it where you trust it, and save the head's tensors with "
            "safetensors.torch.save_file"
        )
    try:
        tensors = read_file(path)
    except CheckpointError as error:
        raise CheckpointError([f"head: {problem}" for problem in error.problems]) from None
    layers = _layers(path, tensors)
    linear = {name: shape for name, shape in layers.items() if len(shape) == 2}
    norms = [name for name in layers if name not in linear]
    names = [*steps] if steps is not None else [*norms, *linear]
    if steps is None and (len(linear) > 1 or len(norms) > 1):
        example = [name if name in norms else f"ACTIVATION, {name}" for name in layers]
        raise CheckpointError(
            f"head_layers: {path} has {plural(len(layers), 'layer')} ({_shown(layers)}), and does not say in which "
            f"order they come and what stands between; write it down, for example head_layers: "
            f"[{', '.join(example).removeprefix('ACTIVATION, ')}] with relu, gelu, tanh, silu or whatever it was"
        )
    problems = [
        f"head_layers: {name!r} is neither a layer of {path} ({_shown(layers)}) nor an activation "
        f"({', '.join(ACTIVATIONS)})"
        for name in names
        if name not in layers and name not in ACTIVATIONS
    ]
    unused = {name: shape for name, shape in layers.items() if name not in names}
    if unused:
        problems.append(f"head_layers: {path} has layers that are not in this list: {_shown(unused)}")
    if not linear:
        problems.append(f"head: {path} has no linear layer")
    if not problems:
        size, source = width, f"{backbone} has hidden states of"
        for name in [name for name in names if name in layers]:
            outputs, inputs = layers[name][0], layers[name][-1]
            if size is not None and inputs != size:
                problems.append(
                    f"head: {path}: its layer {name} is made for {inputs:,} numbers, and {source} {size:,}"
                )
            size, source = outputs, f"{name} before it gives"
        if size != labels:
            outputs_text = plural(size or 0, "output")
            problems.append(f"head: {path} has {outputs_text}, and the config has {plural(labels, 'label')}")
    if problems:
        raise CheckpointError(problems)
    kinds = {name: LINEAR if name in linear else LAYER_NORM for name in layers}
    return Head(tensors, tuple((kinds.get(name, name), name) for name in names))


def _layers(path: Path, tensors: Sequence[Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each layer's weight: [out, in] of a linear layer, [size] of a layer norm."""
    if any(_MODEL_TENSOR.search(tensor.name) for tensor in tensors):
        raise CheckpointError(
            f"head: {path} holds a whole model ({tensors[0].name} and {len(tensors) - 1} more); keep the head's "
            "tensors in a file of their own, and the backbone's in model_name_or_path (docs/how-to/own-head.md)"
        )
    parts_by_layer: dict[str, dict[str, tuple[int, ...]]] = {}
    for tensor in tensors:
        name, _, part = tensor.name.rpartition(".")
        part = part if tensor.is_float else f"{tensor.dtype} {part}"
        parts_by_layer.setdefault(name, {})[part] = tensor.shape
    for name, parts in parts_by_layer.items():
        weight, bias = parts.get("weight", ()), parts.get("bias")
        is_linear = len(weight) == 2 and bias in (None, weight[:1])
        is_norm = len(weight) == 1 and bias == weight
        if not (is_linear or is_norm) or not parts.keys() <= {"weight", "bias"}:
            shapes = " and ".join(f"a {part} {list(shape)}" for part, shape in parts.items())
            raise CheckpointError(
                f"head: {path}: {name} has {shapes}, and is neither a linear layer nor a layer norm; task_type: "
                "python runs any head"
            )
    return {name: parts["weight"] for name, parts in parts_by_layer.items()}


def _shown(layers: Mapping[str, tuple[int, ...]]) -> str:
    sizes = []
    for name, shape in layers.items():
        if len(shape) == 2:
            sizes.append(f"{name or 'without a name'}: {shape[1]} -> {shape[0]}")
        else:
            sizes.append(f"{name}: layer norm of {shape[0]}")
    return listed(sizes, 6, str)
