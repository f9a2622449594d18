"""How likely a score is to lie between each two cut points: the cumulative logit model (McCullagh 1980)."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ensemble.members.huggingface.scoring.member import TextMember
from ensemble.members.huggingface.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class OrdinalSpec(ModelSpec):
    cut_points: tuple[float, ...]


class OrdinalMember(TextMember[OrdinalSpec]):
    Spec = OrdinalSpec

    def _values(self, logits: torch.Tensor) -> npt.NDArray[np.float64]:
        cuts = torch.tensor(self._spec.cut_points, dtype=torch.float64)
        below = torch.sigmoid(cuts - logits[:, :1].double())  # [rows, cut points]
        edges = torch.nn.functional.pad(torch.nn.functional.pad(below, (1, 0)), (0, 1), value=1.0)
        return np.asarray(edges.diff(dim=1).numpy())
