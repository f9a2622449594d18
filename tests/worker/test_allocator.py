"""What torch's allocator says of its settings, against what the config asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.worker.test_predict import worker_spec

MIB = 1 << 20


@pytest.mark.parametrize(
    ("asked", "settings", "noted"),
    [
        ({}, {"expandable_segments": True, "max_split_size": -1}, []),
        ({}, {"expandable_segments": False, "max_split_size": -1}, ["expandable_segments: true"]),
        ({"expandable_segments": False}, {"expandable_segments": True}, ["expandable_segments: false"]),
        ({"max_split_size_mb": 128}, {"expandable_segments": True, "max_split_size": 128 * MIB}, []),
        (
            {"max_split_size_mb": 128},
            {"expandable_segments": True, "max_split_size": -1},
            ["max_split_size_mb: 128"],
        ),
        (
            {"max_split_size_mb": 128},
            {"expandable_segments": False, "max_split_size": 64 * MIB},
            ["expandable_segments: true", "max_split_size_mb: 128"],
        ),
        ({"max_split_size_mb": 128}, {}, []),  # a release that does not tell
    ],
)
def test_settings_that_did_not_take_effect_are_noted(
    asked: dict[str, Any], settings: dict[str, Any], noted: list[str]
) -> None:
    from ensemble.members.huggingface.loading.load import allocator_notes

    told = {"PYTORCH_CUDA_ALLOC_CONF": "what:ever"}
    notes = allocator_notes(worker_spec(Path("nowhere"), **asked), {**told, **settings})
    assert [note.partition(" did not take effect: ")[0] for note in notes] == noted
    assert all("'what:ever'" in note for note in notes)
