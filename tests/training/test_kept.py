"""What is trained is kept: until another training takes its place, and until a user says that it may go."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ensemble.api import _load
from ensemble.cli.progress import QuietDisplay
from ensemble.common.clock import boot_seconds
from ensemble.common.digests import folder_digests
from ensemble.common.errors import ConfigError, OutputInUse
from ensemble.data.trained_rows import fold_count
from ensemble.pipeline.load import load
from ensemble.pipeline.training_dir import Part
from ensemble.training.command import Asked, preview_trainings
from ensemble.training.command import trained as trained_by
from ensemble.training.records import TrainingReport
from tests.project import Project
from tests.sampling import one_in
from tests.training.test_jobs import Trained
from tests.waiting import wait_until

FOLDS = (Part(0), Part(1))


class Listening(QuietDisplay):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture
def trained(project: Project, monkeypatch: pytest.MonkeyPatch) -> Trained:
    """A member whose folds are to be trained."""
    monkeypatch.chdir(project.folder)
    made = Trained(project.folder, project.models)
    made.write_table(rows=30)
    made.set_up(folds=2)
    return made


def do(*overrides: str, **asked: Any) -> tuple[TrainingReport, list[str]]:
    display = Listening()
    loaded = load([Path("config.yaml")], ["retries=1", *overrides])
    with trained_by(loaded, display, boot_seconds(), Asked(**asked), owns_process=False) as (report, _):
        return report, display.said


def digests(folder: Path) -> dict[str, str]:
    return {name: file.digest for name, file in folder_digests(folder).items()}


def digests_of_folds(trained: Trained) -> list[dict[str, str]]:
    return [digests(trained.files.checkpoint("a", part)) for part in FOLDS]


def took(trained: Trained, seconds: float) -> None:
    """Let the seals say that each training took this long."""
    for part in FOLDS:
        path = trained.files.seal("a", part)
        seal = json.loads(path.read_text(encoding="utf-8"))
        seal["record"]["seconds"] = seconds
        path.write_text(json.dumps(seal), encoding="utf-8")


def test_a_finished_training_stays_until_its_replacement_is_sealed(trained: Trained) -> None:
    assert do()[0].status == "complete"
    before = digests_of_folds(trained)
    (trained.scripts / "trained/note.txt").write_text("another result", encoding="utf-8")
    trained.mode(0, "exit")
    report, message = do("seed=7", fold=0)
    assert report.status == "failed"
    assert any("trained anew: fold 0: seed changed" in text for text in message)
    assert any("not used: fold 1: seed changed" in text for text in message)
    assert digests_of_folds(trained) == before
    assert not any(trained.files.is_finished("a", part) for part in FOLDS), "no command takes them for seed 7"
    # The change is undone: nothing was lost.
    report, message = do()
    assert report.status == "complete"
    assert "a: trained already: fold 0, fold 1" in message
    assert fold_count(trained.files.trained_rows("a")) == 2
    assert len(trained.calls()) == 3
    trained.mode(0, "")
    assert do("seed=7", fold=0)[0].status == "complete"
    assert [trained.files.is_finished("a", part) for part in FOLDS] == [True, False]
    assert digests(trained.files.old("a", Part(0))) == before[0]
    assert digests_of_folds(trained)[0] != before[0]
    assert digests_of_folds(trained)[1] == before[1]
    # Without what is replaced.
    assert do("seed=7", discard_old=True)[0].status == "complete"
    assert not trained.files.old("a", Part(1)).exists()
    assert trained.folds_called() == ["0", "1", "0", "0", "1"]


@pytest.mark.parametrize("step", one_in(2, [1, 2, 3, 4]))
def test_a_kill_while_a_training_takes_the_place_of_another(trained: Trained, step: int) -> None:
    """Once the new seal is written the new training counts, and the old one is still there."""
    do()
    files, part = trained.files, Part(0)
    before = digests(files.checkpoint("a", part))
    (trained.scripts / "trained/note.txt").write_text("another result", encoding="utf-8")
    do("seed=7", fold=0)
    after = digests(files.checkpoint("a", part))
    # As it was before the last steps.
    files.seal("a", part).rename(files.begun("a", part))
    if step < 4:
        files.checkpoint("a", part).rename(files.unfinished("a", part))
    if step < 3:
        files.old("a", part).with_name("fold-0.old.json").rename(files.seal("a", part))
    if step < 2:
        files.old("a", part).rename(files.checkpoint("a", part))
    assert not files.is_finished("a", part)
    do("seed=7", fold=0)
    assert trained.folds_called() == ["0", "1", "0"]
    assert files.is_finished("a", part)
    assert digests(files.checkpoint("a", part)) == after
    assert digests(files.old("a", part)) == before


def killed_at(change: int, *overrides: str) -> bool:
    """Train in a process that is killed before one of its changes of the trainings' files, from 1."""
    child = os.fork()
    if child:
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])
    changes = 0

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal changes
        if event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir") and "/models/" in str(arguments[0]):
            changes += 1
            if changes == change:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    try:
        do(*overrides)
    finally:
        os._exit(0)


