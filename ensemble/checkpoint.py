"""What can be known of a checkpoint without loading it: its ``config.json`` and how its labels line up.

The parent reads this before any worker starts, so that a typo costs seconds and not a night.  Weights are the
worker's business.
"""

from __future__ import annotations

import difflib
import json
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.errors import CheckpointError
from ensemble.weights import weight_files, weight_problems

if TYPE_CHECKING:
    from ensemble.protocol import Activation

_HUB_SECONDS = 5.0
# Any one of these; without, transformers makes up an empty tokenizer and says nothing.
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "spiece*", "merges.txt", "*.tiktoken")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class Checkpoint:
    """A member's checkpoint as its ``config.json`` describes it.

    ``label_order[j]`` is the model's output column of the config's label ``j``; ``weight_bytes`` is the size
    of the weight files on disk, None where they are not here yet.
    """

    model_type: str
    architecture: str
    activation: Activation
    label_order: tuple[int, ...]
    weight_bytes: int | None
    warnings: tuple[str, ...] = ()


def inspect_checkpoint(
    name_or_path: str,
    revision: str | None,
    labels: Sequence[str],
    label_map: Mapping[str, str],
    problem_type: str | None,
) -> Checkpoint:
    """Read a checkpoint's ``config.json`` and match its labels to the config's.

    Args:
        name_or_path: a folder, or a model id on the Hugging Face hub.
        labels: the config's labels, in the order of the output columns.
        label_map: checkpoint's label -> config's label.
        problem_type: overrides the checkpoint's own.

    Raises:
        CheckpointError: no ``config.json``, or labels that do not match; every problem is listed.
    """
    path = _config_file(name_or_path, revision)
    config = _read_config(path, name_or_path)
    names = _label_names(config, name_or_path)
    if problems := [*_missing_files(path.parent)] if Path(name_or_path).is_dir() else []:
        raise CheckpointError(problems)
    kind = problem_type or config.get("problem_type")
    activation: Activation = "softmax"
    if kind == "multi_label_classification":
        activation = "sigmoid"
    elif kind == "regression" or len(names) == 1:
        activation = "none"
    stored = config.get("architectures")
    architecture = str(stored[0]) if isinstance(stored, list) and stored and stored[0] else ""
    warnings = []
    if "ForCausalLM" in architecture or "ForMaskedLM" in architecture:
        warnings.append(
            f"{name_or_path} was saved as {architecture}, which has no classification head; "
            "it will be refused unless its weights hold one"
        )
    return Checkpoint(
        model_type=str(config.get("model_type", "")),
        architecture=architecture,
        activation=activation,
        label_order=match_labels(names, labels, label_map, name_or_path),
        weight_bytes=sum(file.stat().st_size for file in weight_files(path.parent)) or None,
        warnings=tuple(warnings),
    )


def match_labels(
    names: Sequence[str], labels: Sequence[str], label_map: Mapping[str, str], where: str
) -> tuple[int, ...]:
    """For each of the config's labels, the model's output column that holds it.

    Raises:
        CheckpointError: the two sets differ; says which labels are missing, unknown or repeated.
    """
    if len(names) == 1 and len(labels) == 1:
        return (0,)  # a single column can only be one thing, whatever its name
    problems = [
        f"label_map: {key!r} is not a label of {where}{_did_you_mean(key, names)}"
        for key in label_map
        if key not in names
    ]
    mapped = [label_map.get(name, name) for name in names]
    if len(names) != len(labels):
        problems.append(
            f"{where} has {len(names)} labels ({_few(names)}), the config has {len(labels)} ({_few(labels)})"
        )
    elif not label_map and set(mapped).isdisjoint(labels):
        problems.append(
            f"the labels of {where} are {_few(names)}, not {_few(labels)}; say which is which with label_map, "
            f"for example label_map: {{{names[0]}: {labels[0]}}}"
        )
    else:
        problems += [
            f"label {name!r} of {where} is not in labels{_did_you_mean(name, labels)}; add it to label_map"
            for name in mapped
            if name not in labels
        ]
        problems += [
            f"two labels of {where} would both be {name!r}; mend label_map"
            for name in dict.fromkeys(mapped)
            if mapped.count(name) > 1
        ]
    if problems:
        raise CheckpointError(problems)
    return tuple(mapped.index(label) for label in labels)


