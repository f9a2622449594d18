"""Keep secrets out of what is printed, logged and written about a run; its CSV files are never changed.

A value is a secret by the name of its environment variable, or of its key in the config. Variables that the config
uses under an ordinary name, such as ``${DATA}`` in a path, are no secrets: messages must be able to name files.
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
from typing import IO, Any, Final
from urllib.parse import quote

from ensemble.common.errors import EnsembleError

MASK: Final = "***"
_VARIABLE = re.compile(
    r"TOKEN(_|$)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|API_?KEY|(ACCESS|PRIVATE)_?KEY|_(KEY|PAT|PWD)$|^AWS_",
    re.IGNORECASE,
)
_LOCATION = re.compile(r"_(FILE|PATH|DIR)$", re.IGNORECASE)  # the path of a secret is no secret
_KEY = re.compile(
    r"((use_)?(hf|auth|access|api|bearer)_)?token|.*(secret|passw|api_?key|credential).*", re.IGNORECASE
)
# Tokens of the Hugging Face hub, and name:password@ in an address, wherever they come from.
_BY_LOOKS = r"\bhf_[A-Za-z0-9]{16,}\b|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"


def secrets_in(settings: object) -> Iterator[str]:
    """Yield the texts in mappings and lists whose keys say that they are secret, such as ``token``."""
    if isinstance(settings, Mapping):
        for key, value in settings.items():
            if isinstance(value, str) and _KEY.fullmatch(str(key)):
                yield value
        settings = [*settings.values()]
    if isinstance(settings, list | tuple):
        for item in settings:
            yield from secrets_in(item)


class Redactor:
    """Replace secrets of the environment and of a config, or of parts of one, by ``***``."""

    def __init__(self, environ: Mapping[str, str], settings: object = None) -> None:
        names = [name for name in environ if _VARIABLE.search(name) and not _LOCATION.search(name)]
        secrets = [*(environ[name] for name in names), *secrets_in(settings)]
        forms: set[str] = set()
        for secret in map(str.strip, secrets):
            # Text may have the secret itself, single lines of it, or Python's, JSON's or an address's spelling.
            forms |= {secret, *secret.splitlines(), repr(secret)[1:-1], json.dumps(secret)[1:-1]}
            forms.add(quote(secret, safe=""))
        # Shorter values are common words, such as "true" or "/tmp".
        forms = {form for form in forms if len(form) >= 8}
        # The longest first, because a secret may begin like another.
        patterns = [re.escape(form) for form in sorted(forms, key=lambda form: (-len(form), form))]
        self._pattern = re.compile("|".join([*patterns, _BY_LOOKS]))
        self._signs = ["hf_", "://", *forms]

    def __call__(self, text: str) -> str:
        # Plain texts are found many times as fast as a pattern, and most of a log has none of them.
        return self._pattern.sub(MASK, text) if any(sign in text for sign in self._signs) else text

    def document(self, value: Any) -> Any:
        """Redact every text in mappings (except keys), lists, tuples and dataclasses."""
        if isinstance(value, str):
            return self(value)
        if isinstance(value, Mapping):
            return {key: self.document(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.document(item) for item in value]
        if isinstance(value, tuple):
            return tuple(self.document(item) for item in value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return dataclasses.replace(value, **self.document(vars(value)))
        return value


class RedactingFormatter(logging.Formatter):
    """Format a log without secrets; a filter would not see tracebacks."""

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
    """Redact what is written to a text stream; writing never fails.

    Text is dropped if the terminal or the reader (`| head`) is gone, the disk of a redirection is full, or the
    stream was closed. A secret that is printed in pieces is not redacted.
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
    """Turn bytes into text, as the ``buffer`` of a ``RedactedStream``."""

    def __init__(self, stream: RedactedStream) -> None:
        self._stream = stream

    def write(self, data: bytes) -> int:
        self._stream.write(bytes(data).decode(self._stream.encoding, "surrogateescape"))
        return len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def guard_output(redactor: Redactor) -> None:
    """Redact all that Python prints to standard output and error from now on, by rich, logging or a library.

    Characters that the stream's encoding lacks are written as escapes. Output that a C library writes to the file
    descriptors is not redacted. A second call adds a redactor.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, RedactedStream):  # not replaced, because libraries' log handlers may use it
            stream.redactors.append(redactor)
        elif isinstance(stream, io.TextIOWrapper):  # other streams are a notebook's or a test's
            stream.reconfigure(errors="backslashreplace")
            setattr(sys, name, RedactedStream(stream, redactor))
