"""Ask a Python that the user names for its version and its installed distributions."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from ensemble.common.errors import CheckpointError
from ensemble.common.files import FileState, file_state
from ensemble.common.packages import DISTRIBUTION
from ensemble.common.python_process import environment_of_commands

_SECONDS = 120.0
# Any Python from 3.8 on runs this. The first distribution of a name is the one that is imported.
_QUESTION = """
import json, platform, sys
sys.path = [folder for folder in sys.path if folder]
from importlib.metadata import distributions
found = {}
for distribution in distributions():
    found.setdefault(str(distribution.metadata["Name"]).lower().replace("_", "-"), distribution.version)
print(json.dumps([platform.python_version(), found, sys.path]))
"""
# The answers of this process, by the program and PYTHONPATH, with the states of all folders that they depend on.
_answers: dict[tuple[str, str | None], tuple[dict[str, FileState | None], Mapping[str, str]]] = {}


def is_python(program: str) -> bool:
    """Return whether a program is a Python, judged by its name."""
    return re.fullmatch(r"python(\d+(\.\d+)?t?)?", Path(program).name) is not None


def installed_for(program: str) -> Mapping[str, str]:
    """Return the versions of "Python" and of what a Python would import, by name; raise CheckpointError."""
    key = (program, os.environ.get("PYTHONPATH"))
    states, versions = _answers.get(key, ({}, {}))
    if states and all(file_state(path) == state for path, state in states.items()):
        return versions
    environment = {**os.environ, **environment_of_commands()}
    try:
        done = subprocess.run(
            [program, "-"],
            input=_QUESTION.encode(),
            capture_output=True,
            timeout=_SECONDS,
            check=True,
            env={name: value for name, value in environment.items() if value is not None},
        )
        python, found, folders = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        words = (getattr(error, "stderr", None) or b"").decode("utf-8", "replace").strip()[-200:]
        raise CheckpointError(
            f"command: {program} does not tell what is installed for it ({error} {words}); repair this Python, or "
            "name another"
        ) from None
    found.pop(DISTRIBUTION, None)  # which a command does not import
    versions = {"Python": python, **found}
    _answers[key] = {path: file_state(path) for path in (program, *folders)}, versions
    return versions
