"""Whole runs through the command line: real processes, real tiny models, a path with a space and a quote."""

from __future__ import annotations

import json
import os
import pty
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ensemble.common.protocol import Counters
from ensemble.pipeline.run_dir import RunDir, hold
from tests.checkpoints import (
    WORDS,
    adapter_reference,
    make_adapter,
    make_base,
    make_checkpoint,
    reference,
)
from tests.faults.machine import small_disk
from tests.project import GEMMA_LABELS, LABELS, ROOT, Project, python_path
from tests.sampling import one_in
from tests.waiting import PATIENCE_SECONDS, wait_until

pytestmark = pytest.mark.usefixtures("warm")


def as_floats(rows: list[list[str]]) -> np.ndarray:
    return np.array([[float(cell) for cell in row[1:]] for row in rows])


def expected_members(project: Project) -> tuple[np.ndarray, np.ndarray]:
    """Plain transformers' probabilities of both members, in the config's label order."""
    order = [GEMMA_LABELS.index(label) for label in LABELS]
    gemma = reference(project.models / "gemma", project.texts, max_length=128)[:, order]
    return gemma, reference(project.models / "llama", project.texts, max_length=128)


def only_llama(project: Project) -> None:
    """A config of one member, where two would only take longer."""
    project.write_config(project.config(models=project.config()["models"][1:]))


@pytest.mark.fresh
def test_a_run_from_yaml_to_submission(project: Project) -> None:
    project.write_config(project.config())
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stderr + done.stdout
    gemma, llama = expected_members(project)
    for name, expected in (("gemma", gemma), ("llama", llama)):
        header, rows = project.read(f"runs/first/predictions/{name}.csv")
        assert header == ["id", *LABELS]
        assert [row[0] for row in rows] == project.ids
        np.testing.assert_allclose(as_floats(rows), expected, atol=1e-5)
    header, rows = project.read("runs/first/ensemble.csv")
    merged = as_floats(rows)
    np.testing.assert_allclose(merged, 0.6 * gemma + 0.4 * llama, atol=1e-5)
    _check_the_mean_of_the_files(project, merged)
    _check_the_submission(project, merged)
    _check_the_report(project, done.stdout, merged)
    left = {str(path.relative_to(project.folder)) for path in project.folder.rglob("*") if path.is_file()}
    assert left == {
        "config.yaml", "test.csv", "sample.csv", "out/submission.csv", "runs/first/.lock",
        "runs/first/config.yaml", "runs/first/run.json", "runs/first/ensemble.csv",
        "runs/first/submission.csv", "runs/first/predictions/gemma.csv", "runs/first/predictions/llama.csv",
        "runs/first/predictions/gemma.json", "runs/first/predictions/llama.json",
        "runs/first/predictions/gemma.rows", "runs/first/predictions/llama.rows",
        "runs/first/logs/run.log", "runs/first/logs/gemma-0.log", "runs/first/logs/llama-0.log",
    }  # fmt: skip


def _check_the_mean_of_the_files(project: Project, merged: np.ndarray) -> None:
    members = [
        as_floats(project.read(f"runs/first/predictions/{name}.csv")[1]) for name in ("gemma", "llama")
    ]
    by_hand = (0.6 * members[0] + 0.4 * members[1]) / (0.6 + 0.4)
    np.testing.assert_allclose(merged, by_hand, rtol=1e-14)


def _check_the_submission(project: Project, merged: np.ndarray) -> None:
    header, rows = project.read("out/submission.csv")
    assert header == ["id", "tie", "winner_a", "winner_b"]
    assert [row[0] for row in rows] == sorted(project.ids)
    place = {row_id: index for index, row_id in enumerate(project.ids)}
    wanted = merged[[place[row[0]] for row in rows]][:, [LABELS.index(label) for label in header[1:]]]
    np.testing.assert_array_equal(as_floats(rows), wanted)
    assert project.read("runs/first/submission.csv") == (header, rows)


