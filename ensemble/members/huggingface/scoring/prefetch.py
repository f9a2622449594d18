"""Token ids of the chunks that will come next, made in the background of the forward passes.

A hint costs nothing but time: where it was wrong, or where making the ids failed, the chunk's rows are tokenized
when they are asked for, and an error shows then.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ensemble.members.huggingface.scoring.encode import Encoded

Rows: TypeAlias = npt.NDArray[np.int64]
Encode = Callable[[Rows, Callable[[], None]], Encoded]
# The chunk that is about to be asked for, and the one after it.
_MOST_HINTS = 2


class _Dropped(Exception):
    """Nobody wants these rows any more."""


class _Hint:
    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.encoded: Encoded | None = None
        self.is_dropped = False
        # True for each block of rows that has its ids, False at the end.
        self.goes_on: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def step(self) -> None:
        if self.is_dropped:
            raise _Dropped
        self.goes_on.put(True)


class Upcoming:
    """Makes chunks' token ids, ahead of their time where it is told what will come.

    Args:
        encode: token ids of these rows of the table, with a callback after each block of them.
        in_background: whether a hint is worth a thread; otherwise it is not heeded.
    """

    def __init__(self, encode: Encode, in_background: bool) -> None:
        self._encode = encode
        self._in_background = in_background
        self._hints: list[_Hint] = []
        self._change = threading.Lock()
        # Tokenizers do not bear two threads: one that sets its truncation while the other uses it raises.
        self._tokenizing = threading.Lock()

    def prepare(self, rows: Rows) -> None:
        """Begin with these rows now; older hints are dropped, but for the last one.  From any thread."""
        if not self._in_background:
            return
        with self._change:
            if any(np.array_equal(hint.rows, rows) for hint in self._hints):
                return
            hint = _Hint(rows)
            self._hints.append(hint)
            while len(self._hints) > _MOST_HINTS:
                self._hints.pop(0).is_dropped = True
        threading.Thread(target=self._make, args=(hint,), name="tokenizing", daemon=True).start()

    def take(self, rows: Rows, step: Callable[[], None]) -> Encoded:
        """The token ids of these rows; what was hinted at before them is dropped.

        Args:
            step: called after each block of rows.

        Raises:
            Exception: whatever comes out of the tokenizer.
        """
        with self._change:
            place = next((i for i, hint in enumerate(self._hints) if np.array_equal(hint.rows, rows)), None)
            hint = None if place is None else self._hints[place]
            for passed in self._hints[:place]:
                passed.is_dropped = True
            self._hints = [] if place is None else self._hints[place + 1 :]
        if hint is not None:
            while hint.goes_on.get():
                step()
            if hint.encoded is not None:
                return hint.encoded
        with self._tokenizing:
            return self._encode(rows, step)

    @contextlib.contextmanager
    def nobody_else(self) -> Iterator[None]:
        """While this lasts no hint's thread uses the tokenizer."""
        with self._tokenizing:
            yield

    def forget(self) -> None:
        """Drop all that was made so far."""
        with self._change:
            for hint in self._hints:
                hint.is_dropped = True
            self._hints = []

    def _make(self, hint: _Hint) -> None:
        try:
            with self._tokenizing, contextlib.suppress(Exception):
                hint.step()
                hint.encoded = self._encode(hint.rows, hint.step)
        finally:
            hint.goes_on.put(False)
