"""Fixtures for faults: a table of four chunks, runs that start in no time, what an undisturbed run makes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.chunky import chunky_config, results, write_chunky_table
from tests.faults.forked.runs import ForkedRuns, forked_runs
from tests.faults.steps import skip_unless_watchable
from tests.project import Project


@pytest.fixture(scope="session")
def forked(tmp_path_factory: pytest.TempPathFactory, tiny_models: Path) -> Iterator[ForkedRuns]:
    """Runs from a fork server; their steps can be judged."""
    skip_unless_watchable()
    with forked_runs(tmp_path_factory.mktemp("forked") / "printed", tiny_models) as runs:
        yield runs


@pytest.fixture
def chunky(project: Project) -> Project:
    """A project of one member and 16 rows in four chunks."""
    write_chunky_table(project)
    project.write_config(chunky_config(project))
    return project


@pytest.fixture(scope="session")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, tiny_models: Path, forked: ForkedRuns
) -> dict[str, bytes]:
    """What a run of the chunky project makes that nothing disturbs, by the files' names."""
    folder = tmp_path_factory.mktemp("undisturbed")
    project = Project(folder, tiny_models)
    write_chunky_table(project)
    project.write_config(chunky_config(project))
    assert forked.run(folder) == 0, forked.printed
    return results(project)
