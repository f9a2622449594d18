"""Estimate a replica's memory on a device from the files of its checkpoint; no weights are loaded.

The inputs are the tensors of a checkpoint and the numbers of its ``config.json``.  The formulas come from reading
transformers' modelling code (5.x) and are tested against a tracker of live tensors
(tests/members/huggingface/test_memory.py).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from ensemble.common.packages import Requirement, installed_versions
from ensemble.members.footprint import Activation, Capability, Footprint, MemoryEstimate, Weights
from ensemble.members.huggingface.checkpoint.adapter_files import widest_lora
from ensemble.members.huggingface.checkpoint.facts import Architecture
from ensemble.members.huggingface.checkpoint.inspect import Checkpoint
from ensemble.members.huggingface.checkpoint.quantization_methods import (
    BITSANDBYTES,
    UNQUANTIZED,
    capability_problem,
    compute_dtype_of,
    method_of,
    quantized_bits,
)
from ensemble.members.huggingface.checkpoint.weight_files import (
    Tensor,
    is_left_out,
    loaded_files,
    read_tensors,
    stands_beside_packed,
)
from ensemble.members.huggingface.settings import HuggingFaceSettings, TextSettings
from ensemble.members.huggingface.spec import (
    CAPPED_BLOCKS,
    DEFAULT_MAX_LENGTH,
    FLEX,
    QUERIES_PER_BLOCK,
    AdapterSource,
    cap_problem,
    choose_attention,
    choose_compute_dtype,
    choose_dtype,
)

Dtype = Literal["float32", "float16", "bfloat16"]
DTYPE_BYTES: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}

_HEAD = re.compile(r"(^|\.)(score|classifier|classification_head)\.")
_VOCABULARY_HEAD = re.compile(r"(^|\.)(lm_head|embed_out)\.")
_EMBEDDING = re.compile(r"embed|(^|\.)(wte|wpe|shared|relative_attention_bias)\.")
# Embeddings themselves; other layers within an embedding module, such as a projection, are multiplied.
_LOOKED_UP = re.compile(
    r"(^|[._])(embed(dings?)?(_in|_tokens(_per_layer)?|_positions)?|wte|wpe|shared)\.weight$"
)
# bitsandbytes has a scale for each block of weights, and with nested quantization another for each block of scales.
_BLOCK, _NESTED_BLOCK = 64, 256
# The 16 values that 4 bits stand for, float32, with every layer.
_TABLE_BYTES = 64
_BLOCK_OF_LAYER = re.compile(r".*?\.\d+\.")
# Tensors as wide as the hidden states that live while a layer's feed-forward part runs: the embeddings, which the
# backbone's forward keeps; the layer's input; the attention's output; the sum of these; and its normalized copy.  A
# layer that frees some of them earlier, as Llama's and BERT's do, takes up to a fifth less.
_HIDDEN_COPIES = 5
# Per token: token ids and attention mask, int64, and tensors made from them.
_INPUT_BYTES = 24
# Above this width torch's attention on CUDA sums values in float32 (kernel_forward.h).
_REGISTER_WIDTH = 128
# What a process with torch and transformers takes on a CPU before it loads weights.
PROCESS_BYTES = 450 << 20
# What torch's compiler takes there in addition: 0.54 GiB instead of 0.37.
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
        has_flash_attention: whether flash-attention 2 was seen to work on these devices.
        vocabulary_positions, shared_tokens, keeps_prompts: see ``activation``.
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
        width = self._width
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
                width,
                self.lora,
                self.vocabulary_positions,
                self.shared_tokens,
                self.keeps_prompts,
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
        # flash-attention 2 and flex need half precision and compute capability 8.0 or more.
        has_capability = gpus > 0 and capability is not None and capability >= (8, 0)
        has_kernels = has_capability and dtype in ("float16", "bfloat16")
        flash_suits = self.has_flash_attention and has_kernels
        flex_suits = has_kernels and gpus == 1 and self._flex_suits(self.architecture)
        is_capped, supports_sdpa = self.architecture.soft_capping, self.architecture.supports_sdpa
        if supports_sdpa is None and not is_capped:
            return None
        return choose_attention(is_capped, supports_sdpa is True, flash_suits, flex_suits)

    def _flex_suits(self, architecture: Architecture) -> bool:
        """Return whether rows of a decoder whose scores are capped, or whose windows are short, can be packed."""
        settings = self.settings
        is_decoder = architecture.is_causal or self.vocabulary_positions > 0
        placements = (settings.device_map, settings.max_memory, settings.offload_folder)
        is_plain = settings.batch_size == "auto" and not settings.torch_compile and not any(placements)
        has_window = architecture.supports_sdpa is True and 0 < architecture.window < self._width
        gains = architecture.soft_capping or has_window
        return is_decoder and is_plain and gains and not self.keeps_prompts

    @property
    def _width(self) -> int:
        # A token is at least a byte; templates and special tokens add some.
        return min(self.max_length, int(self.lengths.max(initial=1)) + 64)

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
    architecture = checkpoint.facts.architecture
    max_length = model.max_length or checkpoint.facts.max_length or DEFAULT_MAX_LENGTH
    max_length = min(max_length, checkpoint.facts.max_positions or max_length)
    adapters = model.used_adapters
    # Counts all text of the template, although only the text before the first column is shared.
    texts = checkpoint.facts.text_ids[len(getattr(model, "label_tokens", ())) :]
    fixed_tokens = max(map(len, texts)) if texts else len(model.fixed_text.encode())
    is_causal = vocabulary_positions > 0 or (architecture is not None and architecture.is_causal)
    keeps = is_causal and not model.torch_compile
    has_choices = getattr(model, "choices", None) is not None
    return CheckpointMemory(
        settings=model,
        lengths=lengths,
        num_labels=num_labels,
        tensors=whole_tensors(model, checkpoint.folder),
        architecture=architecture,
        max_length=max_length,
        adapter_bytes=sum(map(_adapter_bytes, adapters)),
        lora=(0, 0) if model.merge_adapter else max(map(_widest_lora, adapters), default=(0, 0)),
        vocabulary_positions=vocabulary_positions,
        shared_tokens=min(max_length, fixed_tokens) if keeps else 0,
        keeps_prompts=keeps and (has_choices or vocabulary_positions > 1),
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
        return method_of(architecture.quantization) or ""
    if settings.get("load_in_4bit"):
        return str(settings.get("bnb_4bit_quant_type", "fp4"))
    return "int8" if settings.get("load_in_8bit") else str(settings.get("quant_method", ""))


def weights(
    tensors: Sequence[Tensor],
    architecture: Architecture,
    dtype: Dtype,
    quantization: Mapping[str, Any] | None,
    num_labels: int,
    is_adapter_base: bool = False,
    is_language_model: bool = False,
    head: Sequence[Tensor] | None = None,
) -> Weights:
    """Calculate the size of a loaded classifier, language model, or backbone with a head.

    Args:
        quantization: applied when loading; a checkpoint that is stored quantized stays as it is.
        num_labels: of the head that is made where the checkpoint has none.
        is_adapter_base: whether an adapter brings a head, which is kept in addition to the base model's.
        head: a separate head in float32, instead of the checkpoint's; None: there is none.
    """
    is_packed, settings = bool(architecture.quantization), quantization or {}
    bits = 0 if is_packed else quantized_bits(quantization)
    packed = {tensor.name.removesuffix(".absmax") for tensor in tensors if tensor.name.endswith(".absmax")}
    # Encoder and decoder of T5 share their embeddings, which some checkpoints hold three times.
    is_shared = any(tensor.name.endswith("shared.weight") for tensor in tensors)
    kept = [
        tensor
        for tensor in tensors
        if (not is_left_out(tensor.name) or (is_language_model and _VOCABULARY_HEAD.search(tensor.name)))
        and not (is_shared and tensor.name.endswith("coder.embed_tokens.weight"))
    ]
    if head is not None:
        kept = [tensor for tensor in kept if not _HEAD.search(tensor.name)]
    elif not is_language_model and (is_adapter_base or not any(_HEAD.search(tensor.name) for tensor in kept)):
        kept.append(Tensor("score.weight", "F32", (num_labels, architecture.hidden)))
    parameters, embedding_parameters = 0, 0
    blocks: Counter[str] = Counter()
    for tensor in kept:
        name, count = tensor.name, tensor.elements
        is_beside = is_packed and stands_beside_packed(name)
        if not tensor.is_float or is_beside:
            loaded_bytes = tensor.stored_bytes
        elif bits and _is_linear(tensor, settings):
            loaded_bytes = _quantized_bytes(tensor, bits, settings)
        else:
            loaded_bytes = count * DTYPE_BYTES[dtype]
        match = _BLOCK_OF_LAYER.match(name)
        blocks[match[0] if match else name] += loaded_bytes
        if is_beside:
            continue
        if is_packed and tensor.dtype == "U8" and name in packed:
            count *= 2  # bitsandbytes packs two into a byte
        elif is_packed and tensor.dtype == "I32" and name.endswith(("qweight", "weight_packed")):
            count = count * 32 // (quantized_bits(architecture.quantization) or 4)
        parameters += count
        # A patch embedding, with four dimensions, is multiplied.
        if len(tensor.shape) == 2 and _LOOKED_UP.search(name):
            embedding_parameters += count
    head_parameters = sum(tensor.elements for tensor in head or ())
    return Weights(
        parameters=parameters + head_parameters,
        bytes=blocks.total() + 4 * head_parameters,
        largest_layer_bytes=max(blocks.values()),
        embedding_parameters=embedding_parameters,
    )


def _is_linear(tensor: Tensor, settings: Mapping[str, Any]) -> bool:
    """Return whether a tensor is quantized: a linear layer's weight, except embeddings and heads."""
    if len(tensor.shape) != 2 or not tensor.name.endswith(".weight") or _EMBEDDING.search(tensor.name):
        return False
    module = tensor.name.removesuffix(".weight")
    skipped = settings.get("llm_int8_skip_modules") or ()
    # As transformers' should_convert_module: from the start up to a dot, or at the end.
    return not any(
        module.endswith(name) or f".{module}.".startswith(f".{name}.") for name in (*UNQUANTIZED, *skipped)
    )