@pytest.mark.parametrize("change", one_in(20, [*range(1, 40)]))
def test_a_kill_at_any_change_of_files_loses_nothing_that_is_trained(trained: Trained, change: int) -> None:
    do()
    before = digests_of_folds(trained)
    (trained.scripts / "trained/note.txt").write_text("another result", encoding="utf-8")
    assert killed_at(change, "seed=7")
    for part, content in zip(FOLDS, before, strict=True):
        places = [trained.files.checkpoint("a", part), trained.files.old("a", part)]
        assert content in [digests(place) for place in places if place.is_dir()]
    assert do("seed=7")[0].status == "complete"
    assert all("note.txt" in digests for digests in digests_of_folds(trained))
    assert [digests(trained.files.old("a", part)) for part in FOLDS] == before
    assert all(trained.files.is_finished("a", part) for part in FOLDS)


@pytest.mark.fault(20)
def test_no_other_command_takes_away_what_a_command_predicts_with(trained: Trained) -> None:
    first = trained.begin()
    try:
        wait_until(trained.files.oof_run.joinpath(".lock").exists, "the run of the held-out rows")
        first.send_signal(signal.SIGSTOP)
        before = [trained.files.checkpoint("a", part).stat().st_ino for part in FOLDS]
        with pytest.raises(OutputInUse, match=f"in use by process {first.pid}"):
            do(fresh=True)
        assert [trained.files.checkpoint("a", part).stat().st_ino for part in FOLDS] == before
    finally:
        first.send_signal(signal.SIGCONT)
        output = first.communicate()[0]
    assert first.returncode == 0, output
    assert len(trained.calls()) == 2


def test_what_is_trained_anew_is_told_before_and_asked_for_if_it_takes_long(trained: Trained) -> None:
    do()
    took(trained, 2000.0)
    before = digests_of_folds(trained)
    # Another division outdates both, and a third was never trained.
    changed = "training.folds.n_splits=3"
    loaded, sentences = preview_trainings(load([Path("config.yaml")], [changed]))
    assert (
        sentences[0]
        == "a: would be trained anew: fold 0, fold 1: the division into folds changed since it was trained"
    )
    assert "2 finished trainings that took 1:06:40 h would be made again" in sentences[1]
    assert [*loaded.outdated["a"]] == [0, 1, 2]
    done = trained.ensemble("plan", "config.yaml", "--set", changed, "--json")
    facts = json.loads(done.stdout)["members"][0]["training"]
    assert facts["missing"] == ["fold-0", "fold-1", "fold-2"]
    assert facts["outdated"] == dict.fromkeys(
        ("fold-0", "fold-1"), "the division into folds changed since it was trained"
    )
    for command in ("train", "run"):
        done = trained.ensemble(command, "config.yaml", "--set", changed)
        assert done.returncode == 2, done.stdout
        assert "add --retrain to begin" in " ".join(done.stderr.split())
    assert len(trained.calls()) == 2
    assert digests_of_folds(trained) == before
    assert do()[1][-1] == "a: trained already: fold 0, fold 1"
    do(changed, fold=2)
    assert fold_count(trained.files.trained_rows("a")) == 3
    do()
    assert fold_count(trained.files.trained_rows("a")) == 2, "as it was trained"
    # One fold alone took less than an hour.
    assert do(changed, fold=2)[0].status == "complete"
    assert digests_of_folds(trained) == before


def test_what_changed_is_named(trained: Trained) -> None:
    do()
    shutil.copyfile("test.csv", "more.csv")
    config = yaml.safe_load(Path("config.yaml").read_text(encoding="utf-8"))
    config["training"]["extra"] = [{"path": "more.csv"}]
    trained.write_config(config)
    sentences = preview_trainings(load([Path("config.yaml")]))[1]
    assert any("fold 0, fold 1: training.extra changed" in sentence for sentence in sentences)


def test_what_was_edited_is_trained_anew_and_what_was_touched_is_not(trained: Trained) -> None:
    do()
    config = trained.files.checkpoint("a", Part(1)) / "config.json"
    config.write_text(config.read_text(encoding="utf-8") + " ", encoding="utf-8")
    assert any(text.startswith("a: trained anew: fold 1: the files in") for text in do()[1])
    config.touch()
    do()
    assert trained.folds_called() == ["0", "1", "1"]
    trained.files.seal("a", Part(1)).write_text("{}", encoding="utf-8")
    assert "a: trained anew: fold 1: its seal cannot be read" in do()[1]
    assert trained.folds_called() == ["0", "1", "1", "1"]


@pytest.mark.parametrize("content", [None, b"broken"])
def test_which_rows_were_trained_on_is_written_again(trained: Trained, content: bytes | None) -> None:
    do()
    rows = trained.files.trained_rows("a")
    rows.unlink()
    if content is not None:
        rows.write_bytes(content)
    do()
    assert len(trained.calls()) == 2, "no training is repeated"
    assert fold_count(rows) == 2


