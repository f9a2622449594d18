"""The config: what each key means, what it may hold, and each way it can be wrong, in plain sentences.

Owns ``RunConfig``, what it holds, and ``load_config``.  Reading YAML is ``configfile``'s.  Nothing here looks
at the table, the checkpoints or the GPUs, with one exception: ``trust_remote_code`` asks whether
``model_name_or_path`` is a local folder.

``defaults:`` in the YAML is merged under each model, key by key: a mapping in a model replaces that of the
defaults as a whole.  ``${NAME}`` is replaced in any text value, even a template; ``$${`` is a plain ``${``.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Le
from pydantic import (
    AfterValidator,
    AllowInfNan,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ensemble.configfile import Document, Loc, apply_overrides, expand, parse, place, read_text
from ensemble.errors import ConfigError

# What is wrong, and where.
Problem = tuple[Loc, str]
M = TypeVar("M", bound=BaseModel)

MAX_NAME_CHARACTERS = 100
MAX_SEED = 2**32 - 1


@dataclass(frozen=True)
class MustBe:
    """What a type's values are called in an error: "must be <phrase>"."""

    phrase: str


def _home(text: str) -> str:
    # Only where "~" stands first: Path would also tidy up the names of models on the hub.
    try:
        return str(Path(text).expanduser()) if text.startswith("~") else text
    except RuntimeError as error:  # ~somebody who is not on this machine
        raise ValueError(str(error)) from None


def _file(value: object) -> Path:
    if isinstance(value, Path):
        return value
    if not isinstance(value, str) or not value.strip():
        raise ValueError
    return Path(_home(value))


def _label(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _sequence(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _some(value: object) -> object:
    # Before the items, not as min_length: older pydantic counts only the items that are right.
    if value in ([], ()):
        raise ValueError
    return _sequence(value)


def _member_name(name: str) -> str:
    fits = re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", name) and len(name) <= MAX_NAME_CHARACTERS
    if not fits or name.lower() == "ensemble":
        raise ValueError
    return name


# Not Field(...): in older pydantic a Field that several keys share carries the default of one to the others.
_WORD = StringConstraints(pattern=r"\S")
_NAME = (
    f"made of letters, digits, '.', '_' and '-' (at most {MAX_NAME_CHARACTERS}, no '.' first, not 'ensemble')"
)

Text = Annotated[str, _WORD, MustBe("text, and not empty")]
Column = Annotated[str, _WORD, MustBe("the name of a column")]
Columns = Annotated[tuple[Column, Column], BeforeValidator(_sequence), MustBe("a list of two columns")]
Name = Annotated[str, AfterValidator(_member_name), MustBe(_NAME)]
Source = Annotated[str, _WORD, AfterValidator(_home), MustBe("the path of a folder or a name on the hub")]
Label = Annotated[str, BeforeValidator(_label), _WORD, MustBe("text (true, false and 0.5 only in quotes)")]
Labels = Annotated[tuple[Label, ...], BeforeValidator(_some), MustBe("a list of one or more labels")]
LabelMap = Annotated[dict[str, Label], MustBe("a mapping of names to labels")]
File = Annotated[Path, PlainValidator(_file), MustBe("the path of a file or folder")]
Count = Annotated[int, Ge(1), MustBe("a whole number of at least 1")]
Devices = Annotated[int, Ge(0), MustBe("a whole number of at least 0")]
Seed = Annotated[int, Ge(0), Le(MAX_SEED), MustBe(f"a whole number from 0 to {MAX_SEED}")]
Weight = Annotated[float, Ge(0), AllowInfNan(False), MustBe("a number of at least 0")]
Settings = Annotated[dict[str, Any], MustBe("a mapping of keys to values")]
ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]


class _Strict(BaseModel):
    # No value may turn up in a message of pydantic's own: it may come from an environment variable.
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, hide_input_in_errors=True, protected_namespaces=()
    )


