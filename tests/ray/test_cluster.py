"""Runs over three nodes of a real Ray cluster, against the same run on this machine alone."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ensemble.common import host
from ensemble.common.python_process import WAITING
from tests.faults.chunky import chunky_config, ids_of, results
from tests.faults.inject import Fault, Injected
from tests.faults.test_workers import POISON, is_gone
from tests.nvml.sim import Gpu, NvmlSim, gpu_uuid
from tests.project import Project
from tests.ray.nodes import NO_CUDA, Nodes, agents, background, both_compute, on_cluster, run
from tests.waiting import wait_until

pytest.importorskip("ray", reason="ray is not installed")
pytestmark = pytest.mark.usefixtures("warm")


@pytest.mark.long
def test_the_same_bytes_as_here(project: Project, nodes: Nodes, nvml_sim: NvmlSim) -> None:
    project.write_config(project.config())
    nvml_sim.write([Gpu(gpu_uuid(9))])
    here = project.ensemble(
        "run", "config.yaml", "--set", "output_dir=runs/here", environment=nvml_sim.environment()
    )
    assert here.returncode == 0, here.stderr
    devices = [gpu_uuid(0), gpu_uuid(1)]
    config = project.config(launcher=on_cluster(nodes), devices=devices, output_dir="runs/there")
    project.write_config(config)
    code, printed = run(project)
    assert code == 0, printed
    for name in ("predictions/gemma.csv", "predictions/llama.csv", "ensemble.csv"):
        own, other = (project.folder / "runs" / run / name for run in ("here", "there"))
        assert own.read_bytes() == other.read_bytes()
    workers = project.run_json("runs/there")["members"][0]["workers"]
    assert {worker["devices"][0] for worker in workers} <= {*devices}
    assert agents() == {}, "nothing of a run stays"
    assert [*nodes.folder.glob("*/ensemble-node-*")] == []


@pytest.mark.long
def test_a_node_whose_torch_cannot_use_its_gpus(chunky: Project, nodes: Nodes) -> None:
    launcher = on_cluster(nodes, runtime_env={"env_vars": {"ENSEMBLE_SIMULATED_GPUS": ""}})
    chunky.write_config(chunky_config(chunky, launcher=launcher, devices=[nodes.gpus["head"][0]]))
    code, printed = run(chunky)
    assert code == 1, printed
    text = " ".join(printed.split())
    assert "a GPU was planned, but torch" in text
    assert "set num_gpus: 0" in text
    (member,) = chunky.run_json()["members"]
    assert [fault["remedy"] for fault in member["faults"]] == ["given up"]


@pytest.mark.long
def test_what_is_told_of_nodes(chunky: Project, nodes: Nodes) -> None:
    chunky.write_config(chunky_config(chunky, launcher=on_cluster(nodes)))
    planned = chunky.ensemble("plan", "config.yaml")
    assert planned.returncode == 0, planned.stderr
    rows = re.findall(r"^(\S+) +(\d) .* llama there$", planned.stdout, re.MULTILINE)
    assert sorted(gpus for _, gpus in rows) == ["1", "1", "2"]
    homes = re.findall(r"^GPU (\d) on (\S+): .*T4", planned.stdout, re.MULTILINE)
    assert [number for number, _ in homes] == ["0", "1", "2", "3"]
    assert {home for _, home in homes} == {name for name, _ in rows}
    assert "4 replicas on GPUs 0, 1, 2, 3" in planned.stdout


@pytest.mark.long
@pytest.mark.fault(39)
def test_a_node_without_the_model_is_told_of(chunky: Project, nodes: Nodes) -> None:
    chunky.write_config(chunky_config(chunky, launcher=on_cluster(nodes)))
    with nodes.mounted(["third"], chunky.models):
        for command in ("validate", "plan", "doctor"):
            done = chunky.ensemble(command, "config.yaml")
            printed = " ".join((done.stdout + done.stderr).split())
            assert done.returncode == 2, printed
            assert len(re.findall(r"llama: \S.* is not on node \S+", printed)) == 1, printed
            assert "ship_models: true" in printed
            if command != "validate":
                assert printed.count("llama missing") == 1
                assert printed.count("llama there") == 2
    # Of the test processes, each on its node.
    assert len(NO_CUDA.findall(printed)) == 3
    assert len(re.findall(r"node \S+: \S+ GiB of \S+ GiB memory free", printed)) == 3


@pytest.mark.long
@pytest.mark.fault(1)
def test_workers_that_are_killed_and_hang(
    chunky: Project, tmp_path: Path, nodes: Nodes, undisturbed: dict[str, bytes]
) -> None:
    injected = Injected(
        tmp_path,
        Fault("kill", ids_of(chunky, 2), times=1),
        Fault("raise", ids_of(chunky, 5), times=1, text=POISON),
    )
    launcher = on_cluster(nodes, runtime_env={"env_vars": injected.environment})
    chunky.write_config(chunky_config(chunky, launcher=launcher, devices=[gpu_uuid(1), gpu_uuid(3)]))
    code, printed = run(chunky)
    assert code == 0, printed
    assert results(chunky) == undisturbed
    assert "(SIGKILL) with 4 rows in hand" in printed
    logs = "".join(path.read_text() for path in (chunky.folder / "runs/first/logs").glob("llama-*.log"))
    assert POISON in logs, "what a worker prints on its node can be read here"


@pytest.mark.fresh
@pytest.mark.long
@pytest.mark.parametrize(
    ("of_the_run", "of_the_node"), [({}, {}), ({"GOMP_SPINCOUNT": "77"}, {}), ({}, {"KMP_BLOCKTIME": "5"})]
)
def test_how_threads_wait_is_said_by_the_run_or_by_the_node(
    chunky: Project, tmp_path: Path, nodes: Nodes, of_the_run: dict[str, str], of_the_node: dict[str, str]
) -> None:
    injected = Injected(tmp_path, Fault("wait", ids_of(chunky, 2), times=1))
    launcher = on_cluster(nodes, runtime_env={"env_vars": {**injected.environment, **of_the_node}})
    chunky.write_config(chunky_config(chunky, launcher=launcher, devices=[gpu_uuid(1)]))
    with background(chunky, environment=of_the_run) as process:
        injected.wait_for()
        (pid,) = injected.pids()
        pairs = Path(f"/proc/{pid}/environ").read_text().split("\0")
        injected.let_go()
        printed = process.communicate()[0]
    assert process.returncode == 0, printed
    waiting = dict(pair.split("=") for pair in pairs if pair.startswith(WAITING))
    assert waiting == (of_the_run or of_the_node or {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"})


def told(project: Project) -> str:
    return project.ensemble("status", "runs/first").stdout


@pytest.mark.fault(39)
def test_a_node_that_dies(
    chunky: Project, tmp_path: Path, nodes: Nodes, mortal: str, undisturbed: dict[str, bytes]
) -> None:
    # Each of the two workers holds a chunk, whichever that is.
    waits = [Fault("wait", ids_of(chunky, row), times=1) for row in (2, 6, 10, 14)]
    injected = Injected(tmp_path, *waits)
    launcher = on_cluster(nodes, runtime_env={"env_vars": injected.environment})
    devices = [gpu_uuid(1), *nodes.gpus[mortal]]
    chunky.write_config(chunky_config(chunky, launcher=launcher, devices=devices))
    with background(chunky) as process:
        _, pid = both_compute(injected, raylet := nodes.raylets[mortal])
        wait_until(lambda: re.search(r"llama-\d: on GPU \d on ", told(chunky)), "status shows who is where")
        os.kill(raylet, signal.SIGKILL)
        # Not before: it could be done with all that is left while Ray has not noticed anything.
        wait_until(lambda: is_gone(pid), "the worker of a node that is lost ends with it")
        for number in range(4):
            injected.let_go(number)
        printed = process.communicate(timeout=200)[0]
    assert process.returncode == 0, printed
    assert results(chunky) == undisturbed
    assert re.search(r"was lost after \S+ s \(", printed), "in the summary"
    (lost,) = [change for change in chunky.run_json()["nodes"] if change["is_lost"]]
    assert lost["node"] in {device["node"] for device in chunky.run_json()["devices"]}


@contextlib.contextmanager
def nearly_full(nodes: Nodes, name: str, folder: Path) -> Iterator[None]:
    """Let Ray's own memory monitor on a node read that 1 % of the memory is left; it bears 5 % by default."""
    text = Path("/proc/meminfo").read_text(encoding="ascii")
    total = int(re.findall(r"^MemTotal: +([0-9]+) kB", text)[0])
    if host.total_memory_bytes() != total * 1024:
        pytest.skip("Ray reads the memory of a control group here")
    text = re.sub(r"(Buffers|Cached|SReclaimable): +[0-9]+ kB", r"\1: 0 kB", text)
    text = re.sub(r"(MemFree|MemAvailable): +[0-9]+ kB", rf"\1: {total // 100} kB", text)
    meminfo = folder / "meminfo"
    meminfo.write_text(text, encoding="ascii")
    with nodes.mounted([name], Path("/proc/meminfo"), "--bind", str(meminfo)):
        yield


