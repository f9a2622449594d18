"""Judge checkpoints with the installed transformers, without loading weights.

One short process answers for all checkpoints of a config: a list of questions comes in, a line of JSON goes out
for each (``checkpoint/facts.py``).  Models are built on the meta device.  Nothing is downloaded, and no
checkpoint's code runs.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import transformers
from accelerate import init_empty_weights
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from ensemble.common.errors import CheckpointError
from ensemble.common.files import read_json
from ensemble.common.python_process import die_with_parent
from ensemble.common.text import nearest, plural
from ensemble.members.huggingface.checkpoint.adapter_files import (
    Adapter,
    inspect_adapter,
    is_head,
    uses_base_head,
)
from ensemble.members.huggingface.checkpoint.facts import Facts
from ensemble.members.huggingface.checkpoint.labels import saved_as
from ensemble.members.huggingface.checkpoint.quantization_methods import BITSANDBYTES, method_of
from ensemble.members.huggingface.checkpoint.tokenizer_files import size_problem
from ensemble.members.huggingface.checkpoint.weight_files import Tensor, read_tensors
from ensemble.members.huggingface.loading.architecture import read_architecture, text_settings
from ensemble.members.huggingface.loading.tokenizer import common_tokenizer, label_ids, make_tokenizer
from ensemble.members.huggingface.spec import (
    BACKBONE,
    CLASSIFIER,
    COMMIT,
    IMAGE_CLASSIFIER,
    LANGUAGE_MODEL,
    default_max_length,
)

# The names that transformers gives these numbers in every family (``attribute_map``).
_NUMBERS = (
    "hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size vocab_size"
).split()
_NEVER: Mapping[str, Any] = {"local_files_only": True, "trust_remote_code": False}
# transformers names this argument where it refuses to run code.
_REFUSED = "trust_remote_code"
_IMAGE_READER = "AutoImageProcessor"
# The class that prepares a model's inputs, and the key with its arguments, where it is not a tokenizer.
_READERS = {IMAGE_CLASSIFIER: (_IMAGE_READER, "processor_kwargs")}
# The kind of member that runs a checkpoint, by the end of its class's name.
_TASKS = {
    "ForSequenceClassification": "seq_cls",
    "ForCausalLM": "causal_lm",
    "ForMaskedLM": "pooled_cls",
    "ForImageClassification": "image_cls",
}
_WITHOUT_VOCABULARY = (
    "ForSequenceClassification",
    "ForMaskedLM",
    "ForTokenClassification",
    "ForQuestionAnswering",
)
# Numbers of a config.json that some supported releases do not read, by model_type, and what these compute with:
# 5.0 against 5.24, of the kinds that both have.
_NO_LIMIT = {"time_step_limit": [0.0, math.inf]}
_READ_BY_NEWER: Mapping[str, Mapping[str, Any]] = {
    "gpt_oss": {"swiglu_limit": 7.0, "swiglu_alpha": 1.702},
    "esm": {"rope_theta": 10000.0},
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid"), _NO_LIMIT),
}
_BLOCK = re.compile(r"(.*?\.)(\d+)\.")
# These methods of quantization accept any further key and pass it on.
_OPEN_ENDED = ("quark", "torchao", "compressed-tensors")
# Tokens of an image classifier for the whole image, in addition to the patches.
_MORE_TOKENS = 2


def main() -> None:
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
    """Return the fields of ``Facts``, as JSON can hold them."""
    try:
        return asdict(_Checkpoint(question).facts())
    except Exception as error:  # any: files of any content, and the other questions wait
        problem = (
            f"{question['name']}: its files cannot be judged ({_words(error)}); copy its config.json again"
        )
        return asdict(Facts(problems=[problem]))


class _Checkpoint:
    """Judge the checkpoint of a question."""

    def __init__(self, question: Mapping[str, Any]) -> None:
        self._question = question
        self._name, self._auto_class = str(question["name"]), str(question["auto_class"])
        self._folder = Path(question["folder"])
        self._stored = read_json(self._folder / "config.json")
        self._saved_as = saved_as(self._stored)
        # What code of its own makes, and a part of a larger checkpoint, only the worker sees.
        self._is_hidden = question["trust_remote_code"] or "subfolder" in question["model_kwargs"]
        self._numbers: Mapping[str, Any] = text_settings(self._stored)
        self._tokenizer: Any = None

    def facts(self) -> Facts:
        question = self._question
        warnings: list[str] = []
        config, model = None, None
        config_words, model_words, has_class = "", "", True
        if not self._is_hidden and self._stored:
            try:
                config, _ = transformers.AutoConfig.from_pretrained(
                    self._folder, return_unused_kwargs=True, **{**question["model_kwargs"], **_NEVER}
                )
            except Exception as error:  # any: files of any content
                config_words = _words(error)
        if config is not None:
            self._numbers = _numbers(config, self._auto_class)
            warnings += release_warning(self._stored, _known_keys(config))
            auto = getattr(transformers, self._auto_class)
            has_class = type(config) in auto._model_mapping
            if has_class:
                try:
                    with init_empty_weights():
                        model = auto.from_config(config, attn_implementation="eager")
                except Exception as error:
                    # A model that cannot be built without its tensors may still be loaded.
                    model_words = "" if "meta" in str(error) else _words(error)
        reader_problem, reader_words = self._read_inputs()
        problems = [*self._code_problems(config_words, has_class, reader_words)]
        if not problems:
            problems += self._model_problems(config, config_words, has_class, model_words)
            problems += filter(None, [reader_problem or self._size_problem()])
            problems += self._task_problems(model)
            if not problems and model is not None and not self._stored.get("quantization_config"):
                problems += self._contradictions(model)
        architecture = read_architecture(self._stored, self._numbers, model)
        # Some OPT models end with a projection to the size of the embeddings.
        width = self._numbers.get("word_embed_proj_dim")
        if not isinstance(width, int):
            width = None if architecture is None else architecture.hidden
        patches, image_numbers = 0, 0
        if model is not None and self._auto_class == IMAGE_CLASSIFIER:
            patches, image_numbers = _patches(model, self._numbers)
        limit, text_ids = self._lengths()
        parameters = 0 if model is None else sum(math.prod(item.shape) for item in model.parameters())
        training_problems: list[str] = []
        trainable = None
        if question["training"] is not None:
            # Imported late because only trainings need it.
            from ensemble.members.huggingface.training.arguments import judge_training

            training_problems, trainable = judge_training(question["training"], self._auto_class, model)
        return Facts(
            problems=problems,
            key_problems=[*unknown_keys(question["quantization_config"] or {})],
            training_problems=training_problems,
            warnings=warnings,
            architecture=architecture,
            parameters=parameters,
            trainable=trainable,
            width=width,
            patches=patches,
            image_numbers=image_numbers,
            max_length=limit,
            text_ids=text_ids,
        )

    def _read_inputs(self) -> tuple[str, str]:
        """Make the tokenizer or image processor, if its files are here, and its code is transformers'.

        Returns:
            why it cannot be used, in a sentence, and in transformers' words; empty: it can, or it is not here.
        """
        question, folder = self._question, self._folder
        # The hub's cache may lack a tokenizer's files.
        is_here = question["is_local"] and not self._is_hidden
        if self._auto_class == IMAGE_CLASSIFIER:
            try:
                if is_here:
                    settings = {**question["processor_kwargs"], **_NEVER}
                    transformers.AutoImageProcessor.from_pretrained(folder, **settings)
            except Exception as error:
                words = _words(error)
                problem = f"cannot make its image processor of its files ({words}); copy them again"
                return f"{folder}: {_release()} {problem}", words
            return "", ""
        folders: dict[str, Path | None] = {}
        for name, own in question["tokenizers"].items() if not question["trust_remote_code"] else ():
            if own is not None or (is_here and (not name or Path(name).is_dir())):
                folders[name or str(folder)] = own and Path(own)
        if not folders:
            return "", ""

        def load(own: Path | None) -> Any:
            tokenizer = make_tokenizer(str(own or folder), question["tokenizer_kwargs"], **_NEVER)
            tokenizer.truncation_side = question["truncation_side"] or tokenizer.truncation_side
            return tokenizer

        try:
            tokenizer = common_tokenizer(load, folders, question["ignores_limit"], question["chats"])
        except ValueError as error:
            return str(error), str(error)
        except Exception as error:
            return f"{folder}: {_words(error)}", str(error)
        # The first adapter's may still be on the hub.
        if (next(iter(question["tokenizers"])) or str(folder)) in folders:
            self._tokenizer = tokenizer
        return "", ""

    def _lengths(self) -> tuple[int | None, list[Sequence[int]]]:
        """Return the tokens of a row by the tokenizer's limit, and the tokens of the texts."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            return None, []

        def encode(text: str) -> list[int]:
            return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

        ids: list[Sequence[int]] = []
        with suppress(Exception):  # the worker says why
            ids = [label_ids(encode, text) for text in self._question["texts"]]
        return default_max_length(tokenizer.model_max_length), ids

    def _code_problems(self, config_words: str, has_class: bool, reader_words: str) -> Iterator[str]:
        """Yield why a checkpoint's own code cannot or must not run.

        A ``config.json`` can name classes in the checkpoint's Python files (``auto_map``). transformers prefers its
        own classes where it has them; otherwise it runs those files, or refuses to (dynamic_module_utils.py).
        """
        question, name, auto_class = self._question, self._name, self._auto_class
        # The classes that a member uses, and the key of the config that has their code_revision.
        reader, key = _READERS.get(auto_class, ("AutoTokenizer", "tokenizer_kwargs"))
        kinds = {"AutoConfig": "model_kwargs", auto_class: "model_kwargs", reader: key}
        # Each file, and where it was loaded from.
        files = [(name, self._stored), (name, read_json(self._folder / "preprocessor_config.json"))]
        folders = [(name, self._folder), *((own, own) for own in question["tokenizers"].values() if own)]
        files += [(place, read_json(Path(folder, "tokenizer_config.json"))) for place, folder in folders]
        classes = [
            (place, kind, code)
            for place, file in files
            for kind, code in _classes(file).items()
            if kind in kinds
        ]
        codes = {kind: code for _, kind, code in classes}
        if question["trust_remote_code"]:
            unpinned = {}
            for place, kind, code in classes:
                # transformers takes "org/name--module.Class" from that repository, and by the checkpoint's revision
                # only where that is where the file itself comes from.
                repository, separator, _ = code.partition("--")
                revision = question[kinds[kind]].get("code_revision")
                is_pinned = isinstance(revision, str) and re.fullmatch(COMMIT, revision)
                if separator and repository != place and not is_pinned:
                    unpinned[kinds[kind]] = code
            for key, code in unpinned.items():
                yield (
                    f"{name} takes its code from another repository ({code}), where it can change from one day to "
                    f"the next; name the commit to use, as in {key}: {{code_revision: 40 hexadecimal digits}}"
                )
            return
        needed = None
        if "AutoConfig" in codes and _REFUSED in config_words:
            needed = "AutoConfig", "model"
        elif auto_class in codes and not has_class:
            needed = auto_class, "model"
        elif reader in codes and _REFUSED in reader_words:
            needed = reader, "image processor" if reader == _IMAGE_READER else "tokenizer"
        if needed is not None:
            yield (
                f"{name} needs Python code of its own ({codes[needed[0]]}), because transformers has no such "
                f"{needed[1]}; it runs only if you allow it: read it, then set trust_remote_code: true"
            )

    def _model_problems(
        self, config: Any, config_words: str, has_class: bool, model_words: str
    ) -> Iterator[str]:
        """Yield why transformers cannot make the model."""
        name, stored = self._name, self._stored
        if config_words:
            yield f"{name}: {_release()} cannot read its config.json ({config_words})"
        elif not has_class:
            others = {head: task for head, task in _TASKS.items() if head not in self._auto_class}
            task = next((others[head] for head in others if self._saved_as.endswith(head)), None)
            advice = f"task_type: {task} runs its {self._saved_as}" if task else "name another checkpoint"
            yield (
                f"{name}: {_release()} has no model of the kind {stored.get('model_type')!r} for this task; "
                f"{self._advice_on_heads(config)}{advice}, or install a newer release"
            )
        elif model_words:
            yield (
                f"{name}: {_release()} cannot build the model of its config.json ({model_words}); "
                f"{config_advice(stored, runs_code=False)}"
            )

    def _advice_on_heads(self, config: Any) -> str:
        """Return the keys of a member that trains a head on the backbone, where no classifier has one."""
        reads_text = isinstance(self._numbers.get("vocab_size"), int)
        is_backbone = reads_text and type(config) in transformers.AutoModel._model_mapping
        if self._auto_class != CLASSIFIER or not is_backbone or self._stored.get("is_encoder_decoder"):
            return ""
        mode = "mean" if self._saved_as.endswith("ForMaskedLM") else "lasttoken"
        keys = f"task_type: pooled_cls, pooling_mode: {mode}"
        if self._question["training"] is None:
            keys += f" and train: {{base_model: {self._name}, method: lora}}"
        return f"to train a head on its backbone, write {keys}; "

    def _size_problem(self) -> str:
        embeddings = self._numbers.get("vocab_size")
        tokens = 0 if self._tokenizer is None else len(self._tokenizer.get_vocab())
        folder = next(filter(None, self._question["tokenizers"].values()), self._folder)
        return size_problem(folder, tokens, embeddings if isinstance(embeddings, int) else 0)

    def _task_problems(self, model: Any) -> Iterator[str]:
        """Yield why this is no model for the task of its class."""
        name, of_class = self._name, self._saved_as
        is_double = bool(self._stored.get("is_encoder_decoder"))
        if self._auto_class == BACKBONE and is_double:
            yield f"{name} is an encoder with a decoder; pooled_cls runs models that are one of the two"
        if self._auto_class != LANGUAGE_MODEL:
            return
        other_head = next((head for head in _WITHOUT_VOCABULARY if of_class.endswith(head)), None)
        if other_head is not None:
            task = " (task_type: seq_cls runs it)" if other_head == _WITHOUT_VOCABULARY[0] else ""
            yield f"{name} ({of_class}) has no head over the vocabulary; name a language model{task}"
        if is_double:
            yield f"{name} is an encoder with a decoder; causal_lm runs models that are decoders alone"
        # Classes of encoders with a head over the vocabulary, such as BERT's, which can be told to be decoders.
        modules = () if model is None else model.modules()
        if any(getattr(module, "is_decoder", None) is False for module in modules):
            yield (
                f"{name} ({of_class}) is an encoder: its tokens see those behind them, and what comes next cannot "
                "be asked of it; name a language model"
            )

    def _contradictions(self, model: Any) -> Iterator[str]:
        """Yield what certainly contradicts between the model of a ``config.json`` and its weights."""
        # The hub's cache may lack some of the weights; files with damage have a sentence of their own.
        tensors: Sequence[Tensor] = ()
        adapters: list[Adapter | None] = []
        with suppress(CheckpointError):
            tensors = read_tensors(self._folder) or () if self._question["is_local"] else ()
            for names in self._question["adapters"]:
                adapters += (inspect_adapter(name, allow_pickle=True) for name in names)
                adapters += [] if names else [None]
        if not tensors or _renames(model):
            return
        prefix = f"{model.base_model_prefix}."
        parameters = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        stored = {tensor.name: tensor for tensor in tensors}
        stored_parameters = {
            parameter: stored[name]
            for parameter in parameters
            for name in (parameter.removeprefix(prefix), prefix + parameter, parameter)
            if name in stored
        }
        ignored = [
            re.compile(pattern)
            for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        ]
        kept = [name for name in stored if not any(pattern.search(name) for pattern in ignored)]
        contradictions = [*_depths(_stacks(parameters, prefix), _stacks(kept, prefix))]
        for parameter, tensor in stored_parameters.items():
            shape = parameters[parameter]
            is_replaced = is_head(parameter) and not uses_base_head(adapters)
            if shape == tensor.shape or not tensor.is_float or is_replaced:
                continue
            wrong = [size for size, of_file in zip(shape, tensor.shape, strict=False) if size != of_file]
            numbers = {**self._numbers, **self._stored}.items()
            named = [f"{key} is {value:,}" for key, value in numbers if type(value) is int and value in wrong]
            hint = f" ({', '.join(named[:3])})" if named else ""
            contradictions.append(
                f"{tensor.name} is {list(tensor.shape)} in the file, and {list(shape)} by the config.json{hint}"
            )
        for contradiction in contradictions[:2]:
            yield (
                f"{self._name}: its config.json does not fit its weights: {contradiction}; they are of two models"
            )


