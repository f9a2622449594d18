"""Shell completion: what shells ask of the ``ensemble`` command, by its own entry point."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.project import ROOT, python_path
from tests.sampling import one_in

HEAVY = ("numpy", "pyarrow", "yaml", "jinja2", "torch", "rich")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The console script as an installer writes it."""
    entry = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["scripts"]["ensemble"]
    module, _, function = entry.partition(":")
    path = tmp_path_factory.mktemp("bin") / "ensemble"
    # As pip does where the path of the Python may have a space, which no "#!" takes.
    start = f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''\n"
    path.write_text(f"{start}import sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    path.chmod(0o755)
    return path


def environment(script: Path, **variables: str) -> dict[str, str]:
    path = f"{script.parent}:{os.environ['PATH']}"
    return {**os.environ, "PYTHONPATH": python_path(ROOT), "PATH": path, **variables}


def test_a_shell_is_answered_without_anything_heavy(script: Path, tmp_path: Path) -> None:
    asked = environment(script, COMP_WORDS="ensemble va", COMP_CWORD="1", _ENSEMBLE_COMPLETE="complete_bash")
    command = [sys.executable, "-X", "importtime", str(script)]
    done = subprocess.run(command, env=asked, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split() == ["validate"], done.stderr
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "typer" in imported
    assert imported.isdisjoint(HEAVY)


def test_bash_completes_commands_options_and_files(script: Path, tmp_path: Path) -> None:
    if shutil.which("bash") is None:
        pytest.skip("no bash")
    program = """
        eval "$(_ENSEMBLE_COMPLETE=source_bash ensemble)"
        complete -p ensemble
        for words in "ensemble i" "ensemble init --sa"; do
            COMP_WORDS=($words); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()
            _ensemble_completion ensemble; echo "${COMPREPLY[@]}"
        done
    """
    done = subprocess.run(
        ["bash", "-c", program], env=environment(script), cwd=tmp_path, capture_output=True, text=True
    )
    how, *completed = done.stdout.splitlines()
    assert "-o default" in how, "files, where it answers nothing"
    assert completed == ["init", "--sample"], done.stderr


@pytest.mark.parametrize("shell", one_in(2, ["bash", "zsh"]))
def test_it_is_installed_for_a_shell(shell: str, script: Path, tmp_path: Path) -> None:
    asked = environment(script, HOME=str(tmp_path), _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    for option in ("--show-completion", "--install-completion"):
        done = subprocess.run(
            [str(script), option, shell], env=asked, cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    written = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert any("_ENSEMBLE_COMPLETE=complete_" in text for text in written)


def test_pythons_own_completion_is_left_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ensemble", "--install-completion", "bash"]
    asked = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": python_path(ROOT)}
    done = subprocess.run(command, env=asked, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "No such option: --install-completion" in done.stderr
    assert not [*tmp_path.iterdir()]
