"""Predictions made elsewhere as members: what is checked, how they are joined, whole runs beside a real model."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.special

from ensemble.common.errors import DataError, EnsembleError
from ensemble.members.base import OutputColumns
from ensemble.members.csv.parent import CsvPredictions, CsvSettings
from ensemble.pipeline.load import load
from ensemble.pipeline.run import run
from tests.project import LABELS, ROOT, Project, python_path
from tests.sampling import shares

COLUMNS = OutputColumns("id", ("a", "b"))
LLAMA = 1  # of the project's usual members
pytestmark = pytest.mark.usefixtures("warm")


def joined(path: Path, ids: list[str], **keys: Any) -> tuple[list[list[float]], int]:
    member = CsvPredictions(CsvSettings(name="mate", path=path, **keys))
    member.inspect(COLUMNS)
    half = len(ids) // 2
    given = member.predictions(pa.chunked_array([pa.array(ids[:half], pa.string()), ids[half:]]), COLUMNS)
    assert given.values.flags.f_contiguous
    return given.values.tolist(), given.ignored_ids


def refused(path: Path, ids: list[str], **keys: Any) -> tuple[str, ...]:
    with pytest.raises(DataError) as caught:
        joined(path, ids, **keys)
    assert all(problem.startswith(str(path)) for problem in caught.value.problems)
    return tuple(problem.removeprefix(f"{path}: ") for problem in caught.value.problems)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mate.csv"


@pytest.mark.parametrize(
    "text",
    [
        "id,a,b\n1,0.25,0.75\n2,1,0\n3,0.5,5e-1\n",
        'b,more,id,a\n0.5,x,3,0.5\n0.75,,1,0.25\n0,"a\nb",2,1\n',
        '\ufeffid,a,b\r\n"3","0.5",0.5\r\n2,1,0\r\n1,0.25,0.75',
    ],
)
def test_rows_are_joined_by_id_and_columns_by_name(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="")
    assert joined(path, ["1", "2", "3"]) == ([[0.25, 0.75], [1.0, 0.0], [0.5, 0.5]], 0)


def test_further_ids_are_left_out_and_counted(path: Path) -> None:
    path.write_text("key,a,b\n9,7,nan\n2,1,0\n8,0,0\n1,0.25,0.75\n8,0,0\n", encoding="utf-8")
    assert joined(path, ["1", "2"], id_column="key") == ([[0.25, 0.75], [1.0, 0.0]], 3)


@pytest.mark.parametrize("seed", shares(4))
def test_tables_of_many_blocks_in_any_order(path: Path, seed: int) -> None:
    chooser = random.Random(seed)
    line = "\r\n" if seed == 3 else ""
    ids = [f"{chooser.choice(['é', 'x'])}{line}{number}" for number in range(60_000)]
    rows = [[row_id, str(chooser.random()), str(chooser.random())] for row_id in ids]
    others = [[f"other {number}", "0", "1"] for number in range(100)]
    shuffled = [*rows, *others]
    if seed:
        chooser.shuffle(shuffled)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["id", "a", "b"], *shuffled])
    values, ignored = joined(path, ids)
    assert ignored == 100
    assert values == [[float(a), float(b)] for _, a, b in rows]


def test_every_row_must_be_there_once(path: Path) -> None:
    path.write_text("id,a,b\n1,0,1\n1,1,0\n4,1,0\n4,1,0\n4,1,0\n", encoding="utf-8")
    twice, missing = refused(path, ["1", "2", "3", "4", "5", "6"])
    assert twice.startswith("2 ids more than once ('1', '4')")
    assert missing.endswith("('2', '3', '5', ...); a row is needed for each of them, or partial: true")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("id,a,B\n1,0,1\n", "the label 'b' (did you mean 'B'?); the columns are"),
        ("key,a,b\n1,0,1\n", "no id column 'id'; the columns are"),
        (
            "id;a;b\n1;0;1\n",
            "no id column 'id' (its columns are separated by",
        ),
        ("id,a,b,b\n1,0,1,1\n", "the header names 'b' more than once; rename the columns"),
        ("", "the file is empty"),
        (
            "id,a,b\n1,0,1\n2,0\n",
            "1 broken row; row 2 has 2 cells instead of 3: '2,0'; rows must be complete",
        ),
        ('id,a,b\n1,0,1\n2,0,"1\n', "opens in row 2"),
        (
            "id,a,b\n2,0,1\n1,0,high\n",
            "row 2: 'high' in column 'b'",
        ),
        ("id,a,b\n1,0,\n", "row 1: nothing in column 'b'"),
        ("id,a,b\n", "missing ('1')"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(path: Path, text: str, words: str) -> None:
    path.write_text(text, encoding="utf-8")
    assert any(words in problem for problem in refused(path, ["1"]))
    packed = path.with_name("mate.csv.gz")
    packed.write_bytes(gzip.compress(text.encode()))
    assert any(words in problem for problem in refused(packed, ["1"])) or not text


def test_rows_of_any_length(path: Path) -> None:
    path.write_text(f"id,text,a,b\n1,,0,1\n2,{'x' * 3_000_000},1,0\n3,,0,1\n", encoding="utf-8")
    assert joined(path, ["1", "2", "3"])[0] == [[0, 1], [1, 0], [0, 1]]


def test_files_that_cannot_be_read(path: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"mate\.csv: no such file"):
        joined(path, ["1"])
    with pytest.raises(DataError, match="is a directory"):
        joined(tmp_path, ["1"])


@pytest.mark.long
def test_memory_is_no_multiple_of_the_file(tmp_path: Path) -> None:
    """In a process of its own: what it holds at most beside what it holds before."""
    rows = 800_000
    generator = np.random.default_rng(0)
    first = generator.random(rows)
    with (tmp_path / "mate.csv").open("w", encoding="utf-8") as file:
        file.write("id,a,b\n")
        order = generator.permutation(rows)
        file.writelines(f"{row:08d},{first[row]},{1 - first[row]}\n" for row in order.tolist())
    code = (
        "import pathlib, re, numpy, pyarrow as pa\n"
        "from ensemble.members.base import OutputColumns\n"
        "from ensemble.members.csv.parent import CsvPredictions\n"
        "from ensemble.members.csv.parent import CsvSettings\n"
        "def member(name): return CsvPredictions(CsvSettings(name='m', path=pathlib.Path(name)))\n"
        "columns = OutputColumns('id', ('a', 'b'))\n"
        "pathlib.Path('small.csv').write_text('id,a,b\\n1,0,1\\n')\n"
        "member('small.csv').predictions(pa.chunked_array([['1']]), columns)\n"
        f"ids = pa.chunked_array([pa.array([f'{{row:08d}}' for row in range({rows})])])\n"
        # Not ru_maxrss, which can be the peak of the process that this one was forked from.
        "pathlib.Path('/proc/self/clear_refs').write_text('5')\n"
        "def peak(): return int(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1])\n"
        "before = peak()\n"
        "given = member('mate.csv').predictions(ids, columns)\n"
        "print((peak() - before) * 1024)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": python_path(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    # Beside what grows with the file there are Arrow's blocks and threads, whatever its size.
    assert int(done.stdout) < 2.5 * (tmp_path / "mate.csv").stat().st_size + (64 << 20)


def write_mate(project: Project, shift: float = 0.0, extra: int = 1) -> list[list[float]]:
    """``mate.csv`` in another order than the table's; returns its values in the table's."""
    generator = random.Random(7)
    values = []
    for _ in project.ids:
        first = round(generator.random() * (0.9 - shift) + shift, 6)
        values.append([first, round((1 - first) / 2, 6), 1 - first - round((1 - first) / 2, 6)])
    rows = [[row_id, *map(repr, row)] for row_id, row in zip(project.ids, values, strict=True)]
    rows += [[f"further {number}", "9", "9", "9"] for number in range(extra)]
    generator.shuffle(rows)
    project.write_csv("mate.csv", ["id", *LABELS], rows)
    return values


def with_mate(project: Project, *others: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """A config of the project's second model and ``mate.csv``, where nobody says which models."""
    mate = {"name": "mate", "task_type": "csv", "path": "mate.csv", "weight": 0.6, **keys}
    return project.config(models=[*(others or project.config()["models"][LLAMA:]), mate])


