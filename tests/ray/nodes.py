"""A cluster for tests: nodes with folders and simulated GPUs of their own, and what runs on them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.faults.forked.client import server_variables
from tests.faults.inject import Injected
from tests.nvml.sim import Gpu, NvmlSim, gpu_uuid
from tests.project import ROOT, Project, python_path
from tests.waiting import wait_until

# What is said of a torch, for the CPU or for CUDA, that finds no GPU behind the pretended driver.
NO_CUDA = re.compile(r"torch \S+ (?:is a build without CUDA|is built for CUDA|cannot start CUDA)")
SPACED = "Ray starts nothing with a runtime_env where the path of Python has a space"


class Nodes:
    """A cluster in a process of its own.

    Args:
        fork_server: the address of one, by which workers are forked (``on_cluster``); empty: they are not.
    """

    def __init__(self, folder: Path, libraries: Path, fork_server: str = "") -> None:
        self.folder, self._libraries, self.fork_server = folder, libraries, fork_server
        self.sims: dict[str, NvmlSim] = {}
        # Names of sockets below it may have 107 bytes.
        self._temporary = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        variables = {
            **os.environ,
            "PYTHONPATH": python_path(ROOT),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": self._temporary,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.ray.cluster"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=variables,
            cwd=ROOT,
        )
        self.address = ""
        self.has_mounts = False
        self.raylets: dict[str, int] = {}
        self.head = 0  # the process number of its control service
        self.gpus: dict[str, list[str]] = {}
        self._count = 0
        self._helpers: list[psutil.Process] = []

    def tell(self, **order: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        self.address = answer["address"]
        return answer

    def new_name(self, start: str) -> str:
        return f"{start}-{self._count}"

    def add(self, name: str, gpus: int = 0, cpus: int = 1, hidden: Sequence[Path] = ()) -> None:
        """Start a node.

        Args:
            hidden: folders of this machine in which it finds nothing.
        """
        folder = self.folder / name
        folder.mkdir()
        sim = self.sims[name] = NvmlSim(self._libraries, self.folder / f"{name}.nvml")
        first = self._count
        self._count += gpus
        self.gpus[name] = [gpu_uuid(first + index) for index in range(gpus)]
        sim.write([Gpu(uuid, pci=(0, 1 + index, 0)) for index, uuid in enumerate(self.gpus[name])])
        environment = {**sim.environment(), "TMPDIR": str(folder)}
        if self.fork_server:
            environment |= server_variables(self.fork_server)
        order = {"name": name, "gpus": gpus, "cpus": cpus, "hidden": [str(item) for item in hidden]}
        answer = self.tell(do="add", environment=environment, **order)
        self.raylets[name], self.has_mounts = answer["raylet"], answer["has_mounts"]
        self.head = answer["head"]

    @contextlib.contextmanager
    def mounted(self, names: Sequence[str], folder: Path, *arguments: str) -> Iterator[None]:
        """Let these nodes, and no others, see something else in a folder.

        Args:
            arguments: of mount, before the folder; none: it is empty there.
        """
        if not self.has_mounts:
            pytest.skip("no mounts of its own for a process may be made here")
        inside = [["nsenter", "-m", "-t", str(self.raylets[name])] for name in names]
        try:
            for inner in inside:
                what = arguments or ("-t", "tmpfs", "hidden")
                subprocess.run([*inner, "mount", *what, str(folder)], check=True)
            yield
        finally:
            for inner in inside:
                subprocess.run([*inner, "umount", "-l", str(folder)], check=False)

    def kill(self, name: str) -> None:
        self.tell(do="kill", name=name)

    def kill_head(self) -> None:
        """End the control service, as a power cut would; raylets end themselves then, and leave helpers behind."""
        self._helpers = psutil.Process(self._process.pid).children(recursive=True)
        os.kill(self.head, signal.SIGKILL)

    def close(self) -> None:
        self._process.communicate(timeout=60)
        for helper in self._helpers:
            with contextlib.suppress(psutil.NoSuchProcess):
                helper.kill()
        shutil.rmtree(self._temporary, ignore_errors=True)


def on_cluster(nodes: Nodes, **settings: Any) -> dict[str, Any]:
    if nodes.fork_server and not os.environ.get("TEST_FORK_SERVER"):  # the test wants fresh processes
        own = settings.get("runtime_env", {})
        settings["runtime_env"] = {**own, "env_vars": {**own.get("env_vars", {}), "TEST_FORK_SERVER": ""}}
    return {"ray": {"address": nodes.address, **settings}}


def agents() -> dict[int, list[int]]:
    """The agents of runs on this process's clusters, and the workers that each has started."""
    result = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.cmdline() and process.cmdline()[0].startswith("ray::Agent"):
                result[process.pid] = [child.pid for child in process.children()]
    return result


def both_compute(injected: Injected, raylet: int) -> tuple[int, int]:
    """Wait until two workers have one of four chunks each; the agent of a node, and its worker, by number."""
    wait_until(lambda: sum(bool(injected.pids(number)) for number in range(4)) == 2, "both compute")
    ((agent, (worker,)),) = (
        agent for agent in agents().items() if psutil.Process(agent[0]).ppid() == raylet and agent[1]
    )
    return agent, worker


@contextlib.contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Processes that do nothing meanwhile."""
    processes = [psutil.Process(pid) for pid in pids]
    try:
        for process in processes:
            process.suspend()
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


def run(project: Project, *options: str) -> tuple[int, str]:
    done = project.ensemble("run", "config.yaml", *options)
    assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
    return done.returncode, done.stdout + done.stderr


@contextlib.contextmanager
def background(
    project: Project, *options: str, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    # In a group of its own, as a terminal's Ctrl-C reaches it.
    arguments = ("run", "config.yaml", *options)
    with project.start(*arguments, environment=environment, start_new_session=True) as process:
        try:
            yield process
        finally:
            process.kill()
