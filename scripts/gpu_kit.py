"""Make a folder of packages that a GPU machine lacks: ``python scripts/gpu_kit.py --cuda 13.0 FOLDER``.

For a machine without internet that has torch, transformers and accelerate, but neither pydantic nor bitsandbytes.
Copy the checkout and FOLDER there and run ``PYTHONPATH=FOLDER python -m tests.gpu``. Needs a package index.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from kaggle_kit import KitError, download, needs_of
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PACKAGES = ("pydantic", "bitsandbytes")
# What they need and torch brings along; but pydantic may need newer typing-extensions than torch.
THERE = frozenset({"torch", "numpy", "packaging"})
_CUDA_LIBRARY = re.compile(r"bitsandbytes/libbitsandbytes_(?P<device>[a-z]+)(?P<version>\d*)[^/]*\.so")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a new or empty folder")
    parser.add_argument("--python", default="3.12", help="that machine's Python (3.12)")
    parser.add_argument("--cuda", required=True, help="what torch.version.cuda says there, such as 13.0")
    parser.add_argument(
        "--also", action="append", default=[], metavar="PACKAGE", help="another package that is missing there"
    )
    arguments = parser.parse_args()
    try:
        size = make(arguments.folder, arguments.python, arguments.cuda, [*PACKAGES, *arguments.also])
    except (KitError, OSError) as error:
        sys.exit(f"error: {error}")
    print(
        f"{arguments.folder}: {size / 1e6:.1f} MB. There: PYTHONPATH={arguments.folder} python -m tests.gpu"
    )


def make(folder: Path, python: str, cuda: str, packages: Iterable[str]) -> int:
    """Make the folder; it stays as it was where that fails.

    Args:
        python: such as "3.12".
        cuda: the version that torch was built for, such as "13.0".
        packages: with everything that they need and that is not ``THERE``.

    Returns:
        its size in bytes.

    Raises:
        KitError: FOLDER is not empty, a version is no version, or there is no package for it.
    """
    for key, version in (("--python", python), ("--cuda", cuda)):
        if not re.fullmatch(r"\d+\.\d+", version):
            raise KitError(f"{key} {version}: give two numbers with a dot, such as 3.12 or 13.0")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise KitError(f"{folder} is not an empty folder; name a new one")
    with tempfile.TemporaryDirectory() as temporary:
        wheels, unpacked = Path(temporary, "wheels"), Path(temporary, "unpacked")
        wheels.mkdir()
        seen = set(THERE)
        missing = [Requirement(package) for package in packages]
        while missing:
            requirement = missing.pop()
            name = canonicalize_name(requirement.name)
            if name in seen:
                continue
            seen.add(name)
            wheel = download(requirement, wheels, python)
            missing += [need.requirement for need in needs_of(wheel, requirement.extras, python)]
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(unpacked, _wanted(archive, cuda))
        shutil.copytree(unpacked, folder, dirs_exist_ok=True)
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _wanted(archive: zipfile.ZipFile, cuda: str) -> list[str]:
    """Return a wheel's files without bitsandbytes' libraries for other versions of CUDA.

    Raises:
        KitError: it has libraries, but none for this version.
    """
    libraries = {name: match for name in archive.namelist() if (match := _CUDA_LIBRARY.fullmatch(name))}
    versions = sorted(
        {match["version"] for match in libraries.values() if match["device"] == "cuda"}, key=int
    )
    if versions and cuda.replace(".", "") not in versions:
        shown = ", ".join(f"{version[:-1]}.{version[-1]}" for version in versions)
        raise KitError(f"--cuda {cuda}: bitsandbytes has no library for it; it has those for {shown}")
    left_out = {
        name
        for name, match in libraries.items()
        if match["device"] != "cpu" and (match["device"], match["version"]) != ("cuda", cuda.replace(".", ""))
    }
    return [name for name in archive.namelist() if name not in left_out]


if __name__ == "__main__":
    main()
