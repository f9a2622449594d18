"""What stands for a torch built for CUDA: its library's list of architectures, over the torch that is installed."""

from __future__ import annotations

from pathlib import Path

# As torch.cuda.get_arch_list() returns them in pytorch's wheels: torch 2.6 for CUDA 12.6, 2.10 for 12.8 (in
# Kaggle's image), 2.8 for 12.9, 2.13 for 13.0. Those of 2.10 and 2.13 were read from the wheels.
CUDA_126 = "sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90"
CUDA_128 = "sm_70 sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"
CUDA_129 = f"{CUDA_128} compute_120"
CUDA_130 = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"
# Imports the installed torch in its own place, as for processes of workers.
_PACKAGE = """
import importlib, sys
from pathlib import Path
sys.path.remove(str(Path(__file__).parents[1]))
del sys.modules["torch"]
importlib.import_module("torch")
"""


def stand_in(folder: Path, architectures: str) -> str:
    """Make a package torch that looks so to whoever does not import it; the folder for PYTHONPATH."""
    library = folder / "torch" / "lib" / "libtorch_python.so"
    library.parent.mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(_PACKAGE, encoding="utf-8")
    around = b"\x7fELF_get_sm_carveout_experimental\0sm_\0H\x89 is not sm_80 or newer\0"
    library.write_bytes(around + architectures.encode() + b"\0\0\0" + around)
    return str(folder)
