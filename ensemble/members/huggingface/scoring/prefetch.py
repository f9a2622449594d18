"""What the model gets of the chunks that will come next, made in the background of the forward passes.

A hint costs nothing but time: where it was wrong, the chunk's rows are encoded when they are asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

Rows: TypeAlias = npt.NDArray[np.int64]
Step = Callable[[], None]
E = TypeVar("E")


class _Job(Generic[E]):
    """Rows that a thread encodes; ``drop`` ends it at once, or after the block in hand."""

    def __init__(
        self,
        thread: ThreadPoolExecutor,
        encode: Callable[[Rows, Step], E],
        rows: Rows,
        step: Step = lambda: None,
    ) -> None:
        self.rows = rows
        self.step = step
        self._is_dropped = False
        self.future = thread.submit(encode, rows, self._end_block)

    def drop(self) -> None:
        self._is_dropped = True
        self.future.cancel()

    def _end_block(self) -> None:
        if self._is_dropped:
            raise RuntimeError("nobody wants these rows any more")
        self.step()


class Prefetch(Generic[E]):
    """Makes of chunks what the model gets, ahead of its time where it is told what will come.

    Args:
        encode: what the model gets of these rows of the table, such as token ids, with a callback after each block.
        in_background: whether a hint is worth a thread; otherwise it is not heeded.
    """

    def __init__(self, encode: Callable[[Rows, Step], E], in_background: bool) -> None:
        self._encode = encode
        # One thread for all: a tokenizer that sets its truncation in one while another uses it raises.
        self._tokenizing = ThreadPoolExecutor(1, "tokenizing") if in_background else None
        self._hints: list[_Job[E]] = []
        self._change = threading.Lock()

    def prepare(self, rows: Rows) -> None:
        """Begin with these rows when those before them are done.  From any thread."""
        if self._tokenizing is None:
            return
        with self._change:
            if not any(np.array_equal(hint.rows, rows) for hint in self._hints):
                self._hints.append(_Job(self._tokenizing, self._encode, rows))

    def take(self, rows: Rows, step: Step) -> E:
        """What the model gets of these rows; what was hinted at before them is dropped.

        ``step`` is called after each block of rows.  Raises whatever comes out of ``encode``.
        """
        if self._tokenizing is None:
            return self._encode(rows, step)
        with self._change:
            equal = (index for index, hint in enumerate(self._hints) if np.array_equal(hint.rows, rows))
            self._drop(next(equal, len(self._hints)))
            if self._hints:
                job = self._hints.pop(0)
                job.step = step
            else:
                job = _Job(self._tokenizing, self._encode, rows, step)
        return job.future.result()

    def start_over(self, encode: Callable[[], E]) -> E:
        """Drop all that was made so far, and call a function that uses the tokenizer when no hint does."""
        if self._tokenizing is None:
            return encode()
        with self._change:
            self._drop(len(self._hints))
        return self._tokenizing.submit(encode).result()

    def _drop(self, count: int) -> None:
        for hint in self._hints[:count]:
            hint.drop()
        del self._hints[:count]
