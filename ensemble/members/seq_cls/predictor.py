"""Run a sequence classifier, whose head gives a number for each label."""

from __future__ import annotations

from ensemble.members.huggingface.scoring.member import TextMember
from ensemble.members.huggingface.spec import ModelSpec


class SequenceClassifier(TextMember[ModelSpec]):
    """Predict with a checkpoint that has a classification head."""
