"""Read a checkpoint's labels, and match them to the config's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ensemble.common.errors import CheckpointError
from ensemble.common.text import listed, nearest, plural

if TYPE_CHECKING:
    from ensemble.common.protocol import Activation


def saved_as(config: Mapping[str, Any]) -> str:
    """Return the class that a checkpoint was saved as; empty: its ``config.json`` does not tell."""
    stored = config.get("architectures")
    return str(stored[0]) if isinstance(stored, list) and stored and stored[0] else ""


def label_names(config: Mapping[str, Any], where: str) -> list[str]:
    """Return the labels in a ``config.json``, in the order of the model's output columns.

    Raises:
        CheckpointError: they cannot be read.
    """
    stored = config.get("id2label")
    count = config.get("num_labels") or 2  # the default of transformers
    try:
        if isinstance(stored, dict) and stored:
            return [str(stored[key]) for key in sorted(stored, key=int)]
        return [f"LABEL_{index}" for index in range(count)]
    except (ValueError, TypeError):
        problem = "num_labels in its config.json is not a number"
        if stored:
            problem = "the keys of id2label in its config.json are not numbers"
        raise CheckpointError(f"{where}: {problem}") from None


def match_labels(
    names: Sequence[str], labels: Sequence[str], label_map: Mapping[str, str], where: str
) -> tuple[int, ...]:
    """Return the model's output column for each of the config's labels.

    Raises:
        CheckpointError: labels are missing, unknown or repeated.
    """
    if len(names) == 1 and len(labels) == 1:
        return (0,)  # whatever its name
    problems = [
        f"label_map: {key!r} is not a label of {where}{_did_you_mean(key, names)}"
        for key in label_map
        if key not in names
    ]
    mapped = [label_map.get(name, name) for name in names]
    if len(names) != len(labels):
        has = f"{where} has {plural(len(names), 'label')} ({_few(names)})"
        problems.append(f"{has}, the config has {len(labels)} ({_few(labels)})")
    elif not label_map and set(mapped).isdisjoint(labels):
        example = f"for example label_map: {{{names[0]}: {labels[0]}}}"
        problems.append(
            f"the labels of {where} are {_few(names)}, not {_few(labels)}; map them with label_map, {example}"
        )
    else:
        problems += [
            f"label {name!r} of {where} is not in labels{_did_you_mean(name, labels)}; add it to label_map"
            for name in mapped
            if name not in labels
        ]
        repeated = (name for name in dict.fromkeys(mapped) if mapped.count(name) > 1)
        problems += [f"two labels of {where} would both become {name!r}; fix label_map" for name in repeated]
    if problems:
        raise CheckpointError(problems)
    return tuple(mapped.index(label) for label in labels)


def activation_of(problem_type: str | None, labels: int) -> Activation:
    """Return what a head's outputs are; without a ``problem_type`` a single output is a regression's."""
    if problem_type == "multi_label_classification":
        return "sigmoid"
    return "none" if problem_type == "regression" or labels == 1 else "softmax"


def _few(names: Sequence[str]) -> str:
    return listed(names, 4, str)


def _did_you_mean(name: str, choices: Sequence[str]) -> str:
    near = nearest(name, choices)
    return f"; did you mean {near!r}?" if near is not None else f" ({_few(choices)})"
