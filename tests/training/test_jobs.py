"""Trainings by a user's command: real processes, a script without torch that copies a prepared checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ensemble.pipeline.training_dir import Part, TrainingDir
from ensemble.training.records import TrainingReport, read_record
from tests.checkpoints import make_adapter, make_base
from tests.faults.machine import small_disk
from tests.nvml.sim import NvmlSim, gpu_uuid, gpus
from tests.project import LABELS, ROOT, Project, python_path
from tests.sampling import one_in
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("warm")

# A user's script.  How it fares is asked for by files beside it, which a test makes and removes.
SCRIPT = """
import json, os, pathlib, shutil, subprocess, sys, time
import beside
here = pathlib.Path(__file__).resolve().parent
train, fold, out = sys.argv[1:4]
out = pathlib.Path(out)
assert sys.stdin.read() == "" and out.is_dir()
rows = pathlib.Path(train).read_text().count(chr(10)) - 1
with (here / "calls.jsonl").open("a") as file:
    keys = ("CUDA_VISIBLE_DEVICES", "ENSEMBLE_WORKER", "PYTHONSAFEPATH")
    call = {"fold": fold, "rows": rows, "pid": os.getpid(), "out": sorted(map(str, out.iterdir()))}
    file.write(json.dumps(call | {key: os.environ.get(key) for key in keys}) + chr(10))
print("training fold", fold, "by", os.environ.get("MY_TOKEN"), flush=True)
(out / "started").write_text("")
modes = [here / f"mode-{fold}", here / f"mode-{out.parent.name}-{fold}"]
mode = next((file.read_text().strip() for file in modes if file.exists()), "")
if mode == "wait":
    child = "import os, time; os.setsid(); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", child])
    subprocess.Popen(["sleep", "600"])
    (here / "waiting").write_text(str(os.getpid()))
    time.sleep(600)
if mode == "exit":
    print("no gradient\\nthe loss is NaN", file=sys.stderr)
    sys.exit(3)
if mode == "together":
    (here / f"there-{fold}").write_text("")
    while not ((here / "there-0").exists() and (here / "there-1").exists()):
        time.sleep(0.05)
target = out / "checkpoint-7" if mode in ("below", "two") else out
if mode != "nothing":
    shutil.copytree(here / ("other" if mode == "labels" else "trained"), target, dirs_exist_ok=True)
if mode == "two":
    shutil.copytree(here / "trained", out / "checkpoint-9")
(out / "started").unlink()
if mode in ("gone", "file", "link"):
    shutil.rmtree(out)
if mode == "file":
    out.write_text("")
if mode == "link":
    out.symlink_to(here / "trained")
