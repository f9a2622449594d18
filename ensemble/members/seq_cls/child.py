"""The child side of sequence classifiers: imports what they take, in its order, and makes the predictor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ensemble.common.protocol import CommonSpec
from ensemble.members.huggingface.loading import libraries
from ensemble.members.huggingface.spec import ModelSpec

if TYPE_CHECKING:
    from ensemble.data.published_table import PublishedTable
    from ensemble.members.predictor import Predictor


def import_libraries() -> Mapping[str, str]:
    return libraries.import_libraries("ensemble.members.seq_cls.predictor")


def make_predictor(common: CommonSpec, settings: Mapping[str, Any], table: PublishedTable) -> Predictor:
    from ensemble.members.seq_cls.predictor import SequenceClassifier

    return SequenceClassifier(ModelSpec.of(common, settings), table)
