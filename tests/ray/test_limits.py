"""What a run over a cluster cannot have, and how it ends: no cluster, GPUs that others hold, silent nodes."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from ensemble.common.errors import DeviceError
from ensemble.scheduling.launchers.base import make_launcher
from tests.faults.chunky import chunky_config, ids_of, results, write_chunky_table
from tests.faults.inject import Fault, Injected
from tests.faults.test_workers import is_gone
from tests.nvml.sim import Gpu, NvmlSim, gpu_uuid
from tests.project import LABELS, ROOT, Project, python_path
from tests.ray.nodes import NO_CUDA, SPACED, Nodes, agents, background, both_compute, on_cluster, run, stopped
from tests.sampling import one_in
from tests.waiting import wait_until

pytest.importorskip("ray", reason="ray is not installed")
# Of the nodes, by name: the numbers of its GPUs.
GPUS = {"head": (0,), "second": (1, 2), "third": (3,)}


def refused(project: Project, *options: str, **environment: str) -> str:
    """What a run says that ends with exit code 2, in one line; Ray itself says nothing, and nothing is written."""
    done = project.ensemble("run", "config.yaml", *options, environment=environment)
    printed = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 2, printed
    assert "Traceback" not in printed
    assert not re.search(r"raylet|rpc_client|gcs_client|core_worker|\[20\d\d-", printed), printed
    assert not (project.folder / "runs").exists()
    return printed


def nothing_is_left(nodes: Nodes) -> None:
    wait_until(lambda: not agents(), "the end of the agents")
    wait_until(
        lambda: not [*nodes.folder.glob("*/ensemble-node-*")], "the end of all that a run has on nodes"
    )


@contextlib.contextmanager
def other_job(nodes: Nodes, node: str, gpus: float) -> Iterator[set[str]]:
    """Another job that holds so many GPUs of a node; the UUIDs of these."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.ray.other", nodes.address, node, str(gpus)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": python_path(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        numbers = process.stdout.readline().split(",")
        yield {gpu_uuid(GPUS[node][int(number)]) for number in numbers}
        process.communicate()


