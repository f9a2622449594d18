"""Inspect a checkpoint without loading it: its ``config.json``, its small files, and its labels.

The parent does so before any worker starts, so that a typo costs seconds and not a night.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.common.errors import CheckpointError
from ensemble.common.text import gib
from ensemble.members.base import NOT_ASKED, Inspection
from ensemble.members.huggingface.checkpoint.adapter_files import (
    Adapter,
    average_problems,
    inspect_adapter,
    is_head,
    other_base,
    shared_base_problems,
    uses_base_head,
)
from ensemble.members.huggingface.checkpoint.cross_encoder import read_cross_encoder
from ensemble.members.huggingface.checkpoint.description import (
    Description,
    checkpoint_question,
    describe,
    description_problems,
    release_warning,
    weight_contradictions,
)
from ensemble.members.huggingface.checkpoint.hub import find_file, read_config
from ensemble.members.huggingface.checkpoint.labels import activation_of, label_names, match_labels
from ensemble.members.huggingface.checkpoint.remote_code import code_problems
from ensemble.members.huggingface.checkpoint.tokenizer_files import small_file_problems, tokenizer_limit
from ensemble.members.huggingface.checkpoint.weight_files import (
    Tensor,
    read_tensors,
    weight_files,
    weight_problems,
)
from ensemble.members.huggingface.settings import HuggingFaceSettings
from ensemble.members.huggingface.spec import CLASSIFIER

if TYPE_CHECKING:
    from ensemble.common.protocol import Activation


@dataclass(frozen=True)
class Checkpoint(Inspection):
    """Describe a member's checkpoint by its ``config.json``.

    ``folder`` holds its files; ``quantization`` has the settings of weights that are stored quantized;
    ``described`` is what transformers says of it.
    """

    folder: Path
    quantization: Mapping[str, Any] | None = None
    described: Description = field(default_factory=Description)


@dataclass(frozen=True)
class CheckpointFiles:
    """Hold the content of a checkpoint's small files and of its weights' headers, whatever the task.

    Attributes:
        architecture: the class that it was saved as; empty: not stored.
        tensors: empty where they are not known yet, on the hub.
        adapters: of the member's views, also those that are averaged; None: the base alone.
        described: what transformers says of it.
    """

    config: Mapping[str, Any]
    folder: Path
    architecture: str
    tensors: Sequence[Tensor]
    adapters: tuple[Adapter | None, ...]
    described: Description
    warnings: tuple[str, ...]

    def checkpoint(
        self,
        model: HuggingFaceSettings,
        activation: Activation,
        label_order: tuple[int, ...],
        warnings: Sequence[str] = (),
    ) -> Checkpoint:
        """Return the member's checkpoint, with further warnings."""
        quantization = self.config.get("quantization_config")
        files = weight_files(self.folder)
        weight_bytes = sum(file.stat().st_size for file in files if file.is_file())
        shown = self.architecture or str(self.config.get("model_type", ""))
        return Checkpoint(
            summary=f"{shown}, {gib(weight_bytes)}" if weight_bytes else shown,
            activation=activation,
            label_order=label_order,
            folder=self.folder,
            warnings=(*self.warnings, *warnings),
            quantization=quantization if isinstance(quantization, dict) else None,
            described=self.described,
        )


def read_checkpoint(model: HuggingFaceSettings, auto_class: str) -> CheckpointFiles:
    """Read a checkpoint's small files, and compare them with each other and with its weights.

    Args:
        auto_class: the class of transformers that will load it; if it has a head for labels, the head is checked.

    Raises:
        CheckpointError: no ``config.json``, files that are missing or broken or would run code, an adapter for
            another base; every problem is listed.
    """
    name_or_path = model.model_name_or_path
    path = find_file(name_or_path, "config.json", model.revision)
    config = read_config(path, f"{name_or_path}: its config.json")
    folder, is_local = path.parent, Path(name_or_path).is_dir()
    stored = config.get("architectures")
    architecture = str(stored[0]) if isinstance(stored, list) and stored and stored[0] else ""
    described = describe(checkpoint_question(model, folder, auto_class))
    problems = [*code_problems(model, folder, config, auto_class, described)]
    if is_local:
        problems += weight_problems(folder, config, model.allow_pickle)
        problems += small_file_problems(folder)
    if not problems:
        problems += description_problems(name_or_path, model, folder, config, auto_class, described)
    adapters: list[Adapter | None] = []
    for source in dict.fromkeys(model.view_adapters):
        if source is None:
            adapters.append(None)
            continue
        try:
            averaged = [inspect_adapter(name, model.allow_pickle) for name in source.names]
        except CheckpointError as error:
            problems += error.problems
            continue
        adapters += averaged
        if source.combination_type:
            problems += average_problems(averaged, source.combination_type)
    if model.switches_adapters:
        problems += shared_base_problems(adapters)
    tensors: Sequence[Tensor] = ()
    # The hub's cache may lack some of the weights.
    if not problems and is_local:
        tensors = read_tensors(folder) or ()
        problems += weight_contradictions(name_or_path, config, described, tensors, uses_base_head(adapters))
    if problems:
        raise CheckpointError(problems)
    warnings = [*release_warning(name_or_path, config, described)]
    if described.failure:
        warnings.append(
            f"{name_or_path}: {NOT_ASKED} what it is ({described.failure}); its worker checks it before the first "
            "chunk"
        )
    for adapter in adapters:
        trained_on = "" if adapter is None else other_base(adapter, name_or_path)
        if adapter is not None and trained_on:
            warnings.append(
                f"adapter {adapter.name} says that it was trained on {trained_on}, and runs on {name_or_path} "
                "here; if that is another model of the same shape, its probabilities mean nothing"
            )
    return CheckpointFiles(config, folder, architecture, tensors, tuple(adapters), described, tuple(warnings))


