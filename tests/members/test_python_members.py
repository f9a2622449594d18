"""Functions of the user's own as members: what is told of them before they run, and runs of good and bad ones."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ensemble.common.errors import CheckpointError
from ensemble.common.protocol import (
    ChunkDone,
    ChunkFailed,
    CommonSpec,
    Event,
    Failed,
    Finish,
    Load,
    Predict,
    Start,
    Stop,
    WorkerSpec,
)
from ensemble.members.base import OutputColumns
from ensemble.members.python.parent import PythonFunction, PythonSettings, find_source
from ensemble.worker.channel import HeartbeatThread
from ensemble.worker.session import serve
from tests.faults.test_workers import is_gone
from tests.nvml.sim import GIB, Gpu, Memory, NvmlSim, gpu_uuid
from tests.project import LABELS, ROOT, Project, python_path
from tests.sampling import one_in
from tests.waiting import wait_until
from tests.worker.test_session import publish

pytestmark = pytest.mark.usefixtures("warm")
COLUMNS = OutputColumns("id", tuple(LABELS))

# Probabilities by the length of the text; awkward rows are told by what stands in their text.
GOOD = """
import numpy as np

def predict(frame, context):
    lengths = frame["text"].str.len().to_numpy(dtype=float)
    values = np.stack([lengths, lengths + 1, lengths * 0 + 3], axis=1)
    return values / values.sum(axis=1, keepdims=True)
