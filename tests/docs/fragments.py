"""Configs and parts of configs in pages, checked as every config is; a part may leave out required keys."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import yaml

from ensemble.common.errors import EnsembleError
from ensemble.common.extensions import SettingsByName
from ensemble.config import load_config
from ensemble.config.schema import (
    DataConfig,
    EnsembleConfig,
    RunConfig,
    SubmissionConfig,
    TrainConfig,
    TrainingConfig,
)
from ensemble.members.registry import KINDS
from ensemble.merging.methods import METHODS
from tests.docs.pages import Block

_FILE = re.compile(r"[\w./${}-]+\.ya?ml")
_MISSING = re.compile(r"(: | is )required, for example ")
_UNKNOWN = re.compile(r": unknown (task_type|method)\b")
_WHOLE = {"data", "labels", "models", "output_dir"}
_SECTIONS: dict[str, Collection[str]] = {
    "train": TrainConfig.model_fields,
    "data": DataConfig.model_fields,
    "training": TrainingConfig.model_fields,
    "submission": SubmissionConfig.model_fields,
    "ensemble": EnsembleConfig.model_fields,
}


class AnyVariable(Mapping[str, str]):
    """An environment in which every variable is set."""

    def __getitem__(self, name: str) -> str:
        return f"value-of-{name}"

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __contains__(self, name: object) -> bool:
        return True


def is_config(block: Block) -> bool:
    """Return whether a block is a config or a part of one: YAML without a title, or with a file's name as title."""
    return block.language == "yaml" and (not block.title or _FILE.fullmatch(block.title) is not None)


def problems(block: Block, extensions: Collection[str] = ()) -> list[str]:
    """Return what is wrong with a config or a part of one, with page and line.

    Args:
        extensions: names of kinds and merge methods that the page's own packages add.
    """
    try:
        document = yaml.safe_load(_content(block))
        text = _as_config(document, _content(block))
    except yaml.YAMLError as error:
        return [f"{block.place}: not valid YAML: {' '.join(str(error).split())}"]
    if document is None:
        return []  # a comment for editors
    is_whole = isinstance(document, dict) and document.keys() >= _WHOLE
    names_extension = any(re.search(rf"(task_type|method): {name}\b", text) for name in extensions)
    # So that lines are those of the page.
    padded = "\n" * (block.line - 1 - (text.count("\n") - block.text.count("\n"))) + text
    try:
        load_config(
            [Path("block.yaml")],
            (),
            SettingsByName(METHODS),
            SettingsByName(KINDS),
            AnyVariable(),
            texts=[padded],
        )
    except EnsembleError as error:
        name = block.place.partition(",")[0]
        return [
            f"{name}: {problem.removeprefix('block.yaml: ')}"
            for problem in error.problems
            if is_whole or not _MISSING.search(problem)
            if not (names_extension and _UNKNOWN.search(problem))
        ]
    return []


def _content(block: Block) -> str:
    """Return a block's text; the line by which a notebook writes a file is a comment."""
    return f"# {block.text}" if block.text.startswith("%%writefile ") else block.text


def _as_config(document: object, text: str) -> str:
    """Return the text under the keys under which it stands in a config; lines are added before it only."""
    if isinstance(document, list):
        return f"models:\n{text}"
    if not isinstance(document, dict):
        return text
    kinds = {name: KINDS.load(name).Settings.model_fields for name in KINDS.built_in}
    owners: dict[str, Collection[str]] = {
        "": {*RunConfig.model_fields, "defaults"},
        **{f"models {name}": fields for name, fields in kinds.items()},
        **_SECTIONS,
    }
    # A part belongs where all its keys are known, or else most of them: the others are told of as unknown.
    owner = max(owners, key=lambda name: len(document.keys() & {*owners[name]}))
    if not owner:
        return text
    if owner.startswith("models "):
        kind = owner.removeprefix("models ") if "task_type" not in document else ""
        first = f"- task_type: {kind}\n" if kind else "-\n"
        return f"models:\n{first}{textwrap.indent(text, '  ')}"
    if owner == "train":
        return f"models:\n- train:\n{textwrap.indent(text, '    ')}"
    return f"{owner}:\n{textwrap.indent(text, '  ')}"
