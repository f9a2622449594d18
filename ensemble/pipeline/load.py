"""Load configs with the installed merge methods and member kinds, for all commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ensemble.common.extensions import SettingsByName
from ensemble.config import ConfigSource, LoadedConfig, load_config
from ensemble.members.registry import KINDS
from ensemble.merging.methods import METHODS


def load(
    sources: Path | Sequence[ConfigSource],
    overrides: Sequence[str] = (),
    *,
    environ: Mapping[str, str] | None = None,
    texts: Sequence[str] | None = None,
) -> LoadedConfig:
    """Read and check a config of one source or several; see ``load_config``."""
    source_list = [sources] if isinstance(sources, Path) else sources
    return load_config(source_list, overrides, SettingsByName(METHODS), SettingsByName(KINDS), environ, texts)
