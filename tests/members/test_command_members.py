"""Programs of the user as members: the files that they read and write, and what is said of those that fail."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ensemble.common.errors import CheckpointError, MemberError
from ensemble.common.protocol import CommonSpec
from ensemble.common.python_process import WORKER_MARK
from ensemble.config import DataConfig
from ensemble.data.published_table import PublishedTable
from ensemble.data.table import TableNeeds, read_table
from ensemble.members.base import Assigned, OutputColumns
from ensemble.members.command import child, interpreter
from ensemble.members.command.parent import Command, CommandSettings
from ensemble.members.predictor import Prediction, Predictor
from tests.faults.test_workers import is_gone
from tests.nvml.sim import GIB, Gpu, Memory, NvmlSim, gpu_uuid
from tests.project import LABELS, Project
from tests.sampling import one_in
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("warm")

# A row's probabilities follow from its id alone.
GOOD = "id,winner_a,winner_b,tie\nr0,0.1,0.2,0.7\nr1,0.3,0.3,0.4\nr2,0.5,0.25,0.25\nr3,1,0,0\n"
VALUES = [[0.1, 0.2, 0.7], [0.3, 0.3, 0.4], [0.5, 0.25, 0.25], [1, 0, 0]]


@pytest.fixture(autouse=True)
def _as_in_a_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """What a command leaves running is found by this mark, and what it prints goes to the worker's log."""
    monkeypatch.setenv(WORKER_MARK, secrets.token_hex(8))
    before = os.dup(1)
    with (tmp_path / "worker.log").open("w") as log:
        os.dup2(log.fileno(), 1)
    yield
    os.dup2(before, 1)
    os.close(before)


def shell(script: str) -> list[str]:
    return ["sh", "-c", script, "sh", "{rows}", "{out}"]


def prints(text: str) -> list[str]:
    """A command that writes this file, whatever the rows are."""
    return ["sh", "-c", 'printf %s "$3" > "$2"', "sh", "{rows}", "{out}", text]


def write_table(folder: Path) -> Path:
    (folder / "test.csv").write_text('id,a,label\nr0,"x, ""y""",tie\nr1,,tie\nr2,z,tie\nr3,01,tie\n')
    return folder / "test.csv"


def predictor(folder: Path, table: Path, swap: Mapping[str, str] | None = None, **settings: Any) -> Predictor:
    """The member's child side, with a table as the parent leaves it."""
    truth: Any = {"label_column": "label"} if table.suffix == ".csv" else {}
    columns = OutputColumns.of(DataConfig(path=table, **truth), tuple(LABELS))
    kind = Command(CommandSettings(name="mine", **settings))
    inspected = kind.inspect(columns)
    read_table(table, TableNeeds("id", columns=inspected.columns)).publish(folder / "table.arrow", True)
    common = CommonSpec(
        labels=tuple(LABELS), activation="softmax", gpus=0, seed=7, shards_dir=str(folder / "work")
    )
    given = json.loads(json.dumps(kind.worker_settings(inspected, Assigned(gpus=0), None)))
    made = child.make_predictor(common, given, PublishedTable(folder / "table.arrow", [swap or {}]))
    made.load()
    return made


def predict(
    folder: Path, command: Sequence[str], rows: Sequence[int] = (0, 1, 2, 3), **settings: Any
) -> Prediction:
    made = predictor(folder, write_table(folder), command=[*command], **settings)
    return made.predict(np.array(rows), lambda *counts: None)


def refused(folder: Path, command: Sequence[str], **settings: Any) -> str:
    with pytest.raises(MemberError) as caught:
        predict(folder, command, **settings)
    return str(caught.value)


