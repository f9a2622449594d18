"""Test whether torch works on the one device that this process can see.

Standard output gets one line of JSON; what libraries print goes to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ensemble.common.python_process import die_with_parent
from ensemble.common.text import first_line

if TYPE_CHECKING:
    import torch

_SIZE = 256
# The largest error of a product, relative to its largest number: a few roundings of results with 24, 11 and 8 bits;
# GPUs may also add up half precision in half precision.
_TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m ensemble.worker.probe")
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--on-gpu", action="store_true")
    parser.add_argument("--allocate-bytes", type=int, required=True)
    parser.add_argument("--seconds", type=int, required=True)
    parser.add_argument("--import", dest="imports", action="append", default=[])
    parser.add_argument("--flash-attention", action="store_true")
    arguments = parser.parse_args()
    die_with_parent(arguments.parent_pid)
    # The parent ends this process in time; the alarm is for systems without a signal that the parent is gone.
    signal.alarm(arguments.seconds)
    line_fd = os.dup(1)
    os.dup2(2, 1)
    report = probe(arguments.on_gpu, arguments.allocate_bytes, arguments.imports)
    if arguments.flash_attention:
        with _trying("run flash-attention 2", report["errors"]):
            report["has_flash_attention"] = has_flash_attention()
    os.write(line_fd, f"{json.dumps(report)}\n".encode())
    sys.stderr.flush()
    os._exit(0)  # as workers do: with a CUDA context, the interpreter's teardown can hang


def probe(on_gpu: bool, allocate_bytes: int, imports: list[str]) -> dict[str, Any]:
    """Try torch on the first GPU or the CPU, then import modules; on a GPU allocate at most half of what is free.

    Returns:
        facts, the dtypes that ``passed``, and ``errors`` by what was tried.
    """
    errors: dict[str, str] = {}
    report: dict[str, Any] = {"errors": errors, "passed": []}
    with _trying("import torch", errors):
        import torch

        report["torch"] = torch.__version__
        report["cuda"] = torch.version.cuda
        report["sees_gpu"] = torch.cuda.is_available()
        report["architectures"] = torch.cuda.get_arch_list()
    if "torch" not in report:
        return report
    if on_gpu and not report["sees_gpu"]:
        with _trying("start CUDA", errors):
            torch.cuda.init()  # type: ignore[no-untyped-call]  # is_available() swallows the reason
    else:
        device, names = torch.device("cuda" if on_gpu else "cpu"), ["float32"]
        if on_gpu:
            with _trying("ask the GPU", errors):
                report["capability"] = torch.cuda.get_device_capability()
                names.append("float16")
                if report["capability"] >= (8, 0):  # older GPUs emulate bfloat16, and no member uses it there
                    names.append("bfloat16")
                report["free_bytes"] = torch.cuda.mem_get_info()[0]
                allocate_bytes = min(allocate_bytes, report["free_bytes"] // 2)
        with _trying(f"allocate {allocate_bytes >> 20} MiB", errors):
            torch.empty(allocate_bytes, dtype=torch.uint8, device=device).fill_(1)
            torch.cuda.empty_cache()
        for name in names:
            with _trying(f"multiply in {name}", errors):
                error = product_error(getattr(torch, name), device)
                if not error <= _TOLERANCES[name]:  # not ">": NaN is wrong too
                    raise ArithmeticError(f"the product is off by {error:.1e} of its largest number")
                report["passed"].append(name)
    for name in imports:
        with _trying(f"import {name}", errors):
            module = importlib.import_module(name)
            if name == "bitsandbytes" and on_gpu and report["sees_gpu"]:
                with _trying("open the CUDA library of bitsandbytes", errors):
                    library = module.cextension.lib
                    if not library.compiled_with_cuda:
                        reason = getattr(library, "formatted_error", "")  # builds for CPUs have a function
                        raise RuntimeError(
                            reason if isinstance(reason, str) and reason else "a build for CPUs"
                        )
    return report


def product_error(dtype: torch.dtype, device: torch.device) -> float:
    """Return the error of a product of two matrices, relative to its largest number."""
    import torch

    random = torch.Generator().manual_seed(0)
    first, second = (torch.randn(_SIZE, _SIZE, generator=random).to(dtype) for _ in range(2))
    expected = first.double() @ second.double()
    # cuBLAS computes the product; its cast to float64 tests a kernel of torch, which may be built for other GPUs.
    product = (first.to(device) @ second.to(device)).double().cpu()
    return float((product - expected).abs().max() / expected.abs().max())


def has_flash_attention() -> bool:
    """Return whether transformers accepts flash-attention 2, and it computes capped scores right on this GPU.

    An installed package does not prove that: a build for another torch, CUDA or GPU fails when it is used.
    """
    import torch
    from transformers.utils import is_flash_attn_2_available

    if not is_flash_attn_2_available():
        return False
    from flash_attn import flash_attn_func

    cap, scale = 2.0, 0.5
    random = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 32, 2, 64, generator=random).half()  # [batch, tokens, heads, width]
    scores = torch.einsum("bqhd,bkhd->bhqk", query.double(), key.double()) * scale
    scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(torch.ones(32, 32, dtype=torch.bool).triu(1), float("-inf"))
    expected = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), value.double())
    output = flash_attn_func(
        query.cuda(), key.cuda(), value.cuda(), softmax_scale=scale, causal=True, softcap=cap
    )
    return bool((output.double().cpu() - expected).abs().max() < _TOLERANCES["float16"])


@contextlib.contextmanager
def _trying(step: str, errors: dict[str, str]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # any error is a result
        errors[step] = first_line(error)[:300]
