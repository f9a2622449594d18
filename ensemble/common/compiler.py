"""What torch.compile needs of a machine beside torch."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path


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
    return ""
