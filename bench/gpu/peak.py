"""What a device's matrix products reach at best: ``python -m bench.gpu.peak``, in a process of its own.

The measure for everything else: no forward pass can be faster than the device multiplies large matrices.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

# Large enough for the peak; several, because which one is the fastest depends on the device.
_SIZES = (4096, 8192, 12_288)
_TINY_SIZES = (256,)
_SECONDS_PER_SIZE = 1.5


def half_precision(on_gpu: bool) -> Any:
    """Return torch's bfloat16, or float16 where the GPU only emulates bfloat16; float32 on a CPU, its fastest."""
    import torch

    if not on_gpu:
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float16


def main() -> None:
    """Prints the device, the type of numbers and the best floating-point operations a second, as JSON."""
    import torch

    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    dtype = half_precision(on_gpu)
    best = 0.0
    for size in _SIZES if on_gpu else _TINY_SIZES:
        one = torch.randn(size, size, device=device, dtype=dtype)
        other = torch.randn(size, size, device=device, dtype=dtype)
        for _ in range(3):
            torch.mm(one, other)
        _wait(on_gpu)
        began, products = time.perf_counter(), 0
        while time.perf_counter() - began < (_SECONDS_PER_SIZE if on_gpu else 0.05):
            for _ in range(10):
                torch.mm(one, other)
            products += 10
            _wait(on_gpu)
        best = max(best, 2 * size**3 * products / (time.perf_counter() - began))
    name = torch.cuda.get_device_name() if on_gpu else "cpu"
    found = {"device": name, "dtype": str(dtype).removeprefix("torch."), "flops_per_second": best}
    sys.stdout.write(json.dumps(found) + "\n")


def _wait(on_gpu: bool) -> None:
    import torch

    if on_gpu:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
