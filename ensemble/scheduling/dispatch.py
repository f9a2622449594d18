"""Decide whose worker starts next and on which devices, and which chunk a worker gets next."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ensemble.common.gpus import Device
from ensemble.planning.chunks import Chunk
from ensemble.scheduling.deadline import FIRST, Deadline, Rank
from ensemble.scheduling.device_pool import DevicePool
from ensemble.scheduling.standby import Standbys
from ensemble.scheduling.state import ModelState
from ensemble.scheduling.worker import RunningWorker


@dataclass(frozen=True)
class Dispatcher:
    """Give devices to models, and chunks in their order to the next free worker.

    Attributes:
        models: in the order in which they start.
        workers: those that run now: the scheduler's own list.
    """

    models: Sequence[ModelState]
    workers: Sequence[RunningWorker]
    pool: DevicePool
    standbys: Standbys
    deadline: Deadline | None

    def next_lease(self) -> tuple[ModelState, tuple[Device, ...]] | None:
        """Lease devices (none: the CPU) to the model whose worker starts next; None if no worker can start now.

        Devices that a model without a worker may use are reserved for it.  GPUs that no model waits for go to
        models that need much more time.
        """
        for _, state, reserved in self._candidates():
            if not state.plan.gpus:
                if "cpu" not in reserved and self._has_cpu_room(state):
                    return state, ()
                continue
            devices = self.pool.acquire(
                state.plan.gpus,
                {*state.plan.placement.devices} - reserved,
                self.standbys.devices_for(state),
                state.plan.placement.places,
            )
            if devices:
                return state, devices
        return None

    def is_waiting_for_devices(self) -> bool:
        """Return whether a model would start if a device became free, or a lost node came back."""
        return (self.pool.is_releasing() or self.pool.expects_nodes) and any(self._candidates())

    def next_chunk(self, worker: RunningWorker) -> Chunk | None:
        """Take the next chunk for this worker; None if the worker should stop."""
        state = worker.state
        if not state.chunks.pending or state.failure is not None or worker.fault is not None:
            return None
        if self.deadline is None:
            return state.take(state.chunks.pending[0])
        rank = self.deadline.ranks(self.models).get(state.plan.name)
        fitting = self.deadline.first_fitting(state, self.models)
        # A worker that no other model needs goes on, so that its device is not idle.
        if rank is None or fitting is None or (rank != FIRST and self._is_needed_by_others(worker, rank)):
            return None
        return state.take(*fitting)

    def may_wait(self, worker: RunningWorker) -> bool:
        """Return whether a worker without a chunk keeps its model loaded, for rows that are about to be selected.

        Other workers of the model compute the last chunks before that, and no other model needs its devices.
        """
        state = worker.state
        if state.failure is not None or worker.fault is not None or state.chunks.pending:
            return False
        is_soon = bool(state.plan.undecided) and bool(state.chunks.in_hand)
        return is_soon and not self._is_needed_by_others(worker)

    def _candidates(self) -> Iterator[tuple[Rank, ModelState, set[str]]]:
        """Yield models of which a worker may start, with the devices reserved for models before them."""
        if self.deadline is None:
            ranks = {state.plan.name: FIRST for state in self.models if state.chunks.pending}
        else:
            ranks = self.deadline.ranks(self.models)
        reserved: set[str] = set()
        for rank in sorted(set(ranks.values())):
            models = [
                state
                for state in self.models
                if ranks.get(state.plan.name) == rank
                and (self.deadline is None or self.deadline.may_start(state, self.models))
            ]
            for state in models:
                if state.missing_first_workers > 0:
                    yield rank, state, reserved
                if not state.running:
                    reserved |= {*state.plan.placement.devices} or {"cpu"}
            for state in sorted(models, key=lambda state: -state.seconds_left):
                startup = state.speed_meter.startup_seconds  # 0 while it is not known
                # One more worker, which first has to start, would still take a good part of what is left.
                is_worth_it = 0 < 2 * startup < state.seconds_left
                if 0 < state.running < state.max_replicas and is_worth_it:
                    yield rank, state, reserved

    def _has_cpu_room(self, state: ModelState) -> bool:
        shares = [worker.state.plan.cpu_share for worker in self.workers if not worker.devices]
        if self.pool.max_cpu_workers is not None and len(shares) >= self.pool.max_cpu_workers:
            return False
        # Shares are rounded, such as thirds.
        return sum(shares) + state.plan.cpu_share <= self.pool.hosts + 1e-6

    def _is_needed_by_others(self, worker: RunningWorker, rank: Rank | None = None) -> bool:
        """Return whether another model, with a smaller rank, could use this worker's devices."""
        seconds_left = math.inf if self.deadline is None else self.deadline.seconds_left
        uuids = {device.uuid for device in worker.devices}
        for other_rank, state, reserved in self._candidates():
            if rank is not None and other_rank >= rank:
                return False
            # A model whose start would use up most of the time stops no worker.
            takes_most = 2 * state.startup_seconds >= seconds_left
            if state is worker.state or takes_most:
                continue
            if uuids & ({*state.plan.placement.devices} - reserved) or not (uuids or state.plan.gpus):
                return True
        return False
