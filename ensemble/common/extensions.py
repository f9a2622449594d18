"""Register extensions by name: built-in ones, and those of other installed packages (entry points).

A registry imports an extension when it is needed, and searches installed packages only for names that are not built
in, because reading their entry points takes longer than checking a small config.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any, Generic, TypeVar

from ensemble.common.errors import ConfigError
from ensemble.common.packages import DISTRIBUTION, own_requirements
from ensemble.common.text import first_line, nearest_or_all

T = TypeVar("T")


@dataclass(frozen=True)
class Registry(Generic[T]):
    """Hold the extensions of one kind, each a subclass of ``base``."""

    group: str  # of entry points, such as "ensemble.merge_methods"
    what: str  # the word for an extension in messages, such as "merge method"
    base: type[T]
    package: str  # the package of the built-in modules
    built_in: Mapping[str, str]  # ".module:Class" by name

    def names(self) -> list[str]:
        """Return all names, built-in ones first; raises as ``load`` does."""
        return [*self.built_in, *sorted(self._installed())]

    def load(self, name: str) -> type[T]:
        """Import and return the class of this name.

        Raises:
            ConfigError: the name is unknown or ambiguous, or its package cannot be used.
        """
        if name in self.built_in:
            module, _, attribute = self.built_in[name].partition(":")
            try:
                extension: type[T] = getattr(import_module(module, self.package), attribute)
            except ModuleNotFoundError as error:
                for package in own_requirements():
                    if package.extra and package.name == (error.name or "").partition(".")[0]:
                        raise ConfigError(
                            f"{self.what} {name} needs {package.name}, which is not installed; {package.install}"
                        ) from error
                raise
            return extension
        installed = self._installed()
        if name not in installed:
            names = [*self.built_in, *sorted(installed)]
            raise ConfigError(f"unknown {self.what} {name!r}; {nearest_or_all(name, names, self.what)}")
        entry, owner = installed[name]
        subject = f"{self.what} {name}: the entry point {name} = {entry.value} of the package {owner}"
        try:
            loaded = entry.load()
        except Exception as error:  # a module may raise anything while it is imported
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            problem = f"{subject} cannot be imported ({reason}); fix or uninstall that package"
            raise ConfigError(problem) from error
        if not (isinstance(loaded, type) and issubclass(loaded, self.base)):
            base = f"{self.base.__module__}.{self.base.__qualname__}"
            raise ConfigError(f"{subject} is no subclass of {base}; fix that package")
        return loaded

    def _installed(self) -> dict[str, tuple[metadata.EntryPoint, str]]:
        """Return the entry point and the package of each name; raises ConfigError if two packages have a name."""
        entries: dict[str, tuple[metadata.EntryPoint, str]] = {}
        owners = dict.fromkeys(self.built_in, DISTRIBUTION)
        clashes = []
        for entry in sorted(metadata.entry_points(group=self.group), key=lambda entry: entry.name):
            owner = entry.dist.name if entry.dist is not None else "?"
            if entry.name in owners:
                packages = " and ".join(sorted((owner, owners[entry.name])))
                clashes.append(
                    f"{self.what} {entry.name}: the packages {packages} both have one so named; uninstall one"
                )
            owners[entry.name] = owner
            entries[entry.name] = entry, owner
        if clashes:
            raise ConfigError(clashes)
        return entries


def call_hooks(group: str, argument: object) -> Iterator[str]:
    """Call every function that installed packages name in a group of entry points; yield why any of them failed."""
    for entry in sorted(metadata.entry_points(group=group), key=lambda entry: entry.name):
        owner = entry.dist.name if entry.dist is not None else "?"
        try:
            hook: Callable[[object], object] = entry.load()
            hook(argument)
        except (Exception, SystemExit) as error:  # somebody else's code may raise anything
            yield (
                f"the hook {entry.name} = {entry.value} of the package {owner} failed ({first_line(error)}); the "
                "run itself is not affected"
            )


class SettingsByName(Mapping[str, type[Any]]):
    """Map names of extensions to their ``Settings``, for the config; looking a name up imports the extension."""

    def __init__(self, registry: Registry[Any]) -> None:
        self._registry = registry

    def __getitem__(self, name: str) -> type[Any]:
        if name not in self._registry.built_in and name not in self._registry.names():
            raise KeyError(name)
        settings: type[Any] = self._registry.load(name).Settings
        return settings

    def __iter__(self) -> Iterator[str]:
        return iter(self._registry.names())

    def __len__(self) -> int:
        return len(self._registry.names())
