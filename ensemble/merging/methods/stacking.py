"""Merge by stacking: a linear model of the members' log probabilities, which logistic regression finds (``fit``).

    score(k)  =  intercept(k)  +  sum over members i and labels j of  c(i, k, j) * x_i(j)

    x_i(j)    =  ln p_i(j)                     of a softmax member
                 ln p_i(j) - ln (1 - p_i(j))   of a sigmoid one
                 the value itself              of a member that gives raw values

    result    =  softmax of the scores         where all members are softmax
                 sigmoid of each score         where some are sigmoid
                 the scores                    of raw values

p_i is calibrated if the member has a calibration, and clipped to float64's epsilon (2.2e-16), of sigmoid members
also to 1 - epsilon. ``coefficients`` has for each member

    m: 0.7                                a number: c(m, k, k) for every label k; all others are 0
    m: {neg: 0.7, pos: 0.5}               by label: c(m, k, k); labels that are not named have 0
    m: {neg: {neg: 0.7, pos: -0.1}}       by label and the member's label: c(m, neg, neg) and c(m, neg, pos)

and ``intercept`` a number by label, 0 for labels that are not named. Both replace weights, which must be left out
or 1. In rows that a member lacks, its x(j) is the mean over the other members that have a coefficient for j. Labels
that are impossible in a row (``data.allowed_labels``) are 0 in the result alone, as ln 0 would outweigh all else.

D. H. Wolpert, "Stacked generalization", Neural Networks 5 (1992), 241-259.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, TypeAlias

import numpy as np
from pydantic import Field

from ensemble.config import EnsembleConfig
from ensemble.config.values import Factor, Factors, MustBe, foreign_label
from ensemble.merging.calibration import features, probabilities_of
from ensemble.merging.methods.base import Block, Members, MergeMethod, Values

_Coefficients: TypeAlias = Annotated[
    Factor | dict[str, Annotated[Factor | dict[str, Factor], MustBe("a number, or one for each label")]],
    MustBe("a number, a number for each label, or a mapping of labels to such mappings"),
]


class StackingSettings(EnsembleConfig):
    """A linear model of the members' log probabilities, as ``fit --method stacking`` finds it."""

    # By member: a number, one for each label, or a mapping of labels to such mappings.
    coefficients: Annotated[dict[str, _Coefficients], MustBe("a mapping of members to numbers", dict)] = (
        Field(examples=["{a: 0.7, b: 0.5}"])
    )
    # By label: what is added to its score; 0 for labels that are left out.
    intercept: Factors = Field(default={})


class Stacking(MergeMethod):
    """See the module."""

    Settings = StackingSettings
    settings: StackingSettings
    takes_impossible = True
    fit_options = "--method stacking"

    def __init__(self, settings: EnsembleConfig, members: Members) -> None:
        super().__init__(settings, members)
        self._intercept = np.array([self.settings.intercept.get(label, 0.0) for label in members.labels])
        self._matrices = {
            name: self._matrix(coefficients) for name, coefficients in self.settings.coefficients.items()
        }

    def problems(self) -> Iterator[str]:
        names, by_member = self.members.names, self.settings.coefficients
        mappings: dict[str, object] = {"intercept": self.settings.intercept}
        for name, coefficients in by_member.items():
            mappings[f"coefficients.{name}"] = coefficients
            if isinstance(coefficients, dict):
                mappings |= {f"coefficients.{name}.{label}": row for label, row in coefficients.items()}
            if name not in names:
                yield f"ensemble.coefficients.{name}: there is no member of that name"
        for key, mapping in mappings.items():
            for label in mapping if isinstance(mapping, dict) else ():
                if label not in self.members.labels:
                    yield f"ensemble.{key}.{label}: {foreign_label(self.members.labels)}"
        missing = [name for name in names if name not in by_member]
        if missing:
            yield f"ensemble.coefficients: has none for {', '.join(missing)}; give each member one, if only 0"
        if any(weight != 1 for weight in self.members.weights):
            yield "ensemble.method: stacking has coefficients in place of weights; leave weight out of the models"
        activations = {*self.members.activations}
        if "none" in activations and len(activations) > 1:
            yield "ensemble.method: stacking needs probabilities from every member, or raw values from every one"

    def merge(self, block: Block, weights: Values) -> Values:
        shape = block.probabilities.shape[1:]
        by_member = {}
        mean, count = np.zeros(shape), np.zeros(shape)
        for number, name in enumerate(self.members.names):
            if self._matrices[name].any():
                values = features(block.probabilities[number], self.members.activations[number])
                counts = block.is_present[number][:, None] & self._matrices[name].any(axis=0)
                by_member[name] = values, block.is_present[number][:, None]
                mean += np.where(counts, values, 0.0)
                count += counts
        with np.errstate(invalid="ignore"):  # rows that nobody has
            mean /= count
        scores = np.tile(self._intercept, (len(mean), 1))
        for name, matrix in self._matrices.items():
            if matrix.any():  # members that are not merged lack all rows
                values, is_present = by_member.get(name, (mean, count > 0))
                filled = np.where(is_present, values, mean)
                filled[:, ~matrix.any(axis=0)] = 0.0
                scores += filled @ matrix.T
        return probabilities_of(scores, self.members.activations)

    def _matrix(self, coefficients: float | dict[str, float | dict[str, float]]) -> Values:
        """Return a member's coefficients as float64 [labels, labels]: by the score's label and the member's."""
        labels = self.members.labels
        matrix = np.zeros((len(labels), len(labels)))
        for row, label in enumerate(labels):
            of_label = coefficients.get(label, 0.0) if isinstance(coefficients, dict) else coefficients
            if isinstance(of_label, dict):
                matrix[row] = [of_label.get(other, 0.0) for other in labels]
            else:
                matrix[row, row] = of_label
        return matrix
