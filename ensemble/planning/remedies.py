"""PURE: what would make a member fit that fits nowhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ensemble.config import ModelConfig, RunConfig
from ensemble.devices import Device
from ensemble.planning.footprint import MemberFacts, footprint
from ensemble.sizes import gib

_FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
_MOST_GPUS = 8


def what_helps(config: RunConfig, index: int, facts: MemberFacts, devices: Sequence[Device]) -> Iterator[str]:
    """Phrases, each a key and what it would change; only what the rules of the config allow for this member."""
    model = config.models[index]
    capability = devices[0].compute_capability
    plain = footprint(model, facts, 1, capability)
    if plain is None:
        return
    sharing = config.max_workers_per_gpu
    largest = max(device.total_bytes for device in devices) // sharing
    if sharing > 1 and plain.resident_bytes(1) < largest * sharing:
        yield "max_workers_per_gpu: 1 gives it a whole GPU"
    if not plain.quantization and not model.merge_adapter:
        four = footprint(model, facts, 1, capability, quantization=_FOUR_BITS)
        if four is not None and four.resident_bytes(1) < largest:
            keys = ", ".join(f"{key}: {str(value).lower()}" for key, value in _FOUR_BITS.items())
            yield f"quantization_config: {{{keys}}} makes its weights {gib(four.weights.bytes)}"
    counts = range((model.num_gpus or 1) + 1, _MOST_GPUS + 1)
    enough = next((count for count in counts if plain.resident_bytes(count) < largest), None)
    if enough is not None and not any(device.is_slice for device in devices):
        there = "" if enough <= len(devices) else f" (this run has {len(devices)})"
        yield f"num_gpus: {enough} of this size hold it{there}"
    if _may_offload(model):
        yield "max_memory with a cpu entry, or offload_folder, keeps a part of it outside the GPU, slowly"


def _may_offload(model: ModelConfig) -> bool:
    # Quantized layers can wait on the CPU only as float32 ones, which a member of this size does not survive.
    return (
        model.adapter_name_or_path is None and model.quantization_config is None and model.gguf_file is None
    )
