"""Plans as arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ensemble.common.gpus import Device
from ensemble.config import RunConfig
from ensemble.jobs.job import compile_models
from ensemble.members.base import ResourceRequest
from ensemble.members.huggingface.memory import CheckpointMemory
from ensemble.members.seq_cls.parent import SequenceClassification, SequenceClassifierSettings
from ensemble.planning import plan as plans
from ensemble.planning.chunks import cut_chunks
from ensemble.planning.placement import ModelFacts
from ensemble.planning.plan import WORKER_HOST_BYTES, Plan


def asked(index: int, **keys: Any) -> SequenceClassifierSettings:
    base = {"name": f"m{index}", "model_name_or_path": "m", "text_column": "text"}
    return SequenceClassifierSettings.model_validate({**base, **keys}, strict=False)


def config(*models: dict[str, Any], **keys: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "data": {"path": "t.csv"},
            "labels": ["a", "b"],
            "models": [asked(index, **model) for index, model in enumerate(models)],
            "output_dir": "out",
            **keys,
        },
        strict=False,
    )


def gpus(count: int, kind: str = "GPU") -> list[Device]:
    return [Device(f"{kind}-{index}", "T4", (7, 5), 16 << 30, 0) for index in range(count)]


def facts(lengths: npt.NDArray[np.int64], **keys: Any) -> ModelFacts:
    """Of a member with these keys, of whose memory nothing is known."""
    settings = asked(0, **keys)
    return ModelFacts(settings.name, SequenceClassification(settings).request(), lengths)


def make_plan(asked: RunConfig, known: Mapping[str, ModelFacts], *others: Any, **options: Any) -> Plan:
    """A plan of the models that a config compiles to."""
    return plans.make_plan(asked, compile_models(asked.models, asked.labels), known, *others, **options)


def plan(devices: list[Device], *models: dict[str, Any], rows: int = 5000) -> list[tuple[int, int]]:
    lengths = np.full(rows, 200, dtype=np.int64)
    known = {f"m{index}": facts(lengths, **keys) for index, keys in enumerate(models)}
    made = make_plan(config(*models), known, devices)
    return [(member.gpus, member.replicas) for member in made.models]


def test_replicas_and_gpus() -> None:
    assert plan([], {}) == [(0, 1)]
    assert plan([], {"replicas": 3}, {"num_gpus": 0}) == [(0, 3), (0, 1)]
    assert plan(gpus(2), {}, {"replicas": 1}, {"num_gpus": 2}) == [(1, 2), (1, 1), (2, 1)]
    assert plan(gpus(4), {"num_gpus": 2}, {"num_gpus": 0}) == [(2, 2), (0, 1)]
    assert plan(gpus(2), {}, rows=3) == [(1, 1)], "no more replicas than chunks"


def test_memory_of_the_host() -> None:
    """A process for each worker there can be at a time: of all members on GPUs, and of one on the CPU."""
    lengths = np.full(5000, 200, dtype=np.int64)

    def host_gib(devices: list[Device], *models: dict[str, Any], **keys: Any) -> float:
        known = {f"m{index}": facts(lengths, **asked) for index, asked in enumerate(models)}
        return make_plan(config(*models, **keys), known, devices).host_bytes / WORKER_HOST_BYTES

    assert host_gib(gpus(2), {}, {}) == 2
    assert host_gib(gpus(2), {}, {}, max_workers_per_gpu=2) == 4
    assert host_gib(gpus(4), {"num_gpus": 4}) == 1
    assert host_gib(gpus(2), {}, {"num_gpus": 0}, {"num_gpus": 0, "replicas": 3}) == 2 + 3


def test_places_of_a_gpu_that_members_share() -> None:
    """By the memory that a member says it takes; without a word it has its GPUs to itself."""
    lengths = np.full(5000, 200, dtype=np.int64)

    def places(devices: list[Device], *sizes: int | str | None, gpus: int = 1) -> list[tuple[int, int]]:
        known = {
            f"m{index}": ModelFacts(f"m{index}", ResourceRequest(gpus, gpu_memory=size), lengths)  # type: ignore[arg-type]
            for index, size in enumerate(sizes)
        }
        made = make_plan(config(*({} for _ in sizes), max_workers_per_gpu=3), known, devices)
        assert not made.problems
        return [(member.placement.places, member.replicas) for member in made.models]

    gib = 1 << 30
    assert places(gpus(1), 5 * gib, 6 * gib, 11 * gib, 16 * gib) == [(1, 3), (2, 1), (3, 1), (3, 1)]
    assert places(gpus(2), "all", None, 5 * gib) == [(3, 2), (1, 6), (1, 6)]
    assert places(gpus(2), 5 * gib, "all", gpus=2) == [(1, 3), (3, 1)]
    small = replace(gpus(1)[0], uuid="small", total_bytes=6 * gib)
    assert places([*gpus(1), small], 5 * gib, 6 * gib, 7 * gib) == [(3, 2), (3, 2), (2, 1)]
    used = replace(gpus(1)[0], used_bytes=4 * gib)  # of what is left, as the others' shares
    assert places([used], 4 * gib, 5 * gib) == [(1, 3), (2, 1)]
    known = {"m0": ModelFacts("m0", ResourceRequest(1, gpu_memory=5 * gib), lengths)}
    (held,) = make_plan(config({}), known, [replace(gpus(1)[0], used_bytes=12 * gib)]).models
    assert (held.placement.devices, held.placement.held) == ((), ("GPU-0",))
    known = {"m0": ModelFacts("m0", ResourceRequest(2, gpu_memory=7 * gib), lengths)}
    (problem,) = make_plan(config({}), known, [*gpus(1), small]).problems
    assert problem == (
        "models[0].gpu_memory: m0 asks for 7.0 GiB of 2 GPUs, but the largest GPU has 16.0 GiB, and only 1 GPU so "
        "much; lower it, or num_gpus"
    )


def test_more_gpus_than_there_are() -> None:
    models: tuple[dict[str, Any], ...] = ({"num_gpus": 2}, {}, {"num_gpus": 4})
    known = {f"m{index}": facts(np.ones(1, dtype=np.int64), **keys) for index, keys in enumerate(models)}
    problems = make_plan(config(*models), known, gpus(1)).problems
    assert [problem.split(":")[0] for problem in problems] == ["models[0].num_gpus", "models[2].num_gpus"]
    assert "1 GPU can be used" in problems[0]
    (problem,) = make_plan(config({"num_gpus": 2}), known, gpus(2, "MIG")).problems
    assert "one MIG slice" in problem


def test_replicas_beyond_the_room_are_said_and_capped() -> None:
    made = make_plan(config({"replicas": 4}), {"m0": facts(np.full(5000, 50), replicas=4)}, gpus(2))
    assert made.models[0].replicas == 2
    assert "models[0].replicas" in made.warnings[0]


def test_chunks_of_a_large_table_are_neither_crumbs_nor_mountains() -> None:
    _, chunks = cut_chunks(np.full(1_000_000, 40, dtype=np.int64))
    assert 200 <= len(chunks) <= 300
    _, chunks = cut_chunks(np.full(25_000, 6_000, dtype=np.int64))  # the LMSYS test table
    assert 100 <= len(chunks) <= 200
    _, chunks = cut_chunks(np.array([10_000_000, 5, 5], dtype=np.int64))
    assert len(chunks) >= 1


def test_equal_lengths_keep_the_tables_order() -> None:
    order, _ = cut_chunks(np.array([5, 9, 5, 9, 5], dtype=np.int64))
    assert order.tolist() == [1, 3, 0, 2, 4]


def test_rows_that_max_length_cuts_cost_what_it_lets_through() -> None:
    lengths = np.array([900_000, 800_000, 700_000, 4_000, 4_000, 200, 200], dtype=np.int64)
    known = replace(
        facts(lengths), memory=CheckpointMemory(asked(0), lengths, 2, None, None, max_length=1000)
    )
    (member,) = make_plan(config({}), {"m0": known}, []).models
    plain_order, plain_chunks = cut_chunks(lengths)
    assert member.order.tolist() == plain_order.tolist()
    cuts = [(chunk.index, chunk.start, chunk.stop) for chunk in member.chunks]
    assert cuts == [(chunk.index, chunk.start, chunk.stop) for chunk in plain_chunks], (
        "the same batches as ever"
    )
    first, second, _ = member.chunks
    assert first.cost == second.cost == pytest.approx(0.2, abs=0.01), "of five rows of 1,000 tokens"
    assert member.work == pytest.approx(5 * 4_032 + 2 * 232)
    assert sum(chunk.cost for chunk in member.chunks) == pytest.approx(1)
    (whole,) = make_plan(config({}), {"m0": replace(known, lengths=lengths[3:])}, []).models
    assert whole.chunks == cut_chunks(lengths[3:])[1], "where no row is cut nothing changes"
