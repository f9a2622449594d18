"""Fixtures that tests of several rooms share."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.leftovers import nothing_is_left, temporary_directory
from tests.nvml import sim
from tests.project import Project, make_models

__all__ = ["nothing_is_left", "temporary_directory"]  # around every test, without being asked for


def pytest_configure(config: pytest.Config) -> None:
    """Whatever this process inherited ignored, what it starts has the default actions.

    A shell that runs the tests in the background, and nohup, ignore signals for them and for all that they start.
    A handler ends with the exec: so a signal still does nothing here, and its default in what a test starts.
    """
    # Hypothesis would fail an example that takes longer than 200 ms, as one does on a busy machine.
    hypothesis.settings.register_profile("patient", deadline=None)
    hypothesis.settings.load_profile("patient")
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        return  # xdist's processes, which this one starts, shall not be ended by a hangup either
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(one) is signal.SIG_IGN:
            signal.signal(one, lambda number, frame: None)


@pytest.fixture(scope="session", autouse=True)
def nobody_says_how_wide_the_reader_is() -> Iterator[None]:
    """pytest imports readline, which puts COLUMNS and LINES into the environment of all that tests start."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("COLUMNS", "LINES"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="session")
def nvml_libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the simulated driver library; skips where there is no gcc to build it."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is needed to build the simulated driver library")
    folder = tmp_path_factory.mktemp("nvml")
    sim.build(folder)
    return folder


@pytest.fixture
def nvml_sim(nvml_libraries: Path, tmp_path: Path) -> sim.NvmlSim:
    """A simulated machine, without GPUs until the test writes some."""
    return sim.NvmlSim(nvml_libraries, tmp_path / "nvml_state")


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tiny checkpoints, made once per test process: ``gemma`` and ``llama``."""
    return make_models(tmp_path_factory.mktemp("tiny models"))


@pytest.fixture
def project(tmp_path: Path, tiny_models: Path) -> Project:
    """A user's folder with a table of 300 rows, on a path with a space and a quote in it."""
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    made = Project(folder, tiny_models)
    made.write_table()
    return made
