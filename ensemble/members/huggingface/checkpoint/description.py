"""Ask transformers what a checkpoint is, and compare what it says with the headers of the weights.

``loading/describe.py`` answers.  Where it cannot be asked, every field of a ``Description`` keeps its default:
nothing is known.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from ensemble.common.files import read_json
from ensemble.common.text import plural
from ensemble.members.huggingface.checkpoint.adapter_files import is_head
from ensemble.members.huggingface.checkpoint.quantization_methods import BITSANDBYTES, method_of
from ensemble.members.huggingface.checkpoint.tokenizer_files import (
    TOKENIZER_FILES,
    has_vocabulary,
    size_problem,
)
from ensemble.members.huggingface.checkpoint.weight_files import Tensor
from ensemble.members.huggingface.settings import HuggingFaceSettings, TextSettings
from ensemble.members.huggingface.spec import IMAGE_CLASSIFIER, tokenizer_names, without_fetching
from ensemble.members.questions import Answer, Question, ask

_MODULE = "ensemble.members.huggingface.loading.describe"
_PACKAGES = tuple(
    "transformers torch accelerate tokenizers sentencepiece protobuf tiktoken mistral-common timm pillow".split()
)
_FILES = ("config.json", "*processor_config.json", *TOKENIZER_FILES)
# The kind of member that runs a checkpoint, by the end of its class's name.
_TASKS = {
    "ForSequenceClassification": "seq_cls",
    "ForCausalLM": "causal_lm",
    "ForMaskedLM": "pooled_cls",
    "ForImageClassification": "image_cls",
}
# Numbers of a config.json that some supported releases do not read, by model_type, and what these compute with:
# 5.0 against 5.24, of the kinds that both have.
_NO_LIMIT = {"time_step_limit": [0.0, math.inf]}
_READ_BY_NEWER: Mapping[str, Mapping[str, Any]] = {
    "gpt_oss": {"swiglu_limit": 7.0, "swiglu_alpha": 1.702},
    "esm": {"rope_theta": 10000.0},
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid"), _NO_LIMIT),
}
_BLOCK = re.compile(r"(.*?\.)(\d+)\.")


@dataclass(frozen=True)
class Reader:
    """Hold what the installed transformers says of a tokenizer, or of an image processor.

    Attributes:
        problem: why it cannot be used, in a sentence; ``{folder}`` stands for the folder.
        tokens: how many it knows; 0: not known.
        text_ids: the tokens of the label texts, and of the fixed text of each template.
    """

    problem: str = ""
    tokens: int = 0
    text_ids: Sequence[Sequence[int]] = ()


@dataclass(frozen=True)
class Description:
    """Hold what the installed transformers says of a checkpoint.

    Attributes:
        failure: why there is no answer; empty: there is, or nobody asked.
        config_error, model_error: in its words; ``{folder}`` stands for the folder.
        has_class: whether the auto class knows models of this kind.
        numbers: of the part that reads text (or images), defaults included.
        known_keys: of a ``config.json`` of this kind.
        parameters: shapes by name; empty: not known.
        prefix: of the model without its head, in the names of parameters.
        renames: whether files may have other names and shapes.
        ignored: patterns of tensors that files may have beyond the parameters.
        max_positions: the longest row; None: positions are not learnt, or not known.
        mlp_width: numbers per token at the peak of a feed-forward part; 0: not known.
        largest_weight: elements of the largest linear layer; 0: not known.
        is_encoder: whether its tokens see those behind them.
        supports_sdpa: whether torch's fused attention works; None: not known.
        scores_every_position: whether a classifier computes logits at all positions.
        reader: the tokenizer that is used, the checkpoint's or an adapter's, or the image processor.
        quantization: the ``methods`` that there are, and the ``keys`` of the member's.
    """

    failure: str = ""
    config_error: str = ""
    model_error: str = ""
    has_class: bool = True
    numbers: Mapping[str, Any] = field(default_factory=dict)
    known_keys: Sequence[str] = ()
    parameters: Mapping[str, Sequence[int]] = field(default_factory=dict)
    prefix: str = ""
    renames: bool = False
    ignored: Sequence[str] = ()
    max_positions: int | None = None
    mlp_width: int = 0
    largest_weight: int = 0
    is_encoder: bool = False
    supports_sdpa: bool | None = None
    scores_every_position: bool = False
    reader: Reader = Reader()
    quantization: Mapping[str, Sequence[str]] = field(default_factory=dict)


def checkpoint_question(model: HuggingFaceSettings, folder: Path, auto_class: str) -> Question | None:
    """Return the question about a member's checkpoint; None where its files alone decide.

    Args:
        folder: with its files.
    """
    config = read_json(folder / "config.json")
    is_elsewhere = "subfolder" in model.model_kwargs
    is_quantized = bool(config.get("quantization_config"))
    is_hidden = not config or is_elsewhere or is_quantized or model.trust_remote_code
    # The hub's cache may lack a tokenizer's files.
    is_there = Path(model.model_name_or_path).is_dir() and not (is_elsewhere or model.trust_remote_code)
    tokenizers: dict[str, str | None] = {}
    for name, own in adapter_tokenizers(model).items() if not model.trust_remote_code else ():
        if own is not None:
            tokenizers[name] = str(own)
        elif is_there and (not name or Path(name).is_dir()):
            tokenizers[name] = None
    processor_kwargs = None
    if is_there and auto_class == IMAGE_CLASSIFIER:
        processor_kwargs = without_fetching(getattr(model, "processor_kwargs", {}))
    if is_hidden and not tokenizers and processor_kwargs is None:
        return None
    texts: list[str] = []
    if isinstance(model, TextSettings):
        texts = [*getattr(model, "label_tokens", {}).values()]
        texts += [settings.fixed_text for settings in model.by_template.values()]
    folders = [folder, *(Path(own) for own in tokenizers.values() if own)]
    paths = {
        path for place in folders for pattern in _FILES for path in place.glob(pattern) if path.is_file()
    }
    return Question(
        _MODULE,
        folder,
        {
            "auto_class": None if is_hidden else auto_class,
            "model_kwargs": without_fetching(model.model_kwargs),
            "processor_kwargs": processor_kwargs,
            "tokenizers": tokenizers,
            "tokenizer_kwargs": without_fetching(getattr(model, "tokenizer_kwargs", {})),
            "texts": texts,
            "truncation_side": getattr(model, "truncation_side", None),
            "ignores_limit": getattr(model, "max_length", None) is not None,
            "chats": bool(getattr(model, "apply_chat_template", False)),
            "quantization_method": method_of(model.quantization_config) or BITSANDBYTES,
        },
        tuple(sorted(paths)),
        _PACKAGES,
    )


def describe(asked: Question | None) -> Description:
    """Return the answer to a question."""
    if asked is None:
        return Description()
    answer: Answer = ask([asked])[0]
    if answer.fields is None:
        return Description(failure=answer.failure)
    return Description(**{**answer.fields, "reader": Reader(**answer.fields.get("reader", {}))})


def adapter_tokenizers(model: HuggingFaceSettings) -> dict[str, Path | None]:
    """Return the folder of each adapter's own tokenizer, in the views' order; None: it has the checkpoint's.

    The name of no adapter is empty.  What an adapter on the hub has, only the worker knows.
    """
    names = tokenizer_names(model.view_adapters) if isinstance(model, TextSettings) else []
    return {name: Path(name) if name and has_vocabulary(Path(name)) else None for name in names}


def tokenizer_folder(model: HuggingFaceSettings, folder: Path) -> Path:
    """Return the folder of a member's tokenizer: its first adapter's, or that of its checkpoint."""
    return next(iter(adapter_tokenizers(model).values()), None) or folder


def description_problems(
    name: str,
    model: HuggingFaceSettings,
    folder: Path,
    config: Mapping[str, Any],
    auto_class: str,
    described: Description,
) -> Iterator[str]:
    """Yield why transformers cannot load a checkpoint, or read its inputs."""
    release = f"transformers {metadata.version('transformers')}" if not described.failure else ""
    model_type = config.get("model_type")
    if described.config_error:
        yield f"{name}: {release} cannot read its config.json ({_placed(described.config_error, folder)})"
    elif not described.has_class:
        architecture = str((config.get("architectures") or [""])[0])
        tasks = [
            task for head, task in _TASKS.items() if architecture.endswith(head) and head not in auto_class
        ]
        advice = (
            f"task_type: {tasks[0]} runs its {architecture}, or" if tasks else "name another checkpoint, or"
        )
        yield (
            f"{name}: {release} has no model of the kind {model_type!r} for this task; {advice} install a newer "
            "release"
        )
    elif described.model_error:
        yield (
            f"{name}: {release} cannot build the model of its config.json "
            f"({_placed(described.model_error, folder)}); {config_advice(config, runs_code=False)}"
        )
    reader, vocabulary = described.reader, described.numbers.get("vocab_size")
    embeddings = vocabulary if isinstance(vocabulary, int) else 0
    problem = reader.problem or size_problem(tokenizer_folder(model, folder), reader.tokens, embeddings)
    if problem:
        yield _placed(problem, folder)


def _placed(text: str, folder: Path) -> str:
    return text.replace("{folder}", str(folder))


def weight_contradictions(
    name: str, config: Mapping[str, Any], described: Description, tensors: Sequence[Tensor], with_head: bool
) -> Iterator[str]:
    """Yield what certainly contradicts between the model of a ``config.json`` and its weights.

    Args:
        with_head: whether the checkpoint's head is the one that is used.
    """
    if described.renames or not described.parameters:
        return
    prefix = f"{described.prefix}."
    stored = {tensor.name: tensor for tensor in tensors}
    stored_parameters = {
        parameter: stored[name]
        for parameter in described.parameters
        for name in (parameter.removeprefix(prefix), prefix + parameter, parameter)
        if name in stored
    }
    contradictions = [
        *_depths(described, stored, prefix),
        *_shapes(config, described, stored_parameters, with_head),
    ]
    for contradiction in contradictions[:2]:
        yield f"{name}: its config.json does not fit its weights: {contradiction}; they are of two models"


def _depths(described: Description, stored: Mapping[str, Tensor], prefix: str) -> Iterator[str]:
    """Yield stacks of layers that have another number of layers in the file."""
    ignored = [re.compile(pattern) for pattern in described.ignored]
    kept = (name for name in stored if not any(pattern.search(name) for pattern in ignored))
    described_stacks, stored_stacks = _stacks(described.parameters, prefix), _stacks(kept, prefix)
    for stack in described_stacks.keys() & stored_stacks.keys():
        layers, stored_layers = described_stacks[stack], stored_stacks[stack]
        if layers != stored_layers:
            in_file = f"the file holds {plural(stored_layers, 'layer')} (up to {stack}{stored_layers - 1})"
            yield f"it makes {plural(layers, 'layer')} of {stack.removesuffix('.')}, and {in_file}"


def _stacks(names: Any, prefix: str) -> dict[str, int]:
    stacks: dict[str, int] = {}
    for name in names:
        block = _BLOCK.match(name.removeprefix(prefix))
        if block is not None:
            stacks[block[1]] = max(stacks.get(block[1], 0), int(block[2]) + 1)
    return stacks


def _shapes(
    config: Mapping[str, Any],
    described: Description,
    stored_parameters: Mapping[str, Tensor],
    with_head: bool,
) -> Iterator[str]:
    """Yield tensors of other shapes than the model's."""
    for parameter, tensor in stored_parameters.items():
        shape = tuple(described.parameters[parameter])
        if shape == tensor.shape or not tensor.is_float or (is_head(parameter) and not with_head):
            continue
        wrong = [size for size, stored in zip(shape, tensor.shape, strict=False) if size != stored]
        numbers = {**described.numbers, **config}.items()
        named = [f"{key} is {value:,}" for key, value in numbers if type(value) is int and value in wrong]
        hint = f" ({', '.join(named[:3])})" if named else ""
        yield f"{tensor.name} is {list(tensor.shape)} in the file, and {list(shape)} by the config.json{hint}"


def release_warning(name: str, config: Mapping[str, Any], described: Description) -> Iterator[str]:
    """Yield a warning if the installed transformers computes without a number that newer releases read."""
    written = config.get("transformers_version")
    read_by_newer = _READ_BY_NEWER.get(str(config.get("model_type")), {})
    if not described.known_keys:
        return
    for key, value in read_by_newer.items():
        if key in described.known_keys or config.get(key, value) == value:
            continue
        yield (
            f"{name} was saved by transformers {written} with {key}: {config[key]}, and "
            f"{metadata.version('transformers')}, which is installed, computes with {value}: its probabilities are "
            "others there; install a newer release"
        )


def config_advice(config: Mapping[str, Any], runs_code: bool) -> str:
    """Return what to do where no model can be made of a ``config.json``; ``runs_code``: its own code may run."""
    if not config.get("auto_map"):
        return "copy config.json again, or install a newer release"
    if runs_code:
        written = config.get("transformers_version", "unknown")
        return (
            "it is made by Python code of its own, which may need another release of transformers than "
            f"{metadata.version('transformers')} (that of its config.json is {written})"
        )
    return (
        "it comes with Python code of its own, and transformers' class is another one: read the code, then set "
        "trust_remote_code: true"
    )
