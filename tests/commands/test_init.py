"""``ensemble init``: first configs for the tables and checkpoints that people have; all pass ``validate``."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from ensemble.commands.init import _scalar, first_config
from ensemble.common.errors import DataError
from ensemble.pipeline.load import load
from tests.checkpoints import make_adapter, make_base, make_checkpoint, make_language_model
from tests.project import Project
from tests.sampling import one_in

pytestmark = [
    pytest.mark.usefixtures("warm"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),  # peft on transformers 5
]

CONTEST = ["winner_model_a", "winner_model_b", "winner_tie"]


@pytest.fixture(scope="module")
def contest_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``named``, ``numbered``, ``short`` (which reads 128 tokens) and ``lora`` on the headless ``base``."""
    folder = tmp_path_factory.mktemp("contest models")
    make_checkpoint(folder / "named", "gemma2", [CONTEST[2], *CONTEST[:2]], seed=1)
    make_checkpoint(folder / "numbered", "llama", [f"LABEL_{index}" for index in range(3)], seed=2)
    make_checkpoint(folder / "short", "bert", CONTEST, seed=3)
    make_base(folder / "base", "llama", seed=4)
    make_adapter(folder / "lora", folder / "base", 3, seed=5)
    return folder


def contest_rows(rows: int = 40) -> list[dict[str, Any]]:
    return [
        {
            "id": 1000 + 7 * row,
            "prompt": ["who is it?"] * (1 + row % 3),
            "response_a": [f"the plant {row}, or a null"],
            "response_b": ["an animal with a tail", None] if row == 3 else ["a long river. " * row],
            "model_a": f"gpt-{row % 4}",
        }
        for row in range(rows)
    ]


def write(project: Project, name: str, rows: Sequence[dict[str, Any]]) -> None:
    """The rows as the file's ending says; lists are JSON text in a CSV, as in the competition's."""
    path = project.folder / name
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([*rows]), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        cells = [[json.dumps(v) if isinstance(v, list) else str(v) for v in row.values()] for row in rows]
        project.write_csv(name, [*rows[0]], cells)


def made(project: Project, name: str = "config.yaml") -> tuple[str, dict[str, Any]]:
    """A config's text, and what it says."""
    text = (project.folder / name).read_text(encoding="utf-8")
    return text, yaml.safe_load(text)


@pytest.mark.long
def test_the_first_config_of_a_contest_runs(project: Project, contest_models: Path) -> None:
    rows = contest_rows()
    write(project, "test.csv", rows)
    sample = [[str(row["id"]), "0.3", "0.3", "0.4"] for row in rows]
    project.write_csv("sample_submission.csv", ["id", *CONTEST], sample)
    names = [str(contest_models / name) for name in ("numbered", "short")]
    done = project.ensemble("init", "test.csv", *names)
    assert done.returncode == 0, done.stderr
    assert "config.yaml: written" in done.stdout
    assert "guess: numbered: its labels are numbered" in done.stdout
    assert "All checks passed" in done.stdout
    text, config = made(project)
    schema = Path(re.match(r"# yaml-language-server: \$schema=(.*)\n", text)[1])  # type: ignore[index]
    assert (project.folder / schema).is_file()
    assert config["data"] == {"path": "test.csv", "id_column": "id"}
    assert "# not used: model_a" in text
    assert config["labels"] == CONTEST
    numbered, short = config["models"]
    assert numbered["label_map"] == {f"LABEL_{index}": label for index, label in enumerate(CONTEST)}
    assert "label_map" not in short
    assert short["max_length"] == 128, "its positions end there"
    assert config["defaults"]["prompt_template"].split("\n\n") == [
        f"<{name}>: {{{{ {name} | fromjson | join('\\n') }}}}"
        for name in ("prompt", "response_a", "response_b")
    ]
    assert config["defaults"]["max_length"] == 320  # 1.5 times 1/4 of 760 bytes, in steps of 64
    assert config["submission"] == {"sample": "sample_submission.csv", "path": "submission.csv"}
    ran = project.ensemble("run", "config.yaml", "-q", "--set", "report=false")
    assert ran.returncode == 0, ran.stderr
    header, submitted = project.read("submission.csv")
    assert header == ["id", *CONTEST]
    assert [row[0] for row in submitted] == [row[0] for row in sample]

    before = (project.folder / "config.yaml").read_bytes()
    again = project.ensemble("init", "test.csv", names[1])
    assert again.returncode == 2
    assert "config.yaml is there already; --force replaces it" in again.stderr
    assert (project.folder / "config.yaml").read_bytes() == before
    assert project.ensemble("init", "test.csv", names[1], "--force").returncode == 0
    assert len(made(project)[1]["models"]) == 1
    # Whatever --force says, what is read stays, and what is no file, too.
    os.mkfifo(project.folder / "pipe.yaml")
    for name in ("test.csv", "pipe.yaml"):
        again = project.ensemble("init", "test.csv", names[1], "--force", "-o", name)
        assert (again.returncode, again.stderr.count("choose another name")) == (2, 1), again.stderr
    assert (project.folder / "pipe.yaml").is_fifo()


