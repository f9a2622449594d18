"""Start standby workers: processes of the next models, while other models still compute.

A standby worker has its libraries and its tokenizer, but no model, no lease and no CUDA context: it takes only
memory of the host.  It is pinned to the devices that will probably be free next.  Nothing depends on it: if it
fails, or if other devices are free first, a fresh worker takes its place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

from ensemble.common.gpus import Device
from ensemble.common.protocol import ProtocolError
from ensemble.common.text import shown_path
from ensemble.planning.plan import STANDBY_HOST_BYTES
from ensemble.scheduling.launchers.base import Launcher
from ensemble.scheduling.records import WorkerRecord
from ensemble.scheduling.state import ModelState, RunHooks
from ensemble.scheduling.worker import RunningWorker

log = logging.getLogger(__name__)


class Standbys:
    """Keep the standby workers of a run.

    Args:
        elapsed: returns the seconds since workers could begin.
    """

    def __init__(self, launcher: Launcher, run: RunHooks, elapsed: Callable[[], float]) -> None:
        self._launcher = launcher
        self._run = run
        self._elapsed = elapsed
        self._workers: list[RunningWorker] = []
        self._failed: set[str] = set()  # models

    def update(self, models: Sequence[ModelState], running: Sequence[RunningWorker]) -> None:
        """Receive the events of standby workers; end those that are not needed, and start others."""
        for worker in list(self._workers):
            if not self._is_well(worker):
                self._failed.add(worker.state.plan.name)
                self._close(worker)
            elif not worker.state.chunks.pending or self._missing(worker.state) < 0:
                self._close(worker)
        # A worker that loads needs the disk and the processor; and until all have computed something it is not
        # known whose devices are free first.
        if not all(
            worker.is_stopping or (worker.is_ready and worker.state.computed_cost) for worker in running
        ):
            return
        by_end = sorted(running, key=lambda worker: worker.state.seconds_left)
        for state in models:
            devices = self._next_devices(state, by_end)
            while devices:
                # Processes that are starting do not have all of their memory yet.
                starting = sum(worker.record.start_seconds is None for worker in self._workers)
                available = self._launcher.available_memory(devices)
                if available is not None and available < (2 + starting) * STANDBY_HOST_BYTES:
                    return
                try:
                    self._workers.append(self._start(state, devices))
                except OSError as error:
                    self._failed.add(state.plan.name)
                    log.info("no worker of %s can stand by: %s", state.plan.name, error)
                devices = self._next_devices(state, by_end)

    def devices_for(self, state: ModelState) -> Iterator[tuple[Device, ...]]:
        """Return the devices of each of a model's standby workers, in the order of their starts."""
        return (worker.devices for worker in self._workers if worker.state is state)

    def worker_for(self, state: ModelState, devices: tuple[Device, ...]) -> RunningWorker:
        """Return a worker of this model that sees these devices: a standby worker, or else a fresh one.

        Raises:
            OSError: no worker could be started.
        """
        for worker in self._workers:
            if worker.state is state and devices and worker.devices == devices and self._is_well(worker):
                self._workers.remove(worker)
                return worker
        return self._start(state, devices)

    def end_all(self) -> None:
        """End all standby workers."""
        for worker in self._workers:
            worker.handle.terminate()
        for worker in list(self._workers):
            self._close(worker)

    def _next_devices(self, state: ModelState, by_end: Sequence[RunningWorker]) -> tuple[Device, ...]:
        """Return the devices that will probably be free first for a model's next standby worker; () for none."""
        # Not for the CPU: all of its cores compute, so that a standby would only slow them down.
        count = state.plan.gpus
        is_failed = state.plan.name in self._failed
        if not count or not state.chunks.pending or is_failed or self._missing(state) <= 0:
            return ()
        # In the order of a lease: max_memory and device_map number a model's GPUs.
        numbers = {uuid: number for number, uuid in enumerate(state.plan.placement.devices)}
        taken = {device.uuid for worker in self._workers for device in worker.devices}
        candidates: dict[str, Device] = {}
        for worker in by_end:
            for device in worker.devices:
                if worker.state is not state and device.uuid in numbers and device.uuid not in taken:
                    candidates[device.uuid] = device
        for node in dict.fromkeys(device.node for device in candidates.values()):
            devices = [device for device in candidates.values() if device.node == node][:count]
            if len(devices) == count:
                return tuple(sorted(devices, key=lambda device: numbers[device.uuid]))
        return ()

    def _missing(self, state: ModelState) -> int:
        """Return how many of a model's first workers neither run nor stand by."""
        return state.missing_first_workers - sum(worker.state is state for worker in self._workers)

    def _start(self, state: ModelState, devices: tuple[Device, ...]) -> RunningWorker:
        replica = next(state.replica_numbers)
        start = self._run.worker_start(state.plan, replica, devices)
        handle = self._launcher.start(start)
        cpu = f"cpu on {handle.on_node}" if handle.on_node else "cpu"
        now = round(self._elapsed(), 3)
        record = WorkerRecord(
            model=state.plan.name,
            replica=replica,
            devices=tuple(device.uuid for device in devices) or (cpu,),
            process=handle.process,
            log_path=shown_path(start.log),
            started_after_seconds=now,
            leased_after_seconds=now,
            node=handle.on_node,
        )
        worker = RunningWorker(state, handle, record, devices)
        log.info("%s started as process %s for %s", worker.name, handle.process, record.devices)
        return worker

    def _is_well(self, worker: RunningWorker) -> bool:
        """Receive the events of a standby worker; return whether it can still be used."""
        try:
            for event in worker.handle.receive():
                worker.note(event, 0.0)
        except ProtocolError:
            return False
        return worker.handle.is_open and worker.failed is None and not worker.handle.has_exited()

    def _close(self, worker: RunningWorker) -> None:
        self._workers.remove(worker)
        worker.handle.terminate()
        code = worker.handle.close().code
        log.info("%s no longer stands by (exit code %d)", worker.name, code)
