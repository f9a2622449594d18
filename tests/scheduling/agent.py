"""A launcher as another machine would need it: an agent there starts the workers, and one connection holds all.

The two sides share no disk but for the checkpoints: the table and the order go there, shards and logs come back.
"""

from __future__ import annotations

import base64
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from ensemble.common.errors import ConfigError
from ensemble.common.files import open_log
from ensemble.common.gpus import Device
from ensemble.common.protocol import ChunkDone, Command, Event, Start, decode, encode
from ensemble.common.python_process import python_command, python_environment
from ensemble.scheduling.launchers.base import Exit, Handle, Launcher, WorkerStart
from ensemble.scheduling.launchers.local import LocalLauncher, LocalWorker

Message = dict[str, Any]
TRAVELLING = ("table_path", "order_path")


class AgentLauncher(Launcher):
    """Starts workers by an agent; ``node`` is its name, ``folder`` its disk."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        wrong = [
            f"{key}: unknown key; the keys here are node, folder"
            for key in settings.keys() - {"node", "folder"}
        ]
        wrong += [f"{key}: required" for key in ("node", "folder") if key not in settings]
        if wrong:
            raise ConfigError(wrong)
        self.node, self._folder = str(settings["node"]), str(settings["folder"])
        self._numbers = count()
        self.handles: dict[int, AgentHandle] = {}
        self.news = threading.Condition()
        self._socket: socket.socket | None = None

    def _connect(self) -> socket.socket:
        mine, theirs = socket.socketpair()
        with theirs:
            self._agent = subprocess.Popen(
                [*python_command("tests.scheduling.agent"), str(theirs.fileno()), self._folder],
                env={**os.environ, **python_environment()},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, args=(mine,), daemon=True)
        self._reader.start()
        return mine

    def tell(self, message: Message) -> None:
        if self._socket is None:
            self._socket = self._connect()
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def start(self, start: WorkerStart) -> AgentHandle:
        number = next(self._numbers)
        places = {name: Path(getattr(start.command.spec.common, name)) for name in TRAVELLING}
        handle = self.handles[number] = AgentHandle(self, number, start)
        self.tell(
            {
                "do": "start",
                "worker": number,
                "command": encode(start.command),
                "devices": [[device.uuid, device.name] for device in start.devices],
                "environment": dict(start.environment),
                "files": {
                    name: base64.b64encode(path.read_bytes()).decode() for name, path in places.items()
                },
            }
        )
        with self.news:
            self.news.wait_for(lambda: handle.process)
        return handle

    def wait(self, handles: Sequence[Handle], timeout_seconds: float) -> Collection[Handle]:
        def heard() -> list[Handle]:
            return [
                handle
                for handle in handles
                if isinstance(handle, AgentHandle) and handle.is_open and handle.has_news
            ]

        with self.news:
            self.news.wait_for(heard, timeout_seconds)
            return heard()

    def close(self) -> None:
        if self._socket is not None and self._socket.fileno() >= 0:  # it may be called again
            self._socket.shutdown(socket.SHUT_WR)
            self._agent.wait()
            self._reader.join()
            self._socket.close()

    def _read(self, connection: socket.socket) -> None:
        with connection.makefile("r", encoding="utf-8") as lines:
            for line in lines:
                message = json.loads(line)
                with self.news:
                    self.handles[message["worker"]].take(message)
                    self.news.notify_all()


class AgentHandle(Handle):
    def __init__(self, launcher: AgentLauncher, number: int, start: WorkerStart) -> None:
        self.process = ""
        self._launcher, self._number, self._start = launcher, number, start
        self._events: list[str] = []
        self._is_silent = self._has_exited = False
        self._exit: Exit | None = None

    @property
    def has_news(self) -> bool:
        return bool(self._events) or self._is_silent

    def take(self, message: Message) -> None:
        """A message from the agent, in the thread that reads them."""
        if "process" in message:
            self.process = f"{message['process']} on {self._launcher.node}"
        elif "log" in message:
            with open_log(self._start.log) as log:
                log.write(base64.b64decode(message["log"]))
        elif "shard" in message:
            shards_dir = Path(self._start.command.spec.common.shards_dir)
            temporary = shards_dir / f"{message['shard']}.{self._number}.part"
            temporary.write_bytes(base64.b64decode(message["content"]))
            temporary.rename(shards_dir / message["shard"])
        elif "event" in message:
            self._events.append(message["event"])
        elif "exit" in message:
            self._exit = Exit(*message["exit"])
        self._is_silent = self._is_silent or "is_silent" in message
        self._has_exited = self._has_exited or "has_exited" in message

    def _tell(self, do: str, **fields: Any) -> None:
        self._launcher.tell({"do": do, "worker": self._number, **fields})

    def send(self, command: Command) -> None:
        self._tell("send", command=encode(command))

    def receive(self) -> list[Event]:
        with self._launcher.news:
            events, self._events = self._events, []
            self.is_open = not self._is_silent
        return [decode(line) for line in events]

    def has_exited(self) -> bool:
        return self._has_exited

    def terminate(self) -> None:
        self._tell("terminate")

    def abort(self) -> None:
        self._tell("abort")

    def close(self) -> Exit:
        self._tell("close")
        with self._launcher.news:
            self._launcher.news.wait_for(lambda: self._exit)
        assert self._exit is not None
        return self._exit


class Agent:
    """What runs on the other machine.

    Args:
        connection: to the parent.
        folder: its own disk.
    """

    def __init__(self, connection: socket.socket, folder: Path) -> None:
        self._connection, self._folder = connection, folder
        self._launcher = LocalLauncher({})
        self._workers: dict[int, LocalWorker] = {}
        self._said: dict[int, set[str]] = {}
        self._logged: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)

    def run(self) -> None:
        """Until the parent has closed the connection, or has gone."""
        buffer = b""
        while True:
            for key, _ in self._selector.select(0.05):
                if key.data is not None:
                    self._forward(key.data)
                    continue
                data = self._connection.recv(1 << 16)
                if not data:
                    for worker in self._workers.values():
                        worker.close()
                    return
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    self._do(**json.loads(line))
            for number, worker in self._workers.items():
                self._send_log(number)
                if worker.has_exited() and "has_exited" not in self._said[number]:
                    self._forward(number)
                    self._say(number, has_exited=True)

    def _say(self, number: int, **fields: Any) -> None:
        self._said[number] |= fields.keys()
        self._connection.sendall(json.dumps({"worker": number, **fields}).encode() + b"\n")

    def _do(self, do: str, worker: int, **fields: Any) -> None:
        if do == "start":
            self._start(worker, **fields)
        elif do == "send":
            self._workers[worker].send(decode(fields["command"]))
        elif do == "terminate":
            self._workers[worker].terminate()
        elif do == "abort":
            self._workers[worker].abort()
        elif do == "close":
            handle = self._workers.pop(worker)
            if "is_silent" not in self._said[worker]:
                self._selector.unregister(handle.events_fd)
            ended = handle.close()
            self._send_log(worker)
            self._say(worker, exit=[ended.code, ended.text, ended.is_out_of_memory])

    def _start(
        self,
        number: int,
        command: str,
        devices: list[tuple[str, str]],
        environment: dict[str, str],
        files: dict[str, str],
    ) -> None:
        place = self._place(number)
        (place / "shards_dir").mkdir(parents=True)
        start = decode(command)
        assert isinstance(start, Start)
        for name, content in files.items():
            (place / name).write_bytes(base64.b64decode(content))
        places: dict[str, Any] = {name: str(place / name) for name in (*files, "shards_dir")}
        spec = replace(start.spec, common=replace(start.spec.common, **places))
        gpus = tuple(Device(uuid, name, None, 0, 0) for uuid, name in devices)
        self._said[number], self._logged[number] = set(), 0
        worker = self._workers[number] = self._launcher.start(
            WorkerStart(replace(start, spec=spec), gpus, environment, place / "log")
        )
        self._selector.register(worker.events_fd, selectors.EVENT_READ, number)
        self._say(number, process=worker.process)

    def _place(self, number: int) -> Path:
        return self._folder / f"worker {number}"

    def _forward(self, number: int) -> None:
        worker = self._workers[number]
        if not worker.is_open:
            return
        for event in worker.receive():
            if isinstance(event, ChunkDone):  # the shard is there before anybody hears of it
                shard = self._place(number) / "shards_dir" / event.shard
                self._say(number, shard=event.shard, content=base64.b64encode(shard.read_bytes()).decode())
                shard.unlink()
            self._say(number, event=encode(event))
        if not worker.is_open:
            self._selector.unregister(worker.events_fd)
            self._say(number, is_silent=True)

    def _send_log(self, number: int) -> None:
        with (self._place(number) / "log").open("rb") as log:
            log.seek(self._logged[number])
            if data := log.read():
                self._logged[number] += len(data)
                self._say(number, log=base64.b64encode(data).decode())


def main() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        Agent(connection, Path(sys.argv[2])).run()