def _release() -> str:
    return f"transformers {transformers.__version__}"


def _words(error: Exception) -> str:
    """Return an error's text on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:600]


def _numbers(config: Any, auto_class: str) -> dict[str, Any]:
    """Return the numbers of the part of a config that reads text, or images, defaults included."""
    part = config.get_text_config()
    if auto_class == IMAGE_CLASSIFIER:
        part = getattr(config, "vision_config", config)
    numbers = {**config.to_dict(), **part.to_dict()}
    for name in _NUMBERS:
        number = getattr(part, name, None)
        if isinstance(number, int):
            numbers[name] = number
    return numbers


def _known_keys(config: Any) -> set[str]:
    """Return the keys that a config of this class has."""
    known_keys = set(inspect.signature(type(config)).parameters)
    with suppress(Exception):  # a config of several parts may have no defaults
        known_keys |= set(type(config)().to_dict())
    return known_keys


def release_warning(stored: Mapping[str, Any], known_keys: Iterable[str]) -> Iterator[str]:
    """Yield a warning if the installed transformers computes without a number that newer releases read.

    Args:
        stored: the ``config.json``.
        known_keys: those that the installed release reads.
    """
    for key, value in _READ_BY_NEWER.get(str(stored.get("model_type")), {}).items():
        if key in known_keys or stored.get(key, value) == value:
            continue
        yield (
            f"{{name}} was saved by transformers {stored.get('transformers_version')} with {key}: {stored[key]}, "
            f"and {transformers.__version__}, which is installed, computes with {value}: its probabilities are "
            "others there; install a newer release"
        )


def unknown_keys(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the installed transformers does not know of a ``quantization_config``; {}: there is none."""
    methods = {BITSANDBYTES: transformers.BitsAndBytesConfig, **AUTO_QUANTIZATION_CONFIG_MAPPING}
    method = method_of(settings) or BITSANDBYTES
    if settings and method not in methods:
        yield f"quantization_config.quant_method: {method!r} is unknown{_choices(method, sorted(methods))}"
    if not settings or method not in methods or method in _OPEN_ENDED:
        return
    known = {"quant_method"}
    for base in methods[method].__mro__:
        if "__init__" in vars(base) and base is not object:
            known |= set(inspect.signature(base.__init__).parameters)
    for key in settings:
        # Keys with a line in front are what transformers itself writes into a config.json.
        if key not in known and not key.startswith("_"):
            choices = sorted(known - {"quant_method", "self", "kwargs"})
            yield f"quantization_config.{key}: there is no such key{_choices(key, choices)}"


