"""Define the base of all mappings of a config, and the types of values with their names in error messages."""

# No "from __future__ import annotations": pydantic would evaluate every annotation from its text again.

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeAlias, get_origin

from annotated_types import Ge, Gt, Le, Len
from pydantic import (
    AfterValidator,
    AllowInfNan,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Discriminator,
    GetCoreSchemaHandler,
    PlainValidator,
    StringConstraints,
    Tag,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from ensemble.common.text import listed
from ensemble.config.document import KeyProblems, Problem, place

MAX_NAME_CHARACTERS: Final = 100
MAX_COUNT: Final = 2**31 - 1
MAX_SEED: Final = 2**32 - 1
MAX_BYTES: Final = 2**63 - 1
AS_TIME_ALLOWS: Final = "as_time_allows"
GPU_NUMBER: Final = "0|[1-9][0-9]{0,5}"


@dataclass(frozen=True)
class MustBe:
    """Name a type's values in an error: "must be <phrase>".

    With ``holder``, the type of a mapping or list whose items have their own messages, the phrase is used only for
    values of another type and for an empty list. A type of tuples takes lists, too, which is all that YAML has.
    """

    phrase: str
    holder: type | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        message = f"must be {self.phrase}"
        schema = handler(source)
        if get_origin(source) is tuple:
            schema = core_schema.no_info_before_validator_function(_as_tuple, schema)
        if self.holder is None:
            return core_schema.custom_error_schema(schema, "must_be", custom_error_message=message)

        def check(value: object) -> object:
            if not isinstance(value, self.holder or object) or value in ([], ()):
                raise PydanticCustomError("must_be", message)
            return value

        return core_schema.no_info_before_validator_function(check, schema)


class StrictConfig(BaseModel):
    """A mapping of known keys; the base class also for mappings in the keys of a kind or a merge method."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        hide_input_in_errors=True,  # a value may come from an environment variable
        protected_namespaces=(),
        defer_build=True,  # at first use: with its search for plugins, pydantic would slow down --help
    )

    # By key, what people type instead out of habit, separated by spaces; only what is not similar to the key.
    older_keys: ClassVar[Mapping[str, str]] = {}
    # Pairs of keys of which one excludes the other: a model's own key replaces the other one of the defaults, and a
    # later file's key that of an earlier file.
    alternatives: ClassVar[tuple[tuple[str, str], ...]] = ()

    def broken_rules(self, labels: Sequence[str]) -> Iterator[Problem]:
        """Yield a place below this mapping and a sentence without a value for each broken rule between keys.

        ``labels`` are the config's; empty if they are unknown.
        """
        return iter(())

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, values: Any) -> Any:
        """Take a null for a missing key; an unknown key stays, to be refused."""
        if not isinstance(values, dict):
            return values
        return {
            key: value for key, value in values.items() if value is not None or key not in cls.model_fields
        }

    @model_validator(mode="after")
    def _check_rules(self, info: ValidationInfo) -> Self:
        # In one validator, because pydantic stops after the first validator that fails.
        problems = [*self.broken_rules(info.context or ())]
        if problems:
            raise KeyProblems(problems)
        return self


def with_home(text: str) -> str:
    """Return the text with the home folder for a "~" at the beginning."""
    # Other text stays as it is, because Path would change names of models on the hub.
    try:
        return str(Path(text).expanduser()) if text.startswith("~") else text
    except RuntimeError as error:  # ~somebody who is not on this machine
        raise ValueError(str(error)) from None


def _source(value: object) -> str:
    # "path: |" adds a line end to the name, which would break messages.
    is_text = isinstance(value, str) and value.strip()
    if not is_text or re.search(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", str(value)):
        raise ValueError
    return with_home(str(value))


def _path(value: object) -> Path:
    return value if isinstance(value, Path) else Path(_source(value))


def as_label(value: object) -> object:
    """Return a whole number as text; anything else as it is."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def same_label_problems(
    key: str, label_by_place: Mapping[Any, str], labels: Collection[str], advice: str = ""
) -> Iterator[Problem]:
    """Yield places in the mapping or list at ``key`` with an unknown label, or with the label of another place.

    ``advice`` is added to the sentence about an unknown label; no labels: they are unknown.
    """
    first_place: dict[str, Any] = {}
    for where, label in label_by_place.items():
        first = first_place.setdefault(label, where)
        if labels and label not in labels:
            yield (key, where), f"must be one of the labels{advice}"
        elif first != where:
            yield (key, where), f"the same label as {place((key, first))} has"


