"""Every change to files is seen, whatever makes it, and a run ends at exactly the step it shall end at."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.steps import ENTER, Judge, Step, Verdict, Watched, skip_unless_watchable


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


def test_a_full_disk_is_what_the_program_hears(tmp_path: Path) -> None:
    def judge(step: Step) -> Verdict:
        return Verdict.NO_SPACE if step.takes_space and "full" in step.paths[0] else Verdict.GO

    code = (
        "import numpy as np, os\n"
        "open('fine', 'w').write('x')\n"
        "for write in (lambda: np.save('full', np.arange(9)), lambda: os.mkdir('full too')):\n"
        "    try:\n        write()\n"
        "    except OSError as error:\n        print(error.strerror)\n"
    )
    with (tmp_path / "said").open("w") as output:
        assert watch(code, tmp_path, judge, stdout=output).wait() == 0
    assert (tmp_path / "said").read_text() == "No space left on device\n" * 2
    assert (tmp_path / "fine").read_text() == "x"
    assert not (tmp_path / "full too").exists()


def test_what_goes_wrong_in_the_judge_ends_the_program_and_is_raised(tmp_path: Path) -> None:
    def judge(step: Step) -> Verdict:
        raise LookupError(step.paths[0])

    with pytest.raises(LookupError, match="a"):
        watch(TWO_PROCESSES, tmp_path, judge)
    assert not list(tmp_path.iterdir())


def test_fsync_can_be_made_to_do_nothing(tmp_path: Path) -> None:
    """The inner filter answers before the outer one is asked."""
    code = "import os; file = os.open('a', os.O_CREAT | os.O_WRONLY); os.write(file, b'x'); os.fsync(file)"
    for command, calls in {
        (sys.executable, "-c", code): ["openat", "write", "fsync"],
        (sys.executable, str(ENTER), "no-fsync", sys.executable, "-c", code): ["openat", "write"],
    }.items():
        (tmp_path / "a").unlink(missing_ok=True)
        with Watched(command, tmp_path, go, cwd=tmp_path) as watched:
            assert watched.wait() == 0
        assert [step.call for step in watched.steps] == calls


def test_a_signal_does_not_count_a_step_twice(tmp_path: Path) -> None:
    """It arrives while the call waits for an answer."""

    def judge(step: Step) -> Verdict:
        os.kill(step.pid, signal.SIGUSR1)
        return Verdict.GO

    code = "import signal; signal.signal(signal.SIGUSR1, lambda *a: None)\nfor name in 'abc': open(name, 'w')"
    watched = watch(code, tmp_path, judge)
    assert watched.wait() == 0
    assert [step.paths for step in watched.steps] == [("a",), ("b",), ("c",)]


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    with Watched([str(tmp_path / "nothing")], tmp_path, go, stderr=subprocess.DEVNULL) as watched:
        assert watched.wait() == 1