@pytest.mark.parametrize("named", one_in(2, ["config", "variable"]))
def test_no_cluster_at_the_address(project: Project, named: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        launcher = {"ray": {"address": address}} if named == "config" else "ray"
        models = [{**model, "num_gpus": 2} for model in project.config()["models"]]
        project.write_config(project.config(launcher=launcher, models=models))
        printed = refused(project, **({"RAY_ADDRESS": address} if named == "variable" else {}))
    assert f"error: launcher.ray: no Ray cluster at {address} (Connection refused)" in printed
    assert "start one with ray start --head" in printed
    assert printed.count("error: ") == 1, "nothing is said of GPUs, which nobody has looked for"


@pytest.mark.long
@pytest.mark.parametrize(
    ("says", "why"),
    [
        pytest.param(b"", "no answer", marks=pytest.mark.long, id="silent"),
        pytest.param(b"HTTP/1.1 400 Bad Request\r\n\r\n", "what answers there is not Ray", id="HTTP"),
    ],
)
def test_something_else_at_the_address(
    project: Project, monkeypatch: pytest.MonkeyPatch, says: bytes, why: str
) -> None:
    """Also where the last cluster of this machine was, of which Ray still has the address."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    lines.append(other.accept()[0])
                    lines[-1].sendall(says)

        lines = list[socket.socket]()
        threading.Thread(target=answer, daemon=True).start()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        project.write_config(project.config(launcher={"ray": {"address": address}}))
        assert f"no Ray cluster at {address} ({why}); start one" in refused(project)
        # As where ray_current_cluster is left of one that has gone; here others may run.
        monkeypatch.setattr("ensemble.scheduling.launchers.ray.cluster._found_address", lambda: address)
        launcher = make_launcher({"ray": None})
        with pytest.raises(DeviceError) as told:
            launcher.inventory()
    assert f"no Ray cluster on this machine (address: auto) ({address}: {why}); start one" in str(told.value)
    for line in lines:
        line.close()


@pytest.mark.parametrize(
    ("address", "text"),
    one_in(
        3,
        [
            ("127.0.0.1:70000", "ray.address: 127.0.0.1:70000 is no address; write HOST:PORT"),
            ("ray://127.0.0.1:10001", "ray.address: ray://127.0.0.1:10001 is for Ray's client"),
            ("local", "ray.address: local is no address; write HOST:PORT"),
        ],
    ),
)
def test_addresses_that_cannot_be(project: Project, address: str, text: str) -> None:
    """``local`` would have Ray start a cluster of its own."""
    project.write_config(project.config(launcher={"ray": {"address": address}}))
    assert text in refused(project)


@pytest.mark.long
def test_who_starts_no_worker_needs_no_cluster(project: Project) -> None:
    rows = [[row_id, "0.2", "0.3", "0.5"] for row_id in project.ids]
    project.write_csv("mate.csv", ["id", *LABELS], rows)
    members = [{"name": "mate", "task_type": "csv", "path": "mate.csv"}]
    config = project.config(launcher={"ray": {"address": "127.0.0.1:1"}}, models=members, defaults=None)
    project.write_config(config)
    code, printed = run(project)
    assert code == 0, printed


@pytest.mark.long
def test_ray_is_not_installed(project: Project, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['ray'] = None\n")
    project.write_config(project.config(launcher="ray"))
    printed = refused(project, PYTHONPATH=python_path(ROOT, tmp_path))
    assert "launcher ray needs ray, which is not" in printed


@pytest.mark.long
def test_looking_leaves_nothing(project: Project, nodes: Nodes) -> None:
    project.write_config(project.config(launcher=on_cluster(nodes)))
    for command in ("validate", "plan"):
        done = project.ensemble(command, "config.yaml")
        assert done.returncode == 0, done.stderr
        nothing_is_left(nodes)
    models = project.config()["models"]
    models[0]["num_gpus"] = 3
    project.write_config(project.config(launcher=on_cluster(nodes), models=models))
    printed = refused(project)
    assert "models[0].num_gpus: gemma asks for 3 GPUs, but 2 GPUs are on any one node" in printed
    nothing_is_left(nodes)


@pytest.mark.long
def test_a_gpu_that_another_job_holds_is_left_to_it(chunky: Project, nodes: Nodes) -> None:
    chunky.write_config(chunky_config(chunky, launcher=on_cluster(nodes)))
    with (
        other_job(nodes, "second", 1) as held,
        other_job(nodes, "head", 1) as of_head,
        other_job(nodes, "third", 0.5) as of_third,
    ):
        code, printed = run(chunky)
    assert code == 0, printed
    for uuid in held | of_head | of_third:
        assert re.search(rf"\({uuid}\) on \S+ is held", " ".join(printed.split()))
    workers = chunky.run_json()["members"][0]["workers"]
    (free,) = {gpu_uuid(1), gpu_uuid(2)} - held
    assert [worker["devices"] for worker in workers] == [[free]]


@pytest.mark.long
def test_gpus_that_other_jobs_hold_are_waited_for(
    chunky: Project, nodes: Nodes, undisturbed: dict[str, bytes]
) -> None:
    chunky.write_config(chunky_config(chunky, launcher=on_cluster(nodes)))
    with contextlib.ExitStack() as others:
        for name, numbers in GPUS.items():
            others.enter_context(other_job(nodes, name, len(numbers)))
        printed = refused(chunky)
        assert "models[0] (llama) needs" in printed
        for number in range(4):
            assert re.search(rf"\({gpu_uuid(number)}\) on \S+ is held by another job of the", printed)
        assert "wait_for_gpu: 10m" in printed
        done = chunky.ensemble("run", "config.yaml", "--set", "wait_for_gpu=2s")
        assert done.returncode == 2, done.stdout
        assert "after 2 s" in " ".join(done.stderr.split())
        assert "waiting up to 2 s more for it" in " ".join(done.stdout.split())
        nothing_is_left(nodes)
        with background(chunky, "--set", "wait_for_gpu=10m") as process:
            assert process.stdout is not None
            while "waiting up to" not in (line := process.stdout.readline()):
                assert line, "it ended without waiting"
            others.close()
            message = process.communicate()[0]
    assert process.returncode == 0, message
    assert results(chunky) == undisturbed
    nothing_is_left(nodes)


@pytest.mark.long
@pytest.mark.parametrize("where", ["GPUs", "CPUs"])
def test_two_runs_at_once(
    chunky: Project, tmp_path: Path, nodes: Nodes, undisturbed: dict[str, bytes], where: str
) -> None:
    """The second waits for the first where it needs GPUs, and shares the CPUs with it where it does not."""
    second = Project(tmp_path / "second, \"ü\" 'two'", chunky.models)
    (second.folder / "ray").mkdir(parents=True)
    (second.folder / "ray" / "__init__.py").write_text(
        "raise SystemExit('no library, but a folder of the user')"
    )
    write_chunky_table(second)
    injected = Injected(tmp_path, Fault("wait", ids_of(chunky, 2), times=1))
    environment = {"env_vars": injected.environment}
    defaults = {"text_column": "text", "max_length": 16}
    changes = {"defaults": {**defaults, "num_gpus": 0}} if where == "CPUs" else {}
    first = on_cluster(nodes, runtime_env=environment)
    chunky.write_config(chunky_config(chunky, launcher=first, **changes))
    second.write_config(chunky_config(second, launcher=on_cluster(nodes), wait_for_gpu="10m", **changes))
    with background(chunky) as item:
        injected.wait_for()
        with background(second) as other:
            assert other.stdout is not None
            if where == "GPUs":
                while "waiting up to" not in (line := other.stdout.readline()):
                    assert line, "it ended without waiting"
                injected.let_go()
            printed = other.communicate()[0]
            assert other.returncode == 0, printed
        injected.let_go()
        printed = item.communicate()[0]
        assert item.returncode == 0, printed
    if where == "GPUs":
        assert results(chunky) == results(second) == undisturbed
    assert results(chunky) == results(second)


@pytest.mark.long
def test_a_time_limit_while_a_worker_hangs(chunky: Project, tmp_path: Path, nodes: Nodes) -> None:
    injected = Injected(tmp_path, Fault("freeze", ids_of(chunky, 6)))
    launcher = on_cluster(nodes, runtime_env={"env_vars": injected.environment})
    chunky.write_config(chunky_config(chunky, launcher=launcher, time_limit="60s"))
    code, printed = run(chunky)
    printed = " ".join(printed.split())
    assert code == 4, printed
    assert "error: stopped at time_limit: llama 12 of 16 rows; 4 rows that no member reached" in printed
    assert len((chunky.folder / "out/submission.csv").read_text().splitlines()) == 17
    nothing_is_left(nodes)


@pytest.mark.fault(39)
@pytest.mark.long
@pytest.mark.parametrize("what", ["its agent", "its agent and raylet"])
def test_a_node_that_does_not_respond_is_lost(
    chunky: Project, tmp_path: Path, nodes: Nodes, mortal: str, undisturbed: dict[str, bytes], what: str
) -> None:
    waits = [Fault("wait", ids_of(chunky, row), times=1) for row in (2, 6, 10, 14)]
    injected = Injected(tmp_path, *waits)
    launcher = on_cluster(nodes, runtime_env={"env_vars": injected.environment})
    devices = [gpu_uuid(1), *nodes.gpus[mortal]]
    chunky.write_config(chunky_config(chunky, launcher=launcher, devices=devices, hang_timeout=20))
    with background(chunky) as process:
        agent, pid = both_compute(injected, raylet := nodes.raylets[mortal])
        with stopped(*([raylet] if "raylet" in what else []), agent):
            for number in range(4):
                injected.let_go(number)
            printed = " ".join(process.communicate()[0].split())
    assert process.returncode == 0, printed
    assert results(chunky) == undisturbed
    assert re.search(rf"process {pid} on \S+\) ended when node \S+ was lost \(.* 20 s", printed), printed
    wait_until(lambda: is_gone(pid), "the end of the worker")
    wait_until(lambda: is_gone(agent), "the end of the agent")


def ending_in(
    method: str, folder: str, tmp_path: Path, number: signal.Signals = signal.SIGSTOP, times: int = 1000
) -> dict[str, str]:
    """The environment of nodes where so many agents get a signal in a method, if their node has such a folder."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\n"
        f"if {folder!r} in os.environ.get('TMPDIR', ''):\n"
        "    from ensemble.scheduling.launchers.ray.agent import Agent\n"
        f"    whole = Agent.{method}\n"
        "    def ending(*arguments):\n"
        f"        with open({str(tmp_path / 'ended')!r}, 'a+') as file:\n"
        "            file.write('.')\n"
        f"        if os.path.getsize(file.name) > {times}:\n"
        "            return whole(*arguments)\n"
        f"        os.kill(os.getpid(), {number})\n"
        "        time.sleep(1000)\n"  # the thread that does it goes on for a moment
        f"    Agent.{method} = ending\n"
    )
    return {"PYTHONPATH": python_path(ROOT, tmp_path)}


