"""Start ``ensemble``: set up signals, streams and the import path, and then run the command line."""

from __future__ import annotations

import gc
import os
import signal
import sys

# The process that started this one may ignore these signals, and child processes would inherit that: then nobody
# could tell how a worker ended, make a hung one write its stacks, or end a test process by its alarm.
_MUST_WORK = (signal.SIGCHLD, signal.SIGABRT, signal.SIGALRM)
_HEEDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> None:
    """Run the command line."""
    # "python -m" puts the working directory first: a `numpy.py` there would be taken for the library.
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120  pathlib is slow
    try:
        here = os.getcwd()  # noqa: PTH109
    except FileNotFoundError:
        sys.stderr.write("error: the working directory is gone; change to one that is there\n")
        sys.exit(2)
    if sys.path and sys.path[0] in ("", here) and root != here:
        del sys.path[0]
    # If descriptors 0 to 2 were closed (``>&-``), no other file may get these numbers: libraries write to them.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123
    from ensemble.common.redact import Redactor, guard_output

    guard_output(Redactor(os.environ))
    for number in _MUST_WORK:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [*_MUST_WORK, *_HEEDED])
    # Imports make a few hundred thousand objects that all stay; searching them for garbage again and again takes a
    # sixth of the start-up time.
    gc.set_threshold(100_000)
    # Arrow's own allocators keep half as much again as a table takes.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    # pydantic would search every installed distribution for plugins.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        # typer before 0.16 runs another command than was asked for.
        from ensemble.common.packages import COMMAND_LINE, OLDEST_PYTHON, unsupported

        problems = [*unsupported(COMMAND_LINE)]
        if sys.version_info < OLDEST_PYTHON:
            oldest = "{}.{}".format(*OLDEST_PYTHON)
            problems = [f"Python {sys.version.split()[0]} is too old; use Python {oldest} or newer"]
        if problems:
            sys.stderr.write("".join(f"error: {text}\n" for text in problems))
            sys.exit(2)
        from ensemble.cli.app import main as command_line

        command_line()
    except ImportError as error:
        sys.stderr.write(
            f"error: a package that this needs is missing or broken ({error}); install it with "
            f"{sys.executable} -m pip install '{root}'\n"
        )
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
