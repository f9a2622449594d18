"""Two short texts through a loaded model: what it bears, and which shortcuts leave its numbers as they are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import numpy.typing as npt
import torch

from ensemble.protocol import Activation
from ensemble.worker.faults import Verdict, judge
from ensemble.worker.predict import Classifier, Shortcut, probabilities
from ensemble.worker.prompt import Encoded

# One is short, so that beside the other it is mostly padding.
TEXTS = ("one", "one two three four five six seven eight nine ten eleven twelve")
_ALONE, _OTHER_ALONE, _BOTH = np.array([0]), np.array([1]), np.array([0, 1])
Mode = Callable[[], AbstractContextManager[None]]


class Rehearsal:
    """Tries a classifier on ``TEXTS``.

    Args:
        encoded: their token ids.
        is_exact: whether the model computes in whole float32.
        may_omit_mask: whether the device's attention does as well without one.
    """

    def __init__(
        self,
        classifier: Classifier,
        encoded: Encoded,
        activation: Activation,
        is_exact: bool,
        may_omit_mask: bool,
    ) -> None:
        self._classifier = classifier
        self._encoded = encoded
        self._activation = activation
        self._tolerance = 1e-4 if is_exact else 5e-2
        self._possible = classifier.possible - (set() if may_omit_mask else {Shortcut.NO_MASK})

    def bears_padding(self, in_float32: Mode | None) -> bool:
        """Whether the short text gets the same numbers alone and padded to the long one's length.

        On the way the classifier takes the shortcuts that leave the numbers of these texts as they are.

        Args:
            in_float32: while entered, the model computes in float32: for those that overflow on these texts.
        """
        taken = self._classifier.taken
        try:
            # Each by itself: the short one may be a single token, which has nothing to attend to and tells nothing
            # of queries.
            alone = np.concatenate([self._logits(_ALONE), self._logits(_OTHER_ALONE)])
            # With its padding in sight the short text keeps its numbers only where attention is causal.
            if Shortcut.LAST_TOKEN in taken and Shortcut.NO_MASK in self._possible:
                both = self._takes(alone, Shortcut.NO_MASK, Shortcut.NARROW)
                if both or self._takes(alone, Shortcut.NO_MASK):
                    return True
            beside = self._logits(_BOTH)
            if in_float32 is not None and not np.isfinite([*alone, *beside]).all():
                with in_float32():
                    return self._has_same_probabilities(self._logits(_ALONE), self._logits(_BOTH))
            if not self._has_same_probabilities(alone, beside):
                return False
            if Shortcut.LAST_TOKEN in taken:
                self._takes(beside, Shortcut.NARROW)
            elif self._takes(beside, Shortcut.LAST_TOKEN):
                self._takes(alone, Shortcut.NO_MASK)
                self._takes(beside, Shortcut.NARROW)
        except torch.OutOfMemoryError:
            pass  # too tight even for this: the first chunk will say so better
        return True

    def _takes(self, expected: npt.NDArray[np.float64], *shortcuts: Shortcut) -> bool:
        """Whether the first rows' logits stay what they were; if so, these shortcuts are taken from now on."""
        tried = self._possible.intersection(shortcuts)
        if not tried:
            return False
        stays = False
        self._classifier.taken |= tried
        try:
            found = self._logits(_BOTH)[: len(expected)]
            scale = max(1.0, float(np.abs(expected).max()))
            stays = bool(np.allclose(found, expected, rtol=0, atol=self._tolerance * scale))
        except Exception as error:  # a forward that is not written for this
            if judge(error) is Verdict.SUSPECT:  # out of memory, or CUDA is done for
                raise
        finally:
            if not stays:
                self._classifier.taken -= tried
        return stays

    def _has_same_probabilities(
        self, alone: npt.NDArray[np.float64], beside: npt.NDArray[np.float64]
    ) -> bool:
        pair = torch.from_numpy(np.stack([alone[0], beside[0]]))
        found = probabilities(pair, self._activation)
        return bool(np.allclose(found[0], found[1], rtol=0, atol=self._tolerance))

    def _logits(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        return np.asarray(self._classifier.logits(self._encoded, rows).cpu().double().numpy())