def test_commands_that_train_nothing_say_what_a_setting_has_outdated(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    """What rehearse, tune and fit begin with."""
    do()
    capsys.readouterr()
    _load("config.yaml", {"seed": 7}, quiet=False)
    sentence = (
        "! a: taken as it was trained, and train would train it anew: fold 0, fold 1: seed changed since"
    )
    assert capsys.readouterr().out.startswith(sentence)
    _load("config.yaml", {}, quiet=False)
    assert not capsys.readouterr().out


@pytest.mark.long
def test_a_limit_that_leaves_no_time_to_train_anew_says_what_is_kept(trained: Trained) -> None:
    do()
    before = digests_of_folds(trained)
    trained.mode(0, "wait")
    trained.mode(1, "wait")
    done = trained.ensemble("run", "config.yaml", "--set", "time_limit=1s", "--set", "seed=7")
    assert done.returncode == 4
    text = " ".join(done.stdout.split())
    assert "a is left out: " in text
    assert "Its earlier trainings are kept (fold 0, fold 1), and used again if a change is undone" in text
    assert digests_of_folds(trained) == before
    submissions = [trained.folder / "runs/first/submission.csv", trained.folder / "out/submission.csv"]
    for submission in submissions:
        shutil.copyfile(trained.folder / "sample.csv", submission)  # for one that an earlier run has left
    done = trained.ensemble("run", "config.yaml", "--set", "time_limit=1s", "--set", "seed=7")
    assert done.returncode == 4
    assert "out/submission.csv of an earlier run stays" in " ".join(done.stderr.split())
    for submission in submissions:
        assert submission.read_bytes() == (trained.folder / "sample.csv").read_bytes()


@pytest.mark.parametrize("is_mended", one_in(2, [True, False]))
def test_a_result_that_was_refused_is_sealed_once_it_is_mended(trained: Trained, is_mended: bool) -> None:
    trained.mode(1, "two")
    report, _ = do()
    assert report.status == "failed"
    unfinished = trained.files.unfinished("a", Part(1))
    if is_mended:
        shutil.rmtree(unfinished / "checkpoint-9")
    report, message = do()
    if is_mended:
        assert report.status == "complete"
        assert any(text.startswith("a: fold 1: what its training has left is taken now") for text in message)
        assert trained.folds_called().count("1") == 1
    else:
        assert report.status == "failed"
        assert any(
            text.startswith("a: trained anew: fold 1: what it has left is refused: ") for text in message
        )
        assert trained.folds_called().count("1") == 2


@pytest.mark.long
def test_fresh_goes_on_after_a_stop_and_never_returns_to_the_old_ones(trained: Trained) -> None:
    do()
    (trained.scripts / "trained/note.txt").write_text("another result", encoding="utf-8")
    trained.mode(1, "two")
    assert do(fresh=True)[0].status == "failed"
    shutil.rmtree(trained.files.unfinished("a", Part(1)) / "checkpoint-9")
    report, message = do()
    assert report.status == "complete"
    assert any("is taken now" in text for text in message)
    assert trained.folds_called() == ["0", "1", "0", "1"]
    assert all("note.txt" in digests for digests in digests_of_folds(trained))


def test_a_finished_training_out_of_use_is_asked_for_again_and_again(trained: Trained) -> None:
    do()
    took(trained, 4000.0)
    path = trained.files.seal("a", Part(0))
    seal = json.loads(path.read_text(encoding="utf-8"))
    seal["record"]["seconds"] = 1.0
    path.write_text(json.dumps(seal), encoding="utf-8")
    assert do("seed=7", fold=0)[0].status == "complete", "it took a second"
    with pytest.raises(ConfigError) as refused:
        do("seed=7")
    assert any("trained anew: fold 1: seed changed" in problem for problem in refused.value.problems)
    assert do("seed=7", retrain=True)[0].status == "complete"


def test_a_refused_result_is_not_removed_for_another_setting_without_a_word(trained: Trained) -> None:
    trained.mode(1, "two")
    do()
    path = trained.files.begun("a", Part(1))
    seal = json.loads(path.read_text(encoding="utf-8"))
    seal["record"]["seconds"] = 4000.0
    path.write_text(json.dumps(seal), encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        do("seed=7")
    assert any(
        "seed changed since it ended, and it was not sealed" in text for text in refused.value.problems
    )
    assert trained.files.unfinished("a", Part(1)).is_dir()


@pytest.mark.long
def test_what_another_training_left_is_never_taken_for_a_refused_one(trained: Trained) -> None:
    trained.mode(1, "two")
    do(fold=1)
    trained.mode(1, "exit")
    do("seed=7", fold=1)
    shutil.copytree(trained.scripts / "trained", trained.files.unfinished("a", Part(1)), dirs_exist_ok=True)
    do(fold=1)
    assert len(trained.calls()) == 3, "nothing is left of the first"