"""


class Trained(Project):
    """A project with a member that a command trains; its script and prepared checkpoint lie beside each other."""

    @property
    def scripts(self) -> Path:
        return self.folder / "my scripts"

    @property
    def files(self) -> TrainingDir:
        return TrainingDir(self.folder / "runs/first")

    def set_up(self, names: Sequence[str] = ("a",), folds: int = 3, **changes: Any) -> None:
        self.scripts.mkdir(exist_ok=True)
        (self.scripts / "train.py").write_text(SCRIPT)
        (self.scripts / "beside.py").write_text("")
        shutil.copytree(self.models / "llama", self.scripts / "trained", dirs_exist_ok=True)
        command = [sys.executable, "my scripts/train.py", "{train}", "{fold}", "{out}"]
        models = [{"name": name, "train": {"command": command}} for name in names]
        self.write_config(self.config(models=models, training={"folds": {"n_splits": folds}}, **changes))

    def mode(self, fold: int | str, mode: str) -> None:
        """Say how the trainings of a fold fare, or that of a member, such as "a-0"."""
        (self.scripts / f"mode-{fold}").write_text(mode)

    def train(self, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return self.ensemble("train", "config.yaml", *options, environment=environment)

    def begin(self, *options: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "ensemble", "train", "config.yaml", *options],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": python_path(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def calls(self) -> list[dict[str, Any]]:
        file = self.scripts / "calls.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def folds_called(self) -> list[str]:
        return [call["fold"] for call in self.calls()]

    def report(self) -> TrainingReport:
        report = read_record(self.files.records, TrainingReport)
        assert report is not None
        return report


@pytest.fixture
def trained(project: Project) -> Trained:
    made = Trained(project.folder, project.models)
    made.write_table(rows=30)
    made.set_up()
    return made


def test_a_process_for_each_fold_and_member(trained: Trained) -> None:
    trained.set_up(["a", "b"])
    done = trained.train(MY_TOKEN="a-long-secret")
    assert done.returncode == 0, done.stdout + done.stderr
    calls = trained.calls()
    assert sorted((call["fold"], call["rows"]) for call in calls) == sorted(
        [(str(n), 20) for n in range(3)] * 2
    )
    assert len({call["pid"] for call in calls}) == 6
    assert all(call["ENSEMBLE_WORKER"] and call["PYTHONSAFEPATH"] is None for call in calls)
    for name in ("a", "b"):
        for fold in range(3):
            folder = trained.files.checkpoint(name, Part(fold))
            copied = trained.scripts / "trained"
            assert {path.name for path in folder.iterdir()} == {path.name for path in copied.iterdir()}
            log = trained.files.log(name, Part(fold)).read_text()
            assert f"training fold {fold} by ***" in log
            assert not trained.files.unfinished(name, Part(fold)).exists()
    report = trained.report()
    assert report.status == "complete"
    assert [len(member.parts) for member in report.members] == [3, 3]
    assert all(
        part.status == "done" and part.attempts == 1 for member in report.members for part in member.parts
    )
    assert "6 trainings done in " in done.stdout
    # The same again trains nothing.
    again = trained.train()
    assert again.returncode == 0, again.stderr
    assert len(trained.calls()) == 6
    assert "a: trained already: fold 0, fold 1, fold 2" in again.stdout


@pytest.mark.long
def test_side_by_side_on_two_gpus(trained: Trained, nvml_sim: NvmlSim) -> None:
    nvml_sim.write(gpus(2))
    trained.set_up(folds=2)
    for fold in range(2):
        trained.mode(fold, "together")  # each waits for the other
    done = trained.train(**nvml_sim.environment())
    assert done.returncode == 0, done.stdout + done.stderr
    assert {call["CUDA_VISIBLE_DEVICES"] for call in trained.calls()} == {gpu_uuid(0), gpu_uuid(1)}
    (member,) = trained.report().members
    assert {part.devices for part in member.parts} == {(gpu_uuid(0),), (gpu_uuid(1),)}


@pytest.mark.long
def test_more_gpus_than_there_are_and_a_fold_that_is_none(trained: Trained) -> None:
    done = trained.train("--set", "models.a.train.num_gpus=2")
    assert done.returncode == 2
    assert "models[0].train.num_gpus: a asks for 2 GPUs" in done.stderr
    done = trained.train("--fold", "3")
    assert done.returncode == 2
    assert "--fold: the folds are 0 to 2, not 3" in done.stderr
    trained.write_config(trained.config())
    done = trained.train()
    assert done.returncode == 2
    assert "no member has train" in done.stderr
    assert not trained.calls()


@pytest.mark.long
def test_one_fold_and_all_anew(trained: Trained) -> None:
    done = trained.train("--fold", "1")
    assert done.returncode == 0
    printed = " ".join(done.stdout.split())
    assert "predictions are made when all folds are trained; a lacks fold 0, fold 2" in printed
    assert trained.folds_called() == ["1"]
    assert trained.train().returncode == 0
    assert trained.folds_called() == ["1", "0", "2"]
    known_to_fit = trained.files.rungs / "0123.json"
    known_to_fit.parent.mkdir()
    known_to_fit.write_text("{}")
    assert trained.train("--fresh", "--fold", "0").returncode == 0
    assert trained.folds_called() == ["1", "0", "2", "0"]
    assert known_to_fit.exists()
    assert trained.train("--fresh").returncode == 0
    assert trained.folds_called() == ["1", "0", "2", "0", "0", "1", "2"]
    assert not known_to_fit.exists()


@pytest.mark.long
def test_an_edited_script_and_the_python_that_runs_it(trained: Trained) -> None:
    script = trained.scripts / "train.py"
    command = [Path(sys.executable).name, "my scripts/train.py", "{train}", "{fold}", "{out}"]
    models = [{"name": "a", "train": {"command": command}}]
    trained.write_config(trained.config(models=models, training={"folds": {"n_splits": 2}}))
    script.write_text(f"{SCRIPT}print(sys.executable)\n")
    done = trained.train(PATH="/nowhere")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sys.executable in trained.files.log("a", Part(0)).read_text()
    script.write_text(f"{SCRIPT}# edited\n")
    done = trained.train("--fold", "1")
    assert "a: trained anew: fold 1: the script my scripts/train.py changed" in done.stdout
    assert trained.folds_called() == ["0", "1", "1"]


@pytest.mark.parametrize(
    ("mode", "message"),
    one_in(4, [
        ("exit", "ended with exit code 3, with the last words: training fold 1 by None | no gradient | the loss "
                 "is NaN; its log is runs/first/training/logs/a/fold-1.log"),
        ("nothing", "fold 1: its command ended well, but left neither a checkpoint nor an adapter in"),
        ("two", "(checkpoint-7, checkpoint-9), and it is unknown which is meant"),
        ("labels", "fold 1: "),
    ]),
)  # fmt: skip
def test_what_is_no_checkpoint_of_this_config_is_refused(trained: Trained, mode: str, message: str) -> None:
    shutil.copytree(trained.scripts / "trained", trained.scripts / "other")
    config = json.loads((trained.scripts / "other/config.json").read_text())
    config |= {"id2label": {0: "good", 1: "bad", 2: "ugly"}, "label2id": {"good": 0, "bad": 1, "ugly": 2}}
    (trained.scripts / "other/config.json").write_text(json.dumps(config))
    trained.mode(1, mode)
    done = trained.train("--set", "retries=1")
    assert done.returncode == 1, done.stdout
    assert f"member a failed: {'fold 1: ' if mode == 'two' else ''}" in " ".join(done.stderr.split())
    assert message in " ".join(done.stderr.split()), done.stderr
    if mode == "labels":
        assert "good" in done.stderr
        assert "winner_a" in done.stderr
    assert trained.folds_called().count("1") == 1, "a command that has ended is not tried again"
    assert trained.files.checkpoint("a", Part(0)).is_dir()
    assert not trained.files.checkpoint("a", Part(1)).exists()
    assert trained.report().status == "failed"
    trained.mode(1, "below")  # in a folder of its own
    done = trained.train()
    assert done.returncode == 0, done.stderr
    assert trained.folds_called().count("0") == 1
    assert (trained.files.checkpoint("a", Part(1)) / "model.safetensors").is_file()


@pytest.mark.long
def test_a_command_that_puts_something_else_in_the_place_of_its_folder(trained: Trained) -> None:
    trained.set_up(["a", "b"], folds=2)
    for mode in ("gone", "file"):
        trained.mode("a-0", mode)
        done = trained.train("--fold", "0", "--fresh")
        assert done.returncode == 1, done.stdout
        assert "member a failed: fold 0: " in done.stderr
        assert "cannot write" not in done.stderr
        assert trained.files.is_finished("b", Part(0))
    trained.mode("a-0", "link")
    for _ in range(2):  # the second removes what the first has left
        done = trained.train("--fold", "0", "--fresh")
        assert done.returncode == 0, done.stderr
        assert trained.files.checkpoint("a", Part(0)).is_symlink()
    assert (trained.scripts / "trained/config.json").is_file()


@pytest.mark.long
def test_what_does_not_go_with_the_keys_of_its_member_fails_this_member_alone(trained: Trained) -> None:
    trained.set_up(["a", "b"])
    done = trained.train("--fold", "0", "--set", "models.a.merge_adapter=true")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "member a failed: fold 0: merge_adapter: there is no adapter to merge" in " ".join(
        done.stderr.split()
    )
    assert trained.files.checkpoint("b", Part(0)).is_dir()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft on transformers 5
def test_an_adapter_is_checked_with_its_base(trained: Trained) -> None:
    shutil.rmtree(trained.scripts / "trained")
    make_adapter(trained.scripts / "trained", trained.models / "llama", len(LABELS))
    done = trained.train("--fold", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (trained.files.checkpoint("a", Part(0)) / "adapter_config.json").is_file()


def waits(trained: Trained) -> int:
    """The process of a command that waits, once it does."""
    file = trained.scripts / "waiting"
    wait_until(lambda: file.exists() and file.read_text(), "a command that waits")
    return int(file.read_text())


def worker_of(pid: int) -> int:
    """The worker above a command: its parent's parent."""
    for _ in range(2):
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}/cmdline").exists() and bool(Path(f"/proc/{pid}/cmdline").read_bytes())


