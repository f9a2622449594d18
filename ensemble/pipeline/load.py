"""Load configs with the installed merge methods and member kinds, for all commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ensemble.common.extensions import SettingsByName
from ensemble.config import ConfigSource, LoadedConfig, load_config
from ensemble.members.registry import KINDS
from ensemble.merging.methods import METHODS
from ensemble.pipeline.remote import with_copies


def load(
    sources: Path | Sequence[ConfigSource],
    overrides: Sequence[str] = (),
    *,
    environ: Mapping[str, str] | None = None,
    texts: Sequence[str] | None = None,
) -> LoadedConfig:
    """Read and check a config (see ``load_config``), and copy in what it names by address (see ``with_copies``)."""
    source_list = [sources] if isinstance(sources, Path) else sources
    methods, kinds = SettingsByName(METHODS), SettingsByName(KINDS)
    return with_copies(load_config(source_list, overrides, methods, kinds, environ, texts))
