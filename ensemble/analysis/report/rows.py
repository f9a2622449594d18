"""Show rows to read: the costliest, the most disputed and the least certain, with their texts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from ensemble.analysis.predictions import Predictions
from ensemble.analysis.report.base import ReportData, Section, number, percent
from ensemble.common.errors import EnsembleError
from ensemble.common.protocol import Activation
from ensemble.common.text import listed
from ensemble.jobs.when import entropy_terms, margins
from ensemble.merging.methods.base import Values
from ensemble.merging.metrics import row_losses

_ROWS = 20
_MAX_CHARACTERS = 400
_MAX_LABELS = 3


class RowsToRead(Section):
    title: ClassVar[str] = "Rows to read"

    def html(self, data: ReportData) -> Markup:
        predictions = data.predictions
        lists = []
        for title, note, score_name, scores in _lists(data):
            rows = highest(scores, _ROWS)
            if len(rows):
                lists.append((title, note, score_name, scores, rows))
        texts: Mapping[int, Mapping[str, str]] = {}
        problem = ""
        try:
            if lists:
                texts = data.table_texts.of_rows(np.concatenate([rows for *_, rows in lists]).tolist())
        except EnsembleError as error:
            problem = str(error)
        shown = []
        for title, note, score_name, scores, rows in lists:
            cards = [
                _card(predictions, row, f"{score_name} {scores[row]:.3g}", texts.get(row, {}))
                for row in rows.tolist()
            ]
            shown.append((title, note, cards))
        return self.render(
            lists=shown,
            open=3,  # the other rows are a click away
            problem=problem,
            has_answers=predictions.activation != "none",
            has_truth=predictions.truth is not None,
        )


def _lists(data: ReportData) -> Iterator[tuple[str, str, str, Values]]:
    """Yield the lists of rows: title, note, what the score is called, and the scores of all rows."""
    predictions, weights = data.predictions, data.mean_weights
    activation, ensemble = predictions.activation, predictions.ensemble
    if ensemble is not None and predictions.truth is not None:
        score_name = "squared error" if activation == "none" else "log loss"
        note = (
            f"The highest {score_name} of the ensemble. Some of these are mistakes of the members, some are wrong "
            "labels in the table: read them before anything is fitted to them."
        )
        yield "Costliest", note, score_name, row_losses(predictions.labelled, ensemble)
    weighted = [name for name in predictions.members if weights[name] > 0]
    if len(weighted) > 1:
        members = [predictions.members[name] for name in weighted]
        scores = disagreement(members, np.array([weights[name] for name in weighted]), activation)
        score_name = "standard deviation" if activation == "none" else "Jensen-Shannon divergence in bits"
        note = f"Where the members are furthest apart, by the {score_name}."
        yield "Most disputed", note, score_name, np.where(scores > 0, scores, np.nan)
    if ensemble is not None and activation != "none":
        note = "Where the ensemble's first two labels are closest."
        score_name = "1 \N{MINUS SIGN} margin"
        if activation == "sigmoid":
            note = "Where the ensemble's answers are closest to 50 % (mean entropy of the labels)."
            score_name = "entropy in bits"
        yield "Least certain", note, score_name, uncertainty(ensemble, activation)


def _card(predictions: Predictions, row: int, score: str, texts: Mapping[str, str]) -> dict[str, object]:
    right = _true_labels(predictions, row)
    facts = {}
    if predictions.truth is not None:
        facts["truth"] = ", ".join(right) or "none of the labels"
        if predictions.truth.ndim == 2 and predictions.activation != "sigmoid":
            facts["truth"] = _first_labels(predictions, predictions.truth[row])
    if predictions.ensemble is not None:
        facts["ensemble"] = _first_labels(predictions, predictions.ensemble[row])
    return {
        "id": predictions.ids[row].as_py(),
        "row": f"{row + 1:,}",
        "score": score,
        "texts": {name: _cut(text) for name, text in texts.items()},
        "facts": facts,
        "answers": _answers(predictions, row),
        "right": right,
    }


def _cut(text: str) -> str:
    text = text.strip()
    if len(text) <= _MAX_CHARACTERS:
        return text or "(empty)"
    return f"{text[:_MAX_CHARACTERS].rstrip()} \N{HORIZONTAL ELLIPSIS} ({len(text):,} characters)"


def _first_labels(predictions: Predictions, values: Values) -> str:
    write = number if predictions.activation == "none" else percent
    order = np.argsort(-values, kind="stable")[:_MAX_LABELS]
    return ", ".join(f"{predictions.labels[place]} {write(float(values[place]))}" for place in order)


def _true_labels(predictions: Predictions, row: int) -> list[str]:
    if predictions.truth is None or predictions.activation == "none":
        return []
    truth = predictions.truth[row]
    if predictions.activation == "softmax":
        return [predictions.labels[int(truth if predictions.truth.ndim == 1 else truth.argmax())]]
    return [label for label, value in zip(predictions.labels, truth.tolist(), strict=True) if value >= 0.5]


def _answers(predictions: Predictions, row: int) -> dict[str, str]:
    """Return the members that give each answer, the most frequent answer first."""
    members: defaultdict[str, list[str]] = defaultdict(list)
    for name, of_member in predictions.members.items():
        values = of_member[row]
        if np.isnan(values).any():
            members["(no such row)"].append(name)
        elif predictions.activation == "softmax":
            members[predictions.labels[int(values.argmax())]].append(
                f"{name} {percent(float(values.max()), 0)}"
            )
        elif predictions.activation == "sigmoid":
            positive = [
                label for label, value in zip(predictions.labels, values, strict=True) if value >= 0.5
            ]
            answer = listed(positive, _MAX_LABELS, show=str) or "none"
            members[answer].append(f"{name} {percent(float(np.maximum(values, 1 - values).min()), 0)}")
        else:
            members[", ".join(number(float(value)) for value in values[:_MAX_LABELS])].append(name)
    answers = sorted(members.items(), key=lambda item: -len(item[1]))
    return {answer: listed(names, 6, show=str) for answer, names in answers}


def highest(scores: Values, count: int) -> npt.NDArray[np.int64]:
    """Return the numbers of the rows with the highest scores, of equal ones the earlier first; NaN is no score."""
    rows = np.argsort(-scores, kind="stable")[:count]  # NaN comes last
    return rows[~np.isnan(scores[rows])]


def uncertainty(values: Values, activation: Activation) -> Values:
    """Return how unsure the ensemble is of each row, [rows].

    That is 1 - (first - second probability) for "softmax", the mean entropy of the labels in bits for "sigmoid".
    """
    if activation == "sigmoid":
        return _entropy(values, activation)
    if values.shape[1] < 2:
        return np.full(len(values), np.nan)
    return np.asarray(1 - margins(values))


def disagreement(members: Sequence[Values], weights: Values, activation: Activation) -> Values:
    """Return how far apart the members are in each row, [rows]; NaN in rows of fewer than two members.

    It is the generalized Jensen-Shannon divergence (Lin 1991) in bits: the entropy of the weighted mean minus the
    weighted mean of the entropies, with "sigmoid" its mean over the labels; for regression the weighted standard
    deviation, the labels' root mean square. Weights are scaled to 1 over the members that have the row.

    Args:
        members: float64 [rows, labels] each; NaN in rows that the member does not have.
    """
    is_present = np.array([~np.isnan(values[:, 0]) for values in members])
    shares = weights[:, None] * is_present
    shares = shares / np.where(is_present.sum(axis=0) > 1, shares.sum(axis=0), np.nan)

    def mean(numbers: Sequence[Values]) -> Values:
        total = np.zeros_like(numbers[0])
        for of_member, share in zip(numbers, shares, strict=True):
            total += share.reshape(-1, *[1] * (total.ndim - 1)) * np.nan_to_num(of_member)
        return total

    merged = mean(members)
    if activation == "none":
        return np.sqrt(mean([np.square(values - merged).mean(axis=1) for values in members]))
    entropies = mean([_entropy(values, activation) for values in members])
    return np.maximum(_entropy(merged, activation) - entropies, 0.0)


def _entropy(values: Values, activation: Activation) -> Values:
    """Return the entropy of each row in bits, of labels that are not exclusive their mean."""
    if activation == "sigmoid":
        return np.asarray((entropy_terms(values) + entropy_terms(1 - values)).mean(axis=1) / np.log(2))
    return np.asarray(entropy_terms(values).sum(axis=1) / np.log(2))
