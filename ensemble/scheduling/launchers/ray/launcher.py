"""Start workers on the nodes of a Ray cluster, by an agent on each node.

Ray finds the nodes, starts the agents, moves bytes and notices dead processes.  Everything else is as on one
machine: nodes get the table and the model files that they lack, and shards come back with the events that announce
them.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, cast

from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ensemble.common.clock import Watch
from ensemble.common.device_trials import DeviceTrial
from ensemble.common.errors import CheckpointError, ConfigError, DeviceError
from ensemble.common.files import HubFile
from ensemble.common.gpus import Device, Inventory
from ensemble.common.protocol import ChunkDone, Failed
from ensemble.common.python_process import WAITING
from ensemble.common.shards import write_shards
from ensemble.common.text import listed
from ensemble.scheduling.launchers.base import (
    Changes,
    Exit,
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
from ensemble.scheduling.launchers.ray.nodes import ClusterNode, RayWorker, in_short, version_problems
from ensemble.scheduling.launchers.ray.supply import Supply, import_folders, paths_of
from ensemble.scheduling.records import NodeChange

# The type of each setting, and what users call it.
_SETTINGS: dict[str, tuple[type, str]] = {
    "address": (str, "text"),
    "ship_models": (bool, "true or false"),
    "runtime_env": (dict, "a mapping"),
}
_POLL_SECONDS = 0.2
# An agent that has not started by then is given up: its node is slow, or another run has taken its resources.
_START_SECONDS = 120.0
# The same if Ray has to install packages first.
_INSTALL_SECONDS = 1_200.0
# The resources of a run that has just ended, or of an agent, are free again after this time.
_SETTLE_SECONDS = 3.0
# A node that Ray keeps gets so many where its agent dies, as Ray's memory monitor ends it for what workers take.
_MAX_FRESH_AGENTS = 3
_END_SECONDS = 5.0
# An agent that is not polled for this many times hang_timeout ends its workers.
_FORGOTTEN_TIMES = 4
# Of a turn of a loop no more than this counts: if it took longer, this process was stopped, or read files.
_MAX_TURN_SECONDS = 5.0
_CHECK_NODES_SECONDS = 2.0
# A worker on a node starts and ends within these seconds, unless its node is lost.
_WORKER_SECONDS = 30.0
# How long a head may be silent, and how long it may refuse connections.  Ray ends a driver, with lines of its own,
# that has had no answer for 7 minutes and then no connection for another one (grpc_client_keepalive_time_ms and
# _timeout_ms, gcs_rpc_server_reconnect_timeout_s in its ray_config_def.h).
_SILENT_HEAD_SECONDS = 240.0
_REFUSING_HEAD_SECONDS = 45.0
_REFUSED = os.strerror(errno.ECONNREFUSED)
# How often a node is pinged while it has not answered a request.
_PING_SECONDS = 1.0
# Variables of the run's environment that workers on other nodes get, too.
_PASSED_ON = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
log = logging.getLogger(__name__)


class RayLauncher(Launcher):
    """Start workers on the nodes of a Ray cluster.

    Settings: ``address`` of the cluster ("auto": the one of this machine, or RAY_ADDRESS), ``ship_models``, and
    ``runtime_env`` of Ray for the agents.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        problems = []
        for key, value in settings.items():
            if key not in _SETTINGS:
                problems.append(f"{key}: unknown key; this launcher has {listed(list(_SETTINGS))}")
            elif value is not None and not isinstance(value, _SETTINGS[key][0]):
                problems.append(f"{key}: must be {_SETTINGS[key][1]}")
        # As Ray has it: the variable is read where the config leaves the address open.
        address = settings.get("address") or "auto"
        prefix = "address: "
        if address == "auto" and os.environ.get("RAY_ADDRESS"):
            address = os.environ["RAY_ADDRESS"]
            prefix = "address: RAY_ADDRESS="
        if isinstance(address, str) and address_problem(address):
            problems.append(prefix + address_problem(address))
        if problems:
            raise ConfigError(problems)
        self._address = address
        self._supply = Supply(self._answers, bool(settings.get("ship_models")))
        self._runtime_env = settings.get("runtime_env")
        self._nodes: list[ClusterNode] = []
        self._node_of: dict[str, ClusterNode] = {}  # by the UUID of a device
        self._workers: dict[int, RayWorker] = {}  # those that are not closed, by number
        self._numbers = count(1)
        self._is_own_connection = False
        self._watch = Watch(_MAX_TURN_SECONDS)
        # Filled by threads, as deques allow; all else of nodes is the main thread's alone.
        self._joined: deque[ClusterNode] = deque()
        self._news: deque[str] = deque()  # for the user
        self._asked: set[str] = set()  # ids of nodes that an agent was to be started on
        self._returning: dict[str, ClusterNode] = {}  # lost ones that are to get a fresh agent, by id
        self._fresh_agents: Counter[str] = Counter()  # that were to be started, by the id of the node
        self._closed = threading.Event()
        self._head = ""  # its address
        self._cluster_loss = ""  # why the cluster is lost
        self._lost: list[ClusterNode] = []  # since the last call of changes()
        self._holders: list[Any] = []  # they hold GPUs until they end

    # The cluster.

    def inventory(self) -> Inventory:
        self._closed.set()
        self._closed = threading.Event()
        self._cluster_loss = ""
        self._is_own_connection |= connect(self._address, f"ensemble-{os.getpid()}")
        self._head = ray.get_runtime_context().gcs_address
        threading.Thread(target=self._watch_head, args=(self._closed,), daemon=True).start()
        self._nodes += self._join()
        if not self._nodes:
            raise DeviceError(
                "launcher.ray: no agent has started on any node of the cluster; see `ray status`"
            )
        problems = list(version_problems(self._nodes))
        if problems:
            raise DeviceError(problems)
        for node in self._nodes:
            self._add_devices(node)
        gpus = tuple(gpu for node in self._nodes for gpu in node.facts.node.gpus)
        drivers = [node.facts.inventory.driver_version for node in self._nodes]
        return Inventory(
            gpus,
            note="" if gpus else "no node of the cluster has a GPU: running on its CPUs",
            driver_version=", ".join(dict.fromkeys(filter(None, drivers))) or None,
            warnings=tuple(
                f"{node.label}: {text}" for node in self._nodes for text in node.facts.inventory.warnings
            ),
            hosts=tuple(node.cpu for node in self._nodes),
        )

    def nodes(
        self, sources: Mapping[str, Sequence[str]], hub_files: Mapping[str, Sequence[HubFile]]
    ) -> tuple[Node, ...]:
        if not self._nodes:
            return ()
        self._supply.hub_files = hub_files
        files = {
            member: [file for source in member_sources for file in files_of(source)]
            for member, member_sources in sources.items()
        }
        copies = copies_of(path for paths in files.values() for path in paths)
        unfit = self._supply.unfit(copies, self._present_nodes())
        hub_problems = self._supply.hub_problems(self._present_nodes())
        reports = []
        for node in self._present_nodes():
            problems = list(version_problems([node]))
            models: dict[str, str] = {}
            for member, paths in files.items():
                reasons = {path: unfit[node][path] for path in paths if path in unfit[node]}
                models[member] = "there" if paths else "on the hub"
                if member in hub_problems[node]:
                    models[member] = "missing"
                    problems.append(hub_problems[node][member])
                elif reasons:
                    models[member] = min(reasons.values())  # "another" before "missing"
                    if models[member] == "missing" and self._supply.ships_models:
                        models[member] = "sent"
                    else:
                        problems.append(self._supply.problem(member, node, reasons))
            reports.append(replace(node.facts.node, models=models, problems=tuple(problems)))
        if not reports:
            lost = "; ".join(f"{node.label} was lost ({node.why_lost})" for node in self._nodes)
            raise DeviceError(f"launcher.ray: no node of the cluster is left: {lost}; see `ray status`")
        return tuple(sorted(reports, key=lambda report: report.name))

    def trials(
        self, devices: Sequence[Device], imports: Sequence[str] = (), flash_attention: bool = False
    ) -> list[DeviceTrial]:
        requests: dict[ClusterNode, Any] = {}
        for node in self._present_nodes():
            on_node = [device for device in devices if device.node == node.name]
            if on_node:
                requests[node] = node.call("commands", "trials", on_node, imports, flash_attention)
        results: list[DeviceTrial] = []
        for _, trials in self._answers(requests):
            results += trials
        lost = {node.name: node.why_lost for node in requests if node.why_lost}
        results += [
            DeviceTrial(device, ending=lost[device.node]) for device in devices if device.node in lost
        ]
        return results

    def _answers(self, requests: Mapping[ClusterNode, Any]) -> Iterator[tuple[ClusterNode, Any]]:
        """Yield each node's answer to its request as it comes; lose nodes that do not answer.

        An answer may take any time as long as its node responds to pings.
        """
        watch = Watch(_MAX_TURN_SECONDS)
        open_requests = {reference: node for node, reference in requests.items()}
        responded_at = dict.fromkeys(requests, watch())
        pings: dict[ClusterNode, Any] = {}
        while open_requests:
            try:
                ready, _ = ray.wait(list(open_requests), num_returns=1, timeout=_PING_SECONDS)
            except SystemError as error:  # Ray's calls make it of what a signal's handler raises
                raise error.__cause__ or error from None
            for reference in ready:
                node = open_requests.pop(reference)
                try:
                    answer = ray.get(reference)
                except RayError as error:
                    self._lose(node, error)
                else:
                    yield node, answer
            now = watch()
            for reference, node in list(open_requests.items()):
                if node in pings and ray.wait([pings[node]], timeout=0)[0]:
                    responded_at[node] = now
                    del pings[node]
                if node not in pings:
                    pings[node] = node.call("events", "ping")
                if now - responded_at[node] > self.hang_timeout:
                    del open_requests[reference]
                    self._lose(node, self._silence_text)

    def _present_nodes(self) -> list[ClusterNode]:
        return [node for node in self._nodes if not node.why_lost]

    def _add_devices(self, node: ClusterNode) -> None:
        """Note where a node's devices are, by UUID."""
        for device in node.facts.inventory.gpus:
            other = self._node_of.get(device.uuid)
            if other is not None and other is not node and not other.why_lost:
                raise DeviceError(
                    f"launcher.ray: {device.uuid} is on {node.label} and on {other.label}; is a machine there "
                    "twice?"
                )
            self._node_of[device.uuid] = node

    def _watch_head(self, closed: threading.Event) -> None:
        """Ping the head until the launcher is closed: without a head, most of Ray's calls never end."""
        watch = Watch(_MAX_TURN_SECONDS)
        responded_at = watch()
        while not closed.wait(_CHECK_NODES_SECONDS):
            now = watch()
            why = silence(self._head, _CHECK_NODES_SECONDS)
            if not why:
                responded_at = now
                continue
            limit = _REFUSING_HEAD_SECONDS if why == _REFUSED else _SILENT_HEAD_SECONDS
            if self.hang_timeout <= limit:
                limit, why = self.hang_timeout, "hang_timeout"
            if now - responded_at > limit:
                self._lose_cluster(f"its head at {self._head} has not responded for {limit:g} s ({why})")
                return

    def _lose_connection(self, error: Exception) -> None:
        """Give up the cluster: the raylet of this machine has ended, or a socket of Ray is broken."""
        why = f"Ray on this machine has ended ({error})"
        if has_raylet_ended():
            why = "the raylet of this machine, its connection to the cluster, has ended"
        if not self._cluster_loss:
            self._lose_cluster(why)

    def _lose_cluster(self, why: str) -> None:
        self._cluster_loss = f"the cluster is lost: {why}"
        self._news.append(self._cluster_loss)

    def _join(self, is_late: bool = False) -> list[ClusterNode]:
        """Start an agent on each node that has had none, with all that is free there; return those that answer.

        Args:
            is_late: go on without the nodes on which no agent can be started; else that raises DeviceError.
        """
        joined: list[ClusterNode] = []
        names = {node.node_id: node.name for node in self._nodes}
        records = [record for record in _alive_nodes() if record["NodeID"] not in self._asked]
        if not records:
            return joined
        self._asked.update(record["NodeID"] for record in records)
        settled = time.monotonic() + _SETTLE_SECONDS
        while time.monotonic() < settled and any(
            record["Resources"].get("GPU", 0) > _free_resources().get(record["NodeID"], {}).get("GPU", 0)
            for record in records
        ):
            time.sleep(_POLL_SECONDS)
        free = _free_resources()
        starting = []
        for record in records:
            name = record["NodeManagerHostname"]
            if name in names.values():
                name += f"-{record['NodeID'][:6]}"
            name = names.setdefault(record["NodeID"], name)
            agent = self._start_agent(record, name, free.get(record["NodeID"], {}))
            starting.append((record, name, agent, agent.facts.remote()))
        installs = self._runtime_env is not None and bool(self._runtime_env.keys() - {"env_vars"})
        give_up = time.monotonic() + (_INSTALL_SECONDS if installs else _START_SECONDS)
        for record, name, agent, reference in starting:  # which fresh agents join
            node_id = record["NodeID"]
            try:
                facts = ray.get(reference, timeout=max(0.0, give_up - time.monotonic()))
            except GetTimeoutError:
                ray.kill(agent)
                log.warning("node %s: its agent did not start", name)
            except RayError as error:
                if node_id in self._returning:
                    self._returning[node_id].why_lost = in_short(error)
                # If the node has died, Ray notices that after seconds, and the run goes on without it.
                elif all(other["NodeID"] != node_id for other in _alive_nodes()):
                    continue
                elif (
                    isinstance(error, (RayActorError, OutOfMemoryError))
                    and not getattr(error, "actor_init_failed", False)  # it could be loaded there
                    and self._fresh_agents[node_id] < _MAX_FRESH_AGENTS
                ):
                    self._fresh_agents[node_id] += 1
                    agent = self._start_agent(record, name, free.get(node_id, {}))
                    starting.append((record, name, agent, agent.facts.remote()))
                else:
                    problem = (
                        f"no agent could be started on node {name} ({in_short(error)}); is ensemble-runner "
                        "installed there?"
                    )
                    if not is_late:
                        raise DeviceError(f"launcher.ray: {problem}") from error
                    self._news.append(problem)
            else:
                uuids = {gpu.uuid for gpu in facts.node.gpus if gpu.is_held}
                joined.append(ClusterNode(node_id, name, agent, facts, uuids))
        return joined

    def _start_agent(self, record: Mapping[str, Any], name: str, free: Mapping[str, float]) -> Any:
        """Start an agent on a node with the resources that are free there."""
        all_gpus = int(record["Resources"].get("GPU", 0))
        gpus = min(int(free.get("GPU", 0)), all_gpus)
        environment = {variable: os.environ.get(variable) for variable in _PASSED_ON}
        # If the run does not say how threads wait, the node may.
        environment |= {variable: os.environ[variable] for variable in WAITING if variable in os.environ}
        if not gpus:  # Ray then leaves all of them visible
            environment["CUDA_VISIBLE_DEVICES"] = ""
        groups = {"commands": 1, "events": 1, "files": 1}
        actor: Any = ray.remote(concurrency_groups=groups, max_restarts=0)(Agent)
        cpus = free.get("CPU", 0.0)
        if all_gpus:  # where no CPU is free, it shares them
            cpus = min(float(gpus), cpus)
        return actor.options(**self._options(record["NodeID"], gpus, cpus)).remote(
            environment, name, all_gpus
        )

    def _options(self, node_id: str, gpus: int, cpus: float) -> dict[str, Any]:
        options: dict[str, Any] = {
            "num_gpus": gpus,
            "num_cpus": cpus,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
        }
        if self._runtime_env:
            options["runtime_env"] = self._runtime_env
        return options

    def current(self, devices: Sequence[Device]) -> tuple[Device, ...]:
        """Return these devices as they are now; GPUs that others no longer use are held for the run."""
        if not self._nodes:
            self.inventory()
        if self._cluster_loss:
            raise DeviceError(f"launcher.ray: {self._cluster_loss}")
        free = _free_resources()
        actor: Any = ray.remote(max_restarts=0)(Holder)
        for node in self._present_nodes():
            free_gpus = int(free.get(node.node_id, {}).get("GPU", 0))
            for _ in range(min(free_gpus, len(node.uuids_of_others))):
                holder = actor.options(**self._options(node.node_id, 1, 0)).remote()
                self._holders.append(holder)
                with contextlib.suppress(RayError):
                    uuids = ray.get(holder.uuids.remote(), timeout=_WORKER_SECONDS)
                    node.uuids_of_others.difference_update(uuids)
                    self._node_of.update(dict.fromkeys(uuids, node))
        updated = [replace(gpu, is_held=gpu.is_held and gpu.uuid not in self._node_of) for gpu in devices]
        return super().current(updated)

    def changes(self) -> Changes | None:
        if not self._nodes:  # there are no workers, and so no cluster was looked for
            return None
        lost, self._lost = self._lost, []
        joined_devices: list[Device] = []
        nodes = [NodeChange(node.name, is_lost=True, why=node.why_lost) for node in lost]
        while self._joined:
            self._returning.pop(self._joined[0].node_id, None)  # first: nobody asks again for what has joined
            node = self._joined.popleft()
            try:
                self._add_devices(node)
            except DeviceError as error:
                self._reject(node, str(error))
                continue
            text = "is back" if node.node_id in self._fresh_agents else "has joined the cluster"
            self._news.append(f"{node.label} {text}, and takes part")
            self._nodes.append(node)
            joined_devices += node.facts.inventory.gpus
            nodes.append(NodeChange(node.name, is_lost=False, total_bytes=node.facts.node.total_bytes))
        news = [self._news.popleft() for _ in range(len(self._news))]
        if not nodes and not news:
            return None
        return Changes(
            joined=tuple(joined_devices),
            lost=tuple(uuid for uuid, node in self._node_of.items() if node in lost),
            hosts=len(self._present_nodes()),
            expects_nodes=bool(self._returning) and not self._cluster_loss,
            nodes=tuple(nodes),
            news=tuple(news),
        )

    def _join_late(self, closed: threading.Event) -> None:
        """Add nodes that join the cluster during the run, or come back; reject those that do not fit."""
        while not closed.wait(_CHECK_NODES_SECONDS):
            try:
                self._ask_again()
                for node in self._join(is_late=True):
                    problems = list(version_problems([node]))
                    if not problems:
                        problems = self._supply.deliver([node]).get(node, [])
                    if not problems:
                        hub_problems = self._supply.hub_problems([node])[node].items()
                        problems = [text for member, text in hub_problems if member in self._supply.members]
                    if problems or node.why_lost or closed.is_set():
                        self._reject(node, "; ".join(problems) or node.why_lost)
                    else:
                        self._joined.append(node)
            except Exception as error:  # of a cluster that changes: the run goes on as long as it can
                log.warning("a node that joined the cluster stays out: %s", error)

    def _ask_again(self) -> None:
        """Have a fresh agent started on nodes that Ray keeps; give up those that have had enough of them."""
        joined = {node.node_id for node in list(self._joined)}
        alive = {record["NodeID"] for record in _alive_nodes()} if self._returning else set()
        for node_id in self._returning.keys() - joined:
            if node_id in alive and self._fresh_agents[node_id] < _MAX_FRESH_AGENTS:
                self._fresh_agents[node_id] += 1
                self._asked.discard(node_id)
                continue
            node = self._returning.pop(node_id)  # before the news, which the end of waiting comes with
            text = f"is given up after {_MAX_FRESH_AGENTS} fresh agents: {node.why_lost}"
            self._news.append(f"{node.label} {text if node_id in alive else 'has left the cluster'}")

    def _reject(self, node: ClusterNode, why: str) -> None:
        self._news.append(f"{node.label} has joined the cluster, and stays out: {why or 'the run is over'}")
        ray.wait([node.agent.leave.remote()], timeout=_END_SECONDS)
        ray.kill(node.agent)

    def begin(self, members: Mapping[str, MemberFiles]) -> None:
        if members and not self._nodes:
            self.inventory()
        self._supply.read(members)
        problems = self._supply.deliver(self._present_nodes())
        if problems:
            self.close()
            raise CheckpointError([text for texts in problems.values() for text in texts])
        if self._nodes:
            # In a thread: if the cluster's head has gone, even asking for its nodes takes long.
            threading.Thread(target=self._join_late, args=(self._closed,), daemon=True).start()

    # Workers.

    def start(self, start: WorkerStart) -> RayWorker:
        if start.devices:
            node = self._node_of[start.devices[0].uuid]
        else:
            # If all nodes are lost, the scheduler does not know it yet: a worker started there has ended.
            node = min(self._present_nodes() or self._nodes, key=self._load_of)
        worker = RayWorker(next(self._numbers), node, start, self._close_worker)
        order_path = start.command.spec.common.order_path
        members = self._supply.members.items()
        name, member = next(item for item in members if item[1].spec.common.order_path == order_path)
        root = f"{node.facts.folder}/files" if name in node.supplied_members else ""
        paths, folders = paths_of(member, root), import_folders(member, root)
        if not node.why_lost:
            request = node.call("commands", "start", worker.number, start, paths, folders)
            try:
                pid = ray.get(request, timeout=min(_WORKER_SECONDS, self.hang_timeout))
                worker.process = f"{pid} on {node.name}"
            except RayTaskError as error:
                raise OSError(f"{node.label}: {error.cause}") from error
            except (RayError, OSError) as error:
                self._lose(node, error)
        worker.exited = bool(node.why_lost)
        self._workers[worker.number] = worker
        return worker

    def _load_of(self, node: ClusterNode) -> tuple[int, int]:
        """Return how many workers a node has on its CPU, and how many in all."""
        workers = [worker for worker in self._workers.values() if worker.node is node]
        return sum(not worker.devices for worker in workers), len(workers)

    def _close_worker(self, worker: RayWorker) -> Exit:
        self._workers.pop(worker.number, None)
        node = worker.node
        # A worker whose node does not respond counts as hung, although the node's own time is not quite over.
        self._check(node, self.hang_timeout / 2)
        if not node.why_lost:
            request = node.call("commands", "close", worker.number)
            try:
                exit_, printed = ray.get(request, timeout=_WORKER_SECONDS)
            except (RayError, OSError) as error:
                self._lose(node, error)
            else:
                worker.print(printed)
                return cast(Exit, exit_)
        # One of its workers counts as killed for lack of memory; the others were only there.
        is_out_of_memory, node.is_out_of_memory = node.is_out_of_memory, False
        text = f"ended when {node.label} was lost ({node.why_lost})"
        return Exit(-9, text, is_out_of_memory, is_lost=True)

    def wait(self, handles: Sequence[Handle], timeout_seconds: float) -> Collection[Handle]:
        try:
            self._poll(timeout_seconds)
        except OSError as error:
            self._lose_connection(error)
        return [handle for handle in handles if isinstance(handle, RayWorker) and handle.has_news]

    def _poll(self, timeout_seconds: float) -> None:
        """Ask all nodes what has happened there."""
        polls: dict[Any, ClusterNode] = {}
        for node in self._present_nodes():
            if self._cluster_loss:
                self._lose(node, "its cluster is gone")
                continue
            if node.poll is None:
                node.poll = node.call("events", "poll", _POLL_SECONDS, _FORGOTTEN_TIMES * self.hang_timeout)
                node.polled_at = self._watch()
            polls[node.poll] = node
        if not polls:
            time.sleep(timeout_seconds)
            return
        ray.wait(list(polls), num_returns=1, timeout=timeout_seconds)
        ready, _ = ray.wait(list(polls), num_returns=len(polls), timeout=0)
        for reference in ready:
            node = polls[reference]
            node.poll = None
            try:
                self._note_batch(node, ray.get(reference))
            except (RayError, OSError) as error:  # newer releases of Ray, such as 2.60, end this process
                if isinstance(error, OSError) or has_raylet_ended():
                    self._lose_connection(error)
                else:
                    self._lose(node, error)
        for node in polls.values():
            self._check(node, self.hang_timeout)

    def _check(self, node: ClusterNode, seconds: float) -> None:
        """Give up a node that has not responded for too long."""
        if node.poll is not None and self._watch() - node.polled_at > seconds:
            self._lose(node, self._silence_text)

    @property
    def _silence_text(self) -> str:
        return f"it has not responded for {self.hang_timeout:g} s (hang_timeout)"

    def _note_batch(self, node: ClusterNode, batch: Batch) -> None:
        """Write the shards, and pass on events to workers that are not closed."""
        node.batch = batch
        news_of = {
            self._workers[number]: news for number, news in batch.workers.items() if number in self._workers
        }
        # Before the scheduler gets the events that announce them.
        unsealed = write_shards(
            {
                worker.shards_dir / name: data
                for worker, news in news_of.items()
                for name, data in news.shards.items()
            }
        )
        for worker, news in news_of.items():
            if news.printed:
                worker.print(news.printed)
            for event in news.events:
                if isinstance(event, ChunkDone) and worker.shards_dir / event.shard in unsealed:
                    error = unsealed[worker.shards_dir / event.shard]
                    event = Failed("WriteError", str(error), "", event.chunk)
                worker.events.append(event)
            worker.exited = worker.exited or news.has_exited

    def _lose(self, node: ClusterNode, why: str | Exception) -> None:
        """Note that a node does not answer any more: all that ran there has ended; a dead agent has a successor."""
        if node.why_lost:
            return
        node.why_lost = why if isinstance(why, str) else in_short(why)
        node.is_out_of_memory = isinstance(why, OutOfMemoryError)
        if node in self._nodes:  # not one that joins, and stays out
            self._lost.append(node)
            if not self._cluster_loss:
                self._news.append(f"{node.label} is lost: {node.why_lost}")
            if isinstance(why, (RayActorError, OutOfMemoryError)):
                self._returning[node.node_id] = node
            node.batch = Batch()
            for worker in self._workers.values():
                if worker.node is node:
                    worker.exited = True
        # An agent that was only cut off must do nothing any more; a socket of Ray's may be broken.
        with contextlib.suppress(RayError, OSError):
            ray.kill(node.agent)

    def used_memory(self, uuids: Collection[str]) -> dict[str, int | None]:
        self.wait((), 0)
        nodes = self._node_of
        return {uuid: nodes[uuid].batch.used_bytes.get(uuid) if uuid in nodes else None for uuid in uuids}

    def available_memory(self, devices: Sequence[Device]) -> int | None:
        nodes = [self._node_of[device.uuid] for device in devices] or self._nodes
        sizes = (node.batch.available_bytes for node in nodes)
        return min((size for size in sizes if size is not None), default=None)

    def close(self) -> None:
        self._closed.set()
        while self._news:  # that nobody has asked for, as where a run was only looked at
            log.warning("%s", self._news.popleft())
        nodes = [*self._nodes, *self._joined]
        # Also those that are lost because of the head: nodes go on without it.
        with contextlib.suppress(OSError):
            ends = [node.agent.leave.remote() for node in nodes if not node.why_lost or self._cluster_loss]
            if ends:
                ray.wait(ends, num_returns=len(ends), timeout=_END_SECONDS)
        for actor in (*self._holders, *(node.agent for node in nodes)):
            with contextlib.suppress(RayError, OSError):
                ray.kill(actor)
        for collection in (self._holders, self._nodes, self._joined, self._node_of, self._asked):
            collection.clear()
        self._returning.clear()
        self._fresh_agents.clear()
        if self._is_own_connection:
            self._is_own_connection = False
            if self._cluster_loss or silence(self._head, _CHECK_NODES_SECONDS):  # then it would never end
                atexit.unregister(ray.shutdown)
            else:
                ray.shutdown()


def _alive_nodes() -> list[dict[str, Any]]:
    return [record for record in ray.nodes() if record["Alive"]]


def _free_resources() -> Mapping[str, Mapping[str, float]]:
    """Return the free resources of each node, by its id."""
    from ray._private import state  # there is no public way to ask for it node by node

    resources: Mapping[str, Mapping[str, float]] = cast(Any, state).available_resources_per_node()
    return resources
