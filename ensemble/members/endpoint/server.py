"""Ask a server over HTTP: again after errors that pass, and with a sentence about those that stay."""

from __future__ import annotations

import contextlib
import random
import socket
import textwrap
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from ensemble.common.errors import MemberError
from ensemble.common.files import remove_folder
from ensemble.common.logged_command import LoggedCommand, RunningCommand, with_values
from ensemble.common.text import duration

_TRIES = 8
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS, _LONGEST_RETRY_AFTER_SECONDS = 0.5, 30.0, 600.0
_POLL_SECONDS = 0.25
# Servers that are killed at once leave shared memory behind.
_GRACE_SECONDS = 15.0
_SHOWN_CHARACTERS = 300


class RowRefused(ValueError):
    """Say why the server cannot compute a row."""


class Server:
    """Ask a server, from several threads at a time.

    Args:
        settings: the worker's.  With ``server`` its command is started; what it prints goes to the worker's log.
        folder: for a server that is started here; removed with it.
    """

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        self._keys, self._folder = settings["server"], folder
        self._url: str = (settings["url"] or "").rstrip("/")
        self._running: RunningCommand | None = None
        if self._keys is not None:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = str(free.getsockname()[1])
            self._url, log = f"http://127.0.0.1:{port}/v1", Path("/proc/self/fd/1").resolve()
            self._running = LoggedCommand(
                command=with_values(self._keys["command"], {"port": port}),
                out=folder,
                log=log if log.is_file() else folder / "log",
                resumes=False,
                environment=settings["environment"],
                settings=settings,
            ).start()
        key = settings["api_key"]
        self._http = httpx.Client(
            headers={} if key is None else {b"Authorization": f"Bearer {key.strip()}".encode()},
            timeout=settings["timeout"],
            limits=httpx.Limits(max_keepalive_connections=settings["max_concurrency"]),
            # No proxy stands before this machine.
            trust_env=urlsplit(self._url).hostname not in ("localhost", "127.0.0.1", "::1"),
        )

    def wait_until_ready(self) -> None:
        """Wait until a server that was started here answers at its path ``ready``, or raise what ``ask`` does."""
        if self._running is None:
            return
        path, seconds = f"/{self._keys['ready'].lstrip('/')}", self._keys["ready_timeout"]
        give_up = time.monotonic() + seconds
        is_ready = False
        while not is_ready:
            with contextlib.suppress(httpx.RequestError):
                is_ready = self._http.get(self._address(path), timeout=10.0).status_code == 200
            self._demand_alive("another program answers on its port" if is_ready else "it was not ready")
            if not is_ready and time.monotonic() > give_up:
                raise MemberError(
                    f"server.ready: {path} did not answer with status 200 within {duration(seconds)} "
                    f"(ready_timeout); the server's last words: {self._running.last_words() or 'none'}"
                )
            time.sleep(_POLL_SECONDS)

    def ask(self, path: str, body: Mapping[str, Any] | None = None, is_optional: bool = False) -> Any:
        """Return the server's answer; None to an optional request that it refuses, as not all servers know it.

        A ``path`` with a / first starts at the server, any other at the API.  A ``body`` is posted.

        Raises:
            RowRefused: the server cannot compute this.
            MemberError: it would refuse, or answer wrongly, whatever it is asked.
            ChildProcessError: it is this worker's own, and has ended or does not answer.
        """
        address, problem = self._address(path), ""
        for number in range(_TRIES):
            seconds = min(_LONGEST_WAIT_SECONDS, _FIRST_WAIT_SECONDS * 2**number) * random.uniform(0.5, 1)
            try:
                response = self._http.request("GET" if body is None else "POST", address, json=body)
                status = response.status_code
                if status not in (408, 429) and (status < 500 or status == 501):
                    return _answer(response, is_optional)
                problem = f"{status} {_message(response)}"
                seconds = max(seconds, min(_retry_after_seconds(response), _LONGEST_RETRY_AFTER_SECONDS))
            except httpx.RequestError as error:
                problem = f"{type(error).__name__} {error}"
            self._demand_alive(f"it answered {problem}")
            if number + 1 < _TRIES:
                time.sleep(seconds)
        advice = "once it is well, the same command goes on behind the finished chunks"
        raise (MemberError if self._running is None else ChildProcessError)(
            f"url: {address} gave no answer in {_TRIES} tries, lastly {problem}; {advice}"
        )

    def end(self) -> None:
        """End a server that was started here, with all that it has started."""
        if self._running is not None:
            self._running.end(_GRACE_SECONDS)
            remove_folder(self._folder)

    def _demand_alive(self, seen: str) -> None:
        """Raise ChildProcessError if it was started here and has ended; ``seen`` is said of it, too."""
        if self._running is not None and not self._running.is_alive():
            raise ChildProcessError(f"its server has ended ({seen}): {self._running.failure()}")

    def _address(self, path: str) -> str:
        return f"{self._url.removesuffix('/v1')}{path}" if path.startswith("/") else f"{self._url}/{path}"


def _answer(response: httpx.Response, is_optional: bool) -> Any:
    """Return the answer in a response, or raise what is wrong with it."""
    status, message = response.status_code, _message(response)
    if status == 200:
        with contextlib.suppress(ValueError):
            return response.json()
    if is_optional and status not in (401, 403):
        return None
    problem = f"{response.url} answers {status} {message}"
    if status in (400, 413, 422) and "logprobs" not in message:
        raise RowRefused(problem)
    key = "api_key" if status in (401, 403) else "top_logprobs" if "logprobs" in message else "url"
    raise MemberError(
        f"{key}: {problem}; see whether url (most end in /v1), model, api and api_key are right"
    )


def _message(response: httpx.Response) -> str:
    """Return what a response says of an error, in one line."""
    return textwrap.shorten(response.text, _SHOWN_CHARACTERS)  # no part of a word, which may be a secret


def _retry_after_seconds(response: httpx.Response) -> float:
    """Return the seconds of a Retry-After header, which is a number or a date; 0 if there is none."""
    text = response.headers.get("retry-after", "")
    with contextlib.suppress(ValueError):
        return float(text)
    with contextlib.suppress(ValueError, TypeError, KeyError):  # the server's clock may be another one
        return (parsedate_to_datetime(text) - parsedate_to_datetime(response.headers["date"])).total_seconds()
    return 0.0