@pytest.mark.fault(39)
@pytest.mark.long
@pytest.mark.parametrize("who", ["the kernel", "Ray's memory monitor"])
def test_the_only_node_goes_on_when_its_agent_was_killed(
    chunky: Project, tmp_path: Path, nodes: Nodes, mortal: str, undisturbed: dict[str, bytes], who: str
) -> None:
    injected = Injected(tmp_path, Fault("wait", ids_of(chunky, 6), times=1))
    launcher = on_cluster(nodes, runtime_env={"env_vars": injected.environment})
    chunky.write_config(chunky_config(chunky, launcher=launcher, devices=nodes.gpus[mortal]))
    with background(chunky) as process:
        injected.wait_for()
        ((agent, (worker,)),) = ((pid, workers) for pid, workers in agents().items() if workers)
        if who == "the kernel":
            os.kill(agent, signal.SIGKILL)
        else:
            with nearly_full(nodes, mortal, tmp_path):
                wait_until(lambda: is_gone(agent), "the end of the agent")
        wait_until(lambda: is_gone(worker), "a worker ends with its agent")
        printed = " ".join(process.communicate()[0].split())
    assert process.returncode == 0, printed
    assert results(chunky) == undisturbed
    assert "is back, and takes part" in printed
    assert re.search(r"node \S+ was lost .*\) and joined after", printed), "in the summary"
    (member,) = chunky.run_json()["members"]
    (fault,) = member["faults"]
    assert (fault["kind"], fault["remedy"]) == ("lost" if who == "the kernel" else "memory", "again")
    assert who == "the kernel" or who in fault["message"]
    if who == "the kernel":
        assert chunky.ensemble("report", "runs/first").returncode == 0
        page = (chunky.folder / "runs/first/report.html").read_text(encoding="utf-8")
        (lost,) = (change["node"] for change in chunky.run_json()["nodes"] if change["is_lost"])
        assert re.search(rf"GPU \d on {lost}", page), "devices are named with their nodes"
    wait_until(lambda: not agents(), "nothing of a run stays")


