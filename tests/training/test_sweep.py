"""Trainings that are killed, or run out of memory, at each of their steps; then the same command again.

The trainer alone is killed at every step and every moment of it; the command ``ensemble train`` at some.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from ensemble.pipeline.training_dir import Part, TrainingDir
from tests.checkpoints import make_texts
from tests.faults.forked.runs import ForkedRuns
from tests.faults.inject import Fault, Injected
from tests.faults.steps import Judge, Step, Verdict
from tests.project import LABELS, Project
from tests.sampling import one_in, shares
from tests.training.made import make_spec

ROWS, EFFECTIVE_BATCH, MICRO_BATCH = 16, 4, 2  # of a fold
STEPS, PASSES = 2 * ROWS // EFFECTIVE_BATCH, EFFECTIVE_BATCH // MICRO_BATCH  # of two epochs, and of a step
LOOKS = 2  # forward passes before the first step, at how the model takes padding
# Each longer than the member's max_length, so that rows share micro-batches as their number says.
TEXTS = [text for text in make_texts(400, seed=4, longest=30) if len(text.split()) > 12]
TRAIN = {"effective_batch_size": EFFECTIVE_BATCH, "training_arguments": {"learning_rate": 1e-3}}
METHODS: dict[str, dict[str, Any]] = {
    "full": TRAIN,
    "lora": {**TRAIN, "method": "lora", "lora_config": {"r": 4, "lora_dropout": 0.1}},
}
Result = tuple[str, dict[str, bytes]]
# Of the changes behind the last step, one share is usual.
SHARES = 18
# Of a step: in its second micro-batch, in its save, before the save has its name, while the older one is removed.
MOMENTS = ["within", "saving", "saved", "removing"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tiny_models: Path) -> Path:
    """A checkpoint whose training draws random numbers."""
    folder = shutil.copytree(tiny_models / "llama", tmp_path_factory.mktemp("base") / "llama")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.1}), encoding="utf-8")
    return folder


def new_spec(folder: Path, base: Path, method: str) -> Path:
    """Write the spec of a training that saves after each step, and return its file."""
    make_spec(
        folder,
        base,
        TEXTS[:ROWS],
        np.eye(3)[np.random.default_rng(5).integers(0, 3, ROWS)],
        member={"max_length": 8},
        train=METHODS[method],
        micro_batch=MICRO_BATCH,
        save_seconds=0.0,
    )
    return folder / "spec.json"


@pytest.fixture(scope="module", params=METHODS)
def undisturbed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, base: Path, forked: ForkedRuns
) -> Result:
    """A method, and the files of a training that nothing disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert forked.trainer(new_spec(folder, base, request.param)) == 0, forked.printed
    return request.param, files(folder / "out")