def _check_the_report(project: Project, printed: str, merged: np.ndarray) -> None:
    report = project.run_json()
    truth = [LABELS.index(label) for label in project.truth]
    by_hand = -np.mean([np.log(row[label] / row.sum()) for row, label in zip(merged, truth, strict=True)])
    assert report["scores"]["ensemble"]["log_loss"] == pytest.approx(by_hand, rel=1e-9)
    assert report["scores"]["ensemble"]["accuracy"] == np.mean(merged.argmax(axis=1) == truth)
    assert f"{report['scores']['ensemble']['log_loss']:.4f}" in printed
    assert report["status"] == "complete"
    assert report["null_texts"] == {"text": sum(text == "" for text in project.texts)}
    assert report["versions"]["torch"]
    for member in report["members"]:
        (worker,) = member["workers"]
        assert worker["counters"]["rows"] == member["counters"]["rows"] == 300
        assert vars(Counters()).keys() == worker["counters"].keys()
        assert 0 < worker["counters"]["tokens"] <= worker["counters"]["padded_tokens"]
        assert min(worker["start_seconds"], worker["load_seconds"], worker["counters"]["predict_seconds"]) > 0
        assert worker["closed"]["peak_memory_bytes"] > 50e6
        assert worker["exit_code"] == 0
    assert "submission: out/submission.csv" in printed


@pytest.mark.long
def test_replicas_batch_sizes_and_budgets_change_nothing(project: Project) -> None:
    project.write_table(rows=2500)  # four chunks
    only_llama(project)
    cases = {
        "one": [],
        "two": ["--set", "models.llama.replicas=2", "--set", "models.llama.batch_size=23"],
    }
    merged = {}
    for name, options in cases.items():
        done = project.ensemble("run", "config.yaml", "--quiet", "--set", f"output_dir=runs/{name}", *options)
        assert done.returncode == 0, done.stderr
        assert done.stdout == ""
        merged[name] = as_floats(project.read(f"runs/{name}/ensemble.csv")[1])
        (member,) = project.run_json(f"runs/{name}")["members"]
        assert len(member["workers"]) == (2 if name == "two" else 1)
        if name == "two":
            computed = 2500 - sum(worker["counters"]["repeated_rows"] for worker in member["workers"])
            assert sum(worker["counters"]["batches"] for worker in member["workers"]) >= computed / 23 > 50
            forecast = member["forecast"]
            assert forecast["token_budget"] == 23 * forecast["width"]
    np.testing.assert_allclose(merged["two"], merged["one"], atol=1e-5)


@pytest.mark.long
def test_little_padding_on_long_tailed_rows(project: Project) -> None:
    """Median about 60 tokens, mean 86, 99th percentile 400: under 3 % of what is computed is padding."""
    words = np.clip(np.random.default_rng(0).lognormal(np.log(32), 0.82, 1500), 2, 265).astype(int)
    vocabulary = np.array(WORDS)
    texts = [
        " ".join(np.random.default_rng(row).choice(vocabulary, count)) for row, count in enumerate(words)
    ]
    project.write_csv("test.csv", ["id", "text"], [[str(row), text] for row, text in enumerate(texts)])
    config = project.config(data={"path": "test.csv"}, submission=None, models=project.config()["models"][1:])
    project.write_config(config)
    done = project.ensemble("run", "config.yaml", "--set", "defaults.max_length=512")
    assert done.returncode == 0, done.stderr
    (member,) = project.run_json()["members"]
    counters = member["counters"]
    assert 75 <= counters["tokens"] / 1500 <= 95
    assert counters["tokens"] > 0.97 * counters["padded_tokens"]


@pytest.mark.long
def test_the_same_command_twice_gives_the_same_bytes(project: Project) -> None:
    only_llama(project)
    for name in ("x", "y"):
        done = project.ensemble("run", "config.yaml", "-q", "--set", f"output_dir=runs/{name}")
        assert done.returncode == 0, done.stderr
    first, second = (project.folder / "runs" / name / "ensemble.csv" for name in ("x", "y"))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.fault(25)
