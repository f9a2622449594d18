"""What a training does when memory is short: the decisions alone, and with real processes that run out of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ensemble.common import logged_command
from ensemble.common.errors import MemberError
from ensemble.common.protocol import CommonSpec
from ensemble.common.python_process import python_command, python_environment
from ensemble.members.huggingface.training.trainer import TrainerSpec, Training
from ensemble.training import worker
from ensemble.training.worker import Ladder, Rung, Trainings
from tests.checkpoints import make_checkpoint, make_texts
from tests.nvml.sim import NvmlSim, gpus
from tests.project import ROOT, Project, python_path
from tests.training.made import LABELS, make_spec, without_dropout
from tests.training.test_trainer import files, progress

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("default")]
T4 = "Tesla T4 (15.0 GiB)"
# Each longer than the member's max_length, so that rows share micro-batches as their number says.
TEXTS = [text for text in make_texts(200, seed=4, longest=30) if len(text.split()) > 12][:24]
TARGETS = np.eye(3)[np.random.default_rng(5).integers(0, 3, 24)]
TRAIN: dict[str, Any] = {"effective_batch_size": 8, "training_arguments": {"learning_rate": 3e-3}}
STEPS = 6  # 3 in each of 2 epochs


def ladder(folder: Path, device: str = T4, **changes: Any) -> Ladder:
    train = {
        "base_model": "models/base",
        "method": "full",
        "effective_batch_size": 12,
        "per_device_train_batch_size": "auto",
        "training_arguments": {},
        **changes,
    }
    spec = {"labels": LABELS, "settings": {"member": {}}, "train": train, "micro_batch": 8}
    return Ladder(spec, folder, device)


@pytest.fixture(params=[True, False], ids=["8 bits", "no 8 bits"])
def has_8_bit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(worker, "find_spec", lambda name: object() if request.param else None)
    return bool(request.param)


def all_rungs(has_8_bit: bool) -> list[Rung]:
    kinds: list[tuple[bool, str]] = [(False, "adamw_torch"), (True, "adamw_torch")]
    kinds += [(True, "adamw_bnb_8bit")] if has_8_bit else []
    return [Rung(size, *kind) for kind in kinds for size in (12, 6, 3, 1)]


def told(rung: Rung | None) -> tuple[Rung | None, str]:
    """A rung, and why it was taken."""
    return rung, "" if rung is None else rung.why


def test_rows_at_a_time_come_first_and_then_what_takes_more_time(has_8_bit: bool, tmp_path: Path) -> None:
    lower: Rung | None = ladder(tmp_path).first()
    seen = []
    while lower is not None:
        seen.append(lower)
        lower = ladder(tmp_path).below(lower)
    assert seen == all_rungs(has_8_bit)


def test_what_the_user_has_set_is_no_rung(tmp_path: Path) -> None:
    for keys in ({"gradient_checkpointing": True}, {"activation_checkpointing": True}):
        assert ladder(tmp_path, training_arguments={**keys, "optim": "sgd"}).below(Rung(1)) is None
    assert ladder(tmp_path, "", effective_batch_size=12).below(Rung(1, True)) is None  # on a CPU


def test_auto_begins_with_a_whole_step_on_a_gpu(tmp_path: Path) -> None:
    assert ladder(tmp_path).first() == Rung(12)
    assert ladder(tmp_path, per_device_train_batch_size=4).first() == Rung(8)
    assert ladder(tmp_path, "").first() == Rung(8)


def test_what_fits_is_kept_for_a_kind_of_device(tmp_path: Path) -> None:
    rungs = tmp_path / "rungs"
    why = "it ran out of memory with 6 rows at a time and activation checkpointing"
    assert told(ladder(rungs).below(Rung(6, True))) == (Rung(3, True), why)
    assert told(ladder(rungs).first()) == (Rung(3, True), why)
    assert ladder(rungs, "Tesla T4 (14.0 GiB)").first() == Rung(12)
    assert ladder(rungs, method="lora").first() == Rung(12)
    (file,) = rungs.iterdir()
    kept = json.loads(file.read_text())
    contents = [
        "",
        "[]",
        '{"micro_batch": {}}',
        '{"rows": 3, "why": ""}',
        json.dumps({**kept, "optim": "gone"}),
    ]
    for content in contents:
        file.write_text(content)
        assert ladder(rungs).first() == Rung(12)
    file.write_text(json.dumps(kept))
    lower: Rung | None = Rung(3, True)
    while lower is not None:
        lower = ladder(rungs).below(lower)
    assert not [*rungs.iterdir()], "what does not fit is forgotten"


def test_when_nothing_fits_the_user_is_told_what_to_try(has_8_bit: bool, tmp_path: Path) -> None:
    bits = (
        ", activation checkpointing and the 8-bit optimizer; "
        if has_8_bit
        else " and activation checkpointing; "
    )
    start = f"models/base cannot be trained on {T4}: it ran out of memory even with 1 row at a time{bits}try "
    packages = "" if has_8_bit else ", the 8-bit optimizer, which needs the package bitsandbytes"
    rest = f"a shorter max_length, a smaller base_model{packages}"
    assert ladder(tmp_path).advice() == f"{start}train.method: lora, then method: qlora, {rest}"
    assert ladder(tmp_path, method="lora").advice() == f"{start}train.method: qlora, {rest}"
    assert ladder(tmp_path, method="qlora").advice() == f"{start}{rest}"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without dropout, so that weights do not depend on how rows share a micro-batch, beyond rounding."""
    return without_dropout(make_checkpoint(tmp_path_factory.mktemp("bert"), "bert", LABELS))


