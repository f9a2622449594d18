"""Describe checkpoints with the installed transformers, without loading weights.

One short process answers for all checkpoints of a config: a list of questions comes in, a line of JSON goes out
for each (``checkpoint/description.py``).  Models are built on the meta device.  Nothing is downloaded, and no
checkpoint's code runs.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import transformers
from accelerate import init_empty_weights
from torch import nn
from transformers.modeling_layers import GenericForSequenceClassification

from ensemble.common.python_process import die_with_parent
from ensemble.members.huggingface.loading.tokenizer import common_tokenizer, label_ids, make_tokenizer

# The names that transformers gives these numbers in every family (``attribute_map``).
_NUMBERS = (
    "hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size vocab_size"
).split()
_POSITIONS = re.compile(r"(^|[._])(wpe|positions?_embed\w*|embed_positions?)$")
_NEVER: Mapping[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def main() -> None:
    """Answer questions about checkpoints."""
    answer_questions(describe)


def answer_questions(describe: Callable[[Mapping[str, Any]], dict[str, Any]]) -> None:
    """Answer the questions on standard input, each by a line on what was standard output."""
    die_with_parent(os.getppid())
    # Libraries print, too.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for question in json.loads(sys.stdin.read()):
        answers.write(json.dumps(describe(question), default=str) + "\n")
        answers.flush()
    os._exit(0)  # nothing is left to clean up


def describe(question: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a ``Description``."""
    folder = str(question["folder"])
    answer: dict[str, Any] = {"quantization": quantization_keys(question["quantization_method"])}
    if question["processor_kwargs"] is not None:
        answer["reader"] = _read_processor(folder, question["processor_kwargs"])
    elif question["tokenizers"]:
        answer["reader"] = _read_tokenizer(folder, question)
    if question["auto_class"] is None:
        return answer
    try:
        config, _ = transformers.AutoConfig.from_pretrained(
            folder, return_unused_kwargs=True, **{**question["model_kwargs"], **_NEVER}
        )
    except Exception as error:  # any: files of any content
        return {**answer, "config_error": _words(error, folder)}
    answer |= _read_config(config, question)
    return answer | _build(config, question["auto_class"], folder)


def _words(error: Exception, folder: str) -> str:
    """Return an error's text on one line, with ``{folder}`` for the folder, whose name does not matter."""
    text = " ".join(str(error).split()).replace(folder, "{folder}")
    return f"{type(error).__name__}: {text}"[:600]


