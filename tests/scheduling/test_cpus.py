"""Workers side by side on a CPU: how many, by the plan; and which cores each of them has."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ensemble.common.gpus import Device
from ensemble.pipeline import checks
from ensemble.pipeline.load import load
from ensemble.pipeline.prepare import prepare
from ensemble.planning import plan as planning
from ensemble.planning.forecast import ASSUMED, Scaling, Speed
from ensemble.planning.plan import Plan, make_plan, workers_beside
from ensemble.scheduling.launchers import cores
from ensemble.scheduling.launchers.cores import Cores
from tests.faults.chunky import chunky_config, ids_of, results
from tests.faults.conftest import chunky, forked, undisturbed
from tests.faults.inject import Fault, Injected
from tests.planning.test_placement import planned
from tests.planning.test_plan import config, facts
from tests.project import Project

__all__ = ["chunky", "forked", "undisturbed"]
GIB = 1 << 30
MACHINE = Device("cpu", "CPU", None, 1000 * GIB, 0)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from bench.shapes import LLAMA_3_8B, make_full_size

    folder = tmp_path_factory.mktemp("full size")
    make_full_size(folder / "llama", LLAMA_3_8B, ["a", "b", "tie"])
    return folder


def plan(
    models: Path,
    *members: dict[str, Any],
    rows: int = 25_000,
    host: Device = MACHINE,
    scaling: Scaling = ASSUMED,
    speeds: dict[str, Speed] | None = None,
    cpus: int = 8,
    **keys: Any,
) -> Plan:
    asked = config(*({"max_length": 512, "model_name_or_path": "llama", **one} for one in members), **keys)
    lengths = np.full(rows, 2000, dtype=np.int64)
    known = {one.name: planned(models, one, lengths) for one in asked.models}
    return make_plan(asked, known, [], host, speeds, cpus=cpus, scaling=scaling)


def shares(made: Plan) -> list[tuple[int, int, float]]:
    return [(one.replicas, one.first_replicas, one.cpu_share) for one in made.members]


def test_as_many_as_end_first(models: Path) -> None:
    assert shares(plan(models, {})) == [(4, 4, 1 / 4)]
    assert shares(plan(models, {}, {})) == [(4, 2, 1 / 4)] * 2
    (alone,) = plan(models, {}, rows=5).members
    assert (alone.replicas, alone.cpu_share) == (1, 1.0), "what is one chunk is done sooner by all cores"
    assert "4 workers at a time on the CPU, 2 cores each" in plan(models, {}).why
    assert shares(plan(models, {}, cpu_workers=1)) == [(1, 1, 1.0)]
    assert shares(plan(models, {}, {}, cpu_workers=3)) == [(3, 2, 1 / 3)] * 2
    assert shares(plan(models, {}, rows=5, cpu_workers=4)) == [(1, 1, 1.0)], "cores for nobody"
    assert shares(plan(models, {"replicas": 100}, rows=5, cpu_workers=1)) == [(1, 1, 1.0)]
    assert shares(plan(models, {}, {}, rows=5, cpu_workers=4)) == [(1, 1, 1 / 2)] * 2


@pytest.mark.parametrize(
    ("cpus", "counts"),
    [
        (1, ()),
        (2, (2,)),
        (4, (2, 4)),
        (6, (2,)),
        (8, (2, 4)),
        (12, (2, 4)),
        (16, (2, 4, 8)),
        (24, (2, 4, 8)),
        (64, (2, 4, 8, 16, 32)),
        (256, (2, 4, 8, 16, 32)),
    ],
)
def test_larger_machines_have_more_to_choose_from(models: Path, cpus: int, counts: tuple[int, ...]) -> None:
    """By assumption the most; by what was measured the fastest, however many cores there are."""
    assert workers_beside(cpus) == counts
    made = plan(models, {}, {}, rows=200_000, host=Device("cpu", "CPU", None, 5000 * GIB, 0), cpus=cpus)
    assert made.cpu_choice == counts
    most = max(counts, default=1)
    assert {one.cpu_share for one in made.members} == {1 / most}
    assert f"{most} workers at a time" in made.why or most == 1
    for best in counts:
        slowdowns = {count: count**0.7 if count <= best else count**1.1 for count in counts}
        again = made.again([], Scaling(slowdowns))
        assert {one.cpu_share for one in again.members} == {1 / best}
    if len(counts) > 2:  # as far as memory and chunks go
        one = made.host_bytes // most
        small = plan(models, {}, host=Device("cpu", "CPU", None, 7 * one, 0), cpus=cpus)
        assert small.cpu_choice == (2, 4)
        assert plan(models, {}, rows=100, cpus=cpus).cpu_choice == (2,)


@pytest.mark.parametrize(
    ("slowdowns", "workers"),
    [({2: 1.5, 4: 2.8}, 4), ({2: 1.5, 4: 3.2}, 2), ({2: 2.0, 4: 4.0}, 2), ({2: 1.9}, 4), ({2: 2.1}, 1)],
)
def test_the_plan_goes_by_what_was_measured(models: Path, slowdowns: dict[int, float], workers: int) -> None:
    made = plan(models, {}, scaling=Scaling(slowdowns))
    assert shares(made) == [(workers, workers, 1 / workers)]
    assert made.cpu_choice == (2, 4)
    assert "measured on this machine" in made.why
    failed = plan(models, {}, scaling=Scaling(problem="no torch"))
    assert "assumed: no torch" in failed.why
    assert failed.again([], Scaling(slowdowns)) == made
    assert plan(models, {}, rows=5).cpu_choice == (), "one chunk leaves nothing to decide"


def test_a_tie_goes_to_several(models: Path) -> None:
    """One leaves cores idle beside its layers; but no copies where memory is scarce, or little is to do."""
    tie = Scaling({2: 2.02, 4: 4.3})
    made = plan(models, {}, {}, scaling=tie)
    assert {one.cpu_share for one in made.members} == {1 / 2}
    assert "layers take as long as by one after the other" in made.why
    needed = made.host_bytes
    assert {one.cpu_share for one in made.again([], Scaling({2: 2.2, 4: 4.4})).members} == {1.0}
    assert {one.cpu_share for one in made.again([], Scaling({2: 2.2, 4: 3.2})).members} == {1 / 4}
    for room, share in ((2.1, 1 / 2), (1.9, 1.0)):
        host = Device("cpu", "CPU", None, int(room * needed), 0)
        assert {one.cpu_share for one in plan(models, {}, {}, scaling=tie, host=host).members} == {share}
    (member,) = plan(models, {}, rows=1000).members
    assert len(member.chunks) >= 16
    for seconds, share in ((15.0, 1.0), (30.0, 1 / 2)):
        speeds = {"m0": Speed(10.0, seconds / member.work, is_measured=True, is_startup_measured=True)}
        (found,) = plan(models, {}, rows=1000, scaling=tie, speeds=speeds).members
        assert found.cpu_share == share, "a second start has to pay"
    (member,) = plan(models, {}, rows=400, scaling=tie).members
    assert (8 < len(member.chunks) < 16, member.cpu_share) == (True, 1.0), "one has the last chunk to itself"


def test_a_tie_is_one_of_what_is_on_the_cpu(models: Path) -> None:
    """And it opens no door to more copies than it may have itself."""
    made = plan(models, {}, {"num_gpus": 0})
    gpu = Device("GPU-0", "A GPU", (8, 0), 100 * GIB, 0)
    speeds = {"m0": Speed(10.0, 0.1, is_measured=True, is_startup_measured=True)}
    speeds["m1"] = replace(speeds["m0"], seconds_per_work=0.001)
    (_, beside) = replace(made, speeds=speeds).again([gpu], Scaling({2: 3.5, 4: 9.0})).members
    assert (beside.gpus, beside.cpu_share) == (0, 1.0), "whatever it takes, the GPU takes longer"
    one = made.host_bytes // 4
    host = Device("cpu", "CPU", None, 9 * one // 2, 0)
    for slowdowns, share in (({2: 2.05, 4: 4.0}, 1 / 2), ({2: 2.1, 4: 4.0}, 1.0), ({2: 2.05, 4: 3.8}, 1 / 4)):
        (member,) = plan(models, {}, host=host, scaling=Scaling(slowdowns)).members
        assert member.cpu_share == share


def test_a_given_number_of_replicas_leaves_no_choice_up_to_it(models: Path) -> None:
    slow = Scaling({2: 3.0, 4: 9.0, 8: 20.0})
    made = plan(models, {"replicas": 4}, scaling=slow)
    assert (shares(made), made.cpu_choice, made.why) == ([(4, 4, 1 / 4)], (), "")
    made = plan(models, {"replicas": 4}, scaling=Scaling({2: 2.0, 4: 4.0, 8: 4.1}), cpus=16)
    assert (shares(made), made.cpu_choice, made.why) == ([(4, 4, 1 / 4)], (), ""), (
        "eight would be four of eight"
    )
    assert shares(plan(models, {"replicas": 2}, cpu_workers=8)) == [(2, 2, 1 / 2)]
    (few, others) = plan(models, {"replicas": 4}, {}, scaling=Scaling({2: 2.02, 4: 4.4, 8: 9.0})).members
    assert (few.cpu_share, others.cpu_share) == (1 / 4, 1.0), "no tie, as one of them would run as it does"


def test_a_speed_is_of_the_cores_that_it_was_measured_with(models: Path) -> None:
    """What two workers took, two workers take, whatever else is known of the machine."""
    speeds = {"m0": Speed(10.0, 0.002, is_measured=True, is_startup_measured=True, cpu_share=0.5)}

    def seconds(workers: int, scaling: Scaling) -> float:
        (member,) = plan(models, {}, cpu_workers=workers, speeds=speeds, scaling=scaling).members
        return member.whole_seconds / member.work

    for scaling in (ASSUMED, Scaling({2: 1.5, 4: 3.2})):
        assert seconds(2, scaling) == pytest.approx(0.002)
    assert seconds(1, Scaling({2: 1.6})) == pytest.approx(0.002 / 1.6)
    assert seconds(4, Scaling({2: 1.6, 4: 3.2})) == pytest.approx(0.004)


def test_no_more_than_memory_holds(models: Path) -> None:
    """Three of the 8B model, and not four; the plan counts what it starts."""
    one = plan(models, {}, cpu_workers=1).host_bytes
    room = Device("cpu", "CPU", None, 100 * GIB + int(3.5 * one), 100 * GIB)
    made = plan(models, {}, {}, host=room)
    assert shares(made) == [(2, 1, 1 / 2)] * 2
    assert made.host_bytes == 2 * one
    assert shares(plan(models, {}, host=Device("cpu", "CPU", None, one + GIB, 0))) == [(1, 1, 1.0)]
    large = {"batch_size": 256}
    more = plan(models, large, cpu_workers=1).host_bytes
    assert more > 1.3 * one, "with the batch that is asked"
    room = Device("cpu", "CPU", None, int(2.2 * one), 0)
    assert shares(plan(models, {}, host=room)) == [(2, 2, 1 / 2)]
    assert shares(plan(models, large, host=room)) == [(1, 1, 1.0)]


def test_who_has_a_cpu_to_itself(models: Path) -> None:
    """Members that ask for replicas have these, and one of which nobody knows what it takes runs alone."""
    assert shares(plan(models, {"replicas": 3}, {})) == [(3, 3, 1 / 4), (4, 2, 1 / 4)]
    assert shares(plan(models, {"replicas": 3}, cpu_workers=1)) == [(3, 3, 1 / 3)]
    lengths = np.full(5000, 2000, dtype=np.int64)
    asked = config({}, {})
    known = {one.name: facts(lengths) for one in asked.models}
    assert shares(make_plan(asked, known, [], MACHINE, cpus=8)) == [(1, 1, 1.0)] * 2


def test_nodes_are_kept_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel's files: CPUs of a node need not follow one another, and threads of a core neither."""
    first = 20 * os.getpid()
    nodes = {first + number: number % 2 for number in range(8)}
    cores_of = {first + number: number % 4 // 2 for number in range(8)}  # 0 and 4 are threads of one core
    for number, node in nodes.items():
        folder = tmp_path / f"cpu{number}"
        (folder / f"node{node}").mkdir(parents=True)
        (folder / "topology").mkdir()
        (folder / "topology" / "physical_package_id").write_text(f"{node}\n")
        (folder / "topology" / "core_id").write_text(f"{cores_of[number]}\n")
    monkeypatch.setattr(cores, "_CPUS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(nodes))
    monkeypatch.setattr(cores, "own_groups", lambda _: type("Groups", (), {"cpu_limit": lambda self: None})())
    monkeypatch.setattr(cores, "usable_cpus", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert cores.layout() == [8, 2, 2, 4]
    found = []
    for count in (2, 4):
        own = [Cores(1 / count) for _ in range(count)]
        found.append([[number - first for number in one.numbers] for one in own])
        for one in own:
            one.close()
    assert found == [[[0, 4, 2, 6], [1, 5, 3, 7]], [[0, 4], [2, 6], [1, 5], [3, 7]]]


def test_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours of a node first, nobody's core twice, and the system's choice where none is left."""
    first = 10 * os.getpid()  # no other test has these
    node_of = {first + number: (number // 4, 0, number // 2) for number in range(8)}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(node_of))
    monkeypatch.setattr(cores, "_place", node_of.__getitem__)
    monkeypatch.setattr(cores, "own_groups", lambda _: type("Groups", (), {"cpu_limit": lambda self: None})())
    monkeypatch.setattr(cores, "usable_cpus", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    taken = [Cores(3 / 8) for _ in range(3)]
    numbers = [[number - first for number in one.numbers] for one in taken]
    assert numbers == [[0, 1, 2], [4, 5, 6], []], "the rest is on two nodes, and too few"
    assert taken[0].environment["OMP_NUM_THREADS"] == "3"
    taken[0].close()
    again = Cores(1 / 4)
    assert [number - first for number in again.numbers] == [0, 1]
    assert (Cores(1.0).numbers, Cores(1.0).environment) == ((), {})
    for one in (*taken, again):
        one.close()


def test_threads_within_a_containers_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker with all there is has no more than the limit, unless the user says how many."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(cores, "own_groups", lambda _: type("Groups", (), {"cpu_limit": lambda self: 4.0})())
    monkeypatch.setattr(cores, "usable_cpus", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = {share: Cores(share) for share in (0.0, 1 / 2, 1.0)}
    threads = [one.environment.get("OMP_NUM_THREADS") for one in found.values()]
    assert threads == [None, "2", "4"]
    assert not any(one.numbers or one.may_hold for one in found.values())
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert Cores(1.0).environment == {}


def test_a_process_runs_where_it_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    own = Cores(0)
    own.numbers = (max(before),)
    with own.inherited():
        code = "import os; print(sorted(os.sched_getaffinity(0)))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == str([max(before)])
    assert os.sched_getaffinity(0) == before


def test_more_workers_than_cores_or_memory_are_warned_of(
    chunky: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunky.write_config(chunky_config(chunky, cpu_workers=4))
    monkeypatch.chdir(chunky.folder)

    def warnings(cores: int, free: int) -> str:
        for name, value in (("usable_cpus", cores), ("available_memory_bytes", free)):
            for module in (planning, checks):
                monkeypatch.setattr(module, name, lambda value=value: value, raising=False)
        return " ".join(prepare(load([Path("config.yaml")]), must_fit=False).warnings)

    assert "cpu_workers" not in warnings(4, 64 * GIB)
    assert "cpu_workers: 4 workers share 2 cores, and take memory for a model each" in warnings(2, 64 * GIB)
    assert "GiB of memory, and 1.0 GiB are free: they may be killed; lower it" in warnings(4, GIB)


@pytest.mark.long
def test_side_by_side(chunky: Project, tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    """Two workers of one member at the same time, a thread each, and the bytes of one with one thread."""
    injected = Injected(
        tmp_path, Fault("wait", ids_of(chunky, 2), times=1), Fault("wait", ids_of(chunky, 5), times=1)
    )
    chunky.write_config(chunky_config(chunky, cpu_workers=2))
    with subprocess.Popen(
        [sys.executable, "-m", "ensemble", "run", "config.yaml"],
        cwd=chunky.folder,
        env={
            **os.environ,
            **injected.environment,
            "OMP_NUM_THREADS": "2",
            "TEST_FORK_SERVER": "",  # a fork has the server's cores and variables
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        injected.wait_for(0)
        injected.wait_for(1)
        pids = [*injected.pids(0), *injected.pids(1)]
        variables = [Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in pids]
        allowed = [os.sched_getaffinity(pid) for pid in pids]
        injected.let_go(0)
        injected.let_go(1)
        printed = process.communicate()[0]
    assert process.returncode == 0, printed
    assert results(chunky) == undisturbed
    assert len(set(pids)) == 2
    # One that has begun early is told later; see test_early.
    assert sum(b"OMP_NUM_THREADS=1" in one for one in variables) >= 1
    # Another run on this machine may have the cores that these would get.
    assert not allowed[0] & allowed[1] or os.sched_getaffinity(0) in allowed