def files(folder: Path) -> dict[str, bytes]:
    """What a training leaves, but how it went."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "progress.json"}


def saves(out: Path) -> list[str]:
    return sorted(path.name for path in out.glob("saves/*/save-*"))


def first_step(folder: Path) -> int:
    """The step that the last process of a training went on from."""
    step: int = json.loads((folder / "progress.json").read_text(encoding="utf-8"))["first_step"]
    return step


def kill_at(number: int, counts: Callable[[Step], bool], verdict: Verdict = Verdict.KILL) -> Judge:
    """Kills at the n-th, from 0, of the steps that count, once."""
    seen = 0

    def judge(step: Step) -> Verdict:
        nonlocal seen
        if step.is_sync or not counts(step):
            return Verdict.GO
        seen += 1
        return verdict if seen == number + 1 else Verdict.GO

    return judge


def killer(moment: str, step: int, folder: Path) -> dict[str, Any]:
    """What kills a trainer at a moment of a step, from 1; each save is hit at another of its writes."""
    if moment == "within":
        return {"faults": Injected(folder, Fault("kill", at=LOOKS + PASSES * (step - 1) + 1, times=1))}
    if moment == "saving":
        return {"judge": kill_at(3 * step, lambda change: f"/checkpoint-{step}/" in change.paths[-1])}
    if moment == "saved":
        return {"judge": kill_at(0, lambda change: change.paths[-1].endswith(f"/save-{step}"))}
    older = f"/removed-save-{step - 1}/"
    return {"judge": kill_at(step % 5, lambda change: older in change.paths[-1] and "unlink" in change.call)}


@pytest.mark.fault(43)
@pytest.mark.parametrize(
    ("step", "moment"),
    one_in(
        11, [(step, moment) for step in range(1, STEPS + 1) for moment in MOMENTS[: 4 if step > 1 else 3]]
    ),
)
def test_killed_at_each_step(
    step: int,
    moment: str,
    base: Path,
    undisturbed: Result,
    forked: ForkedRuns,
    tmp_path: Path,
) -> None:
    method, expected = undisturbed
    spec = new_spec(tmp_path, base, method)
    out = tmp_path / "out"
    assert forked.trainer(spec, **killer(moment, step, tmp_path)) == -9, forked.printed
    done = step if moment == "removing" else step - 1
    assert f"save-{done}" in saves(out) or not done
    assert f"save-{done + 1}" not in saves(out)
    assert forked.trainer(spec) == 0, forked.printed
    assert first_step(out) == done
    assert files(out) == expected


@pytest.mark.fault(43)
def test_killed_while_it_removes_the_saves_of_other_settings(
    base: Path, undisturbed: Result, forked: ForkedRuns, tmp_path: Path
) -> None:
    method, expected = undisturbed
    spec = new_spec(tmp_path, base, method)
    content = json.loads(spec.read_text(encoding="utf-8"))
    assert forked.trainer(spec, kill_at(0, reaches("save-3"))) == -9, forked.printed
    spec.write_text(json.dumps({**content, "seed": 7}), encoding="utf-8")
    assert forked.trainer(spec, kill_at(2, lambda step: "/save-2/" in step.paths[0])) == -9, forked.printed
    assert forked.steps[-1].call.startswith("unlink")
    spec.write_text(json.dumps(content), encoding="utf-8")
    assert forked.trainer(spec) == 0, forked.printed
    assert files(tmp_path / "out") == expected


def reaches(end: str) -> Callable[[Step], bool]:
    """What tells a change of the files whose paths end so; ``*`` stands for what differs between two trainings."""
    return lambda step: any(fnmatch(path, f"*/{end}") for path in step.paths)


class Trained(Project):
    """A project whose members are trained in two folds, and what their trainings leave."""

    def __init__(self, folder: Path, models: Path, members: Mapping[str, dict[str, Any]], base: Path) -> None:
        super().__init__(folder, models)
        folder.mkdir(exist_ok=True)
        self._members, self._base = members, base
        self.steps: list[Step] = []  # of the command
        self.ids = [f"{number:03d}" for number in range(2 * ROWS)]
        labels = np.random.default_rng(5).choice(LABELS, 2 * ROWS).tolist()
        rows = [list(cells) for cells in zip(self.ids, TEXTS[: 2 * ROWS], labels, strict=True)]
        self.write_csv("train.csv", ["id", "text", "label"], rows)
        common = {"base_model": str(base), "per_device_train_batch_size": MICRO_BATCH}
        self.write_config(
            self.config(
                data={"path": "train.csv", "label_column": "label"},
                models=[
                    {"name": name, "max_length": 8, "train": {**common, **train}}
                    for name, train in members.items()
                ],
                submission=None,
                training={"folds": {"n_splits": 2}},
            )
        )

    def anew(self, folder: Path, names: Sequence[str] = ()) -> Trained:
        """The same, not trained yet, with these members only."""
        members = {name: self._members[name] for name in names or self._members}
        return Trained(folder, self.models, members, self._base)

    def fold(self, member: str, fold: int) -> Path:
        return TrainingDir(self.folder / "runs/first").checkpoint(member, Part(fold))

    def results(self) -> dict[str, bytes]:
        """The files of all folds, without how they went, and the out-of-fold predictions."""
        root = self.folder / "runs/first"
        folders = [root / "oof", *(self.fold(member, fold) for member in self._members for fold in range(2))]
        return {
            str(folder.relative_to(root) / name): content
            for folder in folders
            for name, content in files(folder).items()
        }

    def attempts(self) -> dict[str, list[int]]:
        """How often each training was begun by the latest command that trained it."""
        text = (self.folder / "runs/first/training/training.json").read_text(encoding="utf-8")
        members = json.loads(text)["members"]
        return {member["name"]: [part["attempts"] for part in member["parts"]] for member in members}


@pytest.fixture(scope="module")
def whole(
    tmp_path_factory: pytest.TempPathFactory, base: Path, tiny_models: Path, forked: ForkedRuns
) -> Trained:
    """A project that nothing disturbs."""
    made = Trained(tmp_path_factory.mktemp("whole"), tiny_models, METHODS, base)
    assert forked.train(made.folder, save_seconds=0.0) == 0, forked.printed
    made.steps = forked.steps
    return made


def is_at_the_end(method: str) -> Callable[[Step], bool]:
    """What tells the changes that the trainer of the first fold makes behind the save of its last step."""
    folder = f"/{method}/fold-0.unfinished/"
    has_begun = False

    def counts(step: Step) -> bool:
        nonlocal has_begun
        is_of_fold = folder in step.paths[-1] and not step.is_sync
        has_begun = has_begun or (is_of_fold and step.paths[-1].endswith(f"/save-{STEPS}"))
        return has_begun and is_of_fold

    return counts


@pytest.mark.fault(43)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("share", shares(SHARES))
def test_a_trainer_is_killed_at_each_change_behind_its_last_step(
    share: int, method: str, whole: Trained, forked: ForkedRuns, tmp_path: Path
) -> None:
    """The command goes on by itself; half a file is no part of the result, and half a save is not gone on from.

    One method at every other change, and the other method at the rest.
    """
    count = sum(map(is_at_the_end(method), whole.steps))
    assert count > 20
    for number in range(2 * share + [*METHODS].index(method), count, 2 * SHARES):
        project = whole.anew(tmp_path / str(number), [method])
        judge = kill_at(number, is_at_the_end(method), Verdict.KILL_IT)
        assert forked.train(project.folder, "--fold", "0", judge=judge, save_seconds=0.0) == 0, forked.printed
        assert project.attempts() == {method: [2]}
        assert files(project.fold(method, 0)) == files(whole.fold(method, 0)), number


@pytest.mark.fault(43)
@pytest.mark.parametrize(
    ("end", "done"),
    one_in(
        4,
        [
            ("lora/fold-1.unfinished/saves/*/save-7", 6),  # in the second epoch
            ("lora/fold-1", 0),  # between the seal and the rename
            ("lora/fold-1.json", 0),  # before the seal has its name: without it nothing is trusted
            ("full/fold-1.unfinished/saves/*/save-1", 0),
        ],
    ),
)
def test_the_whole_command_is_killed_and_the_same_command_goes_on(
    end: str, done: int, whole: Trained, forked: ForkedRuns, tmp_path: Path
) -> None:
    disturbed = whole.anew(tmp_path / "disturbed")
    judge = kill_at(0, reaches(end))
    assert forked.train(disturbed.folder, judge=judge, save_seconds=0.0) == -9, forked.printed
    assert forked.train(disturbed.folder, save_seconds=0.0) == 0, forked.printed
    assert first_step(disturbed.fold(end.partition("/")[0], 1)) == done
    assert disturbed.attempts()["full"][0] == 1
    assert disturbed.results() == whole.results()


@pytest.fixture(scope="module", params=METHODS)
def without_dropout(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    tiny_models: Path,
    forked: ForkedRuns,
) -> Trained:
    """A project of the member "m", whose weights are those of its steps but for rounding; one fold is trained."""
    train = copy.deepcopy(METHODS[request.param])
    train.get("lora_config", {})["lora_dropout"] = 0.0
    folder = tmp_path_factory.mktemp("without dropout")
    made = Trained(folder, tiny_models, {"m": train}, tiny_models / "llama")
    assert forked.train(folder, "--fold", "0") == 0, forked.printed
    return made


@pytest.mark.fault(48)
@pytest.mark.parametrize(
    ("step", "micro_batch", "saves"),
    one_in(
        STEPS + 1,
        [(step, batch, (step + batch) % 2 == 0) for step in range(STEPS) for batch in range(PASSES)],
    ),
)
def test_out_of_memory_at_each_micro_batch(
    step: int, micro_batch: int, saves: bool, without_dropout: Trained, forked: ForkedRuns, tmp_path: Path
) -> None:
    """One rung down with the same effective batch, from the last save or from the start."""
    project = without_dropout.anew(tmp_path / "short of memory")
    at = LOOKS + PASSES * step + micro_batch
    fault = Fault("raise", at=at, times=1, error="torch.OutOfMemoryError", text="no memory")
    faults, seconds = Injected(tmp_path, fault), 0.0 if saves else 1e6
    code = forked.train(project.folder, "--fold", "0", faults=faults, save_seconds=seconds)
    assert code == 0, forked.printed
    assert len(faults.pids()) == 1
    assert project.attempts() == {"m": [1]}
    told = json.loads((project.fold("m", 0) / "progress.json").read_text(encoding="utf-8"))
    assert (told["step"], told["steps"], told["micro_batch"]) == (STEPS, STEPS, MICRO_BATCH // 2)
    assert told["first_step"] == (step if saves else 0)
    assert told["why"].endswith(f" memory with {MICRO_BATCH} rows at a time")
    got, expected = weights(project.fold("m", 0)), weights(without_dropout.fold("m", 0))
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(got[name], values, atol=1e-5, err_msg=name)


def weights(folder: Path) -> dict[str, Any]:
    (file,) = folder.glob("*.safetensors")
    return dict(load_file(file))