def _choices(word: str, choices: Sequence[str]) -> str:
    near = nearest(word, choices)
    return f"; did you mean {near}?" if near is not None else f"; known: {', '.join(choices)}"


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


def _renames(model: Any) -> bool:
    """Return whether transformers gives the tensors of this model's files other names or shapes."""
    if getattr(model, "_checkpoint_conversion_mapping", None):
        return True
    with suppress(ImportError, AttributeError):  # older releases have only the mapping above
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        return bool(get_checkpoint_conversion_mapping(model.config.model_type))
    return False


def _depths(of_model: Mapping[str, int], of_file: Mapping[str, int]) -> Iterator[str]:
    """Yield stacks of layers that have another number of layers in the file."""
    for stack in of_model.keys() & of_file.keys():
        layers, stored_layers = of_model[stack], of_file[stack]
        if layers != stored_layers:
            in_file = f"the file holds {plural(stored_layers, 'layer')} (up to {stack}{stored_layers - 1})"
            yield f"it makes {plural(layers, 'layer')} of {stack.removesuffix('.')}, and {in_file}"


def _stacks(names: Iterable[str], prefix: str) -> dict[str, int]:
    stacks: dict[str, int] = {}
    for name in names:
        block = _BLOCK.match(name.removeprefix(prefix))
        if block is not None:
            stacks[block[1]] = max(stacks.get(block[1], 0), int(block[2]) + 1)
    return stacks