def _read_config(config: Any, question: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a config, defaults included, and the keys that it knows."""
    part = config.get_text_config()
    if "Image" in question["auto_class"]:
        part = getattr(config, "vision_config", config)
    numbers = {**config.to_dict(), **part.to_dict()}
    for name in _NUMBERS:
        number = getattr(part, name, None)
        if isinstance(number, int):
            numbers[name] = number
    known_keys = set(inspect.signature(type(config)).parameters)
    with suppress(Exception):  # a config of several parts may have no defaults
        known_keys |= set(type(config)().to_dict())
    return {"numbers": numbers, "known_keys": sorted(known_keys)}


def _build(config: Any, auto_class: str, folder: str) -> dict[str, Any]:
    """Build the model without weights, and return what its modules say."""
    auto = getattr(transformers, auto_class)
    if type(config) not in auto._model_mapping:
        return {"has_class": False}
    try:
        with init_empty_weights():
            model = auto.from_config(config, attn_implementation="eager")
    except Exception as error:
        # A model that cannot be built without its tensors may still be loaded.
        return {} if "meta" in str(error) else {"model_error": _words(error, folder)}
    return _look_at(model)


def _look_at(model: Any) -> dict[str, Any]:
    """Return what the modules of a model say."""
    is_generic = type(model).forward is GenericForSequenceClassification.forward
    shapes = [*_linear_shapes(model)]
    return {
        "parameters": {name: list(parameter.shape) for name, parameter in model.named_parameters()},
        "prefix": str(model.base_model_prefix),
        "renames": _renames(model),
        "ignored": sorted(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()),
        # Classes of encoders with a head over the vocabulary, such as BERT's, which can be told to be decoders.
        "is_encoder": any(getattr(module, "is_decoder", None) is False for module in model.modules()),
        "supports_sdpa": bool(model._supports_sdpa),
        "scores_every_position": hasattr(model, "score") and not is_generic,
        "max_positions": learnt_positions(model),
        "mlp_width": _mlp_width(shapes),
        "largest_weight": max((inputs * outputs for _, inputs, outputs in shapes), default=0),
    }


def _renames(model: Any) -> bool:
    """Return whether transformers gives the tensors of this model's files other names or shapes."""
    if getattr(model, "_checkpoint_conversion_mapping", None):
        return True
    with suppress(ImportError, AttributeError):  # older releases have only the mapping above
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        return bool(get_checkpoint_conversion_mapping(model.config.model_type))
    return False


def learnt_positions(model: Any) -> int | None:
    """Return how many tokens the tables of learnt positions can number; None for models without."""
    limits = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and _POSITIONS.search(name):
            # RoBERTa and its kin count from the padding's id on; BART and OPT have an offset.
            skipped = module.padding_idx + 1 if module.padding_idx is not None else 0
            limits.append(module.num_embeddings - max(skipped, int(getattr(module, "offset", 0))))
    return min(limits, default=None)


def _linear_shapes(model: Any) -> Iterator[tuple[str, int, int]]:
    """Yield the name, inputs and outputs of each linear layer within a block, and of a block's experts."""
    for name, module in model.named_modules():
        if not re.search(r"\.\d+\.", name):
            continue
        if isinstance(module, nn.Linear):
            yield name, module.in_features, module.out_features
        elif hasattr(module, "nf"):  # GPT-2's Conv1D
            yield name, *module.weight.shape
    for name, parameter in model.named_parameters():
        # Experts of a mixture are one tensor, [experts, outputs, inputs] or [experts, inputs, outputs].
        if parameter.dim() == 3 and "expert" in name and "down" not in name:
            yield name, min(parameter.shape[1:]), max(parameter.shape[1:])


def _mlp_width(shapes: Iterable[tuple[str, int, int]]) -> int:
    """Return the numbers per token that live at the peak of the widest feed-forward part."""
    # The outputs of all its layers that widen, and once more the widest: the activated gate times the input, or the
    # function's output.
    widths: dict[str, list[int]] = {}
    for name, inputs, outputs in shapes:
        if outputs > inputs:
            widths.setdefault(name.rpartition(".")[0], []).append(outputs)
    return max((sum(outputs) + max(outputs) for outputs in widths.values()), default=0)


def _read_processor(folder: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Check that the image processor in a folder can be made; return a ``Reader``."""
    try:
        transformers.AutoImageProcessor.from_pretrained(folder, **{**settings, **_NEVER})
    except Exception as error:
        release, words = f"transformers {transformers.__version__}", _words(error, folder)
        problem = f"{release} cannot make its image processor of its files ({words}); copy them again"
        return {"problem": f"{{folder}}: {problem}"}
    return {}


def _read_tokenizer(folder: str, question: Mapping[str, Any]) -> dict[str, Any]:
    """Make the tokenizer that a member would use; return a ``Reader``."""

    def load(own: Path | None) -> Any:
        tokenizer = make_tokenizer(str(own or folder), question["tokenizer_kwargs"], **_NEVER)
        tokenizer.truncation_side = question["truncation_side"] or tokenizer.truncation_side
        return tokenizer

    folders = {name or folder: own and Path(own) for name, own in question["tokenizers"].items()}
    try:
        tokenizer = common_tokenizer(load, folders, question["ignores_limit"], question["chats"])
    except ValueError as error:
        return {"problem": str(error).replace(folder, "{folder}")}
    except Exception as error:
        return {"problem": f"{{folder}}: {_words(error, folder)}"}

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    text_ids = []
    with suppress(Exception):  # the worker says why
        text_ids = [label_ids(encode, text) for text in question["texts"]]
    return {"tokens": len(tokenizer.get_vocab()), "text_ids": text_ids}


def quantization_keys(method: str) -> dict[str, Any]:
    """Return the methods of the installed transformers, and the keys of one."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    methods = {"bitsandbytes": transformers.BitsAndBytesConfig, **AUTO_QUANTIZATION_CONFIG_MAPPING}
    keys: set[str] = set()
    for base in methods[method].__mro__ if method in methods else ():
        if "__init__" in vars(base) and base is not object:
            keys |= set(inspect.signature(base.__init__).parameters)
    return {"methods": sorted(map(str, methods)), "keys": sorted(keys - {"self", "kwargs"})}
