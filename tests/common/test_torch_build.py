"""For which GPUs an installed torch has code, held against torch's own table and lists of released builds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ensemble.common.torch_build import SIMULATED, built_for, torch_problem
from tests.torch_stand_in import CUDA_126, CUDA_128, CUDA_129, CUDA_130, stand_in

T4, L4, RTX_PRO_6000, P100 = (7, 5), (8, 9), (12, 0), (6, 0)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(SIMULATED, raising=False)
    monkeypatch.delenv("KAGGLE_KERNEL_RUN_TYPE", raising=False)
    built_for.cache_clear()
    yield
    built_for.cache_clear()


@pytest.mark.parametrize("build", [CUDA_126, CUDA_128, CUDA_129, CUDA_130])
def test_the_list_is_read_without_importing_torch(
    build: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(stand_in(tmp_path, build))
    monkeypatch.delitem(sys.modules, "torch")
    assert built_for() == tuple(build.split())
    assert "torch" not in sys.modules


def test_what_this_machines_torch_says_itself() -> None:
    """A build for CPUs has a library without such a list."""
    flags = getattr(torch._C, "_cuda_getArchFlags", str)()
    assert built_for() == tuple(flags.split())


def test_nothing_is_known_of_a_torch_without_its_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(stand_in(tmp_path, CUDA_128))
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setenv(SIMULATED, "1")
    assert built_for() == (), "the GPUs are no real ones"
    monkeypatch.delenv(SIMULATED)
    built_for.cache_clear()
    (tmp_path / "torch" / "lib" / "libtorch_python.so").unlink()
    assert built_for() == ()
    assert torch_problem(P100, ()) == ""
    assert torch_problem(None, CUDA_128.split()) == ""


def test_without_torch_the_working_directory_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, CUDA_128)
    monkeypatch.chdir(tmp_path / "torch")
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "torch")
    assert built_for() == ()


@pytest.mark.parametrize(
    ("build", "usable", "refused"),
    [
        (CUDA_126, [P100, (6, 1), (7, 0), T4, (8, 6), L4, (9, 0)], [(3, 7), (10, 0), RTX_PRO_6000]),
        (CUDA_128, [(7, 0), T4, (8, 6), L4, (9, 0), (10, 3), RTX_PRO_6000, (12, 1)], [P100, (6, 1)]),
        (CUDA_129, [(7, 0), T4, RTX_PRO_6000, (13, 0)], [P100]),  # its last is PTX, for all that come
        (CUDA_130, [T4, L4, RTX_PRO_6000], [P100, (7, 0), (13, 0)]),
    ],
)
def test_gpus_of_released_builds(
    build: str, usable: list[tuple[int, int]], refused: list[tuple[int, int]]
) -> None:
    for capability in usable:
        assert torch_problem(capability, build.split()) == ""
    for capability in refused:
        number = "{}{}".format(*capability)
        assert torch_problem(capability, build.split()) == (
            f"torch has no code for capability {number[:-1]}.{number[-1]}, only for "
            f"{', '.join(build.split())}; choose another GPU (devices), or a build of torch that has sm_{number}"
        )


def test_on_kaggle_the_advice_is_another_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    assert torch_problem(P100, CUDA_128.split()).endswith("; choose T4 x 2 as the notebook's accelerator")


def test_no_gpu_is_refused_for_which_torch_says_it_has_code() -> None:
    """By the table that torch warns by since 2.12; it leaves out a few, such as 8.7 with code for 8.0."""
    table = getattr(torch.cuda, "DEVICE_REQUIREMENT", None)
    if table is None:
        pytest.skip("this release of torch has no such table")
    for code, runs_on in table.items():
        for device in (number for number in range(50, 130) if number in runs_on):
            assert torch_problem((device // 10, device % 10), [f"sm_{code}"]) == "", (code, device)
