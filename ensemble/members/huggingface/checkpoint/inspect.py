"""What can be known of a checkpoint without loading it: its ``config.json`` and how its labels line up.

The parent reads this before any worker starts, so that a typo costs seconds and not a night.  Weights are the
worker's business.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ensemble.common.errors import CheckpointError
from ensemble.common.files import unreadable
from ensemble.common.text import gib, plural
from ensemble.members.base import Inspection
from ensemble.members.huggingface.checkpoint.adapter_files import (
    Adapter,
    base_problems,
    inspect_adapter,
    is_head,
    other_base,
)
from ensemble.members.huggingface.checkpoint.config_check import (
    release_warning,
    rope_problems,
    weights_against_config,
)
from ensemble.members.huggingface.checkpoint.hub import find_file, how_to_install
from ensemble.members.huggingface.checkpoint.remote_code import NO_TRUST, Trust, code_problems
from ensemble.members.huggingface.checkpoint.safetensors_headers import Tensor, read_tensors
from ensemble.members.huggingface.checkpoint.tokenizer_files import small_file_problems, vocabulary_problems
from ensemble.members.huggingface.checkpoint.weight_files import pickle_refused, weight_files, weight_problems

if TYPE_CHECKING:
    from ensemble.common.protocol import Activation

# The files of tokenizers.
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "spiece*", "merges.txt", "*.tiktoken")
_GGUF_MAGIC = b"GGUF"


@dataclass(frozen=True)
class Checkpoint(Inspection):
    """A member's checkpoint as its ``config.json`` describes it.

    ``weight_bytes`` is the size of the weight files on disk, None where they are not here yet; ``folder`` is where
    its files lie; ``quantization`` is what the weights were quantized with when they were saved.
    """

    model_type: str
    architecture: str
    weight_bytes: int | None
    folder: Path
    adapter: Adapter | None = None
    quantization: Mapping[str, Any] | None = None


def inspect_checkpoint(
    name_or_path: str,
    revision: str | None,
    labels: Sequence[str],
    label_map: Mapping[str, str],
    problem_type: str | None,
    adapter_name_or_path: str | None = None,
    gguf_file: str | None = None,
    trust: Trust = NO_TRUST,
    tokenizer_kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> Checkpoint:
    """Read a checkpoint's ``config.json`` and match its labels to the config's.

    Args:
        name_or_path: a folder, or a model id on the Hugging Face hub.
        labels: the config's labels, in the order of the output columns.
        label_map: checkpoint's label -> config's label.
        problem_type: overrides the checkpoint's own.
        adapter_name_or_path: an adapter of peft on top of it; where that brings a head, its rows are the labels.
        gguf_file: the file of the folder that holds the weights; then ``config.json`` may be missing.
        trust: what the files may do.
        tokenizer_kwargs: the member's; they can name other files of the tokenizer.

    Raises:
        CheckpointError: no ``config.json``, files that are missing or broken or would run code, an adapter for
            another base, or labels that do not match; every problem is listed.
    """
    if gguf_file is None:
        path = find_file(name_or_path, "config.json", revision)
        config, folder = _read_config(path, name_or_path), path.parent
    else:
        config, folder = _gguf_config(name_or_path), Path(name_or_path)
    base_names = _label_names(config, name_or_path)
    problems = [*code_problems(name_or_path, folder, config, trust)]
    if Path(name_or_path).is_dir():
        problems += _file_problems(folder, config, gguf_file, trust)
        if gguf_file is None and not problems:
            problems += vocabulary_problems(folder, config, tokenizer_kwargs, trust.remote_code)
            problems += rope_problems(name_or_path, config)
    adapter: Adapter | None = None
    if adapter_name_or_path is not None:
        try:
            adapter = inspect_adapter(adapter_name_or_path, trust.allow_pickle)
        except CheckpointError as error:
            problems += error.problems
    own_head = adapter is None or adapter.brings_head is False
    tensors: Sequence[Tensor] = ()
    # In the hub's cache the weights may be there in part.
    if not problems and gguf_file is None and Path(name_or_path).is_dir():
        tensors = read_tensors(folder) or ()
        own_labels = len(base_names) if own_head else None
        problems += weights_against_config(name_or_path, config, tensors, own_labels)
        problems += base_problems(adapter, name_or_path, tensors) if adapter is not None else ()
    if problems:
        raise CheckpointError(problems)
    if own_head:
        _demand_head(config, name_or_path, adapter, gguf_file, tensors)
    names, where = _names_with_adapter(base_names, name_or_path, adapter, len(labels))
    quantization = config.get("quantization_config")
    model_type = str(config.get("model_type", ""))
    architecture = _architecture(config) or ("GGUF" if gguf_file is not None else "")
    weight_bytes = _weight_bytes(folder, gguf_file)
    return Checkpoint(
        summary=(architecture or model_type) + ("" if weight_bytes is None else f", {gib(weight_bytes)}"),
        model_type=model_type,
        architecture=architecture,
        activation=_activation(problem_type or config.get("problem_type"), len(names)),
        label_order=match_labels(names, labels, label_map, where),
        weight_bytes=weight_bytes,
        folder=folder,
        warnings=tuple(_warnings(config, name_or_path, adapter)),
        adapter=adapter,
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
        problems.append(
            f"{where} has {plural(len(names), 'label')} ({_few(names)}), the config has {len(labels)} "
            f"({_few(labels)})"
        )
    elif not label_map and set(mapped).isdisjoint(labels):
        problems.append(
            f"the labels of {where} are {_few(names)}, not {_few(labels)}; map them with label_map, "
            f"for example label_map: {{{names[0]}: {labels[0]}}}"
        )
    else:
        problems += [
            f"label {name!r} of {where} is not in labels{_did_you_mean(name, labels)}; add it to label_map"
            for name in mapped
            if name not in labels
        ]
        problems += [
            f"two labels of {where} would both become {name!r}; fix label_map"
            for name in dict.fromkeys(mapped)
            if mapped.count(name) > 1
        ]
    if problems:
        raise CheckpointError(problems)
    return tuple(mapped.index(label) for label in labels)


def _file_problems(
    folder: Path, config: Mapping[str, Any], gguf_file: str | None, trust: Trust
) -> Iterator[str]:
    if gguf_file is not None:
        yield from _gguf_problems(folder, gguf_file)
        return
    yield from weight_problems(folder, trust.allow_pickle)
    yield from small_file_problems(folder, _TOKENIZER_FILES)
    # transformers takes the file that config.json names, and an adapter that lies beside the model.
    explicit = config.get("transformers_weights")
    pickles = [folder / explicit] if isinstance(explicit, str) and explicit.endswith(".bin") else []
    if (folder / "adapter_config.json").is_file() and not (folder / "adapter_model.safetensors").is_file():
        pickles.append(folder / "adapter_model.bin")
    if not trust.allow_pickle:
        yield from (pickle_refused(path) for path in dict.fromkeys(pickles) if path.is_file())


def _gguf_config(name_or_path: str) -> dict[str, Any]:
    """The ``config.json`` beside a GGUF file; transformers makes up for one that is missing."""
    path = Path(name_or_path) / "config.json"
    return _read_config(path, name_or_path) if path.is_file() else {}


def _gguf_problems(folder: Path, file: str) -> Iterator[str]:
    path = folder / file
    if not path.is_file():
        near = difflib.get_close_matches(file, [entry.name for entry in folder.glob("*.gguf")], n=1)
        yield f"gguf_file: {folder} has no file {file}" + (f"; did you mean {near[0]}?" if near else "")
    else:
        with path.open("rb") as opened:
            if opened.read(len(_GGUF_MAGIC)) != _GGUF_MAGIC:
                yield f"gguf_file: {path} is not a GGUF file; copy it again"
    if importlib.util.find_spec("gguf") is None:
        yield f"gguf_file needs the package gguf, which is not installed: {how_to_install('gguf')}"


def _weight_bytes(folder: Path, gguf_file: str | None) -> int | None:
    files = weight_files(folder) if gguf_file is None else [folder / gguf_file]
    return sum(file.stat().st_size for file in files if file.is_file()) or None


def _architecture(config: Mapping[str, Any]) -> str:
    stored = config.get("architectures")
    return str(stored[0]) if isinstance(stored, list) and stored and stored[0] else ""


def _activation(kind: object, columns: int) -> Activation:
    if kind == "multi_label_classification":
        return "sigmoid"
    return "none" if kind == "regression" or columns == 1 else "softmax"


def _demand_head(
    config: Mapping[str, Any],
    where: str,
    adapter: Adapter | None,
    gguf_file: str | None,
    tensors: Sequence[Tensor],
) -> None:
    """Refuse a language model whose weights are here and hold no head, before its labels are compared."""
    if gguf_file is not None:
        raise CheckpointError(
            f"{gguf_file}: a GGUF file holds no classification head; name an adapter that brings one "
            "(adapter_name_or_path)"
        )
    architecture = _architecture(config)
    if not ("ForCausalLM" in architecture or "ForMaskedLM" in architecture):
        return
    if tensors and not any(is_head(tensor.name) for tensor in tensors):
        neither = f"nor has its adapter {adapter.name}" if adapter is not None else "and it has no adapter"
        raise CheckpointError(
            f"{where} ({architecture}) has no classification head, {neither}; name a checkpoint that was trained "
            "for sequence classification, or its adapter (adapter_name_or_path)"
        )


def _warnings(config: Mapping[str, Any], where: str, adapter: Adapter | None) -> Iterator[str]:
    architecture = _architecture(config)
    if newer := release_warning(where, config):
        yield newer
    if adapter is not None and (trained_on := other_base(adapter, where)):
        yield (
            f"adapter {adapter.name} says that it was trained on {trained_on}, and runs on {where} here; if "
            "that is another model of the same shape, its probabilities mean nothing"
        )
    if ("ForCausalLM" in architecture or "ForMaskedLM" in architecture) and (
        adapter is None or adapter.brings_head is False
    ):
        yield (
            f"{where} was saved as {architecture}, which has no classification head; "
            "it will be refused unless its weights hold one"
        )


def _read_config(path: Path, where: str) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(unreadable(path, error)) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: its config.json is not JSON ({error}); copy it again") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{where}: its config.json is not a JSON object")
    return config


def _label_names(config: Mapping[str, Any], where: str) -> list[str]:
    # transformers' own defaults: two labels where neither id2label nor num_labels is stored.
    stored = config.get("id2label")
    if isinstance(stored, dict) and stored:
        try:
            return [str(stored[key]) for key in sorted(stored, key=int)]
        except ValueError:
            raise CheckpointError(
                f"{where}: the keys of id2label in its config.json are not numbers"
            ) from None
    count = config.get("num_labels") or 2
    if not isinstance(count, int):
        raise CheckpointError(f"{where}: num_labels in its config.json is not a number")
    return [f"LABEL_{index}" for index in range(count)]


def _names_with_adapter(
    names: list[str], base: str, adapter: Adapter | None, wanted: int
) -> tuple[list[str], str]:
    """The names of the model's output columns, and whose they are.

    An adapter stores no names.  Its head decides how many there are; the base's names stand where it has as many.
    """
    if adapter is None or adapter.brings_head is False:
        return names, base
    # Of an adapter that is still on the hub, the head cannot be seen: the worker will compare.
    rows = wanted if adapter.head_rows is None else adapter.head_rows
    return (
        (names, base) if len(names) == rows else ([f"LABEL_{index}" for index in range(rows)], adapter.name)
    )


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4])
    return f"{shown}, ..." if len(names) > 4 else shown


def _did_you_mean(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f" ({_few(known)})"
