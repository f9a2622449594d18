"""Describe Hugging Face checkpoints on the parent's side, without torch: what their kinds share."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from ensemble.common.digests import FileDigests, digest_of
from ensemble.common.errors import CheckpointError
from ensemble.common.files import HubFile, read_json, remove_folder
from ensemble.common.host import is_wsl
from ensemble.common.packages import installed_versions
from ensemble.common.text import listed, shown_path
from ensemble.members.base import Assigned, Candidate, MemberKind, RanWith, Reads, ResourceRequest
from ensemble.members.footprint import CPU_TOKEN_BUDGET, GPU_TOKEN_BUDGET, MemoryEstimate
from ensemble.members.huggingface.checkpoint.digests import hub_commit, tokenizer_digest, weights_digest
from ensemble.members.huggingface.checkpoint.hub import find_file, how_to_install, hub_folder
from ensemble.members.huggingface.checkpoint.inspect import (
    Checkpoint,
    adapter_tokenizers,
    checkpoint_question,
    tokenizer_folder,
)
from ensemble.members.huggingface.checkpoint.labels import activation_of
from ensemble.members.huggingface.checkpoint.quantization_methods import (
    package_of,
    quantization_problems,
    quantization_warnings,
)
from ensemble.members.huggingface.settings import TO_BE_TRAINED, HuggingFaceSettings, TextSettings
from ensemble.members.huggingface.spec import (
    CAPPED_BLOCKS,
    HEAD_FILE,
    AdapterSource,
    CheckpointSettings,
    ModelSettings,
    choose_compute_dtype,
    too_much_text,
    without_fetching,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ensemble.common.protocol import Activation as OutputActivation
    from ensemble.members.questions import Question

# Keys of a member that model_kwargs may not repeat.
_MEMBER_KEYS = (
    "dtype revision trust_remote_code quantization_config attn_implementation device_map max_memory offload_folder"
).split()
# The fingerprint takes these keys as they are, where a kind has them, and the effect of the others, so that writing
# a default into the config changes nothing.
_VERBATIM_KEYS = set(
    "allow_tf32 merge_adapter trust_remote_code quantization_config torch_compile prompt_template "
    "add_special_tokens truncation_side truncation choices".split()
)
# Keys that the parent decides for all workers where the config does not.
_DECIDED_KEYS = ("dtype", "attn_implementation")
# The time without torch.compile: compiling takes 20 to 25 s and has saved 4 to 36 % (docs/how-to/faster.md).
_COMPILING_PAYS_FROM_SECONDS = 120.0
_NO_LOADING_THREADS = "HF_DEACTIVATE_ASYNC_LOAD"
# Both are set to the same value.  From 2.8 on torch has the second and warns if only the first is set, but 2.9's
# CUDA allocator ignores the second (pytorch issue 183387).
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_OF_STEP = re.compile(r"checkpoint-\d+")  # Trainer's own names
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
S = TypeVar("S", bound=HuggingFaceSettings)
T = TypeVar("T", bound=TextSettings)
C = TypeVar("C", bound=Checkpoint)


class HuggingFaceMember(MemberKind[S, C], Generic[S, C]):
    """Describe a checkpoint; each kind adds what it reads and what its outputs mean.

    ``auto_class`` is the class of transformers that loads it.
    """

    auto_class: ClassVar[str]

    def request(self) -> ResourceRequest:
        model = self.settings
        # Quantized layers are offloaded only in float32, which is too large for a member that does not fit its GPU.
        return ResourceRequest(
            num_gpus=model.num_gpus,
            replicas=model.replicas,
            batch_size=None if model.batch_size == "auto" else model.batch_size,
            max_num_batched_tokens=model.max_num_batched_tokens,
            device_map=model.device_map if isinstance(model.device_map, dict) else None,
            max_memory=model.max_memory,
            offload_folder=model.offload_folder,
            may_offload=model.quantization_config is None and not model.used_adapters,
            uses_torch=True,
        )

    def sources(self) -> tuple[str, ...]:
        model = self.settings
        return tuple(dict.fromkeys((model.model_name_or_path, *model.averaged, *self._adapter_names())))

    def _adapter_names(self) -> Iterator[str]:
        for adapter in self.settings.used_adapters:
            yield from adapter.names

    def hub_files(self, inspected: C) -> tuple[HubFile, ...]:
        model = self.settings
        files: list[HubFile] = []
        commit = hub_commit(model.model_name_or_path, inspected.folder)
        if commit:
            files.append(HubFile(model.model_name_or_path, "config.json", commit))
        names = dict.fromkeys(self._adapter_names())
        files += [HubFile(name, "adapter_config.json", None) for name in names if not Path(name).is_dir()]
        return tuple(files)

    def question(self) -> Question | None:
        name = self.settings.model_name_or_path
        folder = Path(name) if os.path.isdir(name) else hub_folder(name, self.settings.revision)  # noqa: PTH112
        return None if folder is None else checkpoint_question(self.settings, folder, self.auto_class)

    def problems(self, inspected: C | None) -> Iterator[str]:
        model = self.settings
        for key in _MEMBER_KEYS:
            if key in model.model_kwargs:
                yield f"model_kwargs.{key}: use the model's own key {key} instead"
        stored = inspected.quantization if inspected is not None else None
        if inspected is not None:
            yield from inspected.facts.key_problems
        yield from quantization_problems(model.quantization_config, stored, model.merge_adapter)
        for package, key in self.packages(inspected):
            if not installed_versions([package]):
                name = key.removeprefix(".") if key.startswith(".") else "model_name_or_path"
                how = how_to_install(package)
                yield f"{name}: needs the package {package}, which is not installed: {how}"
        if model.torch_compile and stored is not None:
            yield "torch_compile: its checkpoint is quantized, and such layers are not compiled; drop this"

    def warnings(self, inspected: C) -> Iterator[str]:
        yield from quantization_warnings(self.settings.quantization_config, inspected.quantization)

    def packages(self, inspected: C | None) -> Iterator[tuple[str, str]]:
        model = self.settings
        package = package_of(model.quantization_config)
        stored_package = package_of(inspected.quantization) if inspected is not None else None
        if package is not None:
            yield package, ".quantization_config"
        elif stored_package is not None:
            yield stored_package, ", a quantized checkpoint,"
        if model.used_adapters:
            yield "peft", f".{model.adapter_key}"

    def fingerprint(self, inspected: C, assigned: Assigned) -> Mapping[str, object]:
        model = self.settings
        is_on_hub = not inspected.folder.is_dir()  # so that only its name identifies it
        return {
            **model.model_dump(include=_VERBATIM_KEYS),
            "attn_implementation": assigned.attention,
            "label_order": inspected.label_order,
            "activation": inspected.activation,
            "combination_type": model.adapter.combination_type if model.adapter else "",
            "dtype": assigned.dtype,
            "compute_dtype": self._compute_dtype(inspected, assigned),
            "model_kwargs": without_fetching(model.model_kwargs),
            "source": [model.model_name_or_path, model.revision or "main"] if is_on_hub else None,
        }

    def fingerprint_anywhere(self, inspected: C) -> Mapping[str, object]:
        model = self.settings
        asked = {"dtype": model.dtype, "attn_implementation": model.attn_implementation}
        assigned = Assigned(gpus=0, dtype=model.dtype, attention=model.attn_implementation)
        decided = ["compute_dtype", *(name for name, value in asked.items() if value in (None, "auto"))]
        values = self.fingerprint(inspected, assigned)
        return {name: value for name, value in values.items() if name not in decided}

    def candidates(
        self, inspected: C, assigned: Assigned, ran_with: RanWith | None = None
    ) -> Sequence[Sequence[Candidate]]:
        """Return precisions with and without quantization, attentions, batch sizes, and ``torch.compile``."""
        model, on_gpu = self.settings, assigned.gpus > 0
        ran_with = ran_with or RanWith()
        dtypes = ["float32", "bfloat16", "float16"]
        if on_gpu and assigned.capability is not None and assigned.capability < (8, 0):
            dtypes.remove("bfloat16")  # only emulated there
        plain: dict[str, Any] = {} if model.quantization_config is None else {"quantization_config": None}
        eager = {"torch_compile": False} if model.torch_compile else {}
        precisions = [Candidate(dtype, {"dtype": dtype, **plain, **eager}) for dtype in dtypes]
        if inspected.quantization is None and not model.merge_adapter:
            quantized: dict[str, dict[str, Any]] = {
                "int8": {"load_in_8bit": True},
                "int8, threshold 0": {"load_in_8bit": True, "llm_int8_threshold": 0.0},
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
        architecture = inspected.facts.architecture
        if architecture is None or architecture.supports_sdpa is False:
            return ()
        names = ["sdpa", "eager"]
        if on_gpu and importlib.util.find_spec("flash_attn") is not None and ran_with.dtype != "float32":
            names.append("flash_attention_2")
        if architecture.soft_capping:
            names[0] = CAPPED_BLOCKS  # sdpa leaves out the cap
        current = ran_with.attention or names[0]
        return [Candidate(name, {"attn_implementation": name}) for name in names if name != current]

    def _budgets(self, on_gpu: bool, ran_with: RanWith) -> Sequence[Candidate]:
        if self.settings.batch_size != "auto":
            return ()
        current = ran_with.token_budget or (GPU_TOKEN_BUDGET if on_gpu else CPU_TOKEN_BUDGET)
        return [
            Candidate(f"{tokens:,} tokens a batch", {"max_num_batched_tokens": tokens})
            for tokens in (current // 2, current * 2)
            # With fewer tokens, both budgets may cut the rows into the same batches.
            if ran_with.tokens is None or ran_with.tokens >= 2 * max(tokens, current)
        ]

    def _compiled(self, inspected: C, gpus: int) -> Sequence[Candidate]:
        model = self.settings
        placements = (model.device_map, model.max_memory, model.offload_folder)
        is_placed = any(placement is not None for placement in placements)
        if is_placed or gpus > 1 or inspected.quantization is not None:
            return ()
        return [Candidate("torch.compile", {"torch_compile": True}, _COMPILING_PAYS_FROM_SECONDS)]

    def _loading(
        self,
        settings_class: type[CheckpointSettings],
        inspected: C,
        assigned: Assigned,
        offload_folder: Path | None,
        **further: object,
    ) -> dict[str, Any]:
        """Return settings for workers: keys of the config, what follows from the others, and ``further`` ones."""
        model, footprint = self.settings, assigned.footprint
        values: dict[str, Any] = {
            **model.model_dump(include={field.name for field in fields(settings_class)}),
            "auto_class": self.auto_class,
            "job_adapters": tuple(
                source and replace(source, names=_with_slash(source.names)) for source in model.view_adapters
            ),
            "averaged_checkpoints": _with_slash(model.averaged),
            # The commit that was checked: a branch on the hub may have moved since.
            "revision": hub_commit(model.model_name_or_path, inspected.folder) or model.revision,
            "label_order": inspected.label_order,
            "dtype": assigned.dtype,
            "attn_implementation": assigned.attention,
            "compute_dtype": self._compute_dtype(inspected, assigned),
            "asked": tuple(key for key in _DECIDED_KEYS if getattr(model, key, None) not in (None, "auto")),
            "batch_size": None if model.batch_size == "auto" else model.batch_size,
            "token_budget": model.max_num_batched_tokens,
            "max_memory": model.max_memory and {str(key): size for key, size in model.max_memory.items()},
            "offload_folder": None if offload_folder is None else str(offload_folder.resolve()),
            **(asdict(footprint.activation) if footprint else {}),
            "width": footprint.width if footprint else None,
            **further,
        }
        return asdict(settings_class(**values))

    def _compute_dtype(self, inspected: C, assigned: Assigned) -> str | None:
        capability = assigned.capability if assigned.gpus else None
        return choose_compute_dtype(inspected.quantization, capability, assigned.dtype)

    def learned_activation(self, labels: int) -> OutputActivation:
        return activation_of(getattr(self.settings, "problem_type", None), labels)

    def arrange_training(self, folder: Path) -> str:
        return lift_checkpoint(folder)

    def trained_settings(self, folder: Path) -> Mapping[str, str]:
        """Return the keys of a checkpoint, or of an adapter and the base that the member or the adapter names."""
        adapter_config = folder / "adapter_config.json"
        if not adapter_config.is_file():
            return {"model_name_or_path": str(folder)}
        base = self.settings.model_name_or_path
        if base == TO_BE_TRAINED:
            base = str(read_json(adapter_config).get("base_model_name_or_path") or "")
        if not base:
            raise CheckpointError(
                f"{folder}: its adapter_config.json names no base (base_model_name_or_path is null); let the "
                "command write the base's name there, or name it in the config (model_name_or_path)"
            )
        return {"model_name_or_path": base, "adapter_name_or_path": str(folder)}

    def environment(self) -> Mapping[str, str]:
        model = self.settings
        is_asked = "expandable_segments" in model.model_fields_set
        is_expandable = model.expandable_segments and (is_asked or not is_wsl())
        allocator = allocator_environment(is_expandable, model.max_split_size_mb, os.environ)
        # Loading threads of transformers 5.0 put weights on the GPU before these are quantized, so that a member
        # that would fit runs out of memory (transformers issue 43032).  From 5.5 on there are none here.
        return allocator if model.quantization_config is None else {**allocator, _NO_LOADING_THREADS: "1"}

    def content(self, inspected: C, files: FileDigests) -> Mapping[str, str]:
        """Return the digest of the weights, including those of the adapter of a member without views."""
        model, folder = self.settings, inspected.folder
        weights: list[object] = [
            hub_commit(model.model_name_or_path, folder)
            or weights_digest(folder, model.model_kwargs, model.trust_remote_code, files)
        ]
        weights += self._adapter_digests(model.adapter, files)
        weights += [
            weights_digest(Path(name), {}, model.trust_remote_code, files) for name in model.averaged[1:]
        ]
        return {"weights": digest_of(weights)}

    def _adapter_digests(self, adapter: AdapterSource | None, files: FileDigests) -> Iterator[str]:
        for name in () if adapter is None else adapter.names:
            folder = find_file(name, "adapter_config.json").parent
            runs_code = self.settings.trust_remote_code
            yield hub_commit(name, folder) or weights_digest(folder, {}, runs_code, files)


class TextCheckpoint(HuggingFaceMember[T, Checkpoint]):
    """Describe a checkpoint that reads text; ``examples`` is the class of what it learns from rows, if trained.

    ``cuts_beginning``: whether long prompts are cut there, where the text stands that is the same in all rows.
    """

    examples: ClassVar[str] = "ensemble.members.huggingface.training.examples:ClassifierExamples"
    cuts_beginning: ClassVar[bool] = False

    def reads(self) -> Reads:
        return Reads(self.settings.text_columns, self.settings.prompt_template)

    def problems(self, inspected: Checkpoint | None) -> Iterator[str]:
        yield from super().problems(inspected)
        for key, settings in self.settings.by_template.items():
            yield from (f"{key}{problem}" for problem in settings.truncation_problems())
        if inspected is not None and (self.settings.truncation is not None or self.cuts_beginning):
            yield from self._too_long_texts(inspected)

    def warnings(self, inspected: Checkpoint) -> Iterator[str]:
        yield from super().warnings(inspected)
        tokens, positions = self.settings.max_length, inspected.facts.max_positions
        if tokens and positions and tokens > positions:
            yield f"max_length: {tokens} is more than the {positions} positions of the model; rows are cut to these"
        if self.settings.truncation is None and not self.cuts_beginning:
            yield from self._too_long_texts(inspected)

    def _too_long_texts(self, inspected: Checkpoint) -> Iterator[str]:
        """Yield a sentence for each template whose text for every row is longer than a prompt may be."""
        tokens = self.settings.max_length or inspected.facts.max_length
        ids, labels = inspected.facts.text_ids, len(getattr(self.settings, "label_tokens", ()))
        if tokens is None:
            return
        # All tokens of a label but its last follow the prompt.
        tokens = max(1, tokens - max(map(len, ids[:labels]), default=1) + 1)
        for (key, settings), text in zip(self.settings.by_template.items(), ids[labels:], strict=False):
            if len(text) > tokens:
                cut = [*settings.truncation.fields] if settings.truncation else []
                yield f"{key}{too_much_text(len(text), tokens, cut)}"

    def memory(
        self, inspected: Checkpoint, lengths: npt.NDArray[np.int64], labels: int
    ) -> MemoryEstimate | None:
        # Imported late because it imports NumPy: a typo in a key is reported at once.
        from ensemble.members.huggingface.memory import checkpoint_memory

        return checkpoint_memory(self.settings, inspected, lengths, labels)

    def fingerprint(self, inspected: Checkpoint, assigned: Assigned) -> Mapping[str, object]:
        model = self.settings
        return {
            **super().fingerprint(inspected, assigned),
            "text_columns": model.text_columns,
            "max_length": model.max_length or inspected.facts.max_length,
            "tokenizer_kwargs": without_fetching(model.tokenizer_kwargs),
        }

    def worker_settings(
        self, inspected: Checkpoint, assigned: Assigned, offload_folder: Path | None
    ) -> Mapping[str, Any]:
        model = self.settings
        return self._loading(
            ModelSettings,
            inspected,
            assigned,
            offload_folder,
            text_columns=model.text_columns,
            job_templates=tuple(view.changes.get("prompt_template") for view in model.counted_views)
            or (None,),
        )

    def training_settings(self, labels: Sequence[str]) -> Mapping[str, Any]:
        """Return what the process that trains the member from ``train.base_model`` must know, as JSON values.

        The rows are those of the member without views.

        Raises:
            CheckpointError: the base model has no ``config.json``.
        """
        model = self.settings
        assert model.train is not None
        assert model.train.base_model is not None
        folder = find_file(model.train.base_model, "config.json", model.revision).parent
        without = dict.fromkeys(("adapter_name_or_path", "adapters", "views"))
        of_base = {"model_name_or_path": model.train.base_model, **without}
        base = type(self)(model.model_copy(update=of_base))
        inspected = Checkpoint("none", tuple(range(len(labels))), "", folder)
        assigned = Assigned(gpus=0, dtype=model.dtype, attention=model.attn_implementation)
        return {
            "predictor": self.child.partition(":")[2],
            "examples": self.examples,
            "problem_type": getattr(model, "problem_type", None),
            "member": base.worker_settings(inspected, assigned, None),
        }

    def content(self, inspected: Checkpoint, files: FileDigests) -> Mapping[str, str]:
        """Return the digests of the weights, including the adapter's, and of the tokenizer."""
        model, folder = self.settings, tokenizer_folder(self.settings, inspected.folder)
        commit = hub_commit(model.model_name_or_path, folder)
        tokenizer = tokenizer_digest(folder if commit is None else None, model.tokenizer_kwargs, files)
        # A worker loads those of adapters, so that the run watches them.
        for own in filter(None, adapter_tokenizers(model).values()):
            tokenizer_digest(own, {}, files)
        # An adapter on the hub may have a tokenizer, which only the worker fetches; its commit is in the weights.
        return {**super().content(inspected, files), "tokenizer": digest_of([commit, tokenizer])}


