"""A test process: how fast a worker with this process's cores and threads computes, whenever it is asked.

Prints a line when it is ready; then, for each number of seconds on standard input, one with how many layers a
second it computed for about as long.  Its lines begin with ``--mark``, since what runs before ``main``, such as a
sitecustomize, may print, too; what libraries print goes to standard error.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time

from ensemble.common.python_process import die_with_parent, keep_freed_memory

# A layer of BERT-base, and a batch as workers on a CPU have it: 2,048 tokens.
_WIDTH, _HEADS, _INNER = 768, 12, 3072
_ROWS, _TOKENS = 16, 128
# In turn, as in a model: together more than a CPU keeps close.
_LAYERS = 4


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m ensemble.worker.cpu_speed")
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--seconds", type=int, required=True)
    parser.add_argument("--mark", required=True)
    arguments = parser.parse_args()
    die_with_parent(arguments.parent_pid)
    signal.alarm(arguments.seconds)
    line_fd = os.dup(1)
    os.dup2(2, 1)
    import torch

    layers = [
        torch.nn.TransformerEncoderLayer(_WIDTH, _HEADS, _INNER, activation="gelu", batch_first=True).eval()
        for _ in range(_LAYERS)
    ]
    keep_freed_memory()  # as workers do
    tokens = torch.randn(_ROWS, _TOKENS, _WIDTH)
    with torch.inference_mode():
        layers[0](tokens)  # the first one is slower
        os.write(line_fd, f"{arguments.mark} ready\n".encode())
        for line in sys.stdin:
            seconds, began, took, count = float(line), time.perf_counter(), 0.0, 0
            while took < seconds or not count:
                layers[count % _LAYERS](tokens)
                count, took = count + 1, time.perf_counter() - began
            os.write(line_fd, f"{arguments.mark} {count / took}\n".encode())
    os._exit(0)
