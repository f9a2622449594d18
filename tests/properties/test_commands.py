"""The nastiest input that was found, through the real command line: exit code 2, sentences, no stack trace."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.config.examples import small
from tests.project import Project

pytestmark = pytest.mark.usefixtures("warm")
PWNED = "!!python/object/apply:os.system ['touch pwned']"
BOMB = "a0: &a0 [1, 1]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 30)}]\n" for n in range(1, 40))
DEEP = b'{"id": "1", "text": ' + b"[" * 200_000 + b"]" * 200_000 + b'}\n{"id": ' + b"9" * 5000 + b"}\n"


def assert_refused(folder: Path, config: str, *overrides: str, words: str) -> None:
    options = [f"--set={text}" for text in overrides]
    done = Project(folder, folder).ensemble("validate", config, *options)
    printed = done.stderr
    assert done.returncode == 2, printed
    assert done.stdout == ""
    assert words in printed
    assert all(line.startswith("error: ") and line.isprintable() for line in printed.splitlines()), printed


@pytest.mark.parametrize(
    ("name", "text", "overrides", "words"),
    [
        ("c.yaml", PWNED, [], "c.yaml (line 1, column 1): the tag '!!python/object/apply:os.system'"),
        ("c.yaml", BOMB, [], "more than 10000 values"),
        ("a\nb\udcff.yaml", "\udcff", [], r"'a\nb\udcff.yaml' (line 1): not UTF-8 text"),
        ("c.yaml", json.dumps(small()), ["models.0.model_kwargs.\udcff=1", "a\n=\x07"], "is not a path"),
    ],
)
def test_a_config_that_is_none(
    tmp_path: Path, name: str, text: str, overrides: list[str], words: str
) -> None:
    (tmp_path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    assert_refused(tmp_path, name, *overrides, words=words)
    assert not (tmp_path / "pwned").exists()


def with_table(folder: Path, name: str, content: bytes) -> str:
    model = small(text_column=None, prompt_template="{{ text }}")["models"]
    (folder / name).write_bytes(content)
    (folder / "c.yaml").write_text(json.dumps({**small(), "data": {"path": name}, "models": model}))
    return "c.yaml"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.csv", b"id,text\n001,\xff,a\n1e5,b\n", "1 broken row; row 1 has 3 cells instead of 2"),
        ("x.csv", b'id,text\n001,5" pipe\n=1+1,"open\n x,b\n', "quote opens in row 2"),
        ("x.jsonl", DEEP, "line 1: nested too deep; line 2: Exceeds the limit"),
    ],
)
def test_a_table_that_is_none(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    assert_refused(tmp_path, with_table(tmp_path, name, content), words=words)


@pytest.mark.fresh
def test_times_that_python_does_not_have(tmp_path: Path) -> None:
    # Only in a process that has not imported pandas, which knows nanoseconds.
    content = io.BytesIO()
    times = pa.array([1_000, 1], pa.int64()).view(pa.timestamp("ns"))
    parquet.write_table(pa.table({"id": ["001", "1e5"], "text": times}), content)
    config = with_table(tmp_path, "x.parquet", content.getvalue())
    assert_refused(tmp_path, config, words="column 'text' holds timestamp[ns] values that cannot be used")
