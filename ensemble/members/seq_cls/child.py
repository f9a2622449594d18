"""The child side of sequence classifiers: imports what they take, in its order, and makes the predictor."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ensemble.common.protocol import CommonSpec
from ensemble.members.huggingface.loading.lazy_imports import import_torch_and_transformers, no_collections
from ensemble.members.huggingface.spec import ModelSpec

if TYPE_CHECKING:
    from ensemble.data.published_table import PublishedTable
    from ensemble.members.predictor import Predictor


def import_libraries() -> Mapping[str, str]:
    with no_collections():
        import_torch_and_transformers()
        from ensemble.members.seq_cls import predictor  # noqa: F401  and all that it needs, as part of start-up

    import torch
    import transformers

    names = ("accelerate", "bitsandbytes", "pyarrow", "tokenizers")
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "transformers": transformers.__version__,
        **{name: version(name) for name in names if find_spec(name) is not None},
    }


def make_predictor(common: CommonSpec, settings: Mapping[str, Any], table: PublishedTable) -> Predictor:
    from ensemble.members.seq_cls.predictor import SequenceClassifier

    return SequenceClassifier(ModelSpec.of(common, settings), table)
