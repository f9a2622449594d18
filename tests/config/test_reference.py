"""The config reference and docs/config.schema.json are in step with the models, and the schema with the loader."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from ensemble.common.errors import ConfigError
from ensemble.pipeline.load import load
from tests.project import ROOT

SPEC = importlib.util.spec_from_file_location("make_reference", ROOT / "scripts/make_reference.py")
assert SPEC is not None
assert SPEC.loader is not None
reference = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(reference)
YAML_FILES = sorted((ROOT / "configs").rglob("*.yaml"))
# A file that is read over another one is no whole config.
CONFIGS = [path for path in YAML_FILES if "output_dir:" in path.read_text(encoding="utf-8")]
WHOLE: dict[str, Any] = {
    "data": {"path": "t.csv", "label_columns": ["a", 1]},
    "labels": ["a", 1],
    "models": [
        {"name": "a", "model_name_or_path": "models/a", "text_column": ["one", "two"], "num_gpus": 0},
        {
            "name": "b",
            "prompt_template": "{{ x }}",
            "batch_size": 8,
            "weight": 2,
            "replicas": "auto",
        },
        {"name": "mate", "task_type": "csv", "path": "mate.csv"},
    ],
    "defaults": {"model_name_or_path": "models/b", "quantization_config": {"load_in_4bit": True}},
    "ensemble": {"method": "geometric_mean"},
    "submission": {"sample": "s.csv", "columns": {"A": "a"}},
    "output_dir": "runs/x",
    "time_limit": "8h30m",
    "hang_timeout": 90,
    "devices": [0, "GPU-1"],
    "launcher": {"local": {}},
}


def is_valid(document: object) -> bool:
    validator = jsonschema.Draft202012Validator(json.loads(reference.SCHEMA.read_text("utf-8")))
    return bool(validator.is_valid(document))


def test_page_and_schema_are_in_step() -> None:
    advice = "run: python scripts/make_reference.py"
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), advice
    assert reference.SCHEMA.read_text(encoding="utf-8") == reference.schema_text(), advice


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_config_names_the_schema_and_follows_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    schema = os.path.relpath(reference.SCHEMA, path.parent)
    assert text.startswith(f"# yaml-language-server: $schema={schema}\n")
    assert is_valid(yaml.safe_load(text))


def test_the_schema_takes_what_the_loader_takes(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(WHOLE), encoding="utf-8")
    assert load(tmp_path / "c.yaml").config.models[1].weight == 2
    assert is_valid(WHOLE)


@pytest.mark.parametrize(
    "change",
    [
        {"lables": ["a"]},
        {"fill": "mean"},
        {"retries": -1},
        {"data": {"path": "t.csv", "id": "x"}},
        {"models": [{"name": "a", "model_name_or_path": "m", "text_column": "t", "weigth": 2}]},
        {"models": [{"name": "a", "task_type": "csv", "path": "m.csv", "dtype": "float16"}]},
        {"models": [{"model_name_or_path": "m", "text_column": "t"}]},
        {"models": [{"name": "a", "model_name_or_path": "m", "text_column": "t", "dtype": "half"}]},
    ],
    ids=str,
)
def test_what_both_refuse(change: dict[str, Any], tmp_path: Path) -> None:
    plain = {**WHOLE, "models": WHOLE["models"][:1], **change}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(plain), encoding="utf-8")
    with pytest.raises(ConfigError):
        load(tmp_path / "c.yaml")
    assert not is_valid(plain)