def values_of(project: Project, name: str) -> np.ndarray:
    header, rows = project.read(name)
    assert header == ["id", *LABELS]
    assert [row[0] for row in rows] == project.ids
    return np.array([[float(cell) for cell in row[1:]] for row in rows])


def test_a_run_beside_a_real_model(project: Project) -> None:
    values = np.array(write_mate(project))
    project.write_config(with_mate(project))
    validated = project.ensemble("validate", "config.yaml")
    assert validated.returncode == 0, validated.stderr
    assert "mate: predictions in mate.csv, weight 0.6, no worker" in validated.stdout
    assert "mate: 1 row of mate.csv left out, with ids that the table does not have" in validated.stdout
    planned = project.ensemble("plan", "config.yaml").stdout
    assert "mate: predictions in mate.csv, which need no worker" in planned
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "mate: 1 row of mate.csv left out" in done.stdout
    np.testing.assert_array_equal(values_of(project, "runs/first/predictions/mate.csv"), values)
    llama = values_of(project, "runs/first/predictions/llama.csv")
    merged = values_of(project, "runs/first/ensemble.csv")
    np.testing.assert_allclose(merged, 0.6 * values + 0.4 * llama, rtol=1e-12)
    report = project.run_json()
    of_llama, of_mate = report["members"]
    assert (of_mate["status"], of_mate["phase"], of_mate["workers"]) == ("complete", "done", [])
    assert of_mate["reused_rows"] == 0
    assert (len(of_llama["workers"]), report["status"]) == (1, "complete")
    assert set(report["scores"]) == {"llama", "mate", "ensemble"}
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("mate ")]
    assert line.split()[:3] == ["mate", "300", "given"]
    status = project.ensemble("status", "runs/first").stdout
    assert next(line for line in status.splitlines() if line.startswith("mate")).split()[1:4] == [
        *("done", "300", "300")
    ]
    logs = {path.name for path in (project.folder / "runs/first/logs").iterdir()}
    assert logs == {"run.log", "llama-0.log"}

    again = project.ensemble("run", "config.yaml")
    assert again.returncode == 0, again.stderr
    assert "mate: done by" in again.stdout
    values = np.array(write_mate(project, shift=0.05))
    changed = project.ensemble("run", "config.yaml")
    assert changed.returncode == 0, changed.stderr
    assert "llama: done by" in changed.stdout
    assert "mate: file changed since" in changed.stdout
    np.testing.assert_array_equal(values_of(project, "runs/first/predictions/mate.csv"), values)
    merged = values_of(project, "runs/first/ensemble.csv")
    np.testing.assert_allclose(merged, 0.6 * values + 0.4 * llama, rtol=1e-12)


