"""The launcher of docs/how-to/new-launcher.md, as it stands there: built, installed, and used in a run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from tests.faults.chunky import chunky_config, ids_of, results
from tests.faults.inject import Fault, Injected
from tests.packages import pip_install
from tests.page import blocks, lay_out_package
from tests.project import Project, python_path
from tests.waiting import PATIENCE_SECONDS


@pytest.mark.long
def test_workers_that_let_everything_else_go_first(
    chunky: Project, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    site = tmp_path / "site"
    pip_install(site, lay_out_package(tmp_path / "source", "ensemble-polite"))

    chunky.write_config(chunky_config(chunky, **yaml.safe_load(blocks()["polite.yaml"])))
    injected = Injected(tmp_path, Fault("wait", ids_of(chunky, 6), times=1))
    folders = map(Path, injected.environment["PYTHONPATH"].split(os.pathsep))
    environment = {**injected.environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(*folders, site)}
    with chunky.start("run", "config.yaml", environment=environment) as process:
        injected.wait_for()
        (worker,) = injected.pids()
        niceness = os.getpriority(os.PRIO_PROCESS, worker)
        assert os.getpriority(os.PRIO_PROCESS, process.pid) < niceness == 15
        injected.let_go()
        printed, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, printed
    assert results(chunky) == undisturbed

    wrong = "launcher={polite: {nice: 20}}"
    done = chunky.ensemble("validate", "config.yaml", "--set", wrong, environment=environment)
    assert done.returncode == 2
    assert f"--set {wrong}: polite.nice: must be" in done.stderr
