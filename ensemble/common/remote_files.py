"""Copy files from and to object stores, by addresses such as s3://bucket/test.csv; fsspec does the work.

Copies of what is read stay in ``~/.cache/ensemble/copies`` (or below ``XDG_CACHE_HOME``), in a folder for each
version of an object, so that an object is copied once and a copy never changes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ensemble.common.errors import ConfigError, DataError, EnsembleError, OutputError, WriteError
from ensemble.common.files import atomic_path
from ensemble.common.packages import own_requirements
from ensemble.common.text import first_line

# By the beginning of an address: the package that fsspec needs for it.
PACKAGES: Final = {"s3": "s3fs", "gs": "gcsfs", "hf": "huggingface_hub", "file": "fsspec"}
_CHECK = "check the address, the network and the credentials"


@dataclass(frozen=True)
class Copy:
    """Hold a copy of an object; ``version`` is a digest of its ETag, size and time, or what else the store says."""

    address: str
    path: Path
    version: str

    def has_changed(self) -> bool:
        """Return whether the object is another one now; False if the store does not answer."""
        with contextlib.suppress(Exception):
            return _version(*_store(self.address)) != self.version
        return False


def address_of(path: str | os.PathLike[str]) -> str | None:
    """Return the address that a path was made of; None if it is a path on this machine."""
    scheme, colon, rest = os.fspath(path).partition(":/")  # Path has removed one of the slashes
    if not colon or scheme not in PACKAGES:
        return None
    root = "/" if scheme == "file" else ""
    return f"{scheme}://{root}{rest.lstrip('/')}"


def local_path(path: Path) -> Path:
    """Return the path of a copy if a path is an address; any other path as it is. Raises as ``copy_in`` does."""
    address = address_of(path)
    return path if address is None else copy_in(address).path


def copy_in(address: str) -> Copy:
    """Copy an object to this machine, unless this version of it is here already.

    Raises:
        ConfigError: a package for such addresses is missing.
        DataError: the object cannot be read, or changed while it was copied.
        OutputError: the folder of the copies cannot be written.
    """
    store, key = _store(address)
    with _errors_named(address, "cannot be read", DataError):
        version = _version(store, key)
        if store.info(key)["type"] != "file":
            raise DataError(f"{address}: is a folder; name the file inside it")
    parts = key.strip("/").split("/")
    if ".." in parts:
        raise DataError(f"{address}: an address cannot hold ..; write it without")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    names = (address.partition(":")[0], *parts, version[:16])
    folder = cache.joinpath("ensemble", "copies", *names)
    with _errors_named(address, f"cannot be copied to {folder}", OutputError, "name another XDG_CACHE_HOME"):
        folder.mkdir(parents=True, exist_ok=True)
    copy = folder / parts[-1]
    if not copy.exists():
        with atomic_path(copy) as temporary, _errors_named(address, "cannot be read", DataError):
            store.get_file(key, str(temporary))
            if _version(store, key) != version:
                raise DataError(f"{address}: changed while it was copied; start again when it is complete")
    return Copy(address, copy, version)


def copy_out(path: Path, address: str, otherwise: str) -> None:
    """Copy a file to an address, or raise a WriteError; ``otherwise`` says what becomes of the file."""
    store, key = _store(address)
    with _errors_named(address, "cannot be written", WriteError, f"{_CHECK}; {otherwise}"):
        store.put_file(str(path), key)


@contextlib.contextmanager
def written_locally(path: Path) -> Iterator[Path]:
    """Yield the path to write to: for an address that of a temporary file, which is copied out after the block."""
    address = address_of(path)
    if address is None:
        yield path
        return
    demand_writable(address)
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / path.name
        copy_out(Path(folder) / path.name, address, "run the same command again")


def demand_writable(address: str) -> None:
    """Write an empty object beside an address and remove it; raise an OutputError if it cannot be written."""
    store, key = _store(address)
    probe = f"{key.rpartition('/')[0]}/.ensemble-{secrets.token_hex(4)}"
    with _errors_named(address, "cannot be written", OutputError):
        store.pipe_file(probe, b"")
    with contextlib.suppress(Exception):  # who may write may not remove
        store.rm_file(probe)


def _store(address: str) -> tuple[Any, str]:
    """Return fsspec's file system for an address, and the name of the object in it."""
    scheme = address.partition(":")[0]
    try:
        from fsspec.core import url_to_fs

        store, key = url_to_fs(address, **({"auto_mkdir": True} if scheme == "file" else {}))
    except ImportError as error:
        needed = PACKAGES[scheme]
        installs = {package.name: package.install for package in own_requirements()}
        install = installs.get(needed, f"pip install {needed}")
        raise ConfigError(
            f"{address}: {scheme}:// needs {needed}, which is not installed; {install}"
        ) from error
    return store, str(key)


def _version(store: Any, key: str) -> str:
    store.invalidate_cache()  # of listings, which would hide a change
    return str(store.ukey(key))


@contextlib.contextmanager
def _errors_named(address: str, what: str, kind: type[EnsembleError], advice: str = _CHECK) -> Iterator[None]:
    """Turn what a store raises into a sentence with the address."""
    try:
        yield
    except EnsembleError:
        raise
    except Exception as error:  # each store has errors of its own, of many classes
        raise kind(f"{address}: {what} ({first_line(error)}); {advice}") from error