"""


def member(folder: Path, **changes: Any) -> dict[str, Any]:
    settings = {"name": "mine", "task_type": "python", "predict": f"{folder}/mine.py:predict"}
    return {**settings, "columns": ["text"], **changes}


def write(project: Project, code: str, **changes: Any) -> None:
    (project.folder / "mine.py").write_text(code, encoding="utf-8")
    top = {
        key: changes.pop(key) for key in ("data", "on_bad_row", "retries", "hang_timeout") if key in changes
    }
    models = [member(project.folder, **changes)]
    project.write_config(project.config(models=models, defaults=None, submission=None, **top))


def values(project: Project) -> tuple[list[str], np.ndarray]:
    _, rows = project.read("runs/first/predictions/mine.csv")
    return [row[0] for row in rows], np.array([row[1:] for row in rows], dtype=float)


def expected(texts: list[str]) -> np.ndarray:
    lengths = np.array([len(text) for text in texts], dtype=float)
    result = np.stack([lengths, lengths + 1, lengths * 0 + 3], axis=1)
    return np.asarray(result / result.sum(axis=1, keepdims=True))


def refused(**settings: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        PythonFunction(PythonSettings(**settings)).inspect(COLUMNS)
    return "\n".join(caught.value.problems)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def perdict(frame, context): ...", "defines no predict (did you mean 'perdict'?)"),
        ("def predict(frame, context)\n    ...", "mine.py, line 1: expected ':'"),
        ("\0", "mine.py: source code string cannot contain null bytes"),
    ],
)
def test_what_cannot_be_called_is_named_without_running_it(tmp_path: Path, code: str, words: str) -> None:
    (tmp_path / "mine.py").write_text(code + "\n")
    assert words in refused(**member(tmp_path))


@pytest.mark.parametrize(
    "code",
    [
        "def predict(frame, context, more=1): ...",
        "def predict(*args): ...",
        "predict = print",
        "from somewhere import *",
        "try:\n    from a import predict\nexcept ImportError:\n    predict = None",
        "if True:\n    def predict(frame, context): ...",
        "@decorated\ndef predict(frame): ...",
        "raise SystemExit('this is not run')\ndef predict(frame, context): ...",
    ],
)
def test_what_only_running_could_tell_is_let_through(tmp_path: Path, code: str) -> None:
    (tmp_path / "mine.py").write_text(code + "\n")
    inspected = PythonFunction(PythonSettings(**member(tmp_path))).inspect(COLUMNS)
    assert inspected.summary.startswith("predict of ")


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    assert f"predict: {tmp_path}/mine.py: no such file" in refused(**member(tmp_path))
    assert "no module nowhere.at_all is installed" in refused(
        **member(tmp_path, predict="nowhere.at_all:predict")
    )
    (tmp_path / "mine.py").write_text("import random\n" + GOOD)
    (tmp_path / "random.py").write_text("")
    missing = {"depends_on": [tmp_path / "words.txt"], "model": tmp_path / "model.joblib"}
    message = refused(**member(tmp_path, setup="prepare", **missing))
    assert f"depends_on: {tmp_path}/words.txt: no such file or folder" in message
    assert f"model: {tmp_path}/model.joblib: no such file or folder" in message
    assert "mine.py defines no prepare" in message
    assert "random, beside " in message, "the standard library's would be imported"


def test_what_counts_as_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "mine.py": "import os, helper, package.deep.one\nfrom package import other, name\nimport numpy",
        "helper.py": "def late():\n    from package2 import nothing\n    import mine",
        "unused.py": "",
        "package/__init__.py": "from .relative import x",
        "package/relative.py": "this is no Python",
        "package/other.py": "from . import sibling",
        "package/sibling.py": "",
        "package/deep/one.py": "from .. import upper",
        "package/deep/unused.py": "",
        "package/upper.py": "",
        "package2/__init__.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    used = {name for name in files if "unused" not in name and name != "package/relative.py"}

    def code(module: str, is_file: bool) -> set[str]:
        return {str(path.relative_to(tmp_path)) for path in find_source(module, is_file).files}

    assert code(f"{tmp_path}/mine.py", True) == used
    monkeypatch.syspath_prepend(tmp_path)
    assert code("mine", False) == used
    others = {"mine.py", "helper.py", "package2/__init__.py", "package/other.py", "package/sibling.py"}
    assert code("package.deep.one", False) == used - others
    assert "package" not in __import__("sys").modules
    jinja2 = find_source("jinja2.environment", False)
    assert jinja2.package == "jinja2"
    assert {path.relative_to(jinja2.root).parts[0] for path in jinja2.files} == {"jinja2"}


def test_keys(project: Project) -> None:
    for changes, words in (
        ({"predict": "mine.py"}, ": must be package.module:function"),
        ({"predict": "a-b:predict"}, ": must be package.module:function"),
        ({"setup": "a.b"}, ": must be the name of a function"),
        ({"columns": []}, ": must be a list of columns of the table"),
        ({"columns": ["txt"]}, "no text column 'txt' (did you mean 'text'?), which models[0] (mine) reads"),
        ({"num_gpus": 1}, "mine asks for 1 GPU, but 0 GPUs can be used here"),
    ):
        write(project, GOOD, **changes)
        done = project.ensemble("validate", "config.yaml")
        assert (done.returncode, words in done.stderr) == (2, True), done.stderr


@pytest.mark.fresh
def test_a_module_by_its_name_and_no_library_that_it_does_not_import(
    project: Project, tmp_path: Path
) -> None:
    (tmp_path / "site" / "theirs").mkdir(parents=True)
    (tmp_path / "site" / "theirs" / "code.py").write_text(
        GOOD + "\n\ndef prepare(context):\n    import sys\n"
        "    print('heavy:', {'torch', 'transformers', 'sklearn'} & set(sys.modules))\n"
        "    import subprocess\n    print('left', subprocess.Popen(['/bin/sleep', '60']).pid, 'behind')\n"
    )
    write(project, "", predict="theirs.code:predict", setup="prepare", replicas=2)
    environment = {"PYTHONPATH": python_path(ROOT, tmp_path / "site")}
    done = project.ensemble("run", "config.yaml", environment=environment)
    assert done.returncode == 0, done.stderr + done.stdout
    ids, result = values(project)
    assert ids == project.ids
    np.testing.assert_allclose(result, expected(project.texts), rtol=1e-12)
    printed = log(project)
    assert "heavy: set()" in printed
    for left in re.findall("left (.*) behind", printed):
        state = Path(f"/proc/{left}/status")
        assert not state.exists() or "State:\tZ" in state.read_text(), "a process outlives its worker"
    assert "torch" not in project.run_json()["versions"]
    assert not list(tmp_path.rglob("__pycache__")), "nothing is written beside the user's files"


def log(project: Project) -> str:
    return "".join(path.read_text() for path in sorted((project.folder / "runs/first/logs").glob("mine*")))


def test_what_a_function_gets_and_what_it_may_do(project: Project, tmp_path: Path) -> None:
    """Types do not depend on the chunk; output, threads, environment and working directory are its own."""
    rows = 40
    columns = {
        "id": [f"é{row}" for row in range(rows)],
        "text": ["x" * (row % 5) if row else None for row in range(rows)],
        "count": pa.array([None, *range(1, rows)], pa.int64()),
        "whole": pa.array(range(rows), pa.int8()),
        "turns": [[str(row), None] for row in range(rows)],
        "label": [LABELS[row % 3] for row in range(rows)],
    }
    pq.write_table(pa.table(columns), project.folder / "test.parquet")
    (project.folder / "helper.py").write_text("THREE = 3\n")
    code = """