@pytest.mark.long
@pytest.mark.fault(43)
@pytest.mark.parametrize("who", one_in(2, ["the command", "the worker"]))
def test_what_is_killed_is_begun_again(trained: Trained, who: str) -> None:
    trained.mode(1, "wait")
    running = trained.begin()
    command = waits(trained)
    trained.mode(1, "")
    os.kill(command if who == "the command" else worker_of(command), signal.SIGKILL)
    output = running.communicate()[0]
    assert running.returncode == 0, output
    assert "signal 9 (SIGKILL)" in output
    assert "; it is tried again" in output
    assert trained.folds_called() == ["0", "1", "1", "2"]
    assert trained.calls()[2]["out"] == [], "what the killed command had left is gone"
    assert [part.attempts for part in trained.report().members[0].parts] == [1, 2, 1]
    assert not is_alive(command)


@pytest.mark.long
@pytest.mark.fault(43)
def test_nothing_outlives_a_killed_parent_and_no_fold_is_repeated(trained: Trained) -> None:
    trained.mode(1, "wait")
    running = trained.begin()
    command = waits(trained)
    trained.mode(1, "")
    running.kill()
    running.communicate()
    # That all others are gone, too, in whatever session they were, is looked for after every test.
    wait_until(lambda: not is_alive(command), "the end of the command")
    done = trained.train()
    assert done.returncode == 0, done.stderr
    assert trained.folds_called() == ["0", "1", "1", "2"]


