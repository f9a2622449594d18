"""Ask one short process what only the library of members' files can tell, and keep its answers.

The parent imports neither torch nor transformers, so a process that does answers for all members of a config at
once.  Answers without problems are kept in the user's cache, by the content of the files that they depend on.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from ensemble.common.files import write_text
from ensemble.common.packages import installed_versions
from ensemble.common.python_process import python_command, python_environment

# For the start of its process, which imports torch, and for each question; on a busy machine.
TIMEOUT_SECONDS, SECONDS_PER_QUESTION = 300.0, 30.0
# Names another folder than the user's cache.
CACHE = "ENSEMBLE_CACHE"
_NO_NETWORK = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
# How much of a file with weights is read for a question's key, at most.
_BEGINNING_BYTES = 1 << 20
# Nobody sees its output, and no device is needed.
_QUIET = {"CUDA_VISIBLE_DEVICES": "", "TRANSFORMERS_VERBOSITY": "warning", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True)
class Question:
    """Hold what a process of ``module`` is asked about a folder.

    Attributes:
        module: its ``main`` reads a JSON list of questions and writes a line of JSON with the answer to each.  A
            file or a package that the key does not know may mend ``problems`` of an answer: those are asked again.
        arguments: as JSON can hold them; the answer depends on them and not on the folder's name.
        names: further arguments, of which only the words of problems depend.
        files, weights: those that the answer depends on, the module's own among them; of weights on their headers.
        packages: whose versions the answer depends on.
    """

    module: str
    folder: Path
    arguments: Mapping[str, Any]
    files: tuple[Path, ...]
    packages: tuple[str, ...]
    names: Mapping[str, str] = field(default_factory=dict)
    weights: tuple[Path, ...] = ()

    def key(self) -> str:
        """Return a digest of all that the answer depends on; raise OSError if a file cannot be read."""
        digest = sha256()
        contents = [(path, path.read_bytes()) for path in self.files]
        contents += [(path, _header(path)) for path in self.weights]
        for path, content in contents:
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
            digest.update(content)
        versions = installed_versions(self.packages)
        digest.update(json.dumps([self.arguments, versions], sort_keys=True, default=str).encode())
        return digest.hexdigest()


def _header(path: Path) -> bytes:
    """Return the beginning of a file with weights; of safetensors only names and shapes, which folds share."""
    with path.open("rb") as file:
        beginning = file.read(_BEGINNING_BYTES)
    if path.suffix != ".safetensors":
        return beginning
    return beginning[: 8 + int.from_bytes(beginning[:8], "little")]


@dataclass(frozen=True)
class Answer:
    """Hold the fields of an answer; None with the reason if the process gave none."""

    fields: Mapping[str, Any] | None
    failure: str = ""


# The answers of this process, by the question's key and folder; the cache on disk may be unwritable.
_answers: dict[tuple[str, Path], Answer] = {}


def ask(questions: Sequence[Question]) -> list[Answer]:
    """Return the answers, in order; one process for each module gives those that are not kept yet."""
    places: list[tuple[str, Path] | None] = []
    open_questions: dict[tuple[str, Path], Question] = {}
    for question in questions:
        place = None
        with contextlib.suppress(OSError):
            place = question.key(), question.folder
        places.append(place)
        if place is not None and place not in _answers:
            try:
                _answers[place] = Answer(json.loads(_cached(place[0]).read_text(encoding="utf-8")))
            except (OSError, ValueError):
                open_questions[place] = question
    for module in dict.fromkeys(question.module for question in open_questions.values()):
        of_module = {
            place: question for place, question in open_questions.items() if question.module == module
        }
        _answers.update(zip(of_module, ask_process(module, [*of_module.values()]), strict=True))
        for place in of_module:
            fields = _answers[place].fields
            if fields is not None and not any(fields[key] for key in fields if key.endswith("problems")):
                with contextlib.suppress(OSError):
                    _cached(place[0]).parent.mkdir(parents=True, exist_ok=True)
                    write_text(_cached(place[0]), json.dumps(fields))
    return [
        Answer(None, "its files cannot be read") if place is None else _answers[place] for place in places
    ]


def ask_process(module: str, questions: Sequence[Question]) -> list[Answer]:
    """Start a process that answers the questions; those behind a failure stay without an answer."""
    asked = [{"folder": str(item.folder), **item.names, **item.arguments} for item in questions]
    failure = ""
    timeout = TIMEOUT_SECONDS + SECONDS_PER_QUESTION * len(questions)
    try:
        done = subprocess.run(
            python_command(module),
            input=json.dumps(asked, default=str).encode(),
            capture_output=True,
            timeout=timeout,
            env={**os.environ, **python_environment(), **_NO_NETWORK, **_QUIET},
        )
        lines = done.stdout.splitlines()
        last_words = done.stderr.decode("utf-8", "replace").strip().splitlines()
        if done.returncode:
            failure = f"exit code {done.returncode}" + (f": {last_words[-1][:200]}" if last_words else "")
    except subprocess.TimeoutExpired as error:
        lines, failure = (error.stdout or b"").splitlines(), f"no answer within {timeout:g} s"
    except OSError as error:
        lines, failure = [], str(error)
    answers = []
    for line in lines[: len(questions)]:
        with contextlib.suppress(ValueError):  # a line that was cut
            answers.append(Answer(json.loads(line)))
    missing = Answer(None, failure or "it ended without an answer")
    return [*answers, *[missing] * (len(questions) - len(answers))]


def _cached(key: str) -> Path:
    folder = os.environ.get(CACHE) or os.environ.get("XDG_CACHE_HOME")
    root = Path(folder or os.path.expanduser("~/.cache"))  # noqa: PTH111  which never fails
    return root / "ensemble" / "checkpoints" / f"{key}.json"