import os, sys, threading, time
import pandas as pd
import helper

def prepare(context):
    print("set up", os.getpid(), context.device, context.gpus, context.labels, context.kwargs)
    context.cache_dir.joinpath("kept").write_text("x")
    os.environ.clear()
    os.chdir("/")
    threading.Thread(target=time.sleep, args=(600,)).start()
    assert sys.stdin.read() == ""
    return {"three": helper.THREE}

def predict(frame, context):
    print("types", [str(one) for one in frame.dtypes], frame.index.name, len(frame))
    sys.stdout.write("{}\\n")
    assert [int(one[1:]) for one in frame.index] == frame["whole"].tolist()
    assert all(turns == [str(row), None] for turns, row in zip(frame["turns"], frame["whole"]))
    lengths = frame.pop("text").map(len)
    context.report(len(frame))
    total = 2 * lengths + 1 + context.state["three"]
    found = {"tie": 3 / total, "winner_b": (lengths + 1) / total, "winner_a": lengths / total, "more": 0}
    return pd.DataFrame(found).sort_index()
"""
    asked = {"columns": ["text", "count", "whole", "turns"], "kwargs": {"a": [1, {"b": None}]}}
    data = {"path": "test.parquet", "label_column": "label"}
    write(project, code, setup="prepare", batch_size=16, data=data, **asked)
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stderr + log(project)
    ids, result = values(project)
    assert ids == columns["id"]
    np.testing.assert_allclose(result, expected([text or "" for text in columns["text"]]), rtol=1e-12)
    assert re.search("mine: 40/40 rows, [0-9,.]+ rows/s", done.stdout)
    assert "tokens" not in done.stdout
    assert re.search("member +rows +seconds +rows/s +memory", done.stdout), done.stdout
    assert re.search("mine +done +40 +40 +100% +[0-9,.]+ ", project.ensemble("status", "runs/first").stdout)
    assert "1 empty cell in 'count'\n" in done.stdout
    assert project.ensemble("report", "runs/first").returncode == 0
    page = (project.folder / "runs/first/report.html").read_text()
    assert "rows/s" in page
    assert "tokens" not in page
    printed = log(project)
    (setup,) = re.findall("set up .*", printed)
    assert setup.endswith("cpu 0 ('winner_a', 'winner_b', 'tie') {'a': [1, {'b': None}]}")
    types = "['object', 'float64', 'int64', 'object'] id"
    assert re.findall("types (.*)", printed) == [f"{types} 16", f"{types} 16", f"{types} 8"]
    assert not list((project.folder / "runs/first").rglob("kept")), "the cache goes when it is done"


@pytest.mark.long
def test_each_replica_has_a_gpu_of_its_own(project: Project, nvml_sim: NvmlSim) -> None:
    nvml_sim.write([Gpu(gpu_uuid(index), memory=Memory(15 * GIB)) for index in range(2)])
    code = GOOD + (
        "\n\ndef prepare(context):\n    import os\n"
        "    print('on', context.device, context.gpus, os.environ['CUDA_VISIBLE_DEVICES'])\n"
    )
    write(project, code, setup="prepare", num_gpus=1)
    rows = [[f"r{row}", "x" * 30_000, LABELS[0]] for row in range(64)]
    project.write_csv("test.csv", ["id", "text", "label"], rows)
    done = project.ensemble("run", "config.yaml", environment=nvml_sim.environment())
    assert done.returncode == 0, done.stderr + done.stdout
    result = sorted(re.findall("on (cuda.*)", log(project)))
    assert result == [f"cuda:0 1 {gpu_uuid(index)}" for index in range(2)]
    np.testing.assert_allclose(values(project)[1], expected(["x" * 30_000] * 64), rtol=1e-12)


@pytest.mark.long
def test_members_share_a_gpu_by_the_memory_that_they_say(project: Project, nvml_sim: NvmlSim) -> None:
    """Two of 4 GiB each meet on a GPU of two places; one that says nothing is there alone."""
    nvml_sim.write([Gpu(gpu_uuid(0), memory=Memory(15 * GIB))])
    (project.folder / "mine.py").write_text(
        "import os, pathlib, time\n"
        + GOOD
        + """

