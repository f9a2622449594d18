"""Run a training as a program, and tell the worker above it why it failed."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ensemble.common.files import write_text
from ensemble.common.python_process import die_with_parent
from ensemble.common.torch_errors import is_out_of_memory, one_line


def run_program(train: Callable[[dict[str, Any]], None]) -> None:
    """Call ``train`` with the spec in the file that is the first argument; a second, JSON, replaces some fields.

    If it fails, the process exits with 1, and ``problem.json`` in the spec's folder ``out`` says why.
    """
    die_with_parent(os.getppid())
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if len(sys.argv) > 2:
        spec |= json.loads(sys.argv[2])
    try:
        train(spec)
    except Exception as error:
        traceback.print_exc()
        problem = {"text": one_line(error), "is_out_of_memory": lacks_memory(error)}
        write_text(Path(spec["out"]) / "problem.json", json.dumps(problem))
        sys.exit(1)


def lacks_memory(error: Exception) -> bool:
    """Return whether a training would fit with less memory, on its device or on the host."""
    return is_out_of_memory(error) or isinstance(error, MemoryError)
