"""Name the files of trainings below a run's ``output_dir``."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ensemble.common.files import TEMPORARY
from ensemble.config import MemberConfig


@dataclass(frozen=True)
class Part:
    """Name the rows of a training: those outside a fold, or all of them (``fold`` is None)."""

    fold: int | None

    @classmethod
    def named(cls, name: str) -> Part:
        """Return the part with a name, such as "fold-0"."""
        return cls(None if name == "all" else int(name.removeprefix("fold-")))

    @property
    def name(self) -> str:
        return "all" if self.fold is None else f"fold-{self.fold}"

    @property
    def text(self) -> str:
        return "all rows" if self.fold is None else f"fold {self.fold}"


def parts_of(model: MemberConfig, splits: int) -> list[Part]:
    """Return the trainings of a member, those of its folds first."""
    is_refit = model.training is not None and model.training.predict_with == "refit"
    return [*map(Part, range(splits)), *([Part(None)] if is_refit else [])]


@dataclass(frozen=True)
class TrainingDir:
    """Name the files of all trainings of a run."""

    output_dir: Path

    @property
    def root(self) -> Path:
        return self.output_dir / "training"

    @property
    def folds(self) -> Path:
        """Return the CSV with the id and the fold of each row of the training table."""
        return self.root / "folds.csv"

    @property
    def oof_run(self) -> Path:
        """Return the ``output_dir`` of the run that predicts each row by models that have not seen it."""
        return self.root / "oof"

    def train_file(self, part: Part, suffix: str) -> Path:
        """Return the file with the rows to train on, such as ``training/data/fold-0.csv``."""
        return self.root / "data" / f"{part.name}{suffix}"

    def checkpoint(self, member: str, part: Part) -> Path:
        """Return the folder of a finished checkpoint or adapter."""
        return self.root / "models" / member / part.name

    def unfinished(self, member: str, part: Part) -> Path:
        """Return the folder that a training writes to, which becomes ``checkpoint`` when it has ended well."""
        return self.root / "models" / member / f"{part.name}.unfinished"

    def seal(self, member: str, part: Part) -> Path:
        """Return the file that says what a finished checkpoint was made of, and what its files hold."""
        return self.root / "models" / member / f"{part.name}.json"

    def spec(self, member: str, part: Part) -> Path:
        """Return the file that tells our own trainer what to do."""
        return self.root / "models" / member / f"{part.name}.spec.json"

    @property
    def features(self) -> Path:
        """Return the folder of pooled features, which all heads are trained on."""
        return self.root / "features"

    @property
    def rungs(self) -> Path:
        """Return the folder with what is known to fit, by member and kind of device."""
        return self.root / "rungs"

    def tidy(self) -> None:
        """Remove the incomplete files that a killed command left."""
        for folder in (self.root, self.output_dir / "oof"):
            for leftover in folder.rglob(f".*{TEMPORARY}*"):
                leftover.unlink(missing_ok=True)

    def remove(self, member: str, part: Part) -> None:
        """Remove a training, finished or not; its seal first, which nothing is trusted without."""
        self.seal(member, part).unlink(missing_ok=True)
        for folder in (self.checkpoint(member, part), self.unfinished(member, part)):
            if folder.exists():
                shutil.rmtree(folder)

    def log(self, member: str, part: Part) -> Path:
        """Return the file with what the commands of a training have printed."""
        return self.root / "logs" / member / f"{part.name}.log"

    def worker_log(self, member: str, replica: int) -> Path:
        return self.root / "logs" / member / f"worker-{replica}.log"

    @property
    def train_log(self) -> Path:
        """Return the log of ``ensemble train`` itself."""
        return self.root / "logs" / "train.log"

    @property
    def records(self) -> Path:
        """Return the file that says how far trainings are, and how they ended."""
        return self.root / "training.json"

    def is_finished(self, member: str, part: Part) -> bool:
        """Return whether a checkpoint is in its place with its seal, without which nothing is trusted."""
        return self.checkpoint(member, part).is_dir() and self.seal(member, part).is_file()

    def trained_rows(self, member: str) -> Path:
        """Return the file with the digest and the fold of each row that the member was trained on."""
        return self.root / "models" / member / "rows.bin"

    def oof(self, member: str) -> Path:
        """Return the CSV with the member's out-of-fold predictions."""
        return self.output_dir / "oof" / f"{member}.csv"

    def oof_files(self, members: Iterable[str]) -> list[Path]:
        """Return those of these files that there are."""
        return [path for path in map(self.oof, members) if path.is_file()]
