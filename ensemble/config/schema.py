"""The keys of the YAML: which there are, what each may hold, and what it is when it is left out.

Owns ``RunConfig`` and the models it holds.  Kinds of values are in ``values``, what ties keys together is in
``rules``, and ``defaults:`` is not here: ``load`` merges it under the models before they are checked.
"""

# No "from __future__ import annotations": pydantic would evaluate every annotation from its text again.

from hashlib import sha256
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SerializeAsAny, model_validator

from ensemble.config.rules import broken, broken_in_member, checked
from ensemble.config.values import (
    Column,
    Columns,
    Count,
    DeviceList,
    Devices,
    Duration,
    File,
    HangTimeout,
    LabelMap,
    Labels,
    Launcher,
    LauncherSettings,
    MaxMemory,
    Method,
    MustBe,
    Name,
    ProblemType,
    Retries,
    Seed,
    Settings,
    Source,
    SplitSize,
    Text,
    Weight,
    at_least_one,
)


class _Strict(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        hide_input_in_errors=True,  # a value may come from an environment variable
        protected_namespaces=(),
        defer_build=True,  # at first use: with its search for plugins, pydantic would slow down --help
    )


class DataConfig(_Strict):
    """The table to predict.  A relative path starts at the working directory."""

    path: File = Field(examples=["test.csv"])
    id_column: Column = "id"  # names each row
    label_column: Column | None = None  # the true labels, for metrics


class ModelConfig(_Strict):
    """One member of the ensemble.  Exactly one of ``prompt_template`` and ``text_column`` is given.

    Raises:
        ValidationError: a value is of the wrong type or out of range, or two keys do not go together.
    """

    name: Name = Field(examples=["gemma2"])  # becomes a file name, so unique whatever the case
    model_name_or_path: Source = Field(examples=["models/gemma-2-9b"])  # a folder, or a name on the hub
    revision: Text | None = None  # the hub's branch, tag or commit; a commit with trust_remote_code
    adapter_name_or_path: Source | None = None  # a LoRA adapter of peft, a folder or a name on the hub
    merge_adapter: bool = False  # into the weights; False: computed beside them, as in training
    gguf_file: Text | None = None  # the file of model_name_or_path that holds the weights, dequantized
    weight: Weight = 1.0  # share in the merge, relative to the other members
    prompt_template: Text | None = None  # Jinja, over the row's columns
    text_column: Column | Columns | None = None  # fed as it stands; two columns are a pair of sentences
    max_length: Count | None = None  # tokens; a longer row is cut; None: the checkpoint's own limit
    truncation_side: Literal["left", "right"] | None = None  # None: the tokenizer's own
    add_special_tokens: bool = True  # False where the template holds them already
    task_type: Literal["seq_cls"] = "seq_cls"  # sequence classification
    problem_type: ProblemType | None = None  # how logits become probabilities; None: the checkpoint's own
    label_map: LabelMap = {}  # the checkpoint's label -> the config's
    batch_size: Count | Literal["auto"] = "auto"  # rows in one forward pass
    max_num_batched_tokens: Count | None = None  # tokens in one forward pass, padding included
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"  # of the weights
    quantization_config: Settings | None = None  # such as {load_in_4bit: true}
    attn_implementation: Text | None = None  # such as sdpa, eager or flash_attention_2
    allow_tf32: bool = False  # float32 products in TF32, faster and good to three digits; from Ampere on
    expandable_segments: bool = True  # of torch's allocator on GPUs: fits batches of changing size
    max_split_size_mb: SplitSize | None = None  # of torch's allocator: the older remedy for fragments
    num_gpus: Devices | None = None  # for each replica; 0: the CPU; None: one if there is any GPU
    replicas: Count | Literal["auto"] = "auto"  # loaded copies that share the rows
    device_map: Text | Settings | None = None  # of accelerate, such as auto or {model: 0, score: cpu}
    max_memory: MaxMemory | None = None  # the weights' share of each GPU of the lease, and of cpu: offload
    offload_folder: File | None = None  # where weights go that fit nowhere else
    trust_remote_code: bool = False  # runs code from the hub, which therefore demands a revision
    allow_pickle: bool = False  # weights in .bin files, of which torch reads tensors only
    model_kwargs: Settings = {}  # for the model's from_pretrained
    tokenizer_kwargs: Settings = {}  # for the tokenizer's from_pretrained

    @property
    def computed_as(self) -> str:
        """A fingerprint of what decides how long a row takes; values may come from the environment, so no text."""
        keys = (
            *("model_name_or_path", "adapter_name_or_path", "gguf_file", "quantization_config", "dtype"),
            *("attn_implementation", "max_length", "num_gpus", "prompt_template", "text_column"),
        )
        return sha256(repr([getattr(self, key) for key in keys]).encode()).hexdigest()[:16]

    @model_validator(mode="after")
    def _check(self) -> "ModelConfig":
        return checked(self, broken_in_member(dict(self), set()))


