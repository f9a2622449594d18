"""Predictions made elsewhere as members: what is checked, how they are joined, whole runs beside a real model."""

from __future__ import annotations

import csv
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
from tests.project import ROOT, python_path

COLUMNS = OutputColumns("id", ("a", "b"))
LLAMA = 1  # of the project's usual members


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
    others = [[f"other {number}", "x" if seed == 9 else "0", "1"] for number in range(100)]
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
        "3 rows with an id that came before ('1', '4', '4'); keep one for each id",
        "4 ids of the table missing ('2', '3', '5', ...); a row is needed for each of them",
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("id,a,B\n1,0,1\n", "no column of the label 'b' (did you mean 'B'?); its columns are"),
        ("key,a,b\n1,0,1\n", "no id column 'id'; its columns are"),
        ("id;a;b\n1;0;1\n", "its columns are 'id;a;b'"),
        ("id,a,b,b\n1,0,1,1\n", "'b' is the name of 2 columns; keep one"),
        ("", "cannot be read as a CSV (Empty CSV file)"),
        ("id,a,b\n1,0,1\n2,0\n", "cannot be read as a CSV (CSV parse error: "),
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


def test_files_that_cannot_be_read(path: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"mate\.csv cannot be read \(.*No such file"):
        joined(path, ["1"])
    with pytest.raises(DataError, match="cannot be read"):
        joined(tmp_path, ["1"])


def test_memory_is_no_multiple_of_the_file(tmp_path: Path) -> None:
    """In a process of its own: what it holds at most beside what it holds before."""
    rows = 400_000
    generator = np.random.default_rng(0)
    first = generator.random(rows)
    with (tmp_path / "mate.csv").open("w", encoding="utf-8") as file:
        file.write("id,a,b\n")
        order = generator.permutation(rows)
        file.writelines(f"{row:08d},{first[row]},{1 - first[row]}\n" for row in order.tolist())
    code = (
        "import resource, pathlib, numpy, pyarrow as pa\n"
        "from ensemble.members.base import OutputColumns\n"
        "from ensemble.members.csv.parent import CsvPredictions\n"
        "from ensemble.members.csv.settings import CsvSettings\n"
        "def member(name): return CsvPredictions(CsvSettings(name='m', path=pathlib.Path(name)))\n"
        "columns = OutputColumns('id', ('a', 'b'))\n"
        "pathlib.Path('small.csv').write_text('id,a,b\\n1,0,1\\n')\n"
        "member('small.csv').predictions(pa.chunked_array([['1']]), columns)\n"
        f"ids = pa.chunked_array([pa.array([f'{{row:08d}}' for row in range({rows})])])\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "given = member('mate.csv').predictions(ids, columns)\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": python_path(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 2 * (tmp_path / "mate.csv").stat().st_size