def test_values_are_joined_by_id_and_rows_stand_in_the_tables_order(tmp_path: Path) -> None:
    kept = tmp_path / "a copy"
    lines = GOOD.splitlines()
    shuffled = "\n".join([lines[0], lines[4], lines[1], lines[3]])
    words = ["sh", "-c", 'cp "$1" "$4"; printf %s "$3" > "$2"', "sh", "{rows}", "{out}", shuffled, str(kept)]
    prediction = predict(tmp_path, words, rows=[3, 0, 2])
    np.testing.assert_array_equal(prediction.values, [VALUES[3], VALUES[0], VALUES[2]])
    assert kept.read_text() == 'id,a\nr0,"x, ""y"""\nr2,z\nr3,01\n', "of the table, without the true label"
    assert not [*tmp_path.glob("work/cache/*")]


def test_placeholders_and_the_environment(tmp_path: Path) -> None:
    code = (
        "import json, os, pathlib, shutil, sys\n"
        "keys = ('PYTHONSAFEPATH', 'DISABLE_SAFETENSORS_CONVERSION')\n"
        "told = [sys.argv[3:], [os.environ.get(key) for key in keys], sys.stdin.read()]\n"
        "pathlib.Path(sys.argv[3]).write_text(json.dumps(told))\n"
        f"pathlib.Path(sys.argv[2]).write_text({GOOD!r})\n"
    )
    told = tmp_path / "told"
    words = ["python", "-c", code, "{rows}", "{out}", str(told)]
    words += ["--on={device}", "{seed}", "{labels}", "{max_rows}", "{other} {}"]
    predict(tmp_path, words)
    labels = '["winner_a", "winner_b", "tie"]'
    arguments = [str(told), "--on=cpu", "7", labels, "4", "{other} {}"]
    environment = [os.environ.get("PYTHONSAFEPATH"), os.environ.get("DISABLE_SAFETENSORS_CONVERSION")]
    assert json.loads(told.read_text()) == [arguments, environment, ""]


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl"])
def test_rows_have_the_tables_format_and_types(tmp_path: Path, name: str) -> None:
    frame = pd.DataFrame(
        {
            "number": [1, 2, 3],
            "id": [10, 11, 12],
            "share": [0.5, None, 2.0],
            "flag": [True, False, True],
            "text": ['"ü"', None, "a\nb"],
            "many": [["x"], [], ["y", "z"]],
        }
    )
    table, kept = tmp_path / f"test{Path(name).suffix}", tmp_path / name
    if name == "rows.parquet":
        frame.to_parquet(table)
    else:
        frame.to_json(table, orient="records", lines=True)
    out = frame[["id"]].iloc[[0, 2]].assign(winner_a=0.25, winner_b=0.25, tie=0.5)
    out.to_parquet(tmp_path / "out.parquet")
    words = ["sh", "-c", f'cp "$1" "{kept}"; cp "{tmp_path}/out.parquet" "$2"', "sh", "{rows}", "{out}"]
    made = predictor(tmp_path, table, command=words, out_format="parquet")
    values = made.predict(np.array([2, 0]), lambda *counts: None).values
    np.testing.assert_array_equal(values, [[0.25, 0.25, 0.5]] * 2)
    if name == "rows.parquet":
        expected = pd.read_parquet(table).iloc[[0, 2]].reset_index(drop=True)
        pd.testing.assert_frame_equal(pd.read_parquet(kept), expected)
    else:
        lines = [json.loads(line) for line in table.read_text().splitlines()]
        assert [json.loads(line) for line in kept.read_text().splitlines()] == [lines[0], lines[2]]


