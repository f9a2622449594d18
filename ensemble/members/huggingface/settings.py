"""The keys that kinds of Hugging Face checkpoints share, and the rules that tie them together."""

# No "from __future__ import annotations": pydantic would evaluate every annotation from its text again.

import os
import re
from collections.abc import Collection, Iterator, Mapping
from hashlib import sha256
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field

from ensemble.config import MemberConfig, ReaderConfig, StrictConfig, ViewConfig
from ensemble.config.document import Problem, place
from ensemble.config.values import (
    GPU_NUMBER,
    Column,
    Columns,
    Count,
    Devices,
    Folder,
    Marker,
    MaxMemory,
    MustBe,
    Settings,
    Share,
    Source,
    SplitSize,
    Text,
    as_tuple,
    label_items,
    with_home,
)

COMMIT: Final = r"[0-9a-fA-F]{40}"
_PICKLES: Final = "drop this; the model's own key allow_pickle says whether pickles may be read"
_KERNELS: Final = "runs compiled code from the hub; it needs trust_remote_code: true"
_OWN: Final = "use the model's own key of this name instead"
_UNTRUSTED_KWARGS: Final = {
    "model_kwargs": {
        "use_safetensors": _PICKLES,
        "weights_only": _PICKLES,
        "allow_all_kernels": _KERNELS,
        "kernel_config": _KERNELS,
    },
    "tokenizer_kwargs": {"revision": _OWN, "trust_remote_code": _OWN},
    "processor_kwargs": {"revision": _OWN, "trust_remote_code": _OWN},
}


