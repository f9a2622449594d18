"""Warm up a loaded model: check its attention and its padding, and try shortcuts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from ensemble.common.torch_errors import Verdict, classify, is_out_of_memory, one_line
from ensemble.members.huggingface.loading.architecture import attention_of_padded
from ensemble.members.huggingface.loading.flex_attention import is_given_up
from ensemble.members.huggingface.scoring.forward import Encoding, Mode, Scorer, Shortcut
from ensemble.members.huggingface.spec import CAPPED_BLOCKS, FLEX, QUERIES_PER_BLOCK

# The first text is short, so that beside the other it is mostly padding.
TEXTS = ("one", "one two three four five six seven eight nine ten eleven twelve")
# Characters of a row's text on which attention is compared: more than local attention sees, and little work for a
# large model.
MAX_CHARACTERS = 400
# For attention in blocks: into the second of them, where a token has five characters.
MAX_CHARACTERS_OF_BLOCKS = 6 * QUERIES_PER_BLOCK
_SHORT, _BOTH = np.array([0]), np.array([0, 1])
# How far logits may differ from those of eager attention, relative to the largest: as much as rounding does in many
# layers; in float32 some hundred times as much as tiny models show.
_EXACT_TOLERANCE = 1e-4
_TOLERANCES = {"float32": 0.05, "float16": 0.05, "bfloat16": 0.15}
# If half precision differs more, the comparison is repeated in float32, with weights that stay rounded.
_FLOAT32_TOLERANCE = 1e-3
_EAGER = "eager"


@dataclass(frozen=True)
class WarmUp:
    """Run the first passes of a model, over ``TEXTS``.

    Attributes:
        encoded: their token ids, and then those of a longer text, to compare attention on.
        values: makes probabilities of the classifier's numbers.
        is_exact: whether the model computes in full float32.
        in_float32: to tell rounding from another formula, and for models that overflow on these texts; None: it
            cannot.
    """

    classifier: Scorer[Any]
    encoded: Encoding
    values: Callable[[torch.Tensor], npt.NDArray[np.float64]]
    is_exact: bool
    in_float32: Mode | None = None

    def check_attention(self, model: Any, dtype: str, is_asked: bool) -> str:
        """Refuse a model whose logits on the texts are not those of eager attention.

        Args:
            is_asked: whether the user has set the attention.  If not, a model for which ``capped_blocks`` or
                ``flex`` gives other numbers is not refused and computes with eager attention from now on.

        Returns:
            a note: why no comparison was possible, or what was wrong; empty if the numbers agree.
        """
        chosen = getattr(model.config, "_attn_implementation", None) or _EAGER
        if chosen == _EAGER:
            return ""
        skipped = f"its attention ({chosen}) was not compared with eager: {type(model).__name__} "
        parts = _parts(model)
        try:
            can_change = all(part._can_set_attn_implementation() for part in parts)
        except (OSError, KeyError, TypeError):  # transformers reads their source
            can_change = False
        if not can_change:
            if is_asked and chosen in (CAPPED_BLOCKS, FLEX):
                raise ValueError(
                    f"attn_implementation: {chosen} cannot be used, as {type(model).__name__} computes attention "
                    "by itself; leave the key out"
                )
            return skipped + "cannot change it once it is loaded"
        attempts: list[tuple[Mode, float]] = [(nullcontext, self._rounding(dtype))]
        if not self.is_exact and self.in_float32 is not None and "flash" not in chosen:
            attempts.append((self.in_float32, _FLOAT32_TOLERANCE))
        rows = np.arange(len(self.encoded.lengths))
        try:
            for mode, tolerance in attempts:
                with mode():
                    actual = self._logits(rows, with_mask=True)
                    try:
                        with _eager(parts):
                            expected = self._logits(rows, with_mask=True)
                    except Exception as error:  # a class without eager attention
                        if classify(error) is not Verdict.SOUND:
                            raise
                        return skipped + f"does not run with that ({type(error).__name__})"
                difference = _difference(actual, expected)
                if difference <= tolerance:
                    return ""
        except torch.OutOfMemoryError:
            return ""  # the first chunk will fail with a better message
        if chosen in (CAPPED_BLOCKS, FLEX) and not is_asked:
            _set_attention(parts, _EAGER)
            return f"eager attention, as {CAPPED_BLOCKS} gives other numbers for this model"
        raise ValueError(
            f"attn_implementation: {chosen} gives other numbers than {_EAGER} on the same texts: logits differ "
            f"by {difference:.2g} of the largest, and {tolerance:g} is what rounding does in {dtype}; set "
            f"attn_implementation: {_EAGER} for this member"
        )

    def pack(self, model: Any, tokens: int, dtype: str, timeout: float) -> str:
        """Let rows stand one behind the other in batches of so many tokens, if their numbers stay the same.

        They are compared with those of padded batches, whose attention was compared with eager. Otherwise the model
        gets the attention that suits padded batches.

        Args:
            timeout: seconds for compiling.

        Returns:
            a note: why rows are not packed; empty if they are.
        """
        self.classifier.packed_tokens = tokens
        problem = "this model, or its kind of labels or rows, cannot be packed"
        if self.classifier.packs(self.encoded):
            problem = f"a batch of {tokens} tokens has no room for the texts that it is tried on"
            if self.encoded.lengths.sum() <= tokens:
                problem = self._problem_of_packing(dtype, timeout)
        if not problem:
            return ""
        self.classifier.packed_tokens = 0
        _set_attention(_parts(model), attention_of_padded(model))
        self.check_attention(model, dtype, is_asked=False)  # which may take eager in its place
        return f"{model.config._attn_implementation} attention instead of {FLEX}: {problem}"

    def _problem_of_packing(self, dtype: str, timeout: float) -> str:
        rows = np.arange(len(self.encoded.lengths))
        expected = self._logits(rows, with_mask=True)
        packed: Future[npt.NDArray[np.float64]] = Future()

        def compute() -> None:
            try:
                packed.set_result(self._logits(rows))
            except BaseException as error:  # for the thread that waits
                packed.set_exception(error)
            else:  # in torch 2.10 without a GPU, compiling again is a crash once the thread of the first time ends
                Event().wait()

        # A thread, which can be left alone where compiling does not end.
        Thread(target=compute, name="compile", daemon=True).start()
        try:
            difference = _difference(packed.result(timeout), expected)
        except FutureTimeoutError:
            is_given_up.set()
            return f"it was not compiled within {timeout:g} s (compile_timeout)"
        except Exception as error:  # compilers raise many types
            if classify(error) is Verdict.SUSPECT and not is_out_of_memory(error):
                raise
            return f"{type(error).__name__}: {one_line(error)[:160]}"
        is_same = difference <= self._rounding(dtype)
        return "" if is_same else f"logits differ by {difference:.2g} of the largest"

    def repeats(self) -> bool:
        """Return whether the texts get the same numbers a second time, which a model that draws some does not."""
        rows = np.arange(len(self.encoded.lengths))
        with suppress(torch.OutOfMemoryError):  # the first chunk will fail with a better message
            first, second = self._logits(rows, with_mask=True), self._logits(rows, with_mask=True)
            return _difference(second, first) <= self.tolerance
        return True

    def tolerates_padding(self) -> bool:
        """Return whether the short text gets the same numbers alone and padded to the long one's length.

        Also let the classifier take the shortcuts that leave the numbers of these texts as they are.
        """
        try:
            separate, together = self._logits(_SHORT), self._logits(_BOTH)
            if self.in_float32 is not None and not np.isfinite([*separate, *together]).all():
                with self.in_float32():
                    return self._has_same_values(self._logits(_SHORT), self._logits(_BOTH))
            if not self._has_same_values(separate, together):
                return False
            # The long text as well: the short one may be a single token, on which queries have no effect. Beside
            # the short one it has no padding.
            separate = np.concatenate([separate, together[1:]])
            self._try_shortcut(Shortcut.LAST_TOKEN, separate)
            if Shortcut.LAST_TOKEN in self.classifier.taken:
                self._try_shortcut(Shortcut.NO_MASK, separate)
        except torch.OutOfMemoryError:
            pass  # the first chunk will fail with a better message
        return True

    def run(self) -> None:
        """Run a batch of several rows and a batch of one, for which torch.compile makes separate code."""
        self._logits(_BOTH)
        self._logits(_SHORT)

    def _rounding(self, dtype: str) -> float:
        """Return how far logits of two kinds of attention may be apart, relative to the largest."""
        return _EXACT_TOLERANCE if self.is_exact else _TOLERANCES.get(dtype, _TOLERANCES["bfloat16"])

    @property
    def tolerance(self) -> float:
        return 1e-4 if self.is_exact else 5e-2

    def _try_shortcut(self, shortcut: Shortcut, expected: npt.NDArray[np.float64]) -> None:
        """Take a shortcut if the logits of both texts stay the same."""
        if shortcut not in self.classifier.possible:
            return
        self.classifier.taken.add(shortcut)
        is_same = False
        try:
            scale = np.abs(expected).max(initial=1)
            is_same = np.allclose(self._logits(_BOTH), expected, rtol=0, atol=self.tolerance * scale)
        except Exception as error:  # a forward that is not written for this
            if classify(error) is Verdict.SUSPECT:  # out of memory, or CUDA has failed
                raise
        finally:
            if not is_same:
                self.classifier.taken.remove(shortcut)

    def _has_same_values(self, separate: npt.NDArray[np.float64], together: npt.NDArray[np.float64]) -> bool:
        values = self.values(torch.from_numpy(np.stack([separate[0], together[0]])))
        return bool(np.allclose(values[0], values[1], rtol=0, atol=self.tolerance))

    def _logits(self, rows: npt.NDArray[np.int64], with_mask: bool = False) -> npt.NDArray[np.float64]:
        return np.asarray(self.classifier.logits(self.encoded, rows, with_mask).cpu().double().numpy())


def _difference(actual: npt.NDArray[np.float64], expected: npt.NDArray[np.float64]) -> float:
    """Return how far logits are apart at most, relative to the largest, in rows that are finite in both."""
    # In half precision one of the two may overflow on texts on which the other does not.
    is_finite = np.isfinite(actual).all(axis=1) & np.isfinite(expected).all(axis=1)
    actual, expected = actual[is_finite], expected[is_finite]
    return float(np.abs(actual - expected).max(initial=0) / np.abs(expected).max(initial=1))


@contextmanager
def _eager(parts: list[PreTrainedModel]) -> Iterator[None]:
    """Let a model's parts run with eager attention."""
    before = [(config, config._attn_implementation) for part in parts for config in _configs(part.config)]
    try:
        _set_attention(parts, _EAGER)
        yield
    finally:
        for config, attention in before:  # outermost first, since each sets those within it
            config._attn_implementation = attention


def _set_attention(parts: list[PreTrainedModel], attention: str) -> None:
    # Through the configs and not by ``set_attn_implementation``, which leaves marks on them in some releases.
    for part in parts:
        for config in _configs(part.config):
            config._attn_implementation = attention


def _parts(model: Any) -> list[PreTrainedModel]:
    return [part for part in model.modules() if isinstance(part, PreTrainedModel)]


def _configs(config: Any) -> Iterator[Any]:
    """Yield a config and those within it."""
    yield config
    for key in config.sub_configs:
        if getattr(config, key, None) is not None:
            yield from _configs(getattr(config, key))
