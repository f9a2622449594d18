"""``python -m ensemble`` and the ``ensemble`` command: what must happen before the first import, then the CLI."""

from __future__ import annotations

import gc
import os
import signal
import sys

# Imports make a few hundred thousand objects that all stay: looking through them again and again for garbage is
# a sixth of the start-up time.  This only makes collections rarer.
_OBJECTS_BETWEEN_COLLECTIONS = 100_000
# Who started this may have ignored them, which goes on to all that is started here: then nobody could tell how a
# worker ended, none that hangs could be made to write its stacks, and no test process would end by its alarm.
_MUST_WORK = (signal.SIGCHLD, signal.SIGABRT, signal.SIGALRM)
_HEEDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> None:
    """Run the command line."""
    # "python -m" puts the working directory first: a `numpy.py` there would be taken for the library.
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120  pathlib is slow
    if sys.path and sys.path[0] in ("", os.getcwd()) and root != os.getcwd():  # noqa: PTH109
        del sys.path[0]
    # Nothing else may get the numbers 0 to 2 where they were closed (``>&-``): libraries write to them blindly.
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
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
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
