"""Ask transformers what a checkpoint is, and compare what it says with the headers of the weights.

``loading/describe.py`` answers.  Where it cannot be asked, every field of a ``Description`` keeps its default:
nothing is known.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from ensemble.common.files import read_json
from ensemble.common.packages import installed_versions
from ensemble.common.text import plural
from ensemble.members.huggingface.checkpoint.adapter_files import is_head
from ensemble.members.huggingface.checkpoint.quantization_methods import BITSANDBYTES, method_of
from ensemble.members.huggingface.checkpoint.tokenizer_files import TOKENIZER_FILES
from ensemble.members.huggingface.checkpoint.weight_files import Tensor
from ensemble.members.huggingface.settings import HuggingFaceSettings, TextSettings
from ensemble.members.huggingface.spec import IMAGE_CLASSIFIER, without_fetching
from ensemble.members.questions import Answer, Question, ask

_MODULE = "ensemble.members.huggingface.loading.describe"
_PACKAGES = tuple(
    "transformers torch accelerate tokenizers sentencepiece protobuf tiktoken mistral-common timm pillow".split()
)
_FILES = ("config.json", "*processor_config.json", *TOKENIZER_FILES)
_VOCABULARIES = ("tokenizer.json", "vocab*", "merges.txt", "*.model", "*.tiktoken", "*.spm")
# The kind of member that runs a checkpoint, by the end of its class's name.
_TASKS = {
    "ForSequenceClassification": "seq_cls",
    "ForCausalLM": "causal_lm",
    "ForMaskedLM": "pooled_cls",
    "ForImageClassification": "image_cls",
}
_BLOCK = re.compile(r"(.*?\.)(\d+)\.")


@dataclass(frozen=True)
class Description:
    """Hold what the installed transformers says of a checkpoint.

    Attributes:
        failure: why there is no answer; empty: there is, or nobody asked.
        config_error, model_error, reader_error: in its words; ``{folder}`` stands for the folder.
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
        tokenizer_files: those that the tokenizer's class reads instead of tokenizer.json.
        knows_text: whether the tokenizer knows more than special tokens.
        quantization: the ``methods`` that there are, and the ``keys`` of the member's.
    """

    failure: str = ""
    config_error: str = ""
    model_error: str = ""
    reader_error: str = ""
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
    tokenizer_class: str = ""
    tokenizer_files: Sequence[str] = ()
    knows_text: bool = True
    quantization: Mapping[str, Sequence[str]] = field(default_factory=dict)


def checkpoint_question(model: HuggingFaceSettings, folder: Path, auto_class: str) -> Question | None:
    """Return the question about a member's checkpoint; None where its files alone decide.

    Args:
        folder: with its files.
    """
    config = read_json(folder / "config.json")
    is_elsewhere = model.gguf_file is not None or "subfolder" in model.model_kwargs
    if not config or is_elsewhere or model.trust_remote_code or config.get("quantization_config"):
        return None
    reader: str | None = None
    kwargs: Mapping[str, Any] = {}
    if Path(model.model_name_or_path).is_dir():  # the hub's cache may lack a tokenizer's files
        if auto_class != IMAGE_CLASSIFIER:
            reader, kwargs = "AutoTokenizer", getattr(model, "tokenizer_kwargs", {})
        elif next(folder.glob("*processor_config.json"), None) is not None:
            reader, kwargs = "AutoImageProcessor", getattr(model, "processor_kwargs", {})
    paths = {path for pattern in _FILES for path in folder.glob(pattern) if path.is_file()}
    return Question(
        _MODULE,
        folder,
        {
            "auto_class": auto_class,
            "model_kwargs": without_fetching(model.model_kwargs),
            "reader": reader,
            "reader_kwargs": without_fetching(kwargs),
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
    return Description(**{name: value for name, value in answer.fields.items() if name in names})


def description_problems(
    name: str,
    model: HuggingFaceSettings,
    folder: Path,
    config: Mapping[str, Any],
    auto_class: str,
    described: Description,
) -> Iterator[str]:
    """Yield why transformers cannot load a checkpoint."""
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
            f"({_placed(described.model_error, folder)}); copy it again"
        )
    is_text = isinstance(model, TextSettings)
    if (
        is_text
        and described.reader_error
        and not any(next(folder.glob(pattern), None) for pattern in _VOCABULARIES)
    ):
        words = _placed(described.reader_error, folder)
        yield f"{folder} has no tokenizer files with the vocabulary (no tokenizer.json; {words}); copy them too"
    elif is_text and not described.knows_text:
        missing = [file for file in described.tokenizer_files if not (folder / file).is_file()]
        nor = f", nor {' and '.join(missing)}" if missing else ""
        yield (
            f"{folder} has no tokenizer files with the vocabulary of {described.tokenizer_class} (no "
            f"tokenizer.json{nor}), and the tokenizer would know special tokens only; copy them too"
        )
    elif described.reader_error:
        reader, advice = "image processor", "copy them again"
        if is_text:
            reader = "tokenizer"
            advice = (
                "copy tokenizer.json and tokenizer_config.json again, see that its tokenizer_class is the one "
                "that the vocabulary is for, and look at tokenizer_kwargs"
            )
        yield (
            f"{name}: {release} cannot make its {reader} of its files "
            f"({_placed(described.reader_error, folder)}); {advice}"
        )


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
    """Yield a warning if a newer transformers than the installed one has saved the checkpoint."""
    written = config.get("transformers_version")
    installed = installed_versions(("transformers",)).get("transformers")
    if not isinstance(written, str) or installed is None or _release(written) <= _release(installed):
        return
    known_keys = set(described.known_keys)
    unknown = sorted(
        key for key in config if known_keys and not key.startswith("_") and key not in known_keys
    )
    hint = f", which knows nothing of its {', '.join(unknown)}" if unknown else ""
    yield (
        f"{name} was saved by transformers {written}, and {installed} is installed{hint}; what is unknown there is "
        f"left out silently, and probabilities can differ: install transformers {written}"
    )


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("dev")[0])[:3])
