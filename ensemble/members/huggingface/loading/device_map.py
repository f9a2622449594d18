"""Place a model's layers: options for accelerate, a check of its placement, the devices of a batch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ensemble.members.huggingface.checkpoint.quantization_methods import BITSANDBYTES, method_of
from ensemble.members.huggingface.spec import CheckpointSpec


def placement_options(spec: CheckpointSpec, on_gpu: bool) -> dict[str, Any]:
    """Return the options of ``from_pretrained`` that concern devices."""
    sizes = {
        "cpu" if name == "cpu" else int(name): size
        for name, size in (spec.max_memory or {}).items()
        if on_gpu or name == "cpu"
    }
    device_map: Any = spec.device_map
    if device_map is None:
        if sizes or spec.offload_folder is not None or spec.gpus > 1:
            device_map = "auto"
        elif on_gpu or method_of(spec.quantization_config) == BITSANDBYTES:
            device_map = {"": 0 if on_gpu else "cpu"}
    # An empty max_memory would mean to accelerate that nothing fits anywhere.
    options = {"max_memory": sizes, "offload_folder": spec.offload_folder, "device_map": device_map}
    return {key: value for key, value in options.items() if value not in (None, {})}


def check_placement(model: Any, spec: CheckpointSpec, on_gpu: bool, notes: list[str]) -> None:
    """Refuse layers on the CPU or on disk that nobody asked for; a note says how many blocks are on each device."""
    device_map = getattr(model, "hf_device_map", None) or {}
    if not device_map and any(parameter.is_meta for parameter in model.parameters()):
        # Releases of transformers before 5.23 dispatch only what lies in two places and more.
        raise ValueError(
            f"{spec.model_name_or_path}: this release of transformers cannot keep a whole model on the disk; let "
            "some of it stay in memory (max_memory.cpu)"
        )
    counts = Counter(map(str, device_map.values()))
    may_use_cpu = not on_gpu or spec.offload_folder is not None or "cpu" in (spec.max_memory or {})
    stray = (0 if may_use_cpu else counts["cpu"]) + (0 if spec.offload_folder is not None else counts["disk"])
    if stray and not isinstance(spec.device_map, dict):
        memory = f"its {spec.gpus} GPU(s)" if on_gpu else "the CPU memory it may use (max_memory.cpu)"
        raise ValueError(
            f"{spec.model_name_or_path} does not fit into {memory}: {stray} of its {counts.total()} blocks are "
            "left over; quantize it, give it more (num_gpus, max_memory), or ask for offload, which is slow: "
            "max_memory with cpu for the CPU's memory, offload_folder for the disk"
        )
    if len(counts) > 1 or counts["disk"]:
        names = {"cpu": "the CPU", "disk": "the disk"}
        blocks = ", ".join(
            f"{count} on {names.get(device, f'GPU {device}' if device.isdecimal() else device)}"
            for device, count in counts.items()
        )
        notes.append(f"blocks of the model by place: {blocks}")


def input_device(model: Any) -> torch.device:
    """Return the device of the module that reads a batch, or the one to which its offloaded weights are brought."""
    if getattr(model, "main_input_name", "input_ids") == "input_ids":
        return _device_of(model.get_input_embeddings())
    return _device_of(_modules_with_weights(model)[0])


def last_device(model: Any) -> torch.device:
    """Return the device on which a forward pass ends: that of the last weights, such as the head's."""
    return _device_of(_modules_with_weights(model)[-1])


def on_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy an array to a device; to a GPU from pinned memory, so that the host does not wait."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _modules_with_weights(model: Any) -> list[Any]:
    return [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]


def align_hooks(module: Any) -> list[Any]:
    """Return accelerate's hooks that bring a module's weights and inputs to its device (AlignDevicesHook)."""
    module_hook = getattr(module, "_hf_hook", None)
    hooks = getattr(module_hook, "hooks", (module_hook,))
    return [hook for hook in hooks if hasattr(hook, "execution_device")]


def execution_device(module: Any) -> torch.device | None:
    """Return the device on which accelerate lets a module compute; None if it does not say."""
    for hook in align_hooks(module):
        if hook.execution_device is not None:
            return torch.device(hook.execution_device)
    return None


def _device_of(module: Any) -> torch.device:
    device = next(module.parameters()).device
    if device.type == "meta":
        devices = [execution_device(part) for part in module.modules()]
        device = next((device for device in devices if device is not None), device)
    assert isinstance(device, torch.device)
    return device