def _config_file(name_or_path: str, revision: str | None) -> Path:
    folder = Path(name_or_path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise CheckpointError(
                f"{name_or_path} has no config.json; name the folder that save_pretrained wrote"
                + _nested_hint(folder)
            )
        return folder / "config.json"
    if folder.is_file():
        raise CheckpointError(f"{name_or_path} is a file; name the folder that holds its config.json")
    # "models/gemma" is a mistyped path where there is a folder "models", and not a model of an organisation.
    is_path = folder.parent != Path() and folder.parent.is_dir()
    if is_path or not _HUB_ID.fullmatch(name_or_path) or name_or_path.startswith("."):
        raise CheckpointError(f"{name_or_path}: no such folder{_near_folder(folder)}")
    return _hub_config_file(name_or_path, revision)


def _hub_config_file(name: str, revision: str | None) -> Path:
    # Imported here because it costs 0.2 s, which users of local folders need not pay.
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    cached = try_to_load_from_cache(name, "config.json", revision=revision)
    if isinstance(cached, str):
        return Path(cached)
    if not _hub_can_be_asked():
        raise CheckpointError(
            f"{name}: no such folder{_near_folder(Path(name))}, and the Hugging Face hub cannot be reached from "
            "here; mend the path, or download the model first"
        )
    try:
        return Path(hf_hub_download(name, "config.json", revision=revision, etag_timeout=_HUB_SECONDS))
    except Exception as error:  # the hub's errors share no base; each of them means "not to be had"
        last = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {last[0] if last else ''}"[:200]
        raise CheckpointError(
            f"{name}: no such folder{_near_folder(Path(name))}, and its config.json could not be had from the "
            f"Hugging Face hub ({reason}); mend the path, or download the model first"
        ) from error


def _missing_files(folder: Path) -> Iterator[str]:
    yield from weight_problems(folder)
    if not any(next(folder.glob(pattern), None) for pattern in _TOKENIZER_FILES):
        yield f"{folder} has no tokenizer files (such as tokenizer.json); copy them too"


def _hub_can_be_asked() -> bool:
    """False where there is no network; asking the hub all the same would take half a minute of retries."""
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


def _read_config(path: Path, where: str) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{where}: its config.json cannot be read ({error})") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{where}: its config.json is not a JSON object")
    return config


def _label_names(config: Mapping[str, Any], where: str) -> list[str]:
    # transformers' own defaults: two labels where neither id2label nor num_labels is stored.
    stored = config.get("id2label")
    if isinstance(stored, dict) and stored:
        try:
            return [str(stored[key]) for key in sorted(stored, key=int)]
        except ValueError:
            raise CheckpointError(
                f"{where}: the keys of id2label in its config.json are no numbers"
            ) from None
    count = config.get("num_labels") or 2
    if not isinstance(count, int):
        raise CheckpointError(f"{where}: num_labels in its config.json is no number")
    return [f"LABEL_{index}" for index in range(count)]


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4])
    return f"{shown}, ..." if len(names) > 4 else shown


def _did_you_mean(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f" ({_few(known)})"


def _near_folder(folder: Path) -> str:
    if not folder.parent.is_dir():
        return f" ({folder.parent} does not exist either)" if folder.parent != folder else ""
    names = [entry.name for entry in folder.parent.iterdir() if entry.is_dir()]
    near = difflib.get_close_matches(folder.name, names, n=1)
    return f"; did you mean {folder.parent / near[0]}?" if near else ""


def _nested_hint(folder: Path) -> str:
    for child in sorted(folder.glob("*/config.json")) + sorted(folder.glob("*/*/config.json")):
        return f", perhaps {child.parent}"
    return ""
