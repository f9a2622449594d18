"""Define the keys that kinds of Hugging Face checkpoints share, and the rules between them."""

# No "from __future__ import annotations": pydantic would evaluate every annotation from its text again.

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from ensemble.config import MemberConfig, ReaderConfig, StrictConfig, ViewConfig
from ensemble.config.document import Problem
from ensemble.config.schema import TrainConfig
from ensemble.config.values import (
    Column,
    Columns,
    Count,
    Devices,
    Duration,
    Folder,
    Marker,
    MaxMemory,
    MustBe,
    Settings,
    Share,
    Source,
    Sources,
    SplitSize,
    Text,
)
from ensemble.members.huggingface.checkpoint.weight_files import NO_GGUF
from ensemble.members.huggingface.spec import COMMIT, FLEX, AdapterSource

# Stands for the checkpoint of a member that a command of the user trains.
TO_BE_TRAINED: Final = "(to be trained)"
_PICKLE_ADVICE: Final = "drop this; the model's own key allow_pickle says whether pickles may be read"
_KERNEL_ADVICE: Final = "runs compiled code from the hub; it needs trust_remote_code: true"
_MEMBER_KEY_ADVICE: Final = "use the model's own key of this name instead"
_REFUSED_KWARGS: Final = {
    "model_kwargs": {
        "gguf_file": NO_GGUF,
        "use_safetensors": _PICKLE_ADVICE,
        "weights_only": _PICKLE_ADVICE,
        "allow_all_kernels": _KERNEL_ADVICE,
        "kernel_config": _KERNEL_ADVICE,
    },
    "tokenizer_kwargs": {
        "gguf_file": NO_GGUF,
        "revision": _MEMBER_KEY_ADVICE,
        "trust_remote_code": _MEMBER_KEY_ADVICE,
    },
    "processor_kwargs": {"revision": _MEMBER_KEY_ADVICE, "trust_remote_code": _MEMBER_KEY_ADVICE},
}


class AveragedCheckpoints(StrictConfig):
    """Whole checkpoints of one model, such as those of several folds, that become a single one."""

    of: ClassVar[tuple[str, str]] = ("checkpoint", "model_name_or_path")  # and the key of a single one
    # Two folders or more; each parameter is their mean: added in float32 in this order, then divided.
    average: Sources = Field(examples=[["folds/0", "folds/1"]])

    def broken_rules(self, labels: Sequence[str]) -> Iterator[Problem]:
        kind, key_of_one = self.of
        if len(self.average) == 1:
            yield ("average",), f"a mean needs two {kind}s; name a single one with {key_of_one}"
        paths = [os.path.realpath(name) for name in self.average]
        for number, path in enumerate(paths):
            if path in paths[:number]:
                yield ("average", number), f"the same {kind} twice; name it once"


