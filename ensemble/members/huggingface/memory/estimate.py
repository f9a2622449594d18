"""Estimate a replica's memory on a device from the files of its checkpoint; no weights are loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ensemble.common.files import read_json
from ensemble.common.packages import Requirement, installed_versions
from ensemble.members.footprint import Capability, Footprint, MemoryEstimate
from ensemble.members.huggingface.checkpoint.adapter_files import widest_lora
from ensemble.members.huggingface.checkpoint.architecture import Architecture, read_architecture
from ensemble.members.huggingface.checkpoint.inspect import Checkpoint
from ensemble.members.huggingface.checkpoint.quantization_methods import capability_problem
from ensemble.members.huggingface.checkpoint.tokenizer_files import own_max_length
from ensemble.members.huggingface.checkpoint.weight_files import Tensor, loaded_files, read_tensors
from ensemble.members.huggingface.memory.sizes import Dtype, activation, cuda_context_bytes, weights
from ensemble.members.huggingface.settings import HuggingFaceSettings, TextSettings
from ensemble.members.huggingface.spec import (
    DEFAULT_MAX_LENGTH,
    AdapterSource,
    cap_problem,
    choose_attention,
    choose_compute_dtype,
    choose_dtype,
)

# What a process with torch and transformers takes on a CPU before it loads weights.
PROCESS_BYTES = 450 << 20
# What torch's compiler takes there in addition: 0.54 GiB instead of 0.37 (docs/tuning.md).
COMPILER_BYTES = 180 << 20
# The torch whose fused attention on a CPU needs no copies of keys that heads share (pytorch pull request 157893);
# older ones fall back to plain products, which take as much as eager attention.
_TORCH_WITH_SHARED_KEYS = Requirement("torch", minimum="2.9")
# The quantization to propose where the weights are too large for every GPU.
_FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


@dataclass(frozen=True)
class CheckpointMemory(MemoryEstimate):
    """Estimate a member's memory from the files of its checkpoint and from its rows.

    Attributes:
        lengths: bytes of text per row, int64 [rows].
        tensors, architecture: None where they are not known yet (on the hub, pickled).
        adapter_bytes: of the adapter's file.
        lora: outputs and rank of the widest layer with unmerged LoRA; zeros: none.
        pools_last_token: False where logits are computed at every position.
        has_flash_attention: whether flash-attention 2 was seen to work on these devices.
        vocabulary_positions, shared_tokens, keeps_prompts: see ``sizes.activation``.
        head: tensors of a separate head, which is computed in float32; None: the checkpoint has the head.
    """

    settings: HuggingFaceSettings
    lengths: npt.NDArray[np.int64]
    num_labels: int
    tensors: tuple[Tensor, ...] | None
    architecture: Architecture | None
    max_length: int
    adapter_bytes: int = 0
    lora: tuple[int, int] = (0, 0)
    pools_last_token: bool = True
    has_flash_attention: bool = False
    vocabulary_positions: int = 0
    shared_tokens: int = 0
    keeps_prompts: bool = False
    head: Sequence[Tensor] | None = None

    def footprint(
        self, gpus: int, capability: Capability | None, quantization: Mapping[str, Any] | None = None
    ) -> Footprint | None:
        """Return a replica's memory; ``quantization`` replaces the member's own."""
        tensors, architecture = self.tensors, self.architecture
        if tensors is None or architecture is None:
            return None
        stored = self._stored_dtype() or "float32"
        dtype = cast(Dtype, choose_dtype(self.settings.dtype, stored, gpus, capability))
        settings = quantization or self.settings.quantization_config
        if settings is not None and settings.get("load_in_4bit"):
            settings = {"bnb_4bit_compute_dtype": dtype, **settings}  # as the worker sets it
        stored_settings = architecture.quantization
        compute_dtype = choose_compute_dtype(stored_settings, capability if gpus else None, dtype)
        if compute_dtype is not None:
            stored_settings = {**(stored_settings or {}), "bnb_4bit_compute_dtype": compute_dtype}
            architecture = replace(architecture, quantization=stored_settings)
        attention = self.attention(dtype, gpus, capability)
        loaded = weights(
            tensors,
            architecture,
            dtype,
            settings,
            self.num_labels,
            is_adapter_base=self.adapter_bytes > 0,
            is_language_model=self.vocabulary_positions > 0,
            head=self.head,
        )
        loaded = replace(loaded, bytes=loaded.bytes + self.adapter_bytes)
        computed_by = attention or "sdpa"
        if computed_by == "sdpa" and not gpus and architecture.kv_heads < architecture.heads:
            torch_version = installed_versions(["torch"]).get("torch")
            if torch_version is not None and _TORCH_WITH_SHARED_KEYS.wrong(torch_version):
                computed_by = "eager"
        # A token is at least a byte; templates and special tokens add some.
        width = min(self.max_length, int(self.lengths.max(initial=1)) + 64)
        process_bytes = PROCESS_BYTES + (COMPILER_BYTES if self.settings.torch_compile else 0)
        stored_bytes = sum(tensor.stored_bytes for tensor in tensors)
        # Weights that are loaded in the stored type are the mapped file itself and count only once.
        is_mapped = abs(stored_bytes - loaded.bytes) < 0.02 * stored_bytes
        return Footprint(
            weights=loaded,
            activation=activation(
                architecture,
                dtype,
                computed_by,
                self.num_labels,
                settings,
                on_gpu=gpus > 0,
                pools_last_token=self.pools_last_token,
                vocabulary_positions=self.vocabulary_positions,
                shared_tokens=self.shared_tokens,
                keeps_prompts=self.keeps_prompts,
                width=width,
                lora=self.lora,
            ),
            context_bytes=cuda_context_bytes(capability) if gpus else process_bytes,
            mapped_bytes=0 if is_mapped else stored_bytes,
            dtype=dtype,
            quantization=_quantization_name(settings, architecture),
            attention=attention,
            width=width,
        )

    def dtype(self, gpus: int, capability: Capability | None) -> str:
        return choose_dtype(self.settings.dtype, self._stored_dtype(), gpus, capability)

    def attention(self, dtype: str, gpus: int, capability: Capability | None) -> str | None:
        if self.settings.attn_implementation is not None or self.architecture is None:
            return self.settings.attn_implementation
        # flash-attention 2 needs half precision and compute capability 8.0 or more.
        has_capability = gpus > 0 and capability is not None and capability >= (8, 0)
        flash_suits = self.has_flash_attention and has_capability and dtype in ("float16", "bfloat16")
        supports_sdpa = self.architecture.supports_sdpa
        if supports_sdpa is None and not self.architecture.soft_capping:
            return None
        return choose_attention(self.architecture.soft_capping, supports_sdpa is True, flash_suits)

    def problem(self, capability: Capability | None) -> str:
        stored = self.architecture.quantization if self.architecture is not None else None
        problem = capability_problem(self.settings.quantization_config or stored, capability)
        if problem or self.architecture is None or not self.architecture.soft_capping:
            return problem
        return cap_problem(self.settings.attn_implementation, self.settings.name)

    def smaller(self, capability: Capability | None) -> Iterator[tuple[str, Footprint]]:
        plain = self.footprint(1, capability)
        if plain is None or plain.quantization or self.settings.merge_adapter:
            return
        quantized = self.footprint(1, capability, _FOUR_BITS)
        if quantized is not None:
            keys = ", ".join(f"{key}: {str(value).lower()}" for key, value in _FOUR_BITS.items())
            yield f"quantization_config: {{{keys}}}", quantized

    def with_flash_attention(self) -> MemoryEstimate | None:
        if self.settings.attn_implementation is not None:
            return None
        return replace(self, has_flash_attention=True)

    def _stored_dtype(self) -> str | None:
        """Return the type in the config.json, or that of the first floating-point tensor, as transformers does."""
        if self.architecture is not None and self.architecture.dtype is not None:
            return self.architecture.dtype
        names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
        return next((names[tensor.dtype] for tensor in self.tensors or () if tensor.dtype in names), None)


def checkpoint_memory(
    model: TextSettings,
    checkpoint: Checkpoint,
    lengths: npt.NDArray[np.int64],
    num_labels: int,
    vocabulary_positions: int = 0,
    head: Sequence[Tensor] | None = None,
) -> CheckpointMemory:
    """Return what a checkpoint's files tell about its memory; ``CheckpointMemory`` explains the arguments."""
    folder = checkpoint.folder
    architecture = read_architecture(read_json(folder / "config.json"), checkpoint.described)
    max_length = model.max_length or own_max_length(folder) or DEFAULT_MAX_LENGTH
    if architecture is not None and architecture.max_positions is not None:
        max_length = min(max_length, architecture.max_positions)
    adapters = model.used_adapters
    has_own_head = head is not None or vocabulary_positions > 0
    return CheckpointMemory(
        settings=model,
        lengths=lengths,
        num_labels=num_labels,
        tensors=whole_tensors(model, folder),
        architecture=architecture,
        max_length=max_length,
        adapter_bytes=sum(map(_adapter_bytes, adapters)),
        lora=(0, 0) if model.merge_adapter else max(map(_widest_lora, adapters), default=(0, 0)),
        pools_last_token=has_own_head or not checkpoint.described.scores_every_position,
        vocabulary_positions=vocabulary_positions,
        head=head,
    )


