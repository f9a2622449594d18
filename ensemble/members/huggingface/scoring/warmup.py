"""A few texts through a loaded model: whether its attention is right, what it bears, and which shortcuts leave its
numbers as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from ensemble.common.torch_errors import Verdict, classify
from ensemble.members.huggingface.scoring.classifier import Classifier, Shortcut
from ensemble.members.huggingface.scoring.encode import Encoded
from ensemble.members.huggingface.scoring.forward import Mode

# One is short, so that beside the other it is mostly padding.
TEXTS = ("one", "one two three four five six seven eight nine ten eleven twelve")
# Characters of a text of the member's own that attention is compared on: more than any local rule of it sees, and a
# moment's work for a large model.
MAX_CHARACTERS = 400
_ALONE, _OTHER_ALONE, _BOTH = np.array([0]), np.array([1]), np.array([0, 1])
# How far logits may be from those of eager attention, of the largest of them: what rounding does in many layers;
# in float32 some hundred times what tiny models show.
_EXACT, _ROUNDED = 1e-4, {"float32": 0.05, "float16": 0.05, "bfloat16": 0.15}
# Half precision that goes beyond that is looked at in float32, on weights that stay rounded.
_RETRIED = 1e-3
_EAGER = "eager"


@dataclass(frozen=True)
class WarmUp:
    """The first passes of a model, over ``TEXTS``.

    Attributes:
        encoded: their token ids; then those of a longer text, to compare attention on.
        values: what a member of the kind makes of the classifier's numbers.
        is_exact: whether the model computes in whole float32.
        in_float32: while entered, the model computes in float32: to tell rounding from another formula, and for
            models that overflow on these texts.  None: it cannot.
    """

    classifier: Classifier
    encoded: Encoded
    values: Callable[[torch.Tensor], npt.NDArray[np.float64]]
    is_exact: bool
    in_float32: Mode | None = None

    def check_attention(self, model: Any, dtype: str) -> str:
        """Hold the model's attention against eager attention, on all of the texts.

        Args:
            model: the classifier's.
            dtype: of its weights.

        Returns:
            why there was nothing to compare with; empty where there was, or where it is eager.

        Raises:
            ValueError: the two give other numbers.
        """
        rows = np.arange(len(self.encoded.lengths))
        return check_attention(
            lambda: self._logits(rows, with_mask=True), model, dtype, self.is_exact, self.in_float32
        )

    def bears_padding(self) -> bool:
        """Whether the short text gets the same numbers alone and padded to the long one's length.

        On the way the classifier takes the shortcuts that leave the numbers of these texts as they are.
        """
        taken = self.classifier.taken
        try:
            # Each by itself: the short one may be a single token, which has nothing to attend to and tells nothing
            # of queries.
            alone = np.concatenate([self._logits(_ALONE), self._logits(_OTHER_ALONE)])
            # With its padding in sight the short text keeps its numbers only where attention is causal.
            if Shortcut.LAST_TOKEN in taken and Shortcut.NO_MASK in self.classifier.possible:
                both = self._takes(alone, Shortcut.NO_MASK, Shortcut.LAST_TOKEN_LAYER)
                if both or self._takes(alone, Shortcut.NO_MASK):
                    return True
            beside = self._logits(_BOTH)
            if self.in_float32 is not None and not np.isfinite([*alone, *beside]).all():
                with self.in_float32():
                    return self._has_same_values(self._logits(_ALONE), self._logits(_BOTH))
            if not self._has_same_values(alone, beside):
                return False
            if Shortcut.LAST_TOKEN in taken:
                self._takes(beside, Shortcut.LAST_TOKEN_LAYER)
            elif self._takes(beside, Shortcut.LAST_TOKEN):
                self._takes(alone, Shortcut.NO_MASK)
                self._takes(beside, Shortcut.LAST_TOKEN_LAYER)
        except torch.OutOfMemoryError:
            pass  # too tight even for this: the first chunk will say so better
        return True

    def run(self) -> None:
        """Run a batch of several rows and one of a single row, for which torch.compile makes code of its own."""
        self._logits(_BOTH)
        self._logits(_ALONE)

    @property
    def _tolerance(self) -> float:
        return 1e-4 if self.is_exact else 5e-2

    def _takes(self, expected: npt.NDArray[np.float64], *shortcuts: Shortcut) -> bool:
        """Whether the first rows' logits stay what they were; if so, these shortcuts are taken from now on."""
        tried = self.classifier.possible.intersection(shortcuts)
        if not tried:
            return False
        stays = False
        self.classifier.taken |= tried
        try:
            found = self._logits(_BOTH)[: len(expected)]
            scale = np.abs(expected).max(initial=1)
            stays = bool(np.allclose(found, expected, rtol=0, atol=self._tolerance * scale))
        except Exception as error:  # a forward that is not written for this
            if classify(error) is Verdict.SUSPECT:  # out of memory, or CUDA is done for
                raise
        finally:
            if not stays:
                self.classifier.taken -= tried
        return stays

    def _has_same_values(self, alone: npt.NDArray[np.float64], beside: npt.NDArray[np.float64]) -> bool:
        found = self.values(torch.from_numpy(np.stack([alone[0], beside[0]])))
        return bool(np.allclose(found[0], found[1], rtol=0, atol=self._tolerance))

    def _logits(self, rows: npt.NDArray[np.int64], with_mask: bool = False) -> npt.NDArray[np.float64]:
        return np.asarray(self.classifier.logits(self.encoded, rows, with_mask).cpu().double().numpy())


