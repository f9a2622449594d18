"""Read the header of a head's file, and order or refuse its layers.

The tensors tell the kind of a layer, by their names in torch's state dicts: a linear layer has a ``weight``
[out, in] and perhaps a ``bias`` [out], a layer norm a ``weight`` and a ``bias`` of one dimension.  Activations are
not in the file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
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
_KEY = "head_layers"
_MODEL_TENSOR = re.compile(r"(^|\.)(layers?|h|blocks?)\.\d+\.|embed|(^|\.)wte\.")


@dataclass(frozen=True)
class Layer:
    """Describe a layer of a head; ``inputs`` and ``outputs`` are the sizes of its vectors."""

    name: str
    kind: str
    inputs: int
    outputs: int


@dataclass(frozen=True)
class Head:
    """Describe a head.

    ``steps`` are in the order of computation: "linear" or "layer_norm" with the layer's name, or an activation's
    name twice.
    """

    tensors: tuple[Tensor, ...]
    steps: tuple[tuple[str, str], ...]


def read_head(path: Path, steps: Sequence[str] | None, width: int | None, backbone: str, labels: int) -> Head:
    """Read the header of a head's file.

    Args:
        steps: the names of its layers and of activations, in order; None: a single linear layer, perhaps with a
            layer norm before it.
        width: of the backbone's hidden states; None: not known.
        backbone: its name, for sentences.
        labels: the number of outputs that the head must have.

    Raises:
        CheckpointError: the file cannot be read, or is no such head; every problem is listed.
    """
    if path.suffix in _PICKLES and path.is_file():
        raise CheckpointError(
            f"head: {path} is a pickle; load it where you trust it, and save the head's tensors with "
            "safetensors.torch.save_file"
        )
    if not os.path.lexists(path):
        raise CheckpointError(f"head: {path}: no such file{similar_file(path)}")
    if path.is_dir():
        raise CheckpointError(f"head: {path} is a folder; name the file in it")
    try:
        tensors = read_file(path)
    except CheckpointError as error:
        raise CheckpointError([f"head: {problem}" for problem in error.problems]) from None
    layers, problems = _layers(path, tensors)
    if problems:
        raise CheckpointError(problems)
    names = _only_order(path, layers) if steps is None else [*steps]
    by_name = {layer.name: layer for layer in layers}
    problems = [
        f"{_KEY}: {name!r} is neither a layer of {path} ({_names(layers)}) nor an activation "
        f"({', '.join(ACTIVATIONS)})"
        for name in names
        if name not in by_name and name not in ACTIVATIONS
    ]
    unused = [layer for layer in layers if layer.name not in names]
    if unused:
        problems.append(f"{_KEY}: {path} has layers that are not in this list: {_names(unused)}")
    if not any(layer.kind == LINEAR for layer in layers):
        problems.append(f"head: {path} has no linear layer")
    if not problems:
        ordered = [by_name[name] for name in names if name in by_name]
        problems += _size_problems(path, ordered, width, backbone, labels)
    if problems:
        raise CheckpointError(problems)
    return Head(tensors, tuple((by_name[name].kind if name in by_name else name, name) for name in names))


def _layers(path: Path, tensors: Sequence[Tensor]) -> tuple[list[Layer], list[str]]:
    """Return the file's layers, sorted by name with numbers as numbers, and problems."""
    if any(_MODEL_TENSOR.search(tensor.name) for tensor in tensors):
        return [], [
            f"head: {path} holds a whole model ({tensors[0].name} and {len(tensors) - 1} more); keep the head's "
            "tensors in a file of their own, and the backbone's in model_name_or_path (docs/members.md)"
        ]
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    problems: list[str] = []
    for tensor in tensors:
        name, _, part = tensor.name.rpartition(".")
        if part not in ("weight", "bias") or not tensor.is_float:
            problems.append(
                f"head: {path} has a tensor that neither a linear layer nor a layer norm has: {tensor.name}, "
                f"{tensor.dtype} {list(tensor.shape)}; task_type: python runs any head"
            )
        shapes.setdefault(name, {})[part] = tensor.shape
    if problems:
        return [], problems
    layers = []
    for name, parts in shapes.items():
        weight, bias = parts.get("weight", ()), parts.get("bias")
        if len(weight) == 2 and bias in (None, weight[:1]):
            layers.append(Layer(name, LINEAR, weight[1], weight[0]))
        elif len(weight) == 1 and bias == weight:
            layers.append(Layer(name, LAYER_NORM, weight[0], weight[0]))
        else:
            shown = " and ".join(f"a {part} {list(shape)}" for part, shape in parts.items())
            problems.append(
                f"head: {path}: {name} has {shown}, and is neither a linear layer nor a layer norm; task_type: "
                "python runs any head"
            )

    def sort_key(layer: Layer) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdecimal() else (-1, part) for part in layer.name.split(".")]

    return sorted(layers, key=sort_key), problems


def _only_order(path: Path, layers: Sequence[Layer]) -> list[str]:
    """Return the layers' names in their only possible order.

    Raises:
        CheckpointError: several orders are possible.
    """
    linear = [layer for layer in layers if layer.kind == LINEAR]
    norms = [layer for layer in layers if layer.kind == LAYER_NORM]
    is_first = len(linear) == len(norms) == 1 and linear[0].inputs == norms[0].inputs != linear[0].outputs
    if len(linear) > 1 or (norms and linear and not is_first):
        example = [layers[0].name]
        for layer in layers[1:]:
            example += ["ACTIVATION", layer.name] if layer.kind == LINEAR else [layer.name]
        raise CheckpointError(
            f"{_KEY}: {path} has {plural(len(layers), 'layer')} ({_names(layers)}), and does not say in which "
            f"order they come and what stands between; write it down, for example {_KEY}: [{', '.join(example)}] "
            "with relu, gelu, tanh, silu or whatever it was"
        )
    return [layer.name for layer in (*norms, *linear)]


def _size_problems(
    path: Path, layers: Sequence[Layer], width: int | None, backbone: str, labels: int
) -> Iterator[str]:
    """Yield each layer whose inputs are not as many as the outputs before it."""
    size, source = width, f"{backbone} has hidden states of"
    for layer in layers:
        name = layer.name or layer.kind
        if size is not None and layer.inputs != size:
            yield (
                f"head: {path}: its layer {name} is made for {layer.inputs:,} numbers, and {source} {size:,}"
            )
        size, source = layer.outputs, f"{name} before it gives"
    if size != labels:
        yield f"head: {path} has {plural(size or 0, 'output')}, and the config has {plural(labels, 'label')}"


def _names(layers: Sequence[Layer]) -> str:
    def describe(layer: Layer) -> str:
        size = f"layer norm of {layer.inputs}"
        if layer.kind == LINEAR:
            size = f"{layer.inputs} -> {layer.outputs}"
        return f"{layer.name or 'without a name'}: {size}"

    return listed([describe(layer) for layer in layers], 6, str)
