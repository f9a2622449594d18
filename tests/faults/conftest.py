"""Fixtures for faults: a table of four chunks, what an undisturbed run makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.chunky import chunky_config, results, write_chunky_table
from tests.faults.forked.runs import ForkedRuns
from tests.project import Project


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
