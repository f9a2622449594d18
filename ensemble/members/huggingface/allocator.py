"""Set torch's CUDA allocator by environment variables, which a worker needs before it imports torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

# Both are set to the same value.  From 2.8 on torch has the second and warns if only the first is set, but 2.9's
# CUDA allocator ignores the second (pytorch issue 183387).
_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_OPTION = re.compile(r"(?:\[[^\]]*\]|[^,])+")  # commas within brackets belong to the value


def allocator_environment(
    expandable_segments: bool, max_split_size_mb: int | None, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the variables that set the allocator of a worker with GPUs.

    Options in the user's environment take precedence over the config's.  PyTorch's "CUDA semantics" documents them
    ("Optimizing memory usage").  The worker compares the allocator's settings with the config's.

    Args:
        environ: the environment with the user's options; None: this process's.
    """
    environ = os.environ if environ is None else environ
    user_options: dict[str, str] = {}
    for variable in _VARIABLES:
        options = (option.partition(":") for option in _OPTION.findall(environ.get(variable, "")))
        user_options |= {name.strip(): value.strip() for name, _, value in options if name.strip()}
    config_options = {"expandable_segments": str(expandable_segments)}
    if max_split_size_mb is not None:
        config_options["max_split_size_mb"] = str(max_split_size_mb)
    if user_options.get("backend", "native") != "native":
        config_options = {}  # other allocators than the native one warn about these options
    text = ",".join(f"{name}:{value}" for name, value in {**config_options, **user_options}.items())
    return dict.fromkeys(_VARIABLES, text)
