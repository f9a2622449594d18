"""The config of a run beside a config's own: what it leaves out, and what stays as the config has it."""

from __future__ import annotations

from pathlib import Path

import yaml

from ensemble.pipeline.load import derived_run, load

LEFT_OUT = ("submission", "rules", "limit", "fitted_on", "copy_to", "report_to")


def test_a_derived_run_keeps_all_keys_but_those_of_the_configs_own_results(tmp_path: Path) -> None:
    views = [{"name": "plain"}, {"name": "swapped", "swap": {"columns": ["p", "q"]}, "when": {"share": 0.5}}]
    config = {
        "data": {"path": "test.csv"},
        "labels": ["a", "b"],
        "models": [
            {"name": "given", "task_type": "csv", "path": "given.csv"},
            {
                "name": "member",
                "model_name_or_path": "member",
                "prompt_template": "{{ p }} {{ q }}",
                "views": views,
                "when": {"margin_below": 0.2},
                "weight": 3,
                "calibration": {"temperature": 1.5},
            },
        ],
        "ensemble": {"method": "power_mean", "power": 2},
        "rules": [{"when": "{{ p == q }}", "set": {"a": 0.9}}],
        "submission": {"sample": "sample.csv"},
        "fitted_on": {"rows": 5, "sha256": "0" * 64, "metric": "log_loss", "value": 0.3},
        "copy_to": "s3://bucket/folder",
        "report_to": "mlflow",
        "limit": 10,
        "time_limit": "1h",
        "retries": 3,
        "output_dir": "runs/own",
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    loaded = load(path)
    derived = derived_run(loaded, loaded.config.models[1:], tmp_path / "other", retries=0)
    before, after = loaded.config.model_dump(), derived.config.model_dump()
    assert {key for key in before if before[key] != after[key]} == {
        *LEFT_OUT,
        *("models", "ensemble", "output_dir", "retries"),
    }
    assert [after[key] for key in LEFT_OUT] == [None] * len(LEFT_OUT)
    assert derived.config.ensemble.method == "mean"
    assert (derived.config.output_dir, derived.config.retries) == (tmp_path / "other", 0)
    (member,) = derived.config.models
    assert (member.weight, member.when, member.views_with_when) == (1.0, None, {})
    assert member.calibration == loaded.config.models[1].calibration
    assert [view.name for view in member.counted_views] == ["plain", "swapped"]
    assert (derived.text, derived.overrides) == (loaded.text, loaded.overrides)
