"""Secrets out of what is printed, logged and written about a run; its CSV files are never touched.

A value is a secret by its name: that of its environment variable, or of its key in the config.  A variable that the
config takes in under an ordinary name, such as ``${DATA}`` in a path, is none, or no message could name a file any
more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from operator import is_
from typing import IO, Any, Final
from urllib.parse import quote

from ensemble.common.errors import EnsembleError

MASK: Final = "***"
# Shorter values are words that stand everywhere, such as "true" or "/tmp".
_MIN_CHARACTERS: Final = 8
_VARIABLE = re.compile(
    r"TOKEN(_|$)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|API_?KEY|(ACCESS|PRIVATE)_?KEY|_(KEY|PAT|PWD)$|^AWS_",
    re.IGNORECASE,
)
_LOCATION = re.compile(r"_(FILE|PATH|DIR)$", re.IGNORECASE)  # where a secret lies is none
_KEY = re.compile(
    r"((use_)?(hf|auth|access|api|bearer)_)?token|.*(secret|passw|api_?key|credential).*", re.IGNORECASE
)
_HARMLESS = {int, float, bool, type(None)}  # most of what a report holds
# Whatever their origin: tokens of the Hugging Face hub, and name:password@ in an address.
_BY_LOOKS = r"\bhf_[A-Za-z0-9]{16,}\b|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"


def secrets_in(settings: object) -> Iterator[str]:
    """The text values in mappings and lists whose keys say that they are secret, such as ``token``."""
    if isinstance(settings, Mapping):
        for key, value in settings.items():
            if isinstance(value, str) and _KEY.fullmatch(str(key)):
                yield value
        settings = [*settings.values()]
    for item in settings if isinstance(settings, list | tuple) else ():
        yield from secrets_in(item)


class Redactor:
    """Puts ``***`` where a secret of the environment or of a config, or of parts of one, stands."""

    def __init__(self, environ: Mapping[str, str], settings: object = None) -> None:
        named = (name for name in environ if _VARIABLE.search(name) and not _LOCATION.search(name))
        forms: set[str] = set()
        for secret in map(str.strip, (*(environ[name] for name in named), *secrets_in(settings))):
            # As it may stand in text: as it is, by its lines, and as Python, JSON or an address write it.
            forms |= {secret, *secret.splitlines(), repr(secret)[1:-1], json.dumps(secret)[1:-1]}
            forms.add(quote(secret, safe=""))
        # The longest first, since a secret may begin like another.
        forms = {form for form in forms if len(form) >= _MIN_CHARACTERS}
        listed = [re.escape(form) for form in sorted(forms, key=lambda form: (-len(form), form))]
        self._pattern = re.compile("|".join([*listed, _BY_LOOKS]))

    def __call__(self, text: str) -> str:
        return self._pattern.sub(MASK, text)

    def document(self, value: Any) -> Any:
        """Every text redacted in mappings (their keys aside), lists, tuples and dataclasses; the rest as it is,
        and what holds no secret is the same object."""
        if isinstance(value, str):
            return self(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            parts = vars(value)
            redacted = self.document(parts)
            return value if redacted is parts else dataclasses.replace(value, **redacted)
        if not isinstance(value, list | tuple | Mapping):
            return value
        items = value.values() if isinstance(value, Mapping) else value
        shown = [item if type(item) in _HARMLESS else self.document(item) for item in items]
        if isinstance(value, list | tuple | dict) and all(map(is_, shown, items)):
            return value
        if isinstance(value, Mapping):
            return dict(zip(value, shown, strict=True))
        return shown if isinstance(value, list) else tuple(shown)


class RedactingFormatter(logging.Formatter):
    """A log's formatter; not a filter, which would have to know of tracebacks and stacks as well."""

    def __init__(self, pattern: str, redactor: Redactor) -> None:
        super().__init__(pattern)
        self._redactor = redactor

    def format(self, record: logging.LogRecord) -> str:
        return self._redactor(super().format(record))


@contextlib.contextmanager
def redacted_errors(redactor: Redactor | None = None) -> Iterator[None]:
    """Keep secrets out of the errors raised within: those of ``redactor``, or else those of the environment."""
    try:
        yield
    except EnsembleError as error:
        error.problems = tuple(map(redactor or Redactor(os.environ), error.problems))
        error.args = ("\n".join(error.problems),)
        raise


class RedactedStream:
    """A text stream without secrets, on which writing never fails.

    What cannot be printed is dropped: the terminal or the reader (`| head`) is gone, a disk behind a redirection is
    full, or somebody closed the stream.  Nor is a secret redacted that is printed in pieces.
    """

    def __init__(self, stream: IO[str], redactor: Redactor) -> None:
        self._stream = stream
        self.redactors = [redactor]

    @property
    def buffer(self) -> _RedactedBytes:
        return _RedactedBytes(self)

    def write(self, text: str) -> int:
        shown = text
        for redact in self.redactors:
            shown = redact(shown)
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(shown)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _RedactedBytes:
    """The bytes under a ``RedactedStream``, which takes them as text."""

    def __init__(self, stream: RedactedStream) -> None:
        self._stream = stream

    def write(self, data: bytes) -> int:
        self._stream.write(bytes(data).decode(self._stream.encoding, "surrogateescape"))
        return len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def guard_output(redactor: Redactor) -> None:
    """Redact whatever Python prints to standard output and error from now on, be it by rich, logging or a library.

    Characters that the stream's encoding lacks are written as escapes.  What a library in C writes to the
    descriptors themselves is not redacted.  Called again, it adds a redactor.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, RedactedStream):  # which libraries' log handlers may hold
            stream.redactors.append(redactor)
        elif isinstance(stream, io.TextIOWrapper):  # otherwise it is a notebook's or a test's
            stream.reconfigure(errors="backslashreplace")
            setattr(sys, name, RedactedStream(stream, redactor))