@pytest.mark.fault(13, 20)
@pytest.mark.long
def test_a_signal_ends_it_and_another_command_is_refused_meanwhile(trained: Trained) -> None:
    trained.mode(1, "wait")
    running = trained.begin()
    waits(trained)
    trained.mode(1, "")
    for command in ("train", "run"):
        done = trained.ensemble(command, "config.yaml")
        assert done.returncode == 3 if command == "train" else done.returncode in (2, 3), done.stderr
        if command == "train":
            assert f"in use by process {running.pid}" in done.stderr
    running.send_signal(signal.SIGINT)
    output = running.communicate()[0]
    assert running.returncode == 130, output
    assert "the same command resumes" in output
    assert trained.report().status == "interrupted"
    assert trained.files.checkpoint("a", Part(0)).is_dir()
    assert not trained.files.checkpoint("a", Part(1)).exists()


@pytest.mark.fault(44)
@pytest.mark.long
def test_a_command_that_hangs_is_killed_and_begun_again(trained: Trained) -> None:
    trained.mode(0, "wait")
    running = trained.begin("--set", "hang_timeout=5s", "--fold", "0")
    command = waits(trained)
    trained.mode(0, "")
    output = running.communicate()[0]
    assert running.returncode == 0, output
    message = "fold 0: its command printed nothing and wrote nothing into its folder for 5 s (hang_timeout)"
    assert message in output
    assert not is_alive(command)
    assert trained.folds_called() == ["0", "0"]


