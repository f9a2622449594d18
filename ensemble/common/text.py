"""Sizes, counts and times as people read them."""

import difflib
from collections.abc import Sequence
from pathlib import Path


def gib(size: float) -> str:
    """Bytes in GiB, or in MiB where they are less than half a GiB."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**29 else f"{size / 2**20:,.1f} MiB"


def plural(count: int, noun: str) -> str:
    """``1 row``, ``1,200 rows``; the noun takes an s, and a batch or a match an es."""
    ending = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}{ending}"


def duration(seconds: float) -> str:
    """8.2 s, 1:05 min, 2:03:10 h."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d} h" if hours else f"{minutes}:{rest:02d} min"


def shown_path(path: Path) -> str:
    """A path as short as it can be said: below the working directory, relative to it."""
    try:
        return str(path.resolve().relative_to(Path.cwd().resolve()))
    except (ValueError, OSError):
        return str(path)


_COMPARED = 1_000


_NAME_CHARACTERS = 100


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """`` (did you mean 'x'?)`` with the name nearest to ``name``, or nothing."""
    # difflib's time grows with the square of the length, and with the names.
    near = [candidate for candidate in known[:_COMPARED] if len(candidate) <= _NAME_CHARACTERS]
    by_folded = {candidate.strip().casefold(): candidate for candidate in reversed(near)}
    asked = name.strip().casefold() if len(name) <= _NAME_CHARACTERS else ""
    close = difflib.get_close_matches(asked, by_folded, n=1, cutoff=0.6)
    return f" (did you mean {by_folded[close[0]]!r}?)" if close else ""


def listed(names: Sequence[str], most: int = 20) -> str:
    """Names for a message: quoted, separated by commas, cut after ``most``."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(map(quoted, names[:most])) + more


def quoted(text: str, most: int = 60) -> str:
    """Text from a file or a config as a message shows it: on one line, and short."""
    return repr(text) if len(text) <= most else f"{text[:most]!r}..."


def told(error: Exception, most: int = 200) -> str:
    """What a library says of an error, on one line."""
    text = " ".join(str(error).split())
    text = text if text.isprintable() else repr(text)[1:-1]
    return text if len(text) <= most else f"{text[:most]}..."
