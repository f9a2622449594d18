"""Members whose columns share max_length: through the commands, with a real worker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import WORDS, make_checkpoint, reference
from tests.members.huggingface.scoring.test_predict import LABELS, predictor, worker_spec
from tests.project import Project
from tests.sampling import one_in
from tests.worker.test_session import publish

pytestmark = pytest.mark.usefixtures("warm")
TEMPLATE = "{{ prompt | fromjson | join(' ') }} <a> {{ answer }} <b> which"
FIELDS = {"prompt": {"share": 0.2}, "answer": {"share": 0.8, "keep": "newest_turns"}}


def lay_out(project: Project, **keys: Any) -> list[str]:
    """A table with short rows and long ones; the prompts, uncut."""
    chooser = np.random.default_rng(0)
    rows, prompts = [], []
    for number in range(60):
        first, second = (" ".join(chooser.choice(WORDS, 3 if number % 3 else 40)) for _ in range(2))
        rows.append([f"r{number}", json.dumps([first]), second])
        prompts.append(f"{first} <a> {second} <b> which")
    project.write_csv("test.csv", ["id", "prompt", "answer"], rows)
    member = {
        **{"name": "llama", "model_name_or_path": str(project.models / "llama"), "max_length": 40},
        **{"prompt_template": TEMPLATE, "truncation": {"fields": FIELDS}, **keys},
    }
    models = [{key: value for key, value in member.items() if value is not None}]
    project.write_config(
        project.config(data={"path": "test.csv"}, submission=None, defaults=None, models=models)
    )
    return prompts


def test_a_run_cuts_what_is_too_long_and_says_by_how_much(project: Project) -> None:
    prompts = lay_out(project)
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stderr
    _, rows = project.read("runs/first/predictions/llama.csv")
    got = np.array([[float(cell) for cell in row[1:]] for row in rows])
    short = [number for number in range(60) if number % 3]
    expected = reference(project.models / "llama", [prompts[number] for number in short])
    np.testing.assert_allclose(got[short], expected, atol=1e-5)
    (member,) = project.run_json()["members"]
    (worker,) = member["workers"]
    assert worker["counters"]["truncated_rows"] == 20
    assert worker["counters"]["tokens"] <= 60 * 40
    assert (
        f"20 of 60 rows were cut at max_length 40, by {worker['counters']['cut_tokens'] / 20:.0f} tokens"
        in done.stdout
    )
    # Another way to cut is other work.
    done = project.ensemble("run", "config.yaml", "--set", "models.llama.truncation.marker='...'")
    assert done.returncode == 0, done.stderr
    (member,) = project.run_json()["members"]
    assert member["workers"][0]["counters"]["truncated_rows"] == 20


def test_a_template_without_room_is_named_before_any_model_loads(project: Project) -> None:
    lay_out(project, max_length=2)
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 2
    assert "models[0].prompt_template: the text that it has for every row is" in done.stderr
    assert "truncation cuts only prompt, answer" in (done.stderr)
    # Without truncation rows may have been cut so in training, too.
    lay_out(project, max_length=2, truncation=None)
    done = project.ensemble("validate", "config.yaml")
    assert done.returncode == 0, done.stderr
    assert "for every row" in done.stdout + done.stderr


@pytest.mark.usefixtures("one_thread")
def test_rows_that_all_lose_some_of_the_templates_text_are_noted(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "bert", "bert", LABELS)
    table = publish(tmp_path, {"prompt": ["[]"], "answer": ["plants"]})
    keys: dict[str, Any] = {"prompt_template": TEMPLATE, "text_columns": (), "max_length": 4}
    notes = predictor(worker_spec(folder, **keys, **table)).load().notes
    assert any("for every row is" in note for note in notes)


@pytest.mark.parametrize(
    ("keys", "message"),
    one_in(
        3,
        [
            (
                {"truncation": {"fields": {"answers": {}}}},
                "truncation.fields.answers: prompt_template does not read this column; it reads answer, prompt",
            ),
            ({"prompt_template": None, "text_column": "answer"}, "models[0].truncation (line"),
            ({"truncation_side": "left"}, "with truncation each field says what is kept of it"),
            ({"truncation": {"fields": {}}}, "truncation.fields (line 13): name at least one column"),
            ({"truncation": {"fields": {"answer": {"share": 0}}}}, "truncation.fields.answer.share (line"),
            (
                {"truncation": {"fields": {"answer": {"keeps": "head"}}}},
                "truncation.fields.answer.keeps (line",
            ),
            (
                {"truncation": {"fields": {"answer": {"keep": "middle"}}}},
                "must be 'head', 'tail', 'head_tail', 'newest_turns'",
            ),
            (
                {"truncation": {"fields": {"answer": {"keep": "newest_rounds"}}}},
                "a round is a turn of several columns; give newest_rounds to each of them",
            ),
            (
                {"truncation": {"fields": ["answer"]}},
                "mapping of columns to {share: ..., keep: ...}",
            ),
        ],
    ),
)
def test_mistakes_in_the_key(keys: dict[str, Any], message: str, project: Project) -> None:
    lay_out(project, **keys)
    done = project.ensemble("validate", "config.yaml")
    assert done.returncode == 2
    assert message in done.stderr