@pytest.mark.long
def test_a_language_model_says_the_labels_of_the_sample(project: Project, contest_models: Path) -> None:
    rows = contest_rows()
    write(project, "test.csv", rows)
    sample = [[str(row["id"]), "0.3", "0.3", "0.4"] for row in rows]
    model = make_language_model(project.folder / "plain", "llama")
    done = project.ensemble("init", "test.csv", str(model))
    assert done.returncode == 2
    assert "its labels are not known; name a sample submission that has them (--sample)" in done.stderr
    project.write_csv("sample_submission.csv", ["id", *CONTEST], sample)
    chat = make_language_model(project.folder / "chat", "gemma2")
    (chat / "chat_template.jinja").write_text("{{ messages[0].content }}<eos>", encoding="utf-8")
    done = project.ensemble("init", "test.csv", str(model), str(chat), str(contest_models / "named"))
    assert done.returncode == 0, done.stderr
    assert "guess: plain.label_tokens: what the model would say for each label" in done.stdout
    text, config = made(project)
    assert "    # GUESS: plain.label_tokens: what the model would say for each label" in text
    labels = [CONTEST[2], *CONTEST[:2]]
    assert config["labels"] == labels, "of the checkpoint with names"
    first, second, third = config["models"]
    assert (first["task_type"], first["label_tokens"]) == ("causal_lm", {name: f" {name}" for name in labels})
    assert second["apply_chat_template"] is True
    assert second["label_tokens"] == {name: name for name in labels}
    assert "task_type" not in third
    ran = project.ensemble("run", "config.yaml", "-q", "--limit", "8", "--set", "report=false")
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("suffix", one_in(3, [".csv", ".parquet", ".jsonl"]))
def test_a_training_table_brings_its_truth(suffix: str, project: Project, contest_models: Path) -> None:
    """A column per label; the sample submission beside it has other rows."""
    truth = [{label: int(row % 3 == index) for index, label in enumerate(CONTEST)} for row in range(40)]
    write(
        project,
        f"train{suffix}",
        [contest_row | other for contest_row, other in zip(contest_rows(), truth, strict=True)],
    )
    project.write_csv("sample_submission.csv", ["id", *CONTEST], [["1", "0.3", "0.3", "0.4"]])
    project.write_csv(
        "mate.csv", ["id", *CONTEST], [[str(1000 + 7 * row), "1", "0", "0"] for row in range(40)]
    )
    done = project.ensemble(
        *("init", f"train{suffix}", str(contest_models / "lora"), str(contest_models / "named"), "mate.csv"),
        *("--output", "first.yaml"),
    )
    assert done.returncode == 0, done.stderr
    text, config = made(project, "first.yaml")
    assert config["labels"] == [CONTEST[2], *CONTEST[:2]], "of the one that has names"
    assert config["data"]["label_columns"] == config["labels"]
    assert "submission" not in config
    assert re.findall(r"\{\{ (\w+) \| fromjson", text) == ["prompt", "response_a", "response_b"]
    lora, _, mate = config["models"]
    assert lora["adapter_name_or_path"] == str(contest_models / "lora")
    assert lora["model_name_or_path"] == str(contest_models / "base")
    assert lora["label_map"] == {f"LABEL_{index}": label for index, label in enumerate(config["labels"])}
    assert mate == {"name": "mate", "task_type": "csv", "path": "mate.csv"}