@pytest.mark.fault(39)
@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "number", "why"),
    [
        ("check", signal.SIGSTOP, r"it has not responded for 10 s \(hang_timeout\)"),
        ("write", signal.SIGSTOP, r"it has not responded for 10 s \(hang_timeout\)"),
        ("write", signal.SIGKILL, "its agent has died"),
    ],
    ids=["asked", "supplied", "supplied and killed"],
)
def test_a_node_that_does_not_respond_before_anything_runs(
    chunky: Project,
    tmp_path: Path,
    nodes: Nodes,
    mortal: str,
    undisturbed: dict[str, bytes],
    method: str,
    number: signal.Signals,
    why: str,
) -> None:
    """When nodes are asked for their files, or get the table: the run goes on without, and tells why."""
    launcher = on_cluster(nodes, runtime_env={"env_vars": ending_in(method, mortal, tmp_path, number)})
    devices = [gpu_uuid(1), *nodes.gpus[mortal]]
    chunky.write_config(chunky_config(chunky, launcher=launcher, devices=devices, hang_timeout=10))
    code, printed = run(chunky)
    assert code == 0, printed
    assert results(chunky) == undisturbed
    assert len(re.findall(rf"node \S+ is lost: {why}", " ".join(printed.split()))) == 1, printed
    workers = chunky.run_json()["members"][0]["workers"]
    assert {worker["devices"][0] for worker in workers if worker["counters"]["chunks"]} == {gpu_uuid(1)}
    nothing_is_left(nodes)