class EnsembleConfig(_Strict):
    """How the members' probabilities become one; a merge method with keys of its own has a subclass of this."""

    method: Method = "mean"  # by weight: mean, geometric_mean, or what an installed package brings


class SubmissionConfig(_Strict):
    """The file to hand in, made in the image of a sample."""

    sample: File = Field(examples=["sample_submission.csv"])  # gives the columns and the order of the rows
    path: File | None = None  # where to write; None: in the output directory
    columns: LabelMap = {}  # the sample's column -> label, where they differ


Ensemble = Annotated[SerializeAsAny[EnsembleConfig], MustBe("a mapping of keys to values")]
Models = Annotated[tuple[ModelConfig, ...], BeforeValidator(at_least_one), MustBe("a list of models")]


class RunConfig(_Strict):
    """Everything one run is asked for.

    Raises:
        ValidationError: a value is of the wrong type or out of range, or two keys do not go together.
    """

    data: DataConfig = Field(examples=["{path: test.csv}"])
    labels: Labels = Field(examples=["[negative, positive]"])  # the predictions' columns, in this order
    models: Models = Field(examples=["[{name: a, model_name_or_path: models/a, text_column: text}]"])
    ensemble: Ensemble = Field(default_factory=EnsembleConfig)
    submission: SubmissionConfig | None = None
    output_dir: File = Field(examples=["runs/first"])  # all that the run writes
    limit: Count | None = None  # only so many rows from the top of the table
    seed: Seed = 0  # for whatever is random
    devices: DeviceList | None = None  # the GPUs to use, of those visible; None: all of them
    launcher: Launcher | LauncherSettings = "local"  # where workers run: a name, or {name: {settings}}
    max_workers_per_gpu: Count = 1  # workers that share a GPU
    wait_for_gpu: Duration = 0.0  # seconds to wait for memory that other programs hold
    retries: Retries = 2  # of a chunk whose worker died, each in a fresh one
    on_bad_row: Literal["fail", "uniform", "drop_member"] = "fail"  # a row that its member cannot compute
    on_member_failure: Literal["fail", "continue"] = "fail"  # continue: merge the others, by their weights
    time_limit: Duration | None = None  # for the whole run; a submission is complete before it
    fill: Literal["uniform", "prior", "sample"] = "uniform"  # of rows that no member reached by then
    hang_timeout: HangTimeout = 600.0  # seconds without a batch done, after which a worker counts as hung
    hash_weights: bool = False  # all of their bytes, to know whether they changed; False: samples of them
    standby: bool = True  # the next member's process starts while this one's computes
    release_timeout: Duration = 60.0  # seconds that a GPU may take to be free after its worker has ended

    @model_validator(mode="after")
    def _check(self) -> "RunConfig":
        return checked(self, broken(self.model_dump()))
