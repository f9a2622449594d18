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
import re
import sys
from collections.abc import Iterator, Mapping
from operator import is_
from typing import Any, Final
from urllib.parse import quote

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
        found = [one if type(one) in _HARMLESS else self.document(one) for one in items]
        if isinstance(value, list | tuple | dict) and all(map(is_, found, items)):
            return value
        if isinstance(value, Mapping):
            return dict(zip(value, found, strict=True))
        return found if isinstance(value, list) else tuple(found)


class RedactingFormatter(logging.Formatter):
    """A log's formatter; not a filter, which would have to know of tracebacks and stacks as well."""

    def __init__(self, pattern: str, redactor: Redactor) -> None:
        super().__init__(pattern)
        self._redactor = redactor

    def format(self, record: logging.LogRecord) -> str:
        return self._redactor(super().format(record))


def guard_output(redactor: Redactor) -> None:
    """From now on, what Python prints to standard output and error goes through ``redactor``, and never fails.

    What cannot be printed is dropped: no terminal or reader (`| head`) any more, a full disk behind a redirection.
    Characters that the stream's encoding lacks are written as escapes.  So nobody who prints has to care, be it
    rich, typer, logging or a library in a worker.  What a library in C writes to the descriptors themselves is not
    redacted, nor a secret printed in pieces.  Called again, it adds a redactor.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # Otherwise it is a notebook's or a test's, with no bytes under it.
        if isinstance(stream, io.TextIOWrapper):
            stream.flush()
            if isinstance(stream.buffer, _Guard):  # which libraries' log handlers may hold
                stream.buffer.redactors.append(redactor)
                continue
            guarded = io.TextIOWrapper(
                _Guard(stream, redactor),
                encoding=stream.encoding,
                errors="backslashreplace",
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, guarded)


class _Guard(io.BufferedIOBase):
    """The bytes under a text stream, so that nobody gets around it by ``.buffer``.

    Dropped where they can go nowhere: EIO, EPIPE, ENOSPC, EBADF; ValueError where somebody closed the stream.
    """

    def __init__(self, stream: io.TextIOWrapper, redactor: Redactor) -> None:
        self._stream = stream  # kept: it would close its descriptor when nobody holds it any more
        self._bytes: Any = stream.buffer
        self.redactors = [redactor]
        self.name = getattr(stream, "name", None)

    def write(self, data: Any, /) -> int:
        content = bytes(data)
        text = content.decode(self._stream.encoding, "surrogateescape")
        for redact in self.redactors:
            text = redact(text)
        with contextlib.suppress(OSError, ValueError):
            self._bytes.write(text.encode(self._stream.encoding, "surrogateescape"))
        return len(content)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._bytes.flush()

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            return bool(self._bytes.isatty())
        return False

    def fileno(self) -> int:
        return int(self._bytes.fileno())