def _quantized_bytes(tensor: Tensor, bits: int, settings: Mapping[str, Any]) -> int:
    if settings.get("load_in_8bit"):
        return tensor.elements + 4 * tensor.shape[0]  # with a float32 scale for each row
    blocks = math.ceil(tensor.elements / _BLOCK)
    weight_bytes = math.ceil(tensor.elements * bits / 8) + _TABLE_BYTES
    if not settings.get("bnb_4bit_use_double_quant"):
        return weight_bytes + 4 * blocks
    # Scales of 8 bits with scales of their own; their table of 256 values and an offset, float32.
    return weight_bytes + blocks + 4 * (math.ceil(blocks / _NESTED_BLOCK) + 256 + 1)


def cuda_context_bytes(capability: Capability | None) -> int:
    """Return what a process takes on a GPU before its first tensor: context, kernels, the workspace of cuBLAS."""
    # With lazily loaded kernels a context takes about 300 MB (pytorch issue 107667), on large devices up to 600 MB.
    # cuBLAS gets 32 MiB on compute capability 9.0 and 8.1 MiB elsewhere.
    major = capability[0] if capability else 8
    if major < 8:
        return (300 + 9) << 20
    return (450 + 9 if major < 9 else 600 + 32) << 20


def activation(
    architecture: Architecture,
    dtype: Dtype,
    attention: str,
    num_labels: int,
    quantization: Mapping[str, Any] | None,
    width: int,
    lora: tuple[int, int] = (0, 0),
    vocabulary_positions: int = 0,
    shared_tokens: int = 0,
    keeps_prompts: bool = False,
) -> Activation:
    """Calculate the memory of a forward pass in inference mode, without the weights.

    It counts the most numbers of a token and the most of a pair of tokens that live at any moment, which may be two
    moments: never too little, and as much too much as docs/reference/benchmark-tables.md shows.

    Args:
        dtype: of the weights that are not quantized, and so of activations.
        quantization: bitsandbytes' settings for loading.
        width: tokens of the longest row.
        lora: outputs and rank of the widest layer with unmerged LoRA; zeros: none.
        vocabulary_positions: the positions of a row that go through a head over the vocabulary; 0: another head.
        shared_tokens: the first tokens of all rows, whose keys and values are kept from batch to batch.
        keeps_prompts: whether all layers keep the keys and values of a batch while its labels or choices are
            computed.
    """
    a, size = architecture, DTYPE_BYTES[dtype]
    queries, keys = a.heads * a.head_dim, a.kv_heads * a.head_dim
    # DeBERTa's table of positions, in halves, and whether its code has attention of its own.
    buckets, is_old = a.position_buckets, a.is_old
    hidden_copies = a.layers + 2 if buckets else _HIDDEN_COPIES
    # peft holds the base's result, LoRA's, and LoRA's scaled or the sum (forward in peft/tuners/lora).
    mlp: float = size * (max(a.mlp_width, 4 * lora[0]) + lora[1])
    bits = quantized_bits(quantization)
    if bits == 8 or (bits == 4 and _compute_bytes(size, quantization) != size):
        # Products of int8 are int32 before they are half precision; 4 bits may compute in another type.
        mlp += 4 * (a.hidden + a.mlp_width // 3)
    if a.experts > 1:
        # transformers up to 5.12 weights the experts' outputs in float32, in the order of experts and of tokens.
        mlp += (a.experts * (2 * size + 8) + 4) * a.hidden
    # Eager attention's scores, and its softmax in float32; older code adds a bias in float32 to copies.
    score_bytes = max(4 * size, 12) if is_old else 8 if size == 4 else 10
    # Rotary embedding: queries, keys, values, and three more tensors like the queries.
    has_row_borders = attention in ("flash_attention_2", FLEX)
    attended: float = size * (4 * queries + (4 if has_row_borders else 2) * keys)
    pair = 0.0 if has_row_borders else a.masks + 2.0 * size
    if buckets:
        # Scores between contents, from contents to positions and back, each gathered from a product with the table;
        # an int64 product of the mask with itself, and three tables of positions that a batch's rows share.
        attended += 2 * buckets * a.heads * size
        pair = 16 + 5 * a.heads * size
    elif attention == "eager":
        attended += 16 * queries if is_old else 0  # some turn queries and keys in float32
        pair = a.masks * size + a.heads * score_bytes
    elif attention == CAPPED_BLOCKS:
        attended += a.heads * min(width, QUERIES_PER_BLOCK) * score_bytes
    elif a.head_dim > _REGISTER_WIDTH and size == 2 and attention != FLEX:
        attended += 4 * queries
    # Rotary embedding's tables for each kind of layer, which packed rows do not share.
    tables = 2 * a.masks * a.head_dim if attention == FLEX else 0
    token = size * (hidden_copies * a.hidden + tables) + max(mlp, attended)
    token += num_labels * (size + 4) + _INPUT_BYTES
    kept_by_token = 2 * a.layers * keys * size
    fixed = shared_tokens * kept_by_token
    if bits == 4 or (method_of(a.quantization) == BITSANDBYTES and quantized_bits(a.quantization) == 4):
        # The largest linear layer's weight, which bitsandbytes unpacks from 4 bits for every product.
        fixed += a.largest_weight * _compute_bytes(size, quantization or a.quantization)
    # DeBERTa's table: normalized, projected to keys and queries, in two layouts each; and repeated for each row.
    fixed += 10 * buckets * a.hidden * size
    # The logits over a vocabulary, those in float32, and their exponentials.
    row = vocabulary_positions * a.vocabulary * (size + 4 + (4 if size == 2 else 0))
    return Activation(
        bytes_per_token=token,
        bytes_per_token_pair=pair,
        bytes_per_row=row + 4 * buckets * a.hidden * size,
        fixed_bytes=fixed,
        bytes_per_kept_token=kept_by_token if keeps_prompts else 0,
    )


def _compute_bytes(size: int, quantization: Mapping[str, Any] | None) -> int:
    return DTYPE_BYTES.get(compute_dtype_of(quantization), size)
