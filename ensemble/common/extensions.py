"""What can be extended by name: what is built in, and what other installed packages bring by entry points.

A registry imports an extension when it is asked for, and looks at installed packages only for a name that is not
built in: to read their entry points takes longer than to check a small config.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any, Generic, TypeVar

from ensemble.common.errors import ConfigError
from ensemble.common.packages import DISTRIBUTION, own_requirements
from ensemble.common.text import nearest_or_all

T = TypeVar("T")


@dataclass(frozen=True)
class Registry(Generic[T]):
    """The extensions of one kind, each a subclass of ``base``."""

    group: str  # of entry points, such as "ensemble.merge_methods"
    what: str  # what one of them is called, such as "merge method"
    base: type[T]
    package: str  # where the modules of those that are built in are found
    built_in: Mapping[str, str]  # ".module:Class" by name

    def names(self) -> list[str]:
        """All names, those that are built in first; raises as ``load`` does."""
        return [*self.built_in, *sorted(self._installed())]

    def load(self, name: str) -> type[T]:
        """The class of this name.

        Raises:
            ConfigError: there is none, installed packages give one name to two things, or the package that has it
                cannot be imported or has something else there.
        """
        if name in self.built_in:
            module, _, attribute = self.built_in[name].partition(":")
            try:
                found: type[T] = getattr(import_module(module, self.package), attribute)
            except ModuleNotFoundError as error:
                missing = (error.name or "").partition(".")[0]
                extras = [package for package in own_requirements() if package.extra]
                package = next((package for package in extras if package.name == missing), None)
                if package is None:
                    raise
                raise ConfigError(
                    f"{self.what} {name} needs {missing}, which is not installed; {package.install}"
                ) from error
            return found
        installed = self._installed()
        if name not in installed:
            known = [*self.built_in, *sorted(installed)]
            raise ConfigError(f"unknown {self.what} {name!r}; {nearest_or_all(name, known, self.what)}")
        entry, owner = installed[name]
        place = f"{self.what} {name}: the entry point {name} = {entry.value} of the package {owner}"
        try:
            loaded = entry.load()
        except Exception as error:  # whatever a module raises while it is imported
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            problem = f"{place} cannot be imported ({reason}); fix or uninstall that package"
            raise ConfigError(problem) from error
        if not (isinstance(loaded, type) and issubclass(loaded, self.base)):
            base = f"{self.base.__module__}.{self.base.__qualname__}"
            raise ConfigError(f"{place} is no subclass of {base}; fix that package")
        return loaded

    def _installed(self) -> dict[str, tuple[metadata.EntryPoint, str]]:
        """The entry point of each name, and the package that it is of."""
        found: dict[str, tuple[metadata.EntryPoint, str]] = {}
        clashes = []
        for entry in sorted(metadata.entry_points(group=self.group), key=lambda entry: entry.name):
            owner = entry.dist.name if entry.dist is not None else "?"
            other = DISTRIBUTION if entry.name in self.built_in else found.get(entry.name, (None, ""))[1]
            if other:
                what, both = f"{self.what} {entry.name}", " and ".join(sorted((owner, other)))
                clashes.append(f"{what}: the packages {both} both have one so named; uninstall one")
            found[entry.name] = entry, owner
        if clashes:
            raise ConfigError(clashes)
        return found


class SettingsByName(Mapping[str, type[Any]]):
    """The ``Settings`` of each extension, for the config; one, and the registry, is imported when asked for."""

    def __init__(self, registry: Callable[[], Registry[Any]]) -> None:
        self._registry = registry

    def __getitem__(self, name: str) -> type[Any]:
        registry = self._registry()
        if name not in registry.built_in and name not in registry.names():
            raise KeyError(name)
        settings: type[Any] = registry.load(name).Settings
        return settings

    def __iter__(self) -> Iterator[str]:
        return iter(self._registry().names())

    def __len__(self) -> int:
        return len(self._registry().names())