@pytest.mark.fault(39)
@pytest.mark.long
@pytest.mark.parametrize("deaths", [1, 4])
def test_an_agent_that_dies_while_it_starts_gets_successors(
    chunky: Project, tmp_path: Path, nodes: Nodes, mortal: str, deaths: int
) -> None:
    environment = ending_in("facts", mortal, tmp_path, signal.SIGKILL, times=deaths)
    launcher = on_cluster(nodes, runtime_env={"env_vars": environment})
    chunky.write_config(chunky_config(chunky, launcher=launcher, devices=nodes.gpus[mortal]))
    done = chunky.ensemble("plan", "config.yaml")
    if deaths == 1:
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode == 2
        assert "no agent could be started on node" in " ".join(done.stderr.split())
    nothing_is_left(nodes)


@pytest.mark.fault(39)
@pytest.mark.long
def test_nodes_that_do_not_respond_when_they_are_looked_at(
    chunky: Project, tmp_path: Path, nodes: Nodes
) -> None:
    folder = str(nodes.folder)  # those of all of them are below it
    launcher = on_cluster(nodes, runtime_env={"env_vars": ending_in("check", folder, tmp_path)})
    chunky.write_config(chunky_config(chunky, launcher=launcher, hang_timeout=10))
    printed = refused(chunky)
    assert "error: launcher.ray: no node of the cluster is left: node" in printed
    assert printed.count("for 10 s (hang_timeout))") == 3
    ending_in("trials", str(nodes.folder / "second"), tmp_path)
    done = chunky.ensemble("doctor", "config.yaml")
    printed = " ".join(done.stdout.split())
    assert "for 10 s (hang_timeout)" in printed, printed
    assert len(NO_CUDA.findall(printed)) == 2, printed
    nothing_is_left(nodes)


@pytest.mark.long
def test_an_agent_that_nobody_asks_ends(
    chunky: Project, tmp_path: Path, nodes: Nodes, undisturbed: dict[str, bytes]
) -> None:
    injected = Injected(tmp_path, Fault("wait", ids_of(chunky, 6), times=1))
    launcher = on_cluster(nodes, runtime_env={"env_vars": injected.environment})
    chunky.write_config(chunky_config(chunky, launcher=launcher, hang_timeout=5))
    with background(chunky) as process:
        injected.wait_for()
        process.send_signal(signal.SIGSTOP)
        (pid,) = injected.pids()
        wait_until(lambda: is_gone(pid) and not agents(), "the end of the agents")
        process.send_signal(signal.SIGCONT)
        printed = process.communicate()[0]
    assert process.returncode == 0, printed  # fresh agents go on
    nothing_is_left(nodes)
    assert results(chunky) == undisturbed


