"""Run a command beneath a worker: write what it prints to a log, and end all that it started with the worker.

A process stands between the worker and the command, in a session of its own.  It keeps secrets out of the log,
and outlives the worker by the moment that it takes to kill everything that the command has started.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ensemble.common.files import (
    file_state,
    files_below,
    free_bytes,
    keep_log_end,
    open_log,
    read_json,
    remove_folder,
)
from ensemble.common.host import oom_kills
from ensemble.common.protocol import Counters
from ensemble.common.python_process import (
    WORKER_MARK,
    die_with_parent,
    end_marked,
    path_of_commands,
    python_command,
)
from ensemble.common.redact import Redactor
from ensemble.common.text import gib, nearest, shown_path

_POLL_SECONDS = 0.1
_READ_BYTES = 1 << 16
# An unfinished line is written when nothing has come for so long: a secret might be cut in two otherwise.
_QUIET_SECONDS = 1.0
# Less free space than this is a full disk.
_FULL_BYTES = 1 << 20
# The last lines of a log, and their characters, that a message has.
_LAST_LINES, _LAST_CHARACTERS = 3, 240
_RANK = re.compile(r"^\[rank\d+\]:\s?", re.MULTILINE)
# The line behind a traceback's indented ones; tracebacks of several ranks may be mixed, line by line.
_EXCEPTION = re.compile(r"^[ \t].*\n+([A-Za-z_][\w.]*(?::.*)?)$", re.MULTILINE)
# With these torchrun and accelerate launch say that a script has failed, behind the script's own traceback.
_OF_LAUNCHERS = re.compile(
    r"^(?:torch\.distributed\.elastic\.\S*\.)?(?:ChildFailedError|\S*CalledProcessError)\b"
)


class CommandFailed(Exception):
    """Say how a command has failed; ``was_killed``: by a signal, without a word."""

    def __init__(self, text: str, was_killed: bool) -> None:
        super().__init__(text)
        self.was_killed = was_killed


class OutOfMemory(CommandFailed):
    """Say that a command ran out of memory, or that the kernel killed something because the host did."""


@dataclass(frozen=True)
class LoggedCommand:
    """Run a command from a worker.

    Attributes:
        command: a program and its arguments.
        out: the folder that it writes to.  In ``progress.json`` it may tell its ``step``, ``tokens`` and
            ``padded_tokens``; and in ``problem.json`` the ``text`` for the user when it fails, and whether it
            ``is_out_of_memory``.
        log: the file for what it prints.
        resumes: whether it goes on with the folders that an earlier try has left in ``out``; all else there is
            removed.
        environment: variables by name, None: not set.
        settings: what is secret among them must not be in the log, see ``Redactor``.
    """

    command: Sequence[str]
    out: Path
    log: Path
    resumes: bool
    environment: Mapping[str, str | None]
    settings: object

    def run(self, report: Callable[..., object], is_stopped: Callable[[], bool] = lambda: False) -> bool:
        """Run it until it has ended well, and report its signs of life; what it has started is killed then.

        Args:
            report: gets rows, of which none are known, tokens and padded tokens (``members.predictor.Report``).
            is_stopped: once it returns True, the command is killed, and False is returned.

        Raises:
            CommandFailed: it has ended with an exit code other than 0, or was killed.
            OutOfMemory: the same, for lack of memory.
        """
        running = self.start()
        seen = None
        try:
            while running.is_alive():
                if is_stopped():
                    return False
                signs = running.signs_of_life()
                if signs != seen:
                    seen = signs
                    done = self.progress()
                    report(0, done.tokens, done.padded_tokens)
                time.sleep(_POLL_SECONDS)
        finally:
            running.end()
        running.demand_success()
        return True

    def start(self) -> RunningCommand:
        """Start it, in a folder ``out`` that holds nothing but what it resumes from."""
        if not self.resumes:
            remove_folder(self.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        for path in self.out.iterdir():  # of an earlier one, which may have been killed while it wrote
            if not path.is_dir():
                path.unlink()
        return RunningCommand(self)

    def progress(self) -> Counters:
        """Return the work that the command has told of in ``progress.json``."""
        told = read_json(self.out / "progress.json")
        counts = {key: value for key, value in told.items() if isinstance(value, int)}
        return Counters(
            tokens=counts.get("tokens", 0),
            padded_tokens=counts.get("padded_tokens", 0),
            batches=counts.get("step", 0),
        )


class RunningCommand:
    """Start a command, and watch it until it has ended."""

    def __init__(self, command: LoggedCommand) -> None:
        self._command = command
        self._log_start, self._kills_before = self._log_size(), oom_kills()
        asked = {
            "command": command.command,
            "worker": os.getpid(),
            "log": str(command.log),
            "environment": command.environment,
            "settings": command.settings,
        }
        self._process = subprocess.Popen(
            python_command(__name__), stdin=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdin is not None
        with self._process.stdin, contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(asked).encode())  # no argument, which anybody could read

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def end(self, grace_seconds: float = 0.0) -> None:
        """Kill the command, and all that it has started and left running.

        With ``grace_seconds`` the command gets a SIGTERM before, and all have that time to clean up and end.
        """
        give_up = time.monotonic() + grace_seconds
        if grace_seconds:
            self._process.send_signal(signal.SIGUSR1)
        with contextlib.suppress(OSError):  # nothing is left of the command's group, where some have no mark
            while time.monotonic() < give_up:
                self._process.poll()
                os.killpg(self._process.pid, 0)
                time.sleep(_POLL_SECONDS)
            os.killpg(self._process.pid, signal.SIGKILL)
        mark = os.environ.get(WORKER_MARK)
        if mark is not None:
            end_marked(mark, spared=[os.getpid()])
        self._process.wait()

    def demand_success(self) -> None:
        """Raise ``CommandFailed`` or ``OutOfMemory`` unless the command has ended well."""
        if self._process.wait():
            raise self.failure()

    def signs_of_life(self) -> object:
        """Return what changes when the command prints something, or writes into its folder."""
        out = self._command.out
        return self._log_size(), {name: file_state(out / name) for name in files_below(out)}

    def _log_size(self) -> int:
        state = file_state(self._command.log)
        return 0 if state is None else state[0]

    def failure(self) -> CommandFailed:
        """Return how the command has ended, which it should not have."""
        code, has_host_killed = self._process.wait(), oom_kills() > self._kills_before
        out = self._command.out
        problem = read_json(out / "problem.json")
        if isinstance(problem.get("text"), str):
            kind = OutOfMemory if problem.get("is_out_of_memory") else CommandFailed
            return kind(problem["text"], was_killed=False)
        how = f"its command ended with exit code {code}"
        if code < 0:
            names = {number.value: number.name for number in signal.Signals}
            how = f"its command was killed by signal {-code} ({names.get(-code, 'unknown')})"
        if has_host_killed:
            how += ", probably by the kernel because the host ran out of memory (RAM, not the GPU's)"
        last = self.last_words()
        text = f"{how}, with the last words: {last}" if last else how
        free = free_bytes(out)
        if free is not None and free < _FULL_BYTES:
            text += f"; the disk is full: {gib(free)} are free for {shown_path(out)}"
            if not self._command.resumes:  # it would keep the same command from its start
                remove_folder(out)
                text += ", and what it had written there is removed"
        kind = OutOfMemory if has_host_killed else CommandFailed
        return kind(text, was_killed=code < 0)

    def last_words(self) -> str:
        """Return the last words that the command has printed."""
        with contextlib.suppress(OSError), self._command.log.open("rb") as file:
            size = self._log_size()
            # The log may have been cut.
            file.seek(max(self._log_start if self._log_start <= size else 0, size - _READ_BYTES))
            return last_words(file.read().decode("utf-8", "replace"))
        return ""


def command_problems(command: Sequence[str], placeholders: Collection[str]) -> Iterator[str]:
    """Yield what is wrong with a user's command, as far as it shows without running it."""
    program = command[0]
    if shutil.which(program, path=path_of_commands()) is None:
        problem = "is no file that may be executed" if "/" in program else "is not on the PATH"
        yield f"the program {program} {problem}; name an installed program, or its path"
    for name in re.findall(r"\{(\w+)\}", " ".join(command)):
        near = nearest(name, placeholders)
        if name not in placeholders and near is not None:
            yield f"{{{name}}} stands for nothing; did you mean {{{near}}}?"


