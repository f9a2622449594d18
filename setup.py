"""Puts the demo's files into a wheel.  Everything else about the build stands in pyproject.toml."""

from __future__ import annotations

import io
import lzma
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from ensemble.commands.demo import ARCHIVE, checkout_files  # noqa: E402  needs ROOT

# Most of it is weights, numbers of two bytes: the first byte is as good as random, the second one is not.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9, "lc": 0, "lp": 1, "pb": 1}]


class BuildWithDemo(build_py):
    """Builds the package with the demo's archive, but where it is installed to be edited: that one reads demo/."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode and (ROOT / "demo").is_dir():
            Path(self.build_lib, ARCHIVE).write_bytes(archive(checkout_files(ROOT)))


def archive(files: Mapping[str, bytes]) -> bytes:
    """The files as a .tar.xz, the same bytes whenever and wherever it is made."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return lzma.compress(content.getvalue(), filters=FILTERS)


setup(cmdclass={"build_py": BuildWithDemo})
