"""Becomes a command under a seccomp filter, which every process that it starts inherits.

    python enter.py SOCKET COMMAND...

Calls that change files wait for the process at the socket's other end, which gets the filter's descriptor
(seccomp_unotify(2)).

Written for the kernel's interface as seccomp(2), seccomp_unotify(2) and linux/filter.h describe it, on x86-64.
"""

import ctypes
import os
import socket
import struct
import sys

# Numbers of system calls, from arch/x86/entry/syscalls/syscall_64.tbl.
OPENS = {"open": 2, "openat": 257}  # what they do depends on their flags
SYNCS = {"fsync": 74, "fdatasync": 75, "sync_file_range": 277}
CHANGES = {
    **{"write": 1, "pwrite64": 18, "writev": 20, "pwritev": 296, "pwritev2": 328},
    **{"sendfile": 40, "copy_file_range": 326, "splice": 275, "fallocate": 285},
    **{"creat": 85, "openat2": 437, "truncate": 76, "ftruncate": 77},
    **{"rename": 82, "renameat": 264, "renameat2": 316, "unlink": 87, "unlinkat": 263},
    **{"mkdir": 83, "mkdirat": 258, "rmdir": 84, "mknod": 133, "mknodat": 259},
    **{"link": 86, "linkat": 265, "symlink": 88, "symlinkat": 266},
    **{"chmod": 90, "fchmod": 91, "fchmodat": 268, "fchmodat2": 452},
}
_SECCOMP = 317
_AUDIT_ARCH_X86_64 = 0xC000003E
_PR_SET_NO_NEW_PRIVS = 38
_SET_MODE_FILTER = 1
_NEW_LISTENER, _WAIT_KILLABLE = 1 << 3, 1 << 5
_ALLOW, _ASK = 0x7FFF0000, 0x7FC00000
_LOAD, _IF_EQUAL, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
# Places in struct seccomp_data.
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def _asking() -> bytes:
    """Asks about every call that changes files or syncs them; about opening only where it creates or truncates."""
    return _assemble(
        (_LOAD, _ARCH, "", ""),
        (_IF_EQUAL, _AUDIT_ARCH_X86_64, "", "allow"),
        (_LOAD, _NUMBER, "", ""),
        *((_IF_EQUAL, number, "ask", "") for number in (*CHANGES.values(), *SYNCS.values())),
        (_IF_EQUAL, OPENS["open"], "open", ""),
        (_IF_EQUAL, OPENS["openat"], "openat", "allow"),
        "open",
        (_LOAD, _ARGUMENTS + 8, "", ""),
        (_IF_EQUAL, 0, "flags", "flags"),
        "openat",
        (_LOAD, _ARGUMENTS + 16, "", ""),
        "flags",
        (_IF_ANY_BIT, os.O_CREAT | os.O_TRUNC, "ask", "allow"),
        "ask",
        (_RETURN, _ASK, "", ""),
        "allow",
        (_RETURN, _ALLOW, "", ""),
    )


def _assemble(*lines: str | tuple[int, int, str, str]) -> bytes:
    """A filter's bytes; a line is a label, or code, operand and where to go if true and if not ("": on)."""
    places: dict[str, int] = {}
    program: list[tuple[int, int, str, str]] = []
    for line in lines:
        if isinstance(line, str):
            places[line] = len(program)
        else:
            program.append(line)
    return b"".join(
        struct.pack("HBBI", code, *(places[to] - here - 1 if to else 0 for to in (yes, no)), operand)
        for here, (code, operand, yes, no) in enumerate(program)
    )


def _install(filter: bytes, flags: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    program = _Program(len(filter) // 8, filter)
    result = libc.syscall(_SECCOMP, _SET_MODE_FILTER, flags, ctypes.byref(program))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(result)


def _watch(line: int) -> None:
    with socket.socket(fileno=line) as other_end:
        try:
            # Without the second flag a signal that arrives while a call waits makes the kernel ask twice.
            listener = _install(_asking(), _NEW_LISTENER | _WAIT_KILLABLE)
        except OSError as error:
            other_end.send(str(error).encode())
            os._exit(1)
        socket.send_fds(other_end, [b"ok"], [listener])
        os.close(listener)


def main() -> None:
    line, *command = sys.argv[1:]
    _watch(int(line))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
