"""A config with all that is installed to extend it: what every command reads a YAML file with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ensemble.common.import_guards import import_numpy
from ensemble.config import EnsembleConfig, Extensions, LoadedConfig, load_config
from ensemble.members.registry import KindSettings

if TYPE_CHECKING:
    from ensemble.common.extensions import Registry
    from ensemble.merging.methods.base import MergeMethod


def load(
    path: Path, overrides: Sequence[str] = (), *, environ: Mapping[str, str] | None = None
) -> LoadedConfig:
    """Read and check a config, see ``load_config``.

    Raises:
        ConfigError: with every problem there is.
    """
    extensions = Extensions(merge_methods=MethodSettings(), member_kinds=KindSettings())
    return load_config(path, overrides, extensions, environ=environ)


class MethodSettings(Mapping[str, type[EnsembleConfig]]):
    """The keys below ``ensemble`` by merge method; methods are imported only for a config that names one."""

    def __getitem__(self, name: str) -> type[EnsembleConfig]:
        methods = _merge_methods()
        if name not in methods.built_in and name not in methods.names():
            raise KeyError(name)
        return methods.load(name).Settings

    def __iter__(self) -> Iterator[str]:
        return iter(_merge_methods().names())

    def __len__(self) -> int:
        return len(_merge_methods().names())


def _merge_methods() -> Registry[MergeMethod]:
    import_numpy()
    from ensemble.merging.methods import METHODS

    return METHODS
