"""What can be known of a checkpoint without loading it: its ``config.json`` and how its labels line up.

The parent reads this before any worker starts, so that a typo costs seconds and not a night.  Weights are the
worker's business.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.common.errors import CheckpointError
from ensemble.common.text import gib, listed, nearest, plural
from ensemble.members.base import Inspection
from ensemble.members.huggingface.checkpoint.adapter_files import (
    Adapter,
    base_problems,
    inspect_adapter,
    is_head,
    other_base,
)
from ensemble.members.huggingface.checkpoint.config_check import config_problems, release_warning
from ensemble.members.huggingface.checkpoint.hub import find_file, how_to_install, read_config
from ensemble.members.huggingface.checkpoint.remote_code import code_problems
from ensemble.members.huggingface.checkpoint.tokenizer_files import small_file_problems, vocabulary_problems
from ensemble.members.huggingface.checkpoint.weight_files import (
    Tensor,
    read_tensors,
    weight_files,
    weight_problems,
)
from ensemble.members.huggingface.settings import HuggingFaceSettings

if TYPE_CHECKING:
    from ensemble.common.protocol import Activation


@dataclass(frozen=True)
class Checkpoint(Inspection):
    """A member's checkpoint as its ``config.json`` describes it.

    ``folder`` is where its files lie; ``quantization`` is what its weights were quantized with when saved.
    """

    model_type: str
    folder: Path
    quantization: Mapping[str, Any] | None = None


def inspect_checkpoint(
    model: HuggingFaceSettings,
    labels: Sequence[str],
    label_map: Mapping[str, str],
    problem_type: str | None,
) -> Checkpoint:
    """Read a checkpoint's ``config.json`` and match its labels to the config's.

    Args:
        labels: the config's labels, in the order of the output columns.
        label_map: checkpoint's label -> config's label.
        problem_type: overrides the checkpoint's own.

    Raises:
        CheckpointError: no ``config.json``, files that are missing or broken or would run code, an adapter for
            another base, or labels that do not match; every problem is listed.
    """
    name_or_path, gguf_file = model.model_name_or_path, model.gguf_file
    is_local, path = Path(name_or_path).is_dir(), Path(name_or_path) / "config.json"
    if gguf_file is None:
        path = find_file(name_or_path, "config.json", model.revision)
    # transformers makes up for one that is missing beside a GGUF file.
    is_there = gguf_file is None or path.is_file()
    config = read_config(path, f"{name_or_path}: its config.json") if is_there else {}
    folder, names, where = path.parent, label_names(config, name_or_path), name_or_path
    problems = [*code_problems(model, folder, config)]
    if is_local and gguf_file is not None:
        problems += _gguf_problems(folder, gguf_file)
    elif is_local:
        problems += weight_problems(folder, config, model.allow_pickle)
        problems += small_file_problems(folder)
        if not problems:
            problems += vocabulary_problems(folder, config, model.tokenizer_kwargs, model.trust_remote_code)
    adapter: Adapter | None = None
    if model.adapter_name_or_path is not None:
        try:
            adapter = inspect_adapter(model.adapter_name_or_path, model.allow_pickle)
        except CheckpointError as error:
            problems += error.problems
    own_head = adapter is None or adapter.brings_head is False
    tensors: Sequence[Tensor] = ()
    # In the hub's cache the weights may be there in part.
    if not problems and gguf_file is None and is_local:
        tensors = read_tensors(folder) or ()
        problems += config_problems(name_or_path, config, tensors, len(names) if own_head else None)
        problems += base_problems(adapter, name_or_path, tensors) if adapter is not None else ()
    if problems:
        raise CheckpointError(problems)
    stored = config.get("architectures")
    architecture = str(stored[0]) if isinstance(stored, list) and stored and stored[0] else ""
    warnings = [*release_warning(name_or_path, config)]
    if adapter is not None and (trained_on := other_base(adapter, name_or_path)):
        warnings.append(
            f"adapter {adapter.name} says that it was trained on {trained_on}, and runs on {name_or_path} here; if "
            "that is another model of the same shape, its probabilities mean nothing"
        )
    if own_head and gguf_file is not None:
        raise CheckpointError(
            f"{gguf_file}: a GGUF file holds no classification head; name an adapter that brings one "
            "(adapter_name_or_path)"
        )
    if own_head and ("ForCausalLM" in architecture or "ForMaskedLM" in architecture):
        if tensors and not any(is_head(tensor.name) for tensor in tensors):
            neither = (
                f"nor has its adapter {adapter.name}" if adapter is not None else "and it has no adapter"
            )
            raise CheckpointError(
                f"{name_or_path} ({architecture}) has no classification head, {neither}; name a checkpoint that "
                "was trained for sequence classification, or its adapter (adapter_name_or_path)"
            )
        warnings.append(
            f"{name_or_path} was saved as {architecture}, which has no classification head; "
            "it will be refused unless its weights hold one"
        )
    if adapter is not None and not own_head:
        # It stores no names, but its head decides how many there are; the base's stand where it has as many.
        # Of an adapter that is still on the hub, the head cannot be seen: the worker will compare.
        rows = len(labels) if adapter.head_rows is None else adapter.head_rows
        if rows != len(names):
            names, where = [f"LABEL_{index}" for index in range(rows)], adapter.name
    quantization = config.get("quantization_config")
    files = weight_files(folder) if gguf_file is None else [folder / gguf_file]
    weight_bytes = sum(file.stat().st_size for file in files if file.is_file()) or None
    kind = problem_type or config.get("problem_type")
    activation: Activation = "softmax"
    if kind == "multi_label_classification":
        activation = "sigmoid"
    elif kind == "regression" or len(names) == 1:
        activation = "none"
    model_type = str(config.get("model_type", ""))
    shown = architecture or ("GGUF" if gguf_file is not None else "")
    return Checkpoint(
        summary=(shown or model_type) + ("" if weight_bytes is None else f", {gib(weight_bytes)}"),
        model_type=model_type,
        activation=activation,
        label_order=match_labels(names, labels, label_map, where),
        folder=folder,
        warnings=tuple(warnings),
        quantization=quantization if isinstance(quantization, dict) and gguf_file is None else None,
    )


def match_labels(
    names: Sequence[str], labels: Sequence[str], label_map: Mapping[str, str], where: str
) -> tuple[int, ...]:
    """For each of the config's labels, the model's output column that holds it.

    Raises:
        CheckpointError: the two sets differ; says which labels are missing, unknown or repeated.
    """
    if len(names) == 1 and len(labels) == 1:
        return (0,)  # a single column can only be one thing, whatever its name
    problems = [
        f"label_map: {key!r} is not a label of {where}{_did_you_mean(key, names)}"
        for key in label_map
        if key not in names
    ]
    mapped = [label_map.get(name, name) for name in names]
    if len(names) != len(labels):
        has = f"{where} has {plural(len(names), 'label')} ({_few(names)})"
        problems.append(f"{has}, the config has {len(labels)} ({_few(labels)})")
    elif not label_map and set(mapped).isdisjoint(labels):
        example = f"for example label_map: {{{names[0]}: {labels[0]}}}"
        problems.append(
            f"the labels of {where} are {_few(names)}, not {_few(labels)}; map them with label_map, {example}"
        )
    else:
        problems += [
            f"label {name!r} of {where} is not in labels{_did_you_mean(name, labels)}; add it to label_map"
            for name in mapped
            if name not in labels
        ]
        twice = (name for name in dict.fromkeys(mapped) if mapped.count(name) > 1)
        problems += [f"two labels of {where} would both become {name!r}; fix label_map" for name in twice]
    if problems:
        raise CheckpointError(problems)
    return tuple(mapped.index(label) for label in labels)


def _gguf_problems(folder: Path, gguf_file: str) -> Iterator[str]:
    path = folder / gguf_file
    if not path.is_file():
        near = nearest(gguf_file, (entry.name for entry in folder.glob("*.gguf")))
        yield f"gguf_file: {folder} has no file {gguf_file}" + (f"; did you mean {near}?" if near else "")
    else:
        with path.open("rb") as opened:
            if opened.read(4) != b"GGUF":
                yield f"gguf_file: {path} is not a GGUF file; copy it again"
    if importlib.util.find_spec("gguf") is None:
        yield f"gguf_file needs the package gguf, which is not installed: {how_to_install('gguf')}"


def label_names(config: Mapping[str, Any], where: str) -> list[str]:
    """The labels in a ``config.json``, in the order of the model's output columns.

    Raises:
        CheckpointError: they cannot be told.
    """
    # transformers' own defaults: two labels where neither id2label nor num_labels is stored.
    stored, count = config.get("id2label"), config.get("num_labels") or 2
    try:
        if isinstance(stored, dict) and stored:
            return [str(stored[key]) for key in sorted(stored, key=int)]
        return [f"LABEL_{index}" for index in range(count)]
    except (ValueError, TypeError):
        what, wrong = (
            ("the keys of id2label", "are not numbers") if stored else ("num_labels", "is not a number")
        )
        raise CheckpointError(f"{where}: {what} in its config.json {wrong}") from None


def _few(names: Sequence[str]) -> str:
    return listed(names, 4, str)


def _did_you_mean(name: str, known: Sequence[str]) -> str:
    near = nearest(name, known)
    return f"; did you mean {near!r}?" if near is not None else f" ({_few(known)})"
