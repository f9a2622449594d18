"""Runs with a language model among the members, and the keys of that kind."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.checkpoints import label_reference, make_language_model
from tests.project import LABELS, Project

pytestmark = pytest.mark.usefixtures("warm")
LABEL_TOKENS = {"winner_a": "plants", "winner_b": "food", "tie": "animal"}


def member(project: Project, **keys: Any) -> dict[str, Any]:
    return {
        "name": "judge",
        "task_type": "causal_lm",
        "model_name_or_path": str(project.folder / "language model"),
        "prompt_template": "{{ text }} ",
        "label_tokens": LABEL_TOKENS,
        **keys,
    }


def test_a_run_with_a_language_model_and_a_classifier(project: Project) -> None:
    folder = make_language_model(project.folder / "language model", "llama", pad=None)
    project.write_table(60)
    config = project.config()
    project.write_config({**config, "models": [member(project, replicas=2), config["models"][0]]})
    plan = project.ensemble("plan", "config.yaml")
    assert plan.returncode == 0, plan.stderr
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stderr
    header, rows = project.read("runs/first/predictions/judge.csv")
    assert header == ["id", *LABELS]
    texts = dict(zip(project.ids, project.texts, strict=True))
    prompts = [f"{texts[row[0]]} " for row in rows]
    expected, others = label_reference(folder, prompts, [LABEL_TOKENS[label] for label in LABELS], 128)
    actual = np.array([[float(cell) for cell in row[1:]] for row in rows])
    np.testing.assert_allclose(actual, expected, atol=2e-5)
    (judge,) = [item for item in project.run_json()["members"] if item["name"] == "judge"]
    assert judge["counters"]["other_mass"] / 60 == pytest.approx(others, abs=1e-3)
    assert (
        f"judge: {others:.1%} of the probability behind its prompts fell on tokens of no label" in done.stdout
    )

    for change, reused in (("single_token=true", 60), ("length_normalize=bytes", 0)):
        again = project.ensemble("run", "config.yaml", "--set", f"models.judge.{change}")
        assert again.returncode == 0, again.stderr
        assert project.run_json()["members"][0]["reused_rows"] == reused, change


POSITIONS = ["0", "1", "2", "3"]


def chooser(project: Project, name: str = "judge", **keys: Any) -> dict[str, Any]:
    return member(project, name=name, label_tokens=None, choices="answers", **keys)


def write_choices(project: Project, choices: list[Any], truth: list[int] | None = None) -> None:
    header, rows = ["id", "text", "answers"], []
    for number, of_row in enumerate(choices):
        rows.append(
            [f"r{number}", project.texts[number], of_row if isinstance(of_row, str) else json.dumps(of_row)]
        )
        if truth is not None:
            rows[-1].append(str(truth[number]))
    project.write_csv("test.csv", header if truth is None else [*header, "right"], rows)


@pytest.mark.long
def test_a_run_over_choices_of_each_row_and_a_csv_member(project: Project) -> None:
    folder = make_language_model(project.folder / "language model", "llama", pad=None)
    project.write_table(20)
    parts = ["plants or food", "plants", "a person", "food", "body group"]
    choices = [[parts[(row + place) % 5] for place in range(2 + row % 3)] for row in range(20)]
    truth = [row % 2 for row in range(20)]
    write_choices(project, choices, truth)
    others = [[f"r{row}", "0.5", "0.5", "0", "0"] for row in range(20)]
    others[0][1:3] = "0.6", "0.4"
    project.write_csv("other.csv", ["id", *POSITIONS], others)
    models = [chooser(project), {"name": "other", "task_type": "csv", "path": "other.csv"}]
    data = {"path": "test.csv", "label_column": "right"}
    project.write_config(
        project.config(models=models, labels=POSITIONS, data=data, submission=None, defaults=None)
    )
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stderr
    _, rows = project.read("runs/first/predictions/judge.csv")
    result = {row[0]: [float(cell) for cell in row[1:]] for row in rows}
    for number, of_row in enumerate(choices):
        expected, _ = label_reference(folder, [f"{project.texts[number]} "], of_row, 128)
        np.testing.assert_allclose(result[f"r{number}"][: len(of_row)], expected[0], atol=3e-5)
        assert result[f"r{number}"][len(of_row) :] == [0.0] * (4 - len(of_row))
    _, merged = project.read("runs/first/ensemble.csv")
    np.testing.assert_allclose([float(merged[1][1])], [(result["r1"][0] + 0.5) / 2], atol=1e-6)
    right = np.mean([np.argmax(result[f"r{row}"]) == truth[row] for row in range(20)])
    assert f"{right:.1%}" in done.stdout or f"{right:.4f}" in done.stdout
    again = project.ensemble("run", "config.yaml")
    assert again.returncode == 0, again.stderr
    assert project.run_json()["members"][0]["reused_rows"] == 20
    # A method that gives more than 0 where every member gives 0.
    project.write_config(
        project.config(
            models=models,
            labels=POSITIONS,
            data=data,
            submission=None,
            defaults=None,
            ensemble={"method": "rank_mean"},
        )
    )
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stderr
    assert "2 to 4 of 4 labels possible" in done.stdout
    _, merged = project.read("runs/first/ensemble.csv")
    for row, of_row in zip(merged, choices, strict=True):
        assert [float(cell) > 0 for cell in row[1:]] == [place < len(of_row) for place in range(4)]
    done = project.ensemble("fit", "config.yaml", "--set", "ensemble.method=mean")
    assert done.returncode == 0, done.stderr


def test_mistakes_in_choices_are_named_with_their_row(project: Project) -> None:
    make_language_model(project.folder / "language model", "llama")
    project.write_table(3)
    good = ["plants", "food"]

    def problems(choices: list[Any], models: list[dict[str, Any]], labels: Any = POSITIONS) -> str:
        write_choices(project, choices)
        data = {"path": "test.csv"}
        project.write_config(
            project.config(models=models, labels=labels, data=data, submission=None, defaults=None)
        )
        done = project.ensemble("validate", "config.yaml")
        assert done.returncode == 2, done.stdout
        return " ".join(done.stderr.split())

    ours = [chooser(project)]
    needs = "in 'answers'; a row needs two or more to choose from"
    assert f"models[0].choices: row 2 (id 'r1') has one choice {needs}" in problems([good, ["a"], good], ours)
    assert f"row 3 (id 'r2') has no choices {needs}" in problems([good, good, []], ours)
    assert f"row 1 (id 'r0') has no choices {needs}" in problems(["", good, good], ours)
    messages = problems([good, good, ["a", "b", "c", "d", "e"]], ours)
    assert (
        "row 3 (id 'r2') has 5 choices in 'answers', and labels has 4 positions; let it go from" in messages
    )
    messages = problems([good, [1, 2], good], ours)
    assert "row 2 (id 'r1'): 'answers' must hold a JSON list of texts, none of them empty" in messages
    assert "row 2 (id 'r1'): 'answers' must hold a JSON list of texts: not valid JSON" in problems(
        [good, "[plants", good], ours
    )
    messages = problems([good] * 3, ours, ["a", "b"])
    assert (
        'labels must be the positions of choices: "0", "1" and so on, to the most that any row has'
        in messages
    )
    both = [chooser(project) | {"label_tokens": dict.fromkeys(POSITIONS, "x"), "single_token": True}]
    messages = problems([good] * 3, both)
    assert "choices has the texts of each row" in messages
    assert "is about label_tokens; choices may have any number of tokens" in messages
    neither = member(project, label_tokens=None)
    assert "label_tokens or choices is required, for example" in problems([good] * 3, [neither])
    tokens = dict(zip(POSITIONS, ("plants", "food", "a", "b"), strict=True))
    messages = problems([good] * 3, [*ours, member(project, name="fixed", label_tokens=tokens)])
    assert (
        "models[1] (fixed): its labels mean the same in all rows, and those of judge are positions in a"
        in messages
    )
    assert "only members with choices and csv members merge with it" in messages
    messages = problems([good] * 3, [*ours, chooser(project, name="second") | {"choices": "text"}])
    assert (
        "models[1].choices: 'text', and judge has 'answers'; positions mean the same only in one" in messages
    )


@pytest.mark.long
def test_how_many_prompts_were_cut_is_told(project: Project) -> None:
    """At one end, and field by field before the words that must stay."""
    folder = make_language_model(project.folder / "language model", "llama", pad=None)
    project.write_table(30)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for keys, after in (
        ({}, ""),
        ({"truncation": {"fields": {"text": {"keep": "tail"}}, "marker": ""}}, "It is about "),
    ):
        template = {"prompt_template": f"{{{{ text }}}} {after}", "max_length": 24}
        models = [member(project, **template, **keys)]
        project.write_config(project.config(models=models, submission=None, defaults=None))
        done = project.ensemble("run", "config.yaml", "--fresh")
        assert done.returncode == 0, done.stderr
        sizes = [len(ids) for ids in tokenizer([f"{text} {after}" for text in project.texts])["input_ids"]]
        cut = sum(size > 24 for size in sizes)
        (worker,) = project.run_json()["members"][0]["workers"]
        assert worker["counters"]["truncated_rows"] == cut > 0
        lost = sum(size - 24 for size in sizes if size > 24)
        assert lost <= worker["counters"]["cut_tokens"] <= lost + 2 * cut
        assert f"judge: {cut} of 30 rows were cut" in done.stdout


def test_mistakes_in_its_keys_are_named_with_their_lines(project: Project) -> None:
    make_language_model(project.folder / "language model", "llama")
    project.write_table(5)

    def problems(**keys: Any) -> str:
        project.write_config(project.config(models=[member(project, **keys)]))
        done = project.ensemble("validate", "config.yaml")
        assert done.returncode == 2
        return done.stderr

    messages = problems(label_tokens={"winner_a": "plants", "winner_b": "plants", "ti": "x"})
    assert "models[0].label_tokens (line" in messages
    assert "has no text for 'tie'; each label needs one" in messages
    assert "the same text as label_tokens.winner_a has" in messages
    assert "label_tokens.ti (line" in messages
    assert "which are 'winner_a', 'winner_b', 'tie'" in messages
    messages = problems(label_tokens=LABEL_TOKENS | {"tie": "zebra"}, single_token=True)
    assert "models[0] (judge): label_tokens.tie: its text is 5 tokens" in messages
    messages = problems(system_instruction="Judge.", prompt_template=None, text_column=["id", "text"])
    assert "needs apply_chat_template: true" in messages
    assert "must be one column here" in messages
    messages = problems(truncation_side="right")
    assert "would cut the end of the prompt, which asks for the label" in messages
    long = "plants or food " * 20
    messages = problems(prompt_template=long + "{{ text }} ", max_length=40)
    assert "models[0].prompt_template: the text" in messages
    assert "more than the 40 that max_length leaves for a prompt, and every row loses some of it" in messages
    chat = {"apply_chat_template": True, "system_instruction": long, "prompt_template": "{{ text }}: "}
    (project.folder / "language model" / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    messages = problems(**chat, max_length=40, truncation={"fields": {"text": {}}})
    assert "truncation cuts only text; shorten it, or raise max_length" in messages


def test_labels_of_the_same_tokens_and_prompts_of_nothing(project: Project) -> None:
    folder = make_language_model(project.folder / "language model", "llama")
    path = folder / "tokenizer.json"
    stored = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(stored | {"normalizer": {"type": "Lowercase"}}), encoding="utf-8")
    project.write_csv("test.csv", ["id", "text"], [["a", ""], ["b", "plants"], ["c", ""]])
    config = project.config(data={"path": "test.csv"}, submission=None, defaults=None)
    given = member(project, prompt_template=None, text_column="text")
    same = LABEL_TOKENS | {"winner_b": "Plants"}
    project.write_config({**config, "models": [given | {"label_tokens": same}]})
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 2
    assert (
        "models[0] (judge): label_tokens.winner_b: its text has the same tokens as that of label_tokens.winner_a"
        in done.stderr
    )
    project.write_config({**config, "models": [given]})
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stderr
    _, rows = project.read("runs/first/predictions/judge.csv")
    actual = np.array([[float(cell) for cell in row[1:]] for row in rows])
    # The tokenizer's <bos> is all that an empty prompt has.
    expected, _ = label_reference(folder, ["", "plants", ""], list(LABEL_TOKENS.values()))
    np.testing.assert_allclose(actual, expected, atol=2e-5)