def inspect_checkpoint(
    model: HuggingFaceSettings,
    labels: Sequence[str],
    label_map: Mapping[str, str],
    problem_type: str | None,
    auto_class: str = CLASSIFIER,
) -> Checkpoint:
    """Read a classifier's files and match its labels to the config's.

    Args:
        labels: the config's labels, in the order of the output columns.
        label_map: from the checkpoint's labels to the config's.
        problem_type: overrides the checkpoint's, and a CrossEncoder's activation.
        auto_class: the class of transformers that will load it.

    Raises:
        CheckpointError: as ``read_checkpoint``, and where labels do not match; every problem is listed.
    """
    files = read_checkpoint(model, auto_class)
    name_or_path = model.model_name_or_path
    config, architecture, tensors = files.config, files.architecture, files.tensors
    names, where = label_names(config, name_or_path), name_or_path
    own_labels = next((adapter for adapter in files.adapters if adapter is not None and adapter.labels), None)
    uses_own_head = uses_base_head(files.adapters)
    warnings: list[str] = []
    encoder = read_cross_encoder(name_or_path, files.folder, config, len(names), model.revision, problem_type)
    if uses_own_head and ("ForCausalLM" in architecture or "ForMaskedLM" in architecture):
        if tensors and not any(is_head(tensor.name) for tensor in tensors):
            raise CheckpointError(
                f"{name_or_path} ({architecture}) has no classification head, and not each of its views has an "
                "adapter that brings one; name a checkpoint that was trained for sequence classification, or its "
                "adapter (adapter_name_or_path); a language model itself is for task_type: causal_lm, a head in a "
                "file of its own for pooled_cls"
            )
        warnings.append(
            f"{name_or_path} was saved as {architecture}, which has no classification head; "
            "it will be refused unless its weights hold one"
        )
    # peft stores no names with an adapter, but its head decides how many labels there are; the base's names count
    # if they are as many.  The head of an adapter on the hub is compared by the worker.
    rows_of_heads = {name_or_path: len(names)} if uses_own_head else {}
    for adapter in files.adapters:
        if adapter is not None and adapter.brings_head is not False:
            rows_of_heads[adapter.name] = len(labels) if adapter.head_rows is None else adapter.head_rows
    if len(set(rows_of_heads.values())) > 1:
        heads = ", ".join(f"that of {head} has {rows}" for head, rows in rows_of_heads.items())
        raise CheckpointError(
            f"its views use heads of different numbers of labels ({heads}); make a member of each"
        )
    first, rows = next(iter(rows_of_heads.items()))
    if rows != len(names):
        names, where = [f"LABEL_{index}" for index in range(rows)], first
    trained_as = config.get("problem_type")
    if own_labels is not None:
        names, where = label_names(own_labels.labels, own_labels.name), own_labels.name
        trained_as = own_labels.labels.get("problem_type")
    activation = activation_of(problem_type or trained_as, len(names))
    if encoder is not None:
        warnings += encoder.warnings
        if problem_type is None and encoder.activation is not None:
            activation = encoder.activation
    return files.checkpoint(model, activation, match_labels(names, labels, label_map, where), warnings)


def row_limit(config: Mapping[str, Any], folder: Path) -> int | None:
    """Return the tokens of a row that tokenizer and model can read; None: the files name no limit."""
    positions = config.get("max_position_embeddings")
    limits = [tokenizer_limit(folder), positions if isinstance(positions, int) else None]
    return min((int(limit) for limit in limits if limit is not None), default=None)


def is_language_model(config: Mapping[str, Any], folder: Path) -> bool:
    """Return whether a checkpoint is a decoder over a vocabulary without a classification head."""
    names = config.get("architectures") or [""]
    if not str(names[0]).endswith(("ForCausalLM", "LMHeadModel")):
        return False
    return not any(is_head(tensor.name) for tensor in read_tensors(folder) or ())
