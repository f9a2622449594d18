"""The rules of the house that a machine can check: which room may use which, told by folder."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "ensemble"
MAX_ROOT_ENTRIES = 17
HEAVY = ("torch", "transformers", "accelerate", "pandas", "sklearn", "scipy", "matplotlib")
OF_ANALYSIS = {"pandas", "sklearn", "scipy", "matplotlib"}
# The rooms that a run needs.
ROAD = {"common", "config", "data", "members", "jobs", "planning", "scheduling", "merging", "pipeline"}
# What each room may use beside itself; the file api.py counts as a room.  "child" is the child side of members,
# which is whatever needs torch; "predictor" is all that it and the worker know of each other; what workers of
# trainings run is of the room of the worker.  The parent's rooms never use any of the last three.
ROOMS = {
    "common": set[str](),
    "config": {"common"},
    "data": {"common"},
    "members": {"common", "config", "data"},
    "jobs": {"common", "config", "data", "members"},
    "planning": {"common", "config", "members", "jobs"},
    "scheduling": {"common", "jobs", "planning"},
    "merging": {"common", "config", "data"},
    "pipeline": {"common", "config", "data", "members", "jobs", "planning", "scheduling", "merging"},
    "commands": ROAD,
    "training": ROAD | {"commands"},
    "analysis": ROAD | {"commands", "training"},
    "api": ROAD | {"commands", "analysis", "training", "cli"},
    "cli": ROAD - {"data"} | {"commands", "analysis", "training", "api"},
    "worker": {"common", "data", "predictor"},
    "predictor": {"common", "data"},
    "child": {"common", "data", "members", "predictor"},
}
# What the parent's rooms may use of members: the interface of kinds, and where they are found by name.  ``doctor``
# may ask after the hub, too.
OF_MEMBERS = {
    "jobs": {"base", "registry"},
    "planning": {"base", "footprint"},
    "pipeline": {"base", "questions", "registry"},
    "commands": {"base", "registry", "huggingface"},
    "cli": {"base"},
}
CHILD_SIDE_OF_MEMBERS = {"child", "predictor", "loading", "scoring", "training"}


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imports(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def room_of(parts: tuple[str, ...]) -> str:
    """The room of a module, by its parts below the package, such as ``("worker", "channel")``."""
    if parts == ("members", "predictor"):
        return "predictor"
    if parts == ("training", "worker"):
        return "worker"
    return "child" if parts[0] == "members" and CHILD_SIDE_OF_MEMBERS & set(parts) else parts[0]


def modules() -> Iterator[tuple[Path, str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if len(parts) > 1 or parts == ("api",):
            yield path, room_of(parts)


def test_the_root_shows_the_rooms_and_nothing_else() -> None:
    entries = {path.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*.py")}
    assert entries == {"__init__.py", "__main__.py", "api.py", *ROOMS} - {"api", "child", "predictor"}
    assert len(entries) <= MAX_ROOT_ENTRIES


def test_each_room_uses_only_what_it_may() -> None:
    for path, room in modules():
        for name in imports(path):
            if name.startswith("ensemble."):
                other = room_of(tuple(name.split(".")[1:]))
                assert other == room or other in ROOMS[room], f"{path}: {name}"


@pytest.mark.parametrize("room", ["planning", "scheduling", "worker"])
def test_what_runs_jobs_knows_nothing_of_features(room: str) -> None:
    """A feature adds a field to Job, a way to select rows or a reducing step, but no branch there."""
    feature = re.compile(r"(?<![a-z])(?:view|fold|checkpoint|adapter|swap)(?:s|ped)?(?![a-z])", re.IGNORECASE)
    for path in sorted((PACKAGE / room).rglob("*.py")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            assert not feature.search(line), f"{path}, line {number}: {line.strip()}"


def test_kinds_are_known_by_their_interface_alone() -> None:
    for path, room in modules():
        for name in imports(path) if room in OF_MEMBERS else ():
            if name.startswith("ensemble.members"):
                assert name.split(".")[2] in OF_MEMBERS[room], f"{path}: {name}"


def test_nobody_asks_which_kind_a_member_is() -> None:
    for path, room in modules():
        if room in ("members", "child"):  # adapters have a task_type of their own
            continue
        for node in nodes(path):
            if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq | ast.NotEq):
                asked = [getattr(item, "attr", "") for item in ast.walk(node)]
                assert "task_type" not in asked, f"{path}, line {node.lineno}"


def test_a_kind_uses_what_several_share_and_no_other_kind() -> None:
    for path in (PACKAGE / "members").rglob("*.py"):
        own = path.relative_to(PACKAGE / "members").parts[0]
        for name in imports(path):
            parts = name.split(".")
            if parts[:2] == ["ensemble", "members"] and (PACKAGE / "members" / parts[2]).is_dir():
                assert parts[2] in (own, "huggingface"), f"{path}: {name}"


def test_the_worker_names_no_kind() -> None:
    kinds = {path.name for path in (PACKAGE / "members").iterdir() if (path / "parent.py").is_file()}
    kinds -= {"csv", "huggingface"}  # neither has predictors
    assert {"seq_cls", "pooled_cls", "causal_lm", "python"} <= kinds
    # The words alone are in the versions that a worker tells, and in its protocol.
    kinds = kinds - {"python", "command"} | {"members.python", "members.command"}
    for path in (PACKAGE / "worker").glob("*.py"):
        for node in nodes(path):
            text = node.value if isinstance(node, ast.Constant) else getattr(node, "id", "")
            assert not any(kind in str(text) for kind in kinds), f"{path}: {text!r}"


def test_only_the_child_side_of_members_imports_torch_or_transformers() -> None:
    # A program of its own: whether torch works on a device.
    program = PACKAGE / "worker" / "probe.py"
    for path, room in modules():
        if room not in ("child", "trainer") and path != program:
            # The Python API gives frames, when it is asked for one.
            heavy = {*HEAVY} - ({"pandas"} if path == PACKAGE / "cli/result_objects.py" else set())
            heavy -= OF_ANALYSIS if room == "analysis" else set()
            heavy -= {"sklearn"} if room == "training" else set()  # which divides rows into folds
            assert {name.split(".")[0] for name in imports(path)}.isdisjoint(heavy), path


def test_a_worker_imports_nothing_heavy_before_it_knows_its_kind() -> None:
    heavy = (*HEAVY, "numpy", "pyarrow", "ensemble.members.huggingface")
    code = f"import sys, ensemble.worker.__main__; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_where_workers_run_is_known_to_launchers_alone() -> None:
    """The scheduler knows handles: no pipes, processes, signals or files."""
    for path in (PACKAGE / "scheduling").glob("*.py"):
        names = set(imports(path))
        assert names.isdisjoint({"os", "pathlib", "select", "selectors", "signal", "socket", "subprocess"}), (
            path
        )
        launchers = {name for name in names if name.startswith("ensemble.scheduling.launchers")}
        assert launchers <= {"ensemble.scheduling.launchers.base"}, path


def test_nobody_but_its_class_writes_the_state_of_a_member() -> None:
    owner = PACKAGE / "scheduling" / "state.py"
    tree = ast.parse(owner.read_text(encoding="utf-8"))
    (state,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "ModelState"]
    fields = set()
    for node in ast.walk(state):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            fields.add(node.attr)
    assert {"chunks", "failure", "plan"} <= fields
    for path, _ in modules():
        for node in nodes(path):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets:
                if isinstance(target, ast.Attribute) and ast.unparse(target.value).endswith("state"):
                    assert target.attr not in fields, f"{path}: {ast.unparse(node)}"


def test_ray_is_known_to_its_launcher_alone() -> None:
    own = PACKAGE / "scheduling" / "launchers" / "ray"
    for path, _ in modules():
        if path.parent != own:
            names = set(imports(path))
            assert "ray" not in {name.partition(".")[0] for name in names}, path
            assert not any(name.startswith("ensemble.scheduling.launchers.ray") for name in names), path
    for path in (PACKAGE / "cli").rglob("*.py"):
        assert not re.search(r"\bray\b", path.read_text(encoding="utf-8"), re.IGNORECASE), path


def test_only_one_module_uses_nvml() -> None:
    users = [str(path.relative_to(PACKAGE)) for path, _ in modules() if "pynvml" in imports(path)]
    assert users == ["common/gpus.py"]


def test_the_parent_imports_nothing_heavy() -> None:
    modules = "cli.app api commands.doctor pipeline.run pipeline.prepare".split()
    code = "import sys\n" + "".join(f"import ensemble.{name}\n" for name in modules)
    code += f"print([name for name in {(*HEAVY, 'ray')!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_a_run_of_the_checks_imports_nothing_heavy_either(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("id,text\n1,a\n")
    (tmp_path / "c.yaml").write_text(
        "data: {path: t.csv}\nlabels: [a, b]\noutput_dir: out\n"
        "models: [{name: m, model_name_or_path: nowhere/x/y, text_column: text}]\n"
    )
    code = (
        "import sys, pathlib\nfrom ensemble.pipeline.load import load\n"
        "from ensemble.common.errors import EnsembleError\n"
        "from ensemble.common.python_process import keep_pandas_out\n"
        "from ensemble.pipeline.prepare import prepare\n"
        "keep_pandas_out()\n"
        "try:\n    prepare(load(pathlib.Path('c.yaml')))\nexcept EnsembleError as error:\n    print(error)\n"
        f"print([name for name in {(*HEAVY, 'ray', 'rich')!r} if name in sys.modules])"
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
