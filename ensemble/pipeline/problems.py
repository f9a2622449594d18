"""Collects errors, so that users see all problems of a config at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from ensemble.common.errors import ConfigError, EnsembleError
from ensemble.common.files import unreadable
from ensemble.data.json_cells import TemplateProblem


class Problems:
    """Collects errors of exit code 2, so that later checks still run."""

    def __init__(self) -> None:
        self._errors: list[EnsembleError] = []

    @contextlib.contextmanager
    def at(self, key: str = "") -> Iterator[None]:
        """Collect the errors raised inside, prefixed with the key that they are about."""
        try:
            yield
        except OSError as error:  # such as a name that is too long for the file system
            text = unreadable(error.filename or key, error, "choose another place")
            self._errors.append(ConfigError(f"{key}: {text}" if key and error.filename else text))
        except TemplateProblem as error:
            self._errors.append(ConfigError(f"{key}: {error}"))
        except EnsembleError as error:
            prefixed = [f"{key}: {problem}" if key else problem for problem in error.problems]
            self._errors.append(type(error)(prefixed))

    def add(self, sentences: Iterable[str], kind: type[EnsembleError] = ConfigError) -> None:
        """Collect problems given as sentences."""
        with self.at():
            problems = list(sentences)
            if problems:
                raise kind(problems)

    def raise_any(self) -> None:
        """Raise the collected errors: a single one as it is, several as one ConfigError."""
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            raise ConfigError([problem for error in self._errors for problem in error.problems])
