"""A config with all that is installed to extend it: what every command reads a YAML file with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ensemble.common.extensions import SettingsByName
from ensemble.config import ConfigSource, LoadedConfig, load_config
from ensemble.members.registry import KINDS

if TYPE_CHECKING:
    from ensemble.common.extensions import Registry
    from ensemble.merging.methods.base import MergeMethod


def load(
    sources: Path | Sequence[ConfigSource],
    overrides: Sequence[str] = (),
    *,
    environ: Mapping[str, str] | None = None,
    texts: Sequence[str] | None = None,
) -> LoadedConfig:
    """Read and check a config of one source or several, see ``load_config``.

    Raises:
        ConfigError: with every problem there is.
    """
    methods, kinds = SettingsByName(_merge_methods), SettingsByName(lambda: KINDS)
    several = [sources] if isinstance(sources, Path) else sources
    return load_config(several, overrides, methods, kinds, environ, texts)


def _merge_methods() -> Registry[MergeMethod]:
    # With numpy, so only for a config that names a method: a typo in a key shall be told at once.
    from ensemble.merging.methods import METHODS

    return METHODS
