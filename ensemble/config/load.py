"""Load YAML files or mappings, check them, and keep what they were made of."""

from __future__ import annotations

import numbers
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from ensemble.common.errors import ConfigError
from ensemble.common.redact import Redactor
from ensemble.common.remote_files import Copy
from ensemble.config.check import Kinds, Methods, check_documents
from ensemble.config.document import (
    MAPPING,
    MAX_DEPTH,
    NOT_TEXT,
    Document,
    Loc,
    dump,
    one_line,
    parse,
    place,
    read_text,
    shown,
)
from ensemble.config.schema import MemberConfig, RunConfig


@dataclass(frozen=True)
class MappingConfig:
    """Hold a mapping, such as a dict in Python, as the text of a YAML file in the working directory."""

    text: str

    def __str__(self) -> str:
        return MAPPING


ConfigSource: TypeAlias = Path | MappingConfig


@dataclass(frozen=True)
class TrainedMember:
    """Say which rows the models of a trained member have seen.

    Attributes:
        rows: the file of the rows that it was trained on, see ``data.trained_rows``.
        by_fold: the member for a table with such rows: each fold's model is a view.
        folds: by the name of such a view, the fold whose rows its model has not seen; None: it has seen all rows.
        oof_run: the ``output_dir`` of the run that has predicted these rows.
    """

    rows: Path
    by_fold: MemberConfig
    folds: Mapping[str, int | None]
    oof_run: Path


@dataclass(frozen=True)
class LoadedConfig:
    """Hold a config and its sources.

    Attributes:
        text: the file exactly as it is, or ``whole`` if there are several or the file names ``${CONFIG_DIR}``; with
            the overrides it gives the same config. A file as it is may hold secrets.
        whole: one YAML file that gives the same config in any folder: the file exactly as it is, or files and
            overrides merged. Its paths are still relative to the working directory, and only ``${CONFIG_DIR}`` is
            replaced.
        texts: of the sources.
        copies: of the objects that the config names by their addresses; ``config`` names the copies.
        submission_address: where the submission is copied to at the end; None: nowhere.
        trained: by name, members of ``config`` that a training has made.
        untrained: by name, why other members of ``config`` could not be trained.
        out_of_time: those of them for which only the time was lacking.
        outdated: by name, of members with finished trainings that a change outdates, which folds are to be trained
            (None: all rows), and why; an empty reason: that was never trained.
    """

    config: RunConfig
    text: str
    whole: str
    sources: tuple[ConfigSource, ...]
    overrides: tuple[str, ...]
    texts: tuple[str, ...] = field(repr=False)
    document: Document = field(repr=False)
    copies: tuple[Copy, ...] = ()
    submission_address: str | None = None
    trained: Mapping[str, TrainedMember] = field(default_factory=dict)
    untrained: Mapping[str, str] = field(default_factory=dict)
    out_of_time: frozenset[str] = frozenset()
    outdated: Mapping[str, Mapping[int | None, str]] = field(default_factory=dict)

    @property
    def paths(self) -> tuple[Path, ...]:
        """Return the sources that are files."""
        return tuple(source for source in self.sources if isinstance(source, Path))

    @cached_property
    def redactor(self) -> Redactor:
        """Return the redactor for everything that is printed or written about the run."""
        return Redactor(os.environ, self.config.model_dump())


def load_config(
    sources: Sequence[ConfigSource],
    overrides: Sequence[str],
    merge_methods: Methods,
    member_kinds: Kinds,
    environ: Mapping[str, str] | None = None,
    texts: Sequence[str] | None = None,
) -> LoadedConfig:
    """Read, merge, override, expand and check a config.

    Args:
        sources: YAML files or mappings; later ones override earlier ones, see ``overlays``.
        overrides: ``a.b=value`` with a value in YAML, as in ``models.gemma2.weight=0.5``; the later one wins.
        merge_methods: the settings below ``ensemble``, by the name of the method.
        member_kinds: the settings of a model, by its ``task_type``.
        environ: the values of ``${NAME}``; None: the process's environment. ``${CONFIG_DIR}`` is always the
            absolute folder of the YAML file that names it; in a mapping, the working directory.
        texts: the files' texts, if they were read before.

    Raises:
        ConfigError: with every problem, each with its path in the YAML and, if known, its line.
    """
    names = [one_line(str(source)) for source in sources]
    read: list[str] = []
    documents: list[Document] = []
    unreadable: list[str] = []
    for number, source in enumerate(sources):
        try:
            if isinstance(source, MappingConfig):
                read.append(source.text)
            elif texts is not None:
                read.append(texts[number])
            else:
                read.append(read_text(source))
            documents.append(parse(read[-1], source, names, number))
        except ConfigError as error:
            unreadable += error.problems
    if unreadable:
        raise ConfigError(unreadable)
    variables = os.environ if environ is None else environ
    document, config = check_documents(documents, variables, overrides, merge_methods, member_kinds)
    names_folder = "${CONFIG_DIR}" in read[0]  # another folder if the text is copied
    whole = read[0]
    if len(document.sources) > 1 or names_folder:
        # Redacted as values: in the text, *** would be an alias.
        redactor = Redactor(os.environ, config.model_dump())
        whole = f"# Made of {', '.join(document.sources)}\n{dump(redactor.document(document.data))}"
    return LoadedConfig(
        config=config,
        text=whole if len(read) > 1 or names_folder else read[0],
        whole=whole,
        sources=tuple(sources),
        overrides=tuple(overrides),
        texts=tuple(read),
        document=document,
    )


def mapping_config(mapping: Mapping[Any, Any]) -> MappingConfig:
    """Write a mapping as YAML; raise ConfigError with the first key that holds what YAML cannot hold."""
    return MappingConfig(dump(_plain(mapping, ())))


def _plain(value: object, loc: Loc) -> Any:
    if len(loc) > MAX_DEPTH:  # a list may hold itself
        raise ConfigError(f"{place(loc[:3])}: nested more than {MAX_DEPTH} levels deep")
    if type(value).__name__ in ("bool", "bool_"):  # also NumPy's, without importing it
        return bool(value)
    if isinstance(value, numbers.Real):  # also NumPy's
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    if isinstance(value, list | tuple):
        return [_plain(item, (*loc, index)) for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            is_count = type(key) is int and key >= 0  # the number of a GPU or a label
            if not is_count and (not isinstance(key, str) or re.search(NOT_TEXT, key)):
                raise ConfigError(f"{place(loc)}: the key {shown(repr(key))} must be text")
        return {key: _plain(item, (*loc, str(key))) for key, item in value.items()}
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if text is None or (isinstance(text, str) and not re.search(NOT_TEXT, text)):
        return text if text is None else str.__str__(text)
    content = "this text" if isinstance(text, str) else f"a value of type {type(value).__name__}"
    raise ConfigError(
        f"{place(loc)}: YAML cannot hold {content}; give texts, numbers, lists and dicts of them"
    )
