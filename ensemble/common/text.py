"""Write sizes, counts, times and names as people read them."""

from __future__ import annotations

import difflib
import os
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path

NO_BREAK = "\xa0"  # a space at which no line ends
# Where Kaggle's notebooks have their inputs.
_KAGGLE_MOUNT = Path("/kaggle/input")
# By the first folder below it: what is mounted there, and how many folders deep.
_KAGGLE_INPUTS = {
    "datasets": ("dataset", 3),
    "models": ("model", 3),
    "notebooks": ("notebook output", 3),
    "competitions": ("competition", 2),
}


def written(value: float | None, form: str) -> str:
    """Return a number in a format of ``format``; empty if it is not known."""
    return "" if value is None else format(value, form)


def percent_of(part: float, whole: float | None, digits: int = 0) -> str:
    """Return a share in percent; empty if there is no whole."""
    return f"{part / whole:.{digits}%}" if whole else ""


def gib(size: float | None) -> str:
    """Return bytes in GiB, or in MiB if they are less than half a GiB; empty if they are not known."""
    if size is None:
        return ""
    return f"{size / 2**30:.1f} GiB" if size >= 2**29 else f"{size / 2**20:,.1f} MiB"


def plural(count: int, noun: str) -> str:
    """Return a count and its noun: ``1 row``, ``1,200 rows``, ``2 batches``."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}{'es' if noun.endswith('ch') else 's'}"


def were(count: int) -> str:
    """Return the verb for a count: ``was`` for one, else ``were``."""
    return "was" if count == 1 else "were"


def rate(per_second: float | None) -> str:
    """Return a speed, with one decimal below 1,000; empty if it is not known."""
    if per_second is None:
        return ""
    return f"{per_second:,.1f}" if per_second < 1_000 else f"{per_second:,.0f}"


def duration(seconds: float | None) -> str:
    """Return a time such as 8.2 s, 1:05 min, 2:03:10 h; empty if it is not known."""
    if seconds is None:
        return ""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{whole_seconds:02d} h"
    return f"{minutes}:{whole_seconds:02d} min"


def shown_path(path: Path) -> str:
    """Return a path, relative to the working directory if it is below that."""
    try:
        return str(path.resolve().relative_to(Path.cwd().resolve()))
    except (ValueError, OSError, RuntimeError):  # of links in a circle, say
        return str(path)


def first_line(error: BaseException) -> str:
    """Return an error's class and the first line of its message."""
    line = str(error).strip().partition("\n")[0].strip()
    return f"{type(error).__name__}: {line}"


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the name that is most like ``name``; None if none is near."""
    # difflib's time grows with the square of the length, and with the number of names.
    by_folded = {other.strip().casefold()[:100]: other for other in islice(names, 1_000)}
    close = difflib.get_close_matches(name.strip().casefold()[:100], by_folded, n=1, cutoff=0.6)
    return by_folded[close[0]] if close else None


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` with the name nearest to ``name``, or nothing.

    Where only characters differ that nobody sees, or that look the same, these are named.
    """
    near = nearest(name, names)
    if near is None:
        return ""
    if near != name and _visible(near) == _visible(name):
        hidden = sorted(letter for letter in {*near} ^ {*name} if not letter.isascii())
        shown = ", ".join(f"U+{ord(letter):04X} {unicodedata.name(letter, '')}".strip() for letter in hidden)
        return f" ({near!r} only looks the same: it differs in {shown or 'spaces'}; rename one)"
    return f" (did you mean {near!r}?)"


def _visible(text: str) -> str:
    """Return text without characters that cannot be seen, and others in their usual form."""
    usual = unicodedata.normalize("NFKC", text)
    return "".join(letter for letter in usual if unicodedata.category(letter) != "Cf").strip()


def nearest_or_all(name: str, names: Sequence[str], noun: str) -> str:
    """Return ``did you mean x?`` with the name nearest to ``name``, or all names if none is near."""
    near = nearest(name, names)
    return f"did you mean {near}?" if near is not None else f"the {noun}s here are {', '.join(names)}"


def not_attached(path: Path) -> str:
    """Return what to add about a missing path in an input that is not attached to a Kaggle notebook.

    Datasets are mounted at /kaggle/input/NAME or /kaggle/input/datasets/OWNER/NAME, others in the second way.
    """
    path = Path(os.path.abspath(path))  # noqa: PTH100  links stay as they are
    if _KAGGLE_MOUNT not in path.parents:
        return ""
    names = path.relative_to(_KAGGLE_MOUNT).parts
    kind, depth = _KAGGLE_INPUTS.get(names[0], ("dataset", 1))
    name, mount = names[:depth][-1], _KAGGLE_MOUNT.joinpath(*names[:depth])
    if mount.is_dir():
        return ""
    for pattern in (name, f"*/{name}", f"*/*/{name}"):
        for folder in sorted(_KAGGLE_MOUNT.glob(pattern)):
            if folder.is_dir():
                return f" (nothing is mounted at {mount}); {name} is mounted at {folder}: name that"
    return f" (nothing is mounted at {mount}); attach the {kind} {name} to the notebook (Add Input)"


def similar_file(path: Path) -> str:
    """Return what to add about a missing file: a file of a similar name, or that the folder is missing, too."""
    advice = not_attached(path)
    if advice:
        return advice
    if not path.parent.is_dir():
        return f"; there is no folder {path.parent} either"
    try:
        return did_you_mean(path.name, sorted(entry.name for entry in path.parent.iterdir()))
    except OSError:
        return ""


def metric_words(name: str) -> str:
    """Return a metric's name in words; the names of a user's file and of a column stay as they are."""
    metric, by, column = name.partition(" by ")
    return (metric if ":" in metric else metric.replace("_", " ")) + by + column


def listed(names: Sequence[str], most: int = 20, show: Callable[[str], str] | None = None) -> str:
    """Return names for a message: with commas, cut after ``most``, each written by ``show``, or quoted."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(map(show or quoted, names[:most])) + more


def quoted(text: str, most: int = 60) -> str:
    """Return text from a file or a config for a message: on one line, and short."""
    return repr(text) if len(text) <= most else f"{text[:most]!r}..."


def error_text(error: Exception, most: int = 200) -> str:
    """Return the text of a library's error, on one line."""
    text = " ".join(str(error).split())
    text = text if text.isprintable() else repr(text)[1:-1]
    return text if len(text) <= most else f"{text[:most]}..."
