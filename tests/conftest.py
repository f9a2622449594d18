"""Fixtures that tests of several rooms share."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import pytest

from ensemble.members import questions
from tests import sampling
from tests.checkpoints import answers_of_this_process
from tests.faults.forked import client
from tests.faults.forked.runs import ForkedRuns, forked_runs
from tests.faults.steps import skip_unless_watchable
from tests.leftovers import GRACE_SECONDS, nothing_is_left, temporary_directory
from tests.nvml import sim
from tests.project import Project, make_models

pytest_plugins = ("tests.costs",)
__all__ = ["nothing_is_left", "temporary_directory"]  # around every test, without being asked for


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part",
        choices=get_args(sampling.Part),
        default=sampling.part,
        help="usual: with a sample of what is long, and with forked workers; rest: a share of what that leaves "
        f"out, which {sampling.SHARE} or the commit chooses; or all",
    )


@contextmanager
def bytecode_is_kept() -> Iterator[None]:
    """What pytest makes of assertions is kept, also where Python is to keep no bytecode.

    It is a third of the time before the first test.  For the files that tests make, what the environment says goes.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "dont_write_bytecode", False)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    with bytecode_is_kept():
        return (yield)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if sampling.part == "all":
        return
    wanted = _usual(items) if sampling.part == "usual" else _rest(items, sampling.chosen_share())
    if left_out := [item for item in items if item not in wanted]:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item in wanted]


def _is_long(item: pytest.Item) -> bool:
    """Whether a test is marked so, or runs under watch, for which a fork server of its own starts."""
    return item.get_closest_marker("long") is not None or "forked" in getattr(item, "fixturenames", ())


def _usual(items: list[pytest.Item]) -> set[pytest.Item]:
    return {item for item in items if not _is_long(item)}


def _rest(items: list[pytest.Item], share: int) -> set[pytest.Item]:
    """Return a share of the long and sampled tests, and of each warm module a test for which nothing is forked.

    Another share has another test of the module.
    """
    wanted = {
        item
        for item in items
        if (_is_long(item) or item.get_closest_marker("sampled")) and sampling.share_of(item.nodeid) == share
    }
    warm = defaultdict(list)
    for item in items:
        if "warm" in getattr(item, "fixturenames", ()):
            warm[item.path].append(item)
    for tests in warm.values():
        usual = [item for item in tests if not _is_long(item)]
        if usual and not any(item.get_closest_marker("fresh") for item in usual):
            wanted.add(usual[share % len(usual)])
    return wanted


def pytest_configure(config: pytest.Config) -> None:
    """Whatever this process inherited ignored, what it starts has the default actions.

    A shell that runs the tests in the background, and nohup, ignore signals for them and for all that they start.
    A handler ends with the exec: so a signal still does nothing here, and its default in what a test starts.
    """
    sampling.part = config.getoption("--part")
    # As make has it: several test processes share the cores, and no run begins a worker before its checks.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # What transformers says of tiny checkpoints, for all test processes and from one session to the next.
    if hasattr(config, "cache"):
        os.environ.setdefault(questions.CACHE, str(config.cache.mkdir("checkpoints")))
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        return  # xdist's processes, which this one starts, shall not be ended by a hangup either
    with bytecode_is_kept():  # of Hypothesis, too, as it is a plugin
        import hypothesis
    # It would fail an example that takes longer than 200 ms, as one does on a busy machine.
    hypothesis.settings.register_profile("patient", deadline=None)
    hypothesis.settings.load_profile("patient")
    for item in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(item) is signal.SIG_IGN:
            signal.signal(item, lambda number, frame: None)


@pytest.fixture(scope="session", autouse=True)
def transformers_is_asked_in_this_process() -> Iterator[None]:
    """What commands ask a process of their own, which takes seconds to start; the answers are kept for commands."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(questions, "ask_process", answers_of_this_process)
        yield


@pytest.fixture(scope="session", autouse=True)
def nobody_says_how_wide_the_reader_is() -> Iterator[None]:
    """pytest imports readline, which puts COLUMNS and LINES into the environment of all that tests start."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("COLUMNS", "LINES"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="session")
def fork_server(tiny_models: Path) -> Iterator[str]:
    """The address of a fork server."""
    with client.fork_server(tiny_models) as address:
        yield address


@pytest.fixture(scope="session")
def forked(tmp_path_factory: pytest.TempPathFactory, tiny_models: Path) -> Iterator[ForkedRuns]:
    """Runs from a fork server; their steps can be judged."""
    skip_unless_watchable()
    with forked_runs(tmp_path_factory.mktemp("forked") / "printed", tiny_models) as runs:
        yield runs


@pytest.fixture(scope="module")
def warm(request: pytest.FixtureRequest) -> Iterator[None]:
    """Workers, and commands by ``Project.ensemble``, are forked by processes that have imported everything.

    For ``pytestmark = pytest.mark.usefixtures("warm")``.  A test of such a module that is marked ``fresh`` has
    fresh processes always; the others have them where not the usual part of the tests runs.
    """
    if sampling.part != "usual":
        yield
        return
    address = request.getfixturevalue("fork_server")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(client.SITE), prepend=os.pathsep)
        patch.setenv("TEST_FORK_SERVER", address)
        yield


@pytest.fixture(autouse=True)
def as_cold_as_asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No fork server for tests that have not asked for one; and after the others nothing that it forked is left."""
    if request.node.get_closest_marker("fresh") or "warm" not in request.fixturenames:
        monkeypatch.delenv("TEST_FORK_SERVER", raising=False)
    yield
    if address := os.environ.get("TEST_FORK_SERVER"):
        try:
            client.wait_until_idle(address, GRACE_SECONDS)
        except TimeoutError:
            pytest.fail("a process that was forked for this test still runs", pytrace=False)


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


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute with one thread: tiny matrices lose more to waiting threads than they gain from them."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