class HuggingFaceSettings(MemberConfig):
    """A member's checkpoint, how it is loaded, and what it may take of the machine."""

    model_name_or_path: Source = Field(examples=["models/gemma-2-9b"])  # a folder, or a name on the hub
    checkpoints: AveragedCheckpoints | None = None  # instead of it, several that are averaged into one
    train: TrainConfig | None = None  # how to train the member; model_name_or_path may then be left out
    revision: Text | None = None  # branch, tag or commit on the hub; a commit with trust_remote_code
    adapter_name_or_path: Source | None = None  # a LoRA adapter of peft, a folder or a name on the hub
    merge_adapter: bool = False  # merge it into the weights; False: compute it beside them, as in training
    batch_size: Count | Literal["auto"] = "auto"  # rows in one forward pass
    max_num_batched_tokens: Count | None = None  # tokens in one forward pass, padding included
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"  # precision of the weights
    quantization_config: Settings | None = None  # quantize at loading, such as {load_in_4bit: true}
    attn_implementation: Text | None = None  # kernel: sdpa, eager, capped_blocks, flex, ...; None: chosen
    torch_compile: bool = False  # use torch.compile: loads slower, computes faster
    allow_tf32: bool = False  # compute float32 products in TF32: faster, three digits; Ampere and newer
    expandable_segments: bool = True  # setting of torch's GPU allocator; off on WSL; some vGPUs need false
    max_split_size_mb: SplitSize | None = None  # setting of torch's GPU allocator against fragments
    num_gpus: Devices | None = None  # GPUs of each replica; 0: the CPU; None: one, where there is a GPU
    replicas: Count | Literal["auto"] = "auto"  # loaded copies, which share the rows
    device_map: Text | Settings | None = None  # as in accelerate, such as auto or {model: 0, score: cpu}
    max_memory: MaxMemory | None = None  # memory for weights on each GPU, and on cpu (offload)
    offload_folder: Folder | None = None  # folder for weights that fit neither GPUs nor host memory
    trust_remote_code: bool = False  # run the checkpoint's code; a model on the hub needs a revision
    allow_pickle: bool = False  # read weights in .bin files; torch takes tensors only
    model_kwargs: Settings = Field(default_factory=dict)  # further arguments of the model's from_pretrained

    older_keys: ClassVar[Mapping[str, str]] = {
        "model_name_or_path": "model model_path model_name model_id path checkpoint pretrained",
        f"model_name_or_path: {NO_GGUF}": "gguf_file gguf",
        "dtype": "torch_dtype precision fp16 bf16",
        "quantization_config: {load_in_4bit: true}": "load_in_4bit",
        "quantization_config: {load_in_8bit: true}": "load_in_8bit",
        "quantization_config": "quantization bnb_config",
        "attn_implementation": "attention use_flash_attention_2",
        "torch_compile": "compile compiled use_compile",
        "batch_size": "bs per_device_eval_batch_size",
        "adapter_name_or_path": "adapter adapters adapter_path lora lora_path peft peft_model",
        "num_gpus": "gpus n_gpus device devices",
        "allow_tf32": "tf32",
        "offload_folder": "offload offload_dir",
    }
    alternatives: ClassVar[tuple[tuple[str, str], ...]] = (("model_name_or_path", "checkpoints"),)

    # Without adapters, which take turns in a worker.
    loaded_keys: ClassVar[tuple[str, ...]] = ("checkpoints", "model_name_or_path", "revision")

    # What train.method may be for this kind; none: it is trained by a command only.
    training_methods: ClassVar[tuple[str, ...]] = ()

    @property
    def training(self) -> TrainConfig | None:
        return self.train

    @model_validator(mode="before")
    @classmethod
    def _name_checkpoint(cls, values: Any) -> Any:
        """Take ``train.base_model`` or the first of ``checkpoints`` if ``model_name_or_path`` is left out."""
        if not isinstance(values, dict) or values.get("model_name_or_path") is not None:
            return values
        train, checkpoints = values.get("train"), values.get("checkpoints")
        if isinstance(train, dict):
            return {**values, "model_name_or_path": train.get("base_model") or TO_BE_TRAINED}
        names = checkpoints.get("average") if isinstance(checkpoints, dict) else None
        return {**values, "model_name_or_path": names[0]} if names and isinstance(names, list) else values

    @property
    def adapter(self) -> AdapterSource | None:
        """Return the member's own adapter, which views without an adapter use, too."""
        return None if self.adapter_name_or_path is None else AdapterSource((self.adapter_name_or_path,))

    @property
    def view_adapters(self) -> tuple[AdapterSource | None, ...]:
        """Return the adapter of each view, None for the base alone; a member without views has one."""
        return tuple(self.as_view(view).adapter for view in self.counted_views) or (self.adapter,)

    @property
    def used_adapters(self) -> tuple[AdapterSource, ...]:
        """Return the adapters of all views, each once."""
        return tuple(dict.fromkeys(adapter for adapter in self.view_adapters if adapter is not None))

    @property
    def switches_adapters(self) -> bool:
        """Return whether views of a model have other adapters than others of this model."""
        return any(len(set(model.view_adapters)) > 1 for model in self.models.values())

    @property
    def averaged(self) -> tuple[str, ...]:
        return () if self.checkpoints is None else self.checkpoints.average

    def broken_rules(self, labels: Sequence[str]) -> Iterator[Problem]:
        yield from super().broken_rules(labels)
        if self.averaged and self.averaged[0] != self.model_name_or_path:
            yield ("checkpoints",), _ONE_CHECKPOINT
        if self.averaged and "subfolder" in self.model_kwargs:
            yield ("model_kwargs", "subfolder"), "checkpoints.average reads the folders themselves; drop this"
        yield from self._broken_training()
        yield from self._broken_trust()
        yield from self._broken_placement()
        yield from self._broken_weights()
        is_exclusive = getattr(self, "problem_type", None) in (None, "single_label_classification")
        if self.train is not None and self.train.method == "head" and not (is_exclusive and len(labels) != 1):
            sentence = "head is a regression of labels that exclude each other; choose full or lora"
            yield ("train", "method"), sentence

    def _broken_training(self) -> Iterator[Problem]:
        """Find a training that this kind does not have, and adapters beside those that it makes."""
        if self.train is not None and self.used_adapters:
            yield (self.adapter_key,), "with train the training makes the member's adapters; drop this"
        if self.train is None or self.train.command is not None:
            return
        if not self.training_methods:
            yield ("train",), "this kind of member is trained by a command only; give train.command"
        elif self.train.method not in self.training_methods:
            methods = ", ".join(self.training_methods)
            yield ("train", "method"), f"this kind of member has {methods}; choose one, or give a command"
        for key in ("merge_adapter", "torch_compile"):
            if self.train.method in ("lora", "qlora") and getattr(self, key):
                yield (key,), "the folds' adapters take turns on one base, which this excludes; drop it"

    def _broken_trust(self) -> Iterator[Problem]:
        """Find keys that let files of the checkpoint run code, that bypass the keys for it, or name GGUF files."""
        commit = (
            "a commit's whole hash (40 hexadecimal digits), since a branch or tag can be moved to other code"
        )
        # Not Path.is_dir, which raises an error for a name that no folder can have.
        if self.trust_remote_code and not os.path.isdir(self.model_name_or_path):  # noqa: PTH112
            if self.revision is None:
                yield ("revision",), f"required with trust_remote_code: true; name {commit}"
            elif not re.fullmatch(COMMIT, self.revision):
                yield ("revision",), f"with trust_remote_code: true this is {commit}"
        for key, advice_by_name in _REFUSED_KWARGS.items():
            for name in getattr(self, key, ()):
                advice = advice_by_name.get(name)
                if advice is not None and not (self.trust_remote_code and advice is _KERNEL_ADVICE):
                    yield (key, name), advice

    def _broken_placement(self) -> Iterator[Problem]:
        """Find parts of the model without a device, or on a GPU that the lease does not have."""
        if self.device_map == {}:
            example = "{model: 0, score: 0}"
            yield ("device_map",), f"must not be empty; name the place of each part, such as {example}"
        if self.num_gpus is None:
            return
        lease = f"a lease of {self.num_gpus} has GPUs 0 to {self.num_gpus - 1}"
        if self.num_gpus == 0:
            lease = "num_gpus: 0 leaves only cpu"
        sentence = f"there is no such GPU: {lease}; GPUs count from 0 within it"
        for device in self.max_memory or {}:
            if isinstance(device, int) and device >= self.num_gpus:
                yield ("max_memory", str(device)), sentence
        for layer, device in self._device_by_layer.items():
            if isinstance(device, int) and device >= self.num_gpus:
                yield ("device_map", layer), sentence

    def _broken_weights(self) -> Iterator[Problem]:
        """Find keys about weights and their devices that exclude each other."""
        is_quantized = self.quantization_config is not None
        quantization = self.quantization_config or {}
        bits = next((key for key in ("load_in_8bit", "load_in_4bit") if quantization.get(key)), None)
        if bits and self._offloads and not quantization.get("llm_int8_enable_fp32_cpu_offload"):
            yield (
                ("quantization_config",),
                f"{bits} and offload go together only with llm_int8_enable_fp32_cpu_offload: true, which keeps the "
                "offloaded layers in float32",
            )
        if self.merge_adapter and not self.used_adapters and self.train is None:
            yield ("merge_adapter",), "there is no adapter to merge; add adapter_name_or_path"
        elif self.merge_adapter and self.switches_adapters:
            yield ("merge_adapter",), "a merged adapter cannot give way to those of other views; drop this"
        elif self.merge_adapter and is_quantized:
            yield (
                ("merge_adapter",),
                "quantized weights cannot take an adapter in without rounding it away; leave it unmerged, or drop "
                "quantization_config",
            )
        if self.used_adapters and self._offloads:
            yield (
                (self.adapter_key,),
                "an adapter needs its base on the devices themselves, not offloaded; quantize it, give it more "
                "GPUs, or merge the adapter into a checkpoint first",
            )
        if self.torch_compile:
            yield from self._broken_compile()
        if self.attn_implementation == FLEX and self.batch_size != "auto":
            yield ("batch_size",), f"{FLEX} packs rows by max_num_batched_tokens; set that instead"

    def _broken_compile(self) -> Iterator[Problem]:
        """Find keys that exclude ``torch_compile``."""
        if self.quantization_config is not None:
            yield ("torch_compile",), "quantized layers are not compiled; drop quantization_config, or this"
        placements = (self.max_memory, self.device_map, self.offload_folder)
        if any(placement is not None for placement in placements) or (self.num_gpus or 0) > 1:
            yield (
                ("torch_compile",),
                "layers that accelerate places, or over several GPUs, are not compiled; drop num_gpus, device_map, "
                "max_memory and offload_folder, or this",
            )
        if self.switches_adapters:
            yield ("torch_compile",), "compiled code keeps one adapter, and the views have several; drop this"
        if self.attn_implementation in ("flex_attention", FLEX):
            sentence = f"{self.attn_implementation} compiles itself; drop attn_implementation, or this"
            yield ("torch_compile",), sentence

    @property
    def adapter_key(self) -> str:
        """Return the key that names an adapter, of several the first."""
        keys = ("adapter_name_or_path", "adapters", "views")
        return next(key for key in keys if getattr(self, key, None) is not None)

    @property
    def _device_by_layer(self) -> dict[str, Any]:
        return self.device_map if isinstance(self.device_map, dict) else {}

    @property
    def _offloads(self) -> bool:
        """Return whether some weights are on the host or on disk."""
        if self.offload_folder is not None or ("cpu" in (self.max_memory or {}) and self.num_gpus != 0):
            return True
        devices = {str(device) for device in self._device_by_layer.values()}
        return "disk" in devices or ("cpu" in devices and len(devices) > 1)