def test_a_run_of_nothing_but_predictions(project: Project) -> None:
    values = np.array(write_mate(project))
    other = {"name": "raw", "task_type": "csv", "path": "mate.csv", "weight": 0.2, "activation": "sigmoid"}
    project.write_config(with_mate(project, other))
    planned = project.ensemble("plan", "config.yaml").stdout
    assert "how long" not in planned
    assert "no member needs a worker: " in planned
    assert "weights" not in planned, "an empty table"
    done = project.ensemble("run", "config.yaml", "--set", "devices=[0]")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "running on the CPU" not in planned + done.stdout, "nobody asked for GPUs"
    np.testing.assert_allclose(values_of(project, "runs/first/ensemble.csv"), values, rtol=1e-12)


@pytest.mark.long
def test_a_member_with_some_rows_calibrated_and_by_weights_of_all_forms(project: Project) -> None:
    values = np.array(write_mate(project))
    there = np.array([number for number in range(300) if number % 7 < 3])
    rows = [[project.ids[number], *map(repr, values[number].tolist())] for number in there[::-1]]
    project.write_csv("some.csv", ["id", *LABELS], rows)
    some = {"name": "some", "task_type": "csv", "path": "some.csv", "partial": True}
    some["calibration"] = {"temperature": 2.0, "bias": {LABELS[1]: 0.5}}
    by_label = dict(zip(LABELS, (0.5, 1, 0.25), strict=True))
    config = with_mate(project, {**some, "weight": by_label}, weight=[0.6, 0.2])
    config["ensemble"] = {"length_bins": [150]}
    project.write_config(config)
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stderr + done.stdout
    assert f"some: has {len(there)} of 300 rows; the other members decide the rest" in done.stdout
    assert f"some {len(there)} given" in " ".join(done.stdout.split()), "in the summary"
    _, written = project.read("runs/first/predictions/some.csv")
    assert [row[0] for row in written] == [project.ids[number] for number in there], "in the table's order"
    np.testing.assert_array_equal(np.array([row[1:] for row in written], float), values[there])
    merged = values_of(project, "runs/first/ensemble.csv")
    calibrated = np.sqrt(values) * np.exp([0, 0.5, 0])
    calibrated /= calibrated.sum(axis=1, keepdims=True)
    # No member reads any text, so that all rows are in the first length bin.
    own = np.array([*by_label.values()])
    both = (own * calibrated + 0.6 * values) / (own + 0.6)
    expected = np.where(np.isin(range(300), there)[:, None], both / both.sum(axis=1, keepdims=True), values)
    np.testing.assert_allclose(merged, expected, rtol=1e-12)
    report = project.run_json()
    assert [member["weight"] for member in report["members"]] == [by_label, [0.6, 0.2]]
    assert report["merged_rows"] == {"some": len(there), "mate": 300}
    assert report["scores"].keys() == {"mate", "ensemble"}, "some has too few rows for a score"
    assert project.ensemble("status", "runs/first").returncode == 0, "its report can be read"
    validated = project.ensemble("validate", "config.yaml").stdout
    assert "weight [0.6, 0.2]" in validated
    assert f"weight {LABELS[0]} 0.5, {LABELS[1]} 1, {LABELS[2]} 0.25" in " ".join(validated.split())

    alone = project.ensemble(
        "run", "config.yaml", "--set", "models.mate.weight=0", "--set", "output_dir=alone"
    )
    lacking = f"no member with a weight has probabilities for {300 - len(there)} rows, the first is id "
    assert (alone.returncode, lacking in " ".join(alone.stderr.split())) == (1, True), alone.stderr
    assert not (project.folder / "alone/ensemble.csv").exists()


