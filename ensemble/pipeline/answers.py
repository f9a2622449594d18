"""Make the answers of a submission from its config, and check them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ensemble.common.errors import ConfigError
from ensemble.config.load import LoadedConfig
from ensemble.config.schema import AnswerConfig
from ensemble.data.answers import Answer, compile_format, halfway
from ensemble.data.table import InputTable
from ensemble.members.base import Inspection
from ensemble.merging.methods import METHODS
from ensemble.merging.rules import RowRules
from ensemble.pipeline.checks import Problems
from ensemble.pipeline.prepared import merged_activation


def make_answers(loaded: LoadedConfig, problems: Problems) -> dict[str, Answer]:
    """Return the answer of each column that holds answers, except those whose format has a mistake."""
    submission, labels = loaded.config.submission, loaded.config.labels
    answers: dict[str, Answer] = {}
    for name, column in ({} if submission is None else submission.answers).items():
        with problems.at(f"{answer_key(loaded, name)}: format"):
            settings = AnswerConfig(top=1) if column.answer == "label" else column.answer
            numbers = settings.expected or ()
            answers[name] = Answer(
                texts=tuple(column.names.get(label, label) for label in labels),
                top=settings.top or 1,
                separator=settings.separator,
                numbers=numbers,
                thresholds=settings.thresholds or halfway(numbers),
                template=None if column.format is None else compile_format(column.format),
            )
    return answers


def answer_key(loaded: LoadedConfig, column: str) -> str:
    """Return the place of a column with answers in the config."""
    return loaded.document.where(("submission", "columns", column))


def check_answers(
    loaded: LoadedConfig,
    answers: Mapping[str, Answer],
    table: InputTable | None,
    inspected: Mapping[str, Inspection],
    problems: Problems,
) -> None:
    """See whether numbers can be expected, and try the formats on each row of the table."""
    labels, method = loaded.config.labels, METHODS.load(loaded.config.ensemble.method)
    is_exclusive = RowRules.are_exclusive(merged_activation(inspected), method)
    for name, answer in answers.items():
        with problems.at(answer_key(loaded, name)):
            if answer.numbers and len(labels) > 1 and not is_exclusive:
                raise ConfigError(
                    "expected: needs probabilities that sum to 1: softmax members, and a merge method that gives "
                    "probabilities"
                )
            if table is not None and answer.template is not None:
                values = np.broadcast_to(1.0, (table.rows, len(labels)))
                answer.cells(values, table, np.arange(table.rows))