def spec_of(folder: Path, base: Path, **changes: Any) -> dict[str, Any]:
    return make_spec(
        folder,
        base,
        TEXTS,
        TARGETS,
        **{"member": {"max_length": 8}, "train": TRAIN, "micro_batch": 8, **changes},
    )


def run(spec: Mapping[str, Any], **changes: Any) -> Path:
    Training(TrainerSpec(**{**spec, **changes})).train()
    return Path(spec["out"])


# Makes the processes that train run out of memory: where a file beside it tells how many rows fit.
_SITE = """
import os, pathlib, sys
if any("huggingface.training.trainer" in text for text in sys.orig_argv):
    here = pathlib.Path(__file__).parent
    rules = (here / "rules").read_text().split()
    fits, kills = int(rules[0]), int(rules[1])
    import torch
    def check(layer, inputs):
        if isinstance(layer, torch.nn.Linear) and layer.out_features == 3 and layer.training:
            rows = inputs[0].shape[0]
            with (here / "passes").open("a") as file:
                file.write(f"{os.getpid()} {rows}" + chr(10))
            if rows > kills:
                os.kill(os.getpid(), 9)
            if rows > fits:
                raise torch.OutOfMemoryError("CUDA out of memory.")
    torch.nn.modules.module.register_module_forward_pre_hook(check)
    (here / "allocator").write_text(str([os.environ.get(name) for name in (
        "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")]))
"""