def test_a_member_that_fails_keeps_the_others(project: Project, tmp_path: Path) -> None:
    import transformers

    broken = make_checkpoint(tmp_path / "no head", "llama", LABELS)
    transformers.AutoModelForCausalLM.from_pretrained(broken).save_pretrained(broken)
    settings = (broken / "config.json").read_text()  # says that there is a head, or it would not come so far
    (broken / "config.json").write_text(
        settings.replace("LlamaForCausalLM", "LlamaForSequenceClassification")
    )
    config = project.config()
    config["models"][0] = {"name": "broken", "model_name_or_path": str(broken)}
    project.write_config(config)
    (project.folder / "runs/first").mkdir(parents=True)
    (project.folder / "runs/first/ensemble.csv").write_text("of an earlier run")
    earlier = '{"schema": "ensemble run 1", "status": "complete", "pid": 1}'
    (project.folder / "runs/first/run.json").write_text(earlier)
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 1
    assert "member broken failed: " in done.stderr
    assert "score.weight" in done.stderr
    assert "runs/first/logs/broken-0.log" in done.stderr
    assert "Traceback" not in done.stderr
    log = (project.folder / "runs/first/logs/broken-0.log").read_text()
    assert "Traceback" in log
    assert "score.weight" in log
    assert not (project.folder / "runs/first/ensemble.csv").exists()
    assert not (project.folder / "out/submission.csv").exists()
    assert len(project.read("runs/first/predictions/llama.csv")[1]) == 300
    report = project.run_json()
    assert report["status"] == "failed"
    assert [member["status"] for member in report["members"]] == ["failed", "complete"]


