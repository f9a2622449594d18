"""Ask transformers what a checkpoint is, and compare what it says with the headers of the weights.

``loading/describe.py`` answers.  Where it cannot be asked, every field of a ``Description`` keeps its default:
nothing is known.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from ensemble.common.files import read_json
from ensemble.common.text import plural
from ensemble.members.huggingface.checkpoint.adapter_files import is_head
from ensemble.members.huggingface.checkpoint.digests import own_tokenizers
from ensemble.members.huggingface.checkpoint.quantization_methods import BITSANDBYTES, method_of
from ensemble.members.huggingface.checkpoint.several_adapters import tokenizer_problems
from ensemble.members.huggingface.checkpoint.tokenizer_files import (
    TOKENIZER_FILES,
    has_vocabulary,
    lacking_vocabulary,
    size_problem,
)
from ensemble.members.huggingface.checkpoint.weight_files import Tensor
from ensemble.members.huggingface.settings import HuggingFaceSettings, TextSettings
from ensemble.members.huggingface.spec import IMAGE_CLASSIFIER, without_fetching
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
        error: in its words; ``{folder}`` stands for the folder.
        files: those that the class reads, by their roles.
        knows_text: whether it knows more than special tokens.
        tokens: how many it knows; 0: not known.
        makes: a digest of what it makes of texts, where adapters have tokenizers, too.
    """

    error: str = ""
    class_name: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    knows_text: bool = True
    tokens: int = 0
    makes: str = ""
    pad_token_id: int | None = None


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
        reader: the checkpoint's tokenizer, or its image processor.
        adapter_readers: the tokenizers of adapters that have one, by the adapters' names.
        quantization: the ``methods`` that there are, and the ``keys`` of the member's.
    """

    failure: str = ""
    config_error: str = ""
    model_error: str = ""
    has_class: bool = True
    unknown_rope_type: str | None = None
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
    adapter_readers: Mapping[str, Reader] = field(default_factory=dict)
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
    tokenizers = adapter_tokenizers(model)
    if is_hidden and not tokenizers:
        return None
    reader: str | None = None
    kwargs: Mapping[str, Any] = getattr(model, "tokenizer_kwargs", {})
    # The hub's cache may lack a tokenizer's files.
    if Path(model.model_name_or_path).is_dir() and not (is_elsewhere or model.trust_remote_code):
        if auto_class != IMAGE_CLASSIFIER:
            reader = "AutoTokenizer"
        elif next(folder.glob("*processor_config.json"), None) is not None:
            reader, kwargs = "AutoImageProcessor", getattr(model, "processor_kwargs", {})
    folders = [folder, *tokenizers.values()]
    paths = {
        path for place in folders for pattern in _FILES for path in place.glob(pattern) if path.is_file()
    }
    return Question(
        _MODULE,
        folder,
        {
            "auto_class": None if is_hidden else auto_class,
            "model_kwargs": without_fetching(model.model_kwargs),
            "reader": reader,
            "reader_kwargs": without_fetching(kwargs),
            "tokenizers": {name: str(own) for name, own in tokenizers.items()},
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
    names = {entry.name for entry in fields(Description)}
    values = {name: value for name, value in answer.fields.items() if name in names}
    values["reader"] = Reader(**values.get("reader", {}))
    values["adapter_readers"] = {name: Reader(**own) for name, own in values["adapter_readers"].items()}
    return Description(**values)


def adapter_tokenizers(model: HuggingFaceSettings) -> dict[str, Path]:
    """Return the folder of each adapter's own tokenizer, of those that are on this machine, by the adapter's name.

    Raises:
        CheckpointError: a file cannot be read.
    """
    if not isinstance(model, TextSettings):
        return {}
    names = [name for source in model.used_adapters for name in source.names]
    return own_tokenizers({name: Path(name) for name in names})


def used_tokenizer(
    model: HuggingFaceSettings, folder: Path, described: Description
) -> tuple[Path, Reader, tuple[str, ...]]:
    """Return the folder of a member's tokenizer, what transformers says of it, and problems.

    The folder is the checkpoint's, too, where its adapters' tokenizers do the same as its own.
    """
    own, base = adapter_tokenizers(model), described.reader
    if not own:
        return folder, base, ()
    names = [name for source in model.view_adapters for name in (("",) if source is None else source.names)]
    readers = {name: described.adapter_readers.get(name, Reader()) if name in own else base for name in names}
    makes = {name or model.model_name_or_path: reader.makes for name, reader in readers.items()}
    problems = () if "" in makes.values() else tuple(tokenizer_problems(makes))
    first = readers[names[0]]
    is_same = bool(first.makes) and (first.makes, first.pad_token_id) == (base.makes, base.pad_token_id)
    return folder if is_same else own.get(names[0], folder), first, problems


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
    elif described.unknown_rope_type is not None:
        yield (
            f"{name}: its config.json asks for the rope_type {described.unknown_rope_type!r}, which {release} "
            "does not know; install a newer release"
        )
    elif described.model_error:
        yield (
            f"{name}: {release} cannot build the model of its config.json "
            f"({_placed(described.model_error, folder)}); {config_advice(config, runs_code=False)}"
        )
    folder, reader, problems = used_tokenizer(model, folder, described)
    yield from problems
    is_text = isinstance(model, TextSettings)
    is_plain = not getattr(model, "tokenizer_kwargs", {})  # which may name other files
    lacking = lacking_vocabulary(folder, reader.files) if is_plain else ""
    vocabulary = described.numbers.get("vocab_size")
    too_small = size_problem(folder, reader.tokens, vocabulary if isinstance(vocabulary, int) else 0)
    if is_text and reader.error and not has_vocabulary(folder):
        words = _placed(reader.error, folder)
        yield f"{folder} has no tokenizer files with the vocabulary (no tokenizer.json; {words}); copy them too"
    elif is_text and (lacking or not reader.knows_text):
        files = f" ({lacking})" if lacking else ""
        yield (
            f"{folder} has no tokenizer files with the vocabulary of {reader.class_name}{files}, and the tokenizer "
            "would know special tokens only; copy them too"
        )
    elif is_text and too_small:
        yield too_small
    elif reader.error:
        kind, advice = "image processor", "copy them again"
        if is_text:
            kind = "tokenizer"
            advice = (
                "copy tokenizer.json and tokenizer_config.json again, see that its tokenizer_class is the one "
                "that the vocabulary is for, and look at tokenizer_kwargs"
            )
        yield f"{folder}: {release} cannot make its {kind} of its files ({_placed(reader.error, folder)}); {advice}"


def _placed(text: str, folder: Path) -> str:
    return text.replace("{folder}", str(folder))


def weight_contradictions(
    name: str,
    config: Mapping[str, Any],
    described: Description,
    tensors: Sequence[Tensor],
    with_head: bool,
) -> Iterator[str]:
    """Yield what certainly contradicts between the model of a ``config.json`` and its weights.

    Args:
        with_head: whether the checkpoint's head is the one that is used.
    """
    if described.renames or not described.parameters:
        return
    prefix = f"{described.prefix}."
    stored = {tensor.name: tensor for tensor in tensors}
    stored_parameters: dict[str, Tensor] = {}
    for parameter in described.parameters:
        for candidate in (parameter, prefix + parameter, parameter.removeprefix(prefix)):
            if candidate in stored:
                stored_parameters[parameter] = stored[candidate]
                break
    contradictions = [
        *_depths(described, stored, prefix),
        *_shapes(config, described, stored_parameters, with_head),
    ]
    for contradiction in contradictions[:4]:
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
    """Yield tensors of other shapes, one for each pair of sizes."""
    reported: set[tuple[int, ...]] = set()
    for parameter, tensor in stored_parameters.items():
        shape = tuple(described.parameters[parameter])
        if shape == tensor.shape or not tensor.is_float or (is_head(parameter) and not with_head):
            continue
        sizes = {pair for pair in zip(shape, tensor.shape, strict=False) if pair[0] != pair[1]}
        if sizes & reported and len(shape) == len(tensor.shape):
            continue
        reported |= sizes
        wrong = [size for size, _ in sizes]
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
        return "copy config.json again"
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
