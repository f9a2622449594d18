"""The child side of backbones with a head of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ensemble.common.protocol import CommonSpec
from ensemble.members.huggingface.loading import libraries
from ensemble.members.pooled_cls.spec import PooledSpec

if TYPE_CHECKING:
    from ensemble.data.published_table import PublishedTable
    from ensemble.members.predictor import Predictor


def import_libraries() -> Mapping[str, str]:
    return libraries.import_libraries("ensemble.members.pooled_cls.predictor")


def make_predictor(common: CommonSpec, settings: Mapping[str, Any], table: PublishedTable) -> Predictor:
    from ensemble.members.pooled_cls.predictor import PooledMember

    return PooledMember(PooledSpec.of(common, settings), table)
