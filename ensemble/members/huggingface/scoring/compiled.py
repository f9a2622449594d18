"""torch.compile for the layers of a model: each kind of layer once, and all of it before the first chunk.

A model's layers share their code, so that what is compiled for the first serves all of them, however many there are
("regional compilation").  What it was compiled for is a batch of several rows and tokens, and one of a single row,
because torch makes other code for sizes of 1.  Whatever differs from that runs as it would without: a single token,
passes behind a shared prefix, and float32 after an overflow.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ensemble.common.compiler import why_no_compiler
from ensemble.common.digests import digest_of
from ensemble.common.files import user_cache_folder
from ensemble.common.host import cpu_flags
from ensemble.common.torch_errors import Verdict, classify, is_out_of_memory, one_line
from ensemble.members.huggingface.loading.device_map import align_hooks
from ensemble.members.huggingface.loading.float32_retry import in_float32

# A pass over these rows of a warm-up, float64 [rows, labels].
Passes = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.float64]]


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """A model's layers, by its lists of modules of one class; not those within another layer."""
    found: list[nn.Module] = []
    within: set[nn.Module] = set()
    for module in model.modules():  # from the outside in
        if module in within or not isinstance(module, nn.ModuleList) or len({*map(type, module)}) != 1:
            continue
        found += module
        within.update(part for layer in module for part in layer.modules())
    return found


def compile_layers(
    layers: Sequence[nn.Module],
    passes: Passes,
    batches: Sequence[Sequence[int]],
    tolerance: float,
    device_name: str,
) -> str:
    """Compile layers, and hold what the model computes with them against what it computed before.

    Args:
        layers: of a model on one device.
        passes: runs the model as its chunks will be.
        batches: rows of these passes.  The last has a size that comes up first when all has been compiled.
        tolerance: how far numbers may be off, of the largest of them.
        device_name: "cpu" or a GPU's name.

    Returns:
        why they run as they are, beginning with the key; empty where they are compiled.

    Raises:
        RuntimeError: the process is done for.
    """
    problem = why_no_compiler() if device_name == "cpu" else ""
    if not layers:
        problem = "this model has no layers that can be compiled"
    elif any(align_hooks(part) for layer in layers for part in layer.modules()):
        problem = "its layers are placed by accelerate"
    if problem:
        return f"torch_compile: computed without, as {problem}"
    expected = [passes(np.array(batch)) for batch in batches]
    _set_up_inductor()
    try:
        # `dynamic`: by default the first size is taken for the only one.
        for layer in layers:
            layer.compile(dynamic=True)
        found = [passes(np.array(batch)) for batch in batches[:-1]]
        with torch.compiler.set_stance("fail_on_recompile"):
            found.append(passes(np.array(batches[-1])))
    except Exception as error:  # whatever a compiler has to say
        if classify(error) is Verdict.SUSPECT and not is_out_of_memory(error):
            raise
        problem = f"compiling failed ({type(error).__name__}: {one_line(error)[:160]})"
    else:
        before, after = (np.concatenate(parts) for parts in (expected, found))
        both = np.isfinite(before) & np.isfinite(after)
        off = np.abs(before - after)[both].max(initial=0) / np.abs(before[both]).max(initial=1)
        if off > tolerance:
            problem = f"compiled layers give other numbers (off by {off:.2g} of the largest)"
    # From here on nothing is compiled: in the middle of a chunk that would count as its time.
    torch.compiler.set_stance("force_eager" if problem else "eager_on_recompile")
    return f"torch_compile: computed without, as {problem}" if problem else ""


@contextlib.contextmanager
def float32_without_compiled_layers(model: Any) -> Iterator[None]:
    """``in_float32``, which changes layers in ways that code compiled for them does not look at."""
    with torch.compiler.set_stance("force_eager"), in_float32(model):
        yield


def _set_up_inductor() -> None:
    """Where torch's compiler keeps its code, and how many processes it starts, unless the environment says so.

    Processes of its own would outlive a worker that is killed.  Not all releases see
    that code in their cache was made for another number of threads, none that it was for a CPU with other
    instructions, such as on another node that has the same home.
    """
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    given = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""))
    # Imported already, torch has named a folder of its own there: torchinductor_USER in the temporary one.
    is_own = given == Path() or given.name.startswith("torchinductor_")
    if not is_own or (cache := user_cache_folder()) is None:
        return
    made_for = [torch.__version__, torch.get_num_threads(), *sorted(cpu_flags())]
    folder = cache / "torch-compile" / digest_of(made_for)[:16]
    with contextlib.suppress(OSError):  # such as a home that is read-only: then where torch itself keeps it
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
