"""Find a small file of a checkpoint in a folder or on the Hugging Face hub."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Any

from ensemble.common.errors import CheckpointError
from ensemble.common.files import dangling_link, load_json, unreadable
from ensemble.common.redact import Redactor
from ensemble.common.text import first_line, nearest, not_attached
from ensemble.members.huggingface.checkpoint.weight_files import gguf_problem

_HUB_SECONDS = 5.0
_KAGGLE = "KAGGLE_KERNEL_RUN_TYPE"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def find_file(name_or_path: str, file: str, revision: str | None = None) -> Path:
    """Find a file that every checkpoint of a kind has, such as ``config.json``.

    Args:
        name_or_path: a folder, or an id on the Hugging Face hub.
        revision: the hub's branch, tag or commit.

    Raises:
        CheckpointError: there is no such folder or file, or the hub does not return it.
    """
    folder = Path(name_or_path)
    link_problem = dangling_link(folder) or dangling_link(folder / file)
    if link_problem:
        raise CheckpointError(link_problem)
    try:
        is_folder, has_file = folder.is_dir(), (folder / file).is_file()
    except OSError as error:
        raise CheckpointError(unreadable(folder, error)) from error
    if has_file:
        return folder / file
    gguf = gguf_problem(folder)
    if gguf:
        raise CheckpointError(gguf)
    if is_folder:
        deeper = [*sorted(folder.glob(f"*/{file}")), *sorted(folder.glob(f"*/*/{file}"))]
        hint = ""
        if file == "config.json" and (folder / "adapter_config.json").is_file():
            hint = "; it holds an adapter: name it with adapter_name_or_path, and its base here"
        elif deeper:
            hint = f", perhaps {deeper[0].parent}"
        raise CheckpointError(
            f"{name_or_path} has no {file}; name the folder that save_pretrained wrote{hint}"
        )
    if folder.is_file():
        raise CheckpointError(f"{name_or_path} is a file; name the folder that holds its {file}")
    problem = f"{name_or_path}: no such folder"
    advice = not_attached(folder)
    if advice:
        raise CheckpointError(f"{problem}{advice}")
    if folder.parent.is_dir():
        near = nearest(folder.name, (entry.name for entry in folder.parent.iterdir() if entry.is_dir()))
        problem += f"; did you mean {folder.parent / near}?" if near is not None else ""
    elif folder.parent != folder:
        problem += f" ({folder.parent} does not exist either; paths start at the working directory)"
    # If there is a folder "models", "models/gemma" is a mistyped path, not a model of an organisation.
    is_path = folder.parent != Path() and folder.parent.is_dir()
    if is_path or not _HUB_ID.fullmatch(name_or_path) or name_or_path.startswith("."):
        raise CheckpointError(problem)
    return _hub_file(name_or_path, file, revision, problem)


def hub_folder(name: str, revision: str | None) -> Path | None:
    """Return the folder of the hub's cache that has the ``config.json`` of a model; None: there is none."""
    if not _HUB_ID.fullmatch(name) or name.startswith("."):
        return None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(cached).parent if isinstance(cached, str) else None


def _hub_file(name: str, file: str, revision: str | None, problem: str) -> Path:
    """Return the hub's file; ``problem`` begins the sentence of an error."""
    # Imported late because it takes 0.2 s.
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache

    cached = try_to_load_from_cache(name, file, revision=revision)
    if isinstance(cached, str):
        return Path(cached)
    if not hub_can_be_reached():
        offline = constants.HF_HUB_OFFLINE
        reason = "HF_HUB_OFFLINE is set" if offline else f"{constants.ENDPOINT} cannot be reached"
        advice = (
            f"fix the path, or run hf download {name} --local-dir FOLDER elsewhere and name a copy of FOLDER"
        )
        if _KAGGLE in os.environ:
            advice = (
                "add the model to the notebook as an input, and name its folder below /kaggle/input (or switch the "
                "internet on in the notebook's settings, which a competition's hidden run does not have)"
            )
        raise CheckpointError(
            f"{problem}, and as a model of the hub it is not in the cache, and cannot be downloaded ({reason}); "
            f"{advice}"
        )
    try:
        return Path(hf_hub_download(name, file, revision=revision, etag_timeout=_HUB_SECONDS))
    except Exception as error:  # the hub's errors share no base class
        # Masked before it is cut, since a part of a secret would not be recognized.
        reason = Redactor(os.environ)(first_line(error))[:200]
        raise CheckpointError(
            f"{problem}, and the Hugging Face hub did not give its {file} ({reason}); fix the path, or download "
            "the model elsewhere and name its folder"
        ) from error


def read_config(path: Path, called: str) -> dict[str, Any]:
    """Return the object in a small file of a checkpoint; errors begin with ``called``.

    Raises:
        CheckpointError: the file cannot be read, or is not a JSON object.
    """
    try:
        return load_json(path)
    except OSError as error:
        raise CheckpointError(unreadable(path, error)) from error
    except ValueError as error:
        raise CheckpointError(f"{called} is not JSON ({error}); copy it again") from error
    except TypeError as error:
        raise CheckpointError(f"{called} is {error}") from error


def how_to_install(package: str) -> str:
    """Return the advice for a package that is not installed."""
    wheel = f"pip download --no-deps {package}"
    if _KAGGLE in os.environ:  # a competition's hidden run has no internet
        return (
            f"put its wheel into a dataset, where there is internet (scripts/kaggle_kit.py does, or {wheel}), add "
            "that to the notebook, and "
            f"pip install --no-deps --no-index --find-links /kaggle/input/DATASET {package}"
        )
    return (
        f"pip install {package}; without internet, {wheel} on another machine, copy the wheel here, and "
        f"pip install --no-deps --no-index --find-links FOLDER {package}"
    )


def hub_can_be_reached() -> bool:
    """Return whether the hub can be reached; without a network, the hub's client retries for half a minute."""
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    from huggingface_hub import constants

    address = urlsplit(constants.ENDPOINT)
    if constants.HF_HUB_OFFLINE or address.scheme in getproxies():
        return not constants.HF_HUB_OFFLINE
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        socket.create_connection((address.hostname or "", port), timeout=_HUB_SECONDS).close()
    except OSError:
        return False
    return True
