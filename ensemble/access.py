"""Why a file or folder cannot be read, each reason with what helps against it."""

from __future__ import annotations

import getpass
import os
from pathlib import Path


def unreadable(path: Path | str, error: OSError, otherwise: str = "copy it again") -> str:
    """The sentence for something that is there and cannot be read.

    Args:
        error: what reading it raised.
        otherwise: what to do where neither rights nor links are to blame.
    """
    place = Path(os.fsdecode(error.filename)) if error.filename else Path(path)
    if isinstance(error, PermissionError):
        # Asked of os.path, which answers also where the folder above may not be entered.
        right = "r" if os.path.isfile(place) else "rx"  # noqa: PTH113
        return (
            f"{path} cannot be read ({error.strerror} for user {_user()}); allow it, for example with "
            f"chmod a+{right} {_barrier(place)}, or run as its owner"
        )
    if link := dangling_link(place):
        return link
    return f"{path} cannot be read ({error.strerror or error}); {otherwise}"


def dangling_link(path: Path) -> str | None:
    """The sentence for a link to nothing; None for anything else."""
    try:
        if not path.is_symlink() or path.exists():
            return None
        target = path.readlink()
    except OSError:
        return None
    return (
        f"{path} is a link to {target}, which is not there; copy the files and not the links (cp -rL; the hub's "
        "cache keeps the files themselves in its blobs folder)"
    )


def _barrier(place: Path) -> Path:
    """The outermost folder above a place that may not be entered; the place itself where all may be."""
    for folder in reversed(place.absolute().parents):
        if not os.access(folder, os.X_OK):
            return folder
    return place


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # one that has no name here, as in many containers
        return str(os.getuid())