def test_cells_of_other_types_in_a_csv_file_and_in_a_view_that_swaps(tmp_path: Path) -> None:
    table, kept = tmp_path / "test.jsonl", tmp_path / "kept.csv"
    table.write_text(
        '{"id": 1, "a": "plain", "b": "other", "c": [1, "x"], "d": 1.5}\n{"id": 2, "a": "", "b": "é", "d": "t"}\n'
    )
    out = "id,winner_a,winner_b,tie\n1,0.1,0.2,0.7\n2,0.3,0.3,0.4\n"
    words = ["sh", "-c", f'cp "$1" "{kept}"; printf %s "$3" > "$2"', "sh", "{rows}", "{out}", out]
    swap = {"a": "b", "b": "a"}
    made = predictor(tmp_path, table, swap, command=words, format="csv")
    made.predict(np.array([0, 1]), lambda *counts: None)
    assert kept.read_text() == 'id,a,b,c,d\n1,other,plain,"[1, ""x""]",1.5\n2,é,,,"""t"""\n'


def test_bytes_need_parquet(tmp_path: Path) -> None:
    table = tmp_path / "test.parquet"
    pd.DataFrame({"id": ["r0"], "picture": [b"\xff"]}).to_parquet(table)
    made = predictor(tmp_path, table, command=prints(GOOD), format="csv")
    with pytest.raises(MemberError, match=r"column 'picture' holds bytes; set format: parquet"):
        made.predict(np.array([0]), lambda *counts: None)


def test_columns_of_other_names_and_rows_without_values(tmp_path: Path) -> None:
    text = "id,note,tie,W,L\nr0,n,,,\nr1,,0.4,0.3,0.3\n"
    prediction = predict(tmp_path, prints(text), rows=[0, 1], out_columns={"W": "winner_a", "L": "winner_b"})
    np.testing.assert_array_equal(prediction.values, [[np.nan] * 3, [0.3, 0.3, 0.4]])
    assert prediction.is_partial is False


WRONG = {
    "nothing": (shell("exit 0"), r"predictions.csv: no such file; let the command write the ids"),
    "empty": (shell(': > "$2"'), "the file is empty"),
    "lacks ids": (prints(GOOD[:-11]), r"1 id of {rows} missing \('r3'\); let the command write"),
    "other ids": (prints(f"{GOOD}r4,1,0,0\n"), r"1 id not in {rows} \('r4'\)"),
    "an id twice": (prints(f"{GOOD}r3,1,0,0\n"), r"1 id more than once \('r3'\); keep one row for each"),
    "lacks a label": (
        prints(GOOD.replace("tie", "Tie")),
        r"no column of the label 'tie' \(did you mean 'Tie'.*\(out_columns maps others",
    ),
    "text": (prints(GOOD.replace("0.7", "high")), "row 1: 'high' in column 'tie' is no number"),
    "half an id": (prints(GOOD.replace("r3,1,0,0", "r3")), "1 broken row; row 4 has 1 cell instead of 4"),
    "no id column": (prints(GOOD.replace("id,", "key,")), "no id column 'id'"),
    "exit code": (
        shell("echo so; echo long >&2; exit 3"),
        r"ended with exit code 3, with the last words: so \| long$",
    ),
    "no program": (["sh", "-c", 'exec ./nothing "$0" "$1"', "{rows}", "{out}"], "exit code 127"),
    "forks": (
        shell('(sleep 600; cp "$1" "$2") > /dev/null 2>&1 & exit 0'),
        "predictions.csv: no such file",
    ),
}


@pytest.mark.parametrize("what", one_in(3, WRONG))
def test_what_is_wrong_is_said_and_kept(tmp_path: Path, what: str) -> None:
    command, words = WRONG[what]
    with pytest.raises(MemberError, match=words):
        predict(tmp_path, command)
    (call,) = tmp_path.glob("work/cache/call-*")
    assert (call / "rows.csv").exists()
    assert call.name == f"call-{os.getpid()}"


def test_what_killed_workers_have_left_is_removed(tmp_path: Path) -> None:
    dead, alive = tmp_path / "work/cache/call-4194999", tmp_path / f"work/cache/call-{os.getppid()}"
    for folder in (dead, alive):
        folder.mkdir(parents=True)
    predict(tmp_path, prints(GOOD))
    assert [*tmp_path.glob("work/cache/*")] == [alive]


