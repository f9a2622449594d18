"""``import ensemble``: what the commands do, as functions, in processes of which nothing may be left changed."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import ensemble
from tests.cli.reports import member, report
from tests.faults.chunky import chunky_config, ids_of, write_chunky_table
from tests.faults.inject import Fault, Injected
from tests.project import LABELS, ROOT, Project, python_path
from tests.sampling import one_in
from tests.waiting import PATIENCE_SECONDS, wait_until

pytestmark = pytest.mark.usefixtures("warm")
# What a process is like that must find all as it was; run before and after.
STATE = """
import logging, os, signal, sys, threading, gc
def state():
    return {
        "streams": [id(sys.stdout), id(sys.stderr), id(sys.stdin)],
        "environment": dict(os.environ), "folder": os.getcwd(), "path": list(sys.path),
        "handlers": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
        "mask": signal.pthread_sigmask(signal.SIG_BLOCK, []), "gc": gc.get_threshold(),
        # pandas imports dateutil, which up to 2.9 imports six.
        "finders": [finder for finder in sys.meta_path if type(finder).__name__ != "_SixMetaPathImporter"],
        "threads": [one.name for one in threading.enumerate()],
        "loggers": [(log.level, log.propagate, list(log.handlers))
                    for log in (logging.getLogger(), logging.getLogger("ensemble"))],
    }
