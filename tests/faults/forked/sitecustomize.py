"""Python runs this at start-up where this folder is on PYTHONPATH.

Where TEST_FORK_SERVER names a server (server.py), a worker lets a process that it forks work in its place: the one
that was started keeps its number, hands signals on, and ends as the one that works does.  So do the processes that
train, that describe checkpoints and that write reports.  Elsewhere the process gets the faults that a test asks for
(../faulty.py).

Each worker writes its number and environment into the file that TEST_WORKERS names.
"""

import json
import os
import resource
import signal
import socket
import struct
import sys


def _stand_in(address: str, module: str) -> None:
    numbers = [0, 1, 2]
    numbers += [int(word.partition("=")[2]) for word in sys.orig_argv if word.startswith("--events-fd=")]
    asked = {
        "argv": ["-c", *sys.orig_argv[sys.orig_argv.index("-c") + 2 :]],
        # What a journal of faults calls this worker by.
        "environment": {**os.environ, "TEST_STANDS_IN": str(os.getpid())},
        "folder": os.getcwd(),  # noqa: PTH109  pathlib takes a while to import
        "numbers": numbers,
        "module": module,
    }
    if module == _WORKER:
        _hide_mark()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.connect(f"\0{address}-workers")
        socket.send_fds(line, [json.dumps(asked).encode()], numbers)
        line.recv(4)
        for number in (signal.SIGTERM, signal.SIGABRT, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, frame: line.send(struct.pack("=i", number)) and None)
        line.send(struct.pack("=i", 0))
        # Not the events' pipe, whose end says that this process has ended.
        os.close(0)
        message = line.recv(4)
    code = struct.unpack("=i", message)[0] if message else 70
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _hide_mark() -> None:
    """Take the mark by which the worker that works finds what it has started out of what /proc says of this one."""
    import ctypes

    mark = b"ENSEMBLE_WORKER="
    variables = ctypes.POINTER(ctypes.c_void_p).in_dll(ctypes.CDLL(None), "environ")
    place = 0
    while address := variables[place]:
        if ctypes.string_at(address).startswith(mark):
            ctypes.memset(address, ord("-"), len(mark) - 1)
        place += 1


def _module() -> str:
    """Return the module whose work a process of the server can do; empty if this one does other work."""
    if _IS_WORKER:
        return _WORKER
    words = " ".join(sys.orig_argv)
    for module in (_DESCRIBE, _TRAINER):
        if f"from {module} import" in words:
            return module
    return _REPORT if f"from {_REPORT} import" in words and not _has_other_packages() else ""


def _has_other_packages() -> bool:
    """Return whether this process finds packages that the server has not seen, such as a broken Matplotlib."""
    site = os.path.dirname(__file__)  # noqa: PTH120  as above
    root = os.path.dirname(os.path.dirname(os.path.dirname(site)))  # noqa: PTH120
    return not {site, root}.issuperset(os.environ["PYTHONPATH"].split(os.pathsep))


def _replace_fields(fields: str) -> None:
    """Give a trainer fields of its spec, in JSON, beside those that it is started with."""
    for words in (sys.argv, sys.orig_argv):
        given = words.pop() if words[-1].startswith("{") else "{}"
        words.append(json.dumps({**json.loads(given), **json.loads(fields)}))


_WORKER = "ensemble.worker.__main__"
_DESCRIBE = "ensemble.members.huggingface.loading.describe"
_TRAINER = "ensemble.members.huggingface.training.trainer"
_REPORT = "ensemble.analysis.report.__main__"
_IS_WORKER = any(word.startswith("--events-fd=") for word in sys.orig_argv)
if os.environ.get("TEST_WORKERS") and _IS_WORKER:
    with open(os.environ["TEST_WORKERS"], "a", encoding="utf-8") as file:  # noqa: PTH123  as above
        file.write(json.dumps({"pid": os.getpid(), "environment": dict(os.environ)}) + "\n")
if os.environ.get("TEST_TRAINER_FIELDS") and any(f"from {_TRAINER} import" in word for word in sys.orig_argv):
    _replace_fields(os.environ["TEST_TRAINER_FIELDS"])
_served = _module() if os.environ.get("TEST_FORK_SERVER") else ""
if _served:
    _stand_in(os.environ["TEST_FORK_SERVER"], _served)
elif "TEST_FAULTS" in os.environ:
    import tests.faults.faulty  # noqa: F401
