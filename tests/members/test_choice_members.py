"""Classifiers of one output that score each row's own texts, against plain transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ensemble.members.base import Assigned, OutputColumns
from ensemble.members.seq_cls.parent import SequenceClassification, SequenceClassifierSettings
from tests.checkpoints import make_adapter, make_checkpoint
from tests.project import Project
from tests.sampling import one_in

pytestmark = pytest.mark.usefixtures("warm")
POSITIONS = ["0", "1", "2", "3"]
PARTS = ["plants or food", "plants", "a person", "food", "body group"]
CHOICES = [[PARTS[(row + place) % 5] for place in range(2 + row % 3)] for row in range(20)]


def reference(
    folder: Path, texts: list[tuple[str, str]], is_pair: bool, adapter: Path | None = None
) -> npt.NDArray[np.float64]:
    """The probabilities of a row's choices by plain transformers (and peft), each text alone."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter).eval()
    scores = []
    for text, choice in texts:
        inputs = (text, choice) if is_pair else (f"{text} so {choice}",)
        with torch.no_grad():
            scores.append(model(**tokenizer(*inputs, return_tensors="pt")).logits[0, 0].double())
    return torch.stack(scores).softmax(0).numpy()


def member(project: Project, architecture: str, **keys: Any) -> dict[str, Any]:
    return {
        "name": "ranker",
        "model_name_or_path": str(project.folder / architecture),
        "choices": "answers",
        "max_length": 128,
        **keys,
    }


def write(project: Project, models: list[dict[str, Any]], labels: list[str] | None = None) -> None:
    rows = [[f"r{row}", project.texts[row], json.dumps(of_row)] for row, of_row in enumerate(CHOICES)]
    project.write_csv("test.csv", ["id", "text", "answers"], rows)
    project.write_config(
        project.config(
            models=models,
            labels=labels or POSITIONS,
            data={"path": "test.csv"},
            submission=None,
            defaults=None,
        )
    )


@pytest.mark.parametrize(
    ("architecture", "keys"),
    one_in(
        2,
        [
            ("bert", {"text_column": ["text", "answers"]}),
            ("llama", {"prompt_template": "{{ text }} so {{ answers }}"}),
        ],
    ),
)
def test_a_classifier_of_one_output_over_each_rows_choices(
    architecture: str, keys: dict[str, Any], project: Project
) -> None:
    folder = make_checkpoint(project.folder / architecture, architecture, ["score"])
    project.write_table(20)
    write(project, [member(project, architecture, **keys)])
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stderr
    _, rows = project.read("runs/first/predictions/ranker.csv")
    result = {row[0]: [float(cell) for cell in row[1:]] for row in rows}
    for number, of_row in enumerate(CHOICES):
        texts = [(project.texts[number], choice) for choice in of_row]
        expected = reference(folder, texts, is_pair=architecture == "bert")
        values = result[f"r{number}"]
        np.testing.assert_allclose(values[: len(of_row)], expected, atol=2e-5)
        assert values[len(of_row) :] == [0.0] * (4 - len(of_row))
    (ranker,) = project.run_json()["members"]
    assert sum(worker["counters"]["rows"] for worker in ranker["workers"]) == 20
    again = project.ensemble("run", "config.yaml")
    assert again.returncode == 0, again.stderr
    assert project.run_json()["members"][0]["reused_rows"] == 20


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft on transformers 5
def test_choices_are_scored_by_the_adapter_of_each_view(project: Project) -> None:
    pytest.importorskip("peft")
    folder = make_checkpoint(project.folder / "llama", "llama", ["score"])
    adapters = {
        f"fold{seed}": make_adapter(project.folder / f"fold{seed}", folder, 1, seed=seed) for seed in (0, 1)
    }
    views = [{"name": name, "adapter_name_or_path": str(adapter)} for name, adapter in adapters.items()]
    project.write_table(20)
    write(project, [member(project, "llama", prompt_template="{{ text }} so {{ answers }}", views=views)])
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stderr
    texts = [(project.texts[3], choice) for choice in CHOICES[3]]
    by_view = []
    for name, adapter in adapters.items():
        _, rows = project.read(f"runs/first/predictions/ranker@{name}.csv")
        values = [float(cell) for cell in rows[3][1 : 1 + len(texts)]]
        expected = reference(folder, texts, is_pair=False, adapter=adapter)
        np.testing.assert_allclose(values, expected, atol=2e-5)
        by_view.append(expected)
    assert np.abs(by_view[0] - by_view[1]).max() > 1e-3, "the adapters must matter"


def test_mistakes_in_a_classifier_of_choices_are_named(project: Project) -> None:
    make_checkpoint(project.folder / "bert", "bert", ["score"])
    make_checkpoint(project.folder / "two", "bert", ["a", "b"])
    project.write_table(20)

    def problems(name: str = "bert", labels: list[str] | None = None, **keys: Any) -> str:
        write(project, [member(project, name, **keys)], labels)
        done = project.ensemble("validate", "config.yaml")
        assert done.returncode == 2, done.stdout
        return " ".join(done.stderr.split())

    pair: dict[str, Any] = {"text_column": ["text", "answers"]}
    assert "labels (a, b), the config has 1 (a score for each choice)" in problems("two", **pair)
    assert "the positions of choices" in problems(labels=["x", "y"], **pair)
    assert "choices are scored by a head of one output" in problems(**pair, problem_type="regression")
    messages = problems(text_column="text")
    assert (
        "models[0].choices: no prompt would hold a choice, as only text is read; read 'answers', too"
        in messages
    )


def test_predictions_depend_on_which_column_holds_the_choices(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "bert", "bert", ["score"])

    def made(**keys: Any) -> dict[str, object]:
        columns = ("text", "answers")
        settings = SequenceClassifierSettings(
            name="m", model_name_or_path=str(folder), text_column=columns, **keys
        )
        parent = SequenceClassification(settings)
        inspected = parent.inspect(OutputColumns("id", tuple(POSITIONS if keys else ["score"])))
        return dict(parent.fingerprint(inspected, Assigned(gpus=0)))

    assert made()["choices"] is None
    assert made(choices="answers")["choices"] == "answers"