"""


def python(project: Project, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", STATE + textwrap.dedent(code)],
        cwd=project.folder,
        env={**os.environ, "PYTHONPATH": python_path(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, tiny_models: Path) -> Project:
    """Sixty rows, whose first id looks like a number; no run yet."""
    made = Project(tmp_path_factory.mktemp("a notebook's folder"), tiny_models)
    made.write_table(60)
    made.write_config(made.config())
    return made


def test_it_imports_nothing_until_it_is_used(tmp_path: Path) -> None:
    code = (
        "import sys; before = set(sys.modules); import ensemble; "
        "print({name.split('.')[0] for name in sys.modules.keys() - before} - sys.stdlib_module_names, "
        "[name for name in sys.modules if name.startswith('ensemble.')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT)},
        check=True,
    )
    assert done.stdout.strip() == "{'ensemble'} ['ensemble.common', 'ensemble.common.version']"


def test_its_names() -> None:
    for name in ensemble.__all__:
        assert getattr(ensemble, name).__name__ == name
        assert name in dir(ensemble)
    errors = [getattr(ensemble, name) for name in ensemble.__all__ if name.endswith("Error")]
    assert all(issubclass(error, ensemble.EnsembleError) for error in errors)
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        _ = ensemble.nope


@pytest.mark.long
def test_a_run_twice_in_one_process_leaves_all_as_it_was(project: Project) -> None:
    done = python(
        project,
        """
        import json, ensemble
        logging.basicConfig(level=logging.WARNING)
        before = state()
        first = ensemble.run("config.yaml", {"output_dir": "runs/api", "models.gemma.weight": 0.5})
        assert state() == before
        again = ensemble.run("config.yaml", ["output_dir=runs/api", "models.gemma.weight=0.5"], quiet=True)
        assert state() == before
        sys.stdout, stdout = None, sys.stdout  # as in a program without a terminal
        ensemble.run("config.yaml", {"output_dir": "runs/api", "models.gemma.weight": 0.5})
        sys.stdout = stdout
        import numpy as np, pandas as pd, pyarrow as pa  # which still know of one another
        assert pa.array(pd.Series([1.0, np.nan]), from_pandas=True).null_count == 1
        assert pa.table({"a": [1]}).to_pandas().a.tolist() == [1]
        frames = [first.predictions("gemma"), again.ensemble]
        assert all(frame.index.name == "id" and list(frame) == ["winner_a", "winner_b", "tie"] for frame in frames)
        print(json.dumps({"ids": frames[1].index.tolist(), "values": frames[1].to_numpy().tolist()}))
        report = again.report
        assert report.status == again.status.report.status == "complete"
        assert [member.chunks for member in report.members] == [0, 0], "all was done by the first"
        assert report.members[0].weight == 0.5
        print(again)
        """,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    header, rows = project.read("runs/api/ensemble.csv")
    assert header == ["id", *LABELS]
    (data,) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert data["ids"] == [row[0] for row in rows] == project.ids
    assert data["values"] == [[float(cell) for cell in row[1:]] for row in rows], "to the last bit"
    options = ["--set", "output_dir=runs/command", "--set", "models.gemma.weight=0.5"]
    assert project.ensemble("run", "config.yaml", "--quiet", *options).returncode == 0
    item, other = (project.folder / "runs" / name / "ensemble.csv" for name in ("command", "api"))
    assert item.read_bytes() == other.read_bytes()
    assert "gemma: float32, " in done.stdout, "what a run says on its way"
    assert "log loss" in done.stdout, "the summary"
    assert f"{project.folder}/runs/api: complete, after " in done.stdout
    assert done.stderr == "", "what is logged is in run.log, not where the caller logs"


@pytest.mark.long
def test_in_a_thread_and_one_run_at_a_time(project: Project) -> None:
    done = python(
        project,
        """
        import threading, ensemble
        before, refused, found = state(), [], []
        def go():
            found.append(ensemble.run("config.yaml", {"output_dir": "runs/thread"}))
        thread = threading.Thread(target=go)
        thread.start()
        while not os.path.exists("runs/thread/run.json"):
            assert thread.is_alive()
        try:
            ensemble.run("config.yaml", {"output_dir": "runs/other"})
        except ensemble.OutputInUse as error:
            print(error)
        thread.join()
        assert state() == before
        print(len(found[0].ensemble), os.path.exists("runs/other"))
        """,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a run goes on in this process" in done.stdout
    assert done.stdout.splitlines()[-1] == "60 False"


def test_what_is_wrong_is_raised_with_every_problem(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.folder)
    secret = "sk-0123456789abcdef"
    monkeypatch.setenv("MY_API_KEY", secret)
    before = ensemble_state()
    with pytest.raises(ensemble.ConfigError) as caught:
        ensemble.run("config.yaml", {"models.gemma.max_lenght": 5, "limit": -1, "fill": secret})
    assert len(caught.value.problems) == 3
    assert "did you mean max_length?" in str(caught.value)
    assert secret not in str(caught.value)
    with pytest.raises(ensemble.DataError, match=r"nope\.csv"):
        ensemble.validate("config.yaml", {"data.path": Path("nope.csv")})
    assert ensemble_state() == before


ENDLESS: list[object] = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        *((value, "give a mapping or a list") for value in ("limit=1", 5, 0, [5], [None], iter(["limit=1"]))),
        *(({"limit": value}, "limit holds .*; give numbers") for value in (object(), b"5", {5}, ENDLESS, 1j)),
        ({"limit": {(1, 2): 3}}, "limit holds .*; give numbers"),
        ({5: 1}, "overrides: '5' is not a key"),
        ({"limit=5, fill": 1}, "is not a key"),
    ],
)
def test_odd_overrides_are_refused(overrides: Any, words: str, project: Project) -> None:
    with pytest.raises(ensemble.ConfigError, match=words):
        ensemble.plan(project.folder / "config.yaml", overrides)


@pytest.mark.parametrize("odd", [0, -1])
def test_odd_numbers_of_rows_are_refused(odd: Any, project: Project) -> None:
    for name in ("rows", "sample"):
        with pytest.raises(ensemble.ConfigError) as caught:
            ensemble.rehearse(project.folder / "config.yaml", **{name: odd})
        assert str(caught.value) == f"{name}: give a whole number of at least 1, not {odd}"


def test_odd_paths_and_names_are_refused(tmp_path: Path) -> None:
    odd: Any
    for odd in (None, 5, b"config.yaml", [[]]):
        with pytest.raises(ensemble.ConfigError, match="is not a path"):
            ensemble.validate(odd)
        with pytest.raises(ensemble.ConfigError, match="is not a path"):
            ensemble.open_run(odd)
    (tmp_path / "run.json").write_text("{}")
    for odd in (None, 0, ["gemma"]):
        with pytest.raises(ensemble.DataError, match=r"no predictions of .*; complete are: none"):
            ensemble.open_run(tmp_path).predictions(odd)


def test_no_secret_of_the_environment_is_told_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "sk-0123456789abcdef")
    folder = tmp_path / "sk-0123456789abcdef"
    with pytest.raises(ensemble.DataError, match=r"/\*\*\*: there is no run\.json"):
        ensemble.open_run(folder)
    folder.mkdir()
    report(member()).write(folder / "run.json")
    opened = ensemble.open_run(folder)
    assert f"{tmp_path}/***: complete, after 1:00 min" in repr(opened)
    with pytest.raises(ensemble.DataError, match=r"/\*\*\*: no predictions of '\*\*\*'"):
        opened.predictions(folder.name)
    with pytest.raises(ensemble.DataError, match=r"/\*\*\*: there is no ensemble\.csv"):
        _ = opened.ensemble
    (folder / "run.json").write_text("{")
    assert "sk-" not in repr(opened)


def ensemble_state() -> Any:
    result: dict[str, Any] = {}
    exec(STATE, result)
    return result["state"]()


@pytest.mark.parametrize(
    "value",
    [1e-05, "1e-05", 2**70, 0.1, "\x07\U0001f600", "null", "two\nlines", "ä: #", [1, "a"], {"a": None}, True],
)
def test_values_of_overrides_arrive_as_they_are(value: object, project: Project) -> None:
    from ensemble.api import _load

    loaded = _load(project.folder / "config.yaml", {"models.gemma.model_kwargs": {"x": value}})
    assert loaded.config.models[0].model_dump()["model_kwargs"] == {"x": value}


def test_values_may_be_numpys_and_pandas(project: Project) -> None:
    from ensemble.api import _load

    values = {
        "a": np.float64(0.1),
        "b": np.arange(2),
        "c": [np.str_("x")],
        "d": pd.Series([1.5]),
        "e": Path("y"),
    }
    overrides = {"limit": np.int64(7), "models.gemma.weight": np.float32(0.5)}
    config = _load(
        project.folder / "config.yaml",
        {**overrides, "models.gemma.model_kwargs": values, "hash_weights": np.True_},
    ).config
    assert (config.limit, config.models[0].weight) == (7, 0.5)
    assert config.models[0].model_dump()["model_kwargs"] == {
        "a": 0.1,
        "b": [0, 1],
        "c": ["x"],
        "d": [1.5],
        "e": "y",
    }


def test_what_would_be_is_shown_as_the_commands_show_it(project: Project, monkeypatch: Any) -> None:
    monkeypatch.chdir(project.folder)
    checked, planned = ensemble.validate("config.yaml"), ensemble.plan("config.yaml", {"limit": 10})
    command = project.ensemble("validate", "config.yaml", environment={"COLUMNS": ""})
    assert repr(checked).split() == command.stdout.split()
    assert checked.config.output_dir == Path("runs/first")
    assert [len(member.order) for member in planned.plan.models] == [10, 10]
    assert planned.problems == ()
    assert "activations" in repr(planned)
    assert not (project.folder / "runs/first").exists()

    project.write_config({"models": [{"name": "llama", "weight": 3}]}, "weights.yaml")
    both = ensemble.validate(["config.yaml", project.folder / "weights.yaml"], {"models.gemma.weight": 2})
    assert [model.weight for model in both.config.models] == [2, 3]
    with pytest.raises(ensemble.ConfigError, match="the list is empty"):
        ensemble.validate([])
    with pytest.raises(ensemble.ConfigError, match=r"^'3' is not"):
        ensemble.validate(["config.yaml", 3])  # type: ignore[list-item]


def test_what_does_not_fit_is_planned_and_not_validated(project: Project, monkeypatch: Any) -> None:
    monkeypatch.chdir(project.folder)
    with pytest.raises(ensemble.DeviceError, match="0 GPUs"):
        ensemble.validate("config.yaml", {"models.gemma.num_gpus": 1})


def test_a_folder_without_what_is_asked_for(project: Project, tmp_path: Path) -> None:
    with pytest.raises(ensemble.DataError, match=r"there is no run\.json"):
        ensemble.open_run(tmp_path)
    (tmp_path / "run.json").write_text("{")
    (tmp_path / "predictions").mkdir()
    (tmp_path / "predictions/gemma.v2.csv").write_text('"id","a"\n"01",0.5\n')
    opened = ensemble.open_run(str(tmp_path))
    with pytest.raises(ensemble.DataError, match="is damaged"):
        _ = opened.report
    with pytest.raises(ensemble.DataError, match=r"no ensemble\.csv"):
        _ = opened.ensemble
    assert opened.members == (), "nothing says of which run these predictions are"
    assert "is damaged" in repr(opened)
    project.write_config(project.config(models=project.config()["models"][:1]))
    project.ensemble("run", "config.yaml", "--quiet")
    opened = ensemble.open_run(project.folder / "runs/first")
    with pytest.raises(ensemble.DataError, match=r"did you mean 'gemma'.*complete are: gemma"):
        opened.predictions("gemma2")
    (project.folder / "runs/first/predictions/other.csv").write_text('"id","a"\n"01",0.5\n')
    assert opened.members == ("gemma",)
    (project.folder / "runs/first/predictions/gemma.csv").write_text('"id","a"\n"01",half\n')
    (project.folder / "runs/first/predictions/gemma.json").unlink()  # else it is known to be another file
    with pytest.raises(ensemble.DataError, match=r"in column '.*' is no number"):
        opened.predictions("gemma")


@pytest.mark.parametrize(
    "text", ["007", "1e5", "nan", "", " x ", 'a "b", c', "two\nlines", "two\rlines", "NULL"]
)
def test_ids_keep_their_exact_text(text: str, tmp_path: Path) -> None:
    with (tmp_path / "ensemble.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows(
            [["my id", "a"], [text, "0.1"], ["z", "0.30000000000000004"]]
        )
    (tmp_path / "run.json").write_text("{}")
    frame = ensemble.open_run(tmp_path).ensemble
    assert frame.index.tolist() == [text, "z"]
    assert (frame.index.name, frame["a"].tolist()) == ("my id", [0.1, 0.1 + 0.2])


@pytest.mark.parametrize(
    ("number", "handler", "told", "code"),
    one_in(
        3,
        [
            (signal.SIGINT, "", "KeyboardInterrupt", 0),
            (signal.SIGTERM, "", "", -signal.SIGTERM),
            (
                signal.SIGTERM,
                "signal.signal(signal.SIGTERM, lambda *_: print('mine'))",
                "mine\nInterrupted",
                0,
            ),
        ],
    ),
)
def test_a_signal_ends_the_run_in_order_and_is_then_the_callers(
    number: signal.Signals, handler: str, told: str, code: int, project: Project, tmp_path: Path
) -> None:
    chunky = Project(tmp_path / "chunky", project.models)
    chunky.folder.mkdir()
    write_chunky_table(chunky)
    chunky.write_config(chunky_config(chunky))
    injected = Injected(tmp_path, Fault("sleep", ids_of(chunky, 9), times=1))
    program = f"""
import ensemble
{handler}
before = state()
try:
    ensemble.run("config.yaml", quiet=True)
except BaseException as error:
    print(type(error).__name__)
assert state() == before
"""
    process = subprocess.Popen(
        [sys.executable, "-c", STATE + program],
        cwd=chunky.folder,
        env={**os.environ, **injected.environment},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: bool(injected.pids()), "the third chunk")
        process.send_signal(number)
        process.send_signal(number)  # an impatient second one does not kill a notebook
        out, _ = process.communicate(timeout=PATIENCE_SECONDS)
    finally:
        process.kill()
    assert (out.strip(), process.returncode) == (told, code)
    assert chunky.run_json()["status"] == "interrupted"