def _patches(model: Any, numbers: Mapping[str, Any]) -> tuple[int, int]:
    """Return the tokens of an image and the numbers of its pixels, of a plain transformer; zeros: it is none."""
    size, patch = numbers.get("image_size"), numbers.get("patch_size")
    # A plain transformer has one table of positions, with a row for each patch.
    named = model.named_parameters()
    tables = [table.shape[-2] for name, table in named if "position_embedding" in name]
    if isinstance(size, int) and isinstance(patch, int) and len(tables) == 1:
        grid = (size // max(1, patch)) ** 2
        if grid <= tables[0] <= grid + _MORE_TOKENS:
            registers = int(numbers.get("num_register_tokens") or 0)
            return grid + _MORE_TOKENS + registers, 3 * size * size
    return 0, 0


def config_advice(config: Mapping[str, Any], runs_code: bool) -> str:
    """Return what to do where no model can be made of a ``config.json``; ``runs_code``: its own code may run."""
    if not config.get("auto_map"):
        return "copy config.json again, or install a newer release"
    if runs_code:
        written = config.get("transformers_version", "unknown")
        return (
            "it is made by Python code of its own, which may need another release of transformers than "
            f"{transformers.__version__} (that of its config.json is {written})"
        )
    return (
        "it comes with Python code of its own, and transformers' class is another one: read the code, then set "
        "trust_remote_code: true"
    )
