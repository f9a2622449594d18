"""The settings of torch's CUDA allocator, which must be in a worker's environment before it imports torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

# Both, and both alike.  torch 2.8 introduced the second, which 2.9's CUDA allocator ignores (pytorch issue 183387)
# and every release from 2.8 on asks for; with it set, those that call the first one deprecated are quiet.
_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_OPTION = re.compile(r"(?:\[[^\]]*\]|[^,])+")  # commas within brackets belong to the value


def allocator_environment(
    expandable_segments: bool, max_split_size_mb: int | None, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """What sets the allocator of a worker with GPUs; options of the user's own environment go before the config's.

    The options are those of "Optimizing memory usage" in PyTorch's "CUDA semantics".  The worker compares what
    the allocator made of them with what the config asks for.

    Args:
        environ: where the user's own options are read; None: this process's environment.
    """
    environ = os.environ if environ is None else environ
    users: dict[str, str] = {}
    for variable in _VARIABLES:
        options = (option.partition(":") for option in _OPTION.findall(environ.get(variable, "")))
        users |= {name.strip(): value.strip() for name, _, value in options if name.strip()}
    wanted = {"expandable_segments": str(expandable_segments)}
    if max_split_size_mb is not None:
        wanted["max_split_size_mb"] = str(max_split_size_mb)
    if users.get("backend", "native") != "native":
        wanted = {}  # they are the native allocator's, and another one warns of them
    text = ",".join(f"{name}:{value}" for name, value in {**wanted, **users}.items())
    return dict.fromkeys(_VARIABLES, text)
