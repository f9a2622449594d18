"""The two ways in which a test here loads a config: one that holds, one that does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ensemble.common.errors import ConfigError
from ensemble.config import LoadedConfig
from ensemble.pipeline.load import load as load_config
from tests.config.examples import Load, Problems


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def _load(content: str | dict[str, Any], *overrides: str, **environ: str) -> LoadedConfig:
        path = tmp_path / "my config.yaml"
        text = content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False)
        path.write_text(text, encoding="utf-8", newline="")
        return load_config(path, overrides, environ=environ)

    return _load


@pytest.fixture
def problems(load: Load) -> Problems:
    def _problems(content: str | dict[str, Any], *overrides: str, **environ: str) -> tuple[str, ...]:
        with pytest.raises(ConfigError) as caught:
            load(content, *overrides, **environ)
        assert all(problem and problem.isprintable() for problem in caught.value.problems)
        return caught.value.problems

    return _problems