@pytest.mark.fault(46)
@pytest.mark.long
def test_a_table_that_changes_meanwhile(trained: Trained) -> None:
    trained.set_up(folds=2)
    trained.mode(0, "wait")
    running = trained.begin("--fold", "0", "--set", "retries=1")
    command = waits(trained)
    trained.mode(0, "")
    with (trained.folder / "test.csv").open("a") as file:
        file.write("new,some text,tie\n")
    os.kill(command, signal.SIGKILL)
    output = running.communicate()[0]
    assert running.returncode == 0, output
    assert "test.csv changed while a was trained; fold 0 learned the rows" in output
    done = trained.train("--fold", "0")
    assert "a: trained anew: fold 0: the rows of the training table changed" in done.stdout


@pytest.mark.long
def test_progress_of_a_command_that_tells_its_steps(trained: Trained) -> None:
    script = (trained.scripts / "train.py").read_text()
    tell = '(out / "progress.json").write_text(json.dumps({"step": 3, "steps": 4, "tokens": 70}))\n'
    (trained.scripts / "train.py").write_text(
        script.replace('if mode == "wait":', f'{tell}if mode == "wait":')
    )
    trained.mode(0, "wait")
    running = trained.begin("--fold", "0")
    waits(trained)

    def step() -> bool:
        if not trained.files.records.exists():
            return False
        (part,) = trained.report().members[0].parts
        return part.status == "training" and part.progress.get("step") == 3

    wait_until(step, "the step in training.json")
    running.send_signal(signal.SIGTERM)
    output = running.communicate()[0]
    assert running.returncode == 143, output


@pytest.mark.fault(45)
@pytest.mark.long
def test_a_full_disk_is_the_commands_own_failure(trained: Trained) -> None:
    with small_disk(trained.folder / "runs", "64k"):
        for _ in range(2):  # what the first has left does not keep the second from its start
            done = trained.train("--fold", "0")
            assert done.returncode == 1, done.stdout + done.stderr
            assert "fold 0: its command" in done.stderr
            assert "the disk is full" in done.stderr
            assert not trained.files.checkpoint("a", Part(0)).exists()
            assert not trained.files.unfinished("a", Part(0)).exists()


@pytest.mark.long
def test_our_own_trainer_and_a_member_whose_labels_its_base_does_not_know(
    trained: Trained, tmp_path: Path
) -> None:
    train = {
        "base_model": str(make_base(tmp_path / "base", "llama")),
        "method": "lora",
        "lora_config": {"target_modules": "all-linear"},
        "training_arguments": {"num_train_epochs": 1},
    }
    config = trained.config(models=[{"name": "a", "train": train}], training={"folds": {"n_splits": 2}})
    trained.write_config(config)
    done = trained.train("--fold", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = trained.files.checkpoint("a", Part(0))
    labels = json.loads((folder / "labels.json").read_text())
    assert labels["id2label"] == {str(number): label for number, label in enumerate(LABELS)}
    (part,) = trained.report().members[0].parts
    assert part.progress["step"] == part.progress["steps"] > 0
    # What only predictions take changes no training.
    done = trained.train("--fold", "0", "--set", "models.a.batch_size=3", "--set", "models.a.max_length=127")
    assert "a: trained anew: fold 0: how the member reads rows changed" in done.stdout
    done = trained.train("--fold", "0", "--set", "models.a.batch_size=4", "--set", "models.a.max_length=127")
    assert "trained already: fold 0" in done.stdout
