"""Start workers on leased devices, dispatch chunks, and handle workers' events.

A single loop in the main thread does all of this, so nothing needs a lock.  A worker's failure is data and never
ends the loop.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace

from ensemble.common.errors import RESUMES, Interrupted, MergeError
from ensemble.common.gpus import Device
from ensemble.common.protocol import (
    ChunkDone,
    ChunkFailed,
    Event,
    Finish,
    Load,
    Progress,
    ProtocolError,
    Ready,
    Stop,
)
from ensemble.common.text import plural
from ensemble.planning.placement import rooms
from ensemble.scheduling.deadline import Deadline
from ensemble.scheduling.device_pool import DevicePool
from ensemble.scheduling.dispatch import Dispatcher
from ensemble.scheduling.launchers.base import Changes, Launcher
from ensemble.scheduling.records import Fault, NodeChange
from ensemble.scheduling.retry import RetryRules, Rules
from ensemble.scheduling.standby import Standbys
from ensemble.scheduling.state import ModelState, RunHooks
from ensemble.scheduling.worker import RunningWorker

TICK_SECONDS = 0.25
# The run's clock counts at most this much of each turn of the loop.  So no worker counts as hung after this process
# was suspended.  A turn can take longer than a tick, for example if run.json is on a slow disk.
MAX_TURN_SECONDS = 4 * TICK_SECONDS
# Time for a worker to exit after a Stop, or after it closed its channel: freeing a GPU takes a while.
EXIT_SECONDS = 30.0
# Time for workers to finish their batches when a signal stops the run; what stops containers gives 10 s.
FINISH_SECONDS = 8.0
# Time for a terminated worker to drop its work and exit.
TERMINATE_SECONDS = 5.0
# Time for a hanging worker to write its stacks to its log.
ABORT_SECONDS = 2.0
# Events about the chunk that a worker computes.
_CHUNK_EVENTS = (Progress, ChunkDone, ChunkFailed)
log = logging.getLogger(__name__)


class Scheduler:
    """Run a plan.

    Args:
        models: in their order, with the chunks that are left to do.
        gpus: those that workers may have.
        clock: the run's clock, a ``Watch`` with ``MAX_TURN_SECONDS``; ``models`` use it, too.
    """

    def __init__(
        self,
        models: list[ModelState],
        gpus: Sequence[Device],
        launcher: Launcher,
        run: RunHooks,
        rules: Rules,
        clock: Callable[[], float],
        deadline: Deadline | None = None,
    ) -> None:
        self.models = models
        self.node_changes: list[NodeChange] = []
        self.pool = DevicePool(gpus, rules.workers_per_gpu, rules.release_timeout, launcher, run.say, clock)
        self._launcher = launcher
        self._run = run
        self._rules = rules
        self._clock = clock
        self._deadline = deadline
        self._began = clock()
        self._workers: list[RunningWorker] = []
        self._retry = RetryRules(rules, run, self._elapsed, models)
        self._standbys = Standbys(launcher, run, self._elapsed)
        self._may_stand_by = rules.standby
        self._is_stopped = False
        self._dispatcher = Dispatcher(models, self._workers, self.pool, self._standbys, deadline)
        # Calls ``on_finished``, for a single model at a time.
        self._finisher = ThreadPoolExecutor(1, thread_name_prefix="finishing")
        self._finishing: dict[Future[None], ModelState] = {}
        self._ended: set[str] = set()

    def run(self) -> None:
        """Run every model until it is done or has failed, or until the deadline.

        No worker outlives this call, however it ends.

        Raises:
            Interrupted: a signal came; rows whose batches were done by then are kept.
        """
        try:
            self._settle_all()
            self._start_workers()
            while self._workers or self._finishing or self._dispatcher.is_waiting_for_devices():
                if self._deadline is not None and self._deadline.is_over:
                    break
                if self._finishing and not self._workers:
                    wait(self._finishing, TICK_SECONDS, return_when=FIRST_COMPLETED)
                else:
                    workers = {worker.handle: worker for worker in self._workers}
                    for handle in self._launcher.wait(list(workers), TICK_SECONDS):
                        self._receive(workers[handle])
                for worker in list(self._workers):
                    self._check(worker)
                self._check_finishing()
                self._settle_all()
                for worker in self._workers:
                    if worker.is_idle:
                        self._dispatch(worker)
                changes = self._launcher.changes()
                if changes is not None:
                    self._apply_changes(changes)
                self.pool.poll()
                self._start_workers()
                if self._may_stand_by:
                    self._standbys.update(self.models, self._workers)
                self._run.on_change(self.models)
        except Interrupted as stopped:
            lost_rows = self._finish_batches()
            if not lost_rows:
                raise
            kept = f"what is done is kept, but for {plural(lost_rows, 'row')} of unfinished chunks; {RESUMES}"
            raise Interrupted(stopped.exit_code - 128, kept) from None
        finally:
            self._end_all()
        self._check_finishing()

    def _apply_changes(self, changes: Changes) -> None:
        """Give models the devices of nodes that have joined, and take away the devices of lost nodes.

        A model gets only devices of the kinds in its plan: on other devices the last digits may differ.
        """
        for text in changes.news:
            self._run.say(text)
        after = round(self._elapsed(), 3)
        self.node_changes += [replace(change, after_seconds=after) for change in changes.nodes]
        if not changes.nodes and not self.pool.expects_nodes:
            return
        chosen = self._rules.devices
        joined = [gpu for gpu in changes.joined if chosen is None or gpu.uuid in chosen]
        self.pool.change(joined, changes.lost)
        self.pool.hosts, self.pool.expects_nodes = changes.hosts, changes.expects_nodes
        for state in self.models:
            plan = state.plan
            if not plan.needs_worker:
                continue
            planned = {*plan.placement.devices}
            kinds = {(gpu.name, gpu.total_bytes) for gpu in self.pool.seen if gpu.uuid in planned}
            usable = [gpu for gpu in self.pool.gpus if (gpu.name, gpu.total_bytes) in kinds]
            max_workers = round(changes.hosts / (plan.cpu_share or 1))
            if plan.gpus:
                max_workers = rooms(usable, plan.gpus, self._rules.workers_per_gpu // plan.placement.places)
            requested = plan.request.replicas
            if max_workers:
                replicas = max_workers if requested == "auto" else requested
                state.move(tuple(gpu.uuid for gpu in usable), replicas)
            elif not changes.expects_nodes and state.failure is None and not state.finished:
                requirement = "for this member"
                if kinds and changes.hosts:
                    names = " or ".join(sorted({name for name, _ in kinds}))
                    requirement = f"with a GPU of the planned kind ({names})"
                self._retry.fail(
                    state,
                    f"the cluster has no node left {requirement}; run the same command again to continue",
                )
                self._settle(state)

    def _settle_all(self) -> None:
        """Settle all models, and report each model to the run once when it has failed or is complete."""
        failures = {state.plan.member: state.failure for state in self.models if state.failure is not None}
        for state in self.models:
            if state.failure is None and state.plan.member in failures:
                state.fail(failures[state.plan.member])
            self._settle(state)
        for state in self.models:
            is_over = state.finished_at is not None and state not in self._finishing.values()
            if (is_over or state.failure is not None) and state.plan.name not in self._ended:
                self._ended.add(state.plan.name)
                self._run.on_ended(state)
                self._settle_all()  # a model that waited for this one may have rows now, or none
                return

    def _elapsed(self) -> float:
        return self._clock() - self._began

    def _start_workers(self) -> None:
        while True:
            lease = self._dispatcher.next_lease()
            if lease is None:
                return
            state, devices = lease
            try:
                worker = self._standbys.worker_for(state, devices)
            except OSError as error:
                self.pool.release(devices, state.plan.placement.places)
                self._retry.fail(state, f"could not start a worker: {error}")
                self._settle(state)
                continue
            worker.leased_at = worker.responded_at = worker.progressed_at = self._clock()
            worker.record.leased_after_seconds = round(self._elapsed(), 3)
            state.worker_began(worker.record)
            self._workers.append(worker)
            log.info("%s has %s as process %s", worker.name, worker.record.devices, worker.record.process)
            worker.handle.send(Load())

    def _receive(self, worker: RunningWorker) -> None:
        if not worker.handle.is_open:
            return
        try:
            for event in worker.handle.receive():
                rooms = worker.state.batches.rooms
                worker.note(event, self._clock())
                if worker.state.batches.rooms != rooms:
                    self._run.on_rooms(worker.state)
                self._handle(worker, event)
        except ProtocolError as error:
            if worker.fault is None:
                worker.fault = Fault("lasting", f"ProtocolError: {error}")
            self._terminate(worker)
        if not worker.handle.is_open:
            worker.exit_by = self._clock() + EXIT_SECONDS

    def _handle(self, worker: RunningWorker, event: Event) -> None:
        state, chunk = worker.state, worker.chunk
        if isinstance(event, _CHUNK_EVENTS) and (chunk is None or chunk.index != event.chunk):
            raise ProtocolError(f"an event about chunk {event.chunk}, which this worker does not compute")
        if isinstance(event, Ready):
            log.info("%s ready: %s", worker.name, event)
            self._retry.worker_ready(state)
            self._dispatch(worker)
        elif isinstance(event, Progress):
            state.advance(event)
        elif isinstance(event, ChunkDone):
            assert chunk is not None
            worker.record.counters += event.counters
            state.complete(chunk, event)
            self._run.on_chunk_done(state, chunk, event, worker.record.devices)
            worker.drop(chunk)
            # A short line: masking secrets in long lines takes time, and run.json sums up the events.
            counts = f"{event.counters.rows} rows in {event.counters.predict_seconds:.3f} s"
            log.info("%s chunk %d done: %s, %s", worker.name, event.chunk, counts, event.shard)
            if event.bad_rows:
                reasons = dict(zip(event.bad_rows, event.bad_row_reasons, strict=True))
                self._retry.bad_rows(worker, chunk.job, reasons)
            self._settle(state)
            self._dispatch(worker)
        elif isinstance(event, ChunkFailed) and not self._is_stopped:
            assert chunk is not None
            fault = Fault("error", f"{event.error_type}: {event.message}", event.traceback)
            self._retry.chunk_failed(worker, chunk, fault)
            self._settle(state)
            self._dispatch(worker)

    def _finish_batches(self) -> int:
        """Let workers finish their batches and write their rows, and return how many computed rows are lost.

        These are of workers that take longer than ``FINISH_SECONDS``. A training keeps its own saves.
        """
        self._is_stopped = True
        workers = [worker for worker in self._workers if worker.chunk and worker.state.plan.has_rows]
        for worker in workers:
            worker.handle.send(Finish())
            log.info("%s is asked to finish its batch", worker.name)
        give_up_at = time.monotonic() + FINISH_SECONDS
        while time.monotonic() < give_up_at:
            waiting = {worker.handle: worker for worker in workers if worker.chunk and worker.handle.is_open}
            if not waiting:
                break
            for handle in self._launcher.wait(list(waiting), TICK_SECONDS):
                self._receive(waiting[handle])
        progress = [
            worker.state.chunks.progress.get(worker.chunk.index) for worker in workers if worker.chunk
        ]
        return sum(chunk.rows for chunk in progress if chunk is not None)

    def _dispatch(self, worker: RunningWorker) -> None:
        """Send a worker its next chunk, or a Stop if there is none and none may come soon."""
        if self._is_stopped:
            return
        chunk = self._dispatcher.next_chunk(worker)
        now = self._clock()
        if chunk is None and self._dispatcher.may_wait(worker):
            return
        if chunk is None:
            worker.is_stopping = True
            worker.record.computed_to = round(self._elapsed(), 3)
            worker.exit_by = worker.exit_by or now + EXIT_SECONDS
            worker.handle.send(Stop())
            return
        worker.chunk = chunk
        worker.progressed_at = now
        if self._deadline is not None:
            worker.seconds_left = self._deadline.seconds_left
        worker.handle.send(worker.state.command_of(chunk, worker.devices))
        if worker.record.computed_from is None:
            worker.record.computed_from = round(self._elapsed(), 3)

    def _check(self, worker: RunningWorker) -> None:
        """End a worker that has exited or must exit by now; abort a worker that hangs."""
        now = self._clock()
        if worker.handle.has_exited() or now > (worker.exit_by or math.inf):
            self._receive(worker)
            self._end(worker)
        elif worker.exit_by is None and worker.hang_text(now, self._rules.hang_timeout):
            # The worker may have sent events while this process was busy, for example with a large table.
            self._receive(worker)
            text = worker.hang_text(self._clock(), self._rules.hang_timeout)
            if text and worker.exit_by is None:
                worker.fault = Fault("hang", text)
                worker.handle.abort()
                worker.exit_by = self._clock() + ABORT_SECONDS

    def _end(self, worker: RunningWorker) -> None:
        """Close a worker, release its devices, and apply the retry rules if the worker failed."""
        self._workers.remove(worker)
        state = worker.state
        ended = worker.handle.close()
        now = round(self._elapsed(), 3)
        state.worker_ended(worker.record, ended.code, round(now - worker.record.leased_after_seconds, 3))
        if worker.record.computed_to is None:
            worker.record.computed_to = now
        is_suspect = not (worker.is_ready or ended.is_lost) and state.failure is None
        self.pool.release(worker.devices, state.plan.placement.places, is_suspect)
        log.info("%s ended with exit code %d", worker.name, ended.code)
        if state.failure is not None:  # the scheduler has ended the worker
            if worker.chunk is not None:
                worker.drop(worker.chunk)
            return
        fault = worker.fault_of(ended)
        if fault is None:
            return
        others = [other for other in self._workers if not other.handle.has_exited()]
        if fault.kind == "memory":
            running = sum(other.state is state for other in others)
            # Its agent, if it had one, has ended with all of its workers: then half of them go on.
            state.limit_replicas(max(running, (state.running + 1) // 2), is_lasting=True)
            if not worker.devices:
                self.pool.max_cpu_workers = max(1, sum(not other.devices for other in others))
            self._may_stand_by = False  # without standby workers the memory may be enough
            self._standbys.end_all()
        others_compute = any(other.state is state and other.is_ready for other in others)
        self._retry.worker_failed(worker, fault, others_compute)
        self._settle(state)

    def _settle(self, state: ModelState) -> None:
        """End the workers of a model that has failed, and finish a model whose chunks are all done."""
        if state.failure is not None:
            for worker in self._workers:
                if worker.state is state and worker.exit_by is None:
                    self._terminate(worker)
            return
        if self._is_stopped:  # a chunk may be done in part: the next run finishes members
            return
        if state.waits_for_selection:
            self._run.on_jobs_done(state)
        if state.finished and state.finished_at is None:
            state.finish()
            models = [other for other in self.models if other.plan.member == state.plan.member]
            if all(other.finished for other in models):
                for other in models:
                    self._retry.member_finished(other)
            if state.failure is None and not self._retry.refuses(state):
                self._finishing[self._finisher.submit(self._run.on_finished, state)] = state

    def _terminate(self, worker: RunningWorker) -> None:
        worker.handle.terminate()
        worker.exit_by = self._clock() + TERMINATE_SECONDS

    def _check_finishing(self) -> None:
        for future in [future for future in self._finishing if future.done()]:
            state = self._finishing.pop(future)
            try:
                if not future.cancelled():  # cancelled: the run is over, and the shards stay for the next run
                    future.result()
            except MergeError as error:  # damaged shards: the other members continue
                self._retry.fail(state, str(error))

    def _end_all(self) -> None:
        for worker in self._workers:
            worker.handle.terminate()
            if worker.chunk is not None and self._deadline is not None and self._deadline.is_over:
                worker.state.cut_short(worker.chunk, worker.seconds_left - self._deadline.seconds_left)
        give_up_at = self._clock() + TERMINATE_SECONDS
        while self._clock() < give_up_at and not all(worker.handle.has_exited() for worker in self._workers):
            time.sleep(0.01)
        for worker in self._workers:
            worker.state.worker_ended(worker.record, worker.handle.close().code, None)
        self._standbys.end_all()
        # Calls of ``on_finished`` that have begun are completed; the next run makes the others.
        self._finisher.shutdown(wait=True, cancel_futures=True)
