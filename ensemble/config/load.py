"""From YAML files to a ``LoadedConfig``: read the files, have them checked, and keep what they said."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

from ensemble.common.errors import ConfigError
from ensemble.common.redact import Redactor
from ensemble.config.check import Kinds, Methods, check_documents
from ensemble.config.document import Document, one_line
from ensemble.config.mapping import MappingConfig
from ensemble.config.overrides import variables_of, with_folders
from ensemble.config.schema import RunConfig
from ensemble.config.yamlfile import dump, parse, read_text

ConfigSource: TypeAlias = Path | MappingConfig


@dataclass(frozen=True)
class LoadedConfig:
    """A config, and what it was made from: its files or mappings and the overrides, as given.

    ``whole`` is one YAML file that gives the same config from any folder: the file exactly as it is where nothing
    else was given, else files and overrides merged.  Paths in it are still relative to the working directory, and
    no name but ``${CONFIG_DIR}`` is replaced.  ``text`` is the file exactly as it is; of several, and of one
    that names ``${CONFIG_DIR}``, what ``whole`` is; with the overrides it gives the same config.  Files as they are
    may hold secrets.
    """

    config: RunConfig
    text: str
    whole: str
    sources: tuple[ConfigSource, ...]
    overrides: tuple[str, ...]
    texts: tuple[str, ...] = field(repr=False)  # of the sources
    document: Document = field(repr=False)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The sources that are files."""
        return tuple(source for source in self.sources if isinstance(source, Path))

    @cached_property
    def redactor(self) -> Redactor:
        """For whatever is printed or written of the run."""
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
        sources: YAML files, or mappings in their place; later ones override earlier ones, see ``overlays``.
        overrides: ``a.b=value``, the value in YAML, as in ``models.gemma2.weight=0.5``; the later one wins.
        merge_methods: the keys below ``ensemble`` by the name of the method that they go with.
        member_kinds: the keys of a model by the ``task_type`` that they go with.
        environ: what ``${NAME}`` stands for; the process's environment if None.  ``${CONFIG_DIR}`` is always
            the absolute folder of the YAML file in which it stands; of a mapping, the working directory.
        texts: what the files held when they were read before; None: they are read now.

    Raises:
        ConfigError: with every problem there is, each with its path in the YAML and, where known, its line.
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
    variables = variables_of(sources, os.environ if environ is None else environ)
    document, config = check_documents(documents, variables, overrides, merge_methods, member_kinds)
    parts = [*names, *(f"--set {one_line(override)}" for override in overrides)]
    names_folder = "${CONFIG_DIR}" in read[0]  # which elsewhere would be another one
    whole = read[0]
    if len(parts) > 1 or names_folder:
        # By value: put into the text, *** would be an alias.
        redactor = Redactor(os.environ, config.model_dump())
        whole = f"# Made of {', '.join(parts)}\n{dump(redactor.document(with_folders(document, variables)))}"
    return LoadedConfig(
        config=config,
        text=whole if len(read) > 1 or names_folder else read[0],
        whole=whole,
        sources=tuple(sources),
        overrides=tuple(overrides),
        texts=tuple(read),
        document=document,
    )
