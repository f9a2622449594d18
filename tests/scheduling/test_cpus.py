"""Workers side by side on a CPU: how many, by the plan, and how many threads each of them has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ensemble.cli.plans import where_text
from ensemble.common.gpus import Device
from ensemble.common.text import gib
from ensemble.pipeline import checks
from ensemble.pipeline.load import load
from ensemble.pipeline.prepare import prepare
from ensemble.planning import plan as planning
from ensemble.planning.forecast import Speed
from ensemble.planning.plan import CpuChoice, Plan
from ensemble.scheduling.launchers import local
from ensemble.scheduling.launchers.local import thread_variables
from tests.faults.chunky import chunky_config, ids_of, results
from tests.faults.conftest import chunky, undisturbed
from tests.faults.inject import Fault, Injected
from tests.planning.test_placement import planned
from tests.planning.test_plan import config, facts, make_plan
from tests.project import Project

__all__ = ["chunky", "undisturbed"]
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
    speeds: dict[str, Speed] | None = None,
    cpus: int = 8,
    **keys: Any,
) -> Plan:
    asked = config(
        *({"max_length": 512, "model_name_or_path": "llama", **member} for member in members), **keys
    )
    lengths = np.full(rows, 2000, dtype=np.int64)
    known = {model.name: planned(models, model, lengths) for model in asked.models}
    return make_plan(asked, known, [], host, speeds, cpus=cpus)


def shares(made: Plan) -> list[tuple[int, int, float]]:
    return [(member.replicas, member.first_replicas, member.cpu_share) for member in made.models]


def test_as_many_as_share_the_cores(models: Path) -> None:
    assert shares(plan(models, {})) == [(4, 4, 1 / 4)]
    assert shares(plan(models, {}, {})) == [(4, 2, 1 / 4)] * 2
    (alone,) = plan(models, {}, rows=5).models
    assert (alone.replicas, alone.cpu_share) == (1, 1.0), "one chunk has all cores"
    assert shares(plan(models, {}, cpu_workers=1)) == [(1, 1, 1.0)]
    assert shares(plan(models, {}, {}, cpu_workers=3)) == [(3, 2, 1 / 3)] * 2
    assert shares(plan(models, {}, rows=5, cpu_workers=4)) == [(1, 1, 1.0)], "cores for nobody"
    assert shares(plan(models, {"replicas": 100}, rows=5, cpu_workers=1)) == [(1, 1, 1.0)]
    assert shares(plan(models, {}, {}, rows=5, cpu_workers=4)) == [(1, 1, 1 / 2)] * 2


@pytest.mark.parametrize(
    ("cpus", "workers"), [(1, 1), (2, 2), (3, 2), (4, 2), (6, 3), (8, 4), (12, 6), (64, 32)]
)
def test_two_cores_for_each_worker_and_two_workers_on_two_cores(
    models: Path, cpus: int, workers: int
) -> None:
    host = Device("cpu", "CPU", None, 5000 * GIB, 0)
    made = plan(models, {}, {}, rows=200_000, host=host, cpus=cpus)
    assert {member.cpu_share for member in made.models} == {1 / workers}
    each = "1 core" if cpus < 4 else "2 cores"
    message = f"{workers} workers at a time on the CPU, {each} each, take about "
    assert made.why.startswith(message) == (workers > 1)
    assert made.again([]) == made


def test_the_plan_says_what_they_take(models: Path) -> None:
    made = plan(models, {}, {})
    assert (
        made.why
        == f"4 workers at a time on the CPU, 2 cores each, take about {gib(made.host_bytes)} of memory"
    )
    assert plan(models, {}, cpu_workers=1).why == ""


def test_a_given_number_of_replicas_has_its_part_of_the_cores(models: Path) -> None:
    assert shares(plan(models, {"replicas": 4}, cpus=16)) == [(4, 4, 1 / 4)]
    assert shares(plan(models, {"replicas": 2}, cpu_workers=8)) == [(2, 2, 1 / 2)]


def test_a_speed_is_of_the_cores_that_it_was_measured_with(models: Path) -> None:
    """What two workers took, two workers take, whatever else is known of the machine."""
    speeds = {"m0": Speed(10.0, 0.002, is_measured=True, is_startup_measured=True, cpu_share=0.5)}

    def seconds(workers: int) -> float:
        (member,) = plan(models, {}, cpu_workers=workers, speeds=speeds).models
        return member.whole_seconds / member.work

    assert seconds(2) == pytest.approx(0.002)
    assert seconds(1) == pytest.approx(0.002 / 2**0.75)
    assert seconds(4) == pytest.approx(0.002 * 2**0.75)


def test_members_that_run_side_by_side_take_their_memory_together(models: Path) -> None:
    def host_bytes(*members: dict[str, Any], cpu_workers: int = 2) -> int:
        return plan(models, *members, cpu_workers=cpu_workers).host_bytes

    small, large = {"replicas": 1}, {"replicas": 1, "batch_size": 256}
    alone = host_bytes(small), host_bytes(large)
    assert alone[0] < alone[1]
    assert host_bytes(small, large) == sum(alone)
    assert host_bytes(small, small, large) == sum(alone), "two at a time, the greatest"
    assert host_bytes(small, large, cpu_workers=1) == alone[1], "one behind the other"


def test_no_more_than_memory_holds(models: Path) -> None:
    """Three of the 8B model, and not four; the plan counts what it starts."""
    item = plan(models, {}, cpu_workers=1).host_bytes
    room = Device("cpu", "CPU", None, 100 * GIB + int(3.5 * item), 100 * GIB)
    made = plan(models, {}, {}, host=room)
    assert shares(made) == [(3, 2, 1 / 3)] * 2
    assert made.host_bytes == 3 * item
    assert shares(plan(models, {}, host=Device("cpu", "CPU", None, item + GIB, 0))) == [(1, 1, 1.0)]
    large = {"batch_size": 256}
    more = plan(models, large, cpu_workers=1).host_bytes
    assert more > 1.3 * item, "with the batch that is asked"
    room = Device("cpu", "CPU", None, int(2.2 * item), 0)
    assert shares(plan(models, {}, host=room)) == [(2, 2, 1 / 2)]
    assert shares(plan(models, large, host=room)) == [(1, 1, 1.0)]


def test_who_has_a_cpu_to_itself(models: Path) -> None:
    """Members that ask for replicas have these, and one of which nobody knows what it takes runs alone."""
    assert shares(plan(models, {"replicas": 3}, {})) == [(3, 3, 1 / 4), (4, 2, 1 / 4)]
    assert shares(plan(models, {"replicas": 3}, cpu_workers=1)) == [(3, 3, 1 / 3)]
    lengths = np.full(5000, 2000, dtype=np.int64)
    asked = config({}, {})
    known = {model.name: facts(lengths) for model in asked.models}
    assert shares(make_plan(asked, known, [], MACHINE, cpus=8)) == [(1, 1, 1.0)] * 2


def test_threads_are_of_the_cores_and_the_containers_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker with all there is has what the user says."""
    monkeypatch.setattr(local, "usable_cpus", lambda: 4)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    assert thread_variables(0.0) == {}
    for share, count in ((1.0, "4"), (1 / 2, "2"), (1 / 3, "1"), (1 / 1000, "1")):
        assert set(thread_variables(share).values()) == {count}
    monkeypatch.setenv("MKL_NUM_THREADS", "3")
    assert "MKL_NUM_THREADS" not in thread_variables(1.0)
    assert thread_variables(1 / 2)["MKL_NUM_THREADS"] == "2"
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert thread_variables(1.0) == {}


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


