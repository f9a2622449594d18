"""Average LoRA adapters of one base, or whole checkpoints, so that one pass takes the place of several.

peft's ``add_weighted_adapter`` does the same to loaded adapters, but refuses those with heads of their own.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.nn.functional import pad

from ensemble.members.huggingface.checkpoint.adapter_files import WEIGHTS, average_problems, inspect_adapter
from ensemble.members.huggingface.checkpoint.weight_files import loaded_files
from ensemble.members.huggingface.loading.adapter import PREFIX, AdapterFiles

# A layer's second matrix, by the first.
_SECOND = {"lora_A": "lora_B", "lora_embedding_A": "lora_embedding_B"}
# A layer's matrices A, [rank, inputs], and B, [outputs, rank], and the factor of B A x.
_Layer: TypeAlias = tuple[torch.Tensor, torch.Tensor, float]


class _MeanSlice:
    """Stand for the mean of tensors, which transformers reads by ``[...]`` as it does slices of safetensors."""

    def __init__(self, slices: Sequence[Any]) -> None:
        self._slices = slices

    def get_dtype(self) -> str:
        stored = str(self._slices[0].get_dtype())
        return "F32" if stored in ("F64", "F32", "F16", "BF16") else stored

    def __getitem__(self, index: Any) -> torch.Tensor:
        part: torch.Tensor = self._slices[0][index]
        if self.get_dtype() != "F32":
            return part  # whole numbers, such as positions, have no mean
        total = part.to(torch.float32, copy=True)  # what is sliced may be the mapped file itself
        for other in self._slices[1:]:
            total += other[index]
        return total.div_(len(self._slices))


def average_checkpoints(folders: Sequence[str]) -> dict[str, Any]:
    """Return the mean of checkpoints as a ``state_dict`` for ``from_pretrained``, which reads it by tensors."""
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # by several threads, many means would live at a time
    by_folder = []
    for folder in folders:
        files: list[Any] = [safe_open(path, framework="pt") for path in loaded_files(Path(folder))]
        by_folder.append({name: file.get_slice(name) for file in files for name in file.keys()})  # noqa: SIM118
    return {name: _MeanSlice([slices[name] for slices in by_folder]) for name in by_folder[0]}


def average_adapters(title: str, adapters: Sequence[AdapterFiles], combination_type: str) -> AdapterFiles:
    """Return the mean of adapters as one adapter in memory, with the mean of modules that were trained as a whole.

    A layer adds s B A x, with its adapter's scaling s.  With "cat" the new layer adds the mean of this over all K
    adapters: [B1 ... BK] times the rows s1 A1 / K ... sK AK.  With "linear" it adds the product of the means of
    sqrt(s) B and sqrt(s) A, as peft's "linear" does with weights of 1 / K**2.  An adapter without the layer counts
    as zero.

    Args:
        title: the new adapter's name in sentences.

    Raises:
        ValueError: they have no mean.
    """
    contents = [_read(adapter) for adapter in adapters]
    inspected = [replace(inspect_adapter(str(adapter.folder)), name=adapter.title) for adapter in adapters]
    problems = [*average_problems(inspected, combination_type)]
    if problems:
        raise ValueError("; ".join(problems))
    tensors: dict[str, torch.Tensor] = {}
    layers: dict[str, tuple[str, str]] = {}
    for name in dict.fromkeys(name for content in contents for name in content):
        module, _, matrix = name.removesuffix(".weight").rpartition(".")
        if matrix in _SECOND:
            second = f"{module}.{_SECOND[matrix]}{name.removeprefix(f'{module}.{matrix}')}"
            parts = [
                (content[name], content[second], _scaling(adapter.config, module, len(content[name])))
                for adapter, content in zip(adapters, contents, strict=True)
                if name in content
            ]
            tensors[name], tensors[second] = _mean_layer(parts, len(adapters), combination_type)
            layers[module.removeprefix(PREFIX)] = (name, second)
        elif ".lora_" not in name:
            tensors[name] = torch.stack([content[name] for content in contents]).mean(0)
    if not layers:
        raise ValueError("adapters.average: none of the adapters has a LoRA layer; nothing can be averaged")
    rank = max(len(tensors[name]) for name, _ in layers.values())
    for name, second in layers.values():
        missing = rank - len(tensors[name])
        tensors[name] = pad(tensors[name], (0, 0, 0, missing)).contiguous()
        tensors[second] = pad(tensors[second], (0, missing)).contiguous()
    config = _config(adapters[0].config, rank, [*layers])
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return AdapterFiles(title, adapters[0].folder, config, shapes, tensors)


def _read(adapter: AdapterFiles) -> dict[str, torch.Tensor]:
    """Return an adapter's tensors in float32."""
    path = adapter.folder / WEIGHTS
    if not path.is_file():
        raise ValueError(f"adapters.average: {adapter.title} has no {WEIGHTS}; save it again as safetensors")
    return {name: tensor.float() for name, tensor in load_file(path).items()}


def _mean_layer(
    parts: Sequence[_Layer], adapters: int, combination_type: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A and B of the mean layer, whose scaling is 1; ``adapters`` counts those without the layer, too."""
    if combination_type == "cat":
        matrix_a = torch.cat([a * (scaling / adapters) for a, _, scaling in parts], dim=0)
        return matrix_a, torch.cat([b for _, b, _ in parts], dim=1)
    matrix_a = torch.stack([a * (math.sqrt(scaling) / adapters) for a, _, scaling in parts]).sum(0)
    return matrix_a, torch.stack([b * (math.sqrt(scaling) / adapters) for _, b, scaling in parts]).sum(0)


def _scaling(config: Any, module: str, rank: int) -> float:
    """Return the factor of a layer's product, as peft's LoraLayer.update_layer sets it."""
    from peft.utils.other import get_pattern_key

    patterns = config.alpha_pattern or {}
    alpha = float(patterns.get(get_pattern_key([*patterns], module.removeprefix(PREFIX)), config.lora_alpha))
    return alpha / math.sqrt(rank) if config.use_rslora else alpha / rank


def _config(first: Any, rank: int, modules: list[str]) -> Any:
    """Return the config of an adapter whose layers, of these modules, have a scaling of 1."""
    from peft import LoraConfig

    return LoraConfig(
        r=rank,
        lora_alpha=rank,
        use_rslora=False,
        bias="none",
        target_modules=modules,
        modules_to_save=first.modules_to_save,
        fan_in_fan_out=first.fan_in_fan_out,
        task_type=first.task_type,
        base_model_name_or_path=first.base_model_name_or_path,
        inference_mode=True,
    )
