"""Run a sequence classifier, whose head gives a number for each label, or one for each of a row's choices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from ensemble.common.activations import softmax
from ensemble.data.json_cells import TemplateProblem, choice_rows
from ensemble.members.huggingface.scoring.classifier import probabilities
from ensemble.members.huggingface.scoring.member import TextMember
from ensemble.members.huggingface.spec import CheckpointSpec, ModelSpec
from ensemble.members.predictor import Prediction, Report


@dataclass(frozen=True, kw_only=True)
class ClassifierSpec(ModelSpec):
    """Add the keys of ``SequenceClassifierSettings`` to those of a text model."""

    choices: str | None = None


class SequenceClassifier(TextMember[ClassifierSpec]):
    """Predict with a checkpoint that has a classification head."""

    Spec: ClassVar[type[CheckpointSpec]] = ClassifierSpec

    def predict(self, rows: npt.NDArray[np.int64], report: Report) -> Prediction:
        if self._spec.choices is None:
            return super().predict(rows, report)
        read: list[dict[str, object]] = []
        counts = np.zeros(len(rows), dtype=np.int64)
        bad_rows: dict[int, str] = {}
        for number, row in enumerate(self._table.take(rows)):
            try:
                of_row = list(choice_rows(row, self._spec.choices))
                counts[number] = len(of_row)
                read += of_row
            except TemplateProblem as error:
                bad_rows[number] = f"choices: {error}"

        share = len(rows) / max(1, len(read))

        def report_share(rows: int, tokens: int = 0, padded_tokens: int = 0) -> None:
            # A chunk goes on to its end: a row with choices on both sides of a stop would be computed again whole,
            # so the rest would come into other batches.
            report(int(rows * share), tokens, padded_tokens)

        row_of = np.repeat(np.arange(len(rows)), counts)
        scored = self._predict(read, report_share, groups=row_of)
        for choice, reason in scored.bad_rows.items():
            bad_rows.setdefault(int(row_of[choice]), reason)
        # Positions that a row does not have get the probability 0.
        scores = np.full((len(rows), len(self._spec.labels)), -np.inf)
        first_of_row = np.cumsum(counts) - counts
        scores[row_of, np.arange(len(read)) - first_of_row[row_of]] = scored.values[:, 0]
        counters = replace(scored.counters, rows=len(rows) - len(bad_rows))
        return replace(scored, values=softmax(scores), bad_rows=bad_rows, counters=counters)

    def _values(self, logits: torch.Tensor) -> npt.NDArray[np.float64]:
        if self._spec.choices is None:
            return super()._values(logits)
        return probabilities(logits, "none")
