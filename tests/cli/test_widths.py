"""What every command prints at 60, 80 and 120 columns, with awkward names: nothing is cut, nothing is broken."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.pseudo import in_terminal
from tests.project import Project
from tests.sampling import one_in

NAMES = (
    "a",
    "gemma-2-9b-it.lora-r64-fold0.nf4",
    "a_member_whose_name_nobody_would_call_short_but_for_its_author",
    "llama-3.1-8b",
    "x" * 100,
)
COMMANDS = {
    "validate": ("validate", "config.yaml"),
    "plan": ("plan", "config.yaml"),
    "run": ("run", "config.yaml"),
    "status": ("status", "runs/first"),
}
WIDE = 1000
pytestmark = pytest.mark.usefixtures("warm")
# Not what is free or used of the memory, which changes while one looks.
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?%?(?![\d.,]*[\s\xa0](?:GiB|MiB))")
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory, tiny_models: Path) -> Project:
    """Five members over thirty rows, run to the end."""
    project = Project(tmp_path_factory.mktemp("it's crowded"), tiny_models)
    project.write_table(30)
    models = [
        {"name": name, "model_name_or_path": str(tiny_models / ("gemma", "llama")[place % 2])}
        for place, name in enumerate(NAMES)
    ]
    project.write_config(project.config(models=models))
    done = project.ensemble("run", "config.yaml", "--quiet")
    assert done.returncode == 0, done.stderr
    return project


def plain(printed: str) -> str:
    """Without colours, and without what moves the cursor."""
    return _CONTROL.sub("", printed)


def check(printed: str, width: int) -> None:
    for line in plain(printed).splitlines():
        assert len(line) <= width or len(line.split()) == 1, f"wider than {width}: {line}"
        assert "…" not in line


@pytest.fixture(scope="module", params=COMMANDS)
def command(request: pytest.FixtureRequest, crowded: Project) -> tuple[tuple[str, ...], set[str]]:
    """A command's arguments, and the numbers that it prints: not memory that is free, nor a process."""
    arguments = COMMANDS[request.param]
    item, other = (plain(in_terminal(crowded.folder, WIDE, *arguments)) for _ in range(2))
    return arguments, {*_NUMBER.findall(item)} & {*_NUMBER.findall(other)}


@pytest.mark.long
@pytest.mark.parametrize("width", one_in(3, [60, 80, 120]))
def test_every_number_is_there_at_every_width(
    command: tuple[tuple[str, ...], set[str]], width: int, crowded: Project
) -> None:
    arguments, numbers = command
    in_file = crowded.ensemble(*arguments, environment={"COLUMNS": str(width)})
    assert in_file.returncode == 0, in_file.stderr
    narrow = plain(in_terminal(crowded.folder, width, *arguments))
    for printed in (narrow, in_file.stdout):
        check(printed, width)
        assert numbers <= set(_NUMBER.findall(printed))
    for name in NAMES:
        assert name in narrow


@pytest.mark.long
def test_doctor_breaks_its_lines_where_the_terminal_ends(crowded: Project) -> None:
    printed = in_terminal(crowded.folder, 60, "doctor", "config.yaml", environment={"HF_HUB_OFFLINE": "1"})
    check(printed, 60)
    assert "A run can start." in printed


def test_errors_break_between_words(crowded: Project) -> None:
    overrides = (
        "--set",
        "data.id_column=nope",
        "--set",
        "models[1].model_name_or_path=no/such/folder/any/where",
    )
    printed = in_terminal(crowded.folder, 60, "validate", "config.yaml", *overrides)
    check(printed, 60)
    assert "error:" in printed
    assert "no/such/folder/any/where" in printed


@pytest.mark.parametrize("command", ["plan", "status"])
def test_in_a_file_and_in_a_notebook_sentences_are_whole_lines(command: str, crowded: Project) -> None:
    for environment in ({}, {"JPY_PARENT_PID": "1"}):
        printed = crowded.ensemble(*COMMANDS[command], environment={"COLUMNS": "", **environment}).stdout
        assert all(sum(line.startswith(f"{name}: ") for line in printed.splitlines()) <= 1 for name in NAMES)
        assert "…" not in printed
        assert "\x1b" not in printed
        tables = [line for line in printed.splitlines() if ": " not in line]
        assert all(len(line) <= 120 for line in tables), printed
