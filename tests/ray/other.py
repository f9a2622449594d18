"""Another job of a cluster, which holds GPUs of a node: says which, by number there, and ends with its input."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import ray


class Other:
    def sees(self) -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]


def main() -> None:
    address, node, gpus = sys.argv[1:]
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    actor: Any = ray.remote(Other)
    held = actor.options(num_gpus=float(gpus), num_cpus=0, resources={node: 0.001}).remote()
    sys.stdout.write(ray.get(held.sees.remote()) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