def test_one_column_of_text_and_one_of_labels(project: Project) -> None:
    header, rows = project.read("test.csv")
    rows = [[f"r{row[0]}", *row[1:], "7"] for row in rows]
    project.write_csv("test.csv", ["row_id", *header[1:], "yes"], rows)
    project.write_csv(
        "sample.csv", ["row_id", "Tie", "Winner-A", "Winner-B"], [[row[0], "0", "0", "1"] for row in rows]
    )
    done = project.ensemble("init", "test.csv", str(project.models / "gemma"), "--sample", "sample.csv")
    assert done.returncode == 0, done.stderr
    text, config = made(project)
    assert config["data"] == {"path": "test.csv", "id_column": "row_id", "label_column": "label"}
    assert config["defaults"]["text_column"] == "text"
    assert config["submission"]["columns"] == {"Tie": "tie", "Winner-A": "winner_a", "Winner-B": "winner_b"}
    assert "# not used: yes" in text


@pytest.mark.parametrize(
    ("labels", "cells", "answer"),
    [
        (["a", "b", "tie"], ["a", "tie"], {"answer": "label"}),
        (
            ["Correct:NA", "Neither:NA", "b"],
            ["b Correct:NA", "Neither:NA b"],
            {"answer": {"top": 2, "separator": " "}},
        ),
        (["a", "b", "c d"], ["c d, a, b"], {"answer": {"top": 3, "separator": ", "}}),
        (["1", "2", "3"], ["1", "3"], {"answer": "label"}),
        (["a", "b", "c"], ["a;c", "b", ""], {"answer": {"above": 0.5, "separator": ";"}}),
        (["0", "1"], ["0", "1"], {"answer": {"above": {"1": 0.5}}}),
        (["0", "1"], ["0"], "1"),  # probabilities, as likely as not
        (["a", "b"], ["0.5"], "b"),
    ],
)
def test_a_sample_whose_cells_are_labels_is_for_answers(
    project: Project, labels: list[str], cells: list[str], answer: object
) -> None:
    make_checkpoint(project.folder / "model", "bert", labels, seed=1)
    ids = project.read("test.csv")[1]
    sample = [[row[0], cells[number % len(cells)]] for number, row in enumerate(ids)]
    project.write_csv("sample.csv", ["id", "answers"], sample)
    config = yaml.safe_load(
        first_config(
            project.folder / "test.csv", [str(project.folder / "model")], project.folder / "sample.csv"
        )
    )
    assert config["labels"] == labels
    assert config["submission"]["columns"] == {"answers": answer}


@pytest.mark.parametrize(
    ("columns", "labels"),
    [(["b", "a"], ["b", "a"]), (["A", "B"], ["a", "b"]), (["x", "y"], ["a", "b"])],
)
def test_a_sample_whose_cells_are_0_and_1_is_for_decisions(
    project: Project, columns: list[str], labels: list[str]
) -> None:
    make_checkpoint(project.folder / "model", "bert", ["a", "b"], seed=1)
    ids = project.read("test.csv")[1]
    project.write_csv(
        "sample.csv", ["id", *columns], [[row[0], str(n % 2), "0"] for n, row in enumerate(ids)]
    )
    done = project.ensemble("init", "test.csv", "model", "--sample", "sample.csv")
    assert done.returncode == 0, done.stderr
    assert "guess: submission.columns: 1 from 0.5 on, because the sample's cells are 0 and 1" in done.stdout
    answers = {name: {"answer": {"above": {label: 0.5}}} for name, label in zip(columns, labels, strict=True)}
    assert made(project)[1]["submission"]["columns"] == answers


def test_0_and_1_of_columns_that_are_no_labels_are_for_the_user(project: Project) -> None:
    make_checkpoint(project.folder / "model", "bert", ["a", "b"], seed=1)
    ids = project.read("test.csv")[1]
    header = ["id", "x", "y", "z"]
    project.write_csv("sample.csv", header, [[row[0], str(n % 2), "0", "1"] for n, row in enumerate(ids)])
    done = project.ensemble("init", "test.csv", "model", "--sample", "sample.csv")
    assert done.returncode == 2
    assert "column 'x' is not a label; map it to one of 'a', 'b', or for the label itself to" in done.stderr
    assert "for 0 and 1 to {answer: {above: {'b': 0.5}}}" in done.stderr


