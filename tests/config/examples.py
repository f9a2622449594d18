"""Configs that the tests here start from, and short ways to read one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ensemble.config.document import Document, apply_overrides, parse

WHOLE = """\
data: {path: test.csv, id_column: id, label_column: label}
labels: [winner_model_a, winner_model_b, winner_tie]
models:
  - name: gemma2
    model_name_or_path: models/gemma-2-9b
    prompt_template: "<prompt>: {{ prompt | fromjson | join(' ') }} ..."
    max_length: 2048
    weight: 0.6
  - name: llama3
    model_name_or_path: models/llama-3-8b
    weight: 0.4
defaults: {prompt_template: "{{ text }}", max_length: 1024}
ensemble: {method: mean}
submission: {sample: sample_submission.csv, path: submission.csv}
output_dir: runs/first
"""
SMALL: dict[str, Any] = {
    "data": {"path": "test.csv"},
    "labels": ["neg", "pos"],
    "models": [{"name": "a", "model_name_or_path": "models/a", "text_column": "text"}],
    "output_dir": "runs/first",
}
BASE = """\
data: {path: a.csv}
labels: [a, b]
models:
  - name: gemma
    weight: 1
  - name: llama-3.1
    label_map: {x.y: a}
submission:
"""
FILE = Path("my config.yaml")
Load = Callable[..., Any]  # a LoadedConfig, whose models have the keys of their kinds
Problems = Callable[..., tuple[str, ...]]


def small(**model: Any) -> dict[str, Any]:
    """A valid config whose one model has these keys too; None takes a key away."""
    content = copy.deepcopy(SMALL)
    content["models"][0].update(model)
    content["models"][0] = {key: value for key, value in content["models"][0].items() if value is not None}
    return content


def begin(problems: Sequence[str], *starts: str) -> bool:
    """Return whether each problem, in order, begins with its place and first words."""
    return len(problems) == len(starts) and all(map(str.startswith, problems, starts))


def read(text: str) -> Document:
    return parse(text, FILE)


def overridden(text: str, *overrides: str) -> Document:
    document = read(text)
    apply_overrides(document, overrides)
    return document
