"""The connection to a Ray cluster: found or said to be missing within seconds, and quiet."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import ray as ray_module
from ray.exceptions import RayError

from ensemble.common.errors import DeviceError

_ANSWER_SECONDS = 5.0
# HTTP/2 (RFC 9113, 3.4), which gRPC is: a client begins with this and a SETTINGS frame, here an empty one; so does
# the server, with the frame alone.
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_TYPE_AT, _SETTINGS = 3, 4  # in the frame
_ADVICE = (
    "start one with ray start --head, or name another (launcher: {ray: {address: HOST:PORT}}, or RAY_ADDRESS)"
)
ray: Any = ray_module  # its types are of many versions


def address_problem(address: str) -> str:
    """What is wrong with how an address is written; empty where nothing is."""
    if address.startswith("ray://"):
        return (
            f"{address} is for Ray's client, which is not used here; give the cluster's own address, such as "
            "HOST:6379, on a machine that is a node of it (ray start --address=HOST:6379 --num-cpus=0)"
        )
    host, _, port = address.rpartition(":")
    is_port = port.isascii() and port.isdigit() and int(port) < 1 << 16
    if address != "auto" and not (host and is_port):
        return f"{address} is no address; write HOST:PORT, such as 10.0.0.1:6379, or auto"
    return ""


def connect(address: str, namespace: str) -> bool:
    """Connect this process to the cluster at an address, unless it is connected to one; whether it was not.

    Raises:
        DeviceError: there is none, or this machine cannot take part in it.
    """
    where = f"at {address}" if address != "auto" else "on this machine (address: auto)"
    try:
        if ray.is_initialized():
            found = str(ray.get_runtime_context().gcs_address)
        else:
            found = _found_address() if address == "auto" else address
        reason = silence(found, _ANSWER_SECONDS)
    except OSError:  # Ray's own of no cluster is a ConnectionError
        found, reason = "", "none is running"
    if reason:
        at = f"{found}: " if address == "auto" and found else ""
        raise DeviceError(f"launcher.ray: no Ray cluster {where} ({at}{reason}); {_ADVICE}")
    if ray.is_initialized():
        return False
    try:
        with _own_handlers():
            # As it was given: of "auto" alone Ray itself sees whether the cluster wants a token.
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, namespace=namespace)
    except (RayError, OSError, RuntimeError, ValueError, AssertionError, SystemExit) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise DeviceError(
            f"launcher.ray: the Ray cluster {where} cannot be used from here ({first}); this machine must be a "
            f"node of it (ray start --address={found}), with the same versions of Ray and Python"
        ) from error
    # What Ray would print of workers that died, in between of ours: there is no public switch for it.
    with contextlib.suppress(Exception):
        worker: Any = importlib.import_module("ray._private.worker")
        worker._worker_logs_enabled = False
    return True


def silence(address: str, seconds: float) -> str:
    """Why nothing that may be a cluster's head answers at an address within so long; empty where it does.

    Ray itself asks for half a minute and more, and says so in lines of its own; one that is stopped, for good.
    """
    host, _, port = address.rpartition(":")
    frame = b""
    try:
        with socket.create_connection((host.strip("[]"), int(port)), seconds) as line:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return ""
            line.sendall(_GREETING)
            while len(frame) <= _TYPE_AT and (some := line.recv(_TYPE_AT + 1)):
                frame += some
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or "no answer"
    return "" if frame[_TYPE_AT:] == bytes((_SETTINGS,)) else "what answers there is not Ray"


def has_raylet_ended() -> bool:
    """Whether the raylet that connects this process to the cluster has ended: nothing listens at its socket."""
    try:
        worker: Any = importlib.import_module("ray._private.worker")
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(str(worker.global_worker.node.raylet_socket_name))
    except (ConnectionRefusedError, FileNotFoundError):
        return True
    except (AttributeError, OSError):  # another release of Ray may name it otherwise: not known
        return False
    return False


def _found_address() -> str:
    """That of the cluster of this machine; raises ConnectionError where there is none."""
    # Where it ended with a power cut, Ray finds the one that was, and there is no public way to ask which.
    services: Any = importlib.import_module("ray._private.services")
    return str(services.get_ray_address_from_environment("auto", None))


@contextlib.contextmanager
def _own_handlers() -> Iterator[None]:
    """Signals are this process's own matter: Ray handles SIGTERM with an exit code of its own."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGTERM, handler)