def logits_tolerance(dtype: str, is_exact: bool) -> float:
    """How far rounding takes logits from those of other code for the same, of the largest of them.

    Args:
        dtype: of the model's weights.
        is_exact: whether it computes in whole float32.
    """
    return _EXACT if is_exact else _ROUNDED.get(dtype, _ROUNDED["bfloat16"])


def check_attention(
    logits: Callable[[], npt.NDArray[np.float64]],
    model: Any,
    dtype: str,
    is_exact: bool,
    in_float32: Mode | None,
) -> str:
    """Hold a model's attention against eager attention, on what ``logits`` runs it over.

    Args:
        logits: a pass over the same rows each time, [rows, labels].
        dtype: of the model's weights.
        is_exact: whether it computes in whole float32.
        in_float32: while entered, it computes in float32; None: it cannot.

    Returns:
        why there was nothing to compare with; empty where there was, or where it is eager.

    Raises:
        ValueError: the two give other numbers.
    """
    chosen = getattr(model.config, "_attn_implementation", None) or _EAGER
    if chosen == _EAGER:
        return ""
    skipped = f"its attention ({chosen}) was not compared with eager: {type(model).__name__} "
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    try:
        can_change = all(part._can_set_attn_implementation() for part in parts)
    except (OSError, KeyError, TypeError):  # it reads their source
        can_change = False
    if not can_change:
        return skipped + "cannot change it once it is loaded"
    tolerance = logits_tolerance(dtype, is_exact)
    attempts: list[tuple[Mode, float]] = [(nullcontext, tolerance)]
    if not is_exact and in_float32 is not None and "flash" not in chosen:
        attempts.append((in_float32, _RETRIED))
    try:
        for mode, tolerance in attempts:
            with mode():
                found = logits()
                try:
                    with _eager(parts):
                        expected = logits()
                except Exception as error:  # a class that is not written for it
                    if classify(error) is not Verdict.SOUND:
                        raise
                    return skipped + f"does not run with that ({type(error).__name__})"
            # Half precision overflows on some texts with the one and not with the other.
            both = np.isfinite(found).all(axis=1) & np.isfinite(expected).all(axis=1)
            found, expected = found[both], expected[both]
            off = np.abs(found - expected).max(initial=0) / np.abs(expected).max(initial=1)
            if off <= tolerance:
                return ""
    except torch.OutOfMemoryError:
        return ""  # the first chunk will say so better
    raise ValueError(
        f"attn_implementation: {chosen} gives other numbers than {_EAGER} on the same texts: logits differ "
        f"by {off:.2g} of the largest, and {tolerance:g} is what rounding does in {dtype}; set "
        f"attn_implementation: {_EAGER} for this member"
    )


@contextmanager
def _eager(parts: list[PreTrainedModel]) -> Iterator[None]:
    """While this lasts a model's parts run with eager attention.

    Through the configs and not by ``set_attn_implementation``, which leaves marks on them in some releases.
    """

    def with_inner(config: Any) -> Iterator[Any]:
        yield config
        for key in config.sub_configs:
            if (inner := getattr(config, key, None)) is not None:
                yield from with_inner(inner)

    configs = {id(config): config for part in parts for config in with_inner(part.config)}.values()
    before = [(config, config._attn_implementation) for config in configs]
    try:
        for config in configs:
            config._attn_implementation = _EAGER
        yield
    finally:
        for config, attention in before:  # from the outermost on, since each sets those below it
            config._attn_implementation = attention