class DataConfig(_Strict):
    """The table to predict.  A relative path starts at the working directory."""

    path: File = Field(examples=["test.csv"])
    id_column: Column = "id"  # names each row
    label_column: Column | None = None  # the true labels, for metrics


class ModelConfig(_Strict):
    """One member of the ensemble.  Exactly one of ``prompt_template`` and ``text_column`` is given.

    Raises:
        ValidationError: a value is of the wrong type or out of range, or two keys do not go together.
    """

    name: Name = Field(examples=["gemma2"])  # becomes a file name, so unique whatever the case
    model_name_or_path: Source = Field(examples=["models/gemma-2-9b"])  # a folder, or a name on the hub
    revision: Text | None = None  # the hub's branch, tag or commit
    weight: Weight = 1.0  # share in the merge, relative to the other members
    prompt_template: Text | None = None  # Jinja, over the row's columns
    text_column: Column | Columns | None = None  # fed as it stands; two columns are a pair of sentences
    max_length: Count | None = None  # tokens; a longer row is cut; None: the checkpoint's own limit
    truncation_side: Literal["left", "right"] | None = None  # None: the tokenizer's own
    add_special_tokens: bool = True  # False where the template holds them already
    task_type: Literal["seq_cls"] = "seq_cls"  # sequence classification
    problem_type: ProblemType | None = None  # how logits become probabilities; None: the checkpoint's own
    label_map: LabelMap = {}  # the checkpoint's label -> the config's
    batch_size: Count | Literal["auto"] = "auto"  # rows in one forward pass
    max_num_batched_tokens: Count | None = None  # tokens in one forward pass, padding included
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"  # of the weights
    quantization_config: Settings | None = None  # such as {load_in_4bit: true}
    attn_implementation: Text | None = None  # such as sdpa, eager or flash_attention_2
    num_gpus: Devices | None = None  # for each replica; 0: the CPU; None: one if there is any GPU
    replicas: Count | Literal["auto"] = "auto"  # loaded copies that share the rows
    trust_remote_code: bool = False  # runs code from the hub, which therefore demands a revision
    model_kwargs: Settings = {}  # for the model's from_pretrained
    tokenizer_kwargs: Settings = {}  # for the tokenizer's from_pretrained

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        return _checked(self, _broken_in_member(dict(self), set()))


class EnsembleConfig(_Strict):
    """How the members' probabilities become one."""

    method: Literal["mean"] = "mean"  # the mean, by weight


class SubmissionConfig(_Strict):
    """The file to hand in, made in the image of a sample."""

    sample: File = Field(examples=["sample_submission.csv"])  # gives the columns and the order of the rows
    path: File | None = None  # where to write; None: in the output directory
    columns: LabelMap = {}  # the sample's column -> label, where they differ


Models = Annotated[tuple[ModelConfig, ...], BeforeValidator(_some), MustBe("a list of models")]


class RunConfig(_Strict):
    """Everything one run is asked for.

    Raises:
        ValidationError: a value is of the wrong type or out of range, or two keys do not go together.
    """

    data: DataConfig = Field(examples=["{path: test.csv}"])
    labels: Labels = Field(examples=["[negative, positive]"])  # the predictions' columns, in this order
    models: Models = Field(examples=["[{name: a, model_name_or_path: models/a, text_column: text}]"])
    ensemble: EnsembleConfig = EnsembleConfig()
    submission: SubmissionConfig | None = None
    output_dir: File = Field(examples=["runs/first"])  # all that the run writes
    limit: Count | None = None  # only so many rows from the top of the table
    seed: Seed = 0  # for whatever is random

    @model_validator(mode="after")
    def _check(self) -> RunConfig:
        return _checked(self, _broken(self.model_dump()))


@dataclass(frozen=True)
class LoadedConfig:
    """A config, and what it was made from: the YAML exactly as given, its file, the overrides as given."""

    config: RunConfig
    text: str
    path: Path
    overrides: tuple[str, ...]