@pytest.mark.parametrize("empty", ["", "nan"])
def test_a_row_of_empty_cells_is_one_that_a_partial_member_lacks(project: Project, empty: str) -> None:
    values = np.array(write_mate(project))
    rows = [[row_id, *map(repr, row)] for row_id, row in zip(project.ids, values.tolist(), strict=True)]
    for row in rows[::3]:
        row[1:] = [empty] * len(LABELS)
    project.write_csv("some.csv", ["id", *LABELS], rows)
    some = {"name": "some", "task_type": "csv", "path": "some.csv", "partial": True}
    project.write_config(with_mate(project, some))
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "some: has 200 of 300 rows" in done.stdout
    assert project.run_json()["merged_rows"] == {"some": 200, "mate": 300}
    some["partial"] = False
    project.write_config(with_mate(project, some))
    assert project.ensemble("validate", "config.yaml").returncode == 2


def test_a_trial_on_the_first_rows(project: Project) -> None:
    values = np.array(write_mate(project))
    project.write_config(with_mate(project, {**with_mate(project)["models"][1], "name": "other"}))
    done = project.ensemble("run", "config.yaml", "--limit", "20", "--set", "output_dir=trial")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "left out" not in done.stdout, "nothing is wrong with rows that a trial does not reach"
    _, rows = project.read("trial/predictions/mate.csv")
    assert [row[0] for row in rows] == project.ids[:20]
    np.testing.assert_array_equal([[float(cell) for cell in row[1:]] for row in rows], values[:20])


def test_all_that_is_wrong_is_said_before_anything_runs(project: Project) -> None:
    def rows(name: str, *values: list[str]) -> None:
        cells = [["0.2", "0.3", "0.5"] for _ in project.ids]
        cells[: len(values)] = values
        lines = [[row_id, *row] for row_id, row in zip(project.ids, cells, strict=True)]
        project.write_csv(name, ["id", *LABELS], lines)

    rows("sums.csv", ["0.2", "0.3", "0.6"])
    rows("range.csv", ["-1", "1", "1"])
    rows("finite.csv", ["nan", "0.5", "0.5"], ["inf", "0", "0"])
    project.write_csv("short.csv", ["id", *LABELS], [["0000", "1", "0", "0"]])
    names = ("sums", "range", "finite", "short", "gone")
    members = [{"name": name, "task_type": "csv", "path": f"{name}.csv"} for name in names]
    project.write_config(project.config(models=members))
    done = project.ensemble("validate", "config.yaml")
    assert done.returncode == 2
    text = " ".join(done.stderr.split())
    first, second = f"the first is id {project.ids[0]}", "correct the file"
    low = f"'{LABELS[0]}' is -1"
    sums = ", ".join(f"'{label}' is {value}" for label, value in zip(LABELS, (0.2, 0.3, 0.6), strict=True))
    for words in (
        f"models[0] (sums): sums.csv: 1 row with values that do not sum to 1, {first} ({sums}); {second}",
        f"models[1] (range): range.csv: 1 row with values below 0 or above 1, {first} ({low}); {second}",
        f"models[2] (finite): finite.csv: 2 rows with no finite number, {first} ('{LABELS[0]}' is nan); {second}",
        "models[3] (short): short.csv: 299 ids of the table missing (",
        "models[4] (gone): gone.csv: no such file",
    ):
        assert words in text
    project.write_config(project.config(models=[{**members[1], "activation": "none"}]))
    assert project.ensemble("validate", "config.yaml").returncode == 0
    project.write_config(project.config(models=[{**members[0], "activation": "sigmoid"}]))
    assert project.ensemble("validate", "config.yaml").returncode == 0