def _adapter_bytes(adapter: AdapterSource) -> int:
    """Return the bytes of an adapter's file, or of what its worker makes of several; 0: not here."""
    sizes = [
        sum(file.stat().st_size for file in Path(name).glob("adapter_model.*")) for name in adapter.names
    ]
    return max(sizes) if adapter.combination_type == "linear" else sum(sizes)


def _widest_lora(adapter: AdapterSource) -> tuple[int, int]:
    """Return the outputs and the rank of the widest layer with LoRA; zeros: there is none, or no file to read."""
    widest = [widest_lora(Path(name)) for name in adapter.names]
    outputs, rank = max(widest)
    return outputs, sum(rank for _, rank in widest) if adapter.combination_type == "cat" else rank


def whole_tensors(model: HuggingFaceSettings, folder: Path) -> tuple[Tensor, ...] | None:
    """Return a checkpoint's tensors; None where they are not known or incomplete."""
    if not Path(model.model_name_or_path).is_dir():  # the hub's cache, which may lack some of the files
        files = loaded_files(folder)
        if not files or not all(file.is_file() for file in files):
            return None
    return read_tensors(folder)


def _quantization_name(settings: Mapping[str, Any] | None, architecture: Architecture) -> str:
    """Return the usual name of a quantization, such as nf4, fp4, int8 or gptq; empty without one."""
    if settings is None:
        return architecture.quant_method or ""
    if settings.get("load_in_4bit"):
        return str(settings.get("bnb_4bit_quant_type", "fp4"))
    return "int8" if settings.get("load_in_8bit") else str(settings.get("quant_method", ""))
