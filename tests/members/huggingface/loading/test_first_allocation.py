"""A GPU on which expandable segments break the first allocation is used without them."""

from __future__ import annotations

import pytest
import torch

from ensemble.members.registry import member_kind
from tests.planning.test_plan import config

WSL = "CUDA driver error: unknown error"


def test_they_are_switched_off_where_they_break_the_first_allocation() -> None:
    from ensemble.members.huggingface.loading.first_allocation import try_allocation

    notes: list[str] = []
    did: list[str] = []

    def allocate() -> None:
        did.append("allocate")
        if "switch off" not in did:
            raise RuntimeError(WSL)

    try_allocation(notes, allocate, lambda: did.append("switch off"))
    assert did == ["allocate", "switch off", "allocate"]
    (note,) = notes
    assert note.startswith("expandable_segments: off, since memory cannot be allocated with it here")
    try_allocation(notes, lambda: None, lambda: pytest.fail("nothing was wrong"))
    assert len(notes) == 1


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError(f"{WSL}: no memory"), RuntimeError("no kernel image")]
)
def test_other_errors_are_what_they_are(error: Exception) -> None:
    from ensemble.members.huggingface.loading.first_allocation import try_allocation

    def allocate() -> None:
        raise error

    with pytest.raises(type(error)):
        try_allocation([], allocate, lambda: pytest.fail("this is something else"))


def test_on_wsl_they_are_off_unless_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, asked = config({}, {"expandable_segments": True}).models
    variable = "PYTORCH_CUDA_ALLOC_CONF"
    for wsl, expected in ((False, "True"), (True, "False")):
        monkeypatch.setattr("ensemble.members.huggingface.parent.is_wsl", lambda wsl=wsl: wsl)
        assert member_kind(plain).environment()[variable] == f"expandable_segments:{expected}"
        assert member_kind(asked).environment()[variable] == "expandable_segments:True"


def test_wsl_is_known_by_its_kernel() -> None:
    from ensemble.common.host import is_wsl

    assert is_wsl("5.15.153.1-microsoft-standard-WSL2\n")
    assert not is_wsl("6.8.0-45-generic\n")
    is_wsl()
