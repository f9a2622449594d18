"""Where a model's layers lie: what accelerate is asked for, what it made of it, where a batch must go."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from ensemble.members.huggingface.loading.quantization import is_bitsandbytes
from ensemble.members.huggingface.spec import ModelSpec


def placement_options(spec: ModelSpec, on_gpu: bool) -> dict[str, Any]:
    """What ``from_pretrained`` is told of devices.

    Args:
        on_gpu: whether the lease holds a GPU that torch can use.
    """
    options: dict[str, Any] = {}
    device_map: Any = spec.device_map
    sizes = {
        "cpu" if name == "cpu" else int(name): size
        for name, size in (spec.max_memory or {}).items()
        if on_gpu or name == "cpu"
    }
    if sizes:  # to accelerate an empty one means that nothing fits anywhere
        options["max_memory"] = sizes
    if spec.offload_folder is not None:
        options["offload_folder"] = spec.offload_folder
    if device_map is None and (options or spec.gpus > 1):
        device_map = "auto"
    elif device_map is None and on_gpu:
        device_map = {"": 0}
    elif device_map is None and is_bitsandbytes(spec.quantization_config):
        device_map = {"": "cpu"}
    if device_map is not None:
        options["device_map"] = device_map
    return options


def check_placement(model: Any, spec: ModelSpec, on_gpu: bool, notes: list[str]) -> None:
    """Hold accelerate's device map against what was asked for; a note says what lies where.

    Raises:
        ValueError: layers lie on the CPU or on disk although nobody asked for that: each batch would wait for
            them to be copied; or nothing would bring them back from the disk.
    """
    if not getattr(model, "hf_device_map", None) and any(one.is_meta for one in model.parameters()):
        # Releases of transformers before 5.23 dispatch only what lies in two places and more.
        raise ValueError(
            f"{spec.model_name_or_path}: this release of transformers cannot keep a whole model on the disk; let "
            "some of it stay in memory (max_memory.cpu)"
        )
    counts = Counter(str(device) for device in (getattr(model, "hf_device_map", None) or {}).values())
    may_use_cpu = not on_gpu or spec.offload_folder is not None or "cpu" in (spec.max_memory or {})
    stray = (0 if may_use_cpu else counts["cpu"]) + (0 if spec.offload_folder is not None else counts["disk"])
    if stray and not isinstance(spec.device_map, dict):
        place = (
            f"the {spec.gpus} GPU(s) of its lease" if on_gpu else "the CPU memory it may use (max_memory.cpu)"
        )
        raise ValueError(
            f"{spec.model_name_or_path} does not fit into {place}: {stray} of its {counts.total()} blocks are left "
            "over; quantize it, give it more (num_gpus, max_memory), or ask for offload, which is slow: max_memory "
            "with cpu for the CPU's memory, offload_folder for the disk"
        )
    if len(counts) > 1 or counts["disk"]:
        blocks = ", ".join(f"{count} on {_place(device)}" for device, count in counts.items())
        notes.append(f"blocks of the model by place: {blocks}")


def input_device(model: Any) -> torch.device:
    """Where a batch must be: the embedding's device, or the one to which its offloaded weights are brought."""
    return _device_of(model.get_input_embeddings())


def last_device(model: Any) -> torch.device:
    """Where a forward pass ends: the device of the module that holds the last of the weights, such as the head."""
    last = [module for module in model.modules() if next(module.parameters(recurse=False), None) is not None][
        -1
    ]
    return _device_of(last)


def _device_of(module: Any) -> torch.device:
    device = next(module.parameters()).device
    if device.type == "meta":
        for part in module.modules():
            hook = getattr(part, "_hf_hook", None)
            for one in getattr(hook, "hooks", (hook,)):
                if (place := getattr(one, "execution_device", None)) is not None:
                    return torch.device(place)
    assert isinstance(device, torch.device)
    return device


def _place(device: str) -> str:
    return (
        f"GPU {device}" if device.isdecimal() else {"cpu": "the CPU", "disk": "the disk"}.get(device, device)
    )
