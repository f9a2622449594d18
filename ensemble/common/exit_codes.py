"""Number the program's exit codes; docs/running.md says what users do at each of them."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Say how a command ended; 128 and a signal's number stand for that signal, as shells have it."""

    COMPLETE = 0
    FAILED = 1  # a member or the merge failed, or a file could not be written
    REFUSED = 2  # the config, the data or the machine does not fit; nothing was written
    IN_USE = 3  # another run uses the output directory
    TIME_LIMIT = 4  # not all was done in time; of run: ensemble.csv and the submission are complete