def lift_checkpoint(folder: Path) -> str:
    """Move the checkpoint, adapter or head that a command has left to the top of its folder, if it lies below.

    Of what Trainer saves on the way (``checkpoint-500``) nothing counts beside a final model.

    Returns:
        what the user should know of it; empty: nothing.

    Raises:
        CheckpointError: there is none, or several.
    """
    for aside in sorted(folder.glob(".*.moving")):  # a kill came while it was moved
        _move_up(aside, folder)
    # A command may have removed it, or put a link in its place.
    left = [path for path in sorted(Path(path) for path, _, _ in os.walk(folder)) if _is_checkpoint(path)]
    on_the_way = [path for path in left if any(map(_OF_STEP.fullmatch, path.relative_to(folder).parts))]
    left = [path for path in left if path not in on_the_way] or on_the_way
    if not left:
        raise CheckpointError(
            f"its command ended well, but left neither a checkpoint nor an adapter in {shown_path(folder)}; save "
            "it there (save_pretrained, or Trainer.save_model)"
        )
    if len(left) > 1:
        names = [str(path.relative_to(folder)) for path in left]
        raise CheckpointError(
            f"its command left {len(left)} checkpoints in {shown_path(folder)} ({listed(names, 5, str)}), and it "
            "is unknown which is meant; keep one (save_strategy: no, and a save at the end)"
        )
    note = ""
    if left == on_the_way:
        step = left[0].relative_to(folder)
        note = f"its command left no final model, and what it saved on the way is taken ({step})"
    if left == [folder]:
        return note
    aside = left[0].rename(folder / f".{left[0].name}.moving")  # a file in it may have the folder's name
    _move_up(aside, folder)
    return note


