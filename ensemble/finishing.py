"""What is still to be done for a member whose rows are computed, in a thread: devices need not wait for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from ensemble.errors import MergeError
from ensemble.state import MemberState


class Finishing:
    """Members' last steps, one after the other.

    Args:
        finish: called in another thread, once for each member.
    """

    def __init__(self, finish: Callable[[MemberState], None]) -> None:
        self._finish = finish
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="finishing")
        self._begun: list[tuple[MemberState, Future[None]]] = []

    @property
    def is_busy(self) -> bool:
        """Whether there is something whose end has not been heard of."""
        return bool(self._begun)

    def begin(self, state: MemberState) -> None:
        self._begun.append((state, self._thread.submit(self._finish, state)))

    def failures(self) -> Iterator[tuple[MemberState, MergeError]]:
        """Members that came to an end meanwhile, badly: their parts were harmed.

        Raises:
            Exception: whatever else the last step of a member raised.
        """
        for state, future in [one for one in self._begun if one[1].done()]:
            self._begun.remove((state, future))
            if future.cancelled():  # the run is over; its parts stay for the next one
                continue
            try:
                future.result()
            except MergeError as error:
                yield state, error

    def wait(self, seconds: float) -> None:
        """Until one has come to its end, or no longer than that."""
        wait([future for _, future in self._begun], seconds, return_when=FIRST_COMPLETED)

    def close(self) -> None:
        """Let the one that has begun come to its end; the others can be done by the next run."""
        self._thread.shutdown(wait=True, cancel_futures=True)
