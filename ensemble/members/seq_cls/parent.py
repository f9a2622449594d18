"""Sequence classifiers on the parent's side: what can be known of a checkpoint without torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ensemble.common.digests import FileDigests, digest_of
from ensemble.common.errors import CheckpointError
from ensemble.config import MemberConfig
from ensemble.members.base import Assigned, Draft, MemberKind, OutputColumns, Reads, ResourceRequest
from ensemble.members.footprint import MemoryEstimate
from ensemble.members.huggingface.allocator import allocator_environment
from ensemble.members.huggingface.checkpoint.adapter_files import inspect_adapter
from ensemble.members.huggingface.checkpoint.architecture import read_architecture
from ensemble.members.huggingface.checkpoint.digests import hub_commit, tokenizer_digest, weights_digest
from ensemble.members.huggingface.checkpoint.hub import find_file, read_config
from ensemble.members.huggingface.checkpoint.inspect import Checkpoint, inspect_checkpoint, label_names
from ensemble.members.huggingface.checkpoint.quantization_keys import (
    BITSANDBYTES,
    method_of,
    quantization_problems,
    quantization_warnings,
    without_defaults,
)
from ensemble.members.huggingface.checkpoint.tokenizer_files import own_max_length, tokenizer_limit
from ensemble.members.huggingface.spec import ModelSettings, choose_compute_dtype
from ensemble.members.seq_cls.settings import SequenceClassifierSettings

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_KEYS_OF_THEIR_OWN = (
    *("dtype", "revision", "trust_remote_code", "quantization_config", "attn_implementation"),
    *("device_map", "max_memory", "offload_folder", "gguf_file"),
)
# Keys that are taken into the fingerprint as they stand; the others by what they come to, so that to spell out what
# would be so without them changes nothing.
_AS_GIVEN = (
    *("prompt_template", "add_special_tokens", "allow_tf32", "merge_adapter", "gguf_file"),
    *("trust_remote_code", "truncation_side"),
)
# Where the config leaves them open, they are decided here, and told to every worker.
_DECIDED = ("dtype", "attn_implementation", "max_length")
# Of model_kwargs and tokenizer_kwargs: how files are had, not what is made of them. A token may change every day.
_HOW_TO_FETCH = (
    *("token", "use_auth_token", "cache_dir", "force_download", "resume_download", "local_files_only"),
    "proxies",
)


_NO_THREADS = "HF_DEACTIVATE_ASYNC_LOAD"


class SequenceClassification(MemberKind[SequenceClassifierSettings, Checkpoint]):
    """A checkpoint with a classification head, loaded by transformers."""

    Settings: ClassVar[type[MemberConfig]] = SequenceClassifierSettings
    child: ClassVar[str] = "ensemble.members.seq_cls.child"
    activation_key: ClassVar[str] = "problem_type"

    @classmethod
    def draft(cls, source: str, id_column: str) -> Draft | None:
        base, folder, head_rows = source, Path(source), None
        if folder.is_file():
            return None
        settings = {}
        if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
            adapter = inspect_adapter(source)
            if adapter.base is None:
                raise CheckpointError(f"{source}: its adapter_config.json does not name its base")
            # Where it was trained the base may have stood elsewhere; often it has been copied beside the adapter.
            beside = folder.parent / Path(adapter.base).name
            base = str(beside) if not Path(adapter.base).is_dir() and beside.is_dir() else adapter.base
            settings, head_rows = {"adapter_name_or_path": source}, adapter.head_rows
        path = find_file(base, "config.json")
        config = read_config(path, f"{base}: its config.json")
        names = label_names(config, base)
        if head_rows is not None and head_rows != len(names):
            names = [f"LABEL_{index}" for index in range(head_rows)]
        architecture = read_architecture(config)
        limits = [tokenizer_limit(path.parent), architecture.max_positions if architecture else None]
        return Draft(
            settings={"model_name_or_path": base, **settings},
            labels=tuple(names),
            are_named=not all(re.fullmatch(r"LABEL_\d+", name) for name in names),
            max_length=min((int(limit) for limit in limits if limit is not None), default=None),
        )

    def request(self) -> ResourceRequest:
        model = self.settings
        # Quantized layers can wait on the CPU only as float32 ones, which a member too large for its GPU does not
        # survive.
        is_plain = model.quantization_config is None and model.gguf_file is None
        return ResourceRequest(
            num_gpus=model.num_gpus,
            replicas=model.replicas,
            batch_size=None if model.batch_size == "auto" else model.batch_size,
            max_num_batched_tokens=model.max_num_batched_tokens,
            device_map=model.device_map if isinstance(model.device_map, dict) else None,
            max_memory=model.max_memory,
            offload_folder=model.offload_folder,
            may_offload=is_plain and model.adapter_name_or_path is None,
            load_cache=model.load_cache,
        )

    def reads(self) -> Reads:
        return Reads(self.settings.text_columns, self.settings.prompt_template)

    def sources(self) -> tuple[str, ...]:
        names = (self.settings.model_name_or_path, self.settings.adapter_name_or_path)
        return tuple(name for name in names if name is not None)

    def inspect(self, columns: OutputColumns) -> Checkpoint:
        model = self.settings
        return inspect_checkpoint(model, columns.labels, model.label_map, model.problem_type)

    def problems(self, inspected: Checkpoint | None, any_gpu: bool) -> Iterator[str]:
        model = self.settings
        for key in _KEYS_OF_THEIR_OWN:
            if key in model.model_kwargs:
                yield f"model_kwargs.{key}: use the model's own key {key} instead"
        stored = inspected.quantization if inspected is not None else None
        on_gpu = any_gpu if model.num_gpus is None else model.num_gpus > 0
        yield from quantization_problems(model.quantization_config, stored, on_gpu, model.merge_adapter)

    def warnings(self, inspected: Checkpoint) -> Iterator[str]:
        return quantization_warnings(self.settings.quantization_config, inspected.quantization)

    def packages(self, inspected: Checkpoint | None) -> Iterator[tuple[str, str]]:
        model = self.settings
        if method_of(model.quantization_config) == BITSANDBYTES:
            yield BITSANDBYTES, ".quantization_config"
        elif inspected is not None and method_of(inspected.quantization) == BITSANDBYTES:
            yield BITSANDBYTES, ", a quantized checkpoint,"
        if model.adapter_name_or_path is not None:
            yield "peft", ".adapter_name_or_path"
        if model.gguf_file is not None:
            yield "gguf", ".gguf_file"

    def memory(
        self, inspected: Checkpoint, lengths: npt.NDArray[np.int64], labels: int
    ) -> MemoryEstimate | None:
        # NumPy only where it is needed: a typo in a key shall be told at once.
        from ensemble.members.huggingface.memory.estimate import checkpoint_memory

        return checkpoint_memory(self.settings, inspected, lengths, labels)

    def fingerprint(self, inspected: Checkpoint, assigned: Assigned) -> Mapping[str, object]:
        model = self.settings
        is_unknown = not inspected.folder.is_dir()  # still on the hub, so that only its name tells
        return {
            **{key: getattr(model, key) for key in _AS_GIVEN},
            "text_columns": model.text_columns,
            "max_length": self._max_length(inspected),
            "attn_implementation": assigned.attention,
            "quantization_config": without_defaults(model.quantization_config, assigned.dtype),
            **({"compute_dtype": instead} if (instead := self._compute_dtype(inspected, assigned)) else {}),
            "label_order": inspected.label_order,
            "activation": inspected.activation,
            "dtype": assigned.dtype,
            "model_kwargs": _without_fetching(model.model_kwargs),
            "tokenizer_kwargs": _without_fetching(model.tokenizer_kwargs),
            "source": [model.model_name_or_path, model.revision or "main"] if is_unknown else None,
        }

    def worker_settings(
        self, inspected: Checkpoint, assigned: Assigned, offload_folder: Path | None
    ) -> Mapping[str, Any]:
        model, footprint = self.settings, assigned.footprint
        per_token, per_pair = footprint.activation.line(footprint.width) if footprint else (None, None)
        keys = (field.name for field in fields(ModelSettings))
        settings = {
            **{key: getattr(model, key) for key in keys if hasattr(model, key)},
            # What was checked is what is loaded: a branch of the hub may have moved since.
            "revision": hub_commit(model.model_name_or_path, inspected.folder) or model.revision,
            "label_order": inspected.label_order,
            "dtype": assigned.dtype,
            "attn_implementation": assigned.attention,
            "compute_dtype": self._compute_dtype(inspected, assigned),
            "max_length": self._max_length(inspected),
            "asked": tuple(key for key in _DECIDED if getattr(model, key) not in (None, "auto")),
            "batch_size": None if model.batch_size == "auto" else model.batch_size,
            "token_budget": model.max_num_batched_tokens,
            "max_memory": model.max_memory and {str(key): size for key, size in model.max_memory.items()},
            "offload_folder": None if offload_folder is None else str(offload_folder.resolve()),
            "bytes_per_token": per_token,
            "bytes_per_token_pair": per_pair,
            "fixed_bytes": footprint.activation.fixed_bytes if footprint else 0,
            "width": footprint.width if footprint else None,
        }
        return asdict(ModelSettings(**settings))

    def _compute_dtype(self, inspected: Checkpoint, assigned: Assigned) -> str | None:
        return choose_compute_dtype(inspected.quantization, assigned.capability if assigned.gpus else None)

    def _max_length(self, inspected: Checkpoint) -> int | None:
        """Tokens that a row may have; None where only the worker's tokenizer tells."""
        model = self.settings
        # Settings and code of its own, a GGUF file's vocabulary, files that may still be on the hub.
        has_own = _without_fetching(model.tokenizer_kwargs) or model.gguf_file or model.trust_remote_code
        is_known = not has_own and Path(model.model_name_or_path).is_dir()
        return model.max_length or (own_max_length(inspected.folder) if is_known else None)

    def environment(self) -> Mapping[str, str]:
        model = self.settings
        allocator = allocator_environment(model.expandable_segments, model.max_split_size_mb)
        # transformers 5.0 loads with threads that put weights on the GPU as they are, ahead of their quantization:
        # a member that would fit dies (transformers issue 43032).  5.5 and later have none where they quantize.
        return allocator if model.quantization_config is None else {**allocator, _NO_THREADS: "1"}

    def content(self, inspected: Checkpoint, files: FileDigests) -> Mapping[str, str]:
        """The digests of the weights, the adapter's among them, and of the tokenizer."""
        model, folder = self.settings, inspected.folder
        commit = hub_commit(model.model_name_or_path, folder)
        weights = [
            commit
            or weights_digest(folder, model.model_kwargs, model.gguf_file, model.trust_remote_code, files)
        ]
        if (name := model.adapter_name_or_path) is not None:
            adapter = find_file(name, "adapter_config.json").parent
            weights.append(hub_commit(name, adapter) or weights_digest(adapter, {}, None, False, files))
        tokenizer = tokenizer_digest(folder if commit is None else None, model.tokenizer_kwargs, files)
        return {"weights": digest_of(weights), "tokenizer": digest_of([commit, tokenizer])}


def _without_fetching(kwargs: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in kwargs.items() if key not in _HOW_TO_FETCH}
