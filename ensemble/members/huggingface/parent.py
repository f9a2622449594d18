"""What kinds of Hugging Face checkpoints share on the parent's side: what can be known of one without torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

from ensemble.common.digests import FileDigests, digest_of
from ensemble.common.files import HubFile, read_json
from ensemble.data.json_cells import TemplateProblem
from ensemble.members.base import Assigned, Candidate, MemberKind, RanWith, Reads, ResourceRequest
from ensemble.members.footprint import CPU_TOKEN_BUDGET, GPU_TOKEN_BUDGET, MemoryEstimate
from ensemble.members.huggingface.allocator import allocator_environment
from ensemble.members.huggingface.checkpoint.digests import hub_commit, tokenizer_digest, weights_digest
from ensemble.members.huggingface.checkpoint.hub import find_file
from ensemble.members.huggingface.checkpoint.inspect import Checkpoint
from ensemble.members.huggingface.checkpoint.quantization_keys import (
    BITSANDBYTES,
    method_of,
    quantization_problems,
    quantization_warnings,
    without_defaults,
)
from ensemble.members.huggingface.checkpoint.tokenizer_files import own_max_length, stored_encode
from ensemble.members.huggingface.settings import HuggingFaceSettings, TextSettings
from ensemble.members.huggingface.spec import (
    CheckpointSettings,
    ModelSettings,
    choose_compute_dtype,
    is_soft_capped,
    too_much_text,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_KEYS_OF_THEIR_OWN = (
    *("dtype", "revision", "trust_remote_code", "quantization_config", "attn_implementation"),
    *("device_map", "max_memory", "offload_folder", "gguf_file"),
)
# Keys that are taken into the fingerprint as they stand; the others by what they come to, so that to spell out what
# would be so without them changes nothing.
_AS_GIVEN = ("allow_tf32", "merge_adapter", "gguf_file", "trust_remote_code")
_TEXT_AS_GIVEN = ("prompt_template", "add_special_tokens", "truncation_side")
# Keys of loading and of memory.
_CHANGE_NO_NUMBER = (
    "expandable_segments",
    "max_split_size_mb",
    "allow_pickle",
    "single_token",
)
# Where the config leaves them open, they are decided here, and told to every worker.
_DECIDED = ("dtype", "attn_implementation", "max_length")
# Of model_kwargs and tokenizer_kwargs: how files are had, not what is made of them. A token may change every day.
_HOW_TO_FETCH = (
    *("token", "use_auth_token", "cache_dir", "force_download", "resume_download", "local_files_only"),
    "proxies",
)


# Of computing, without torch.compile: compiling takes 20 to 25 s and has saved 4 to 36 % (docs/tuning.md).
_COMPILING_PAYS_FROM_SECONDS = 120.0
_NO_THREADS = "HF_DEACTIVATE_ASYNC_LOAD"
S = TypeVar("S", bound=HuggingFaceSettings)
T = TypeVar("T", bound=TextSettings)
C = TypeVar("C", bound=Checkpoint)


class HuggingFaceMember(MemberKind[S, C], Generic[S, C]):
    """A checkpoint that transformers loads; a kind says what it reads, and what is made of its numbers.

    ``auto_class`` is the class of transformers that loads it.
    """

    auto_class: ClassVar[str]

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
        )

    def sources(self) -> tuple[str, ...]:
        names = (self.settings.model_name_or_path, self.settings.adapter_name_or_path)
        return tuple(name for name in names if name is not None)

    def hub_files(self, inspected: C) -> tuple[HubFile, ...]:
        model, found = self.settings, list[HubFile]()
        if commit := hub_commit(model.model_name_or_path, inspected.folder):
            file = model.gguf_file or "config.json"
            found.append(HubFile(model.model_name_or_path, file, commit))
        if (name := model.adapter_name_or_path) is not None and not Path(name).is_dir():
            found.append(HubFile(name, "adapter_config.json", None))
        return tuple(found)

    def problems(self, inspected: C | None, any_gpu: bool) -> Iterator[str]:
        model = self.settings
        for key in _KEYS_OF_THEIR_OWN:
            if key in model.model_kwargs:
                yield f"model_kwargs.{key}: use the model's own key {key} instead"
        stored = inspected.quantization if inspected is not None else None
        on_gpu = any_gpu if model.num_gpus is None else model.num_gpus > 0
        yield from quantization_problems(model.quantization_config, stored, on_gpu, model.merge_adapter)
        if model.torch_compile and stored is not None:
            yield "torch_compile: its checkpoint is quantized, and such layers are not compiled; drop this"

    def warnings(self, inspected: C) -> Iterator[str]:
        yield from quantization_warnings(self.settings.quantization_config, inspected.quantization)

    def packages(self, inspected: C | None) -> Iterator[tuple[str, str]]:
        model = self.settings
        if method_of(model.quantization_config) == BITSANDBYTES:
            yield BITSANDBYTES, ".quantization_config"
        elif inspected is not None and method_of(inspected.quantization) == BITSANDBYTES:
            yield BITSANDBYTES, ", a quantized checkpoint,"
        if model.adapter_name_or_path is not None:
            yield "peft", ".adapter_name_or_path"
        if model.gguf_file is not None:
            yield "gguf", ".gguf_file"

    def fingerprint(self, inspected: C, assigned: Assigned) -> Mapping[str, object]:
        model = self.settings
        is_unknown = not inspected.folder.is_dir()  # still on the hub, so that only its name tells
        return {
            **{key: getattr(model, key) for key in _AS_GIVEN},
            "attn_implementation": assigned.attention,
            "quantization_config": without_defaults(model.quantization_config, assigned.dtype),
            **({"compute_dtype": instead} if (instead := self._compute_dtype(inspected, assigned)) else {}),
            "label_order": inspected.label_order,
            "activation": inspected.activation,
            "dtype": assigned.dtype,
            "model_kwargs": without_fetching(model.model_kwargs),
            # Only where it is asked for: what was made before there was this key stays what it is.
            **({"torch_compile": True} if model.torch_compile else {}),
            "source": [model.model_name_or_path, model.revision or "main"] if is_unknown else None,
        }

    def predicted_by(self) -> dict[str, object]:
        return {
            key: without_fetching(value) if key.endswith("_kwargs") and isinstance(value, dict) else value
            for key, value in super().predicted_by().items()
            if key not in _CHANGE_NO_NUMBER
        }

    def candidates(
        self, inspected: C, assigned: Assigned, ran_with: RanWith | None = None
    ) -> Sequence[Sequence[Candidate]]:
        """Precision with and without quantization, then attention, tokens of a batch, and ``torch.compile``."""
        model, on_gpu, ran_with = self.settings, assigned.gpus > 0, ran_with or RanWith()
        dtypes = ["float32", "bfloat16", "float16"]
        if on_gpu and assigned.capability is not None and assigned.capability < (8, 0):
            dtypes.remove("bfloat16")  # only emulated there
        plain: dict[str, Any] = {} if model.quantization_config is None else {"quantization_config": None}
        eager = {"torch_compile": False} if model.torch_compile else {}
        precisions = [Candidate(dtype, {"dtype": dtype, **plain, **eager}) for dtype in dtypes]
        is_as_stored = inspected.quantization is not None or model.gguf_file is not None
        if not is_as_stored and not model.merge_adapter:
            quantized = {
                "int8": {"load_in_8bit": True},
                "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
            }
            precisions += [
                Candidate(name, {"dtype": "auto", "quantization_config": settings, **eager})
                for name, settings in quantized.items()
            ]
        return [
            precisions,
            self._attentions(inspected, on_gpu, ran_with),
            self._budgets(on_gpu, ran_with),
            self._compiled(inspected, assigned.gpus),
        ]

    def _attentions(self, inspected: C, on_gpu: bool, ran_with: RanWith) -> Sequence[Candidate]:
        # With NumPy.
        from ensemble.members.huggingface.memory.estimate import supports_sdpa

        config = inspected.folder / "config.json"
        if not config.is_file() or not supports_sdpa(inspected.model_type, self.auto_class):
            return ()
        names = ["sdpa", "eager"]
        if on_gpu and importlib.util.find_spec("flash_attn") is not None and ran_with.dtype != "float32":
            names.append("flash_attention_2")
        if is_soft_capped(read_json(config)):
            names.remove("sdpa")  # has no place for the cap
        taken = ran_with.attention or names[0]
        return [Candidate(name, {"attn_implementation": name}) for name in names if name != taken]

    def _budgets(self, on_gpu: bool, ran_with: RanWith) -> Sequence[Candidate]:
        if self.settings.batch_size != "auto":
            return ()
        taken = ran_with.token_budget or (GPU_TOKEN_BUDGET if on_gpu else CPU_TOKEN_BUDGET)
        return [
            Candidate(f"{tokens:,} tokens a batch", {"max_num_batched_tokens": tokens})
            for tokens in (taken // 2, taken * 2)
            # Else both may cut the rows into the same batches.
            if ran_with.tokens is None or ran_with.tokens >= 2 * max(tokens, taken)
        ]

    def _compiled(self, inspected: C, gpus: int) -> Sequence[Candidate]:
        model = self.settings
        is_placed = any(one is not None for one in (model.device_map, model.max_memory, model.offload_folder))
        if is_placed or gpus > 1 or inspected.quantization is not None:
            return ()
        return [Candidate("torch.compile", {"torch_compile": True}, _COMPILING_PAYS_FROM_SECONDS)]

    def _loading(self, inspected: C, assigned: Assigned, offload_folder: Path | None) -> dict[str, Any]:
        """The values of ``CheckpointSettings``."""
        model, footprint = self.settings, assigned.footprint
        per_token, per_pair = footprint.activation.line(footprint.width) if footprint else (None, None)
        keys = (field.name for field in fields(CheckpointSettings))
        return {
            **{key: getattr(model, key) for key in keys if hasattr(model, key)},
            "auto_class": self.auto_class,
            # What was checked is what is loaded: a branch of the hub may have moved since.
            "revision": hub_commit(model.model_name_or_path, inspected.folder) or model.revision,
            "label_order": inspected.label_order,
            "dtype": assigned.dtype,
            "attn_implementation": assigned.attention,
            "compute_dtype": self._compute_dtype(inspected, assigned),
            "asked": tuple(key for key in _DECIDED if getattr(model, key, None) not in (None, "auto")),
            "batch_size": None if model.batch_size == "auto" else model.batch_size,
            "token_budget": model.max_num_batched_tokens,
            "max_memory": model.max_memory and {str(key): size for key, size in model.max_memory.items()},
            "offload_folder": None if offload_folder is None else str(offload_folder.resolve()),
            "bytes_per_token": per_token,
            "bytes_per_token_pair": per_pair,
            "fixed_bytes": footprint.activation.fixed_bytes if footprint else 0,
            "width": footprint.width if footprint else None,
        }

    def _compute_dtype(self, inspected: C, assigned: Assigned) -> str | None:
        return choose_compute_dtype(inspected.quantization, assigned.capability if assigned.gpus else None)

    def environment(self) -> Mapping[str, str]:
        model = self.settings
        allocator = allocator_environment(model.expandable_segments, model.max_split_size_mb)
        # transformers 5.0 loads with threads that put weights on the GPU as they are, ahead of their quantization:
        # a member that would fit dies (transformers issue 43032).  5.5 and later have none where they quantize.
        return allocator if model.quantization_config is None else {**allocator, _NO_THREADS: "1"}

    def content(self, inspected: C, files: FileDigests) -> Mapping[str, str]:
        """The digest of the weights, the adapter's among them."""
        model, folder = self.settings, inspected.folder
        commit = hub_commit(model.model_name_or_path, folder)
        weights = [
            commit
            or weights_digest(folder, model.model_kwargs, model.gguf_file, model.trust_remote_code, files)
        ]
        if (name := model.adapter_name_or_path) is not None:
            adapter = find_file(name, "adapter_config.json").parent
            weights.append(hub_commit(name, adapter) or weights_digest(adapter, {}, None, False, files))
        return {"weights": digest_of(weights)}


