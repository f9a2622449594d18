"""Predictions made elsewhere as members: what is checked, how they are joined, whole runs beside a real model."""

from __future__ import annotations

import csv
import gzip
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ensemble.common.errors import DataError
from ensemble.members.base import OutputColumns
from ensemble.members.csv.parent import CsvPredictions
from ensemble.members.csv.settings import CsvSettings
from ensemble.pipeline.load import load
from ensemble.pipeline.run import run
from tests.project import LABELS, ROOT, Project, python_path

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


@pytest.mark.parametrize("seed", range(4))
def test_tables_of_many_blocks_in_any_order(path: Path, seed: int) -> None:
    chooser = random.Random(seed)
    line = "\r\n" if seed == 3 else ""
    ids = [f"{chooser.choice(['é', 'x'])}{line}{number}" for number in range(60_000)]
    rows = [[one, str(chooser.random()), str(chooser.random())] for one in ids]
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
    assert refused(path, ["1", "2", "3", "4", "5", "6"]) == (
        "2 ids more than once ('1', '4'); keep one row for each id",
        "4 ids of the table missing ('2', '3', '5', ...); a row is needed for each of them, or partial: true",
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("id,a,B\n1,0,1\n", "no column of the label 'b' (did you mean 'B'?); the columns are"),
        ("key,a,b\n1,0,1\n", "no id column 'id'; the columns are"),
        (
            "id;a;b\n1;0;1\n",
            "no id column 'id' (the header has a single column: are the columns separated by commas?)",
        ),
        ("id,a,b,b\n1,0,1,1\n", "the header names 'b' more than once; rename the columns"),
        ("", "the file is empty"),
        (
            "id,a,b\n1,0,1\n2,0\n",
            "1 broken row; row 2 has 2 cells instead of 3: '2,0'; rows must be complete",
        ),
        ('id,a,b\n1,0,1\n2,0,"1\n', "a quote opens in row 2 and never closes"),
        (
            "id,a,b\n2,0,1\n1,0,high\n",
            "row 2: 'high' in column 'b' is no number; write a number in every row",
        ),
        ("id,a,b\n1,0,\n", "row 1: '' in column 'b' is no number"),
        ("id,a,b\n", "1 id of the table missing ('1')"),
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
        "from ensemble.members.csv.settings import CsvSettings\n"
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
    rows = [[one, *map(repr, row)] for one, row in zip(project.ids, values, strict=True)]
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
    assert "mate: done by an earlier run, reused" in again.stdout
    assert project.run_json()["members"][1]["reused_rows"] == 300
    values = np.array(write_mate(project, shift=0.05))
    changed = project.ensemble("run", "config.yaml")
    assert changed.returncode == 0, changed.stderr
    assert "llama: done by an earlier run, reused" in changed.stdout
    assert "mate: file changed since its predictions were made; it is read again" in changed.stdout
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
    assert [one["weight"] for one in report["members"]] == [by_label, [0.6, 0.2]]
    assert report["merged_rows"] == {"some": len(there), "mate": 300}
    assert report["scores"].keys() == {"mate", "ensemble"}, "some has too few rows for a score"
    assert project.ensemble("status", "runs/first").returncode == 0, "its report can be read"
    validated = project.ensemble("validate", "config.yaml").stdout
    assert "weight [0.6, 0.2]" in validated
    assert f"weight {LABELS[0]} 0.5, {LABELS[1]} 1, {LABELS[2]} 0.25" in " ".join(validated.split())

    alone = project.ensemble(
        "run", "config.yaml", "--set", "models.mate.weight=0", "--set", "output_dir=alone"
    )
    lacking = (
        f"models: no member has {300 - len(there)} rows of the table, the first is id {project.ids[3]!r}"
    )
    assert (alone.returncode, lacking in " ".join(alone.stderr.split())) == (2, True), alone.stderr
    assert not (project.folder / "alone").exists()


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
        lines = [[one, *row] for one, row in zip(project.ids, cells, strict=True)]
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
    first, second = project.ids[0], "correct the file"
    for words in (
        f"models[0] (sums): sums.csv: 1 row with values that do not sum to 1, the first is id {first}; {second}",
        f"models[1] (range): range.csv: 1 row with values below 0 or above 1, the first is id {first}; {second}",
        f"models[2] (finite): finite.csv: 2 rows with no finite number, the first is id {first}; {second}",
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
    said = " ".join(project.ensemble("validate", "config.yaml").stderr.split())
    assert "mate gives raw values (regression), the others probabilities" in said
    assert "run them separately, or set activation" in said


def test_its_file_is_nothing_that_the_run_writes(project: Project) -> None:
    write_mate(project)
    place = project.folder / "runs/first/predictions"
    place.mkdir(parents=True)
    (project.folder / "mate.csv").rename(place / "mate.csv")
    project.write_config(with_mate(project, path="runs/first/predictions/mate.csv"))
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 2
    assert "is read by this run and would be overwritten" in " ".join(done.stderr.split())
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
def test_a_file_that_changes_during_the_run_fails_its_member(
    project: Project, monkeypatch: pytest.MonkeyPatch, is_gone: bool
) -> None:
    monkeypatch.chdir(project.folder)
    write_mate(project)
    other = {**with_mate(project)["models"][1], "name": "other", "path": "other.csv"}
    (project.folder / "other.csv").write_bytes((project.folder / "mate.csv").read_bytes())
    project.write_config({**with_mate(project, other), "on_member_failure": "fail"})
    assert run(load(Path("config.yaml")), Harm(None)).status == "complete"

    def harm() -> None:
        if is_gone:
            Path("mate.csv").unlink()
        else:
            write_mate(project, shift=0.2)

    write_mate(project, shift=0.1)
    failed = run(load(Path("config.yaml")), Harm(harm))
    assert failed.status == "failed"
    (failure,) = [one.failure for one in failed.members if one.failure is not None]
    assert failure.member == "mate"
    assert "mate.csv" in failure.message
    assert not (project.folder / "runs/first/ensemble.csv").exists(), "nothing old is taken for its result"
    assert project.run_json()["members"][1]["status"] == "failed"
    write_mate(project, shift=0.3)
    merged = run(load(Path("config.yaml"), ["on_member_failure=continue"]), Harm(harm))
    assert merged.status == "complete"
    assert merged.left_out == ("mate",)
    ours, theirs = (
        values_of(project, f"runs/first/{name}.csv") for name in ("ensemble", "predictions/other")
    )
    np.testing.assert_array_equal(ours, theirs)


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
    lines = [f"{one},{'0' * 600}0.25,0.75" for one in shuffled] + [f"{one},0.5,0.5" for one in ids[:9000]]
    path.write_text("id,a,b\n" + "\n".join(lines) + "\n")
    (problem,) = refused(path, ids)
    assert problem.startswith("9,000 ids more than once ('0', '1', '2', ...)")


def test_an_id_column_that_is_a_label(path: Path) -> None:
    path.write_text("id,a,b\n1,0.5,0.5\n")
    assert refused(path, ["1"], id_column="a") == ("id_column: 'a' is a label; name the column of the ids",)


@pytest.mark.parametrize("text", ["\ufeffa,id,b\nfoo,1,0.3\n", "\nid,a,b\n1,foo,0.3\n"])
def test_a_cell_that_is_no_number_behind_a_mark_or_an_empty_line(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    assert refused(path, ["1"]) == ("row 1: 'foo' in column 'a' is no number; write a number in every row",)


def test_column_names_that_are_not_utf8(path: Path) -> None:
    path.write_bytes("id,a,b,n\xe4me\n1,0.5,0.5,x\n".encode("latin-1"))
    assert refused(path, ["1"]) == (
        "the header is not UTF-8; convert the file to UTF-8 first, for example with: "
        "iconv -f WINDOWS-1252 -t UTF-8",
    )


def test_what_is_no_file(path: Path) -> None:
    os.mkfifo(path)
    assert refused(path, ["1"])[0].startswith("is not a regular file")
    assert refused(path.with_name("mte.csv"), ["1"]) == ("no such file (did you mean 'mate.csv'?)",)
