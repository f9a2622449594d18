"""Describe a program of the user on the parent's side, which looks at its files and never runs it."""

# No "from __future__ import annotations": pydantic would evaluate every annotation from its text again.

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from pydantic import Field

from ensemble.common.digests import FileDigests, digest_of
from ensemble.common.errors import CheckpointError
from ensemble.common.logged_command import command_problems
from ensemble.common.python_process import environment_of_commands, path_of_commands
from ensemble.common.text import quoted, shown_path
from ensemble.config import InputsConfig, MemberConfig
from ensemble.config.document import Problem
from ensemble.config.values import (
    CommandWords,
    Count,
    Devices,
    Files,
    LabelMap,
    MemorySize,
    TableColumns,
    same_label_problems,
)
from ensemble.data.formats import known_format
from ensemble.members.base import (
    Assigned,
    Draft,
    Inspection,
    MemberKind,
    OutputColumns,
    Reads,
    ResourceRequest,
)
from ensemble.members.command.interpreter import installed_for, is_python
from ensemble.members.huggingface.checkpoint.digests import any_digest

# What the command may hold in braces.
PLACEHOLDERS: Final = ("rows", "out", "device", "seed", "labels", "max_rows")

# A script's options for the file that it reads, and for the one that it writes.
_ROWS_OPTION = re.compile(r"--?(rows|input|in|test|data|table)([_-]?(path|file|csv))?")
_OUT_OPTION = re.compile(r"--?(out|output|submission|predictions?|save)([_-]?(path|file|csv))?")


class CommandSettings(InputsConfig):
    """A program of your own, in any environment: it reads a file of rows, and writes a file of probabilities."""

    task_type: Literal["command"] = "command"
    # A program and its arguments. {rows} is the file to read, {out} the file to write; {device} is cuda or cpu,
    # {seed} the run's, {labels} a JSON list of the labels, {max_rows} the number of rows in {rows}.
    command: CommandWords = Field(examples=['[python, infer.py, "{rows}", "{out}"]'])
    # Columns of {rows} beside the id; None: all of the table's but those of the true labels.
    columns: TableColumns | None = None
    format: Literal["csv", "parquet", "jsonl"] | None = None  # of {rows}; None: the table's, or else csv
    out_format: Literal["csv", "parquet"] = "csv"  # of {out}: a row for each row, with the id and all labels
    out_columns: LabelMap = Field(default_factory=dict)  # column of {out} -> label, where they differ
    activation: Literal["softmax", "sigmoid", "none"] = "softmax"  # what the values are; none: any numbers
    rows_per_call: Count | None = None  # most rows of a call, which a killed run keeps; None: all
    # Files and folders that it reads, beside files that the command names; if one changes, it runs again.
    files: Files = ()
    num_gpus: Devices | None = None  # for each replica; 0: the CPU; None: one, if there is a GPU
    # Memory of each of its GPUs, such as 8GiB; None: it has its GPUs to itself.
    gpu_memory: MemorySize | None = None
    replicas: Count | Literal["auto"] = 1  # calls at a time, with rows_per_call

    older_keys: ClassVar[Mapping[str, str]] = {
        "command": "cmd script run",
        "rows_per_call": "batch_size chunk_size",
        "files": "depends_on",
        "num_gpus": "gpus n_gpus device devices",
        "gpu_memory": "max_memory gpu_memory_gb memory vram",
    }

    def broken_rules(self, labels: Sequence[str]) -> Iterator[Problem]:
        yield from super().broken_rules(labels)
        for name in ("rows", "out"):
            if f"{{{name}}}" not in " ".join(self.command):
                yield ("command",), f"does not say {{{name}}}, which stands for a path; pass it on"
        yield from same_label_problems("out_columns", self.out_columns, labels)
        for label in set(self.out_columns) & set(labels) - set(self.out_columns.values()):
            text = f"none is left for the label {quoted(label)}, as the column of that name is for another"
            yield ("out_columns",), text
        if self.gpu_memory is not None and self.num_gpus == 0:
            yield ("gpu_memory",), "without num_gpus it runs on the CPU; set num_gpus: 1, or leave this out"
        if self.replicas != 1 and self.rows_per_call is None:
            yield ("replicas",), "one call computes all rows; set rows_per_call, or leave this out"

    @property
    def words(self) -> Iterator[tuple[str, str, bool]]:
        """Yield how each word begins (``--key=`` or nothing), its rest, and whether that names a file to watch."""
        for word in self.command:
            key = "".join(re.findall(r"^--?[\w-]+=", word))
            rest = word.removeprefix(key)
            # os.path answers for texts of any length, too; a Python is watched by its packages.
            yield key, rest, os.path.isfile(rest) and not is_python(rest)  # noqa: PTH113

    @property
    def watched(self) -> tuple[Path, ...]:
        """Return the files that the command names, and ``files``."""
        named = [Path(rest) for _, rest, is_file in self.words if is_file]
        return tuple(dict.fromkeys([*named, *self.files]))


