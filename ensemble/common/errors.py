"""Define the errors that this package raises on purpose, each with its exit code.

Messages name the key, file, row or GPU, and say what to do. An error can have several problems, so that one run of
``validate`` shows everything to fix.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Final


class ExitCode(IntEnum):
    """Say how a command ended; 128 and a signal's number stand for that signal, as shells have it."""

    COMPLETE = 0
    FAILED = 1  # a member or the merge failed, or a file could not be written
    REFUSED = 2  # the config, the data or the machine does not fit; nothing was written
    IN_USE = 3  # another run uses the output directory
    TIME_LIMIT = 4  # not all was done in time; of run: ensemble.csv and the submission are complete


# The end of sentences about a run that stopped before it was done.
RESUMES: Final = "the same command resumes where it stopped"


class EnsembleError(Exception):
    """Report problems, a sentence each with place and remedy; the base of all errors but ``Interrupted``."""

    exit_code: int = ExitCode.FAILED

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class ConfigError(EnsembleError):
    exit_code = ExitCode.REFUSED  # the YAML, an override or an environment variable is wrong
    rest: Any = None  # the config without its wrong keys, if enough is right


class DataError(EnsembleError):
    exit_code = ExitCode.REFUSED  # the input table or the sample submission is wrong


class CheckpointError(EnsembleError):
    exit_code = ExitCode.REFUSED  # a model folder lacks something, as is seen before loading


class DeviceError(EnsembleError):
    exit_code = ExitCode.REFUSED  # a member needs GPUs that do not exist


class OutputError(EnsembleError):
    exit_code = ExitCode.REFUSED  # the output directory cannot be written


class OutputInUse(EnsembleError):
    exit_code = ExitCode.IN_USE  # another run uses the output directory


class WriteError(EnsembleError):
    exit_code = ExitCode.FAILED  # a file could not be written during a run, such as on a full disk


class MembersFailed(EnsembleError):
    exit_code = ExitCode.FAILED  # one or more members failed while running


class MemberError(EnsembleError):
    exit_code = ExitCode.FAILED  # a member gives no usable values, whatever its rows


class MergeError(EnsembleError):
    exit_code = ExitCode.FAILED  # the members' CSVs do not fit together


class TimeLimitReached(EnsembleError):
    exit_code = ExitCode.TIME_LIMIT  # what run has written is complete, without all rows computed


class Interrupted(BaseException):
    """Report that a signal stopped the run; not an Exception, so that no error handling swallows it.

    ``kept`` says what became of the work, in words for the user.
    """

    def __init__(self, signal_number: int, kept: str = f"what is done is kept, and {RESUMES}") -> None:
        name = {2: "Ctrl-C", 15: "SIGTERM", 1: "SIGHUP"}.get(signal_number, f"signal {signal_number}")
        super().__init__(f"stopped by {name}; {kept}")
        self.exit_code = 128 + signal_number
