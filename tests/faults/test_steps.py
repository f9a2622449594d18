"""Every change to files is seen, whatever makes it, and a run ends at exactly the step it shall end at."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.steps import Judge, Step, Verdict, Watched, skip_unless_watchable


@pytest.fixture(scope="module", autouse=True)
def watchable() -> None:
    skip_unless_watchable()


def go(step: Step) -> Verdict:
    return Verdict.GO


def watch(code: str, folder: Path, judge: Judge = go, **options: Any) -> Watched:
    """Runs code with ``folder`` as its working directory and its only argument, to the end."""
    command = [sys.executable, "-c", code, str(folder)]
    with Watched(command, folder, judge, cwd=folder, **options) as watched:
        return watched


ALL_KINDS = """
import os, shutil, subprocess, sys
from pathlib import Path
import numpy as np, pyarrow as pa, pyarrow.csv

folder = Path(sys.argv[1])
Path("text").write_text("hello")
np.save(folder / "array.npy", np.arange(9))
pyarrow.csv.write_csv(pa.table({"a": [1, 2]}), str(folder / "table.csv"))
os.rename("text", "renamed")
Path("nothing").unlink(missing_ok=True)
Path("new").mkdir()
os.symlink("nowhere", "new/link")
shutil.copyfile("array.npy", "new/copy")
os.unlink("new/copy")
os.unlink("new/link", dir_fd=os.open(".", os.O_RDONLY))
os.rmdir("new")
here = os.open(".", os.O_RDONLY)
file = os.open("renamed", os.O_WRONLY | os.O_APPEND, dir_fd=here)
os.writev(file, [b"ab", b"c"])
os.ftruncate(file, 3)
os.fsync(file)
os.fsync(here)
subprocess.run(["sh", "-c", "echo x >> table.csv; mv table.csv moved.csv"])
Path("/dev/shm/elsewhere").touch()
Path("/dev/shm/elsewhere").unlink()
Path("array.npy").read_bytes()
"""


def test_every_kind_of_change_is_seen_and_nothing_else(tmp_path: Path) -> None:
    watched = watch(ALL_KINDS, tmp_path)
    assert watched.wait() == 0
    sizes: dict[str, int] = {}
    calls: list[tuple[str, ...]] = []
    for step in watched.steps:
        if step.call in ("write", "sendfile", "copy_file_range"):
            sizes[step.paths[0]] = sizes.get(step.paths[0], 0) + step.size
        else:
            calls.append((step.call.removesuffix("2").removesuffix("at"), *step.paths))
    assert calls == [
        *[("open", "text"), ("open", "array.npy"), ("open", "table.csv"), ("rename", "text", "renamed")],
        *[("mkdir", "new"), ("symlink", "new/link"), ("open", "new/copy")],
        *[("unlink", "new/copy"), ("unlink", "new/link"), ("rmdir", "new")],
        *[("writev", "renamed"), ("ftruncate", "renamed"), ("fsync", "renamed"), ("fsync", ".")],
        ("rename", "table.csv", "moved.csv"),
    ]
    assert sizes.pop("new/copy") > 0
    assert sizes == {
        "text": 5,
        "array.npy": (tmp_path / "array.npy").stat().st_size,
        "table.csv": (tmp_path / "moved.csv").stat().st_size,
    }
    assert len({step.pid for step in watched.steps}) == 3, "Python, the shell, and mv"


TWO_PROCESSES = """
import subprocess, sys
for name in "abcdef":
    if name in "be":
        subprocess.run([sys.executable, "-S", "-c", "import sys; open(sys.argv[1], 'w')", name])
    else:
        open(name, "w")
"""


def test_it_ends_at_every_step_before_that_takes_effect(tmp_path: Path) -> None:
    for number in range(1, 8):
        folder = tmp_path / str(number)
        folder.mkdir()

        def judge(step: Step, number: int = number) -> Verdict:
            return Verdict.KILL if step.number == number else Verdict.GO

        watched = watch(TWO_PROCESSES, folder, judge)
        assert watched.wait() == (-signal.SIGKILL if number < 7 else 0)
        assert sorted(path.name for path in folder.iterdir()) == list("abcdef"[: number - 1])
        assert len(watched.steps) == min(number, 6)
