"""Inspect a checkpoint without loading it: what its files say, and what a short process makes of them.

The parent does so before any worker starts, so that a typo costs seconds and not a night.  It imports no torch:
``loading/describe.py`` answers what only transformers can tell.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.common.errors import CheckpointError
from ensemble.common.files import read_json
from ensemble.common.text import gib
from ensemble.members.base import Inspection
from ensemble.members.huggingface.checkpoint.adapter_files import (
    WEIGHTS,
    Adapter,
    average_problems,
    inspect_adapter,
    is_head,
    other_base,
    shared_base_problems,
    uses_base_head,
)
from ensemble.members.huggingface.checkpoint.averaged import averaging_problems
from ensemble.members.huggingface.checkpoint.facts import Architecture, Facts
from ensemble.members.huggingface.checkpoint.hub import find_file, read_config
from ensemble.members.huggingface.checkpoint.labels import activation_of, label_names, match_labels, saved_as
from ensemble.members.huggingface.checkpoint.tokenizer_files import (
    TOKENIZER_FILES,
    has_vocabulary,
    small_file_problems,
    tokenizer_limit,
)
from ensemble.members.huggingface.checkpoint.weight_files import read_tensors, weight_files, weight_problems
from ensemble.members.huggingface.settings import HuggingFaceSettings, TextSettings
from ensemble.members.huggingface.spec import CLASSIFIER, tokenizer_names, without_fetching
from ensemble.members.questions import Question, ask

if TYPE_CHECKING:
    from ensemble.common.protocol import Activation

_DESCRIBE = "ensemble.members.huggingface.loading.describe"
_PACKAGES = tuple(
    "transformers torch accelerate tokenizers sentencepiece protobuf tiktoken mistral-common timm pillow peft "
    "bitsandbytes".split()
)
# The code whose judgement an answer is: another version of it is asked anew.
_JUDGES = Path(__file__).parents[1]
_FILES = ("*config.json", "*.index.json", *TOKENIZER_FILES)
_CROSS_ENCODER_FILE = "config_sentence_transformers.json"
_ACTIVATIONS: Mapping[str, Activation] = {"Sigmoid": "sigmoid", "Softmax": "softmax", "Identity": "none"}


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


def checkpoint_question(
    model: HuggingFaceSettings, folder: Path, auto_class: str, training: Mapping[str, Any] | None = None
) -> Question:
    """Return the question about a member's checkpoint.

    Args:
        folder: with its files.
        auto_class: the class of transformers that will load it.
        training: ``training_arguments`` and ``lora_config`` of a training that begins with it.
    """
    is_local = Path(model.model_name_or_path).is_dir()
    tokenizers = adapter_tokenizers(model)
    is_several = len(tokenizers) > 1
    texts: list[str] = []
    if isinstance(model, TextSettings):
        texts = [*getattr(model, "label_tokens", {}).values()]
        texts += [settings.fixed_text for settings in model.by_template.values()]
    adapters = [[*source.names] if source is not None else [] for source in model.view_adapters]
    folders = [folder, *(own for own in tokenizers.values() if own)]
    found = (path for place in folders for pattern in _FILES for path in place.glob(pattern))
    small = {path for path in found if path.is_file()}
    weights = [*weight_files(folder), *(Path(name, WEIGHTS) for names in adapters for name in names)]
    return Question(
        _DESCRIBE,
        folder,
        {
            "auto_class": auto_class,
            "is_local": is_local,
            "trust_remote_code": model.trust_remote_code,
            "model_kwargs": without_fetching(model.model_kwargs),
            "processor_kwargs": without_fetching(getattr(model, "processor_kwargs", {})),
            "tokenizer_kwargs": without_fetching(getattr(model, "tokenizer_kwargs", {})),
            "tokenizers": {name: own and str(own) for name, own in tokenizers.items()},
            "adapters": adapters,
            "texts": texts,
            # What several tokenizers must have in common.
            "truncation_side": getattr(model, "truncation_side", None) if is_several else None,
            "ignores_limit": is_several and getattr(model, "max_length", None) is not None,
            "chats": is_several and bool(getattr(model, "apply_chat_template", False)),
            "quantization_config": model.quantization_config,
            "training": training,
        },
        names={"name": model.model_name_or_path},
        files=(*sorted(_JUDGES.rglob("*.py")), *sorted(small)),
        weights=tuple(path for path in weights if path.is_file()),
        packages=_PACKAGES,
    )


def ask_facts(question: Question) -> Facts:
    """Return the answer to a question.

    Raises:
        CheckpointError: there is none.
    """
    answer = ask([question])[0]
    name = question.names["name"]
    if answer.fields is None:
        raise CheckpointError(
            f"{name}: transformers could not be asked what it is ({answer.failure}); start again when the machine "
            "is less busy, or look whether this Python can import transformers"
        )
    architecture = answer.fields["architecture"]
    warnings = [text.replace("{name}", name) for text in answer.fields["warnings"]]
    fields = {**answer.fields, "architecture": architecture and Architecture(**architecture)}
    return Facts(**{**fields, "warnings": warnings})


def adapter_tokenizers(model: HuggingFaceSettings) -> dict[str, Path | None]:
    """Return the folder of each adapter's own tokenizer, in the views' order; None: it has the checkpoint's.

    The name of no adapter is empty.  What an adapter on the hub has, only the worker knows.
    """
    names = tokenizer_names(model.view_adapters) if isinstance(model, TextSettings) else []
    return {name: Path(name) if name and has_vocabulary(Path(name)) else None for name in names}


def tokenizer_folder(model: HuggingFaceSettings, folder: Path) -> Path:
    """Return the folder of a member's tokenizer: its first adapter's, or that of its checkpoint."""
    return next(iter(adapter_tokenizers(model).values()), None) or folder


@dataclass(frozen=True)
class Checkpoint(Inspection):
    """Describe a member's checkpoint.

    Attributes:
        folder: with its files.
        config: the content of its ``config.json``.
        adapters: of the member's views, also those that are averaged; None: the base alone.
    """

    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    adapters: tuple[Adapter | None, ...] = ()
    facts: Facts = field(default_factory=Facts)

    @property
    def quantization(self) -> Mapping[str, Any] | None:
        """Return the settings of weights that are stored quantized; None: they are not."""
        quantization = self.config.get("quantization_config")
        return quantization if isinstance(quantization, dict) else None


def read_checkpoint(
    model: HuggingFaceSettings, auto_class: str, training: Mapping[str, Any] | None = None
) -> Checkpoint:
    """Read a checkpoint's small files, and ask what transformers makes of them and of the weights' headers.

    What its outputs are is left to the kind: ``activation`` is "none", and ``label_order`` empty.

    Args:
        auto_class: the class of transformers that will load it; if it has a head for labels, the head is checked.
        training: as for ``checkpoint_question``.

    Raises:
        CheckpointError: no ``config.json``, files that are missing or broken or would run code, an adapter for
            another base; every problem is listed.
    """
    name_or_path = model.model_name_or_path
    problems = [*averaging_problems(model.averaged)]
    if problems:
        raise CheckpointError(problems)
    path = find_file(name_or_path, "config.json", model.revision)
    config = read_config(path, f"{name_or_path}: its config.json")
    folder = path.parent
    if Path(name_or_path).is_dir():
        problems += [*weight_problems(folder, config, model.allow_pickle), *small_file_problems(folder)]
    adapters: list[Adapter | None] = []
    adapter_problems: list[str] = []
    for source in dict.fromkeys(model.view_adapters):
        if source is None:
            adapters.append(None)
            continue
        try:
            averaged = [inspect_adapter(name, model.allow_pickle) for name in source.names]
        except CheckpointError as error:
            adapter_problems += error.problems
            continue
        adapters += averaged
        if source.combination_type:
            adapter_problems += average_problems(averaged, source.combination_type)
    if model.switches_adapters:
        adapter_problems += shared_base_problems(adapters)
    facts = Facts()
    if not problems:
        facts = ask_facts(checkpoint_question(model, folder, auto_class, training))
        problems += facts.problems
    if problems or adapter_problems:
        raise CheckpointError([*problems, *adapter_problems])
    warnings = [*facts.warnings]
    for adapter in adapters:
        trained_on = "" if adapter is None else other_base(adapter, name_or_path)
        if adapter is not None and trained_on:
            warnings.append(
                f"adapter {adapter.name} says that it was trained on {trained_on}, and runs on {name_or_path} "
                "here; if that is another model of the same shape, its probabilities mean nothing"
            )
    weight_bytes = sum(file.stat().st_size for file in weight_files(folder) if file.is_file())
    shown = saved_as(config) or str(config.get("model_type", ""))
    return Checkpoint(
        activation="none",
        label_order=(),
        summary=f"{shown}, {gib(weight_bytes)}" if weight_bytes else shown,
        warnings=tuple(warnings),
        folder=folder,
        config=config,
        adapters=tuple(adapters),
        facts=facts,
    )


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
    checkpoint = read_checkpoint(model, auto_class)
    name_or_path, config, adapters = model.model_name_or_path, checkpoint.config, checkpoint.adapters
    architecture = saved_as(config)
    names, where = label_names(config, name_or_path), name_or_path
    own_labels = next((adapter for adapter in adapters if adapter is not None and adapter.labels), None)
    uses_own_head = uses_base_head(adapters)
    warnings: list[str] = []
    encoder = read_cross_encoder(
        name_or_path, checkpoint.folder, config, len(names), model.revision, problem_type
    )
    if uses_own_head and ("ForCausalLM" in architecture or "ForMaskedLM" in architecture):
        # The hub's cache may lack some of the weights.
        tensors = (read_tensors(checkpoint.folder) if Path(name_or_path).is_dir() else None) or ()
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
    for adapter in adapters:
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
    return replace(
        checkpoint,
        activation=activation,
        label_order=match_labels(names, labels, label_map, where),
        warnings=(*checkpoint.warnings, *warnings),
    )


def row_limit(config: Mapping[str, Any], folder: Path) -> int | None:
    """Return the tokens of a row that tokenizer and model can read; None: the files name no limit."""
    positions = config.get("max_position_embeddings")
    limits = [tokenizer_limit(folder), positions if isinstance(positions, int) else None]
    return min((int(limit) for limit in limits if limit is not None), default=None)


def is_language_model(config: Mapping[str, Any], folder: Path) -> bool:
    """Return whether a checkpoint is a decoder over a vocabulary without a classification head."""
    if not saved_as(config).endswith(("ForCausalLM", "LMHeadModel")):
        return False
    return not any(is_head(tensor.name) for tensor in read_tensors(folder) or ())
