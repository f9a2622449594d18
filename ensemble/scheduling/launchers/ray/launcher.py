"""Workers on the nodes of a Ray cluster: one agent for each node starts them there.

Ray finds the nodes, starts the agents, moves bytes and notices deaths.  All else is as on one machine: the table
and the models' files are taken to nodes that lack them, shards come back with the events that tell of them.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import os
import queue
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ensemble.common.clock import Watch
from ensemble.common.device_trials import Trial
from ensemble.common.errors import CheckpointError, ConfigError, DeviceError, WriteError
from ensemble.common.files import HubFile
from ensemble.common.gpus import Device, Inventory, Telemetry
from ensemble.common.protocol import ChunkDone, Failed
from ensemble.common.python_process import WAITING
from ensemble.common.shards import ShardSealer
from ensemble.common.text import listed
from ensemble.scheduling.launchers.base import (
    Changes,
    Handle,
    Launcher,
    MemberFiles,
    Node,
    WorkerStart,
)
from ensemble.scheduling.launchers.ray.agent import Agent, Batch, Holder
from ensemble.scheduling.launchers.ray.cluster import (
    address_problem,
    connect,
    has_raylet_ended,
    ray,
    silence,
)
from ensemble.scheduling.launchers.ray.copies import copies_of, files_of
from ensemble.scheduling.launchers.ray.nodes import ClusterNode, in_short, version_problems
from ensemble.scheduling.launchers.ray.supply import Supplied, Supply, import_folders, paths_of
from ensemble.scheduling.launchers.ray.worker import RayWorker

_POLL_SECONDS = 0.2
# An agent that has not started by then asks for what somebody else has got meanwhile, or its node is slow: it is
# started anew, with more time.
_START_SECONDS = (20.0, 40.0, 60.0)
# One whose packages Ray has to install first.
_INSTALL_SECONDS = (1_200.0,)
# What a run that has just ended had is free again after so long; where others have it, so long is lost.
_SETTLE_SECONDS = 3.0
_END_SECONDS = 5.0
# Nobody asks for what happens on a node for so many times hang_timeout, where the run's process still lives.
_FORGOTTEN_TIMES = 4
# A turn of the loop that takes longer was none: this process was stopped.
_MAX_TURN_SECONDS = 1.0
_CHECK_NODES_SECONDS = 2.0
# A head may be silent for so long at most, or have no process any more: Ray ends a driver, with lines of its own,
# that has had no answer for 7 minutes, and then no connection for another one (grpc_client_keepalive_time_ms and
# _timeout_ms, gcs_rpc_server_reconnect_timeout_s in its ray_config_def.h).
_HEAD_SECONDS = (240.0, 45.0)
_REFUSED = os.strerror(errno.ECONNREFUSED)
# So often a node is asked whether it is there, while it has not answered to something else.
_ASK_SECONDS = 1.0
# As the longest turn, of a loop that also reads files.
_MAX_ASK_SECONDS = 10.0
# Of the run's own environment, what workers on other nodes shall have, too.
_PASSED_ON = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
log = logging.getLogger(__name__)


class RayLauncher(Launcher):
    """Starts them.

    Settings: ``address`` of the cluster ("auto": the one of this machine, or RAY_ADDRESS), ``ship_models``, and
    ``runtime_env`` of Ray for the agents.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        known = {"address": str, "ship_models": bool, "runtime_env": dict}
        settings = {key: value for key, value in settings.items() if value is not None or key not in known}
        problems = [
            f"{key}: unknown key; this launcher has {listed([*known])}"
            for key in settings
            if key not in known
        ]
        problems += [
            f"{key}: must be {'true or false' if kind is bool else 'text' if kind is str else 'a mapping'}"
            for key, kind in known.items()
            if key in settings and not isinstance(settings[key], kind)
        ]
        # As Ray has it: the variable is asked where the config leaves it open.
        address = settings.get("address", "auto")
        if (in_variable := os.environ.get("RAY_ADDRESS")) and address == "auto":
            address = in_variable
        if isinstance(address, str) and (problem := address_problem(address)):
            problems.append(f"address: {'RAY_ADDRESS=' if address is in_variable else ''}{problem}")
        if problems:
            raise ConfigError(problems)
        self._address = address
        self._supply = Supply(self._answers, settings.get("ship_models", False))
        self._runtime_env = settings.get("runtime_env")
        self._nodes: dict[str, ClusterNode] = {}
        self._home: dict[str, ClusterNode] = {}  # of each device, by UUID
        self._numbers = 0
        self._is_own_connection = False
        self._watch = Watch(_MAX_TURN_SECONDS)
        self._sealer = ShardSealer()
        self._looked_at = 0.0
        self._joining: threading.Thread | None = None
        # By a thread, which nobody has been told of; all else of nodes is the main thread's alone.
        self._joined: queue.SimpleQueue[tuple[str, ClusterNode]] = queue.SimpleQueue()
        self._news: queue.SimpleQueue[str] = queue.SimpleQueue()  # for the user
        self._asked: set[str] = set()  # nodes that an agent was to be started on
        self._closed = threading.Event()
        self._head = ""  # its address
        self._why_headless = ""
        self._lost: list[ClusterNode] = []
        self._kept: list[Any] = []  # holders, which hold GPUs until they end

    # The cluster.

    def _open(self) -> None:
        """Connect, and have an agent on each node; it may have been closed, as between the runs of a rehearsal."""
        if not self._nodes:
            self.inventory()

    def inventory(self) -> Inventory:
        self._closed.set()
        self._closed, self._why_headless = threading.Event(), ""
        self._is_own_connection |= connect(self._address, f"ensemble-{os.getpid()}")
        self._head = ray.get_runtime_context().gcs_address
        threading.Thread(target=self._watch_head, args=(self._closed,), daemon=True).start()
        give_up = time.monotonic() + _SETTLE_SECONDS
        while time.monotonic() < give_up and any(
            one["Resources"].get("GPU", 0) > free.get(one["NodeID"], {}).get("GPU", 0)
            for free in (_free(),)
            for one in self._alive()
        ):
            time.sleep(_POLL_SECONDS)
        self._nodes.update(self._join(self._alive()))
        if not self._nodes:
            raise DeviceError(
                "launcher.ray: no agent has started on any node of the cluster; see `ray status`"
            )
        if problems := [*version_problems(self._nodes.values())]:
            raise DeviceError(problems)
        gpus, warnings = list[Device](), list[str]()
        for node in self._nodes.values():
            warnings += [f"{node.label}: {text}" for text in node.facts.inventory.warnings]
            gpus += self._take_in(node)
            gpus += [replace(gpu, node=node.name) for gpu in node.facts.held]
        drivers = dict.fromkeys(
            filter(None, (one.facts.inventory.driver_version for one in self._nodes.values()))
        )
        note = "" if gpus else "no node of the cluster has a GPU: running on its CPUs"
        hosts = tuple(node.cpu for node in self._nodes.values())
        return Inventory(tuple(gpus), note, ", ".join(drivers) or None, tuple(warnings), hosts=hosts)

    def nodes(
        self, sources: Mapping[str, Sequence[str]], hub_files: Mapping[str, Sequence[HubFile]]
    ) -> tuple[Node, ...]:
        if not self._nodes:
            return ()
        self._supply.hub_files = hub_files
        files = {
            name: [str(one) for source in own for one in files_of(source)] for name, own in sources.items()
        }
        copies = copies_of(path for paths in files.values() for path in paths)
        asked = Supplied()
        unfit = self._supply.unfit(copies, [one for one in self._nodes.values() if not one.why_lost], asked)
        for node, own in unfit.items():
            node.known = {(path, copy): own.get(path, "") for path, copy in copies.items()}
        lacking = self._supply.lacking([*unfit], asked)
        for node, why in asked.silent.items():
            self.lose(node, why)
        found = []
        for node in asked.well(unfit):
            problems, models, facts = [*version_problems([node])], dict[str, str](), node.facts
            for name, paths in files.items():
                own = {path: unfit[node][path] for path in paths if path in unfit[node]}
                kinds = ("another", "unreadable", "missing")
                there = "there" if paths else "on the hub"
                models[name] = next((one for one in kinds if one in own.values()), there)
                if models[name] == "missing" and self._supply.ships_models:
                    models[name] = "sent"
                elif own:
                    problems.append(self._supply.problem(name, node, own))
                if name in lacking.get(node, ()):
                    models[name] = "missing"
                    problems.append(lacking[node][name])
            gpus = tuple(replace(gpu, node=node.name) for gpu in (*facts.inventory.gpus, *facts.held))
            free = facts.total_bytes - facts.used_bytes, facts.free_disk_bytes
            numbers = (facts.cpus, facts.total_bytes, *free)
            found.append(Node(node.name, gpus, *numbers, facts.versions, models, tuple(problems)))
        if not found:
            lost = "; ".join(f"{node.label} {node.why_lost}" for node in self._nodes.values())
            raise DeviceError(f"launcher.ray: no node of the cluster is left: {lost}; see `ray status`")
        return tuple(sorted(found, key=lambda one: one.name))

    def trials(
        self, devices: Sequence[Device], imports: Sequence[str] = (), flash_attention: bool = False
    ) -> list[Trial]:
        asked, found = dict[ClusterNode, Any](), list[Trial]()
        for node in self._nodes.values():
            own = [replace(one, node="") for one in devices if one.node == node.name]
            if own and not node.why_lost:
                method = node.agent.trials.options(concurrency_group="commands")
                asked[node] = method.remote(own, imports, flash_attention)
        for node, trials, why in self._answers(asked):
            if why:
                self.lose(node, why)
                found += [Trial(one, 0.0, ending=why) for one in devices if one.node == node.name]
            else:
                found += [replace(one, device=replace(one.device, node=node.name)) for one in trials]
        return found

    def _answers(self, asked: Mapping[ClusterNode, Any]) -> Iterator[tuple[ClusterNode, Any, str]]:
        """What nodes answer, as they do, or why one does not.

        That may take as long as it does, where the node itself responds.
        """
        watch, left = Watch(_MAX_ASK_SECONDS), {reference: node for node, reference in asked.items()}
        heard = dict.fromkeys(asked, watch())
        pulses: dict[ClusterNode, Any] = {}
        while left:
            for reference in ray.wait([*left], num_returns=1, timeout=_ASK_SECONDS)[0]:
                node = left.pop(reference)
                try:
                    yield node, ray.get(reference), ""
                except RayError as error:
                    yield node, None, in_short(error)
            now = watch()
            for reference, node in [*left.items()]:
                if node in pulses and ray.wait([pulses[node]], timeout=0)[0]:
                    heard[node] = now
                    del pulses[node]
                if node not in pulses:
                    pulses[node] = node.agent.pulse.options(concurrency_group="events").remote()
                if now - heard[node] > self.hang_timeout:
                    del left[reference]
                    yield node, None, self._silence

    def _take_in(self, node: ClusterNode) -> list[Device]:
        """The devices of a node, which are known by their UUIDs from now on."""
        found = [replace(gpu, node=node.name) for gpu in node.facts.inventory.gpus]
        for gpu in found:
            if (other := self._home.get(gpu.uuid)) not in (None, node) and not other.why_lost:
                raise DeviceError(
                    f"launcher.ray: {gpu.uuid} is on {node.label} and on {other.label}; is a machine there twice?"
                )
            self._home[gpu.uuid] = node
        return found

    def _watch_head(self, closed: threading.Event) -> None:
        """Ask the head whether it is there: without one, most of what Ray is asked for never ends."""
        watch = Watch(_MAX_ASK_SECONDS)
        heard = watch()
        while not closed.wait(_CHECK_NODES_SECONDS):
            now = watch()
            if not (why := silence(self._head, _CHECK_NODES_SECONDS)):
                heard = now
            elif now - heard > (limit := min(self.hang_timeout, _HEAD_SECONDS[why == _REFUSED])):
                named = "hang_timeout" if limit == self.hang_timeout else why
                self._lose_cluster(f"its head at {self._head} has not responded for {limit:g} s ({named})")
                return

    def _lose_connection(self, error: Exception) -> None:
        """Lose the cluster: the raylet of this machine has ended, or a socket of Ray's is broken."""
        why = f"Ray on this machine has ended ({error})"
        if has_raylet_ended():
            why = "the raylet of this machine, its connection to the cluster, has ended"
        if not self._why_headless:
            self._lose_cluster(why)

    def _lose_cluster(self, why: str) -> None:
        self._why_headless = f"the cluster is lost: {why}"
        self._news.put(self._why_headless)

    def _alive(self) -> list[dict[str, Any]]:
        return [one for one in ray.nodes() if one["Alive"] and one["NodeID"] not in self._asked]

    def _join(self, found: Sequence[Mapping[str, Any]], is_late: bool = False) -> dict[str, ClusterNode]:
        """Start an agent on each of these nodes, with what nobody else has of it; those that answer, by id.

        Args:
            is_late: the run goes on without those on which none can be started.

        Raises:
            DeviceError: on one of the others none can.
        """
        joined, left = dict[str, ClusterNode](), list(found)
        names = {node.name for node in [*self._nodes.values()]}
        self._asked.update(one["NodeID"] for one in found)
        installs = self._runtime_env is not None and bool(self._runtime_env.keys() - {"env_vars"})
        for seconds in _INSTALL_SECONDS if installs else _START_SECONDS:
            free, alive = _free(), _alive_ids()
            left = [one for one in left if one["NodeID"] in alive]
            starting = [(one, *self._start_agent(one, free.get(one["NodeID"], {}))) for one in left]
            give_up, left = time.monotonic() + seconds, []
            for one, agent, reference in starting:
                name = one["NodeManagerHostname"]
                if name in names:
                    name += f"-{one['NodeID'][:6]}"
                try:
                    facts = ray.get(reference, timeout=max(0.0, give_up - time.monotonic()))
                except GetTimeoutError:
                    ray.kill(agent)
                    left.append(one)
                    continue
                except RayError as error:
                    if one["NodeID"] not in _alive_ids():  # it has died, which Ray notices after seconds
                        log.warning("node %s: it died before its agent had started", name)
                        continue
                    problem = (
                        f"no agent could be started on node {name} ({in_short(error)}); is ensemble-runner "
                        "installed there?"
                    )
                    if not is_late:
                        raise DeviceError(f"launcher.ray: {problem}") from error
                    self._news.put(problem)
                    continue
                names.add(name)
                held = {gpu.uuid for gpu in facts.held}
                joined[one["NodeID"]] = ClusterNode(name, agent, facts, held=held)
            if not left:
                break
        for one in left:
            log.warning("node %s: its agent did not start", one["NodeManagerHostname"])
        return joined

    def _start_agent(self, one: Mapping[str, Any], free: Mapping[str, float]) -> tuple[Any, Any]:
        """An agent with what is free of a node, and what it will say of the node."""
        all_gpus = int(one["Resources"].get("GPU", 0))
        gpus = min(int(free.get("GPU", 0)), all_gpus)
        environment = {name: os.environ.get(name) for name in _PASSED_ON}
        # Where the run does not say how threads wait, the node may.
        environment |= {name: os.environ[name] for name in WAITING if name in os.environ}
        if not gpus:  # Ray then leaves all of them to be seen
            environment["CUDA_VISIBLE_DEVICES"] = ""
        groups = {"commands": 1, "events": 1, "files": 2}
        actor: Any = ray.remote(concurrency_groups=groups, max_restarts=0)(Agent)
        # Where nobody has left a CPU, it shares them.
        cpus = min(float(gpus), free.get("CPU", 0.0)) if all_gpus else free.get("CPU", 0.0)
        agent = actor.options(**self._options(one["NodeID"], gpus, cpus)).remote(environment, all_gpus)
        return agent, agent.facts.remote()

    def _options(self, node: str, gpus: int, cpus: float) -> dict[str, Any]:
        return {
            "num_gpus": gpus,
            "num_cpus": cpus,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
            **({"runtime_env": self._runtime_env} if self._runtime_env else {}),
        }

    def current(self, devices: Sequence[Device]) -> tuple[Device, ...]:
        """These as they are now; those that others hold are asked for, and Ray gives them once they are free."""
        self._open()
        if self._why_headless:
            raise DeviceError(f"launcher.ray: {self._why_headless}")
        for number, node in self._nodes.items():
            if not node.held or node.why_lost:
                continue
            actor: Any = ray.remote(max_restarts=0)(Holder)
            while len(node.holders) < len(node.held):
                holder = actor.options(**self._options(number, 1, 0)).remote()
                node.holders[holder.uuids.remote()] = holder
            for reference in ray.wait([*node.holders], num_returns=len(node.holders), timeout=0)[0]:
                holder = node.holders.pop(reference)
                with contextlib.suppress(RayError):
                    got = node.held.intersection(ray.get(reference))
                    node.held -= got
                    self._home.update(dict.fromkeys(got, node))
                    self._kept.append(holder)
        own = [replace(gpu, is_held=gpu.is_held and gpu.uuid not in self._home) for gpu in devices]
        return super().current(own)

    def _let_go(self) -> None:
        """Wait no longer for what others hold."""
        for node in self._nodes.values():
            for holder in node.holders.values():
                with contextlib.suppress(RayError, OSError):
                    ray.kill(holder)
            node.holders.clear()

    def changes(self) -> Changes | None:
        if not self._nodes:  # there are no workers, and so no cluster was looked for
            return None
        now = time.monotonic()
        is_joining = self._joining is not None and self._joining.is_alive()
        if now - self._looked_at >= _CHECK_NODES_SECONDS and not is_joining:
            self._looked_at = now
            # By a thread: where the cluster's head has gone, even the question takes long.
            self._joining = threading.Thread(target=self._join_late, daemon=True)
            self._joining.start()
        lost, self._lost = self._lost, []
        devices, came = list[Device](), list[Device]()
        while not self._joined.empty():
            number, node = self._joined.get()
            try:
                devices += self._take_in(node)
            except DeviceError as error:
                self._turn_away(node, str(error))
                continue
            self._news.put(f"{node.label} has joined the cluster, and takes part")
            self._nodes[number] = node
            came.append(node.cpu)
        news = list[str]()
        while not self._news.empty():
            news.append(self._news.get())
        if not lost and not came and not news:
            return None
        gone = [uuid for uuid, home in self._home.items() if home in lost]
        hosts = sum(not node.why_lost for node in self._nodes.values())
        why = {node.name: node.why_lost.removeprefix("was lost (").removesuffix(")") for node in lost}
        return Changes(tuple(devices), tuple(gone), hosts, tuple(came), why, tuple(news))

    def _join_late(self) -> None:
        """Take in nodes that have come while the run goes on; one that does not fit stays out."""
        try:
            found = self._alive()
        except Exception as error:  # the workers that there are go on as long as they can
            log.warning("the cluster does not say which nodes it has: %s", error)
            return
        if not found:
            return
        try:
            joined = self._join(found, is_late=True)
            unfit = {node: [*version_problems([node])] for node in joined.values()}
            fit = [node for node in joined.values() if not unfit[node]]
            supplied = self._supply.give(fit, is_late=True)
            for node, lacking in self._supply.lacking(supplied.well(fit), supplied).items():
                unfit[node] += [text for name, text in lacking.items() if name in self._supply.members]
            for number, node in joined.items():
                problems = unfit[node] or supplied.of(node)
                if problems or self._closed.is_set():
                    self._turn_away(node, "; ".join(problems))
                else:
                    self._joined.put((number, node))
        except Exception as error:  # of a cluster that changes: the run goes on without
            self._news.put(f"a node that joined the cluster stays out: {error}")

    def _turn_away(self, node: ClusterNode, why: str) -> None:
        self._news.put(f"{node.label} has joined the cluster, and stays out: {why or 'the run is over'}")
        with contextlib.suppress(RayError):
            ray.get(node.agent.leave.remote(), timeout=10)
        ray.kill(node.agent)

    # Files.

    def begin(self, members: Mapping[str, MemberFiles]) -> None:
        if members:
            self._open()
        self._let_go()
        self._supply.read(members)
        found = self._supply.give([node for node in self._nodes.values() if not node.why_lost])
        if found.problems:
            self.close()
            raise CheckpointError([text for texts in found.problems.values() for text in texts])
        for node, why in found.silent.items():
            self.lose(node, why)

    # Workers.

    def start(self, start: WorkerStart) -> RayWorker:
        nodes = [node for node in self._nodes.values() if not node.why_lost]
        if start.devices:
            node = self._home[start.devices[0].uuid]
        else:
            # Where none is left, the scheduler has yet to hear of it: what starts there has ended.
            node = min(nodes or self._nodes.values(), key=lambda one: (one.cpu_workers, len(one.workers)))
        self._numbers += 1
        worker = RayWorker(self._numbers, node, start, self)
        if node.why_lost:
            worker.exited = True
            return worker
        member = next(
            one
            for one in self._supply.members.values()
            if one.spec.common.shards_dir == start.command.spec.common.shards_dir
        )
        name = next(name for name, one in self._supply.members.items() if one is member)
        root = f"{node.facts.folder}/files" if name in node.own_copies else ""
        arguments = start, paths_of(member, root), import_folders(member, root)
        node.workers[worker.number] = worker
        worker.call("start", *arguments)
        return worker

    def wait(self, handles: Sequence[Handle], timeout_seconds: float) -> Collection[Handle]:
        try:
            self._poll(timeout_seconds)
        except OSError as error:
            if error.filename is not None:
                raise
            self._lose_connection(error)
        return [one for one in handles if isinstance(one, RayWorker) and one.has_news]

    def _poll(self, timeout_seconds: float) -> None:
        """Ask all nodes what has happened there."""
        polls = {}
        for node in self._nodes.values():
            if self._why_headless:
                self.lose(node, "its cluster is gone", is_news=False)
            if not node.why_lost:
                if node.poll is None:
                    node.poll = node.agent.poll.options(concurrency_group="events").remote(
                        _POLL_SECONDS, _FORGOTTEN_TIMES * self.hang_timeout
                    )
                    node.asked_at = self._watch()
                polls[node.poll] = node
        if not polls:
            time.sleep(timeout_seconds)
            return
        ready, _ = ray.wait([*polls], num_returns=1, timeout=timeout_seconds)
        if ready and len(polls) > 1:
            ready, _ = ray.wait([*polls], num_returns=len(polls), timeout=0)
        batches: dict[ClusterNode, Batch] = {}
        for reference in ready:
            node = polls[reference]
            node.poll = None
            try:
                batches[node] = ray.get(reference)
            except RayError as error:
                if has_raylet_ended():
                    self._lose_connection(error)
                else:
                    self.lose(node, in_short(error))
            except OSError as error:  # newer releases of Ray, such as 2.60, end this process
                self._lose_connection(error)
        # Before anybody hears that they are done.
        unsealed = self._sealer.seal(
            {
                node.workers[number].shards_dir / name: data
                for node, batch in batches.items()
                for (number, name), data in batch.shards.items()
                if number in node.workers
            }
        )
        for node, batch in batches.items():
            self._take(node, batch, unsealed)
        for node in polls.values():
            self._check(node, self.hang_timeout)

    def check_silence(self, node: ClusterNode) -> None:
        """Lose a node of which a worker counts as hung, if it has not responded for about as long itself."""
        self._check(node, self.hang_timeout / 2)

    def _check(self, node: ClusterNode, seconds: float) -> None:
        """Lose a node that has not responded for so long."""
        if node.poll is not None and self._watch() - node.asked_at > seconds and not node.why_lost:
            self.lose(node, self._silence)

    @property
    def _silence(self) -> str:
        return f"it has not responded for {self.hang_timeout:g} s (hang_timeout)"

    def _take(self, node: ClusterNode, batch: Batch, unsealed: Mapping[Path, WriteError]) -> None:
        if batch.used_bytes:
            node.used_bytes, node.telemetry = batch.used_bytes, batch.telemetry
        if batch.available_bytes is not None:
            node.available_bytes = batch.available_bytes
        for number, printed in batch.logs:
            if (worker := node.workers.get(number)) is not None:
                worker.print(printed)
        for number, event in batch.events:
            if (worker := node.workers.get(number)) is None:
                continue
            if isinstance(event, ChunkDone) and (path := worker.shards_dir / event.shard) in unsealed:
                event = Failed("WriteError", str(unsealed[path]), "", event.chunk)
            worker.events.append(event)
        for number, text in batch.broken.items():
            if (worker := node.workers.get(number)) is not None:
                worker.problem = text
        for number, pid in batch.pids.items():
            if (worker := node.workers.get(number)) is not None:
                worker.process = f"{pid} on {node.name}"
        for number in batch.exited:
            if (worker := node.workers.get(number)) is not None:
                worker.exited = True

    def lose(self, node: ClusterNode, why: str, is_news: bool = True) -> None:
        """A node does not answer any more: all that ran there has ended."""
        if not node.why_lost:
            self._lost.append(node)
            if is_news:
                self._news.put(f"{node.label} is lost: {why}")
        node.why_lost = f"was lost ({why})"
        node.used_bytes = {}
        for worker in node.workers.values():
            worker.exited = True
        # What was only cut off shall do nothing any more; a socket of Ray's may be broken.
        with contextlib.suppress(RayError, OSError):
            ray.kill(node.agent)

    def used_memory(self, uuids: Collection[str]) -> dict[str, int | None]:
        self.wait((), 0)
        return {uuid: self._home[uuid].used_bytes.get(uuid) if uuid in self._home else None for uuid in uuids}

    def telemetry(self, uuids: Collection[str]) -> dict[str, Telemetry | None]:
        return {uuid: self._home[uuid].telemetry.get(uuid) if uuid in self._home else None for uuid in uuids}

    def available_memory(self, devices: Sequence[Device]) -> int | None:
        nodes = [self._home[device.uuid] for device in devices] or [*self._nodes.values()]
        return min((one.available_bytes for one in nodes if one.available_bytes is not None), default=None)

    def close(self) -> None:
        self._closed.set()
        while not self._news.empty():  # that nobody has asked for, as where a run was only looked at
            log.warning("%s", self._news.get())
        nodes = [*self._nodes.values()]
        while not self._joined.empty():
            nodes.append(self._joined.get()[1])
        # Also those that are lost because of the head, which nodes get on without.
        with contextlib.suppress(OSError):
            ends = [node.agent.leave.remote() for node in nodes if not node.why_lost or self._why_headless]
            if ends:
                ray.wait(ends, num_returns=len(ends), timeout=_END_SECONDS)
        self._let_go()
        for actor in (*self._kept, *(node.agent for node in nodes)):
            with contextlib.suppress(RayError, OSError):
                ray.kill(actor)
        self._kept.clear()
        self._nodes.clear()
        self._home.clear()
        self._asked.clear()
        if self._is_own_connection:
            self._is_own_connection = False
            if self._why_headless or silence(self._head, _CHECK_NODES_SECONDS):  # then it would never end
                atexit.unregister(ray.shutdown)
            else:
                ray.shutdown()


def _alive_ids() -> set[str]:
    return {one["NodeID"] for one in ray.nodes() if one["Alive"]}


def _free() -> Mapping[str, Mapping[str, float]]:
    """What nobody has of each node."""
    from ray._private import state  # there is no public way to ask for it node by node

    found: Mapping[str, Mapping[str, float]] = cast(Any, state).available_resources_per_node()
    return found