def test_labels_that_only_the_cells_of_the_sample_name(project: Project, contest_models: Path) -> None:
    ids = project.read("test.csv")[1]
    sample = [[row[0], ["model_b", "model_a", "tie"][number % 3]] for number, row in enumerate(ids)]
    project.write_csv("sample.csv", ["id", "winner"], sample)
    make_language_model(project.folder / "plain", "llama")
    for name in ("plain", str(contest_models / "numbered")):
        done = project.ensemble("init", "test.csv", name, "--sample", "sample.csv", "--force")
        assert done.returncode == 0, done.stderr
        assert "guess: labels: the " in done.stdout
        config = made(project)[1]
        assert config["labels"] == ["model_b", "model_a", "tie"]
        assert config["submission"]["columns"] == {"winner": {"answer": "label"}}


def test_what_does_not_fit_together_is_said_by_validate(project: Project, contest_models: Path) -> None:
    """And what is no model at all before anything is written."""
    given = [str(project.models / "gemma"), str(contest_models / "named")]
    done = project.ensemble("init", "test.csv", *given)
    assert done.returncode == 2
    assert "config.yaml does not pass validate yet" in done.stderr
    assert "map them with label_map, for example label_map: {winner_tie: tie}" in done.stderr
    assert len(made(project)[1]["models"]) == 2
    (project.folder / "config.yaml").unlink()
    done = project.ensemble("init", "test.csv", "nowhere/gemma", "test.csv.gz", given[0])
    assert done.returncode == 2
    assert "nowhere/gemma: no such folder" in done.stderr
    assert "test.csv.gz" in done.stderr
    assert not (project.folder / "config.yaml").exists()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", "id,text\n", "empty table"),
        ("a.csv", "row,n\nx y,1\nx y,2\n", "column 'row' has rows without a value, or with the same one"),
        ("a.csv", "id,n\n1,2\n", "no column of text for the members to read beside 'id'"),
        ("a.jsonl", '{"id": [1], "t": "x y"}\n', "no column names the rows; add one, such as id"),
    ],
)
def test_tables_that_no_config_can_read(name: str, content: str, words: str, project: Project) -> None:
    (project.folder / name).write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=re.escape(words)):
        first_config(project.folder / name, [str(project.models / "gemma")], None)


@pytest.mark.parametrize(
    "text", ["yes", "1e5", "a: b", "# x", "", " x", "${HOME}", "null", "é", "a\nb", "-", "012", "~x"]
)
def test_text_stays_what_it_is(text: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "data: {path: t.csv}\noutput_dir: o\nlabels: [a]\nmodels: [{name: m, model_name_or_path: m, "
        f"text_column: t, model_kwargs: {{x: {_scalar(text)}}}}}]\n",
        encoding="utf-8",
    )
    (member,) = load(path, environ={}).config.models
    assert member.model_dump()["model_kwargs"] == {"x": text}


def test_predictions_in_any_format_and_with_columns_of_other_names(project: Project) -> None:
    labels = ["Winner A", "tie"]
    project.write_csv("test.csv", ["id", "text"], [[str(row), "x"] for row in range(30)])
    values = {"id": [*range(30)], "Winner A": [0.25] * 30, "tie": [0.75] * 30}
    pq.write_table(pa.table(values), project.folder / "first.parquet")
    for name, columns in (("cased.csv", ["winner_a", "TIE"]), ("other.csv", ["p_1", "p_2"])):
        project.write_csv(name, ["id", *columns], [[str(row), "0.25", "0.75"] for row in range(30)])
    done = project.ensemble("init", "test.csv", "first.parquet", "cased.csv", "other.csv")
    assert done.returncode == 0, done.stderr
    assert "other: its labels have other names in its file, and taken in the order of labels" in done.stdout
    assert "cased: its labels" not in done.stdout
    config = yaml.safe_load((project.folder / "config.yaml").read_text(encoding="utf-8"))
    assert config["labels"] == labels
    assert [model.get("columns") for model in config["models"]] == [
        None,
        {"winner_a": "Winner A", "TIE": "tie"},
        {"p_1": "Winner A", "p_2": "tie"},
    ]
    run = project.ensemble("run", "config.yaml", "--set", "report=false")
    assert run.returncode == 0, run.stderr
    packed = project.folder / "first.parquet.gz"
    packed.write_bytes(b"x")
    refused = project.ensemble("init", "test.csv", "first.parquet.gz", "--force")
    assert (
        "first.parquet.gz: no folder with a checkpoint, script (.py) or file of predictions that can be read"
        in " ".join(refused.stderr.split())
    )


