"""Start the child side of kinds that run a checkpoint: import the libraries, then make the predictor."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from ensemble.common.protocol import CommonSpec

if TYPE_CHECKING:
    from ensemble.data.published_table import PublishedTable
    from ensemble.members.predictor import Predictor


class CheckpointChild:
    """Make predictors of the kind with this ``CheckpointMember``, named such as "package.module.Class"."""

    def __init__(self, predictor: str) -> None:
        self._predictor = predictor

    def import_libraries(self) -> Mapping[str, str]:
        # Imports make a million objects, all of which stay: the garbage collector need not look through them.
        was_enabled = gc.isenabled()
        gc.disable()
        import torch
        import transformers

        predictor = resolve_name(self._predictor)
        gc.freeze()
        if was_enabled:
            gc.enable()
        packages = ("accelerate", "bitsandbytes", "pyarrow", "tokenizers")
        installed = [name for name in packages if find_spec(name) is not None]
        return {
            "torch": torch.__version__,
            "cuda": torch.version.cuda or "",
            "transformers": transformers.__version__,
            **{name: version(name) for name in (*installed, *predictor.packages)},
        }

    def make_predictor(
        self, common: CommonSpec, settings: Mapping[str, Any], table: PublishedTable
    ) -> Predictor:
        predictor = resolve_name(self._predictor)
        made: Predictor = predictor(predictor.Spec.of(common, settings), table)
        return made


# The child side of the kind with this predictor, as ``predictor.load_child`` asks for it.
child_of = CheckpointChild
