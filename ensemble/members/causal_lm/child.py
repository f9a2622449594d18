"""The child side of language models that are scored at label tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ensemble.common.protocol import CommonSpec
from ensemble.members.causal_lm.spec import CausalSpec
from ensemble.members.huggingface.loading import libraries

if TYPE_CHECKING:
    from ensemble.data.published_table import PublishedTable
    from ensemble.members.predictor import Predictor


def import_libraries() -> Mapping[str, str]:
    return libraries.import_libraries("ensemble.members.causal_lm.predictor")


def make_predictor(common: CommonSpec, settings: Mapping[str, Any], table: PublishedTable) -> Predictor:
    from ensemble.members.causal_lm.predictor import CausalMember

    return CausalMember(CausalSpec.of(common, settings), table)
