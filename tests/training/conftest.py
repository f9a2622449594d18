"""Members that are trained already, for tests of what becomes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.project import Project
from tests.training.folds import make_adapters, write_tables


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapters(tmp_path_factory.mktemp("adapters"))


@pytest.fixture
def trained(project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.chdir(project.folder)
    write_tables(project)
    return project
