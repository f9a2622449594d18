"""A member of the plan and a lease -> a running worker that has its orders."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ensemble.common.files import FileState
from ensemble.common.gpus import Device, worker_environment
from ensemble.common.protocol import Start, WorkerSpec
from ensemble.common.shards import order_path
from ensemble.common.text import shown_path
from ensemble.members.huggingface.checkpoint.digests import hub_commit
from ensemble.pipeline.resume import MemberWork
from ensemble.pipeline.run_dir import RunDir
from ensemble.pipeline.validate import Prepared
from ensemble.planning.plan import MemberPlan
from ensemble.scheduling.launchers.environment import allocator_environment
from ensemble.scheduling.launchers.local import LocalWorker
from ensemble.scheduling.running_worker import Worker


class Launcher:
    """Starts the workers of a run.

    Args:
        works: by member name.
    """

    def __init__(self, prepared: Prepared, rundir: RunDir, works: Mapping[str, MemberWork]) -> None:
        self._prepared = prepared
        self._rundir = rundir
        self._works = works
        self._offloaded: list[Path] = []

    def launch(
        self, member: MemberPlan, replica: int, lease: Sequence[Device], read_ahead_bytes: int = 0
    ) -> tuple[Worker, str]:
        """Start a worker that sees these devices; returns it and its log's path, as it is shown.

        Args:
            read_ahead_bytes: of its weights, what it reads from the disk before it may load them.

        Raises:
            OSError: no process could be started.
        """
        log_path = self._rundir.log(member.name, replica)
        model: Any = member.model
        folder: Path | None = None
        if model.offload_folder is not None:
            # transformers names its files there after parameters, which are alike in every model.
            folder = model.offload_folder / f"{member.name}-{replica}-{os.getpid()}"
            folder.mkdir(parents=True)
            self._offloaded.append(folder)
        environment = worker_environment(lease)
        if lease:
            environment |= allocator_environment(model.expandable_segments, model.max_split_size_mb)
        work = self._works[member.name]
        files = {path: seen.state for path, seen in work.files.items()}
        spec = worker_spec(self._prepared, self._rundir, member, work.parts_dir, folder, files)
        start = Start.of(spec, read_ahead_bytes)
        worker = LocalWorker(environment, log_path)  # last: from here on the caller must know of it
        worker.send(start)
        return worker, shown_path(log_path)

    def remove_offloaded(self) -> None:
        """Remove the weights that workers left on the disk."""
        for folder in self._offloaded:
            shutil.rmtree(folder, ignore_errors=True)


def worker_spec(
    prepared: Prepared,
    rundir: RunDir,
    member: MemberPlan,
    parts_dir: Path,
    offload_folder: Path | None,
    files: Mapping[str, FileState],
) -> WorkerSpec:
    """What a worker is told of its member; ``offload_folder`` is for it alone, ``files`` must stay as they are."""
    needed = member.placement.footprint
    per_token, per_pair = needed.activation.line(needed.width) if needed is not None else (None, None)
    model: Any = member.model
    checkpoint: Any = prepared.inspected[member.name]
    return WorkerSpec(
        model_name_or_path=model.model_name_or_path,
        # What was checked is what is loaded: a branch of the hub may have moved since.
        revision=hub_commit(model.model_name_or_path, checkpoint.folder) or model.revision,
        trust_remote_code=model.trust_remote_code,
        allow_pickle=model.allow_pickle,
        adapter_name_or_path=model.adapter_name_or_path,
        merge_adapter=model.merge_adapter,
        gguf_file=model.gguf_file,
        label_order=checkpoint.label_order,
        activation=checkpoint.activation,
        prompt_template=model.prompt_template,
        text_columns=model.text_columns,
        max_length=model.max_length,
        truncation_side=model.truncation_side,
        add_special_tokens=model.add_special_tokens,
        batch_size=None if model.batch_size == "auto" else model.batch_size,
        token_budget=model.max_num_batched_tokens,
        dtype=model.dtype,
        gpu_dtype=member.placement.dtype,
        allow_tf32=model.allow_tf32,
        expandable_segments=model.expandable_segments,
        max_split_size_mb=model.max_split_size_mb,
        quantization_config=model.quantization_config,
        attn_implementation=member.placement.attention,
        is_attention_asked=model.attn_implementation is not None,
        model_kwargs=model.model_kwargs,
        tokenizer_kwargs=model.tokenizer_kwargs,
        gpus=member.gpus,
        device_map=model.device_map,
        max_memory=None
        if model.max_memory is None
        else {str(key): size for key, size in model.max_memory.items()},
        offload_folder=None if offload_folder is None else str(offload_folder.resolve()),
        bytes_per_token=per_token,
        bytes_per_token_pair=per_pair,
        fixed_bytes=needed.activation.fixed_bytes if needed is not None else 0,
        width=needed.width if needed is not None else None,
        memory_limit_bytes=_memory_limit(prepared, member),
        cpu_threads=_cpu_threads(member),
        seed=prepared.config.seed,
        table_path=str(rundir.table.resolve()),
        order_path=str(order_path(parts_dir).resolve()),
        parts_dir=str(parts_dir.resolve()),
        files=dict(files),
    )


def _cpu_threads(member: MemberPlan) -> int | None:
    if member.replicas == 1:
        return None  # torch's own choice
    return max(1, len(os.sched_getaffinity(0)) // member.replicas)


def _memory_limit(prepared: Prepared, member: MemberPlan) -> int | None:
    """A worker's share of a GPU that it does not have to itself, without what CUDA takes of it."""
    sharing, needed = prepared.config.max_workers_per_gpu, member.placement.footprint
    if not member.gpus or sharing == 1:
        return None
    free = min(
        gpu.total_bytes - gpu.used_bytes
        for gpu in prepared.outlook.gpus
        if gpu.uuid in member.placement.devices
    )
    return free // sharing - (needed.context_bytes if needed is not None else 0)
