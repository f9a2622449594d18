"""The terminal goes away, or takes nothing: a run goes on, or ends as interrupted; it never fails for that."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.chunky import chunky_config, ids_of, results
from tests.faults.inject import Fault, Injected
from tests.project import LABELS, ROOT, Project, python_path
from tests.sampling import one_in
from tests.waiting import PATIENCE_SECONDS, wait_until

pytestmark = pytest.mark.usefixtures("warm")

# What a terminal starts, with the actions for signals that such a process has, whatever this one was started with.
_STARTED = """
import fcntl, os, signal, sys, termios
hangup, *command = sys.argv[1:]
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.SIG_IGN if hangup == "ignored" else signal.SIG_DFL)
if os.isatty(0) and os.getsid(0) == os.getpid():
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(command[0], command)
"""
# SIGCHLD and SIGABRT as well: how a worker ended could not be told then, and none made to write its stacks.
_IGNORING = """
import os, signal, sys
for name in ("SIGINT", "SIGHUP", "SIGTERM", "SIGCHLD", "SIGABRT"):
    signal.signal(signal.Signals[name], signal.SIG_IGN)
os.execvp(sys.argv[1], sys.argv[1:])
"""
# What a shell does in a pane of tmux, but that it lives on to tell the exit code: it hands the SIGHUP on, and when
# it has gone the kernel sends another one.
_RECORDER = """
import pathlib, signal, subprocess, sys, time
def hand_on(number, frame):
    process.send_signal(number)
    time.sleep(0.1)
    process.send_signal(number)