def _move_up(aside: Path, folder: Path) -> None:
    for path in sorted(aside.iterdir()):
        target = folder / path.name
        remove_folder(target)
        path.rename(target)
    aside.rmdir()


def _is_checkpoint(folder: Path) -> bool:
    has_weights = any(any(folder.glob(pattern)) for pattern in _WEIGHTS)
    is_whole = (folder / "config.json").is_file() and has_weights
    return is_whole or any((folder / name).is_file() for name in ("adapter_config.json", HEAD_FILE))


def _with_slash(names: Sequence[str]) -> tuple[str, ...]:
    """Return folders by paths with a slash: in lists Ray replaces only those by a node's."""
    return tuple(
        name if "/" in name or not Path(name).is_dir() else str(Path(name).absolute()) for name in names
    )


def allocator_environment(
    expandable_segments: bool, max_split_size_mb: int | None, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that set torch's CUDA allocator, which a worker needs before it imports torch.

    Options in the user's environment come last, so that they take precedence.  PyTorch's "CUDA semantics"
    documents them ("Optimizing memory usage").  The worker compares the allocator's settings with the config's.
    """
    options = [environ[variable] for variable in _ALLOCATOR_VARIABLES if environ.get(variable)]
    if "backend:cudaMallocAsync" not in ",".join(options):  # which warns about these options
        if max_split_size_mb is not None:
            options.insert(0, f"max_split_size_mb:{max_split_size_mb}")
        options.insert(0, f"expandable_segments:{expandable_segments}")
    return dict.fromkeys(_ALLOCATOR_VARIABLES, ",".join(options))