class TextCheckpoint(HuggingFaceMember[T, Checkpoint]):
    """A checkpoint that reads text."""

    def reads(self) -> Reads:
        return Reads(self.settings.text_columns, self.settings.prompt_template)

    def problems(self, inspected: Checkpoint | None, any_gpu: bool) -> Iterator[str]:
        yield from super().problems(inspected, any_gpu)
        for key, one in self._views():
            yield from (f"{key}{text}" for text in one.cut_problems(inspected))

    def warnings(self, inspected: Checkpoint) -> Iterator[str]:
        yield from super().warnings(inspected)
        for key, one in self._views():
            yield from (f"{key}{text}" for text in one.excess(inspected))

    def _views(self) -> Iterator[tuple[str, Self]]:
        """This member and each of its views with settings of its own, behind the key that says which."""
        yield "", self
        for number, view in enumerate(self.settings.views or ()):
            if view.changes:
                yield f"views[{number}]: ", type(self)(self.settings.as_view(view))

    def cut_problems(self, inspected: Checkpoint | None) -> Iterator[str]:
        """What speaks against how its prompts are to be cut; None: nothing is known of the checkpoint."""
        yield from self.settings.truncation_problems()
        if inspected is not None and self.settings.truncation is not None:
            yield from self.excess(inspected)

    def fixed_text(self) -> str:
        """What stands in every prompt, whatever the row."""
        if self.settings.prompt_template is None:
            return ""
        # Jinja2 only where it is needed: start-up time.
        from ensemble.data.template import compile_template

        try:
            return "".join(compile_template(self.settings.prompt_template).fixed_texts)
        except TemplateProblem:  # is told where the template is checked
            return ""

    def room(self, inspected: Checkpoint) -> int | None:
        """Tokens that a prompt may have; None where only the worker's tokenizer tells."""
        return self._max_length(inspected)

    def excess(self, inspected: Checkpoint) -> Iterator[str]:
        """A sentence where the text that a template has for every row is more than a row may have."""
        model, room, text = self.settings, self.room(inspected), self.fixed_text()
        # A token is a byte at the least, and a big vocabulary takes a second to read.
        if room is None or len(text.encode()) <= room or model.gguf_file or model.trust_remote_code:
            return
        encode = stored_encode(inspected.folder)
        if encode is None or (tokens := len(encode(text))) <= room:
            return
        yield too_much_text(tokens, room, () if model.truncation is None else (*model.truncation.fields,))

    def memory(
        self, inspected: Checkpoint, lengths: npt.NDArray[np.int64], labels: int
    ) -> MemoryEstimate | None:
        # NumPy only where it is needed: a typo in a key shall be told at once.
        from ensemble.members.huggingface.memory.estimate import checkpoint_memory

        return checkpoint_memory(self.settings, inspected, lengths, labels)

    def fingerprint(self, inspected: Checkpoint, assigned: Assigned) -> Mapping[str, object]:
        model = self.settings
        return {
            **super().fingerprint(inspected, assigned),
            **{key: getattr(model, key) for key in _TEXT_AS_GIVEN},
            "text_columns": model.text_columns,
            # Only where it is given: what was made before there was this key stays what it is.
            **({"truncation": model.truncation.model_dump()} if model.truncation else {}),
            "max_length": self._max_length(inspected),
            "tokenizer_kwargs": without_fetching(model.tokenizer_kwargs),
        }

    def worker_settings(
        self, inspected: Checkpoint, assigned: Assigned, offload_folder: Path | None
    ) -> Mapping[str, Any]:
        model, keys = self.settings, (field.name for field in fields(ModelSettings))
        settings = {
            **{key: getattr(model, key) for key in keys if hasattr(model, key)},
            **self._loading(inspected, assigned, offload_folder),
            "max_length": self._max_length(inspected),
            "truncation": model.truncation and model.truncation.model_dump(),
            "view_templates": tuple(view.changes.get("prompt_template") for view in model.counted_views),
        }
        return asdict(ModelSettings(**settings))

    def content(self, inspected: Checkpoint, files: FileDigests) -> Mapping[str, str]:
        """The digests of the weights, the adapter's among them, and of the tokenizer."""
        model, folder = self.settings, inspected.folder
        commit = hub_commit(model.model_name_or_path, folder)
        tokenizer = tokenizer_digest(folder if commit is None else None, model.tokenizer_kwargs, files)
        return {**super().content(inspected, files), "tokenizer": digest_of([commit, tokenizer])}

    def _max_length(self, inspected: Checkpoint) -> int | None:
        """Tokens that a row may have; None where only the worker's tokenizer tells."""
        model = self.settings
        # Settings and code of its own, a GGUF file's vocabulary, files that may still be on the hub.
        has_own = without_fetching(model.tokenizer_kwargs) or model.gguf_file or model.trust_remote_code
        is_known = not has_own and Path(model.model_name_or_path).is_dir()
        return model.max_length or (own_max_length(inspected.folder) if is_known else None)


def without_fetching(kwargs: Mapping[str, object]) -> dict[str, object]:
    """Arguments of ``from_pretrained`` without those that say how files are had."""
    return {key: value for key, value in kwargs.items() if key not in _HOW_TO_FETCH}
