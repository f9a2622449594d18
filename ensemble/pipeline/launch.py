"""A member of the plan and its devices -> what a launcher starts a worker with."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from ensemble.common.files import FileState
from ensemble.common.gpus import Device
from ensemble.common.protocol import CommonSpec, Start, WorkerSpec
from ensemble.common.shards import order_path
from ensemble.members.registry import member_kind
from ensemble.pipeline.resume import MemberWork
from ensemble.pipeline.run_dir import RunDir
from ensemble.pipeline.validate import Prepared
from ensemble.planning.plan import MemberPlan
from ensemble.scheduling.launchers.base import WorkerStart


class WorkerStarts:
    """What the workers of a run are started with.

    Args:
        works: by member name.
    """

    def __init__(self, prepared: Prepared, rundir: RunDir, works: Mapping[str, MemberWork]) -> None:
        self._prepared = prepared
        self._rundir = rundir
        self._works = works
        self._offload_folders: list[Path] = []

    def __call__(
        self, member: MemberPlan, replica: int, devices: Sequence[Device], preload_bytes: int
    ) -> WorkerStart:
        """See ``RunHooks.worker_start``."""
        work = self._works[member.name]
        folder: Path | None = None
        if member.request.offload_folder is not None:
            # transformers names its files there after parameters, which are alike in every model.
            folder = member.request.offload_folder / f"{member.name}-{replica}-{os.getpid()}"
            folder.mkdir(parents=True)
            self._offload_folders.append(folder)
        files = {path: seen.state for path, seen in work.files.items()}
        spec = worker_spec(self._prepared, self._rundir, member, work.parts_dir, folder, files)
        return WorkerStart(
            command=Start(spec, preload_bytes),
            devices=tuple(devices),
            environment=member_kind(member.model).environment() if devices else {},
            log=self._rundir.log(member.name, replica),
        )

    def remove_offloaded(self) -> None:
        """Remove the weights that workers left on the disk."""
        for folder in self._offload_folders:
            shutil.rmtree(folder, ignore_errors=True)


def worker_spec(
    prepared: Prepared,
    rundir: RunDir,
    member: MemberPlan,
    parts_dir: Path,
    offload_folder: Path | None,
    files: Mapping[str, FileState],
) -> WorkerSpec:
    """What a worker is told of its member; ``offload_folder`` is for it alone, ``files`` must stay as they are."""
    kind, inspected = member_kind(member.model), prepared.inspected[member.name]
    common = CommonSpec(
        labels=prepared.config.labels,
        activation=inspected.activation,
        gpus=member.gpus,
        cpu_threads=_cpu_threads(member),
        memory_limit_bytes=_memory_limit(prepared, member),
        seed=prepared.config.seed,
        table_path=str(rundir.table.resolve()),
        order_path=str(order_path(parts_dir).resolve()),
        parts_dir=str(parts_dir.resolve()),
        files=dict(files),
    )
    settings = kind.worker_settings(inspected, member.placement, offload_folder)
    return WorkerSpec(common, kind.child, dict(settings))


def _cpu_threads(member: MemberPlan) -> int | None:
    if member.replicas == 1:
        return None  # torch's own choice
    return max(1, len(os.sched_getaffinity(0)) // member.replicas)


def _memory_limit(prepared: Prepared, member: MemberPlan) -> int | None:
    """A worker's share of a GPU that it does not have to itself, without what CUDA takes of it."""
    sharing, needed = prepared.config.max_workers_per_gpu, member.placement.footprint
    if not member.gpus or sharing == 1:
        return None
    free = min(
        gpu.total_bytes - gpu.used_bytes for gpu in prepared.plan.gpus if gpu.uuid in member.placement.devices
    )
    return free // sharing - (needed.context_bytes if needed is not None else 0)
