"""Name a member's trainings, and the files of trainings below a run's ``output_dir``.

output_dir/
  oof/<member>.csv    the member's out-of-fold predictions
  training/
    training.json     how far trainings are, and how they ended
    folds.csv         the id and the fold of each row of the training table
    data/             the rows that each training reads, such as fold-0.csv
    features/         pooled features, which all heads are trained on
    models/<member>/  fold-0/: a finished checkpoint or adapter; fold-0.unfinished/: where a training writes, and
                      fold-0.old/: what was replaced. Each has its seal beside it, such as fold-0.json, which says
                      what it was made of and what its files hold; while there is fold-0.unfinished.json, fold-0/
                      is to be replaced, and not used; fold-0.spec.json: what our own trainer is to do; rows.bin:
                      the digest and the fold of each row; fold-0.rows.csv: data of a member with inputs
    rungs/            what is known to fit, by member and kind of device
    oof/              the run that predicts each row by models that have not seen it, with files as of any run
    inputs/           such a run of the members that others learn from (inputs), from before these are trained
    logs/             train.log: what the parent did; <member>/fold-0.log: what the commands of a training printed;
                      <member>/worker-0.log: all that a worker printed
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ensemble.common.files import TEMPORARY, remove_folder, sync_directory
from ensemble.config import MemberConfig

# What a training learns of tables, as a user calls it. What comes later may change because of what comes first:
# other rows are divided otherwise.
OF_TABLES = (
    "labels",
    "the rows of the training table",
    "the division into folds",
    "the labels of the training table",
    "the cells of the training table",
    "training.extra",
)


@dataclass(frozen=True)
class Part:
    """Name the rows of a training: those outside a fold, or all of them (``fold`` is None)."""

    fold: int | None

    @property
    def name(self) -> str:
        return "all" if self.fold is None else f"fold-{self.fold}"

    @property
    def text(self) -> str:
        return "all rows" if self.fold is None else f"fold {self.fold}"


def parts_of(model: MemberConfig, splits: int) -> list[Part]:
    """Return the trainings of a member, those of its folds first."""
    parts = [Part(fold) for fold in range(splits)]
    if model.training is not None and model.training.predict_with == "refit":
        parts.append(Part(None))
    return parts


class TrainingDir:
    """Name the files of all trainings of a run; the constructor touches nothing on disk.

    With ``discard_old``, what a training replaces is removed.
    """

    def __init__(self, output_dir: Path, discard_old: bool = False) -> None:
        self._discard_old = discard_old
        self.root = output_dir / "training"
        self.records = self.root / "training.json"
        self.folds = self.root / "folds.csv"
        self.features = self.root / "features"
        self.rungs = self.root / "rungs"
        self.oof_run = self.root / "oof"
        self.inputs_run = self.root / "inputs"
        self.oof_runs = (self.oof_run, self.inputs_run)
        self.train_log = self.root / "logs" / "train.log"
        self._oof = output_dir / "oof"

    def oof(self, member: str) -> Path:
        return self._oof / f"{member}.csv"

    def train_file(self, part: Part, suffix: str, reader: MemberConfig | None = None) -> Path:
        if reader is not None and reader.input_names:  # there are other columns in its files
            return self._of_member(reader.name) / f"{part.name}.rows{suffix}"
        return self.root / "data" / f"{part.name}{suffix}"

    def trained_rows(self, member: str) -> Path:
        return self._of_member(member) / "rows.bin"

    def checkpoint(self, member: str, part: Part) -> Path:
        return self._of_member(member) / part.name

    def seal(self, member: str, part: Part) -> Path:
        return self._of_member(member) / f"{part.name}.json"

    def unfinished(self, member: str, part: Part) -> Path:
        return self._of_member(member) / f"{part.name}.unfinished"

    def begun(self, member: str, part: Part) -> Path:
        """Return the seal of ``unfinished``: of a training that is to be done, or is not in its place yet."""
        return self._of_member(member) / f"{part.name}.unfinished.json"

    def old(self, member: str, part: Part) -> Path:
        return self._of_member(member) / f"{part.name}.old"

    def spec(self, member: str, part: Part) -> Path:
        return self._of_member(member) / f"{part.name}.spec.json"

    def log(self, member: str, part: Part) -> Path:
        return self.root / "logs" / member / f"{part.name}.log"

    def worker_log(self, member: str, replica: int) -> Path:
        return self.root / "logs" / member / f"worker-{replica}.log"

    def _of_member(self, member: str) -> Path:
        return self.root / "models" / member

    def is_finished(self, member: str, part: Part) -> bool:
        """Return whether a checkpoint is in its place with its seal, and none is to replace it."""
        is_sealed = self.seal(member, part).is_file() and not self.begun(member, part).exists()
        return is_sealed and self.checkpoint(member, part).is_dir()

    def tidy(self) -> None:
        """Remove the incomplete files that a killed command left; the out-of-fold runs remove their own."""
        for leftover in self.root.rglob(f".*{TEMPORARY}*"):
            if not {*self.oof_runs}.intersection(leftover.parents) and not leftover.is_dir():
                leftover.unlink(missing_ok=True)

    def clear(self, member: str, part: Part) -> None:
        """Remove what a training has left that was not sealed."""
        self.begun(member, part).unlink(missing_ok=True)
        remove_folder(self.unfinished(member, part))

    def put_in_place(self, member: str, part: Part) -> None:
        """Put a sealed folder in its place, or go on with that; what was there moves to ``old``, or is removed."""
        folder, seal = self.checkpoint(member, part), self.seal(member, part)
        unfinished, old = self.unfinished(member, part), self.old(member, part)
        if unfinished.is_dir():
            if self._discard_old:
                remove_folder(folder)
                seal.unlink(missing_ok=True)
            elif os.path.lexists(folder):
                remove_folder(old)
                folder.rename(old)
            if seal.exists():
                seal.rename(old.with_name(f"{old.name}.json"))
            unfinished.rename(folder)
        self.begun(member, part).rename(seal)
        sync_directory(folder.parent)