def test_a_run_that_goes_on_has_the_threads_that_it_began_with(models: Path) -> None:
    began = {"m0": CpuChoice(threads=3, workers=2)}

    def chosen(*members: dict[str, Any], **keys: Any) -> list[tuple[int, float, int | None]]:
        made = plan(models, *members, **keys).again([], began)
        assert made.again([]) == made
        return [(member.replicas, member.cpu_share, member.cpu_threads) for member in made.models]

    assert chosen({}) == [(2, 1 / 2, 3)]
    assert chosen({}, {}) == [(2, 1 / 2, 3), (4, 1 / 4, None)], "the other member is new"
    assert chosen({}, cpus=64) == [(2, 1 / 2, 3)]
    assert chosen({}, cpus=4) == [(1, 1.0, 3)]
    assert chosen({}, cpus=2) == [(2, 1 / 2, None)], "too few cores for its threads"
    item = plan(models, {}, cpu_workers=1).host_bytes
    assert chosen({}, host=Device("cpu", "CPU", None, item + GIB, 0)) == [(1, 1.0, 3)]
    assert chosen({}, cpu_workers=4) == [(4, 1 / 4, None)], "what the user sets wins"
    assert chosen({"replicas": 3}) == [(3, 1 / 3, None)]


@pytest.mark.long
def test_side_by_side(chunky: Project, tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    """Two workers of one member at the same time, a thread each, and the bytes of one with one thread."""
    injected = Injected(
        tmp_path, Fault("wait", ids_of(chunky, 2), times=1), Fault("wait", ids_of(chunky, 5), times=1)
    )
    chunky.write_config(chunky_config(chunky, cpu_workers=2))
    own = {"OMP_NUM_THREADS": "2", "TEST_FORK_SERVER": ""}  # a fork has the server's cores and variables
    with chunky.start("run", "config.yaml", environment={**injected.environment, **own}) as process:
        injected.wait_for(0)
        injected.wait_for(1)
        pids = [*injected.pids(0), *injected.pids(1)]
        variables = [Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in pids]
        injected.let_go(0)
        injected.let_go(1)
        printed = process.communicate()[0]
    assert process.returncode == 0, printed
    assert results(chunky) == undisturbed
    assert len(set(pids)) == 2
    assert all(b"OMP_NUM_THREADS=1" in variable for variable in variables)


def test_a_plan_says_which_replicas_wait_until_another_member_is_done() -> None:
    lengths = np.full(4000, 500, dtype=np.int64)
    known = {"m0": facts(lengths), "m1": facts(lengths)}
    both = make_plan(config({}, {}, cpu_workers=2), known, [], MACHINE, cpus=4)
    alone = make_plan(config({}, cpu_workers=2), {"m0": known["m0"]}, [], MACHINE, cpus=4)
    where = "on the CPU, with 2 cores of 4"
    assert where_text(both, both.models[0], 0) == f"1 replica {where}, and 1 more when cores are free"
    assert where_text(alone, alone.models[0], 0) == f"2 replicas {where}"
