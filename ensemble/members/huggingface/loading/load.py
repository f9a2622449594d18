"""Load a member: settings -> model on the device, tokenizer, and their limits."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import torch

from ensemble.common.device_trials import unusable_gpu
from ensemble.common.gpus import driver_cuda_version
from ensemble.common.python_process import keep_freed_memory
from ensemble.common.text import first_line
from ensemble.common.torch_build import SIMULATED
from ensemble.members.footprint import CPU_TOKEN_BUDGET, GPU_TOKEN_BUDGET, RESERVE_SHARE, coarse_room
from ensemble.members.huggingface.checkpoint.tokenizer_files import size_problem
from ensemble.members.huggingface.loading.adapter import JobAdapters
from ensemble.members.huggingface.loading.architecture import learnt_positions
from ensemble.members.huggingface.loading.fused_norms import fuse_norms
from ensemble.members.huggingface.loading.kernels import capability, choose_kernels, set_tf32
from ensemble.members.huggingface.loading.model import load_model
from ensemble.members.huggingface.loading.pair_copies import check_copies
from ensemble.members.huggingface.loading.tokenizer import load_tokenizer
from ensemble.members.huggingface.scoring.batching import MemoryLimit
from ensemble.members.huggingface.spec import CheckpointSpec, ModelSpec, default_max_length


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """Hold a model on its device, and what was decided while loading.

    Attributes:
        memory: None: not known, or the user set the size of batches.
        max_room_bytes: the largest ``memory.available_bytes`` of other workers that this one can take over.
        tokenizer, pad_token_id, max_length: of a model that reads text.
        adapters: of its jobs; None: all have the same one, or none.
    """

    model: Any
    token_budget: int
    memory: MemoryLimit | None
    max_room_bytes: int | None
    parameters: int
    dtype: str
    device_name: str
    notes: tuple[str, ...]
    tokenizer: Any = None
    pad_token_id: int = 0
    max_length: int = 0
    adapters: JobAdapters | None = None

    @property
    def attn_implementation(self) -> str:
        """Return the attention that the model computes with now; empty where it has none."""
        return str(getattr(self.model.config, "_attn_implementation", None) or "")


def load(spec: ModelSpec, tokenizer: Any = None) -> Loaded:
    """Load a member that reads text onto the devices this process can see."""
    tokenizer = tokenizer or load_tokenizer(spec)
    loaded = load_on_devices(spec)
    embeddings = int(loaded.model.get_input_embeddings().weight.shape[0])
    tokens = max([len(tokenizer), *(1 + token_id for token_id in tokenizer.get_vocab().values())])
    if tokens > embeddings:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path} knows {tokens} tokens, its model only {embeddings}; "
            "they do not belong together"
        )
    problem = size_problem(tokenizer.name_or_path, tokens, embeddings)
    if problem:
        raise ValueError(problem)
    limit = max_length(spec, tokenizer, learnt_positions(loaded.model))
    notes, pad_token_id = loaded.notes, pad_token_id_of(tokenizer)
    if spec.max_length is not None and spec.max_length > limit:
        notes += (f"max_length: the model has {limit} positions; rows are cut to these",)
    return replace(loaded, tokenizer=tokenizer, pad_token_id=pad_token_id, max_length=limit, notes=notes)


def instead_of_gpu() -> str:
    """Return the note of a member that computes on the CPU because its GPUs are simulated.

    With real ones it is refused: a run would take weeks instead of hours.

    Raises:
        ValueError: the GPUs are real, and torch cannot use them.
    """
    if os.environ.get(SIMULATED) == "1":
        return f"{SIMULATED}: the GPUs are simulated, running on the CPU"
    reason = "it sees no GPU"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # is_available() swallows the reason
    except (AssertionError, RuntimeError) as error:
        reason = first_line(error)
    problem, advice = unusable_gpu(torch.__version__, torch.version.cuda, reason, driver_cuda_version())
    raise ValueError(f"a GPU was planned, but {problem}; {advice}")


def pad_token_id_of(tokenizer: Any) -> int:
    """Return the id that batches are padded with: eos where a checkpoint has no pad token, as the mask decides."""
    ids = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(int(token_id) for token_id in ids if token_id is not None)


def load_on_devices(spec: CheckpointSpec) -> Loaded:
    """Load a member's model, for text or images, onto the devices this process can see."""
    notes: list[str] = []
    torch.manual_seed(spec.seed)
    on_gpu = spec.gpus > 0 and torch.cuda.is_available()
    if on_gpu:
        if torch.cuda.device_count() < spec.gpus:
            raise ValueError(f"assigned {spec.gpus} GPUs, but torch sees {torch.cuda.device_count()} of them")
        torch.cuda.init()  # type: ignore[no-untyped-call]
    elif spec.gpus > 0:
        notes.append(instead_of_gpu())
    least = capability(on_gpu)
    set_tf32(spec, least, notes)
    choose_kernels(least)
    model, adapters = load_model(spec, least, notes)
    check_copies(model, notes)
    if on_gpu:
        fuse_norms(model)
    if not on_gpu:
        keep_freed_memory()  # after loading, so that its own memory is given back
    model.eval()
    for config in (model.config, model.config.get_text_config()):
        # Nothing is generated, so no keys and values are kept, nor any other output that a config asks for.
        config.use_cache = config.output_hidden_states = config.output_attentions = False
        # ModernBERT compiles itself if Triton is installed.
        if hasattr(config, "reference_compile"):
            config.reference_compile = False
    memory, max_room_bytes = _memory_limit(spec, model, on_gpu)
    return Loaded(
        model=model,
        adapters=adapters,
        token_budget=spec.token_budget or (GPU_TOKEN_BUDGET if on_gpu else CPU_TOKEN_BUDGET),
        memory=memory,
        max_room_bytes=max_room_bytes,
        parameters=model.num_parameters(),
        dtype=str(model.dtype).removeprefix("torch."),
        device_name=torch.cuda.get_device_name(0) if on_gpu else "cpu",
        notes=tuple(notes),
    )