@pytest.mark.fault(13)
@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_the_batches_of_an_unfinished_chunk_and_ends_all(
    chunky: Project, tmp_path: Path, nodes: Nodes, undisturbed: dict[str, bytes], number: signal.Signals
) -> None:
    """It comes to all processes of a terminal; the worker is in the second of four batches of the third chunk."""
    injected = Injected(tmp_path, Fault("wait", ids_of(chunky, 9), times=1))
    launcher = on_cluster(nodes, runtime_env={"env_vars": injected.environment})
    config = chunky_config(chunky, launcher=launcher, devices=[gpu_uuid(1)])
    config["models"][0]["batch_size"] = 1
    chunky.write_config(config)
    log = chunky.folder / "runs/first/logs/run.log"
    with background(chunky) as process:
        injected.wait_for()
        os.killpg(process.pid, number)
        wait_until(lambda: "is asked to finish its batch" in log.read_text(), "what the worker is told")
        time.sleep(2)  # of the eight seconds that a run waits: it goes through the agent to the worker
        injected.let_go()
        printed = process.communicate()[0]
    assert process.returncode == 128 + number, printed
    assert "done is kept" in " ".join(printed.split())
    (pid,) = injected.pids()
    assert is_gone(pid)
    workers = chunky.run_json()["members"][0]["workers"]
    assert any(worker["process"].startswith(f"{pid} on ") for worker in workers)
    nothing_is_left(nodes)
    status = " ".join(chunky.ensemble("status", "runs/first").stdout.split())
    rows = int(re.findall(r"llama unfinished ([0-9]+) 16", status)[0])
    assert rows >= 10, "two rows of the third chunk; more where a busy machine told the worker late"
    code, printed = run(chunky)
    assert code == 0, printed
    assert chunky.run_json()["members"][0]["reused_rows"] == rows
    resumed, whole = (
        np.loadtxt(io.BytesIO(files["predictions/llama.csv"]), delimiter=",", skiprows=1)
        for files in (results(chunky), undisturbed)
    )
    np.testing.assert_allclose(resumed, whole, atol=1e-6)


@pytest.mark.long
def test_a_signal_while_nodes_get_their_files(
    chunky: Project, tmp_path: Path, nodes: Nodes, mortal: str
) -> None:
    launcher = on_cluster(nodes, runtime_env={"env_vars": ending_in("write", mortal, tmp_path)})
    devices = [gpu_uuid(1), *nodes.gpus[mortal]]
    chunky.write_config(chunky_config(chunky, launcher=launcher, devices=devices, hang_timeout=100))
    with background(chunky) as process:
        wait_until(
            lambda: any(psutil.Process(pid).status() == psutil.STATUS_STOPPED for pid in agents()),
            "a node that takes no files",
        )
        process.send_signal(signal.SIGINT)
        printed = " ".join(process.communicate()[0].split())
    assert process.returncode == 130, printed
    assert "stopped by Ctrl-C" in printed
    nothing_is_left(nodes)


@pytest.mark.long
def test_a_second_signal_ends_at_once(chunky: Project, tmp_path: Path, nodes: Nodes) -> None:
    injected = Injected(tmp_path, Fault("freeze", ids_of(chunky, 6), times=1))
    launcher = on_cluster(nodes, runtime_env={"env_vars": injected.environment})
    chunky.write_config(chunky_config(chunky, launcher=launcher))
    with background(chunky) as process:
        injected.wait_for()
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert process.returncode == 130
    (pid,) = injected.pids()
    wait_until(lambda: is_gone(pid) and not agents(), "the end of what it had on nodes")
    nothing_is_left(nodes)