def test_a_fresh_worker_tries_what_a_signal_has_killed(tmp_path: Path) -> None:
    with pytest.raises(ChildProcessError, match=r"killed by signal 9 \(SIGKILL\)"):
        predict(tmp_path, shell("kill -9 $$"))


def test_a_command_is_ended_at_once_when_the_run_is_stopped(tmp_path: Path) -> None:
    steps = []
    script = f'echo $$ > "{tmp_path}/pid"; cp "$1" "$2"; exec sleep 600'
    made = predictor(tmp_path, write_table(tmp_path), command=shell(script))
    made.is_stopped = lambda: (tmp_path / "pid").exists() and bool((tmp_path / "pid").read_text())
    prediction = made.predict(np.array([0, 1]), lambda *counts: steps.append(counts))
    assert prediction.is_partial
    assert np.isnan(prediction.values).all()
    wait_until(lambda: is_gone(int((tmp_path / "pid").read_text())), "its end")


def test_a_call_that_is_always_killed_is_tried_again_whole_and_fails(project: Project) -> None:
    project.write_table(6)
    write(project, command=shell("echo >> tries; kill -9 $$"), retries=1, rows_per_call=3)
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 1
    assert (project.folder / "tries").read_text().count("\n") == 2
    assert "member mine failed: " in done.stderr
    assert "killed by signal 9 (SIGKILL)" in done.stderr


def inspected(**settings: Any) -> Any:
    return Command(CommandSettings(name="mine", **settings)).inspect(OutputColumns("id", tuple(LABELS)))


def test_programs_and_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        inspected(command=["no-such", "{row}", "{rows}", "{out}"], files=[tmp_path / "model"])
    assert caught.value.problems == (
        "command: the program no-such is not on the PATH; name an installed program, or its path",
        "command: {row} stands for nothing; did you mean {rows}?",
        f"files: {tmp_path}/model: no such file or folder",
    )
    with pytest.raises(CheckpointError, match=r"command: no-such.py: no such file; a relative path"):
        inspected(command=["python", "no-such.py", "{rows}", "{out}"])
    (tmp_path / "mine.sh").write_text("#!/bin/sh\n")
    with pytest.raises(CheckpointError, match=r"mine.sh is no file that may be executed"):
        inspected(command=[f"{tmp_path}/mine.sh", "{rows}", "{out}"])


def test_a_broken_python_is_named(tmp_path: Path) -> None:
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\necho no encodings >&2\nexit 3\n")
    python.chmod(0o755)
    with pytest.raises(CheckpointError, match=r"python3 does not tell what .*exit status 3. no encodings"):
        inspected(command=[str(python), "{rows}", "{out}"])


def test_keys_that_do_not_go_together(project: Project) -> None:
    project.write_table(4)
    wrong: dict[str, dict[str, Any]] = {
        "command (line": {"command": ["cat", "{rows}"]},
        "gpu_memory (line": {"gpu_memory": "1GiB", "num_gpus": 0},
        "replicas (line": {"replicas": 2},
        "out_columns (line": {"out_columns": {"tie": "winner_a"}},
        "out_columns.x (line": {"out_columns": {"x": "nobody"}},
    }
    models = [
        {"name": f"m{number}", "task_type": "command", "command": shell("exit 1"), **keys}
        for number, keys in enumerate(wrong.values())
    ]
    project.write_config(project.config(models=models, defaults=None, submission=None))
    done = project.ensemble("validate", "config.yaml")
    assert done.returncode == 2
    for place in wrong:
        assert place in done.stderr, done.stderr
    for words in (
        "does not say {out}, which stands for a path",
        "one call computes all rows; set rows_per_call",
        "none is left for the label 'tie'",
    ):
        assert words in done.stderr, done.stderr


