"""Texts of single rows: those that members have read, from each format, or none."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

import ensemble
from ensemble.analysis.predictions import read_run
from ensemble.analysis.report.base import TableTexts
from ensemble.common.errors import DataError
from ensemble.pipeline.run_dir import RunDir
from ensemble.pipeline.run_report import RunReport
from tests.project import Project
from tests.sampling import one_in

pytestmark = pytest.mark.usefixtures("warm")


def texts(run_dir: Path, rows: list[int]) -> dict[int, dict[str, str]]:
    report = RunReport.read(RunDir(run_dir).run_json)
    return TableTexts(RunDir(run_dir), report, read_run(run_dir, with_truth=False).ids).of_rows(rows)


@pytest.mark.parametrize("name", one_in(3, ["test.tsv.gz", "test.csv", "test.jsonl"]))
def test_texts_are_those_that_were_read(project: Project, name: str) -> None:
    project.write_table(60)
    project.texts[5] = 'a "quoted" text,\nin two lines'
    path = project.folder / name
    records = [list(cells) for cells in zip(project.ids, project.texts, strict=True)]
    turns = [["first turn", number] for number in range(60)]

    def write(changed: str = "") -> None:
        if name == "test.jsonl":
            lines = [
                json.dumps({"id": record, "text": text + changed * (row == 7), "turns": turn})
                for row, ((record, text), turn) in enumerate(zip(records, turns, strict=True))
            ]
            path.write_text("\n".join(lines), encoding="utf-8")
            return
        mark = "\t" if "tsv" in name else ","
        rows = [["id", "text", "turns"]] + [
            [record, text + changed * (row == 7), json.dumps(turn)]
            for row, ((record, text), turn) in enumerate(zip(records, turns, strict=True))
        ]
        cells = ('"' + cell.replace('"', '""') + '"' for row in rows for cell in row)
        lines = [mark.join(line) for line in zip(*[cells] * 3, strict=True)]
        data = "\n".join(lines).encode()
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)

    write()
    template = "{{ (turns if turns is not string else (turns | fromjson))[0] }} {{ text }}"
    models = [
        {"name": "gemma", "model_name_or_path": str(project.models / "gemma"), "text_column": "text"},
        {"name": "llama", "model_name_or_path": str(project.models / "llama"), "prompt_template": template},
    ]
    data = {"path": name, "id_column": "id"}
    config = project.config(
        data=data, models=models, submission=None, defaults={"max_length": 64}, report=False
    )
    project.write_config(config)
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stderr
    run_dir = project.folder / "runs/first"
    result = texts(run_dir, [59, 5, 7])
    assert [result[row]["text"] for row in (5, 7, 59)] == [project.texts[row] for row in (5, 7, 59)]
    assert json.loads(result[7]["turns"]) == turns[7]
    written = path.stat().st_mtime_ns
    write(changed=" and more")  # with the same ids
    with pytest.raises(DataError, match=r"has changed since the run; run the config again"):
        texts(run_dir, [5, 7])
    records[4:6] = records[5:3:-1]
    write()
    os.utime(path, ns=(written, written))
    with pytest.raises(DataError, match=r"row 5 is another one"):
        texts(run_dir, [4])
    del records[20:], turns[20:]
    write()
    os.utime(path, ns=(written, written))
    with pytest.raises(DataError, match=r"has fewer rows"):
        texts(run_dir, [59])


def test_texts_are_those_of_the_rows_with_a_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.csv").write_text("id,text,label\n1,first,a\n2,second,\n3,third,b\n")
    Path("half.py").write_text("def predict(frame, context):\n    return [[0.5, 0.5]] * len(frame)\n")
    config = {
        "data": {"path": "t.csv", "label_column": "label", "skip_unlabelled": True},
        "labels": ["a", "b"],
        "models": [{"name": "m", "task_type": "python", "predict": "half.py:predict", "columns": ["text"]}],
        "output_dir": "out",
        "report": False,
    }
    run = ensemble.run(config)
    assert run.ensemble.index.tolist() == ["1", "3"]
    assert texts(Path("out"), [0, 1]) == {0: {"text": "first"}, 1: {"text": "third"}}
    truth = read_run(Path("out")).truth
    assert truth is not None
    assert truth.tolist() == [0, 1]
