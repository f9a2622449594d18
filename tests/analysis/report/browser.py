"""Headless Chromium, over the pipe of its DevTools protocol: what a page does when opened, and how it looks."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

COMMAND: Final = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--no-zygote"),
    *(
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-breakpad",
    ),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe"),
)


@dataclass
class Opened:
    """What a page did when it was opened: the addresses it asked for, and what it wrote to the console."""

    requests: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)


class Browser:
    """One tab; see ``browser``."""

    def __init__(self, process: subprocess.Popen[bytes], commands: int, answers: int) -> None:
        self._process = process
        self._commands = commands
        self._answers = answers
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self._opened = Opened()
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self._ask(f"{domain}.enable")

    def open(self, page: Path, width: int = 1000, is_dark: bool = False) -> Opened:
        """Open a file in a window of so many CSS pixels, and wait until it is loaded."""
        self._ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self._ask("Emulation.setEmulatedMedia", features=[scheme])
        self._opened = Opened()
        self._ask("Page.navigate", url=page.as_uri())
        while self._next().get("method") != "Page.loadEventFired":
            pass
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return self._opened

    def run(self, script: str) -> Any:
        """The value of an expression in the page; that of a promise is waited for."""
        result = self._ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def screenshot(self, to: Path) -> None:
        """The whole page as PNG."""
        result = self._ask("Page.captureScreenshot", captureBeyondViewport=True)
        to.write_bytes(base64.b64decode(result["data"]))

    def close(self) -> None:
        self._session = None
        with contextlib.suppress(OSError, EOFError):
            self._ask("Browser.close")
        self._process.wait(20)

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        asked: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            asked["sessionId"] = self._session
        os.write(self._commands, json.dumps(asked).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == asked["id"]:
                assert "error" not in answer, (method, answer)
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            read = os.read(self._answers, 1 << 20)
            if not read:
                raise EOFError("Chromium has ended")
            self._buffer += read
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        method, told = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self._opened.requests.append(told["request"]["url"])
        elif method == "Log.entryAdded":
            self._opened.messages.append(told["entry"]["text"])
        elif method == "Runtime.consoleAPICalled":
            self._opened.messages.append(json.dumps(told["args"]))
        elif method == "Runtime.exceptionThrown":
            self._opened.messages.append(json.dumps(told["exceptionDetails"]))
        return message


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Chromium, which keeps what it has to keep in this folder."""
    assert COMMAND is not None
    reads, commands = os.pipe()
    answers, writes = os.pipe()

    def as_three_and_four() -> None:  # the numbers of its pipes
        os.dup2(os.dup(reads), 3)
        os.dup2(os.dup(writes), 4)

    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            [COMMAND, *_OPTIONS, f"--user-data-dir={folder / 'profile'}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            close_fds=False,
            preexec_fn=as_three_and_four,
        )
    os.close(reads)
    os.close(writes)
    try:
        opened = Browser(process, commands, answers)
        try:
            yield opened
        finally:
            opened.close()
    finally:
        process.kill()
        process.wait()
        os.close(commands)
        os.close(answers)
