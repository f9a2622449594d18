"""The worker's fixtures, for the tests here that use its rooms in this process."""

from tests.worker.conftest import one_thread

__all__ = ["one_thread"]