def meet(context):
    here = pathlib.Path(__file__).parent
    (here / context.kwargs["me"]).write_text(str(os.getpid()))
    began = time.monotonic()
    while not (here / context.kwargs["other"]).exists():
        if time.monotonic() - began > 100:
            raise TimeoutError("the other is not there")
        time.sleep(0.05)

def be_alone(context):
    for name in "ab":
        pid = (pathlib.Path(__file__).parent / name).read_text()
        assert not pathlib.Path("/proc", pid).exists(), f"{name} still runs"
"""
    )
    shared = {"setup": "meet", "num_gpus": 1, "gpu_memory": "4GiB"}
    models = [
        member(project.folder, name="a", kwargs={"me": "a", "other": "b"}, **shared),
        member(project.folder, name="b", kwargs={"me": "b", "other": "a"}, **shared),
        member(project.folder, name="alone", num_gpus=1, setup="be_alone"),
    ]
    config = project.config(models=models, defaults=None, submission=None, max_workers_per_gpu=2)
    project.write_config(config)
    environment = nvml_sim.environment()
    planned = project.ensemble("plan", "config.yaml", environment=environment)
    assert planned.returncode == 0, planned.stderr
    text = " ".join(planned.stdout.split())
    assert "a: 1 replica on GPU 0; it takes 4.0 GiB of each of its GPUs: 1 of 2 places there" in text
    assert "alone: 1 replica on GPU 0; it has its GPUs to itself, since gpu_memory does not say" in text
    done = project.ensemble("run", "config.yaml", environment=environment)
    assert done.returncode == 0, done.stderr + done.stdout
    config["models"][0] |= {"gpu_memory": "20GiB"}
    config["models"][1] |= {"num_gpus": 0}
    project.write_config(config)
    done = project.ensemble("validate", "config.yaml", environment=environment)
    assert "gpu_memory (line" in done.stderr, done.stderr
    assert "without num_gpus it runs on the CPU; set num_gpus: 1" in done.stderr
    config["models"][1] |= {"num_gpus": 1}
    project.write_config(config)
    done = project.ensemble("validate", "config.yaml", environment=environment)
    assert "gpu_memory: a asks for 20.0 GiB of 1 GPU" in done.stderr


def test_exactly_what_it_is_made_of_counts(project: Project) -> None:
    for name in ("helper.py", "unused.py", "model.bin"):
        (project.folder / name).write_text("# 1\n")
    settings = {"depends_on": [str(project.folder / "model.bin")], "kwargs": {"a": 1}}
    code = "import helper\n" + GOOD

    def reason(code: str = code, **changes: Any) -> str:
        write(project, code, **{**settings, **changes})
        done = project.ensemble("run", "config.yaml")
        assert done.returncode == 0, done.stderr
        return next(
            (line for line in done.stdout.splitlines() if "earlier run" in line or "since" in line), ""
        )

    assert reason() == ""
    (project.folder / "unused.py").write_text("# 2\n")
    assert reason(batch_size=7, replicas=2).startswith("mine: done by")
    (project.folder / "helper.py").write_text("# 2\n")
    assert "code changed since" in reason()
    (project.folder / "model.bin").write_text("# 2\n")
    assert "files changed since" in reason()
    assert "kwargs changed since" in reason(kwargs={"a": 2})


# What it does, by the text of a row; what is said; how many rows are lost.
BY_ID = """
import numpy as np