class FieldTruncation(StrictConfig):
    """A column's share of the tokens where a row is too long, and the part of the column that is kept."""

    share: Share = 1.0  # of the tokens that the rest of the prompt leaves, relative to the other fields
    # head_tail: half of each; newest_turns: of a JSON list the last ones whole, and the end of the one before;
    # newest_rounds: the same of all columns that have it together, where their lists are as long as each other
    keep: Literal["head", "tail", "head_tail", "newest_turns", "newest_rounds"] = "head"


class TruncationConfig(StrictConfig):
    """The columns of a template that are cut where a row has more than ``max_length`` tokens; all else stays."""

    # By column, such as {prompt: {share: 1, keep: head}}; what one does not need, the others get.
    fields: Annotated[
        dict[Column, FieldTruncation], MustBe("a mapping of columns to {share: ..., keep: ...}", dict)
    ] = Field(examples=[{"prompt": {"share": 1, "keep": "head"}}])
    marker: Marker = " [...] "  # stands where text was cut; may be empty

    def broken_rules(self, labels: Sequence[str]) -> Iterator[Problem]:
        if not self.fields:
            yield ("fields",), "name at least one column, such as {prompt: {keep: head}}"
        of_rounds = [column for column, field in self.fields.items() if field.keep == "newest_rounds"]
        if len(of_rounds) == 1:
            yield (
                ("fields", of_rounds[0], "keep"),
                "a round is a turn of several columns; give newest_rounds to each of them, or take newest_turns",
            )


