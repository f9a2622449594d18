"""Members whose outputs are numbers: computed, merged, scored and reported as such."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.metrics import root_mean_squared_error

from tests.checkpoints import make_checkpoint, reference
from tests.members.pooled_cls.test_pooled_cls import linear, make_backbone, pooled_reference, save_head
from tests.project import Project

pytestmark = pytest.mark.usefixtures("warm")


@pytest.mark.long
@pytest.mark.parametrize("targets", [["score"], ["tone", "length"]], ids=len)
def test_numbers_are_merged_and_scored_as_numbers(targets: list[str], project: Project) -> None:
    where, count = project.folder, len(targets)
    plain = make_checkpoint(
        where / "plain", "bert", targets, problem_type="regression" if count > 1 else None
    )
    backbone, head = make_backbone(where / "backbone", "llama"), linear(outputs=count)
    save_head(where / "head.safetensors", head)
    texts = [text for text in project.texts if text][:50]
    expected = {
        "plain": reference(plain, texts, 128, "none"),
        "pooled": pooled_reference(backbone, head, "lasttoken", texts, max_length=128),
    }
    expected["ensemble"] = 0.75 * expected["plain"] + 0.25 * expected["pooled"]
    assert min(values.min() for values in expected.values()) < 0, "no probabilities"
    # One of the two knows it nearly.
    truth = expected["pooled"] + np.random.default_rng(0).normal(size=(len(texts), count)) / 10
    rows = [[f"r{number}", text, *map(str, truth[number])] for number, text in enumerate(texts)]
    project.write_csv("test.csv", ["id", "text", *targets], rows)
    models: list[dict[str, Any]] = [
        {"name": "plain", "model_name_or_path": str(plain), "weight": 3},
        {
            "name": "pooled",
            "task_type": "pooled_cls",
            "model_name_or_path": str(backbone),
            "head": "head.safetensors",
            "pooling_mode": "lasttoken",
            **({"problem_type": "regression"} if count > 1 else {}),
        },
    ]
    data = {"path": "test.csv", "label_columns": targets}
    project.write_config(
        project.config(data=data, labels=targets, models=models, submission=None, report=count > 1)
    )
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stderr
    report = project.run_json()
    for name, values in expected.items():
        path = "ensemble.csv" if name == "ensemble" else f"predictions/{name}.csv"
        header, values_read = project.read(f"runs/first/{path}")
        assert header == ["id", *targets]
        assert [row[0] for row in values_read] == [row[0] for row in rows]
        np.testing.assert_allclose(
            [[float(cell) for cell in row[1:]] for row in values_read], values, atol=1e-5, rtol=1e-5
        )
        score = report["scores"][name]
        assert score["rmse"] == pytest.approx(root_mean_squared_error(truth, values), abs=1e-5)
        assert score["log_loss"] is None
        assert f"{score['rmse']:.4g}" in done.stdout
    if count > 1:
        page = (where / "runs/first/report.html").read_text(encoding="utf-8")
        assert "RMSE" in page
        assert "log loss" not in page
    # What the summary says to do, as the best member alone is better than these weights.
    options = ("--method", "greedy", "--calibration", "none", "--metric", "rmse")
    assert f" fit CONFIG {' '.join(options)}`" in done.stdout
    fitted = project.ensemble("fit", "config.yaml", *options)
    assert fitted.returncode == 0, fitted.stderr
    assert f"{report['scores']['pooled']['rmse']:.4f}" in fitted.stdout
    compared = project.ensemble("compare", "runs/first", "runs/first")
    assert compared.returncode == 0, compared.stderr
    assert f"{report['scores']['ensemble']['rmse']:.4f}" in compared.stdout
    if count == 1:
        again = project.ensemble("validate", "config.yaml", "--set", "data.label_column=score")
        assert again.returncode == 2
        assert (
            "data.label_column=score: holds one of several labels, but there is a single label here"
            in again.stderr
        )
