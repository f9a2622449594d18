"""A small disk is full, and little memory runs out, as the kernel does it."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.machine import memory_group, small_disk

MIB = 1 << 20


def test_a_small_disk_is_full_and_goes_away(tmp_path: Path) -> None:
    place = tmp_path / "a small disk"
    with small_disk(place, "64k") as disk:
        (disk / "fits").write_bytes(bytes(30_000))
        with pytest.raises(OSError, match="No space left") as caught:
            (disk / "does not").write_bytes(bytes(60_000))
        assert caught.value.errno == errno.ENOSPC
    assert list(place.iterdir()) == []


def test_the_kernel_kills_what_uses_too_much_memory() -> None:
    code = "import sys; from tests.faults.faulty import eat; eat(int(sys.argv[1]))"
    with memory_group(64 * MIB) as group:
        endings = [
            subprocess.run(
                group.command([sys.executable, "-c", code, str(size)]), cwd=Path(__file__).parents[2]
            ).returncode
            for size in (16 * MIB, 128 * MIB)
        ]
        assert endings == [0, -signal.SIGKILL]
        assert group.kills() == 1
    assert not group.folder.exists()