def load_config(
    path: Path, overrides: Sequence[str] = (), *, environ: Mapping[str, str] | None = None
) -> LoadedConfig:
    """Read, override, expand and check a config.

    Args:
        path: the YAML file.
        overrides: ``a.b=value``, the value in YAML, as in ``models.gemma2.weight=0.5``; the later one wins.
        environ: what ``${NAME}`` stands for; the process's environment if None.  ``${CONFIG_DIR}`` is always
            the absolute folder of the YAML file.

    Raises:
        ConfigError: with every problem there is, each with its path in the YAML and, where known, its line.
    """
    text = read_text(path)
    document = parse(text, path)
    apply_overrides(document, overrides)
    variables = {**(os.environ if environ is None else environ), "CONFIG_DIR": str(path.absolute().parent)}
    config = _validated(document, expand(document, variables))
    if config is None or document.problems:
        raise ConfigError(document.problems)
    return LoadedConfig(config, text, path, tuple(overrides))


def _validated(document: Document, values: dict[str, Any]) -> RunConfig | None:
    problems: list[Problem] = []
    defaults = values.pop("defaults", None)
    defaults = {} if defaults is None else defaults
    if not isinstance(defaults, dict):
        problems.append((("defaults",), "must be a mapping of a model's keys to values"))
        defaults = {}
    problems += [(("defaults", *loc), sentence) for loc, sentence in _wrong_in_defaults(defaults)]
    origins = _merge_defaults(values, defaults)
    config, wrong = _try(RunConfig, values)
    for loc, sentence in (*problems, *wrong, *_broken(values)):
        # What a default got wrong is said where it stands, which makes the members' copies of it one problem.
        document.report((*origins.get(loc[:3], loc[:3]), *loc[3:]), sentence)
    return config


def _merge_defaults(values: dict[str, Any], defaults: dict[str, Any]) -> dict[Loc, Loc]:
    """Put the defaults into the models; returns where each key that came from them stands in the YAML."""
    origins: dict[Loc, Loc] = {}
    models = values.get("models")
    for index, model in enumerate(models if isinstance(models, list) else ()):
        if not isinstance(model, dict):
            continue
        skipped = {"name", *model}
        for mine, other in (("prompt_template", "text_column"), ("text_column", "prompt_template")):
            if model.get(mine) is not None:
                skipped.add(other)
        for key in defaults.keys() - skipped:
            model[key] = deepcopy(defaults[key])
            origins["models", index, key] = ("defaults", key)
    return origins


def _wrong_in_defaults(defaults: dict[str, Any]) -> Iterator[Problem]:
    if "name" in defaults:
        yield ("name",), "belongs in each model; two models cannot share it"
    member = {"model_name_or_path": "any", **defaults, "name": "any"}
    _, wrong = _try(ModelConfig, member)
    for loc, sentence in (*wrong, *_broken_in_member(member, set())):
        if loc not in {(), ("revision",)}:  # what is missing is for the models to bring
            yield loc, sentence


# What people type from habit, where difflib would not find today's key or the value has another form as well.
_OLDER: dict[type[BaseModel], dict[str, str]] = {
    RunConfig: {
        "models": "members",
        "labels": "classes label_names",
        "data": "dataset input table",
        "output_dir": "output out_dir output_path save_dir",
        "limit": "max_rows n_rows nrows num_rows",
    },
    DataConfig: {
        "path": "file csv input input_path test",
        "id_column": "id id_col",
        "label_column": "label label_col target target_column",
    },
    ModelConfig: {
        "model_name_or_path": "model model_path model_name model_id path checkpoint pretrained",
        "max_length": "max_len max_seq_len max_seq_length model_max_length",
        "prompt_template": "template prompt",
        "text_column": "text column input_column",
        "dtype": "torch_dtype precision fp16 bf16",
        "quantization_config: {load_in_4bit: true}": "load_in_4bit",
        "quantization_config: {load_in_8bit: true}": "load_in_8bit",
        "quantization_config": "quantization bnb_config",
        "attn_implementation": "attention use_flash_attention_2",
        "batch_size": "bs per_device_eval_batch_size",
        "num_gpus": "gpus n_gpus device devices device_map",
        "label_map": "label_mapping id2label label2id",
    },
    EnsembleConfig: {"weight (in each model)": "weight weights", "method": "type strategy"},
    SubmissionConfig: {"sample": "sample_path template", "path": "file output output_path"},
}
_ADAPTERS = {"adapter", "adapters", "adapter_name_or_path", "adapter_path", "lora", "lora_path", "peft"}