class AveragedAdapters(AveragedCheckpoints):
    """Adapters of one base, such as those of several folds, that become a single adapter."""

    of: ClassVar[tuple[str, str]] = ("adapter", "adapter_name_or_path")
    average: Sources = Field(examples=[["models/fold0", "models/fold1"]])  # two LoRA adapters or more
    # cat: the mean of what they add to the weights, exactly; linear: the mean of their matrices A and that of their
    # matrices B, which is another model and needs equal ranks
    combination_type: Literal["cat", "linear"] = "cat"


_ONE_CHECKPOINT: Final = "model_name_or_path or train names another one; keep one of the two"
_TWO_KINDS_OF_ADAPTER: Final = "adapter_name_or_path is given as well; keep one of the two"


class TextView(ViewConfig):
    """A view of each row for a member that reads text: with other columns, template, adapter or checkpoint."""

    prompt_template: Text | None = None  # instead of the member's own prompt_template or text_column
    # Instead of the member's own checkpoint and adapter, in a worker of its own.
    model_name_or_path: Source | None = Field(default=None, examples=["models/fold0"])
    checkpoints: AveragedCheckpoints | None = None  # instead of it, several that are averaged into one
    revision: Text | None = None  # of this checkpoint
    adapter_name_or_path: Source | None = None  # instead of the member's own adapter, on the same base
    adapters: AveragedAdapters | None = None  # instead of it, several that are averaged into one

    @property
    def changes(self) -> dict[str, Any]:
        changes: dict[str, Any] = {}
        if self.prompt_template is not None:
            changes |= {"prompt_template": self.prompt_template, "text_column": None}
        name = self.model_name_or_path if self.checkpoints is None else self.checkpoints.average[0]
        if name is not None:
            # The member's revision and adapter belong to the member's own checkpoint.
            changes |= {"checkpoints": self.checkpoints, "model_name_or_path": name}
            changes |= {"revision": self.revision, "adapter_name_or_path": None, "adapters": None}
        if self.adapter_name_or_path is not None or self.adapters is not None:
            changes |= {"adapter_name_or_path": self.adapter_name_or_path, "adapters": self.adapters}
        return changes

    def broken_rules(self, labels: Sequence[str]) -> Iterator[Problem]:
        yield from super().broken_rules(labels)
        if self.adapters is not None and self.adapter_name_or_path is not None:
            yield ("adapters",), _TWO_KINDS_OF_ADAPTER
        if self.checkpoints is not None and self.model_name_or_path is not None:
            yield ("checkpoints",), _ONE_CHECKPOINT
        if self.revision is not None and self.model_name_or_path is None:
            yield ("revision",), "is that of the view's model_name_or_path; name it, too"