SCRIPT = """
import sys
import pandas as pd
_, rows, out = sys.argv
frame = pd.read_csv(rows, dtype=str, keep_default_na=False)
with open("calls", "a") as file:
    file.write(" ".join(frame["id"]) + "\\n")
frame["winner_a"] = 1 / (1 + frame["text"].str.len())
frame["winner_b"] = frame["tie"] = (1 - frame["winner_a"]) / 2
frame.drop(columns="text").to_csv(out, index=False)
"""


def write(project: Project, **changes: Any) -> None:
    (project.folder / "infer.py").write_text(SCRIPT, encoding="utf-8")
    top = {key: changes.pop(key) for key in ("hang_timeout", "retries", "models") if key in changes}
    words = ["python", "infer.py", "{rows}", "{out}"]
    member = {"name": "mine", "task_type": "command", "command": words, **changes}
    config: Any = {"models": [member], "defaults": None, "submission": None, **top}
    project.write_config(project.config(**config))


def calls(project: Project) -> list[list[str]]:
    path = project.folder / "calls"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def of_calls(project: Project, start: int) -> set[str]:
    """The ids of all calls from this one on."""
    return {row_id for call in calls(project)[start:] for row_id in call}


def test_exactly_what_it_is_made_of_counts(project: Project, tmp_path: Path) -> None:
    project.write_table(12)
    package = tmp_path / "more/fake-1.dist-info/METADATA"
    package.parent.mkdir(parents=True)
    package.write_text("Metadata-Version: 2.1\nName: fake\nVersion: 1\n")
    model = project.folder / "a model"
    model.mkdir()
    (model / "weights").write_text("1")
    settings: dict[str, Any] = {"files": [str(model)]}
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "more"), os.environ.get("PYTHONPATH", "")])}

    def reason(**changes: Any) -> str:
        write(project, **{**settings, **changes})
        done = project.ensemble("run", "config.yaml", environment=environment)
        assert done.returncode == 0, done.stderr
        return next(
            (line for line in done.stdout.splitlines() if "earlier run" in line or "since" in line), ""
        )

    assert reason() == ""
    assert calls(project) == [project.ids]
    assert reason(rows_per_call=5, replicas=2).startswith("mine: done by")
    assert len(calls(project)) == 1
    (model / "weights").write_text("2")
    shutil.move(package.parent, package.parent.with_name("fake-2.dist-info"))
    (tmp_path / "more/fake-2.dist-info/METADATA").write_text("Name: fake\nVersion: 2\n")
    assert "fake of its Python, a model changed since" in reason()
    with (project.folder / "infer.py").open("a") as file:
        file.write("# another\n")
    done = project.ensemble("run", "config.yaml", environment=environment)
    assert "infer.py changed since" in done.stdout, done.stdout + done.stderr
    assert len(calls(project)) == 3


@pytest.mark.parametrize(("gpus", "device"), [(0, "cpu"), (1, "cuda")])
def test_it_sees_its_own_gpu_alone(project: Project, nvml_sim: NvmlSim, gpus: int, device: str) -> None:
    project.write_table(4)
    nvml_sim.write([Gpu(gpu_uuid(number), memory=Memory(8 * GIB, GIB)) for number in range(2)])
    script = 'echo "$CUDA_VISIBLE_DEVICES" > "seen $3"; exec python infer.py "$1" "$2"'
    write(project, command=[*shell(script), "{device}"], num_gpus=gpus)
    done = project.ensemble("run", "config.yaml", environment=nvml_sim.environment())
    assert done.returncode == 0, done.stderr
    seen = (project.folder / f"seen {device}").read_text().strip()
    assert seen in [gpu_uuid(number) for number in range(2)] if gpus else seen == ""