def predict(frame, context):
    values = np.array([[int(row_id) % 97 + 1.0, 1.0, 1.0] for row_id in frame.index])
    return values / values.sum(axis=1, keepdims=True)
"""


def test_a_row_is_never_given_the_value_of_another_id(project: Project) -> None:
    """A function may read the ids, so that rows of equal cells are not the same row."""
    project.write_table(60)
    rows = [[row_id, "the same", label] for row_id, label in zip(project.ids, project.truth, strict=True)]
    project.write_csv("test.csv", ["id", "text", "label"], rows)
    write(project, BY_ID)
    assert project.ensemble("run", "config.yaml", "--limit", "2", "-q").returncode == 0
    assert project.ensemble("run", "config.yaml", "-q").returncode == 0
    ids, of_rows = values(project)
    ratios = [int(row_id) % 97 + 1 for row_id in project.ids]
    assert ids == project.ids
    np.testing.assert_allclose(of_rows[:, 0] / of_rows[:, 1], ratios)
    assert project.run_json()["members"][0]["taken_over"] == {"predictions/mine.csv": 2}


FAULTS = {
    "raises": ("raise LookupError('odd row')", "odd row"),
    "exits": ("sys.exit(3)", "SystemExit: 3"),
    "leaves": ("os._exit(0)", "exit code 0"),
    "crashes": ("ctypes.string_at(0)", "SIGSEGV"),
    "reads": ("input()", "EOF when reading a line"),
    "drops": ("return values[:-1]", "shape"),
    "nan": ("values[[place]] = np.nan", "NaN"),
    "sums": ("values[[place]] = 0.9", "not as probabilities"),
}


@pytest.mark.parametrize("fault", one_in(3, FAULTS))
def test_a_row_that_it_does_not_bear_is_found(project: Project, fault: str) -> None:
    deed, words = FAULTS[fault]
    code = GOOD.replace("    return values / values.sum(axis=1, keepdims=True)\n", "")
    code = (
        "import ctypes, os, sys\n"
        + code
        + (
            "    values /= values.sum(axis=1, keepdims=True)\n"
            "    for place in np.flatnonzero(frame['text'] == 'odd'):\n"
            f"        {deed}\n"
            "    return values\n"
        )
    )
    texts = ["odd" if row == 5 else "x" * row for row in range(8)]
    rows = [[f"r{row}", text, LABELS[0]] for row, text in enumerate(texts)]
    project.write_csv("test.csv", ["id", "text", "label"], rows)
    write(project, code, retries=0, on_bad_row="uniform")
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stderr + done.stdout
    assert words in done.stdout
    _, result = values(project)
    correct = expected(texts)
    correct[5] = 1 / 3
    np.testing.assert_allclose(result, correct, rtol=1e-12)
    assert list(project.run_json()["members"][0]["bad_rows"]) == ["5"]


FAILING = {
    "itself": ("def predict(frame, context):\n    return frame['score']", "'score' (mine.py, line 2)"),
    "helper": (
        "import helper\n\ndef predict(frame, context):\n    return helper.of(frame)",
        "'score' (helper.py, line 2)",
    ),
    "setup": (
        "def setup(context):\n    open('none.bin')\n\ndef predict(frame, context): ...",
        "No such file or directory: 'none.bin' (mine.py, line 2)",
    ),
    "import": ("import math\nmath.sqrt(-1)\n\ndef predict(frame, context): ...", "(mine.py, line 2)"),
}


def in_this_process(
    folder: Path,
    code: str,
    texts: list[str],
    batch_size: int | None = None,
    setup: str | None = None,
    is_stopped: bool = False,
) -> list[Event]:
    """The events of a worker of the function in ``code`` that is told to compute these texts as one chunk.

    Args:
        is_stopped: the run is, before the worker has begun with the chunk.
    """
    file = folder / "mine.py"
    file.write_text(code + "\n", encoding="utf-8")
    places: dict[str, Any] = {**publish(folder / "table", {"text": texts})}
    ids = pa.field("ids", pa.string(), metadata={"ensemble": "ids"})
    schema = pa.schema([pa.field("text", pa.string()), ids], {"ensemble.rows": str(len(texts))})
    with pa.ipc.new_file(places["table_path"], schema) as table:
        table.write_table(pa.table([texts, [f"r{row}" for row in range(len(texts))]], schema=schema))
    common = CommonSpec(labels=tuple(LABELS), activation="none", gpus=0, seed=0, **places)
    settings: dict[str, Any] = {
        **{"module": "mine", "file": str(file), "function": "predict", "batch_size": batch_size},
        **{"setup": setup, "model": None, "kwargs": {}, "columns": ["text"], "id_column": "id"},
    }
    start = Start(WorkerSpec(common, "ensemble.members.python.child", settings))
    events: list[Event] = []
    heartbeat = HeartbeatThread(events.append)  # not started
    heartbeat.is_stopped = is_stopped
    end = Finish() if is_stopped else Stop()
    serve([start, Load(), Predict(0, 0, len(texts)), end], events.append, heartbeat, 0.0)
    return events


def test_a_stopped_run_keeps_the_calls_that_are_done(tmp_path: Path) -> None:
    texts = ["x" * length for length in range(1, 9)]
    events = in_this_process(tmp_path, GOOD, texts, batch_size=3, is_stopped=True)
    (done,) = [event for event in events if isinstance(event, ChunkDone)]
    assert (done.counters.rows, done.counters.bad_rows, done.bad_rows) == (3, 0, ())
    assert done.shard.startswith("000000000-000000003."), "by which status counts rows"
    shard = np.loadtxt(tmp_path / "table/shards" / done.shard, delimiter=",", skiprows=1)
    np.testing.assert_array_equal(shard[:, 0], range(3))
    np.testing.assert_allclose(shard[:, 1:], expected(texts[:3]), rtol=1e-12)


@pytest.mark.parametrize("place", FAILING)
def test_an_error_names_the_file_and_line_of_the_users_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    code, words = FAILING[place]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "dont_write_bytecode", sys.dont_write_bytecode)
    monkeypatch.delitem(sys.modules, "helper", raising=False)
    Path("helper.py").write_text("def of(frame):\n    return frame['score']\n", encoding="utf-8")
    events = in_this_process(tmp_path, code, ["x"], setup="setup" if place == "setup" else None)
    sys.modules.pop("helper", None)
    (failed,) = [event for event in events if isinstance(event, Failed | ChunkFailed)]
    assert failed.message.endswith(words)


@pytest.mark.parametrize("changed", one_in(3, ["mine.py", "helper.py", "model.bin"]))
def test_what_changes_during_the_run_stops_its_member(project: Project, changed: str) -> None:
    """And the next run makes all predictions anew."""
    for name in ("helper.py", "model.bin"):
        (project.folder / name).write_text("# 1\n")
    code = "import pathlib, helper\n" + GOOD.replace(
        "    return",
        "    here = pathlib.Path(__file__).parent\n"
        "    if not (here / 'was changed').exists():\n        (here / 'was changed').touch()\n"
        f"        with (here / {changed!r}).open('a') as file:\n            file.write('# 2\\n')\n    return",
    )
    write(project, code, depends_on=[str(project.folder / "model.bin")])
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 1, done.stdout
    assert "changed during the run" in done.stderr
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stderr + done.stdout
    np.testing.assert_allclose(values(project)[1], expected(project.texts), rtol=1e-12)
    assert project.run_json()["members"][0]["counters"]["rows"] == len(project.ids)


@pytest.mark.long
@pytest.mark.fault(26)
def test_a_time_limit_keeps_what_a_first_run_computed(project: Project) -> None:
    """Of a member of unknown speed that has computed 81 of 200 rows when the time is over."""
    project.write_csv(
        "test.csv", ["id", "text", "label"], [[f"r{row}", "x", LABELS[0]] for row in range(200)]
    )
    code = "import itertools, time\n\nCALLS = itertools.count(1)\n" + GOOD.replace(
        "    lengths =",
        "    while next(CALLS) > 81:\n        time.sleep(0.1)\n        context.report(0)\n    lengths =",
    )
    write(project, code, batch_size=1)
    done = project.ensemble("run", "config.yaml", "--set", "time_limit=30s")
    assert done.returncode == 4, done.stderr + done.stdout
    report = project.run_json()
    (result,) = report["members"]
    assert (result["counters"]["rows"], report["merged_rows"], report["filled_rows"]) == (
        48,
        {"mine": 48},
        152,
    )
    assert result["lost_rows"] == 33
    text = " ".join(done.stderr.split())
    assert "mine 48 of 200 rows (at least 33 more rows were computed, but lost: the limit ended" in text
    assert "no new row was kept" not in text
    assert result["speed"]["seconds_per_work"] > 0
    (project.folder / "mine.py").write_text(GOOD)
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stderr + done.stdout


@pytest.mark.long
def test_what_a_time_limit_leaves_is_resumed_to_the_same_bytes(project: Project) -> None:
    """By two replicas, after one that was in the middle of a call."""
    texts = ["x" * (30_000 + row) for row in range(64)]
    rows = [[f"r{row}", text, LABELS[0]] for row, text in enumerate(texts)]
    project.write_csv("test.csv", ["id", "text", "label"], rows)
    code = "import pathlib, time\n" + GOOD.replace(
        "    return",
        "    first = 'r63' in frame.index\n"
        "    while not (first or (pathlib.Path(__file__).parent / 'go').exists()):\n"
        "        time.sleep(0.1)\n        context.report(0)\n    return",
    )
    write(project, code)
    (project.folder / "whole.py").write_text(GOOD)
    config = project.config(models=[], defaults=None, submission=None)
    whole = member(project.folder, name="whole", predict=f"{project.folder}/whole.py:predict")
    config["models"] = [whole, member(project.folder)]
    project.write_config(config)
    done = project.ensemble("run", "config.yaml", "--set", "time_limit=30s")
    assert done.returncode == 4, done.stderr + done.stdout
    assert project.run_json()["status"] == "time_limit"
    reached = project.run_json()["members"][1]["rows_done"]
    assert 0 < reached < 64
    (project.folder / "go").touch()
    done = project.ensemble("run", "config.yaml", "--set", "models.mine.replicas=2")
    assert done.returncode == 0, done.stderr + done.stdout
    (report,) = (item for item in project.run_json()["members"] if item["name"] == "mine")
    assert report["reused_rows"] == reached
    resumed = (project.folder / "runs/first/predictions/mine.csv").read_bytes()
    np.testing.assert_allclose(values(project)[1], expected(texts), rtol=1e-12)
    done = project.ensemble("run", "config.yaml", "--fresh")
    assert done.returncode == 0, done.stderr + done.stdout
    assert (project.folder / "runs/first/predictions/mine.csv").read_bytes() == resumed


def test_calls_that_run_out_of_torchs_memory_are_halved(project: Project) -> None:
    """A GPU's error by its type, a CPU's as torch itself raises it."""
    code = "import torch\n" + GOOD.replace(
        "    lengths =",
        "    print('rows', len(frame))\n"
        "    if frame['text'].str.startswith('odd').any():\n"
        "        raise torch.OutOfMemoryError('CUDA out of memory')\n"
        "    if len(frame) > 5:\n        torch.empty(1 << 50, dtype=torch.uint8)\n    lengths =",
    )
    texts = [("odd" if row == 9 else "") + "x" * (row + 4) for row in range(32)]
    rows = [[f"r{row}", text, LABELS[0]] for row, text in enumerate(texts)]
    project.write_csv("test.csv", ["id", "text", "label"], rows)
    write(project, code, on_bad_row="uniform")
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stderr + done.stdout
    correct = expected(texts)
    correct[9] = 1 / 3
    np.testing.assert_allclose(values(project)[1], correct, rtol=1e-12)
    (report,) = project.run_json()["members"]
    assert list(report["bad_rows"]) == ["9"]
    assert "out of memory with this row alone: CUDA out of memory" in report["bad_rows"]["9"]
    assert len(report["workers"]) == 1, "in the same process"
    assert "ran out of memory and ran again in halves; a lower batch_size avoids this" in done.stdout
    sizes = [int(item) for item in re.findall("rows (.*)", log(project))]
    assert sizes[:4] == [32, 16, 8, 4]
    assert max(sizes[3:]) == sizes[-2] == 4


@pytest.mark.parametrize(
    ("code", "words"),
    one_in(
        2,
        [
            (
                GOOD.replace("[lengths, lengths + 1, lengths * 0 + 3]", "[lengths, lengths + 1]"),
                "of shape (300, 2)",
            ),
            (
                "def predict(frame, context): ...",
                "failed: its function returned NoneType; return probabilities",
            ),
            ("def predict(frame, context): return 'abc'", "its function returned str"),
            (
                "def predict(frame, context): return frame",
                "frame without columns for winner_a, winner_b, tie",
            ),
            (
                "def predict(frame, context): return [0.5] * len(frame)",
                "of shape (300,) for 300 rows and 3 labels",
            ),
            ("import nothing_of_that_name\n" + GOOD, "No module named 'nothing_of_that_name'"),
            ("predict = 5", "predict must be a function of "),
            (
                "def predict(frame): ...",
                "predict: predict is called with the frame and the context: too many",
            ),
            (GOOD + "raise SystemExit('no licence')", "no licence"),
        ],
    ),
)
def test_what_is_wrong_for_all_rows_fails_the_member_at_once(project: Project, code: str, words: str) -> None:
    write(project, code, retries=0)
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 1, done.stdout
    assert words in done.stderr + done.stdout
    faults = project.run_json()["members"][0]["faults"]
    assert [fault["remedy"] for fault in faults] == ["given up"], faults


@pytest.mark.long
def test_a_call_that_never_ends_is_a_hang_unless_it_reports(project: Project) -> None:
    code = "import time\n" + GOOD.replace(
        "    return", "    for _ in range(8):\n        time.sleep(1)\n        {}\n    return"
    )
    trial = ("run", "config.yaml", "--limit", "1")
    write(project, code.replace("{}", "context.report(1)"), hang_timeout=5)
    done = project.ensemble(*trial)
    assert done.returncode == 0, done.stderr + done.stdout
    write(project, code.replace("{}", "pass"), hang_timeout=5, retries=0)
    done = project.ensemble(*trial)
    assert done.returncode == 1
    assert project.run_json()["members"][0]["faults"][0]["kind"] == "hang"


DETACHED = """
import os
import subprocess
import time
from pathlib import Path