def test_advice_names_the_keys_that_the_member_has(project: Project) -> None:
    write_mate(project)
    config = with_mate(project)
    config["models"][1]["activation"] = "none"
    project.write_config(config)
    text = " ".join(project.ensemble("validate", "config.yaml").stderr.split())
    assert "mate gives raw values (regression), the others probabilities" in text
    assert "run them separately, or set activation" in text


def test_its_file_is_nothing_that_the_run_writes(project: Project) -> None:
    write_mate(project)
    place = project.folder / "runs/first/predictions"
    place.mkdir(parents=True)
    (project.folder / "mate.csv").rename(place / "mate.csv")
    project.write_config(with_mate(project, path="runs/first/predictions/mate.csv"))
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 2
    assert "would be overwritten" in " ".join(done.stderr.split())
    assert (place / "mate.csv").exists()


class Harm:
    """A display that harms ``mate.csv`` when the run tells what is there, which is before it reads the file."""

    def __init__(self, harm: Any) -> None:
        self._harm, self.said = harm, list[str]()

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def update(self, members: Any) -> None: ...

    def say(self, text: str) -> None:
        self.said.append(text)
        if text.startswith("mate: file changed"):
            self._harm()


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_file_that_changes_during_the_run_ends_it(
    project: Project, monkeypatch: pytest.MonkeyPatch, is_gone: bool
) -> None:
    monkeypatch.chdir(project.folder)
    write_mate(project)
    project.write_config(with_mate(project))
    assert run(load(Path("config.yaml")), Harm(None)).status == "complete"

    def harm() -> None:
        if is_gone:
            Path("mate.csv").unlink()
        else:
            write_mate(project, shift=0.2)

    write_mate(project, shift=0.1)
    with pytest.raises(EnsembleError, match=r"mate\.csv"):
        run(load(Path("config.yaml")), Harm(harm))
    assert not (project.folder / "runs/first/ensemble.csv").exists(), "nothing old is taken for its result"


def test_a_time_limit_that_is_over_leaves_what_was_given(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.folder)
    values = np.array(write_mate(project))
    project.write_config({**with_mate(project), "time_limit": "1h"})
    done = run(load(Path("config.yaml")), Harm(None), elapsed_seconds=3600)
    assert done.status == "time_limit"
    assert done.merged_rows == {"llama": 0, "mate": 300}
    assert done.filled_rows == 0
    np.testing.assert_allclose(values_of(project, "runs/first/ensemble.csv"), values, rtol=1e-12)


def test_rows_that_come_again_in_the_tables_order_after_others_are_found(path: Path) -> None:
    """A block that looks as if the file were in order must not pass for new rows."""
    ids = [str(number) for number in range(60_000)]
    shuffled = random.Random(0).sample(ids, len(ids))
    lines = [f"{item},{'0' * 600}0.25,0.75" for item in shuffled] + [
        f"{row_id},0.5,0.5" for row_id in ids[:9000]
    ]
    path.write_text("id,a,b\n" + "\n".join(lines) + "\n")
    (problem,) = refused(path, ids)
    assert problem.startswith("9,000 ids more than once ('0', '1', '2', ...)")


def test_an_id_column_that_is_a_label(path: Path) -> None:
    path.write_text("id,a,b\n1,0.5,0.5\n")
    assert refused(path, ["1"], id_column="a") == ("id_column: 'a' is a label; name the column of the ids",)