def _unknown_key(key: str, model: type[BaseModel]) -> str:
    today = next((new for new, old in _OLDER[model].items() if key in old.split()), None)
    if model is ModelConfig and key in _ADAPTERS:
        return "unknown key; adapters are not supported yet, merge it into the checkpoint first"
    if today:
        return f"unknown key; use {today}"
    known = [*model.model_fields, *(["defaults"] if model is RunConfig else [])]
    near = difflib.get_close_matches(key[:MAX_NAME_CHARACTERS].lower(), known, n=1)
    if near:
        return f"unknown key; did you mean {near[0]}?"
    return f"unknown key; the keys here are {', '.join(known)}"


def _expected(hint: Any) -> str:
    """What a type's values are called; ``Devices | Literal["auto"]`` is a "whole number of ... or auto"."""
    if get_origin(hint) is Annotated:
        return next(item.phrase for item in hint.__metadata__ if isinstance(item, MustBe))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_expected(part) for part in get_args(hint) if part is not NoneType)
    if get_origin(hint) is Literal:
        words = get_args(hint)
        return words[0] if len(words) == 1 else f"one of {', '.join(words)}"
    return "true or false" if hint is bool else "a mapping of keys to values"


@cache
def _hints(model: type[BaseModel]) -> dict[str, Any]:
    return get_type_hints(model, include_extras=True)


def _locate(model: type[BaseModel], loc: Loc) -> tuple[Loc, Any, type[BaseModel]]:
    """The part of pydantic's ``loc`` that stands in the YAML, the type wanted there, the model around it."""
    hint: Any = model
    owner = model
    for depth, step in enumerate(loc):
        plain = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        parts = [part for part in get_args(plain) if part is not NoneType]
        if get_origin(plain) in (Union, UnionType) and len(parts) == 1:
            plain = parts[0]
        if isinstance(plain, type) and issubclass(plain, BaseModel):
            owner = plain
            hint = _hints(plain).get(str(step))
        elif get_origin(plain) is tuple and isinstance(step, int):
            hint = parts[0]
        elif get_origin(plain) is dict and depth == len(loc) - 1:
            hint = parts[1]
        else:
            return loc[:depth], hint, owner
    return loc, hint, owner


def _try(model: type[M], values: dict[str, Any]) -> tuple[M | None, list[Problem]]:
    try:
        return model.model_validate(values), []
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
    problems: list[Problem] = []
    for detail in details:
        loc, hint, owner = _locate(model, detail["loc"])
        if detail["type"] == "broken_rules":
            problems += [((*loc, *inner), sentence) for inner, sentence in detail["ctx"]["problems"]]
        elif detail["type"] == "extra_forbidden":
            problems.append((loc, _unknown_key(str(loc[-1]), owner)))
        elif detail["type"] == "missing" and loc == detail["loc"]:  # else a list is too short
            example = owner.model_fields[str(loc[-1])].examples
            problems.append((loc, f"required, for example {loc[-1]}: {example[0] if example else '...'}"))
        else:
            problems.append((loc, f"must be {_expected(hint)}"))
    return None, problems


