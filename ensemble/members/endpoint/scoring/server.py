"""Start a server beneath the worker, on the worker's devices, and end it with all that it started."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ensemble.common.errors import MemberError
from ensemble.common.files import remove_folder
from ensemble.common.logged_command import CommandFailed, LoggedCommand
from ensemble.common.text import duration

_POLL_SECONDS = 0.25
# Servers that are killed at once leave shared memory behind.
_GRACE_SECONDS = 15.0


class Server:
    """Run a server's command; what it prints goes to the worker's log.

    Args:
        settings: the worker's, some of which the log must not hold.
        folder: a folder for this server alone, which is removed with it.

    Attributes:
        url: the address of its API.
    """

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        self._keys: Mapping[str, Any] = settings["server"]
        self._folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/v1"
        self._running = LoggedCommand(
            command=[word.replace("{port}", str(port)) for word in self._keys["command"]],
            out=folder,
            log=Path("/proc/self/fd/1").readlink(),
            resumes=False,
            environment=settings["environment"],
            settings=settings,
        ).start()

    def wait_until_ready(self, is_ready: Callable[[str], bool]) -> None:
        """Wait until it answers at its path ``ready``; raise MemberError if it never does."""
        give_up = time.monotonic() + self._keys["ready_timeout"]
        while not is_ready(self._keys["ready"]):
            self.demand_alive("it was not ready")
            if time.monotonic() > give_up:
                words = self._running.last_words() or "none"
                self.end()
                raise MemberError(
                    f"server.ready: {self._keys['ready']} did not answer with status 200 within "
                    f"{duration(self._keys['ready_timeout'])} (ready_timeout); the server's last words: {words}"
                )
            time.sleep(_POLL_SECONDS)
        self.demand_alive("another program answers on its port")

    def demand_alive(self, seen: str) -> None:
        """Raise ChildProcessError if it has ended; ``seen`` is said of it, too."""
        if self._running.is_alive():
            return
        how = f"its command ended with exit code 0, with the last words: {self._running.last_words()}"
        try:
            self._running.demand_success()
        except CommandFailed as failure:
            how = str(failure)
        raise ChildProcessError(f"its server has ended ({seen}): {how}")

    def end(self) -> None:
        """End it with all that it has started."""
        self._running.end(_GRACE_SECONDS)
        remove_folder(self._folder)
