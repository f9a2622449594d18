"""Write the demo, a config with all files that it names, into a folder.

A wheel holds these files in one archive, which setup.py makes of a checkout's ``demo/`` and ``configs/demo.yaml``.
"""

from __future__ import annotations

import lzma
import os
import tarfile
from pathlib import Path

from ensemble.common.errors import ConfigError, OutputError, WriteError
from ensemble.common.files import (
    TEMPORARY,
    atomic_path,
    cannot_write,
    remove_temporary_files,
    unwritable_reason,
)
from ensemble.common.text import listed, quoted

ARCHIVE = "ensemble/demo.tar.xz"  # beside the other files of the package, in a wheel
_ROOT = Path(__file__).resolve().parents[2]
# Written first: a folder that has it is a demo's folder.
_MARK = "LICENSE.WordNet"
_MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_FROM_DEMO = (
    *(_MARK, "sample_submission.csv", "test.csv"),
    *(f"models/{model}/{name}" for model in ("gemma2", "llama") for name in _MODEL_FILES),
)


def write_demo(folder: Path) -> str:
    """Write the demo's files that a folder lacks, and return a sentence that says what was written.

    Files that are there stay as they are. A command that was killed here is completed by the next one.

    Raises:
        OutputError: the folder holds other files, or cannot be written.
        ConfigError: this installation has no demo, or a damaged one.
    """
    files = demo_files()
    if reason := unwritable_reason("ensemble demo", folder):
        raise OutputError(reason)
    try:
        for name in files:
            remove_temporary_files(folder / name)
        names = [path.name for path in folder.iterdir()] if folder.exists() else []
        others = [name for name in names if TEMPORARY not in name]
        if others and _MARK not in others:
            raise OutputError(
                f"{folder}: holds other files, such as {quoted(min(others))}; name a new folder with --copy FOLDER"
            )
        missing = [name for name in files if not os.path.lexists(folder / name)]
        for name in missing:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with atomic_path(folder / name) as temporary:
                temporary.write_bytes(files[name])
    except OSError as error:
        raise OutputError(cannot_write("ensemble demo", folder, error)) from error
    except WriteError as error:
        raise OutputError(error.problems) from error
    if not missing:
        return f"{folder} is there already; its files stay as they are"
    what = "a config, a table and two small models" if len(missing) == len(files) else listed(missing, 3, str)
    return f"{folder}: wrote {what}"


def demo_files() -> dict[str, bytes]:
    """Return the demo's files by name, from the archive of a wheel or from a checkout."""
    archive = _ROOT / ARCHIVE
    try:
        if archive.is_file():
            with tarfile.open(archive) as opened:
                return {name: file.read() for name in opened.getnames() if (file := opened.extractfile(name))}
        return checkout_files(_ROOT)
    except FileNotFoundError as error:
        raise ConfigError(
            f"this installation has no demo ({ARCHIVE}); install a wheel that was built from a whole checkout"
        ) from error
    except (OSError, EOFError, tarfile.TarError, lzma.LZMAError) as error:
        raise ConfigError(f"{archive} cannot be read ({error}); install ensemble again") from error


def checkout_files(root: Path) -> dict[str, bytes]:
    """Return the demo's files by name, from a checkout or a source distribution."""
    _, _, config = (root / "configs/demo.yaml").read_text(encoding="utf-8").partition("\n")  # without $schema
    config = config.replace("/../demo/", "/").replace("output_dir: ", "output_dir: ${CONFIG_DIR}/")
    files = {name: (root / "demo" / name).read_bytes() for name in _FROM_DEMO}
    return {**files, "README.md": (root / "demo/copy.md").read_bytes(), "config.yaml": config.encode()}