def with_values(command: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Return a user's command with the values of its placeholders, such as ``{out}``; other braces stay."""
    pattern = re.compile(rf"\{{({'|'.join(values)})\}}")
    return [pattern.sub(lambda match: values[match[1]], word) for word in command]


def last_words(log: str) -> str:
    """Return a log's last lines; where a launcher tells of a script's failure, the exceptions of that script."""
    text = _RANK.sub("", log.replace("\r\n", "\n").replace("\r", "\n"))
    exceptions = [match[1].strip() for match in _EXCEPTION.finditer(text)]
    of_script = [line for line in exceptions if not _OF_LAUNCHERS.match(line)]
    if of_script and len(of_script) < len(exceptions):
        return " | ".join([*dict.fromkeys(of_script)][-_LAST_LINES:])[:_LAST_CHARACTERS]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-_LAST_LINES:])[-_LAST_CHARACTERS:]


def main() -> None:
    """Run ``command`` of the JSON object on standard input, and end as the command has ended.

    The object also has ``log``, ``environment`` and ``settings`` of ``LoggedCommand``, and ``worker``, the worker's
    process id.
    """
    asked = json.loads(sys.stdin.buffer.read())
    signal.signal(signal.SIGTERM, lambda number, frame: _end_all())
    die_with_parent(asked["worker"], signal.SIGTERM)
    environment = {**os.environ, **asked["environment"]}
    environment = {name: value for name, value in environment.items() if value is not None}
    redact = Redactor(os.environ, asked["settings"])
    orderly_end = contextlib.ExitStack()  # there is nothing to end yet
    signal.signal(signal.SIGUSR1, lambda number, frame: orderly_end.close())
    with open_log(Path(asked["log"])) as log:
        try:
            process = subprocess.Popen(
                asked["command"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                # This process has one thread, so that code may run between fork and exec.
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        except OSError as error:
            _write(log.fileno(), f"{asked['command'][0]}: {error.strerror}\n".encode())
            os._exit(127)  # as shells have it
        orderly_end.callback(process.terminate)
        _copy(process, log.fileno(), redact)
    code = process.wait()
    if code < 0:  # end by the same signal
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _copy(process: subprocess.Popen[bytes], log: int, redact: Redactor) -> None:
    """Copy what a process prints to its log, until it has ended, even if others still hold its output."""
    assert process.stdout is not None
    output, rest = process.stdout.fileno(), b""
    while True:
        has_ended = process.poll() is not None
        is_readable = bool(select.select([output], [], [], 0.0 if has_ended else _QUIET_SECONDS)[0])
        data = os.read(output, _READ_BYTES) if is_readable else b""
        rest += data
        # Progress bars end their lines by a carriage return.
        end = 1 + max(rest.rfind(b"\n"), rest.rfind(b"\r")) if data else len(rest)
        if end == 0 and len(rest) > _READ_BYTES:
            end = len(rest)
        _write(log, redact(rest[:end].decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape"))
        rest = rest[end:]
        if not data and (is_readable or has_ended):
            return


def _write(log: int, data: bytes) -> None:
    with contextlib.suppress(OSError):  # a full disk: the command decides whether it can go on
        while data:
            data = data[os.write(log, data) :]
    keep_log_end(log)


def _end_all() -> None:
    """Kill all processes of the worker, which is gone, and this one."""
    mark = os.environ.get(WORKER_MARK)
    if mark is not None:
        end_marked(mark, spared=[os.getpid()])
    os.killpg(0, signal.SIGKILL)