def _checked(value: M, problems: Iterator[Problem]) -> M:
    found = list(problems)
    if found:
        text = "; ".join(f"{place(loc)}: {sentence}" for loc, sentence in found)
        raise PydanticCustomError("broken_rules", "{text}", {"text": text, "problems": found})
    return value


# The rules that tie keys together.  They take plain data and pass over what is of the wrong type, so that one
# call of ``load_config`` shows them beside the wrong types.  No sentence holds a value.


def _broken(values: Mapping[str, Any]) -> Iterator[Problem]:
    labels = _texts(values.get("labels"))
    first: dict[str, int] = {}
    for index, label in enumerate(labels):
        if label is not None and first.setdefault(label, index) != index:
            yield ("labels", index), f"the same as labels[{first[label]}]; each label stands once"
    data = values.get("data")
    id_column = data.get("id_column", "id") if isinstance(data, dict) else None
    if isinstance(id_column, str) and id_column in first:
        yield ("labels", first[id_column]), "the same as data.id_column; predictions hold both columns"
    # With a label that cannot be read, what is not among the others may still be right.
    known = set() if None in labels else set(first)
    yield from _broken_in_models(values.get("models"), known)
    submission = values.get("submission")
    columns = submission.get("columns") if isinstance(submission, dict) else None
    for column, label in _items(columns):
        if known and label not in known:
            yield ("submission", "columns", column), "must be one of the labels"


def _broken_in_models(models: object, labels: set[str]) -> Iterator[Problem]:
    listed = models if isinstance(models, list | tuple) else ()
    members = [(index, member) for index, member in enumerate(listed) if isinstance(member, dict)]
    names: dict[str, int] = {}
    for index, member in members:
        for loc, sentence in _broken_in_member(member, labels):
            yield ("models", index, *loc), sentence
        name = member.get("name")
        if isinstance(name, str) and names.setdefault(name.lower(), index) != index:
            first = f"models[{names[name.lower()]}].name"
            yield ("models", index, "name"), f"the same as {first}; names must differ in more than their case"
    weights = [member.get("weight", 1.0) for _, member in members]
    if weights and all(isinstance(weight, int | float) and 0 <= weight < math.inf for weight in weights):
        if not any(weights):
            yield ("models",), "the weights are all 0; at least one must be more"
        elif math.isinf(sum(float(weight) for weight in weights)):
            yield ("models",), "the weights add up to more than a number can hold"


def _broken_in_member(member: Mapping[str, Any], labels: set[str]) -> Iterator[Problem]:
    inputs = [key for key in ("prompt_template", "text_column") if member.get(key) is not None]
    if not inputs:
        yield (), "prompt_template or text_column is required, for example text_column: text"
    elif len(inputs) == 2:
        yield ("prompt_template",), "give either prompt_template or text_column, not both"
    if member.get("trust_remote_code") is True and member.get("revision") is None and _is_remote(member):
        yield ("revision",), "required with trust_remote_code: true, so that no other code is run later"
    given: dict[str, str] = {}
    for key, label in _items(member.get("label_map")):
        if labels and label not in labels:
            yield ("label_map", key), "must be one of the labels"
        elif given.setdefault(label, key) != key:
            yield ("label_map", key), f"the same label as {place(('label_map', given[label]))} has"


def _is_remote(member: Mapping[str, Any]) -> bool:
    source = member.get("model_name_or_path")
    try:
        return isinstance(source, str) and not Path(_home(source)).is_dir()
    except (OSError, ValueError):  # a name that no folder can have
        return True


def _texts(values: object) -> list[str | None]:
    texts = [_label(value) for value in values] if isinstance(values, list | tuple) else []
    return [text if isinstance(text, str) else None for text in texts]


def _items(mapping: object) -> Iterator[tuple[str, str]]:
    for key, value in mapping.items() if isinstance(mapping, dict) else ():
        label = _label(value)
        if isinstance(label, str):
            yield key, label
