"""A few texts through a loaded model: whether its attention is right, what it bears, and which shortcuts leave its
numbers as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from ensemble.common.protocol import Activation
from ensemble.common.torch_errors import Verdict, classify
from ensemble.members.huggingface.scoring.classifier import Classifier, Shortcut, probabilities
from ensemble.members.huggingface.scoring.encode import Encoded

# One is short, so that beside the other it is mostly padding.
TEXTS = ("one", "one two three four five six seven eight nine ten eleven twelve")
# Characters of a text of the member's own that attention is compared on: more than any local rule of it sees, and a
# moment's work for a large model.
LONGEST = 400
_ALONE, _OTHER_ALONE, _BOTH = np.array([0]), np.array([1]), np.array([0, 1])
# How far logits may be from those of eager attention, of the largest of them: what rounding does in many layers;
# in float32 some hundred times what tiny models show.
_EXACT, _ROUNDED = 1e-4, {"float32": 0.05, "float16": 0.05, "bfloat16": 0.15}
# Half precision that goes beyond that is looked at in float32, on weights that stay rounded.
_RETRIED = 1e-3
_EAGER = "eager"
Mode = Callable[[], AbstractContextManager[None]]


class _NoEagerError(Exception):
    """The model does not run with eager attention."""


class Rehearsal:
    """Tries a classifier on ``TEXTS``.

    Args:
        encoded: their token ids; then those of a longer text, to compare attention on.
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
        self._is_exact = is_exact
        self._tolerance = 1e-4 if is_exact else 5e-2
        self._possible = classifier.possible - (set() if may_omit_mask else {Shortcut.NO_MASK})

    def check_attention(self, model: Any, dtype: str, in_float32: Mode | None) -> str:
        """Hold the model's attention against eager attention, on all of the texts.

        Args:
            model: the classifier's.
            dtype: of its weights.
            in_float32: while entered, the model computes in float32: to tell rounding from another formula.

        Returns:
            why there was nothing to compare with; empty where there was, or where it is eager.

        Raises:
            ValueError: the two give other numbers.
        """
        chosen = getattr(model.config, "_attn_implementation", None) or _EAGER
        if chosen == _EAGER:
            return ""
        skipped = f"its attention ({chosen}) was not compared with eager: {type(model).__name__} "
        if not _can_change_attention(model):
            return skipped + "cannot change it once it is loaded"
        tolerance = _EXACT if self._is_exact else _ROUNDED.get(dtype, _ROUNDED["bfloat16"])
        try:
            off = self._off_eager(model, nullcontext)
            if off > tolerance and not self._is_exact and in_float32 is not None and "flash" not in chosen:
                tolerance = _RETRIED
                off = self._off_eager(model, in_float32)
        except torch.OutOfMemoryError:
            return ""  # the first chunk will say so better
        except _NoEagerError as error:
            return skipped + f"does not run with that ({type(error.__cause__).__name__})"
        if off > tolerance:
            raise ValueError(
                f"attn_implementation: {chosen} gives other numbers than {_EAGER} on the same texts: logits differ "
                f"by {off:.2g} of the largest, and {tolerance:g} is what rounding does in {dtype}; set "
                f"attn_implementation: {_EAGER} for this member"
            )
        return ""

    def _off_eager(self, model: Any, mode: Mode) -> float:
        """How far the logits are from those of eager attention, as a share of the largest (of 1 at least)."""
        rows = np.arange(len(self._encoded.lengths))
        with mode():
            found = self._logits(rows, with_mask=True)
            try:
                with _eager(model):
                    expected = self._logits(rows, with_mask=True)
            except Exception as error:  # a class that is not written for it
                if classify(error) is not Verdict.SOUND:
                    raise
                raise _NoEagerError from error
        # Half precision overflows on some texts with the one and not with the other.
        both = np.isfinite(found).all(axis=1) & np.isfinite(expected).all(axis=1)
        if not both.any():
            return 0.0
        scale = max(1.0, float(np.abs(expected[both]).max()))
        return float(np.abs(found[both] - expected[both]).max()) / scale

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
            if classify(error) is Verdict.SUSPECT:  # out of memory, or CUDA is done for
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

    def _logits(self, rows: npt.NDArray[np.int64], with_mask: bool = False) -> npt.NDArray[np.float64]:
        return np.asarray(self._classifier.logits(self._encoded, rows, with_mask).cpu().double().numpy())


def _can_change_attention(model: Any) -> bool:
    """Whether transformers says of all of a model's parts that their attention follows the config."""
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    try:
        return all(part._can_set_attn_implementation() for part in parts)
    except (OSError, KeyError, TypeError):  # it reads their source
        return False


@contextmanager
def _eager(model: Any) -> Iterator[None]:
    """While this lasts the model runs with eager attention.

    Through the configs and not by ``set_attn_implementation``, which leaves marks on them in some releases.
    """
    configs: dict[int, Any] = {}
    waiting = [part.config for part in model.modules() if isinstance(part, PreTrainedModel)]
    while waiting:
        config = waiting.pop(0)
        if id(config) not in configs:
            configs[id(config)] = config
            below = [getattr(config, key, None) for key in config.sub_configs]
            waiting = [*(one for one in below if one is not None), *waiting]
    before = [(config, config._attn_implementation) for config in configs.values()]
    try:
        for config, _ in before:
            config._attn_implementation = _EAGER
        yield
    finally:
        for config, attention in before:  # from the outermost on, since each sets those below it
            config._attn_implementation = attention
