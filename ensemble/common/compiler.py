"""What torch.compile needs of a machine beside torch."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

from ensemble.common.files import user_cache_folder

CODE_FOLDER = "TORCHINDUCTOR_CACHE_DIR"


def why_no_compiler() -> str:
    """Why torch.compile cannot make code for this machine's CPU, in a clause; empty where nothing is missing.

    It calls $CXX or g++, on macOS clang++ (torch/_inductor/config.py, ``cpp.cxx``), includes Python.h, and does not
    quote the folders of libraries (cpp_builder.py, ``_libraries_dirs_args``, seen in torch 2.13).
    """
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler here ({compiler})"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "Python's header files are not installed here (python3-dev)"
    torch = importlib.util.find_spec("torch")
    folders = [sysconfig.get_config_var("LIBDIR") or "", (torch and torch.origin) or ""]
    if spaced := [folder for folder in folders if " " in folder]:
        return f"torch cannot link where the path of Python or torch has a space ({spaced[0]})"
    place = named_code_folder() or user_cache_folder()
    if place is not None and " " in str(place):
        return f"torch cannot compile into a folder whose path has a space ({place}); name another in {CODE_FOLDER}"
    return ""


def named_code_folder() -> Path | None:
    """Where compiled code is to be kept, if the environment says so."""
    named = Path(os.environ.get(CODE_FOLDER, ""))
    # Imported already, torch has named a folder of its own there: torchinductor_USER in the temporary one.
    is_in_temporary = named.parent == Path(tempfile.gettempdir())
    is_torchs = is_in_temporary and named.name.startswith("torchinductor_")
    return None if named == Path() or is_torchs else named
