"""What passes free is used by the next ones, without a detour through the kernel."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import resource, sys
import torch
if sys.argv[1] == "kept":
    from ensemble.members.huggingface.loading.load import keep_freed_memory
    keep_freed_memory()
def passes():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        tensors = [torch.zeros(1 << 24) for _ in range(3)]
        del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
passes()
print(passes())
"""


def test_nothing_is_given_back_between_passes() -> None:
    found = {
        kind: int(
            subprocess.run([sys.executable, "-c", SCRIPT, kind], capture_output=True, check=True).stdout
        )
        for kind in ("kept", "plain")
    }
    assert found["kept"] < 100, "192 MiB, eight times over, in the same pages"
    assert found["plain"] > 10 * max(found["kept"], 100), "as it is without: this test can fail"
