"""Connect to a Ray cluster without output, or fail within seconds."""

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
# gRPC is HTTP/2 (RFC 9113, 3.4): a client begins with this preface and a SETTINGS frame, here an empty one; the
# server begins with a SETTINGS frame.
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
# Where the type of a frame is, and the type SETTINGS.
_TYPE_AT = 3
_SETTINGS_TYPE = 4
_ADVICE = (
    "start one with ray start --head, or name another (launcher: {ray: {address: HOST:PORT}}, or RAY_ADDRESS)"
)
ray: Any = ray_module  # its types differ between versions


def address_problem(address: str) -> str:
    """Return what is wrong with how an address is written; empty where nothing is."""
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
    """Connect this process to the cluster at an address, unless it is connected to one.

    Returns:
        Whether this call has connected it.

    Raises:
        DeviceError: there is no cluster, or this machine cannot take part in it.
    """
    where = f"at {address}" if address != "auto" else "on this machine (address: auto)"
    try:
        if ray.is_initialized():
            head = str(ray.get_runtime_context().gcs_address)
        else:
            head = _found_address() if address == "auto" else address
        reason = silence(head, _ANSWER_SECONDS)
    except OSError:  # where there is no cluster, Ray raises a ConnectionError
        head, reason = "", "none is running"
    if reason:
        at = f"{head}: " if address == "auto" and head else ""
        raise DeviceError(f"launcher.ray: no Ray cluster {where} ({at}{reason}); {_ADVICE}")
    if ray.is_initialized():
        return False
    try:
        with _own_handlers():
            # Not the address that was found: for "auto" alone Ray sees whether the cluster wants a token.
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, namespace=namespace)
    except (RayError, OSError, RuntimeError, ValueError, AssertionError, SystemExit) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise DeviceError(
            f"launcher.ray: the Ray cluster {where} cannot be used from here ({first_line}); this machine must be "
            f"a node of it (ray start --address={head}), with the same versions of Ray and Python"
        ) from error
    # Ray would print lines about workers that died among those of this program: there is no public switch for it.
    with contextlib.suppress(Exception):
        worker: Any = importlib.import_module("ray._private.worker")
        worker._worker_logs_enabled = False
    return True


def silence(address: str, seconds: float) -> str:
    """Return why no cluster's head answers at an address within so long; empty where one may.

    Ray itself would wait half a minute and more and print lines of its own; for a stopped head it waits forever.
    """
    host, _, port = address.rpartition(":")
    frame = b""
    try:
        with socket.create_connection((host.strip("[]"), int(port)), seconds) as connection:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return ""
            connection.sendall(_GREETING)
            while len(frame) <= _TYPE_AT:
                received = connection.recv(_TYPE_AT + 1)
                if not received:
                    break
                frame += received
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or "no answer"
    return "" if frame[_TYPE_AT:] == bytes((_SETTINGS_TYPE,)) else "what answers there is not Ray"


def has_raylet_ended() -> bool:
    """Return whether the raylet that connects this process to the cluster has ended.

    Nothing listens at its socket then.
    """
    try:
        worker: Any = importlib.import_module("ray._private.worker")
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(worker.global_worker.node.raylet_socket_name))
    except (ConnectionRefusedError, FileNotFoundError):
        return True
    except (AttributeError, OSError):  # another release of Ray may name it otherwise: not known
        return False
    return False


def _found_address() -> str:
    """Return the address of this machine's cluster; raises ConnectionError where there is none."""
    # After a power cut Ray finds the cluster that was, and there is no public way to ask which.
    services: Any = importlib.import_module("ray._private.services")
    return str(services.get_ray_address_from_environment("auto", None))


@contextlib.contextmanager
def _own_handlers() -> Iterator[None]:
    """Keep this process's handler of SIGTERM: Ray sets one that ends it with another exit code."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGTERM, handler)