@pytest.mark.fault(39)
@pytest.mark.long
def test_a_node_whose_memory_stays_full_is_given_up(
    chunky: Project, tmp_path: Path, nodes: Nodes, mortal: str
) -> None:
    injected = Injected(tmp_path, Fault("wait", ids_of(chunky, 6), times=1))
    launcher = on_cluster(nodes, runtime_env={"env_vars": injected.environment})
    chunky.write_config(chunky_config(chunky, launcher=launcher, devices=nodes.gpus[mortal]))
    with background(chunky) as process:
        injected.wait_for()
        with nearly_full(nodes, mortal, tmp_path):
            printed = " ".join(process.communicate()[0].split())
    assert process.returncode == 1, printed
    assert re.search(r"node \S+ is given up after 3 fresh agents.* Ray's memory monitor", printed), printed
    assert "the cluster has no node left" in printed
    assert len([*(chunky.folder / "runs/first/work").rglob("*.csv")]) == 1, "its first chunk stays"
    wait_until(lambda: not agents(), "nothing of a run stays")


@pytest.mark.fault(39)
@pytest.mark.long
def test_a_node_that_has_just_died(chunky: Project, nodes: Nodes, undisturbed: dict[str, bytes]) -> None:
    """Ray still takes it for alive."""
    name = nodes.new_name("dying")
    nodes.add(name, gpus=1)
    nodes.kill(name)
    chunky.write_config(chunky_config(chunky, launcher=on_cluster(nodes), devices=[gpu_uuid(1)]))
    code, printed = run(chunky)
    assert code == 0, printed
    assert results(chunky) == undisturbed


@pytest.mark.fault(12)
@pytest.mark.long
def test_the_parent_is_killed(
    chunky: Project, tmp_path: Path, nodes: Nodes, undisturbed: dict[str, bytes]
) -> None:
    injected = Injected(tmp_path, Fault("wait", ids_of(chunky, 6), times=1))
    launcher = on_cluster(nodes, runtime_env={"env_vars": injected.environment})
    chunky.write_config(chunky_config(chunky, launcher=launcher, devices=[gpu_uuid(1), gpu_uuid(3)]))
    with background(chunky) as process:
        injected.wait_for()
        process.kill()
        process.communicate()
    (pid,) = injected.pids()
    wait_until(lambda: is_gone(pid) and not agents(), "no worker outlives the parent")
    chunky.write_config(chunky_config(chunky))  # resumed on this machine
    code, printed = run(chunky)
    assert code == 0, printed
    assert results(chunky) == undisturbed