@pytest.mark.parametrize("text", ["\ufeffa,id,b\nfoo,1,0.3\n", "\nid,a,b\n1,foo,0.3\n"])
def test_a_cell_that_is_no_number_behind_a_mark_or_an_empty_line(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    assert refused(path, ["1"])[0].startswith("row 1: 'foo' in column 'a'")


def test_column_names_that_are_not_utf8(path: Path) -> None:
    path.write_bytes("id,a,b,n\xe4me\n1,0.5,0.5,x\n".encode("latin-1"))
    assert refused(path, ["1"]) == (
        "the header is not UTF-8; convert the file to UTF-8 first, for example with: "
        "iconv -f WINDOWS-1252 -t UTF-8",
    )


def test_what_is_no_file(path: Path) -> None:
    os.mkfifo(path)
    assert refused(path, ["1"])[0].startswith("is not a regular")
    assert refused(path.with_name("mte.csv"), ["1"])[0].startswith("no such file (did")


def write_as(path: Path, columns: dict[str, list[Any]]) -> Path:
    """A file of this name in the format of its name."""
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if path.suffix in (".parquet", ".pq"):
        pq.write_table(pa.table(columns), path)
        return path
    if "jsonl" in path.name:
        text = "".join(json.dumps(row) + "\n" for row in rows)
    else:
        mark = "\t" if ".tsv" in path.name else ","
        text = "".join(
            mark.join(map(str, line)) + "\n" for line in [[*columns], *(row.values() for row in rows)]
        )
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


FORMATS = ["m.parquet", "m.pq", "m.tsv", "m.tsv.gz", "m.jsonl", "m.jsonl.gz", "m.csv.gz", "without extension"]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_of_the_table_is_read_and_joined_in_the_same_way(tmp_path: Path, name: str) -> None:
    path = write_as(
        tmp_path / name, {"p_b": [0.5, 0.0, 7], "more": [1, 2, 3], "id": [2, 1, 9], "a": [0.5, 1, 9]}
    )
    assert joined(path, ["1", "2"], columns={"p_b": "b"}) == ([[1.0, 0.0], [0.5, 0.5]], 1)
    (missing,) = refused(path, ["1", "3"], columns={"p_b": "b"})
    assert "missing ('3')" in missing
    assert refused(path, ["1"], columns={"p_c": "b"}) == (
        "no column for the label 'b': 'p_c' (did you mean 'p_b'?); the columns are 'p_b', 'more', 'id', 'a'",
    )


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"id": ["1", "2"], "a": [0.5, None], "b": [0.5, 0.5]}, "row 2: nothing in column 'a'"),
        ({"id": ["1", "2"], "a": ["0.5", "x"], "b": [0.5, 0.5]}, "row 2: 'x' in column 'a'"),
        ({"id": ["1", "2"], "a": [True, False], "b": [0, 1]}, "column 'a'"),
        ({"id": ["1", None], "a": [0.5, 0.5], "b": [0.5, 0.5]}, "without an id"),
        ({"id": ["1", "1"], "a": [0.5, 0.5], "b": [0.5, 0.5]}, "more than once ('1')"),
        ({"id": [1.5, 2.5], "a": [0.5, 0.5], "b": [0.5, 0.5]}, "id"),
        ({"id": ["1", "2"], "a": [[0.5], [0.5]], "b": [0.5, 0.5]}, "column 'a'"),
    ],
)
def test_what_is_wrong_with_typed_columns_is_named(
    tmp_path: Path, columns: dict[str, list[Any]], words: str
) -> None:
    problems = refused(write_as(tmp_path / "m.parquet", columns), ["1"])
    assert any(words in problem for problem in problems), problems
    if columns["id"] != [1.5, 2.5]:  # which JSON lines spell as text
        assert refused(write_as(tmp_path / "m.jsonl", columns), ["1"])


def test_columns_by_map_name_each_label_once(path: Path) -> None:
    path.write_text("id,a,b\n1,0.25,0.75\n", encoding="utf-8")
    assert joined(path, ["1"], columns={"a": "b", "b": "a"}) == ([[0.75, 0.25]], 0)
    assert refused(path, ["1"], columns={"a": "b"}) == (
        "columns: none is left for the label 'a', as the column of that name is for 'b'; name another",
    )


def test_logits_become_probabilities_by_the_activation(path: Path) -> None:
    rows = np.array([[0.3, -2.0], [800.0, -800.0], [-np.inf, 0.0], [-745.5, -745.0]])
    path.write_text("id,a,b\n" + "".join(f"{n},{a},{b}\n" for n, (a, b) in enumerate(rows)), encoding="utf-8")
    ids = ["0", "1", "2", "3"]
    exponents = rows - rows.max(axis=1, keepdims=True)
    expected = np.exp(exponents) / np.exp(exponents).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(joined(path, ids, values="logits")[0], expected, rtol=1e-15)
    of_labels = [[0.574442516811659, 0.119202922022118], [1.0, 0.0], [0.0, 0.5]]
    result, _ = joined(path, ids, values="logits", activation="sigmoid")
    np.testing.assert_allclose(result[:3], of_labels, rtol=1e-14)
    np.testing.assert_allclose(result[3], [0.0, 0.0], atol=1e-300, err_msg="no overflow")


