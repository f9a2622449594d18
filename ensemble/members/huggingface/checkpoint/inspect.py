"""Inspect a checkpoint without loading it: its ``config.json``, its small files, and its labels.

The parent does so before any worker starts, so that a typo costs seconds and not a night.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.common.errors import CheckpointError
from ensemble.common.files import read_json
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
from ensemble.members.huggingface.checkpoint.description import (
    Description,
    adapter_tokenizers,
    checkpoint_question,
    describe,
    description_problems,
    release_warning,
    weight_contradictions,
)
from ensemble.members.huggingface.checkpoint.hub import find_file, read_config
from ensemble.members.huggingface.checkpoint.labels import activation_of, label_names, match_labels
from ensemble.members.huggingface.checkpoint.tokenizer_files import small_file_problems, tokenizer_limit
from ensemble.members.huggingface.checkpoint.weight_files import (
    Tensor,
    read_tensors,
    weight_files,
    weight_problems,
)
from ensemble.members.huggingface.settings import COMMIT, HuggingFaceSettings
from ensemble.members.huggingface.spec import CLASSIFIER, IMAGE_CLASSIFIER

if TYPE_CHECKING:
    from ensemble.common.protocol import Activation

_CROSS_ENCODER_FILE = "config_sentence_transformers.json"
_ACTIVATIONS: Mapping[str, Activation] = {"Sigmoid": "sigmoid", "Softmax": "softmax", "Identity": "none"}
_IMAGE_READER = "AutoImageProcessor"
# The class that prepares a model's inputs, and the key with its arguments, where it is not a tokenizer.
_READERS = {IMAGE_CLASSIFIER: (_IMAGE_READER, "processor_kwargs")}
# transformers names this argument where it refuses to run code.
_REFUSED = "trust_remote_code"


@dataclass(frozen=True)
class CrossEncoder:
    """Hold what sentence-transformers has stored about a classifier.

    ``activation`` is what ``predict`` applies to logits; None: ``predict`` applies nothing to several logits, and
    config.json's ``problem_type`` decides.
    """

    activation: Activation | None
    warnings: tuple[str, ...]


def read_cross_encoder(
    name_or_path: str,
    folder: Path,
    config: Mapping[str, Any],
    labels: int,
    revision: str | None,
    problem_type: str | None,
) -> CrossEncoder | None:
    """Read the settings of a CrossEncoder; None where nothing says that the folder holds one.

    The place of the activation depends on the release of sentence-transformers that saved the folder: before 4.0
    ``sbert_ce_default_activation_function`` in config.json, up to 5.3 ``activation_fn`` in config.json's
    ``sentence_transformers``, and from 5.4 on a file of its own, which takes precedence (sentence_transformers,
    cross_encoder/model.py, get_default_activation_fn and _parse_model_config).

    Args:
        folder: of its config.json.
        config: its config.json.
        labels: of its head.
        problem_type: the user's, which replaces the stored activation.

    Raises:
        CheckpointError: the settings cannot be read, or name an activation that is not known.
    """
    path = folder / _CROSS_ENCODER_FILE
    if not path.is_file() and not Path(name_or_path).is_dir() and labels == 1:
        with contextlib.suppress(CheckpointError):  # most models of the hub have no such file
            path = find_file(name_or_path, _CROSS_ENCODER_FILE, revision)
    settings, older = read_json(path), config.get("sentence_transformers")
    if path.is_file() and not settings:
        raise CheckpointError(
            f"{path} is empty, or is not JSON; copy it again: it says what {name_or_path} is"
        )
    older = older if isinstance(older, Mapping) else {}
    oldest = config.get("sbert_ce_default_activation_function")
    if settings.get("model_type") != "CrossEncoder" and not older and oldest is None:
        return None
    stored = str(settings.get("activation_fn") or older.get("activation_fn") or oldest or "")
    warnings: list[str] = []
    activation: Activation | None = "sigmoid" if labels == 1 else None
    name = stored.rpartition(".")[2]
    if stored and not stored.startswith("torch."):
        # sentence-transformers does not import it either, unless it is told to.
        if problem_type is None:
            warnings.append(
                f"{name_or_path}: its activation {stored} is code of its own, which is not run here; "
                "sentence-transformers takes its default instead, and so does this; problem_type says otherwise"
            )
    elif name in _ACTIVATIONS:
        activation = None if name == "Identity" and labels > 1 else _ACTIVATIONS[name]
    elif stored and problem_type is None:
        raise CheckpointError(
            f"{name_or_path}: sentence-transformers puts its logits through {stored}, which is unknown here; set "
            "problem_type to say what they stand for, or call its predict (task_type: python)"
        )
    prompts = settings.get("prompts")
    text = prompts.get(settings.get("default_prompt_name")) if isinstance(prompts, Mapping) else None
    if text:
        warnings.append(
            f"{name_or_path}: sentence-transformers puts a prompt before its texts ({text!r:.60}); nothing does so "
            "here, so put it into the texts"
        )
    return CrossEncoder(activation, tuple(warnings))


def code_problems(
    model: HuggingFaceSettings,
    folder: Path,
    config: Mapping[str, Any],
    auto_class: str,
    described: Description,
) -> Iterator[str]:
    """Yield why a checkpoint's own code cannot or must not run.

    A ``config.json`` can name classes in the checkpoint's Python files (``auto_map``). transformers prefers its own
    classes where it has them; otherwise it runs those files, or refuses to (dynamic_module_utils.py).

    Args:
        folder: holds its files.
        config: its ``config.json``.
        auto_class: the class of transformers that will load it.
        described: what transformers says of it.
    """
    # The classes that a member uses, and the key of the config that has their code_revision.
    reader, key = _READERS.get(auto_class, ("AutoTokenizer", "tokenizer_kwargs"))
    kinds = {"AutoConfig": "model_kwargs", auto_class: "model_kwargs", reader: key}
    name = model.model_name_or_path
    # Each file, and where it was loaded from.
    files = [(name, config)]
    files += [(name, read_json(folder / f"{kind}_config.json")) for kind in ("preprocessor", "tokenizer")]
    for own in filter(None, adapter_tokenizers(model).values()):
        files.append((str(own), read_json(own / "tokenizer_config.json")))
    classes = [
        (place, kind, code) for place, file in files for kind, code in _classes(file).items() if kind in kinds
    ]
    codes = {kind: code for _, kind, code in classes}
    if model.trust_remote_code:
        unpinned = {}
        for place, kind, code in classes:
            # transformers takes "org/name--module.Class" from that repository, and by the checkpoint's revision
            # only where that is where the file itself comes from.
            repository, separator, _ = code.partition("--")
            revision = getattr(model, kinds[kind]).get("code_revision")
            is_pinned = isinstance(revision, str) and re.fullmatch(COMMIT, revision)
            if separator and repository != place and not is_pinned:
                unpinned[kinds[kind]] = code
        for key, code in unpinned.items():
            yield (
                f"{name} takes its code from another repository ({code}), where it can change from one day to the "
                f"next; name the commit to use, as in {key}: {{code_revision: 40 hexadecimal digits}}"
            )
        return
    if not codes:
        return
    needed = None
    if "AutoConfig" in codes and _REFUSED in described.config_error:
        needed = "AutoConfig", "model"
    elif auto_class in codes and not described.has_class:
        needed = auto_class, "model"
    elif reader in codes and _REFUSED in described.reader.problem:
        needed = reader, "image processor" if reader == _IMAGE_READER else "tokenizer"
    if needed is not None:
        yield (
            f"{name} needs Python code of its own ({codes[needed[0]]}), because transformers has no such "
            f"{needed[1]}; it runs only if you allow it: read it, then set trust_remote_code: true"
        )


def _classes(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the ``auto_map``: for each of transformers' Auto classes a name such as ``modeling_x.XModel``."""
    auto_map = config.get("auto_map")
    if isinstance(auto_map, list):  # an older form, only in tokenizer_config.json
        auto_map = {"AutoTokenizer": auto_map}
    if not isinstance(auto_map, dict):
        return {}
    classes = {}
    for kind, code in auto_map.items():
        # A tokenizer has a slow and a fast class.
        names = [name for name in (code if isinstance(code, list) else [code]) if isinstance(name, str)]
        if names:
            classes[str(kind)] = names[-1]
    return classes


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
