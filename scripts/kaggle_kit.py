"""Makes the dataset that installs this project offline on Kaggle: ``python scripts/kaggle_kit.py FOLDER``.

FOLDER gets the project's wheel, a wheel of each package that it needs and the image lacks, a lock file with their
hashes, and a README.  Needs a package index; what the image has, such as torch, is not downloaded.
"""

from __future__ import annotations

import argparse
import email
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[1]
IMAGE = ROOT / "scripts" / "kaggle_image.txt"
EXTRAS = ("quantization", "adapters")
# What the wheel is made of.
_SOURCES = ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "docs/config.schema.json", "ensemble")
_BUILD_NEEDS = Version("77")  # of setuptools, as pyproject.toml says
_GLIBC = 35  # the image's is 2.35
README = """\
# ensemble {version}, offline
Made for Python {python} on x86-64, in an image with {held}. Brings {brought}.
Upload this folder as a dataset (private will do), and add that to the notebook as an input; internet stays off.
The first cell of `configs/kaggle.ipynb` installs it; by hand: `pip install -r FOLDER/requirements.lock`. That lock
has the hash of every file here, and asks no index. `python -m ensemble doctor` then says if anything is missing.
"""


class KitError(Exception):
    """The kit cannot be made; the text says why and what to do."""


@dataclass(frozen=True)
class Need:
    """A requirement, and what asks for it."""

    requirement: Requirement
    asked_by: str

    @property
    def name(self) -> str:
        return canonicalize_name(self.requirement.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a new or empty folder")
    parser.add_argument("--image", type=Path, default=IMAGE, help="what `pip freeze` prints in the image")
    parser.add_argument("--python", default="3.12", help="the image's Python (3.12)")
    parser.add_argument(
        "--replace",
        action="append",
        default=[],
        metavar="PACKAGE",
        help="a package to bring although the image has it; can be given again",
    )
    arguments = parser.parse_args()
    was_empty = not (arguments.folder.is_dir() and any(arguments.folder.iterdir()))
    try:
        make(arguments.folder, read_image(arguments.image), arguments.python, arguments.replace)
    except (KitError, OSError) as error:
        if was_empty:  # so that the same command can be tried again
            for made in arguments.folder.glob("*"):
                made.unlink()
        sys.exit(f"error: {error}")
    print(f"{arguments.folder}: {', '.join(sorted(path.name for path in arguments.folder.iterdir()))}")


def make(
    folder: Path, image: Mapping[str, Version | None], python: str, replace: Collection[str] = ()
) -> None:
    """Make the kit.

    Args:
        folder: for the kit; must not hold anything.
        image: versions by package, None where that is unknown.
        python: the image's, such as "3.12".
        replace: packages to bring whether the image has them or not.

    Raises:
        KitError: the image has a package in a version that does not do, or the index lacks one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise KitError(f"{folder} is not empty; name a new folder")
    own = build_wheel(folder)
    replaced = set(map(canonicalize_name, replace))
    versions = {name: version for name, version in image.items() if name not in replaced}
    needs = [*needs_of(own, EXTRAS, python)]
    wrong = []
    while needs:
        need = needs.pop()
        if need.name not in versions:
            if need.name == "torch":
                raise KitError("the image has no torch, and a kit does not bring it: take a GPU image's list")
            wheel = download(need.requirement, folder, python)
            versions[need.name] = parse_wheel_filename(wheel.name)[1]
            needs += needs_of(wheel, need.requirement.extras, python)
        version = versions[need.name]
        if version is not None and not need.requirement.specifier.contains(version, prereleases=True):
            wrong.append(
                f"{need.asked_by} needs {need.name}{need.requirement.specifier}, and there is {version}"
            )
    if wrong:
        raise KitError(f"{'; '.join(wrong)}: take a newer image, or --replace what is too old")
    write_lock(folder)
    brought = sorted(set(versions) - (image.keys() - replaced))
    held = ", ".join(
        f"{name} {image[name] or ''}".strip() for name in ("torch", "transformers") if name in image
    )
    page = README.format(
        version=parse_wheel_filename(own.name)[1],
        python=python,
        held=held,
        brought=", ".join(f"{name} {versions[name]}" for name in brought) or "this project",
    )
    (folder / "README.md").write_text(page, encoding="utf-8")


def read_image(path: Path) -> dict[str, Version | None]:
    """Versions by package of what ``pip freeze`` printed.

    Raises:
        KitError: no line names a package.
    """
    found: dict[str, Version | None] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if match := re.match(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:==\s*(\S+)|@)", line):
            try:
                found[canonicalize_name(match[1])] = Version(match[2]) if match[2] else None
            except InvalidVersion as error:
                raise KitError(f"{path}: {line.strip()}: no version that pip knows") from error
    if not found:
        raise KitError(f"{path} names no package: give what `pip freeze` prints in the image")
    return found


def build_wheel(folder: Path) -> Path:
    """This project's wheel, made of a copy, since a build leaves files beside its sources."""
    try:
        has_setuptools = Version(metadata.version("setuptools")) >= _BUILD_NEEDS
    except metadata.PackageNotFoundError:
        has_setuptools = False
    with tempfile.TemporaryDirectory() as copy:
        for name in _SOURCES:
            source, target = ROOT / name, Path(copy, name)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                target.parent.mkdir(exist_ok=True)
                shutil.copy(source, target)
        options = ["--no-build-isolation"] if has_setuptools else []
        pip("wheel", "--no-deps", *options, "--wheel-dir", str(folder.absolute()), copy)
    (wheel,) = folder.glob("*.whl")
    return wheel


def download(requirement: Requirement, folder: Path, python: str) -> Path:
    """One wheel from the index, in the version of constraints.txt where that names one."""
    before = set(folder.iterdir())
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(5, _GLIBC + 1)]
    pip(
        *("download", "--no-deps", "--only-binary=:all:", "--dest", str(folder.absolute())),
        *("--python-version", python, "--implementation", "cp"),
        *(part for name in (*platforms, "manylinux2014_x86_64") for part in ("--platform", name)),
        *("--constraint", str(ROOT / "constraints.txt")),
        f"{requirement.name}{requirement.specifier}",
    )
    (wheel,) = set(folder.iterdir()) - before
    return wheel


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    with tempfile.TemporaryDirectory() as empty:  # pip takes a folder here with a package's name for it
        done = subprocess.run(command, cwd=empty, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        # Where pip reaches no index, its last lines are about versions.
        call = f"pip {arguments[0]} {arguments[-1]}"
        raise KitError(f"{call} failed; does it reach a package index? It says:\n{done.stdout.strip()}")


def needs_of(wheel: Path, extras: Collection[str], python: str) -> Iterator[Need]:
    """What a wheel asks for on this Python and Linux, by itself and for these extras."""
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (one for one in opened.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", one))
        described = email.message_from_bytes(opened.read(name))
    image = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "os_name": "posix",
        "platform_machine": "x86_64",
        "platform_system": "Linux",
        "sys_platform": "linux",
    }
    for line in described.get_all("Requires-Dist", []):
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({**image, "extra": extra}) for extra in ("", *extras)):
            yield Need(requirement, str(described["Name"]))


def write_lock(folder: Path) -> None:
    """requirements.lock, which says where the wheels lie (beside it), and the hash of each."""
    lines = ["--no-index", "--find-links .", "--require-hashes"]
    for wheel in sorted(folder.glob("*.whl")):
        name, version, *_ = parse_wheel_filename(wheel.name)
        lines.append(f"{name}=={version} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}")
    (folder / "requirements.lock").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