def setup(context):
    for number, end in enumerate(("", " &")):  # a session of its own, and a daemon of it
        file = context.kwargs["folder"] + f"/{os.getpid()}-{number}.pid"
        shell = f"sleep 6000 & echo $! > '{file}.new'; mv '{file}.new' '{file}'" + ("" if end else "; wait")
        subprocess.Popen(["sh", "-c", shell], start_new_session=True)
    while len([*Path(context.kwargs["folder"]).glob(f"{os.getpid()}-*.pid")]) < 2:
        time.sleep(0.01)


def predict(frame, context):
    {}
    return [[0.2, 0.3, 0.5]] * len(frame)
"""


@pytest.mark.parametrize(
    ("body", "code"),
    one_in(3, [("pass", 0), ("os.kill(os.getpid(), 11)", 1), ("time.sleep(600)", 1)]),
    ids=["ends", "crashes", "hangs"],
)
def test_what_it_starts_in_sessions_of_its_own_ends_with_it(
    project: Project, tmp_path: Path, body: str, code: int
) -> None:
    folder = tmp_path / "started"
    folder.mkdir()
    settings = {"setup": "setup", "kwargs": {"folder": str(folder)}, "retries": 0, "hang_timeout": 5}
    write(project, DETACHED.replace("{}", body), **settings)
    other = subprocess.Popen(["sleep", "600"], start_new_session=True)  # such as a notebook's own
    try:
        done = project.ensemble("run", "config.yaml")
        assert done.returncode == code, done.stdout + done.stderr
        pids = [int(file.read_text()) for file in folder.glob("*.pid")]
        assert len(pids) >= 2
        wait_until(lambda: all(map(is_gone, pids)), "the end of what the worker has started")
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