code, *command = sys.argv[1:]
process = subprocess.Popen(command)
signal.signal(signal.SIGHUP, hand_on)
pathlib.Path(code).write_text(str(process.wait()))
"""
# Where the output goes, as a shell has it.  A reader that has gone: the pipe is full or broken at the first word.
_STREAMS = {
    "a full disk": ">/dev/full 2>/dev/full",
    "closed": ">&- 2>&-",
    "all closed": "<&- >&- 2>&-",
    "nobody reads": "2>&1 | true",
}
_ASCII = {"PYTHONIOENCODING": "ascii"}
_ASCII_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
_RUN = [sys.executable, "-m", "ensemble", "run", "config.yaml"]


def started(hangup: str, command: list[str]) -> list[str]:
    """A command by which another one is started with SIGHUP "ignored" or "heeded"."""
    return [sys.executable, "-c", _STARTED, hangup, *command]


def environment(injected: Injected | None = None) -> dict[str, str]:
    notebook = ("JPY_PARENT_PID", "KAGGLE_KERNEL_RUN_TYPE", "COLAB_RELEASE_TAG")
    return {
        **{name: value for name, value in os.environ.items() if name not in notebook},
        "PYTHONPATH": python_path(ROOT),
        "OMP_NUM_THREADS": "1",
        "TERM": "xterm",
        **({} if injected is None else injected.environment),
    }


class Terminal:
    """A pseudo-terminal with a process that leads its session, as a shell or a command over SSH does."""

    def __init__(self, command: list[str], folder: Path, variables: dict[str, str]) -> None:
        self._master, slave = os.openpty()
        os.set_blocking(self._master, False)
        self.printed = b""
        try:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=variables,
                stdin=slave,
                stdout=slave,
                stderr=slave,
                start_new_session=True,
            )
        finally:
            os.close(slave)

    def read(self) -> bytes:
        """Take what was printed, or the process would have to wait; all of it so far."""
        with contextlib.suppress(BlockingIOError):
            self.printed += os.read(self._master, 1 << 16)
        return self.printed

    def close(self) -> None:
        """The window is closed, the connection lost."""
        os.close(self._master)


def run_log(project: Project) -> str:
    return (project.folder / "runs/first/logs/run.log").read_text(encoding="utf-8")


def check_interrupted(project: Project, code: int) -> None:
    assert code == 128 + signal.SIGHUP
    report = project.run_json()
    assert report["status"] == "interrupted"
    assert [member["failure"] for member in report["members"]] == [None]
    assert [member["faults"] for member in report["members"]] == [[]]
    assert "interrupted: stopped by SIGHUP" in run_log(project)


def check_complete(project: Project, code: int, undisturbed: dict[str, bytes]) -> None:
    assert code == 0
    assert project.run_json()["status"] == "complete"
    assert results(project) == undisturbed
    assert "SIGHUP is ignored" in run_log(project)


@pytest.mark.fault(32, 33)
@pytest.mark.parametrize("hangup", one_in(2, ["heeded", "ignored"]))
def test_the_terminal_is_closed_while_bars_are_drawn(
    chunky: Project, tmp_path: Path, undisturbed: dict[str, bytes], hangup: str
) -> None:
    injected = Injected(tmp_path, Fault("wait", ids_of(chunky, 9), times=1))
    terminal = Terminal(started(hangup, _RUN), chunky.folder, environment(injected))
    wait_until(lambda: terminal.read() and injected.pids(), "the third chunk")
    assert b"\x1b[" in terminal.printed, "bars"
    terminal.close()
    if hangup == "ignored":
        injected.let_go()
    code = terminal.process.wait(100)
    if hangup == "heeded":
        check_interrupted(chunky, code)
    else:
        check_complete(chunky, code, undisturbed)


@contextlib.contextmanager
def tmux(command: list[str], folder: Path, variables: dict[str, str]) -> Iterator[list[str]]:
    """A tmux server with one session in which a command runs; gives the words that talk to the server."""
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed (apt-get install tmux)")
    with tempfile.TemporaryDirectory() as place:
        server = ["tmux", "-S", f"{place}/socket", "-f", os.devnull]
        new = [*server, "new-session", "-d", "-s", "here", "-x", "100", "-y", "30", shlex.join(command)]
        subprocess.run(new, cwd=folder, env=variables, check=True, timeout=PATIENCE_SECONDS)
        try:
            yield server
        finally:
            subprocess.run([*server, "kill-server"], capture_output=True, timeout=PATIENCE_SECONDS)


@pytest.mark.fault(32, 33)
@pytest.mark.parametrize(
    ("hangup", "end"), one_in(2, [("heeded", "kill-session"), ("ignored", "kill-server")])
)
def test_the_tmux_session_is_killed(
    chunky: Project, tmp_path: Path, undisturbed: dict[str, bytes], hangup: str, end: str
) -> None:
    injected = Injected(tmp_path, Fault("wait", ids_of(chunky, 9), times=1))
    told = tmp_path / "code"
    command = [sys.executable, "-c", _RECORDER, str(told), *started(hangup, _RUN)]
    with tmux(command, chunky.folder, environment(injected)) as server:
        wait_until(injected.pids, "the third chunk")
        subprocess.run([*server, end], check=True, timeout=PATIENCE_SECONDS)
        if hangup == "ignored":
            injected.let_go()
        wait_until(lambda: told.exists() and told.read_text(), "the exit code")
    if hangup == "heeded":
        check_interrupted(chunky, int(told.read_text()))
    else:
        check_complete(chunky, int(told.read_text()), undisturbed)


@pytest.mark.long
@pytest.mark.fresh
@pytest.mark.fault(33)
def test_ignored_signals_stay_ignored_and_sigterm_ends_the_run(chunky: Project, tmp_path: Path) -> None:
    """As in the background of a script, where SIGINT is ignored, and under nohup."""
    injected = Injected(tmp_path, Fault("sleep", ids_of(chunky, 9), times=1))
    process = subprocess.Popen(
        [sys.executable, "-c", _IGNORING, *_RUN], cwd=chunky.folder, env=environment(injected)
    )
    try:
        wait_until(lambda: injected.pids() or process.poll() is not None, "the third chunk")
        for pid in (
            process.pid,
            *injected.pids(),
        ):  # as "kill -HUP -1" does; workers end when their parent says so
            os.kill(pid, signal.SIGINT)
            os.kill(pid, signal.SIGHUP)
        time.sleep(1)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    report = chunky.run_json()
    assert report["status"] == "interrupted"
    assert [member["faults"] for member in report["members"]] == [[]]
    assert "SIGINT is ignored" in run_log(chunky)
    assert "SIGHUP is ignored" in run_log(chunky)
    assert "interrupted: stopped by SIGTERM" in run_log(chunky)


def in_shell(project: Project, command: list[str], streams: str, **variables: str) -> tuple[int, str]:
    """Exit code and output of a command whose streams a shell has redirected."""
    told = project.folder / "code"
    script = f"{{ {shlex.join(command)}; echo $? >code 3>&-; }} {streams}"
    if "|" not in streams:
        script = f"{shlex.join(command)} {streams}; echo $? >code"
    done = subprocess.run(
        ["sh", "-c", script],
        cwd=project.folder,
        env={**environment(), **variables},
        capture_output=True,
        timeout=PATIENCE_SECONDS,
    )
    return int(told.read_text()), (done.stdout + done.stderr).decode("utf-8", "replace")


@pytest.mark.fault(32)
@pytest.mark.parametrize("streams", one_in(2, _STREAMS))
def test_a_run_whose_output_goes_nowhere(
    chunky: Project, undisturbed: dict[str, bytes], streams: str
) -> None:
    code, printed = in_shell(chunky, _RUN, _STREAMS[streams])
    assert (code, printed) == (0, "")
    assert chunky.run_json()["status"] == "complete"
    assert results(chunky) == undisturbed
    folder = chunky.folder / "runs/first"
    assert "rows" not in run_log(chunky).splitlines()[0], "what was to be printed went into no other file"
    assert (folder / "ensemble.csv").stat().st_size == len(undisturbed["ensemble.csv"])


# With exit codes.
_COMMANDS = {
    "status läufe/…/erster": 0,
    "run config.yaml": 0,
    "plan config.yaml": 0,
    "validate config.yaml": 0,
    "validate broken.yaml": 2,
    "--help": 0,
    "nonsense": 2,
    "doctor": 0,
}


@pytest.mark.long
@pytest.mark.fault(32)
@pytest.mark.parametrize("arguments", one_in(8, _COMMANDS))
def test_every_command_prints_into_whatever_there_is(arguments: str, chunky: Project) -> None:
    """Tables, lines and sentences, with names in them that no ASCII has."""
    config = chunky_config(chunky, output_dir="läufe/…/erster", labels=LABELS)
    chunky.write_config(config)
    chunky.write_config(
        {**config, "output_dir": "runs/second", "labels": ["größer", "kleiner"]}, "broken.yaml"
    )
    ensemble = [sys.executable, "-m", "ensemble"]
    if arguments.startswith("status"):
        assert in_shell(chunky, [*ensemble, "run", "config.yaml", "-q"], "") == (0, "")
    command, wanted = [*ensemble, *arguments.split()], _COMMANDS[arguments]
    # Where the whole locale is ASCII, Python finds no file with such a name.
    able = command[-1] in ("broken.yaml", "--help", "nonsense", "doctor")
    for variables in (_ASCII, _ASCII_LOCALE) if able else (_ASCII,):
        code, printed = in_shell(chunky, command, "", **variables)
        assert code == wanted, printed
        assert printed.strip()
        assert "Traceback" not in printed, printed
    for streams in _STREAMS.values() if "doctor" not in command else [_STREAMS["a full disk"]]:
        assert in_shell(chunky, command, streams) == (wanted, ""), streams