def test_versions_are_asked_once_until_something_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    asked = tmp_path / "asked"
    program = tmp_path / "python3"
    program.write_text(f'#!/bin/sh\necho >> {asked}\nexec {sys.executable} "$@"\n')
    program.chmod(0o755)
    versions = interpreter.installed_for(str(program))
    assert versions["numpy"] == np.__version__
    assert versions["Python"] == ".".join(map(str, sys.version_info[:3]))
    interpreter.installed_for(str(program))
    before = len(asked.read_text().splitlines())
    (tmp_path / "fake-1.dist-info").mkdir()
    (tmp_path / "fake-1.dist-info/METADATA").write_text("Name: fake\nVersion: 1\n")
    assert interpreter.installed_for(str(program))["fake"] == "1"
    assert len(asked.read_text().splitlines()) == before + 1


# What is killed, when so many calls have begun.
MOMENTS = [(("the run", "its worker", "its script")[number % 3], 1 + number) for number in range(10)]


@pytest.mark.parametrize(("what", "begun"), one_in(10, MOMENTS))
def test_a_kill_costs_no_call_that_has_ended(project: Project, what: str, begun: int) -> None:
    """The run is killed at last in any case; then another goes on."""
    project.write_table(60)
    slow = SCRIPT + "import time\ntime.sleep(0.3)\n"
    write(project, rows_per_call=5)
    (project.folder / "infer.py").write_text(slow)
    with project.start("run", "config.yaml", start_new_session=True) as run:
        wait_until(lambda: len(calls(project)) >= begun, "the call")
        shards, before = done_rows(project), calls(project)
        if what != "the run":
            word = "infer.py" if what == "its script" else "ensemble.worker"
            for pid in pids(word, project):
                os.kill(pid, signal.SIGKILL)
            wait_until(
                lambda: len(calls(project)) > len(before) + 1 or run.poll() is not None, "further calls"
            )
            assert not of_calls(project, len(before)) & {project.ids[row] for row in shards}
            shards, before = done_rows(project), calls(project)
        run.kill()
    wait_until(lambda: not pids("infer.py", project), "the end of the script")
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stderr
    assert not of_calls(project, len(before)) & {project.ids[row] for row in shards}
    expected = 1 / (1 + np.array([len(text) for text in project.texts]))
    np.testing.assert_array_equal(project.values("runs/first/predictions/mine.csv")[:, 0], expected)
    assert not [*project.folder.glob("runs/first/work/*")]


def done_rows(project: Project) -> set[int]:
    shards = project.folder.glob("runs/first/work/mine.*/*.csv")
    return {int(line.split(",")[0]) for shard in shards for line in shard.read_text().splitlines()[1:]}


def pids(word: str, project: Project) -> list[int]:
    """The processes in the project's folder with this word in their command."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cwd").readlink() == project.folder.resolve():
                command = (folder / "cmdline").read_bytes().decode().split("\0")
                if any(word in part for part in command[:4]):
                    found.append(int(folder.name))
        except OSError:
            continue
    return found


@pytest.mark.long
def test_output_and_its_file_are_signs_of_life_and_silence_is_none(project: Project) -> None:
    project.write_table(3)
    speaks = ["sh", "-c", 'for i in 1 2 3 4 5 6; do echo $i; sleep 1; done; printf "$3" > "$2"', "sh"]
    writes = ["sh", "-c", 'for i in 1 2 3 4 5 6; do echo >> "$2"; sleep 1; done; printf "$3" > "$2"', "sh"]
    hangs = ["sh", "-c", "sleep 600", "sh"]
    text = "id,winner_a,winner_b,tie\\n" + "".join(f"{row_id},1,0,0\\n" for row_id in project.ids)
    models = [
        {"name": name, "task_type": "command", "command": [*words, "{rows}", "{out}", text]}
        for name, words in {"speaks": speaks, "writes": writes, "hangs": hangs}.items()
    ]
    write(project, models=models, hang_timeout="5s", retries=0)
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 1
    statuses = {member["name"]: member["status"] for member in project.run_json()["members"]}
    assert statuses == {"speaks": "complete", "writes": "complete", "hangs": "failed"}, done.stdout