class Site:
    """A folder for PYTHONPATH that makes memory short."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(_SITE)

    def rules(self, fits: int, kills: int = 1 << 30) -> None:
        """Rows that fit, and rows at which the process is killed instead of an error."""
        (self.folder / "rules").write_text(f"{fits} {kills}")
        (self.folder / "passes").unlink(missing_ok=True)

    def passes(self) -> list[list[int]]:
        """The rows of each pass, by process."""
        by_process: dict[str, list[int]] = {}
        for line in (self.folder / "passes").read_text().splitlines():
            pid, rows = line.split()
            by_process.setdefault(pid, []).append(int(rows))
        return [*by_process.values()]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    made = Site(tmp_path / "site")
    for name, value in {**python_environment(), "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", python_path(made.folder, ROOT))
    return made


def train_by_worker(spec: Mapping[str, Any], folder: Path, device: str) -> None:
    (folder / "spec.json").write_text(json.dumps(spec))
    job = {
        "command": [
            *python_command("ensemble.members.huggingface.training.trainer"),
            str(folder / "spec.json"),
        ],
        "out": spec["out"],
        "log": str(folder / "log"),
        "resumes": True,
        "rungs": str(folder / "rungs"),
    }
    common = CommonSpec(
        labels=tuple(LABELS),
        activation="none",
        gpus=1 if device else 0,
        memory_limit_bytes=None,
        seed=0,
        table_path="",
        order_path="",
        shards_dir="",
    )
    settings = {"jobs": [job], "device": device, "environment": {}, "config": {}}
    Trainings(common, settings).run(0, lambda *counts: None)


@pytest.mark.long
@pytest.mark.fault(48)
def test_a_fresh_process_takes_one_rung_less_from_the_last_save(
    base: Path, site: Site, tmp_path: Path
) -> None:
    site.rules(fits=2)
    spec = spec_of(tmp_path / "a", base)
    out = Path(spec["out"])
    (out / ".tmp3kvJBL").write_bytes(b"what a process that was killed had half written")
    train_by_worker(spec, tmp_path / "a", "")
    assert [max(sizes) for sizes in site.passes()] == [8, 4, 2]
    assert progress(out)["micro_batch"] == 2
    assert progress(out)["why"] == "it ran out of memory with 4 rows at a time"
    assert files(out) == files(run(spec_of(tmp_path / "b", base, micro_batch=2)))
    # The next training of the member begins there.
    site.rules(fits=2)
    train_by_worker({**spec, "out": str(tmp_path / "again")}, tmp_path / "a", "")
    assert [max(sizes) for sizes in site.passes()] == [2]


@pytest.mark.long
@pytest.mark.fault(48)
def test_when_no_rung_is_left_the_message_says_what_to_try(base: Path, site: Site, tmp_path: Path) -> None:
    site.rules(fits=0)
    spec = spec_of(tmp_path, base, micro_batch=1)
    with pytest.raises(MemberError, match=r"memory even with 1 row at a time and activation ch.*; try t"):
        train_by_worker(spec, tmp_path, "")
    assert site.passes() == [[1], [1]]
    assert not [*(tmp_path / "rungs").iterdir()]


@pytest.mark.long
@pytest.mark.fault(48)
def test_a_training_that_the_kernel_kills_goes_on_with_less(
    base: Path, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.rules(fits=8, kills=4)
    counts = iter(range(100))
    monkeypatch.setattr(
        logged_command, "oom_kills", lambda: next(counts)
    )  # the kernel counts what nobody may count here
    spec = spec_of(tmp_path, base)
    train_by_worker(spec, tmp_path, "")
    assert [max(sizes) for sizes in site.passes()] == [8, 4]


@pytest.mark.long
def test_train_on_a_gpu_begins_with_a_step_and_says_what_fits(
    project: Project, nvml_sim: NvmlSim, site: Site
) -> None:
    nvml_sim.write(gpus(1))
    site.rules(fits=4)
    project.write_table(rows=24)
    member = {
        "name": "llama",
        "max_length": 4,  # so that rows share micro-batches as their number says
        "text_column": "text",
        "train": {
            "base_model": str(project.models / "llama"),
            "training_arguments": {"max_steps": 2},
        },
    }
    project.write_config(project.config(models=[member], training={"folds": {"n_splits": 2}}))
    done = project.ensemble(
        "train",
        "config.yaml",
        environment={**nvml_sim.environment(), "PYTHONPATH": python_path(site.folder, ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    message = "4 rows at a time: it ran out of memory with 8 rows at a time"
    assert all(f"fold {fold} trained in " in done.stdout for fold in range(2))
    assert done.stdout.count(message) == 2, done.stdout
    # The second fold begins where the first has come down to.
    first, *others = [max(sizes) for sizes in site.passes()]
    assert first > 8
    assert others == [8, 4, 4]
    assert "expandable_segments:True" in (site.folder / "allocator").read_text()