@dataclass(frozen=True)
class CommandInspection(Inspection):
    """Add what ``{rows}`` holds, and the versions of the command's Python and its packages, if it has one."""

    id_column: str
    columns: tuple[str, ...]
    rows_format: str
    versions: Mapping[str, str]


class Command(MemberKind[CommandSettings, CommandInspection]):
    """Describe a program of the user."""

    Settings: ClassVar[type[MemberConfig]] = CommandSettings
    child: ClassVar[str] = "ensemble.members.command.child"
    activation_key: ClassVar[str] = "activation"

    @classmethod
    def draft(cls, source: str, id_column: str) -> Draft | None:
        path = Path(source)
        if path.suffix != ".py" or not path.is_file():
            return None
        options = re.findall(r"""["'](--?[A-Za-z][\w-]*)["']""", path.read_text("utf-8", "replace"))
        rows = next(filter(_ROWS_OPTION.fullmatch, options), None)
        out = next(filter(_OUT_OPTION.fullmatch, options), None)
        command = ["python", source, rows or "--rows", "{rows}", out or "--out", "{out}"]
        return Draft(
            {"task_type": "command", "command": command},
            reads_text=False,
            reads_all_columns=True,
            guessed_key="command",
            guess=(
                f"{'options as in the script' if rows and out else 'the script does not show these options'}; it "
                "must read the file {rows}, and write to {out} the ids and a column for each label"
            ),
        )

    def request(self) -> ResourceRequest:
        model = self.settings
        return ResourceRequest(
            num_gpus=model.num_gpus,
            replicas=model.replicas,
            chunk_rows=model.rows_per_call or "all",
            repeats_whole_chunks=True,
            gpu_memory=model.gpu_memory or "all",
        )

    def reads(self) -> Reads:
        return Reads(self.settings.columns or (), as_in_table=True, any_type=True, ids=True)

    def sources(self) -> tuple[str, ...]:
        return tuple(map(str, self.settings.watched))

    def inspect(self, columns: OutputColumns) -> CommandInspection:
        model = self.settings
        program = shutil.which(model.command[0], path=path_of_commands())
        problems = [f"command: {text}" for text in command_problems(model.command, PLACEHOLDERS)]
        problems += [f"files: {path}: no such file or folder" for path in model.files if not path.exists()]
        problems += [
            f"command: {word}: no such file; a relative path starts at the working directory"
            for word in model.command[1:2]
            if is_python(model.command[0]) and word.endswith(".py") and not Path(word).exists()
        ]
        if problems or program is None:
            raise CheckpointError(problems)
        of_table = known_format(columns.table)
        rows_format = "csv" if of_table is None or of_table.write is None else of_table.extensions[0][1:]
        return CommandInspection(
            activation=model.activation,
            label_order=tuple(range(len(columns.labels))),
            summary=f"runs {' '.join(self._named_words()[:3])}",
            id_column=columns.id_column,
            columns=columns.of_rows(model.columns or ()),
            rows_format=model.format or rows_format,
            versions=installed_for(program) if is_python(program) else {},
        )

    def warnings(self, inspected: CommandInspection) -> Iterator[str]:
        listed_files = [path.absolute() for path in self.settings.files]
        for _, rest, _ in self.settings.words:
            if os.path.isdir(rest) and Path(rest).absolute() not in listed_files:  # noqa: PTH112
                yield f"command: changes in {shown_path(Path(rest))} go unnoticed unless files lists it"

    def fingerprint(self, inspected: CommandInspection, assigned: Assigned) -> Mapping[str, object]:
        model = self.settings
        return {
            "command": self._named_words(),
            "columns": inspected.columns,
            "format": inspected.rows_format,
            **model.model_dump(include={"out_format", "out_columns", "activation"}),
            **{f"{name} of its Python": version for name, version in inspected.versions.items()},
        }

    def content(self, inspected: CommandInspection, files: FileDigests) -> Mapping[str, str]:
        """Return the digests of files by their names, those of the same name together."""
        digests: dict[str, str] = {}
        for path in self.settings.watched:
            digests[path.name] = digest_of([digests.get(path.name), any_digest(path, files)])
        return digests

    def worker_settings(
        self, inspected: CommandInspection, assigned: Assigned, offload_folder: Path | None
    ) -> Mapping[str, Any]:
        """Return settings in which files stand by themselves, so that other paths can take their places."""
        model = self.settings
        return {
            "command": [{"key": key, "rest": rest} for key, rest, _ in model.words],
            "columns": list(inspected.columns),
            "rows_format": inspected.rows_format,
            **model.model_dump(include={"out_format", "out_columns"}),
            "id_column": inspected.id_column,
            "environment": environment_of_commands(),
        }

    def _named_words(self) -> list[str]:
        """Return the words of the command with the names of files alone, wherever they are."""
        program, *words = (
            key + (Path(rest).name if is_file else rest) for key, rest, is_file in self.settings.words
        )
        return ["python" if is_python(program) else program, *words]
