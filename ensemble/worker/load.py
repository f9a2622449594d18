"""A member's settings -> tokenizer and model on their device, and the limits that come with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoTokenizer

from ensemble.protocol import WorkerSpec
from ensemble.worker.model import load_model

DEFAULT_MAX_LENGTH = 1024
# Padded tokens per batch. On a CPU more does not pay: sorted rows at 2,048 ran as fast as a shape without padding.
CPU_TOKEN_BUDGET = 2048
GPU_TOKEN_BUDGET = 16384
# Tokenizers without a limit of their own say something astronomic.
_NO_LIMIT = 1_000_000


@dataclass(frozen=True)
class Loaded:
    """A model on its device, with its tokenizer and what was decided on the way."""

    model: Any
    tokenizer: Any
    pad_token_id: int
    max_length: int
    token_budget: int
    parameters: int
    dtype: str
    attn_implementation: str
    device_name: str
    notes: tuple[str, ...]


def load(spec: WorkerSpec) -> Loaded:
    """Load a member onto the devices this process can see.

    Raises:
        ValueError: weights are missing (a head that would be random), or a setting does not exist.
        OSError: the checkpoint's files cannot be read.
    """
    notes: list[str] = []
    torch.manual_seed(spec.seed)
    tokenizer = _tokenizer(spec)
    on_gpu = _use_gpu(spec, notes)
    if not on_gpu and spec.cpu_threads is not None:
        torch.set_num_threads(spec.cpu_threads)
    model = load_model(spec, on_gpu, notes)
    model.eval()
    if len(tokenizer) > (rows := int(model.get_input_embeddings().weight.shape[0])):
        raise ValueError(
            f"the tokenizer of {spec.model_name_or_path} knows {len(tokenizer)} tokens, its model only {rows}; "
            "they do not belong together"
        )
    model.config.use_cache = False  # nothing is generated, so no keys and values need be kept
    return Loaded(
        model=model,
        tokenizer=tokenizer,
        pad_token_id=_pad_token_id(tokenizer),
        max_length=_max_length(spec, tokenizer, model, notes),
        token_budget=spec.token_budget or (GPU_TOKEN_BUDGET if on_gpu else CPU_TOKEN_BUDGET),
        parameters=sum(_elements(parameter) for parameter in model.parameters()),
        dtype=str(model.dtype).removeprefix("torch."),
        attn_implementation=str(getattr(model.config, "_attn_implementation", "")),
        device_name=torch.cuda.get_device_name(0) if on_gpu else "cpu",
        notes=tuple(notes),
    )


def _tokenizer(spec: WorkerSpec) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(
        spec.model_name_or_path,
        revision=spec.revision or "main",
        trust_remote_code=spec.trust_remote_code,
        **spec.tokenizer_kwargs,
    )
    if spec.truncation_side is not None:
        tokenizer.truncation_side = spec.truncation_side
    return tokenizer


def _use_gpu(spec: WorkerSpec, notes: list[str]) -> bool:
    if spec.gpus == 0:
        return False
    if torch.cuda.is_available():
        if torch.cuda.device_count() < spec.gpus:
            raise ValueError(f"leased {spec.gpus} GPUs, but torch sees {torch.cuda.device_count()} of them")
        return True
    notes.append(
        f"the driver shows a GPU, but this torch ({torch.__version__}) cannot use it: running on the CPU; "
        "install a torch built for the driver's CUDA"
    )
    return False


def _pad_token_id(tokenizer: Any) -> int:
    """An id to fill up with; a checkpoint without a pad token lends its eos, since the mask decides, not the id."""
    ids = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return int(next(token for token in ids if token is not None))


def _max_length(spec: WorkerSpec, tokenizer: Any, model: Any, notes: list[str]) -> int:
    limit = _position_limit(model)
    wanted = spec.max_length
    if wanted is None:
        own = tokenizer.model_max_length if tokenizer.model_max_length < _NO_LIMIT else DEFAULT_MAX_LENGTH
        wanted = min(DEFAULT_MAX_LENGTH, int(own))
    if limit is not None and wanted > limit:
        if spec.max_length is not None:
            notes.append(
                f"max_length {wanted} is more than the {limit} positions of the model: using {limit}"
            )
        wanted = limit
    special = (
        tokenizer.num_special_tokens_to_add(len(spec.text_columns) == 2) if spec.add_special_tokens else 0
    )
    if wanted <= special:
        raise ValueError(
            f"max_length {wanted} leaves no room for text beside {special} special tokens; raise it"
        )
    return wanted


def _position_limit(model: Any) -> int | None:
    """Tokens for which a model with learnt absolute positions has an embedding; None for the others."""
    for name, module in model.named_modules():
        if name.endswith(
            ("position_embeddings", ".wpe", "embed_positions", "positions_embed")
        ) and isinstance(module, torch.nn.Embedding):
            # RoBERTa's kind counts its positions from padding_idx + 1, OPT's from an offset of 2.
            offset = getattr(module, "offset", 0)
            if module.padding_idx is not None and not offset:
                offset = module.padding_idx + 1
            return module.num_embeddings - offset
    return None


def _elements(parameter: torch.nn.Parameter) -> int:
    # bitsandbytes packs two 4-bit weights into a byte; its parameters remember the real shape.
    state = getattr(parameter, "quant_state", None)
    shape = getattr(state, "shape", None)
    return int(torch.Size(shape).numel()) if shape is not None else parameter.numel()
