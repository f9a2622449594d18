"""The child side of image classifiers."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from ensemble.common.protocol import CommonSpec
from ensemble.members.huggingface.loading import libraries
from ensemble.members.image_cls.spec import ImageSpec

if TYPE_CHECKING:
    from ensemble.data.published_table import PublishedTable
    from ensemble.members.predictor import Predictor


def import_libraries() -> Mapping[str, str]:
    versions = libraries.import_libraries("ensemble.members.image_cls.predictor")
    return {**versions, "pillow": version("pillow")}


def make_predictor(common: CommonSpec, settings: Mapping[str, Any], table: PublishedTable) -> Predictor:
    from ensemble.members.image_cls.predictor import ImageClassifierMember

    return ImageClassifierMember(ImageSpec.of(common, settings), table)