class HuggingFaceSettings(MemberConfig):
    """Which checkpoint, how it is loaded, and what it may take of the machine."""

    model_name_or_path: Source = Field(examples=["models/gemma-2-9b"])  # a folder, or a name on the hub
    revision: Text | None = None  # the hub's branch, tag or commit; a commit with trust_remote_code
    adapter_name_or_path: Source | None = None  # a LoRA adapter of peft, a folder or a name on the hub
    merge_adapter: bool = False  # into the weights; False: computed beside them, as in training
    gguf_file: Text | None = None  # the file of model_name_or_path that holds the weights, dequantized
    batch_size: Count | Literal["auto"] = "auto"  # rows in one forward pass
    max_num_batched_tokens: Count | None = None  # tokens in one forward pass, padding included
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"  # of the weights
    quantization_config: Settings | None = None  # such as {load_in_4bit: true}
    attn_implementation: Text | None = None  # such as sdpa, eager or flash_attention_2
    torch_compile: bool = False  # by torch.compile: slower to load, faster to compute
    allow_tf32: bool = False  # float32 products in TF32, faster and good to three digits; from Ampere on
    expandable_segments: bool = True  # of torch's allocator on GPUs: fits batches of changing size
    max_split_size_mb: SplitSize | None = None  # of torch's allocator: the older remedy for fragments
    num_gpus: Devices | None = None  # for each replica; 0: the CPU; None: one if there is any GPU
    replicas: Count | Literal["auto"] = "auto"  # loaded copies that share the rows
    device_map: Text | Settings | None = None  # of accelerate, such as auto or {model: 0, score: cpu}
    max_memory: MaxMemory | None = None  # the weights' share of each GPU of the lease, and of cpu: offload
    offload_folder: Folder | None = None  # where weights go that fit nowhere else
    trust_remote_code: bool = False  # runs code from the hub, which therefore demands a revision
    allow_pickle: bool = False  # weights in .bin files, of which torch reads tensors only
    model_kwargs: Settings = Field(default_factory=dict)  # for the model's from_pretrained

    older_keys: ClassVar[Mapping[str, str]] = {
        "model_name_or_path": "model model_path model_name model_id path checkpoint pretrained",
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
    gone_keys: ClassVar[Mapping[str, str]] = {
        "quantized_cache": "each load quantizes; drop it, or save a 4-bit checkpoint once (docs/members.md)",
    }

    @property
    def computed_as(self) -> str:
        keys = [
            *("model_name_or_path", "adapter_name_or_path", "gguf_file", "quantization_config", "dtype"),
            *("attn_implementation", "max_length", "num_gpus", "prompt_template", "text_column"),
            *(("torch_compile",) if self.torch_compile else ()),
        ]
        return sha256(repr([getattr(self, key, None) for key in keys]).encode()).hexdigest()[:16]

    @classmethod
    def broken_rules(cls, values: Mapping[str, Any], labels: Collection[str]) -> Iterator[Problem]:
        yield from super().broken_rules(values, labels)
        yield from _broken_trust(values)
        yield from _broken_placement(values)
        yield from _broken_weights(values)


class FieldTruncation(StrictConfig):
    """How much of a row's room one column gets where the row is too long, and what is kept of it."""

    share: Share = 1.0  # of the tokens that the rest of the prompt leaves, relative to the other fields
    # head_tail: half of each; newest_turns: of a JSON list the last ones whole, and the end of the one before;
    # newest_rounds: the same of all columns that have it together, where their lists are as long as each other
    keep: Literal["head", "tail", "head_tail", "newest_turns", "newest_rounds"] = "head"


class TruncationConfig(StrictConfig):
    """Which columns of a template are cut where a row has more than ``max_length`` tokens; all else stays whole."""

    # By column, such as {prompt: {share: 1, keep: head}}; what one does not need, the others get.
    fields: Annotated[
        dict[Column, FieldTruncation], MustBe("a mapping of columns to {share: ..., keep: ...}", dict)
    ] = Field(examples=[{"prompt": {"share": 1, "keep": "head"}}])
    marker: Marker = " [...] "  # stands where text was cut; may be empty


class TextView(ViewConfig):
    """A way in which a member that reads text gets each row: with other columns, or in other words."""

    prompt_template: Text | None = None  # instead of the member's own prompt_template or text_column

    @property
    def changes(self) -> dict[str, Any]:
        if self.prompt_template is None:
            return {}
        return {"prompt_template": self.prompt_template, "text_column": None}


TextViews = Annotated[tuple[TextView, ...], BeforeValidator(as_tuple), MustBe("a list of views", list)]


class TextSettings(HuggingFaceSettings, ReaderConfig):
    """What a member makes of a row's text; exactly one of ``prompt_template`` and ``text_column`` is given."""

    prompt_template: Text | None = None  # Jinja, over the row's columns
    text_column: Column | Columns | None = None  # fed as it stands; two columns are a pair of sentences
    max_length: Count | None = None  # tokens; a longer row is cut; None: the checkpoint's own limit
    truncation_side: Literal["left", "right"] | None = None  # None: the tokenizer's own
    truncation: TruncationConfig | None = None  # column by column; None: whatever stands at one end is cut
    add_special_tokens: bool = True  # False where the template holds them already
    # Ways in which it gets each row, each with a name of its own; left out: every row once, as it is.
    views: TextViews | None = Field(
        default=None,
        examples=["[{name: as_is}, {name: swapped, swap: {columns: [a, b], labels: [a_wins, b_wins]}}]"],
    )
    tokenizer_kwargs: Settings = Field(default_factory=dict)  # for the tokenizer's from_pretrained

    older_keys: ClassVar[Mapping[str, str]] = {
        **HuggingFaceSettings.older_keys,
        "max_length": "max_len max_seq_len max_seq_length model_max_length",
        "prompt_template": "template prompt",
        "text_column": "text column input_column",
    }
    alternatives: ClassVar[tuple[tuple[str, str], ...]] = (("prompt_template", "text_column"),)

    @property
    def text_columns(self) -> tuple[str, ...]:
        """The one or two columns that a member without a template reads."""
        if self.text_column is None:
            return ()
        return (self.text_column,) if isinstance(self.text_column, str) else tuple(self.text_column)

    def truncation_problems(self) -> Iterator[str]:
        """Fields that the template does not read."""
        if self.truncation is None or self.prompt_template is None:
            return
        # Jinja2 only where it is needed: start-up time.
        from ensemble.data.json_cells import TemplateProblem
        from ensemble.data.template import compile_template

        try:
            columns = compile_template(self.prompt_template).columns
        except TemplateProblem:  # is told where the template is checked
            return
        for column in self.truncation.fields:
            if column not in columns:
                yield (
                    f"truncation.fields.{column}: prompt_template does not read this column; it reads "
                    f"{', '.join(columns) or 'none'}"
                )

    @classmethod
    def broken_rules(cls, values: Mapping[str, Any], labels: Collection[str]) -> Iterator[Problem]:
        inputs = [key for key in ("prompt_template", "text_column") if values.get(key) is not None]
        if not inputs:
            yield (), "prompt_template or text_column is required, for example text_column: text"
        elif len(inputs) == 2:
            yield ("prompt_template",), "give either prompt_template or text_column, not both"
        if values.get("truncation") is not None:
            if inputs == ["text_column"]:
                yield (
                    ("truncation",),
                    'cuts the columns of a prompt_template; write one, such as "{{ text }}", instead of '
                    "text_column",
                )
            truncation = values["truncation"]
            fields = truncation.get("fields") if isinstance(truncation, dict) else None
            if fields == {}:
                yield ("truncation", "fields"), "name at least one column, such as {prompt: {keep: head}}"
            found = fields.items() if isinstance(fields, dict) else ()
            of_rounds = [
                column
                for column, one in found
                if isinstance(one, dict) and one.get("keep") == "newest_rounds"
            ]
            if len(of_rounds) == 1:
                yield (
                    ("truncation", "fields", of_rounds[0], "keep"),
                    "a round is a turn of several columns; give newest_rounds to each of them, or take "
                    "newest_turns",
                )
            if values.get("truncation_side") is not None:
                yield (
                    ("truncation_side",),
                    "with truncation each field says what is kept of it; leave this out",
                )
        yield from super().broken_rules(values, labels)


def label_map_problems(values: Mapping[str, Any], labels: Collection[str]) -> Iterator[Problem]:
    """What is wrong with the ``label_map`` of a kind that has one."""
    given: dict[str, str] = {}
    for key, label in label_items(values.get("label_map")):
        if labels and label not in labels:
            yield ("label_map", key), "must be one of the labels"
        elif given.setdefault(label, key) != key:
            yield ("label_map", key), f"the same label as {place(('label_map', given[label]))} has"


def _broken_trust(member: Mapping[str, Any]) -> Iterator[Problem]:
    """Keys that let files of the checkpoint run code, or would do so past the keys that are there for it."""
    source, revision = member.get("model_name_or_path"), member.get("revision")
    is_trusted = member.get("trust_remote_code") is True
    commit = "a commit's whole hash (40 hexadecimal digits), since a branch or tag can be moved to other code"
    # Not Path.is_dir, which raises an error for a name that no folder can have.
    if is_trusted and isinstance(source, str) and not os.path.isdir(with_home(source)):  # noqa: PTH112
        if revision is None:
            yield ("revision",), f"required with trust_remote_code: true; name {commit}"
        elif isinstance(revision, str) and not re.fullmatch(COMMIT, revision):
            yield ("revision",), f"with trust_remote_code: true this is {commit}"
    for key, instead in _UNTRUSTED_KWARGS.items():
        given = member.get(key)
        for name in given if isinstance(given, dict) else ():
            if name in instead and not (is_trusted and instead[name] is _KERNELS):
                yield (key, name), instead[name]


def _broken_placement(member: Mapping[str, Any]) -> Iterator[Problem]:
    gpus, sizes, layers = (member.get(key) for key in ("num_gpus", "max_memory", "device_map"))
    if layers == {}:
        yield ("device_map",), "must not be empty; name the place of each part, such as {model: 0, score: 0}"
    if not isinstance(gpus, int):
        return
    there = f"a lease of {gpus} has GPUs 0 to {gpus - 1}" if gpus else "num_gpus: 0 leaves only cpu"
    sentence = f"there is no such GPU: {there}; GPUs count from 0 within it"
    for key in sizes if isinstance(sizes, dict) else ():
        if re.fullmatch(GPU_NUMBER, str(key)) and int(key) >= gpus:
            yield ("max_memory", str(key)), sentence
    for key, device in layers.items() if isinstance(layers, dict) else ():
        if isinstance(device, int) and device >= gpus:
            yield ("device_map", str(key)), sentence


def _broken_weights(member: Mapping[str, Any]) -> Iterator[Problem]:
    """Keys that say which weights are loaded and where they lie, and that shut each other out."""
    adapter, gguf_file, settings = map(
        member.get, ("adapter_name_or_path", "gguf_file", "quantization_config")
    )
    sizes, layers, folder = map(member.get, ("max_memory", "device_map", "offload_folder"))
    merges = member.get("merge_adapter") is True
    places = {str(device) for device in layers.values()} if isinstance(layers, dict) else set()
    to_cpu = isinstance(sizes, dict) and "cpu" in sizes and member.get("num_gpus") != 0
    offloads = to_cpu or "disk" in places or ("cpu" in places and len(places) > 1) or folder is not None
    bits = settings if isinstance(settings, dict) else {}
    in_bits = next((key for key in ("load_in_8bit", "load_in_4bit") if bits.get(key)), "")
    keeps_float32 = bits.get("llm_int8_enable_fp32_cpu_offload")
    compiles, gpus = member.get("torch_compile") is True, member.get("num_gpus")
    is_placed = any(one is not None for one in (sizes, layers, folder)) or (
        isinstance(gpus, int) and gpus > 1
    )
    rules = {
        f"quantization_config: {in_bits} and offload go together only with llm_int8_enable_fp32_cpu_offload: true, "
        "which keeps the offloaded layers in float32": in_bits and offloads and not keeps_float32,
        "merge_adapter: there is no adapter to merge; add adapter_name_or_path": merges and adapter is None,
        "merge_adapter: quantized weights cannot take an adapter in without rounding it away; leave it unmerged, "
        "or drop quantization_config": merges and adapter is not None and settings is not None,
        "adapter_name_or_path: an adapter needs its base on the devices themselves, not offloaded; quantize it, "
        "give it more GPUs, or merge the adapter into a checkpoint first": adapter is not None and offloads,
        "torch_compile: quantized layers are not compiled; drop quantization_config, or this": compiles
        and settings is not None,
        "torch_compile: layers that accelerate places, or over several GPUs, are not compiled; drop num_gpus, "
        "device_map, max_memory and offload_folder, or this": compiles and is_placed,
        "torch_compile: flex_attention compiles itself, for each size anew; drop attn_implementation, or "
        "this": compiles and member.get("attn_implementation") == "flex_attention",
        "gguf_file: its weights are quantized already and are read as they were; drop "
        "quantization_config": gguf_file is not None and settings is not None,
        "gguf_file: transformers cannot offload a GGUF file to disk; drop offload_folder": gguf_file
        is not None
        and folder is not None,
    }
    for key, _, sentence in (text.partition(": ") for text, is_broken in rules.items() if is_broken):
        yield (key,), sentence
