"""What passes free is used by the next ones, without a detour through the kernel."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import os, resource, sys
import torch
from ensemble.common.python_process import keep_freed_memory
# Each in a process of its own; both have the one import of torch.
read, write = os.pipe()
if os.fork() == 0:
    sys.stdout = os.fdopen(write, "w")
    keep_freed_memory()
def passes():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        tensors = [torch.zeros(1 << 24) for _ in range(3)]
        del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
passes()
print(passes(), flush=True)
if sys.stdout.fileno() != write:
    os.wait()
    print(os.read(read, 99).decode())
"""


@pytest.mark.long
def test_nothing_is_given_back_between_passes() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, check=True)
    plain, kept = map(int, done.stdout.split())
    assert kept < 100, "192 MiB, eight times over, in the same pages"
    assert plain > 10 * max(kept, 100), "as it is without: this test can fail"