@pytest.mark.fault(39)
@pytest.mark.long
def test_versions_that_differ(project: Project, tmp_path: Path, nodes: Nodes) -> None:
    """An environment of the nodes in which another release of tokenizers comes first."""
    metadata = tmp_path / "other" / "tokenizers-0.0.1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tokenizers\nVersion: 0.0.1\n")
    variables = {"PYTHONPATH": python_path(ROOT, metadata.parent)}
    launcher = on_cluster(nodes, runtime_env={"env_vars": variables})
    project.write_config(project.config(launcher=launcher))
    printed = refused(project)
    assert re.search(r"launcher.ray: node \S+ has tokenizers 0.0.1, and this machine \d", printed)
    nothing_is_left(nodes)


@pytest.mark.fault(39)
@pytest.mark.long
@pytest.mark.parametrize("what", ["stopped", "killed"])
def test_the_head_does_not_respond(
    chunky: Project,
    tmp_path: Path,
    nvml_libraries: Path,
    nvml_sim: NvmlSim,
    undisturbed: dict[str, bytes],
    what: str,
) -> None:
    """The run ends, with what stands; nothing of it stays on nodes, although Ray ends nothing without a head."""
    if " " in sys.executable:
        pytest.skip(SPACED)
    # Always: a worker that is given up at the same moment has a successor.
    injected = Injected(tmp_path, Fault("wait", ids_of(chunky, 6)))
    (tmp_path / "of nodes").mkdir()
    own = Nodes(tmp_path / "of nodes", nvml_libraries)
    try:
        own.add("head")
        own.add("other", gpus=1)
        launcher = on_cluster(own, runtime_env={"env_vars": injected.environment})
        hang_timeout, why = (
            (20, "20 s (hang_timeout)") if what == "stopped" else (600, "45 s (Connection refused)")
        )
        chunky.write_config(chunky_config(chunky, launcher=launcher, hang_timeout=hang_timeout))
        with background(chunky) as process, contextlib.ExitStack() as until_then:
            injected.wait_for()
            if what == "stopped":
                until_then.enter_context(stopped(own.head))
            else:
                own.kill_head()
            printed = " ".join(process.communicate()[0].split())
            assert process.returncode == 1, printed
            assert f"the cluster is lost: its head at {own.address} has not responded for {why}" in printed
            assert "run the same command again" in printed
            assert printed.count("is lost") == 1, printed
            assert "gcs_" not in printed
            nothing_is_left(own)
            why = "no answer" if what == "stopped" else "Connection refused"
            done = chunky.ensemble("run", "config.yaml")
            assert f"no Ray cluster at {own.address} ({why})" in " ".join(done.stderr.split())
    finally:
        own.close()
    nvml_sim.write([Gpu(gpu_uuid(9))])
    chunky.write_config(chunky_config(chunky))
    here = chunky.ensemble("run", "config.yaml", environment=nvml_sim.environment())
    assert here.returncode == 0, here.stderr
    assert results(chunky) == undisturbed
    assert chunky.run_json()["members"][0]["reused_rows"] >= 4


@pytest.mark.fault(39)
@pytest.mark.long
@pytest.mark.parametrize("nodes_there", [1, 2])
def test_the_raylet_of_this_machine_dies(
    chunky: Project, tmp_path: Path, nvml_libraries: Path, nodes_there: int
) -> None:
    """Ray's sockets break with it, whatever the run asks of the cluster next; no disk is to blame."""
    if " " in sys.executable:
        pytest.skip(SPACED)
    injected = Injected(tmp_path, Fault("wait", ids_of(chunky, 6)))
    (tmp_path / "of nodes").mkdir()
    own = Nodes(tmp_path / "of nodes", nvml_libraries)
    try:
        own.add("head", gpus=2 - nodes_there)
        if nodes_there == 2:
            own.add("other", gpus=1)
        launcher = on_cluster(own, runtime_env={"env_vars": injected.environment})
        chunky.write_config(chunky_config(chunky, launcher=launcher))
        with background(chunky) as process:
            injected.wait_for()
            os.kill(own.raylets["head"], signal.SIGKILL)
            printed = " ".join(process.communicate(timeout=200)[0].split())
        assert process.returncode == 1, printed
        assert "cannot write" not in printed
        assert "the raylet of this machine, its connection to the cluster, has ended" in printed
        assert "run the same command again" in printed
        assert "Traceback" not in printed
        nothing_is_left(own)
    finally:
        own.close()