def test_a_reader_that_goes_away_ends_nothing(project: Project) -> None:
    only_llama(project)
    command = f"{shlex.quote(sys.executable)} -m ensemble run config.yaml --limit 9 | head -1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=project.folder,
        env={**os.environ, "PYTHONPATH": python_path(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 1
    assert len(project.read("runs/first/ensemble.csv")[1]) == 9


@pytest.mark.long
@pytest.mark.fresh
def test_nohup_is_heeded(project: Project) -> None:
    only_llama(project)
    process = subprocess.Popen(
        ["nohup", sys.executable, "-m", "ensemble", "run", "config.yaml", "--limit", "9"],
        cwd=project.folder,
        env={**os.environ, "PYTHONPATH": python_path(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _wait_for_worker(process)
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == 0
    assert len(project.read("runs/first/ensemble.csv")[1]) == 9


@pytest.mark.fault(14)
def test_a_full_disk_is_said_and_leaves_no_half_file(project: Project, tmp_path: Path) -> None:
    """The real thing: a file system of its own, too small for the predictions."""
    with small_disk(tmp_path / "small disk", "64k") as small:
        only_llama(project)
        done = project.ensemble("run", "config.yaml", "--set", f"output_dir={small / 'run'}")
        assert done.returncode == 1
        assert "No space left" in done.stderr
        assert str(small) in done.stderr
        assert "Traceback" not in done.stderr
        left = [path for path in (small / "run").rglob("*") if path.is_file()]
        assert not any(".tmp-" in path.name for path in left)
        assert not (small / "run/ensemble.csv").exists()


@pytest.mark.long
def test_one_column_regression_passes_its_value_through(project: Project, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "r", "bert", ["LABEL_0"])
    config = project.config(
        data={"path": "test.csv"},
        labels=["score"],
        models=[{"name": "r", "model_name_or_path": str(folder)}],
        submission=None,
    )
    project.write_config(config)
    done = project.ensemble("run", "config.yaml", "--limit", "30")
    assert done.returncode == 0, done.stderr
    expected = reference(folder, project.texts[:30], 128, "none")
    np.testing.assert_allclose(
        as_floats(project.read("runs/first/ensemble.csv")[1]), expected, atol=1e-5, rtol=1e-5
    )


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft's
def test_an_adapter_on_a_base_without_a_head(project: Project, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    base = make_base(tmp_path / "base", "llama")
    adapter = make_adapter(tmp_path / "adapter", base, 3)
    member = {
        "name": "lora",
        "model_name_or_path": str(base),
        "adapter_name_or_path": str(adapter),
        "label_map": {"LABEL_0": "tie", "LABEL_1": "winner_a", "LABEL_2": "winner_b"},
    }
    project.write_config(project.config(models=[member], limit=60, submission=None))
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stderr + done.stdout
    _, rows = project.read("runs/first/predictions/lora.csv")
    expected = adapter_reference(base, adapter, project.texts[:60], 3, max_length=128)
    order = [GEMMA_LABELS.index(label) for label in LABELS]
    np.testing.assert_allclose(as_floats(rows), expected[:, order], atol=1e-5)
    other = make_base(tmp_path / "other", "gpt2")
    project.write_config(project.config(models=[{**member, "model_name_or_path": str(other)}]))
    refused = project.ensemble("run", "config.yaml")
    assert refused.returncode == 1
    text = " ".join((refused.stderr + refused.stdout).split())
    assert f"adapter {adapter} is not for {other}" in text
    assert f"it was trained on {base}" in (project.folder / "runs/first/run.json").read_text()
    assert "Traceback" not in refused.stderr


def test_limit_tries_the_first_rows_and_spares_the_submission(project: Project) -> None:
    only_llama(project)
    (project.folder / "out").mkdir()
    (project.folder / "out/submission.csv").write_text("the real one")
    done = project.ensemble("run", "config.yaml", "--limit", "7")
    assert done.returncode == 0, done.stderr
    assert [row[0] for row in project.read("runs/first/ensemble.csv")[1]] == project.ids[:7]
    assert [row[0] for row in project.read("runs/first/submission.csv")[1]] == sorted(project.ids[:7])
    assert (project.folder / "out/submission.csv").read_text() == "the real one"


@pytest.mark.long
def test_templates_pairs_and_other_kinds_of_heads(project: Project, tmp_path: Path) -> None:
    kinds = {"multi": "multi_label_classification", "plain": None}
    for name, kind in kinds.items():
        make_checkpoint(tmp_path / name, "bert", LABELS, problem_type=kind)
    rows = [[f"{n}", json.dumps(["first", text]), text] for n, text in enumerate(project.texts[:40])]
    project.write_csv("test.csv", ["id", "turns", "text"], rows)
    config = project.config(
        data={"path": "test.csv"},
        models=[
            {
                "name": "multi",
                "model_name_or_path": str(tmp_path / "multi"),
                "text_column": ["text", "turns"],
            },
            {"name": "plain", "model_name_or_path": str(tmp_path / "plain"), "label_map": {}},
        ],
        defaults={"prompt_template": "{{ turns | fromjson | join('; ') }}!", "max_length": 128},
        submission=None,
    )
    project.write_config(config)
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stderr
    pairs = [(text, json.dumps(["first", text])) for text in project.texts[:40]]
    got = as_floats(project.read("runs/first/predictions/multi.csv")[1])
    np.testing.assert_allclose(got, reference(tmp_path / "multi", pairs, 128, "sigmoid"), atol=1e-5)
    prompts = [f"first; {text}!" for text in project.texts[:40]]
    got = as_floats(project.read("runs/first/predictions/plain.csv")[1])
    np.testing.assert_allclose(got, reference(tmp_path / "plain", prompts, 128), atol=1e-5)


def _start(project: Project, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ensemble", "run", "config.yaml", *arguments],
        cwd=project.folder,
        env={**os.environ, "PYTHONPATH": python_path(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _children(pid: int) -> list[int]:
    """Processes that a process has started, as /proc shows them."""
    result = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout
    return [int(number) for number in result.split()]


def _wait_for_worker(process: subprocess.Popen[Any]) -> int:
    wait_until(lambda: _children(process.pid), "a worker")
    return _children(process.pid)[0]


def _gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


@pytest.mark.fresh
@pytest.mark.parametrize(("number", "code"), one_in(2, [(signal.SIGINT, 130), (signal.SIGTERM, 143)]))
@pytest.mark.fault(13)
def test_a_signal_ends_the_run_and_its_workers(project: Project, number: int, code: int) -> None:
    project.write_config(project.config())
    with _start(project) as process:
        worker = _wait_for_worker(process)
        process.send_signal(number)
        _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == code
    assert "stopped by" in errors
    assert "Traceback" not in errors
    assert _gone(worker)


@pytest.mark.fresh
@pytest.mark.fault(12, 21)
def test_no_worker_outlives_a_killed_parent(project: Project) -> None:
    only_llama(project)
    with _start(project) as process:
        worker = _wait_for_worker(process)
        maps = Path(f"/proc/{worker}/maps")
        wait_until(
            lambda: "libtorch" in maps.read_text(), "torch"
        )  # it asks for the death signal before that
        process.kill()
        process.communicate(timeout=PATIENCE_SECONDS)
    wait_until(lambda: _gone(worker), "the worker's end")
    with hold(RunDir(project.folder / "runs/first")):
        pass  # nobody holds it, and the next run may begin


@pytest.mark.long
@pytest.mark.fault(1)
def test_a_worker_that_was_killed_while_it_started_is_replaced(project: Project) -> None:
    only_llama(project)
    with _start(project) as process:
        os.kill(_wait_for_worker(process), signal.SIGKILL)
        printed, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, errors
    assert "signal 9 (SIGKILL); another worker is started" in printed
    assert [worker["exit_code"] for worker in project.run_json()["members"][0]["workers"]] == [-9, 0]
    assert len(project.read("runs/first/ensemble.csv")[1]) == 300


@pytest.mark.long
@pytest.mark.fault(20)
def test_two_runs_on_one_directory(project: Project) -> None:
    only_llama(project)
    with _start(project) as process:
        _wait_for_worker(process)
        process.send_signal(signal.SIGSTOP)  # so that it is not over before the other one looks
        second = project.ensemble("run", "config.yaml")
        process.send_signal(signal.SIGCONT)
        assert second.returncode == 3
        assert f"in use by process {process.pid}" in second.stderr
        assert process.wait(60) == 0
    assert len(project.read("runs/first/ensemble.csv")[1]) == 300


def _run_on_a_terminal(project: Project, **environment: str) -> str:
    """What a whole run prints on a pseudo-terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "ensemble", "run", "config.yaml", "--fresh"],
        cwd=project.folder,
        env={**os.environ, "PYTHONPATH": python_path(ROOT), "TERM": "xterm", "COLUMNS": "120", **environment},
        stdin=theirs, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    printed = b""
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:  # EIO: the other side has closed
            break
        if not data:
            break
        printed += data
    os.close(ours)
    assert process.wait(30) == 0, printed.decode()
    return printed.decode()


@pytest.mark.long
def test_bars_on_a_terminal_and_lines_in_a_notebook(project: Project) -> None:
    only_llama(project)
    terminal = _run_on_a_terminal(project, COLUMNS="80")
    assert all(word in terminal for word in ("accuracy", "log loss", "tokens/s", "ensemble")), (
        "the table fits"
    )
    assert "\x1b[" in terminal
    assert "━" in terminal
    assert "300/300 rows" in terminal
    notebook = _run_on_a_terminal(project, JPY_PARENT_PID="1")
    assert "━━━━━━━━━━━━" not in notebook.split("member")[0]
    assert "llama: loading the model" in notebook
    assert "llama: 300/300 rows" in notebook


def test_what_is_offloaded_lies_in_a_folder_of_each_worker_and_goes_with_it(project: Project) -> None:
    """transformers calls the files there after parameters, which are alike in all models."""
    only_llama(project)
    (project.folder / "disk").mkdir()
    options = ["--set", "models.llama.offload_folder=disk", "--set", "models.llama.max_memory={cpu: 300KB}"]
    done = project.ensemble("run", "config.yaml", *options, "--limit", "20")
    assert done.returncode == 0, done.stderr
    assert "on the disk" in done.stdout
    assert list((project.folder / "disk").iterdir()) == []
    _, rows = project.read("runs/first/ensemble.csv")
    expected = reference(project.models / "llama", [project.texts[project.ids.index(row[0])] for row in rows])
    np.testing.assert_allclose(as_floats(rows), expected, atol=1e-5)
