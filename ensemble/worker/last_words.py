"""Find in a command's log why it failed."""

from __future__ import annotations

import re

# The last lines of a log, and their characters, that a message has.
_LAST_LINES, _LAST_CHARACTERS = 3, 240
_RANK = re.compile(r"^\[rank\d+\]:\s?", re.MULTILINE)
# The line behind a traceback's indented ones; tracebacks of several ranks may be mixed, line by line.
_EXCEPTION = re.compile(r"^[ \t].*\n+([A-Za-z_][\w.]*(?::.*)?)$", re.MULTILINE)
# With these torchrun and accelerate launch say that a script has failed, behind the script's own traceback.
_OF_LAUNCHERS = re.compile(
    r"^(?:torch\.distributed\.elastic\.\S*\.)?(?:ChildFailedError|\S*CalledProcessError)\b"
)


def last_words(log: str) -> str:
    """Return a log's last lines; where a launcher tells of a script's failure, the exceptions of that script."""
    text = _RANK.sub("", log.replace("\r\n", "\n").replace("\r", "\n"))
    exceptions = [match[1].strip() for match in _EXCEPTION.finditer(text)]
    of_script = [line for line in exceptions if not _OF_LAUNCHERS.match(line)]
    if of_script and len(of_script) < len(exceptions):
        return " | ".join([*dict.fromkeys(of_script)][-_LAST_LINES:])[:_LAST_CHARACTERS]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-_LAST_LINES:])[-_LAST_CHARACTERS:]
