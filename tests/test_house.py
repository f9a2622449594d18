"""The rules of the house that a machine can check."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "ensemble"
HEAVY = ("torch", "transformers", "accelerate", "pandas")
# What parent and child share: the messages, the paths, the errors, templates and their sandbox (validate renders
# with the very code the worker uses), what keeps secrets out of the logs, the guard that keeps pandas out, clocks,
# whether files are as they were.
SHARED = {
    *("ensemble.protocol", "ensemble.rundir", "ensemble.errors", "ensemble.template", "ensemble.sandbox"),
    *("ensemble.redact", "ensemble.arrow", "ensemble.celltext", "ensemble.attention", "ensemble.watch"),
    *("ensemble.tensornames", "ensemble.filestate"),
}


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("module", ["ensemble.cli", "ensemble.run", "ensemble.prepare"])
def test_the_parent_imports_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_a_run_of_the_checks_imports_nothing_heavy_either(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("id,text\n1,a\n")
    (tmp_path / "c.yaml").write_text(
        "data: {path: t.csv}\nlabels: [a, b]\noutput_dir: out\n"
        "models: [{name: m, model_name_or_path: nowhere/x/y, text_column: text}]\n"
    )
    code = (
        "import sys, pathlib\nfrom ensemble.config import load_config\nfrom ensemble.errors import EnsembleError\n"
        "from ensemble.prepare import prepare\n"
        "try:\n    prepare(load_config(pathlib.Path('c.yaml')))\nexcept EnsembleError as error:\n    print(error)\n"
        f"print([name for name in {(*HEAVY, 'jinja2', 'rich')!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(PACKAGE.parent)},
    )
    assert "no such folder" in done.stdout
    assert done.stdout.strip().endswith("[]"), done.stdout + done.stderr


def test_only_the_worker_imports_torch_or_transformers() -> None:
    for path in PACKAGE.rglob("*.py"):
        names = {name.split(".")[0] for name in imports(path)}
        if "worker" not in path.relative_to(PACKAGE).parts:
            assert names.isdisjoint(HEAVY), path


def test_parent_and_child_share_only_what_is_named() -> None:
    for path in PACKAGE.rglob("*.py"):
        ours = {name for name in imports(path) if name.startswith("ensemble.")}
        if "worker" in path.relative_to(PACKAGE).parts:
            assert {name for name in ours if not name.startswith("ensemble.worker")} <= SHARED, path
        else:
            assert not {name for name in ours if name.startswith("ensemble.worker")}, path


def test_only_devices_uses_nvml() -> None:
    users = [path.name for path in PACKAGE.rglob("*.py") if "pynvml" in imports(path)]
    assert users == ["devices.py"]
