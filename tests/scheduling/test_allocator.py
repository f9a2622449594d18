"""The allocator's options in a worker's environment: the config's, the user's, and torch's reading of them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ensemble.members.huggingface.parent import allocator_environment
from ensemble.members.registry import member_kind
from tests.planning.test_plan import config

OLD, NEW = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"


@pytest.mark.parametrize(
    ("expandable", "split", "users", "expected"),
    [
        (True, None, {}, "expandable_segments:True"),
        (False, 128, {}, "expandable_segments:False,max_split_size_mb:128"),
        (
            True,
            128,
            {OLD: "max_split_size_mb:64"},
            "expandable_segments:True,max_split_size_mb:128,max_split_size_mb:64",
        ),
        (
            True,
            None,
            {OLD: "expandable_segments:False", NEW: ""},
            "expandable_segments:True,expandable_segments:False",
        ),
        (
            True,
            None,
            {OLD: "garbage_collection_threshold:0.8", NEW: "garbage_collection_threshold:0.6"},
            "expandable_segments:True,garbage_collection_threshold:0.8,garbage_collection_threshold:0.6",
        ),
        (
            True,
            64,
            {NEW: "roundup_power2_divisions:[256:1,>:4],max_split_size_mb:32"},
            "expandable_segments:True,max_split_size_mb:64,roundup_power2_divisions:[256:1,>:4],max_split_size_mb:32",
        ),
        (True, 64, {OLD: "backend:cudaMallocAsync"}, "backend:cudaMallocAsync"),
    ],
)
def test_options_of_the_users_environment_go_before_the_configs(
    expandable: bool, split: int | None, users: dict[str, str], expected: str
) -> None:
    assert allocator_environment(expandable, split, users) == {OLD: expected, NEW: expected}


@pytest.mark.long
def test_torch_reads_them_without_complaint() -> None:
    users = {NEW: "roundup_power2_divisions:[256:1,>:4]"}
    environment = allocator_environment(True, 128, users)
    code = "import torch\nprint(getattr(torch._C, '_accelerator_getAllocatorSettings', lambda: None)())"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    if done.stdout.strip() == "None":
        pytest.skip("this torch does not tell without a GPU")
    assert done.stdout.strip() == environment[NEW]
    assert done.stderr == ""


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
