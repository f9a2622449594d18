"""A Ray cluster of several nodes on this machine, in a process of its own, told what to do by lines on its input.

``add`` starts a node, ``kill`` ends its raylet as a power cut would; each is answered by a line.  A node's name is
a custom resource of it, so that a test can tell which is which.  Where the machine allows it, each node has mounts
of its own: what a test mounts there, with nsenter and the raylet's number, no other node sees.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

_CLONE_FS, _CLONE_NEWNS = 0x00000200, 0x00020000  # sched.h


@contextlib.contextmanager
def _mounts(hidden: list[str]) -> Iterator[bool]:
    """Give what is started within mounts of its own, and nothing in these folders; whether that could be done."""
    libc = ctypes.CDLL(None)
    with Path("/proc/self/ns/mnt").open("rb") as own:
        if libc.unshare(_CLONE_NEWNS):
            yield False
            return
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        for folder in hidden:
            subprocess.run(["mount", "-t", "tmpfs", "hidden", folder], check=True)
        yield True
        assert libc.unshare(_CLONE_FS) == 0  # which threads share that were started meanwhile
        assert libc.setns(own.fileno(), _CLONE_NEWNS) == 0


def main() -> None:
    cluster: Any = Cluster()
    nodes: dict[str, Any] = {}
    # Of the head: it asks others more often whether they are there, and so knows sooner of one that was killed.
    head = {"_system_config": {"health_check_period_ms": 500}}
    for line in sys.stdin:
        order = json.loads(line)
        answer: dict[str, Any] = {}
        if order["do"] == "add":
            with _mounts(order.get("hidden", [])) as has_mounts:
                nodes[order["name"]] = cluster.add_node(
                    num_cpus=order["cpus"],
                    num_gpus=order["gpus"],
                    object_store_memory=80 << 20,
                    include_dashboard=False,
                    env_vars=order["environment"],
                    resources={order["name"]: 1},
                    **({} if nodes else head),
                )
            (raylet,) = nodes[order["name"]].all_processes["raylet"]
            (head,) = cluster.head_node.all_processes["gcs_server"]
            answer = {"raylet": raylet.process.pid, "has_mounts": has_mounts, "head": head.process.pid}
        elif order["do"] == "kill":
            cluster.remove_node(nodes.pop(order["name"]), allow_graceful=False)
        sys.stdout.write(json.dumps({"address": cluster.address, **answer}) + "\n")
        sys.stdout.flush()
    cluster.shutdown()


if __name__ == "__main__":
    main()
