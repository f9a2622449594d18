"""A config with all that is installed to extend it: what every command reads a YAML file with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ensemble.config import Extensions, LoadedConfig, load_config
from ensemble.members.registry import KindSettings


def load(
    path: Path, overrides: Sequence[str] = (), *, environ: Mapping[str, str] | None = None
) -> LoadedConfig:
    """Read and check a config, see ``load_config``.

    Raises:
        ConfigError: with every problem there is.
    """
    return load_config(path, overrides, Extensions(member_kinds=KindSettings()), environ=environ)