@pytest.mark.parametrize("row", ["nan,1", "inf,1", "-inf,-inf", "nan,nan"])
def test_logits_that_make_no_probabilities_stay_for_the_check_of_rows(path: Path, row: str) -> None:
    path.write_text(f"id,a,b\n1,{row}\n", encoding="utf-8")
    ((first, second),), _ = joined(path, ["1"], values="logits")
    np.testing.assert_array_equal([first, second], [float(cell) for cell in row.split(",")])


def test_a_sha256_that_is_demanded(path: Path) -> None:
    path.write_text("id,a,b\n1,0.25,0.75\n", encoding="utf-8")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert joined(path, ["1"], sha256=digest.upper()) == ([[0.25, 0.75]], 0)
    assert refused(path, ["1"], sha256="0" * 64) == (
        f"sha256: the file's is {digest}, not {'0' * 64}; get the file that was meant, or change the key",
    )
    path.write_bytes(path.read_bytes() + b"garbage")
    assert refused(path, ["1"], sha256=digest)[0].startswith("sha256: the file's is "), "before its rows"


def test_keys_that_do_not_go_together_and_partial_digests_are_named(project: Project) -> None:
    write_mate(project)
    keys = {"activation": "none", "values": "logits", "columns": {"x": "tie", "y": "tie"}}
    for digest, expected in (
        (
            "abc123",
            (".sha256 (line ", "must be all 64 hexadecimal digits of a SHA-256, as sha256sum prints them"),
        ),
        (
            "0" * 64,
            (
                "logits become probabilities by activation: softmax or sigmoid, not none",
                "the same label as columns.x has",
            ),
        ),
    ):
        mate = {**with_mate(project, **keys, sha256=digest)["models"][1], "name": "other"}
        project.write_config(with_mate(project, mate))
        done = project.ensemble("validate", "config.yaml")
        text = " ".join(done.stderr.split())
        assert done.returncode == 2
        for words in expected:
            assert words in text, text


def test_a_run_of_logits_in_parquet_by_map_and_what_changes_with_the_keys(project: Project) -> None:
    values = np.array(write_mate(project))
    logits = np.log(values) + np.arange(len(values))[:, None]
    names = [f"logit_{label}" for label in LABELS]
    columns = {"id": project.ids, **dict(zip(names, logits.T.tolist(), strict=True))}
    write_as(project.folder / "mate.parquet", columns)
    mapped = dict(zip(names, LABELS, strict=True))
    keys = {"path": "mate.parquet", "columns": mapped, "values": "logits"}
    config = project.config(models=[with_mate(project, **keys)["models"][1]])
    project.write_config(config)
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stderr + done.stdout
    np.testing.assert_allclose(values_of(project, "runs/first/ensemble.csv"), values, rtol=1e-9)
    again = project.ensemble("run", "config.yaml", "--set", "models.mate.activation=sigmoid")
    assert again.returncode == 0, again.stderr + again.stdout
    assert "reused" not in again.stdout
    expected = 1 / (1 + np.exp(-logits))
    np.testing.assert_allclose(values_of(project, "runs/first/ensemble.csv"), expected, rtol=1e-12)