TextViews = Annotated[tuple[TextView, ...], MustBe("a list of views", list)]


class TextSettings(HuggingFaceSettings, ReaderConfig):
    """Set how a member reads a row's text; exactly one of ``prompt_template`` and ``text_column`` is set."""

    adapters: AveragedAdapters | None = None  # average several adapters into one
    prompt_template: Text | None = None  # prompt as a Jinja template over the row's columns
    text_column: Column | Columns | None = None  # column with the text; two columns: a pair of texts
    max_length: Count | None = None  # most tokens of a row, longer rows are cut; None: the checkpoint's limit
    truncation_side: Literal["left", "right"] | None = None  # end to cut; None: the tokenizer's own
    truncation: TruncationConfig | None = None  # how to cut long columns of a prompt; None: cut one end
    add_special_tokens: bool = True  # False: the template has the special tokens already
    # Views of each row, whose predictions are averaged; left out: every row once, as it is.
    views: TextViews | None = Field(
        default=None,
        examples=["[{name: as_is}, {name: swapped, swap: {columns: [a, b], labels: [a_wins, b_wins]}}]"],
    )
    tokenizer_kwargs: Settings = Field(default_factory=dict)  # further arguments of its from_pretrained
    compile_timeout: Duration = 120.0  # time for compiling flex attention; then another one takes its place

    older_keys: ClassVar[Mapping[str, str]] = {
        **HuggingFaceSettings.older_keys,
        "adapter_name_or_path": "adapter adapter_path lora lora_path peft peft_model",
        "max_length": "max_len max_seq_len max_seq_length model_max_length",
        "prompt_template": "template prompt",
        "text_column": "text column input_column",
    }
    alternatives: ClassVar[tuple[tuple[str, str], ...]] = (
        *HuggingFaceSettings.alternatives,
        ("prompt_template", "text_column"),
        ("adapter_name_or_path", "adapters"),
    )

    @property
    def fixed_text(self) -> str:
        """Return the text that every prompt has, whatever the row."""
        if self.prompt_template is None:
            return ""
        # Imported late because Jinja2 slows the start down.
        from ensemble.data.json_cells import TemplateProblem
        from ensemble.data.template import compile_template

        try:
            return "".join(compile_template(self.prompt_template).fixed_texts)
        except TemplateProblem:  # which the check of the template reports
            return ""

    @property
    def by_template(self) -> dict[str, Self]:
        """Return these settings and those of views with another template, by what begins sentences about them."""
        views = enumerate(self.views or ())
        others = {
            f"views[{n}]: ": self.as_view(view) for n, view in views if "prompt_template" in view.changes
        }
        return {"": self, **others}

    @property
    def adapter(self) -> AdapterSource | None:
        if self.adapters is None:
            return super().adapter
        return AdapterSource(self.adapters.average, self.adapters.combination_type)

    @property
    def text_columns(self) -> tuple[str, ...]:
        """Return the one or two columns that a member without a template reads."""
        if self.text_column is None:
            return ()
        return (self.text_column,) if isinstance(self.text_column, str) else tuple(self.text_column)

    @staticmethod
    def label_problems(labels: Sequence[str]) -> Iterator[Problem]:
        """Yield that the labels are not positions, as a kind with ``choices`` needs them."""
        if labels and tuple(labels) != tuple(map(str, range(len(labels)))):
            yield (
                ("choices",),
                'labels must be the positions of choices: "0", "1" and so on, to the most that any row has',
            )

    def truncation_problems(self) -> Iterator[str]:
        """Yield fields that the template does not read."""
        if self.truncation is None or self.prompt_template is None:
            return
        # Imported late because Jinja2 slows the start down.
        from ensemble.data.json_cells import TemplateProblem
        from ensemble.data.template import compile_template

        try:
            columns = compile_template(self.prompt_template).columns
        except TemplateProblem:  # which the check of the template reports
            return
        for column in self.truncation.fields:
            if column not in columns:
                yield (
                    f"truncation.fields.{column}: prompt_template does not read this column; it reads "
                    f"{', '.join(columns) or 'none'}"
                )

    def broken_rules(self, labels: Sequence[str]) -> Iterator[Problem]:
        if self.prompt_template is None and self.text_column is None:
            yield (), "prompt_template or text_column is required, for example text_column: text"
        elif self.prompt_template is not None and self.text_column is not None:
            yield ("prompt_template",), "give either prompt_template or text_column, not both"
        if self.adapters is not None and self.adapter_name_or_path is not None:
            yield ("adapters",), _TWO_KINDS_OF_ADAPTER
        for number, view in enumerate(self.all_views):
            if "model_name_or_path" not in view.changes:
                continue
            for loc, sentence in self.as_view(view)._broken_trust():
                if loc == ("revision",):
                    yield ("views", number, *loc), sentence
        if self.truncation is not None:
            if self.text_column is not None and self.prompt_template is None:
                yield (
                    ("truncation",),
                    'cuts the columns of a prompt_template; write one, such as "{{ text }}", instead of '
                    "text_column",
                )
            if "truncation_side" in self.model_fields_set and self.truncation_side is not None:
                yield (
                    ("truncation_side",),
                    "with truncation each field says what is kept of it; leave this out",
                )
        yield from super().broken_rules(labels)
