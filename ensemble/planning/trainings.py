"""Plan the trainings of a member. PURE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ensemble.common.gpus import Device
from ensemble.config import MemberConfig, RunConfig
from ensemble.members.base import ResourceRequest
from ensemble.planning.chunks import Chunk
from ensemble.planning.forecast import Speed
from ensemble.planning.placement import MemberFacts, place, rooms
from ensemble.planning.plan import MemberPlan


def plan_trainings(
    config: RunConfig, model: MemberConfig, names: Sequence[str], gpus: Sequence[Device]
) -> MemberPlan:
    """Return the plan of a member whose chunks are its trainings; the placement has the problems.

    As many run side by side as the GPUs or ``cpu_workers`` allow; a training takes all memory of its GPUs.
    """
    assert model.training is not None
    index, count = config.models.index(model), len(names)
    request = ResourceRequest(num_gpus=model.training.num_gpus, gpu_memory="all")
    placement = place(
        config, index, MemberFacts(model.name, request, np.ones(count, dtype=np.int64)), gpus, None
    )
    problems = tuple(text.replace("num_gpus", "train.num_gpus") for text in placement.problems)
    replicas = 1 if config.cpu_workers == "auto" else config.cpu_workers
    if placement.gpus:
        usable = [gpu for gpu in gpus if gpu.uuid in placement.devices]
        replicas = rooms(usable, placement.gpus, config.max_workers_per_gpu // placement.places)
    # Whichever trainings are left: other threads would give one that goes on other last digits.
    cpu_share = 0.0 if placement.gpus else 1 / replicas
    replicas = max(1, min(replicas, count))
    return MemberPlan(
        index=index,
        model=model.model_copy(update={"when": None, "views": None}),
        request=request,
        placement=replace(placement, problems=problems),
        replicas=replicas,
        first_replicas=replicas,
        cpu_share=cpu_share,
        speed=Speed(0.0, 0.0, is_measured=False),
        work=float(count),
        chunks=tuple(Chunk(row, row, row + 1, 1 / count) for row in range(count)),
        order=np.arange(count),
        table_rows=count,
        row_names=tuple(names),
    )
