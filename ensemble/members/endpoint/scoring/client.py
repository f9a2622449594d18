"""Ask a server over HTTP: again after errors that pass, and with a sentence about those that stay."""

from __future__ import annotations

import contextlib
import random
import ssl
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import httpx

from ensemble.common.errors import MemberError
from ensemble.members.endpoint.scoring.server import Server

_TRIES = 8
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS, _LONGEST_RETRY_AFTER_SECONDS = 0.5, 30.0, 600.0
_SHOWN_CHARACTERS = 300


class RowRefused(ValueError):
    """Say why the server cannot compute a row."""


class Stopped(Exception):
    """Say that the run is stopped, and a request is not tried again."""


class Client:
    """Send requests, from several threads at a time; set ``is_stopped`` to end the waits before further tries.

    Args:
        url: the address of the API, such as http://localhost:8000/v1.
        settings: the worker's.
        server: the process that serves, if the worker has started it.
    """

    def __init__(self, url: str, settings: Mapping[str, Any], server: Server | None) -> None:
        self._url, self._server = url.rstrip("/"), server
        self.is_stopped = threading.Event()
        key, host = settings["api_key"], urlsplit(url).hostname or ""
        self._http = httpx.Client(
            headers={} if key is None else {"Authorization": f"Bearer {key.strip()}"},
            timeout=settings["timeout"],
            limits=httpx.Limits(max_keepalive_connections=settings["max_concurrency"]),
            follow_redirects=True,
            # No proxy stands before this machine.
            trust_env=host not in ("localhost", "::1") and not host.startswith("127."),
        )

    def is_ready(self, path: str) -> bool:
        """Return whether the server answers with status 200."""
        with contextlib.suppress(httpx.RequestError):
            return self._http.get(self._address(path), timeout=10.0).status_code == 200
        return False

    def ask(self, path: str, body: Mapping[str, Any] | None = None, is_optional: bool = False) -> Any:
        """Return the server's answer; None to an optional request that it refuses, as not all servers know it.

        A ``path`` with a / first starts at the server, any other at the API.  A ``body`` is posted.

        Raises:
            RowRefused: the server cannot compute this.
            MemberError: it would refuse, or answer wrongly, whatever it is asked.
            ChildProcessError: it is this worker's own, and has ended or does not answer.
            Stopped: it has not answered, and the run is stopped.
        """
        address, problem = self._address(path), ""
        for number in range(_TRIES):
            seconds = min(_LONGEST_WAIT_SECONDS, _FIRST_WAIT_SECONDS * 2**number) * random.uniform(0.5, 1)
            try:
                response = self._http.request("GET" if body is None else "POST", address, json=body)
                if response.status_code not in (408, 429) and response.status_code < 500:
                    return _answer(response, is_optional)
                problem = f"{response.status_code} {_message(response)}"
                asked_seconds = _retry_after_seconds(response.headers.get("retry-after", ""))
                seconds = max(seconds, min(asked_seconds, _LONGEST_RETRY_AFTER_SECONDS))
            except httpx.RequestError as error:
                if isinstance(error.__cause__ and error.__cause__.__context__, ssl.SSLError):
                    advice = "name its certificates by SSL_CERT_FILE, or correct the address"
                    raise MemberError(f"url: no secure connection to {address} ({error}); {advice}") from None
                problem = f"{type(error).__name__} {error}"
            if self._server is not None:
                self._server.demand_alive(f"it answered {problem}")
            if number + 1 < _TRIES and self.is_stopped.wait(seconds):
                raise Stopped
        advice = "once it is well, the same command goes on behind the finished chunks"
        raise (MemberError if self._server is None else ChildProcessError)(
            f"url: {address} gave no answer in {_TRIES} tries, lastly {problem}; {advice}"
        )

    def _address(self, path: str) -> str:
        return f"{self._url.removesuffix('/v1')}{path}" if path.startswith("/") else f"{self._url}/{path}"


def _answer(response: httpx.Response, is_optional: bool) -> Any:
    """Return the answer in a response, or raise what is wrong with it."""
    status, message = response.status_code, _message(response)
    if status == 200:
        with contextlib.suppress(ValueError):
            return response.json()
        message = f"without JSON: {message}"
    if is_optional and status not in (401, 403):
        return None
    problem = f"{response.url} answers {status} {message}"
    if status in (400, 413, 422) and "logprobs" not in message:
        raise RowRefused(f"{message} ({response.url} answers {status})")
    key = "api_key" if status in (401, 403) else "top_logprobs" if "logprobs" in message else "url"
    raise MemberError(
        f"{key}: {problem}; see whether url (most end in /v1), model, api and api_key are right"
    )


def _message(response: httpx.Response) -> str:
    """Return what a response says of an error, in one line."""
    text: Any = response.text
    with contextlib.suppress(ValueError, AttributeError):
        document = response.json()
        error = document.get("error", document)
        text = error if isinstance(error, str) else error.get("message") or error.get("detail") or text
    return " ".join(str(text).split())[:_SHOWN_CHARACTERS]


def _retry_after_seconds(text: str) -> float:
    """Return the seconds of a Retry-After header, which is a number or a date; 0 if there is none."""
    with contextlib.suppress(ValueError):
        return float(text)
    with contextlib.suppress(ValueError, TypeError):
        return (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds()
    return 0.0
