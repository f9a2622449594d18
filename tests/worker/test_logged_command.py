"""Commands beneath a worker: a real process between, and what is left of its log."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ensemble.common.files import MAX_LOG_BYTES
from ensemble.worker.logged_command import CommandFailed, LoggedCommand


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
