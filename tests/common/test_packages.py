"""The supported range of packages: read from pyproject.toml, and what is outside of it is refused by name."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from ensemble.common.packages import COMMAND_LINE, Requirement, own_requirements, parse_requirement
from tests.checkpoints import make_adapter, make_base
from tests.project import LABELS, ROOT, Project
from tests.sampling import one_in


def test_the_bounds_are_this_packages_own() -> None:
    requirements = {own_requirement.name: own_requirement for own_requirement in own_requirements()}
    assert re.fullmatch(r"\d+\.\d+", requirements["torch"].minimum)
    assert requirements["torch"].extra == ""
    assert requirements["bitsandbytes"].extra == "quantization"
    assert {"tokenizers", "safetensors", "peft", *COMMAND_LINE} <= requirements.keys()
    assert "pytest" not in requirements
    assert (requirements["transformers"].minimum, requirements["transformers"].below) == ("5.0", "6")


def test_requirements_are_read() -> None:
    assert parse_requirement("torch>=2.6") == Requirement("torch", "2.6")
    assert parse_requirement("transformers >= 5.0, < 6") == Requirement("transformers", "5.0", "6")
    assert parse_requirement("transformers<6,>=5.0") == Requirement("transformers", "5.0", "6")
    assert parse_requirement('peft >=0.14 ; extra == "adapters"') == Requirement(
        "peft", "0.14", "", "adapters"
    )
    assert parse_requirement('rich; python_version >= "3.11"') == Requirement("rich")
    assert parse_requirement("pytest>=8; extra == 'dev'") is None


@pytest.mark.parametrize(
    ("version", "wrong"),
    [
        ("4.57.6", "older than 5.0"),
        ("5.0.0rc1", ""),
        ("5", ""),
        ("5.23.0.dev0", ""),
        ("6.0.0", "newer than what was tried (before 6)"),
        ("10.1", "newer than what was tried (before 6)"),
    ],
)
def test_versions(version: str, wrong: str) -> None:
    assert Requirement("transformers", "5.0", "6").wrong(version) == wrong


def pretend(folder: Path, **versions: str) -> dict[str, str]:
    """An environment in which these versions look installed: what pip leaves of a package, first on the path."""
    for name, version in versions.items():
        place = folder / f"{name}-{version}.dist-info"
        place.mkdir(parents=True)
        (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


@pytest.mark.fault(31)
@pytest.mark.parametrize(
    ("versions", "message"),
    one_in(
        2,
        [
            ({"typer": "0.18.0"}, "typer 0.18.0 is older than 0.19; pip install 'typer>=0.19'"),
            (
                {"transformers": "4.57.6"},
                "transformers 4.57.6 is older than 5.0; pip install 'transformers>=5.0,<6'",
            ),
            ({"transformers": "6.0.0"}, "transformers 6.0.0 is newer"),
            ({"torch": "2.5.1", "pyarrow": "16.1.0"}, "torch 2.5.1 is older than 2.6; "),
        ],
    ),
)
def test_what_is_out_of_range_is_refused_before_anything_else(
    versions: dict[str, str], message: str, project: Project, tmp_path: Path
) -> None:
    project.write_config(project.config())
    for command in ("run", "validate", "plan"):
        done = project.ensemble(command, "config.yaml", environment=pretend(tmp_path / command, **versions))
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert "error: " in done.stderr
        if "pyarrow" not in versions:  # the command line itself needs that one, and says it first
            assert f"error: {message}" in done.stderr
    assert not (project.folder / "runs").exists()


@pytest.mark.long
def test_what_analysis_alone_needs_is_refused_by_its_commands_alone(project: Project, tmp_path: Path) -> None:
    project.write_config(project.config())
    old = pretend(tmp_path, scikit_learn="1.2.2")
    assert project.ensemble("validate", "config.yaml", environment=old).returncode == 0
    done = project.ensemble("fit", "config.yaml", environment=old)
    assert done.returncode == 2
    assert "scikit-learn 1.2.2 is older than 1.4; pip install 'scikit-learn>=1.4'" in done.stderr


def test_a_package_that_is_missing_is_said_by_every_command(project: Project, tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\")")
    project.write_config(project.config())
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    for command in ("doctor", "validate config.yaml", "status runs"):
        done = project.ensemble(*command.split(), environment=environment)
        assert (done.returncode, done.stdout) == (2, "")
        message = "error: a package that this needs is missing or broken (No module named 'numpy')"
        assert done.stderr.startswith(message), done.stderr


@pytest.mark.long
@pytest.mark.fault(31)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft's
@pytest.mark.parametrize(
    ("member", "versions", "message"),
    [
        (
            {"quantization_config": {"load_in_8bit": True}},
            {"bitsandbytes": "0.46.0"},
            "bitsandbytes 0.46.0 is older than 0.49, which models[0].quantization_config needs",
        ),
        (
            {"adapter_name_or_path": "adapter"},
            {"peft": "0.14.0"},
            "peft 0.14.0 is older than 0.18, which models[0].",
        ),
    ],
)
def test_extras_are_looked_at_where_they_are_needed(
    member: dict[str, Any], versions: dict[str, str], message: str, project: Project, tmp_path: Path
) -> None:
    base = make_base(project.folder / "base", "llama")
    make_adapter(project.folder / "adapter", base, len(LABELS))
    model = {"name": "one", "model_name_or_path": "base", "label_map": _labels()}
    if "adapter_name_or_path" not in member:
        model = {"name": "one", "model_name_or_path": str(project.models / "llama")}
    environment = pretend(tmp_path / "site", **versions)
    project.write_config(project.config(models=[{**model, **member}]))
    done = project.ensemble("validate", "config.yaml", environment=environment)
    assert done.returncode == 2, done.stdout
    assert message in done.stderr
    project.write_config(project.config())
    assert project.ensemble("validate", "config.yaml", environment=environment).returncode == 0


def _labels() -> dict[str, str]:
    return {f"LABEL_{index}": label for index, label in enumerate(LABELS)}


def test_an_old_python_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from ensemble.__main__ import main

    monkeypatch.setattr(sys, "version_info", (3, 10, 13))
    monkeypatch.setattr(sys, "version", "3.10.13 (main)")
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert capsys.readouterr().err == "error: Python 3.10.13 is too old; use Python 3.11 or newer\n"