def foreign_label(labels: Collection[object]) -> str:
    """Return the sentence about a key that should be one of the config's labels."""
    return f"is none of the labels, which are {listed([*map(str, labels)])}"


def foreign_labels(key: str, names: Iterable[str], labels: Collection[str]) -> Iterator[Problem]:
    """Yield the keys of the mapping at ``key`` that are none of the labels; no labels: they are unknown."""
    for name in names:
        if labels and name not in labels:
            yield (key, name), foreign_label(labels)


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def is_member_name(name: str) -> bool:
    """Return whether a member can have this name."""
    # Names are used for files, also on disks for Windows, and in shell commands.
    fits = re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_-])?", name)
    is_taken = re.fullmatch(r"ensemble|(con|prn|aux|nul|com\d|lpt\d)(\..*)?", name.lower())
    return bool(fits) and not is_taken and len(name) <= MAX_NAME_CHARACTERS


def _member_name(name: str) -> str:
    if not is_member_name(name):
        raise ValueError
    return name


def _seconds(value: object) -> float:
    """Parse 1h30m, 45s or a plain number of seconds."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = float(value)
    else:
        units = r"(?:(\d{1,9})h\s*)?(?:(\d{1,9})m\s*)?(?:(\d{1,9})s)?"
        match = re.fullmatch(units, str(value).strip().lower())
        if match is None or not any(match.groups()):
            raise ValueError
        hours, minutes, single = (int(part or 0) for part in match.groups())
        seconds = 3600.0 * hours + 60.0 * minutes + single
    if not 0 <= seconds < inf:
        raise ValueError
    return seconds


def _rule_in_range(rule: dict[str, float | str]) -> dict[str, float | str]:
    for name, number in rule.items():
        if isinstance(number, str):
            if name != "share":
                raise ValueError
        elif name != "entropy_above" and not 0 < number <= 1:
            raise ValueError
    return rule


def takes_time_left(when: Mapping[str, object] | None) -> bool:
    """Return whether a ``when`` asks for as many rows as there is time for."""
    return when is not None and AS_TIME_ALLOWS in when.values()


def _device(key: object) -> int | str:
    if key != "cpu" and not re.fullmatch(GPU_NUMBER, str(key)):
        raise ValueError
    return "cpu" if key == "cpu" else int(str(key))


def _weight_form(value: object) -> str:
    if isinstance(value, dict):
        return "by label"
    return "by bin" if isinstance(value, list | tuple) else "number"


def mapping_or_text(value: object) -> str:
    """Return the tag of a value that may be a mapping or a text."""
    return "mapping" if isinstance(value, dict | BaseModel) else "text"


def _rising(value: tuple[Any, ...]) -> tuple[Any, ...]:
    if not value or any(first >= second for first, second in pairwise(value)):
        raise ValueError
    return value


def _distinct(value: tuple[Any, ...]) -> tuple[Any, ...]:
    if not value or len(set(value)) < len(value):
        raise ValueError
    return value


# Not Field(...): in older pydantic, keys that share a Field also share its default.
_WORD = StringConstraints(pattern=r"\S")
_NAME = (
    f"made of letters, digits, '.', '_' and '-' (at most {MAX_NAME_CHARACTERS}; no '.' first or last, no '-' "
    "first; not 'ensemble', nor a device of Windows such as 'con')"
)
_ONE_RULE = (
    "one of {margin_below: m} with m above 0 and up to 1, {entropy_above: e} with e in nats, at least 0, "
    f"{{share: s}} with s above 0 and up to 1, and {{share: {AS_TIME_ALLOWS}}}"
)

Sha256 = Annotated[
    str,
    StringConstraints(pattern=r"^[0-9A-Fa-f]{64}$"),
    MustBe("all 64 hexadecimal digits of a SHA-256, as sha256sum prints them"),
]
Finite = Annotated[float, AllowInfNan(False), MustBe("a number")]
Ends = Annotated[tuple[Finite, Finite], MustBe("a list of two numbers")]
RisingNumbers = Annotated[
    tuple[Finite, ...], AfterValidator(_rising), MustBe("a list of numbers, each more than the one before")
]
Probabilities = Annotated[
    tuple[Annotated[float, Ge(0), Le(1), AllowInfNan(False)], ...], MustBe("a list of numbers from 0 to 1")
]
DistinctNumbers = Annotated[
    tuple[Finite, ...], AfterValidator(_distinct), MustBe("a list of numbers, of which no two are equal")
]
Text = Annotated[str, _WORD, MustBe("text, and not empty")]
Column = Annotated[str, _WORD, MustBe("the name of a column")]
Columns = Annotated[tuple[Column, Column], MustBe("a list of two columns")]
TableColumns = Annotated[tuple[Column, ...], MustBe("a list of columns of the table", list)]
Marker = Annotated[str, MustBe("text")]
Method = Annotated[str, _WORD, MustBe("the name of a merge method, such as mean")]
TaskType = Annotated[str, _WORD, MustBe("the name of a kind of member, such as seq_cls")]
Name = Annotated[str, AfterValidator(_member_name), MustBe(_NAME)]
Source = Annotated[str, _WORD, BeforeValidator(_source), MustBe("the path of a folder or a name on the hub")]
Sources = Annotated[tuple[Source, ...], MustBe("a list of folders or names on the hub", list)]
Label = Annotated[str, BeforeValidator(as_label), _WORD, MustBe("text (true, false and 0.5 only in quotes)")]
Labels = Annotated[tuple[Label, ...], MustBe("a list of one or more labels", list)]
LabelPair = Annotated[tuple[Label, Label], MustBe("a list of two labels")]
LabelMap = Annotated[dict[str, Label], MustBe("a mapping of names to labels", dict)]
LabelTexts = Annotated[dict[str, Label], MustBe("a mapping of labels to texts", dict)]
File = Annotated[Path, PlainValidator(_path), MustBe("the path of a file")]
FileOrFolder = Annotated[Path, PlainValidator(_path), MustBe("the path of a file or folder")]
CommandWords = Annotated[
    tuple[Text, ...],
    MustBe('a list of a program and its arguments, such as [python, script.py, "{out}"]', list),
]
Files = Annotated[tuple[File, ...], MustBe("a list of files and folders", list)]
Folder = Annotated[Path, PlainValidator(_path), MustBe("the path of a folder")]
Address = Annotated[
    str,
    StringConstraints(pattern=r"^(s3|gs|hf|file)://\S(.*\S)?$"),
    MustBe("an address such as s3://bucket/folder, or of gs://, hf:// or file://"),
]
Count = Annotated[int, Ge(1), Le(MAX_COUNT), MustBe("a whole number of at least 1")]
# torch refuses less than 20 and older releases 20 itself.
SplitSize = Annotated[int, Ge(21), Le(MAX_COUNT), MustBe("a whole number of at least 21")]
Retries = Annotated[int, Ge(0), Le(100), MustBe("a whole number from 0 to 100")]
Devices = Annotated[int, Ge(0), MustBe("a whole number of at least 0")]
Seed = Annotated[int, Ge(0), Le(MAX_SEED), MustBe(f"a whole number from 0 to {MAX_SEED}")]
Part = Annotated[float, Gt(0), Le(1), MustBe("a number above 0, up to 1")]
Number = Annotated[float, Ge(0), AllowInfNan(False), MustBe("a number of at least 0")]
Chance = Annotated[float, Ge(0), Le(1), AllowInfNan(False), MustBe("a number from 0 to 1")]
Thresholds = Annotated[
    Annotated[Chance, Tag("text")]
    | Annotated[dict[str, Chance], Len(1), MustBe("a mapping of labels to numbers", dict), Tag("mapping")],
    Discriminator(mapping_or_text),
]
_MAX_FACTOR = 1e6
_MIN_TEMPERATURE = 1e-6
Factor = Annotated[
    float,
    Ge(-_MAX_FACTOR),
    Le(_MAX_FACTOR),
    AllowInfNan(False),
    MustBe(f"a number from -{_MAX_FACTOR:.0f} to {_MAX_FACTOR:.0f}"),
]
Share = Annotated[float, Gt(0), Le(1e6), AllowInfNan(False), MustBe("a number of more than 0, up to 1000000")]
Factors = Annotated[dict[str, Factor], MustBe("a mapping of labels to numbers", dict)]
Values = Annotated[
    dict[str, Finite], Len(1), MustBe("a mapping of labels to numbers, such as {tie: 1.0}", dict)
]
Temperature = Annotated[
    float,
    Ge(_MIN_TEMPERATURE),
    Le(_MAX_FACTOR),
    AllowInfNan(False),
    MustBe(f"a number of more than 0 (from {_MIN_TEMPERATURE:f} to {_MAX_FACTOR:.0f})"),
]
# By label, or by length bin.
AnyWeight: TypeAlias = float | dict[str, float] | tuple[float, ...]
Weight = Annotated[
    Annotated[Number, Tag("number")]
    | Annotated[dict[str, Number], Tag("by label")]
    | Annotated[tuple[Number, ...], BeforeValidator(_as_tuple), Tag("by bin")],
    Discriminator(_weight_form),
    MustBe("a number of at least 0, or one for each label or each of ensemble.length_bins", object),
]
When = Annotated[
    dict[
        Annotated[str, StringConstraints(pattern="^(margin_below|entropy_above|share)$")],
        Number | Literal["as_time_allows"],
    ],
    Len(1, 1),
    AfterValidator(_rule_in_range),
    MustBe(_ONE_RULE),
]
LengthBins = Annotated[
    tuple[Annotated[int, Ge(1), Le(MAX_BYTES)], ...],
    AfterValidator(_rising),
    MustBe("a list of whole numbers of at least 1, each more than the one before"),
]
Duration = Annotated[float, PlainValidator(_seconds), MustBe("a time such as 90s, 10m or 8h30m")]
TimeLimit = Annotated[
    float, PlainValidator(_seconds), Gt(0), MustBe("a time of more than 0s, such as 10m or 8h30m")
]
# Workers send a heartbeat every two seconds.
HangTimeout = Annotated[
    float, PlainValidator(_seconds), Ge(5), MustBe("a time of at least 5s, such as 90s or 10m")
]
MaxMemory = Annotated[
    dict[Annotated[int | str, PlainValidator(_device)], Annotated[ByteSize, Ge(0), Le(MAX_BYTES)]],
    Len(1),
    MustBe("a mapping of GPU numbers and cpu to sizes, such as {0: 14GiB, cpu: 30GiB}"),
]
MemorySize = Annotated[
    ByteSize, Ge(1), Le(MAX_BYTES), MustBe("a size such as 8GiB or 500MB (GB is 10**9 bytes, GiB 2**30)")
]
DeviceList = Annotated[
    tuple[Annotated[int, Ge(0)] | Annotated[str, StringConstraints(pattern="^(GPU|MIG)-")], ...],
    Len(1),
    MustBe("a list of GPU numbers or UUIDs, such as [0, 1] or [GPU-5f3c...]"),
]
Settings = Annotated[dict[str, Any], MustBe("a mapping of keys to values")]
Names = Annotated[tuple[Text, ...], MustBe("a list of names", list)]
Versions = Annotated[dict[str, Text], MustBe("a mapping of names to versions in quotes", dict)]
Launcher = Annotated[str, _WORD, MustBe("the name of a launcher")]
_TRACKER: Final = {"enum": ["mlflow", "trackio", "wandb"]}
Trackers = Annotated[
    tuple[Literal["mlflow", "trackio", "wandb"], ...],
    AfterValidator(lambda names: tuple(dict.fromkeys(names))),
    BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
    WithJsonSchema({"anyOf": [_TRACKER, {"type": "array", "items": _TRACKER}]}),
    MustBe("mlflow, trackio or wandb, or a list of these"),
]
LauncherSettings = Annotated[
    # Settings are checked by the launcher.
    dict[str, Annotated[Any, WithJsonSchema({"type": ["object", "null"]})]],
    Len(1, 1),
    MustBe("a mapping of one such name to its settings"),
]
ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]


def weight_text(weight: AnyWeight) -> str:
    """Return a weight as text, or those by label or length bin."""
    if isinstance(weight, dict):
        return ", ".join(f"{label} {number:.6g}" for label, number in weight.items())
    if isinstance(weight, tuple):
        return f"[{', '.join(f'{number:.6g}' for number in weight)}]"
    return f"{weight:.6g}"


def weight_numbers(weight: object) -> list[Any]:
    """Return all numbers of a weight in any of its forms, also as read from JSON."""
    if isinstance(weight, dict):
        return [*weight.values()]
    return [*weight] if isinstance(weight, list | tuple) else [weight]
