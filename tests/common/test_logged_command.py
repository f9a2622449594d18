"""Commands beneath a worker: what is left of their logs, and what is said of those that fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ensemble.common.files import MAX_LOG_BYTES
from ensemble.common.logged_command import CommandFailed, LoggedCommand, last_words
from ensemble.common.python_process import end_marked
from tests.waiting import wait_until


def test_the_log_of_a_command_that_prints_without_end_keeps_its_last_part(tmp_path: Path) -> None:
    log = tmp_path / "fold 0.log"
    with log.open("wb") as file:  # takes no space
        file.truncate(MAX_LOG_BYTES)
    code = "import sys; print(); print('no gradient'); sys.exit(3)"
    command = LoggedCommand([sys.executable, "-c", code], tmp_path / "out", log, False, {}, {})
    with pytest.raises(CommandFailed, match=r"exit code 3.*last words: .*no gradient$"):
        command.run(lambda rows, tokens=0, padded_tokens=0: None)
    assert log.stat().st_size < MAX_LOG_BYTES
    assert log.read_bytes().endswith(b"no gradient\n")


SCRIPT = """
def main():
    try:
        {}["grp"]
    except KeyError as error:
        raise ValueError("train.csv has no column grp") from error

main()
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(["accelerate.commands.launch", "--cpu", "--num_processes", "1"], id="accelerate"),
        pytest.param(["torch.distributed.run", "--nproc-per-node", "2"], id="torchrun"),
    ],
)
def test_the_scripts_exception_is_said_and_not_its_launchers(launcher: list[str], tmp_path: Path) -> None:
    script = tmp_path / "a script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    command = LoggedCommand(
        command=[sys.executable, "-m", *launcher, str(script)],
        out=tmp_path / "out",
        log=tmp_path / "log",
        resumes=False,
        environment={"TMPDIR": str(tmp_path)},  # torchrun leaves a folder there
        settings={},
    )
    with pytest.raises(CommandFailed) as failed:
        command.run(lambda *counts: None)
    words = str(failed.value).partition(", with the last words: ")[2].split(" | ")
    expected = ["KeyError: 'grp'", "ValueError: train.csv has no column grp"]
    assert sorted(words) == expected, (tmp_path / "log").read_text(encoding="utf-8")


def test_exceptions_of_ranks_are_said_once_and_other_logs_end_as_they_do() -> None:
    trace = "Traceback (most recent call last):\n  File 'a.py', line 1\n\nOSError: no b.csv\n"
    launchers = trace.replace(
        "OSError: no b.csv", "torch.distributed.elastic.x.errors.ChildFailedError: \n====="
    )
    ranks = "".join(f"[rank{number}]: {line}\n" for number in (0, 1) for line in trace.splitlines())
    assert last_words(f"{ranks}{launchers}a.py FAILED\n") == "OSError: no b.csv"
    assert (
        last_words(f"{launchers}a.py FAILED\n")
        == "torch.distributed.elastic.x.errors.ChildFailedError: | ===== | a.py FAILED"
    )
    assert last_words(f"{trace}went on\r50%\r51%\n\n") == "went on | 50% | 51%"
    assert last_words("") == ""
    mixed = "".join(f"{line}\n{line}\n" for line in trace.splitlines())  # of two ranks
    assert last_words(f"{mixed}{launchers}a.py FAILED\n") == "OSError: no b.csv"


# A server one of whose processes has no mark in its environment, as those of vLLM, which write a title over it.
SERVER = """
import signal, subprocess, sys, time
orderly = len(sys.argv) > 2
child = subprocess.Popen(["/bin/sleep", "600"], env={})
def end(number, frame):
    child.kill()
    open(sys.argv[1] + ".ended", "w").close()
    sys.exit()
signal.signal(signal.SIGTERM, end if orderly else signal.SIG_IGN)
open(sys.argv[1], "w").write(f"{child.pid}\\n")
time.sleep(600)
"""


@pytest.mark.parametrize("orderly", [True, False])
def test_a_server_may_end_by_itself_and_is_killed_with_its_group_otherwise(
    orderly: bool, tmp_path: Path
) -> None:
    started = tmp_path / "started"
    command = [sys.executable, "-c", SERVER, str(started), *["orderly"] * orderly]
    running = LoggedCommand(command, tmp_path / "out", tmp_path / "log", False, {}, {}).start()
    wait_until(lambda: started.exists() and started.read_text().endswith("\n"), "the start of the server")
    running.end(grace_seconds=30 if orderly else 0.2)
    assert not running.is_alive()
    assert Path(f"{started}.ended").exists() == orderly


def test_what_bears_a_mark_is_ended_with_the_group_that_it_leads(tmp_path: Path) -> None:
    started = tmp_path / "started"
    leader = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(started)],
        env={"ENSEMBLE_WORKER": "a mark"},
        start_new_session=True,
    )
    wait_until(lambda: started.exists() and started.read_text().endswith("\n"), "the start of the server")
    end_marked("a mark")
    assert leader.wait() == -9