def test_what_a_new_user_does_wrong_is_said_with_what_to_do(project: Project) -> None:
    """One command says it of all files; table and files may have ids of other types."""
    numbers = [*range(1, 41)]
    project.write_csv("test.csv", ["id", "text"], [[str(number), "x"] for number in numbers])
    good = dict(zip(LABELS, ([0.25] * 40, [0.5] * 40, [0.25] * 40), strict=True))

    def given(name: str, ids: list[Any], **columns: list[Any]) -> str:
        write_as(project.folder / name, {"id": ids, **(columns or good)})
        return name

    renamed = {f"p_{label}": values for label, values in good.items()}
    paths = [
        given("int.parquet", numbers),
        given("double.parquet", [float(number) for number in numbers]),
        given("float.csv", [f"{number}.0" for number in numbers]),
        given("zeros.jsonl.gz", [f"{number:03d}" for number in numbers]),
        given("twice.tsv", [1, *numbers[:-1]]),
        given("renamed.csv.gz", numbers, **renamed),
        given("logits.pq", numbers, **{label: [-1.5] * 40 for label in LABELS}),
    ]
    (project.folder / "named.csv").write_bytes((project.folder / "int.parquet").read_bytes())
    (project.folder / "sheet.csv").write_bytes(b"PK\x03\x04\x14\x00\x06\x00 and so on")
    (project.folder / "folder").mkdir()
    paths += ["named.csv", "sheet.csv", "folder"]
    models = [{"name": f"m{n}", "task_type": "csv", "path": path} for n, path in enumerate(paths)]
    config = project.config(models=models, defaults=None, data={"path": "test.csv"})
    project.write_config({**config, "submission": None})
    done = project.ensemble("validate", "config.yaml")
    text = " ".join(done.stderr.split())
    assert done.returncode == 2
    assert "m0" not in text, "numbers are the same ids as their digits as text"
    others = "40 ids of the table missing ('1', '2', '3', ...), as its ids are others"
    for words in (
        "double.parquet: id column 'id' is of type double, which cannot be an id; write the file again with that",
        f"float.csv: {others} ('1.0', '2.0', '3.0', ...)",
        f"zeros.jsonl.gz: {others} ('001', '002', '003', ...)",
        "twice.tsv: 1 id more than once ('1'); keep one row for each id",
        "twice.tsv: 1 id of the table missing ('40')",
        f"renamed.csv.gz: no column of the label '{LABELS[0]}'",
        "columns: {COLUMN: LABEL} says which column is for a label of another name",
        "correct the file, or say with values: logits or activation what they are",
        "named.csv: is a Parquet file; give it a name that ends in .parquet",
        "sheet.csv: is a zip archive, as Excel files are, not text; save its content as CSV",
        "folder: is a directory; name the file inside it",
    ):
        assert words in text, words
    merged = project.ensemble("merge", "int.parquet", "renamed.csv.gz", "-o", "out.csv")
    assert "or map them by columns in a config (task_type: csv)" in " ".join(merged.stderr.split())
    mapped = project.ensemble(
        "merge",
        "int.parquet",
        "a=int.parquet",
        "-o",
        "out.csv",
        "--set",
        f"models.a.columns={{x: {LABELS[0]}}}",
    )
    assert "for more name the files in a config (task_type: csv) and use run" in " ".join(
        merged.stderr.split() + mapped.stderr.split()
    )


def test_logits_of_all_formats_in_a_run_are_what_scipy_makes_of_them(project: Project) -> None:
    """Beside columns by a map with swapped names, a digest that is demanded, and rows that a file lacks."""
    project.write_csv("test.csv", ["id", "text"], [[str(number), "x"] for number in range(50)])
    chooser = np.random.default_rng(9)
    swapped = dict(zip(LABELS, [LABELS[1], LABELS[0], LABELS[2]], strict=True))
    models, expected = list[dict[str, Any]](), list[np.ndarray]()
    for number, name in enumerate(("a.parquet", "b.jsonl", "c.csv.gz", "d.tsv")):
        logits = chooser.normal(size=(50, 3)) * 10.0 ** chooser.integers(-2, 3, size=(50, 1))
        there = chooser.permutation(50)[: 50 - 10 * number]
        columns = {label: logits[there, n].tolist() for n, label in enumerate(swapped.values())}
        path = write_as(project.folder / name, {"id": there.tolist(), **columns})
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        activation = "sigmoid" if number % 2 else "softmax"
        models.append(
            {"name": name[0], "task_type": "csv", "path": name, "columns": swapped, "values": "logits"}
            | {"sha256": digest.upper() if number else digest, "partial": True, "activation": activation}
        )
        # A name that is swapped in the file, and by the map again, is the label's own.
        values = scipy.special.expit(logits) if number % 2 else scipy.special.softmax(logits, axis=1)
        expected.append(values[np.sort(there)])
    config = project.config(models=models, defaults=None, data={"path": "test.csv"})
    project.write_config({**config, "submission": None})
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stderr
    for model, values in zip(models, expected, strict=True):
        _, rows = project.read(f"runs/first/predictions/{model['name']}.csv")
        np.testing.assert_allclose(
            np.array([row[1:] for row in rows], float), values, rtol=1e-12, atol=1e-300
        )
    other = project.ensemble("run", "config.yaml", "--set", f"models.a.sha256={'f' * 64}")
    assert other.returncode == 2
    assert "a.parquet: sha256: the file's is " in " ".join(other.stderr.split())
