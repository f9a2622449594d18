"""torch.compile for the layers of a model: each kind of layer once, and all of it before the first chunk.

A model's layers share their code, so that what is compiled for the first serves all of them, however many there are
("regional compilation").  What it was compiled for is a batch of several rows and tokens, and one of a single row,
because torch makes other code for sizes of 1.  Whatever differs from that runs as it would without: a single token,
passes behind a shared prefix, and float32 after an overflow.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ensemble.common.compiler import CODE_FOLDER, named_code_folder, why_no_compiler
from ensemble.common.digests import digest_of
from ensemble.common.files import user_cache_folder
from ensemble.common.host import cpu_flags
from ensemble.common.torch_errors import Verdict, classify, is_out_of_memory, one_line
from ensemble.members.huggingface.loading.device_map import align_hooks
from ensemble.members.huggingface.loading.float32_retry import in_float32

# A pass over these rows of a warm-up, float64 [rows, labels].
Passes = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.float64]]

_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"


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
        batches: rows of these passes.  The last two are held to need nothing that is not compiled by then.
        tolerance: how far numbers may be off, of the largest of them.
        device_name: "cpu" or a GPU's name.

    Returns:
        why they run as they are, beginning with the key; empty where they are compiled.

    Raises:
        RuntimeError, MemoryError: the process is done for.
    """
    on_cpu = device_name == "cpu"
    problem = why_no_compiler() if on_cpu else ""
    if not layers:
        problem = "this model has no layers that can be compiled"
    elif any(align_hooks(part) for layer in layers for part in layer.modules()):
        problem = "its layers are placed by accelerate"
    if problem := problem or _set_up_inductor():
        return f"torch_compile: computed without, as {problem}"
    from torch._dynamo import config
    from torch._dynamo.utils import counters

    # Whatever fails is to be told, and not to run as it is in silence; nor what has more forms than torch allows.
    strict = {"recompile_limit": 64, "fail_on_recompile_limit_hit": True, "suppress_errors": False}
    graphs = counters["stats"]["unique_graphs"]
    try:
        expected = [passes(np.array(batch)) for batch in batches]
        # `dynamic`: by default the first size is taken for the only one.
        for layer in layers:
            layer.compile(dynamic=True)
        with config.patch({key: value for key, value in strict.items() if hasattr(config, key)}):
            found = [passes(np.array(batch)) for batch in batches[:-2]]
            with torch.compiler.set_stance("fail_on_recompile"):
                found += [passes(np.array(batch)) for batch in batches[-2:]]
    except Exception as error:  # whatever a compiler has to say
        if classify(error) is Verdict.SUSPECT and not is_out_of_memory(error):
            if on_cpu:
                raise
            torch.cuda.synchronize()  # fails where the device is done for, and not only this code
        problem = f"compiling failed ({type(error).__name__}: {one_line(error)[:160]}); if it stays so, "
        problem += f"remove {os.environ[CODE_FOLDER]}"
    else:
        before, after = (np.concatenate(parts) for parts in (expected, found))
        both = np.isfinite(before) & np.isfinite(after)
        off = np.abs(before - after)[both].max(initial=0) / np.abs(before[both]).max(initial=1)
        if counters["stats"]["unique_graphs"] == graphs:
            problem = "torch compiled nothing of it, and its log may say why"
        elif (np.isfinite(before) & ~both).any():
            problem = "compiled layers give no numbers where there were some"
        elif off > tolerance:
            problem = f"compiled layers give other numbers (off by {off:.2g} of the largest)"
    if problem and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    # From here on nothing is compiled: in the middle of a chunk that would count as its time.
    torch.compiler.set_stance("force_eager" if problem else "eager_on_recompile")
    return f"torch_compile: computed without, as {problem}" if problem else ""


@contextlib.contextmanager
def float32_without_compiled_layers(model: Any) -> Iterator[None]:
    """``in_float32``, which changes layers in ways that code compiled for them does not look at."""
    with torch.compiler.set_stance("force_eager"), in_float32(model):
        yield


def compile_in_this_process() -> None:
    """Unless the environment says otherwise: processes that torch starts, some releases when their compiler is
    imported, would outlive a worker that is killed."""
    os.environ.setdefault(_THREADS, "1")


def _set_up_inductor() -> str:
    """Tell torch where to keep its code, unless the environment does, and not to start processes.

    Not all releases see that code in their cache was made for another number of threads, none that it was for a CPU
    with other instructions, such as on another node that has the same home.  Nor does torch look whose the code is
    that it loads, so that it must be this user's.

    Returns:
        why there is no place for the code, in a clause; empty where there is one.
    """
    if named_code_folder() is None:
        if (cache := user_cache_folder()) is None:
            return f"there is no place for its code; name a folder in {CODE_FOLDER}"
        made_for = [torch.__version__, torch.get_num_threads(), *sorted(cpu_flags())]
        folder = cache / "torch-compile" / digest_of(made_for)[:16]
        with contextlib.suppress(OSError):  # such as a home that is read-only
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_of_this_user_alone(folder):
            return f"{folder} is not this user's alone to write; name a folder in {CODE_FOLDER}"
        os.environ[CODE_FOLDER] = str(folder)
    from torch._inductor import config

    compile_in_this_process()
    config.compile_threads = int(os.environ[_THREADS])  # which it may have looked at before
    return ""


def _is_of_this_user_alone(folder: Path) -> bool:
    """Whether nobody else can write to a folder, or put another in its place.

    A folder above may be open to the user's own group, which on many systems is the user alone.
    """
    try:
        folder = folder.resolve(strict=True)
        own, *above = (path.stat() for path in (folder, *folder.parents))
    except OSError:
        return False
    if own.st_mode & _OTHERS or any(one.st_uid != os.geteuid() for one in (own, *above[:2])):
        return False
    for one in above:
        others = stat.S_IWOTH if one.st_gid == os.getegid() else _OTHERS
        if one.st_mode & others and not one.st_mode & stat.S_ISVTX:
            return False
    return os.access(folder, os.W_OK)