def test_the_index_that_pandas_writes_is_neither_label_nor_text(
    project: Project, contest_models: Path
) -> None:
    rows = contest_rows()
    frame = pd.DataFrame(rows, index=[f"the row {row} of a table" for row in range(len(rows))])
    frame.to_parquet(project.folder / "test.parquet")
    values = pd.DataFrame([{"id": row["id"], **dict.fromkeys(CONTEST, 1 / 3)} for row in rows])
    for name in ("other", "third"):
        values.sample(frac=1, random_state=1).to_parquet(project.folder / f"{name}.parquet")
    assert "__index_level_0__" in pq.read_schema(project.folder / "other.parquet").names
    done = project.ensemble("init", "test.parquet", str(contest_models / "named"), "other.parquet")
    assert done.returncode == 0, done.stdout + done.stderr
    text, config = made(project)
    assert "__index_level_0__" not in text.replace("# not used: model_a, __index_level_0__", "")
    assert sorted(config["labels"]) == sorted(CONTEST)
    done = project.ensemble("merge", "other.parquet", "third.parquet", "-o", "merged.csv")
    assert done.returncode == 0, done.stderr
    assert project.read("merged.csv")[0] == ["id", *CONTEST]


SCRIPT = """\
import argparse
import json

import pandas as pd

parser = argparse.ArgumentParser()
parser.add_argument("--data-workers", default=1)
parser.add_argument("--input_csv", required=True)
parser.add_argument("-o", "--output", required=True)
options = parser.parse_args()
table = pd.read_csv(options.input_csv)
assert list(table) == ["id", "text"]
yes = table["text"].str.len() / table["text"].str.len().max()
pd.DataFrame({"id": table["id"], "no": 1 - yes, "yes": yes}).to_csv(options.output, index=False)
"""


def test_a_script_is_a_command_with_the_options_of_its_text(project: Project) -> None:
    project.write_csv("test.csv", ["id", "text"], [["a", "one"], ["b", "seven"]])
    project.write_csv("sample_submission.csv", ["id", "no", "yes"], [["a", "0", "1"], ["b", "0", "1"]])
    (project.folder / "my infer.py").write_text(SCRIPT, encoding="utf-8")
    done = project.ensemble("init", "test.csv", "my infer.py")
    assert done.returncode == 0, done.stderr
    assert "guess: my-infer.command: options as in the script" in " ".join(done.stdout.split())
    text, config = made(project)
    words = ["python", "my infer.py", "--input_csv", "{rows}", "--output", "{out}"]
    assert config["models"] == [{"name": "my-infer", "task_type": "command", "command": words}]
    assert "not used" not in text
    ran = project.ensemble("run", "config.yaml", "-q", "--set", "report=false")
    assert ran.returncode == 0, ran.stderr
    header, rows = project.read("submission.csv")
    assert header == ["id", "no", "yes"]
    np.testing.assert_allclose([float(row[2]) for row in rows], [0.6, 1.0], atol=1e-6)


def test_a_script_without_options_is_told_of(project: Project) -> None:
    """As most notebooks' cells have it."""
    project.write_csv("test.csv", ["id", "text"], [["a", "one"], ["b", "seven"]])
    project.write_csv("sample.csv", ["id", "no", "yes"], [["a", "0", "1"], ["b", "0", "1"]])
    (project.folder / "infer.py").write_text("import pandas\npandas.read_csv('test.csv')\n", encoding="utf-8")
    text = first_config(
        project.folder / "test.csv", [str(project.folder / "infer.py")], project.folder / "sample.csv"
    )
    assert (
        "# GUESS: infer.command: the script does not show these options; it must read the file {rows}" in text
    )
    assert yaml.safe_load(text)["models"][0]["command"][2:] == ["--rows", "{rows}", "--out", "{out}"]
