"""Extensions by their names: built in, and from packages that lie where installed packages lie."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ensemble.common.errors import ConfigError
from ensemble.common.extensions import SettingsByName
from ensemble.merging.methods import METHODS
from ensemble.merging.methods.base import MergeMethod
from ensemble.merging.methods.geometric_mean import GeometricMean
from ensemble.merging.methods.weighted_mean import WeightedMean
from ensemble.pipeline.load import load
from tests.config.examples import SMALL, begin
from tests.packages import lay_out
from tests.project import ROOT, python_path

GROUP = "ensemble.merge_methods"
METHOD = """
from typing import Annotated

from annotated_types import Ge
from pydantic import model_validator

from ensemble.config import EnsembleConfig
from ensemble.merging.methods.base import MergeMethod


class Settings(EnsembleConfig):
    power: Annotated[float, Ge(1)] = 2.0
    scale: bool = True
    kind: str = "plain"

    @model_validator(mode="after")
    def check(self) -> "Settings":
        if self.power > 9 and self.scale:
            raise ValueError("power above 9 goes with scale: false")
        return self


class Power(MergeMethod):
    Settings = Settings

    def merge(self, block, weights):
        return (block.probabilities ** self.settings.power).mean(axis=0)
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    for name in ("power_one", "broken_one"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return folder


@pytest.fixture
def power(site: Path) -> Path:
    lay_out(site, "power-methods", GROUP, {"power": "power_one:Power"}, power_one=METHOD)
    return site


def problems(tmp_path: Path, **ensemble: object) -> tuple[str, ...]:
    path = tmp_path / "c.yaml"
    path.write_text(json.dumps({"ensemble": ensemble, **SMALL}, indent=1))
    with pytest.raises(ConfigError) as caught:
        load(path)
    return caught.value.problems


def test_what_is_built_in() -> None:
    assert METHODS.load("mean") is WeightedMean
    assert METHODS.load("geometric_mean") is GeometricMean
    assert METHODS.names()[:2] == ["mean", "geometric_mean"]
    assert dict(SettingsByName(METHODS)).keys() == set(METHODS.names())
    with pytest.raises(
        ConfigError, match=r"^unknown merge method 'geometric'; did you mean geometric_mean\?$"
    ):
        METHODS.load("geometric")


def test_a_package_brings_a_method_with_keys_of_its_own(power: Path, tmp_path: Path) -> None:
    assert METHODS.names() == [*METHODS.built_in, "power"]
    assert issubclass(METHODS.load("power"), MergeMethod)
    path = tmp_path / "c.yaml"
    path.write_text(json.dumps({**SMALL, "ensemble": {"method": "power", "power": 3}}))
    config = load(path, ["ensemble.scale=false"]).config
    own = {"method": "power", "power": 3.0, "scale": False, "kind": "plain"}
    assert config.ensemble.model_dump(exclude_none=True) == own
    assert config.model_dump()["ensemble"] == config.ensemble.model_dump()


@pytest.mark.parametrize(
    ("ensemble", "sentence"),
    [
        ({"method": "power", "powr": 1}, "ensemble.powr (line 4): unknown key; "),
        ({"method": "power", "power": "x"}, "ensemble.power (line 4): must be a valid number, not 'x'"),
        (
            {"method": "power", "power": 0},
            "ensemble.power (line 4): must be greater than or equal to 1, not 0",
        ),
        ({"method": "power", "scale": 1}, "ensemble.scale (line 4): must be true or"),
        ({"method": "power", "kind": 1}, "ensemble.kind (line 4): must be a valid string, not 1"),
        ({"method": "power", "power": 10}, "ensemble (line 2): power above 9 goes with scale: false"),
        (
            {"method": "mean", "power": 1},
            "ensemble.power (line 4): unknown key; ",
        ),
        (
            {"method": "x"},
            "ensemble.method (line 3): unknown method; the methods here are mean, geometric_mean, logit_mean, "
            "median, power_mean, rank_mean, stacking, vote, power",
        ),
    ],
)
def test_its_keys_are_checked_like_all_others(
    power: Path, tmp_path: Path, ensemble: dict[str, object], sentence: str
) -> None:
    assert begin(problems(tmp_path, **ensemble), sentence)


def test_a_package_that_cannot_be_imported(site: Path, tmp_path: Path) -> None:
    lay_out(site, "broken-methods", GROUP, {"broken": "broken_one:Broken"}, broken_one="1 / 0\n")
    place = "merge method broken: the entry point broken = broken_one:Broken of the package broken-methods"
    with pytest.raises(ConfigError) as caught:
        METHODS.load("broken")
    reason = "cannot be imported (ZeroDivisionError: division by zero); fix or uninstall that package"
    assert caught.value.problems == (f"{place} {reason}",)
    assert problems(tmp_path, method="broken") == (f"ensemble.method (line 3): {place} {reason}",)
    (site / "broken_one.py").write_text("Broken = 3\n")
    with pytest.raises(
        ConfigError, match=r"is no subclass of ensemble\..*\.base\.MergeMethod; fix that package$"
    ):
        METHODS.load("broken")


def test_a_name_that_two_packages_give(power: Path, tmp_path: Path) -> None:
    lay_out(power, "other-methods", GROUP, {"power": "power_one:Power", "mean": "power_one:Power"})
    with pytest.raises(ConfigError) as caught:
        METHODS.load("power")
    words = [re.sub(r"^merge method |; uninstall one$", "", problem) for problem in caught.value.problems]
    assert words == [
        "mean: the packages ensemble-runner and other-methods both have one so named",
        "power: the packages other-methods and power-methods both have one so named",
    ]
    assert METHODS.load("mean") is WeightedMean, "what is built in needs no look at packages"
    assert len(problems(tmp_path, method="power")) == 2


@pytest.mark.long
def test_a_config_that_names_what_is_built_in_reads_no_entry_points(tmp_path: Path) -> None:
    for method in ("mean", "geometric_mean"):
        (tmp_path / "c.yaml").write_text(json.dumps({**SMALL, "ensemble": {"method": method}}))
        code = (
            "import pathlib\nfrom importlib import metadata\n"
            "read = metadata.entry_points\n"
            "def refuse(group):\n"  # pydantic looks for plugins of its own
            "    assert not group.startswith('ensemble'), group\n"
            "    return read(group=group)\n"
            "metadata.entry_points = refuse\n"
            "from ensemble.pipeline.load import load\n"
            "print(load(pathlib.Path('c.yaml')).config.ensemble.method)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env={"PYTHONPATH": python_path(ROOT)},
            capture_output=True,
            text=True,
        )
        assert done.stdout.strip() == method, done.stderr
