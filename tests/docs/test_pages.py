"""Every page: its configs, its commands and its Python are checked without being run, and no page is too long."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import ensemble
from ensemble.cli.app import app
from tests.docs.fragments import is_config, problems
from tests.docs.pages import Block, Command, blocks, commands, inline_commands, pages, place, words
from tests.project import ROOT

DOCS = ROOT / "docs"
# Of all texts together, and of some of them.
MOST_WORDS, MOST_TUTORIAL_WORDS = 45_000, 900
MOST_LINES = {"README.md": 170, "CHANGELOG.md": 120}
_COMMANDS: Mapping[str, Any] = typer.main.get_group(app).commands
# Of `ensemble` without a command.
_OPTIONS = {"--help", "-h", "--version", "--install-completion", "--show-completion"}
# That of Click, which newer releases of Typer carry within.
_WRONG_USAGE: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
# `...` for more of the same, and how a shell joins commands or sends what they print elsewhere.
_LATER = re.compile(r"^(\.\.\.|[|;&<>].*|\d?>.*)$")
_ENTRY_POINT = re.compile(r'^"?([\w-]+)"? *= *"[\w.]+(?::\w+)?"', re.MULTILINE)

every_page = pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))


@every_page
def test_its_configs_have_keys_and_values_that_exist(page: Path) -> None:
    """Put a title that is no name of a YAML file on a block of YAML that is no config of this project."""
    found = [*blocks(page)]
    packages = [block.text for block in found if block.language == "toml"]
    packages += [path.read_text(encoding="utf-8") for path in (ROOT / "configs").rglob("pyproject.toml")]
    extensions = {name for text in packages for name in _ENTRY_POINT.findall(text)}
    wrong = [problem for block in found if is_config(block) for problem in problems(block, extensions)]
    assert not wrong, "\n".join(wrong)


@every_page
def test_its_commands_are_understood(page: Path) -> None:
    """By the parser of the command line; nothing runs."""
    called = [command for block in blocks(page) if block.language != "text" for command in commands(block)]
    wrong = [problem for command in called for problem in _misunderstood(command)]
    assert not wrong, "\n".join(wrong)


def _misunderstood(command: Command) -> Iterator[str]:
    try:
        arguments = shlex.split(command.arguments, comments=True)
    except ValueError as error:
        yield f"{command.place}: {error}"
        return
    ends = [number for number, argument in enumerate(arguments) if _LATER.match(argument)]
    name, *options = arguments[: ends[0]] if ends else arguments
    if name.startswith("-"):
        if name not in _OPTIONS:
            yield f"{command.place}: ensemble {name}: no such option"
        return
    if name not in _COMMANDS:
        yield f"{command.place}: ensemble {name}: no such command; there are {', '.join(_COMMANDS)}"
        return
    try:
        _COMMANDS[name].make_context(f"ensemble {name}", options)
    except typer.Exit:
        pass  # --help
    except _WRONG_USAGE as error:
        yield f"{command.place}: ensemble {name}: {error.format_message()}"


@every_page
def test_commands_in_its_text_exist(page: Path) -> None:
    """Arguments may be missing there."""
    wrong = []
    for command in inline_commands(page):
        name, *options = command.arguments.split()
        if name not in _COMMANDS:
            known = _OPTIONS
            options = [name, *options]
        else:
            known = {"--help", *(option for parameter in _COMMANDS[name].params for option in parameter.opts)}
        wrong += [
            f"{command.place}: ensemble {command.arguments}: there is no {option}"
            for option in options
            if (option == name or re.match(r"--?[a-z]", option)) and option.partition("=")[0] not in known
        ]
    assert not wrong, "\n".join(wrong)


@every_page
def test_its_make_targets_exist(page: Path) -> None:
    targets = {*re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)}
    text = page.read_text(encoding="utf-8")
    called = {*re.findall(r"(?:^|`)make ([a-z][\w-]*)", text, re.MULTILINE)}
    assert not called - targets, f"{page.name}: the Makefile has no such target"


@every_page
def test_its_python_names_what_there_is(page: Path) -> None:
    wrong = [
        problem for block in blocks(page) if block.language == "python" for problem in _python_problems(block)
    ]
    assert not wrong, "\n".join(wrong)


def _python_problems(block: Block) -> Iterator[str]:
    lines = [f"pass  # {line}" if re.match(r"\s*[!%]", line) else line for line in block.text.splitlines()]
    if re.match(r"%%writefile (?!.*\.py$)", block.text.partition("\n")[0]):
        return  # a cell that writes a file of another language
    try:
        tree = ast.parse("\n".join(lines))
    except SyntaxError as error:
        yield f"{place(block.page, block.line + (error.lineno or 1) - 1)}: {error.msg}"
        return
    imports_it = any(
        isinstance(node, ast.Import) and any(alias.name == "ensemble" for alias in node.names)
        for node in ast.walk(tree)
    )
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module == "ensemble":
            names = [alias.name for alias in node.names]
        elif imports_it and isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names = [node.attr] if node.value.id == "ensemble" else []
        line = block.line + getattr(node, "lineno", 1) - 1
        yield from (
            f"{place(block.page, line)}: ensemble has no {name!r}; it has {', '.join(ensemble.__all__)}"
            for name in names
            if name not in dir(ensemble)
        )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("```yaml\nlabels: [a, b]\nretrys: 2\n```", "retrys (line 4): unknown key"),
        ("```yaml\nmodels:\n  - {name: a, max_length: long}\n```", "models[0].max_length (line 4)"),
        ("```yaml\ntrain:\n  base_model: b\n  methud: lora\n```", "models[0].train.methud (line 5)"),
        ('```yaml title="a.yaml"\n- {name: a, weight: -1}\n```', "models[0].weight (line 3)"),
        ("```yaml\nlabels: [a\n```", "line 3: not valid YAML"),
        ("```sh\n$ ensemble run c.yaml\nensemble rum c.yaml\n```", "line 4: ensemble rum: no such command"),
        ("```\npython -m ensemble run c.yaml --limits 3\n```", "line 3: ensemble run: No such option"),
        ("```python\n!ensemble fit c.yaml \\\n  --method best\n```", "line 3: ensemble fit: Invalid value"),
        ("1. Do:\n   ```\n   ensemble merge\n   ```", "line 4: ensemble merge: Missing argument"),
        ("```python\nimport ensemble\nensemble.start()\n```", "line 4: ensemble has no 'start'"),
        ("```python\nfrom ensemble import rum\n```", "line 3: ensemble has no 'rum'"),
        ("```python\nx = (\n```", "line 3: '(' was never closed"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(text: str, problem: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"Here:\n{text}\n", encoding="utf-8")
    (block,) = blocks(page)
    found = problems(block) if is_config(block) else []
    found += [told for command in commands(block) for told in _misunderstood(command)]
    found += _python_problems(block) if block.language == "python" else []
    assert problem in "\n".join(found)


def test_what_is_no_config_has_a_title_that_says_so(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text('```yaml title="For Kubernetes"\nkind: RayJob\n```\n', encoding="utf-8")
    assert not any(is_config(block) for block in blocks(page))


@pytest.mark.parametrize("page", sorted((DOCS / "tutorials").glob("*.md")), ids=lambda page: page.stem)
def test_a_tutorial_is_short(page: Path) -> None:
    assert words(page) <= MOST_TUTORIAL_WORDS, f"{page.name}: shorten it, or move a part to a how-to page"


@pytest.mark.parametrize("name", MOST_LINES)
def test_a_page_of_the_root_has_few_lines(name: str) -> None:
    lines = len((ROOT / name).read_text(encoding="utf-8").splitlines())
    assert lines <= MOST_LINES[name], (
        f"{name}: {lines} lines; move what is no first answer to a page in docs/"
    )


def test_all_pages_together_are_short() -> None:
    counts = {page: words(page) for page in pages()}
    longest = sorted(counts, key=lambda page: -counts[page])[:5]
    listed = ", ".join(f"{page.relative_to(ROOT)} {counts[page]:,}" for page in longest)
    assert sum(counts.values()) < MOST_WORDS, (
        f"{sum(counts.values()):,} words; shorten a page. Longest: {listed}"
    )


def test_the_index_for_agents_has_its_form_and_pages_that_exist() -> None:
    """The form is that of https://llmstxt.org: a title, a summary, and lists of links by heading."""
    title, empty, summary, *rest = (DOCS / "llms.txt").read_text(encoding="utf-8").splitlines()
    assert title.startswith("# ")
    assert not empty
    assert summary.startswith("> ")
    entries = [line for line in rest if line.startswith("- ")]
    links = [re.fullmatch(r"- \[[^\]]+\]\(([\w/-]+\.md)\)(: .+)?", line) for line in entries]
    assert entries
    assert all(links), "a line of a list is not: - [name](page.md): what the page says"
    made = {"reference/cli.md"}  # when the site is built
    missing = [link[1] for link in links if link and link[1] not in made and not (DOCS / link[1]).is_file()]
    assert not missing


def test_the_skill_has_the_front_matter_of_the_format() -> None:
    """The rules of https://agentskills.io/specification."""
    (path,) = (DOCS / "skill").glob("*/SKILL.md")
    _, front, body = path.read_text(encoding="utf-8").split("---\n", 2)
    fields = yaml.safe_load(front)
    assert fields.keys() <= {"name", "description", "license", "compatibility", "metadata", "allowed-tools"}
    assert fields["name"] == path.parent.name
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", fields["name"])
    assert len(fields["name"]) <= 64
    assert 0 < len(fields["description"]) <= 1024
    assert len(fields["compatibility"]) <= 500
    assert len(body.splitlines()) < 500