def max_length(spec: ModelSpec, tokenizer: Any, limit: int | None = None) -> int:
    """Return how many tokens a row may have, special tokens included.

    Args:
        limit: the model's positions; None if there is no limit, or none is known yet.
    """
    length = spec.max_length or default_max_length(tokenizer.model_max_length)
    length = length if limit is None else min(length, limit)
    is_pair = len(spec.text_columns) == 2
    special = tokenizer.num_special_tokens_to_add(is_pair) if spec.add_special_tokens else 0
    if length <= special:
        raise ValueError(
            f"max_length {length} leaves no room for text beside {special} special tokens; raise it"
        )
    return length


def _memory_limit(spec: CheckpointSpec, model: Any, on_gpu: bool) -> tuple[MemoryLimit | None, int | None]:
    """Return the memory that a batch may take, and the largest room of another worker that this one can take over.

    None: it is not known, or the user set the size of batches.
    """
    if not spec.bytes_per_token or spec.token_budget is not None or spec.batch_size is not None:
        return None, None
    limit = spec.memory_limit_bytes
    rooms = []
    if on_gpu:
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            allocated = torch.cuda.memory_allocated(index)
            free += torch.cuda.memory_reserved(index) - allocated
            if limit is not None:
                free = min(free, limit - allocated)
            reserve = int(RESERVE_SHARE * total)
            rooms.append((free - reserve, reserve))
    elif limit is None:
        return None, None
    else:
        tensors = [*model.parameters(), *model.buffers()]
        weights = sum(tensor.nbytes for tensor in tensors if tensor.device.type != "meta")
        rooms.append((limit - weights, int(RESERVE_SHARE * limit)))
    available, reserve = min(rooms)
    available -= spec.fixed_bytes
    memory = MemoryLimit(
        available_bytes=max(1, coarse_room(max(0, available))),
        bytes_per_token=spec.bytes_per_token,
        bytes_per_token_pair=spec.bytes_per_token_pair,
        bytes_per_row=spec.bytes_per_row,
        bytes_per_kept_token=spec.bytes_per_kept_token,
    )
    # A room of another worker may take half of the reserve, so that a few MiB less here change no batch.
    return memory, max(memory.available_bytes, available + reserve // 2)
