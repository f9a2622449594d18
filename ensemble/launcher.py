"""A member of the plan and a lease -> a running worker that has its orders."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from ensemble.devices import Device, worker_environment
from ensemble.launch.allocator import allocator_environment
from ensemble.launch.local import LocalWorker
from ensemble.planning.plan import MemberPlan
from ensemble.prepare import Prepared
from ensemble.protocol import Start
from ensemble.report.terminal import shown_path
from ensemble.rundir import RunDir
from ensemble.slots import Worker
from ensemble.spec import worker_spec
from ensemble.store import MemberWork


class Launcher:
    """Starts the workers of a run.

    Args:
        works: by member name.
    """

    def __init__(self, prepared: Prepared, rundir: RunDir, works: Mapping[str, MemberWork]) -> None:
        self._prepared = prepared
        self._rundir = rundir
        self._works = works
        self._offloaded: list[Path] = []

    def launch(
        self, member: MemberPlan, replica: int, lease: Sequence[Device], read_ahead_bytes: int = 0
    ) -> tuple[Worker, str]:
        """Start a worker that sees these devices; returns it and its log's path, as it is shown.

        Args:
            read_ahead_bytes: of its weights, what it reads from the disk before it may load them.

        Raises:
            OSError: no process could be started.
        """
        log_path = self._rundir.log(member.name, replica)
        model = member.model
        folder: Path | None = None
        if model.offload_folder is not None:
            # transformers names its files there after parameters, which are alike in every model.
            folder = model.offload_folder / f"{member.name}-{replica}-{os.getpid()}"
            folder.mkdir(parents=True)
            self._offloaded.append(folder)
        environment = worker_environment(lease)
        if lease:
            environment |= allocator_environment(model.expandable_segments, model.max_split_size_mb)
        work = self._works[member.name]
        files = {path: seen.state for path, seen in work.files.items()}
        spec = worker_spec(self._prepared, self._rundir, member, work.parts_dir, folder, files)
        start = Start.of(spec, read_ahead_bytes)
        worker = LocalWorker(environment, log_path)  # last: from here on the caller must know of it
        worker.send(start)
        return worker, shown_path(log_path)

    def remove_offloaded(self) -> None:
        """Remove the weights that workers left on the disk."""
        for folder in self._offloaded:
            shutil.rmtree(folder, ignore_errors=True)
