"""Run a checkpoint as a member: load the tokenizer and the model, then compute probabilities."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoConfig, masking_utils

from ensemble.common.protocol import BatchChoice, Counters, Ready
from ensemble.data.json_cells import TemplateProblem
from ensemble.data.published_table import PublishedTable
from ensemble.members.huggingface.checkpoint.tokenizer_files import has_learnt_segments, loses_segments
from ensemble.members.huggingface.loading.checks import ROWS, check_tokenizer
from ensemble.members.huggingface.loading.flex_attention import compiled_attention
from ensemble.members.huggingface.loading.float32_retry import (
    in_float32,
    uses_half_precision,
    why_not_float32,
)
from ensemble.members.huggingface.loading.load import Loaded, load, max_length
from ensemble.members.huggingface.loading.model import from_pretrained
from ensemble.members.huggingface.loading.tokenizer import load_tokenizer
from ensemble.members.huggingface.scoring.batching import MemoryLimit
from ensemble.members.huggingface.scoring.classifier import Classifier, probabilities
from ensemble.members.huggingface.scoring.encode import Encoded, Prompt, Text
from ensemble.members.huggingface.scoring.forward import BatchSizes, Encoding, Mode, Scorer, Shortcut, compute
from ensemble.members.huggingface.scoring.passes import compile_model, explain_errors
from ensemble.members.huggingface.scoring.warmup import (
    MAX_CHARACTERS,
    MAX_CHARACTERS_OF_BLOCKS,
    TEXTS,
    WarmUp,
)
from ensemble.members.huggingface.spec import (
    CAPPED_BLOCKS,
    FLEX,
    LANGUAGE_MODEL,
    CheckpointSpec,
    ModelSpec,
    too_much_text,
)
from ensemble.members.predictor import Prediction, Predictor, Report

_C = TypeVar("_C", bound=CheckpointSpec)
_E = TypeVar("_E", bound=Encoding)
S = TypeVar("S", bound=ModelSpec)


class CheckpointMember(Predictor, Generic[_C, _E]):
    """Run a checkpoint of transformers over rows of the table, whatever it reads.

    A kind loads its model, calls ``_set_modes`` and sets ``_sizes``; then ``_score`` runs the model over encoded
    rows, and ``_values`` makes probabilities of its numbers.

    Attributes:
        packages: further packages whose versions belong on record.
    """

    Spec: ClassVar[type[CheckpointSpec]]
    packages: ClassVar[tuple[str, ...]] = ()

    def __init__(self, spec: _C, table: PublishedTable) -> None:
        self._spec = spec
        self._table = table
        self._starts_in_float32 = False
        self._sizes: BatchSizes
        if spec.gpus:
            # Starts the driver in this process; it takes no memory of the device, which may still be another's.
            torch.cuda.is_available()

    def _values(self, logits: torch.Tensor) -> npt.NDArray[np.float64]:
        """Return probabilities by the config's labels, float64 [rows, labels], for the classifier's numbers."""
        return probabilities(logits, self._spec.activation)[:, list(self._spec.label_order)]

    def _more_counters(self, logits: torch.Tensor) -> Counters:
        """Return a kind's further counters for the classifier's numbers, [0, 0] if there are none."""
        return Counters()

    @abstractmethod
    def _too_large(self, encoded: _E, row: int, in_float32: str) -> str:
        """Return why a row that does not fit into memory even alone is a bad row; ``in_float32`` is a clause."""

    def _set_modes(self, loaded: Loaded) -> None:
        """Set how the model runs, before the first pass of a loaded model."""
        self._loaded = loaded
        uses_half = uses_half_precision(loaded.model)
        # Why its overflows cannot be run again in float32; empty if they can, or if there are none.
        self._why_not_float32 = why_not_float32(loaded.model) if uses_half else ""
        self._in_float32: Mode | None = None
        if uses_half and not self._why_not_float32:
            self._in_float32 = partial(in_float32, loaded.model, self._spec.torch_compile)
        self._is_exact = loaded.dtype == "float32" and self._spec.quantization_config is None
        self._passes = partial(explain_errors, self._spec, loaded.model, loaded.device_name)

    def _score(self, scorer: Scorer[_E], encoded: _E, report: Report) -> Prediction:
        """Return probabilities of encoded rows, computed in batches by ``_sizes``."""
        with self._passes():
            computed = compute(
                scorer, encoded, self._sizes, report, self._in_float32, self._starts_in_float32
            )
        if computed.mostly_overflows:
            # Such as Gemma-3, of which nearly every row overflows: trying half precision would be a waste.
            self._start_in_float32()
        values = np.full((len(encoded.lengths), len(self._spec.label_order)), np.nan)
        if len(computed.rows):
            values[computed.rows] = self._values(computed.logits)
        bad_rows = dict(encoded.problems)
        bad_rows |= {row: self._too_large(encoded, row, "") for row in computed.too_large}
        clause = f" in float32, which it needs because it overflows {self._loaded.dtype}"
        bad_rows |= {row: self._too_large(encoded, row, clause) for row in computed.too_large_in_float32}
        counters = computed.counters + self._more_counters(computed.logits)
        return Prediction(
            values, bad_rows, counters, self._advice(), self._choice(), is_partial=computed.is_partial
        )

    def _start_in_float32(self) -> None:
        self._starts_in_float32 = True
        self._sizes = self._sizes.for_float32()

    def follow(self, choice: BatchChoice) -> None:
        can_start = self._in_float32 is not None and not self._starts_in_float32
        if choice.in_float32 and can_start:
            self._start_in_float32()
        memory = self._sizes.memory
        if memory is not None and choice.room_bytes is not None:
            # Activations in float32 take twice the bytes: see ``BatchSizes.for_float32``.
            available = choice.room_bytes // 2 if self._starts_in_float32 else choice.room_bytes
            self._sizes.memory = replace(memory, available_bytes=max(1, available))

    def _choice(self) -> BatchChoice:
        room_bytes = None
        if self._sizes.memory is not None:
            room_bytes = self._sizes.memory.available_bytes
            if self._starts_in_float32:
                room_bytes *= 2
        return BatchChoice(room_bytes, self._starts_in_float32)

    def _advice(self) -> str:
        """Return the probable reason for rows that are not finite, and what to do about it."""
        if self._why_not_float32:
            return f"a float16 overflow is likely, and {self._why_not_float32}: set dtype: bfloat16"
        tried = "it was computed in float32" if self._in_float32 is None else "float32 gave no better numbers"
        return f"{tried}, so the checkpoint's weights are damaged, or it cannot compute this row"

    def check_device(self) -> None:
        # Kernels run later than they are called, so that an error may appear far from its cause.
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            for index in range(torch.cuda.device_count()):
                torch.cuda.synchronize(index)

    def peak_gpu_memory_bytes(self) -> int | None:
        return _largest(torch.cuda.max_memory_reserved)

    def peak_gpu_allocated_bytes(self) -> int | None:
        return _largest(torch.cuda.max_memory_allocated)


def _largest(memory: Callable[[int], int]) -> int | None:
    """Return the largest ``memory`` of the GPUs that this process uses; None if it uses none."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return max(map(memory, range(torch.cuda.device_count())))


class TextMember(CheckpointMember[S, Encoded], Generic[S]):
    """Run a model over text; needs neither model nor device before ``load``.

    A kind may override how its rows become token ids (``_make_prompt``), what runs the model
    (``_make_classifier``), and how its numbers become probabilities (``_values``).
    """

    Spec: ClassVar[type[CheckpointSpec]] = ModelSpec

    def __init__(self, spec: S, table: PublishedTable) -> None:
        super().__init__(spec, table)
        self._job = 0
        if spec.attn_implementation == FLEX:
            compiled_attention()
        self._tokenizer = load_tokenizer(spec)
        # The model's own limit is not known yet.
        self._max_length = max_length(spec, self._tokenizer)
        self._prompts = self._make_prompts()
        self._first_texts: list[Text] = []
        for row in table.take(np.arange(min(ROWS, table.rows))):
            with contextlib.suppress(TemplateProblem):
                self._first_texts.append(self._prompts[0].render(row))
        parts = [(text,) if isinstance(text, str) else text for text in self._first_texts]
        notes = check_tokenizer(spec, self._tokenizer, [part for text in parts for part in text])
        self._tokenizer_notes = [*notes, *self._ask_for_segments()]
        is_pair = self._prompts[0].is_pair
        self._warmup_texts: list[Text] = [(text, text) if is_pair else text for text in TEXTS]
        if parts:
            longest = max(parts, key=lambda text: len("".join(text)))
            cut = [part[:MAX_CHARACTERS] for part in longest]
            if spec.attn_implementation in (CAPPED_BLOCKS, FLEX):
                cut = [(part * MAX_CHARACTERS_OF_BLOCKS)[:MAX_CHARACTERS_OF_BLOCKS] for part in longest]
            self._warmup_texts.append((cut[0], cut[1]) if is_pair else cut[0])
        self._warmup = self._prompts[0].encode_texts(self._warmup_texts)

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    def encode(self, rows: Sequence[Mapping[str, object]], positions: int | None) -> Encoded:
        """Return the token ids that a model with so many learnt positions gets to see of rows."""
        self._set_max_length(max_length(self._spec, self._tokenizer, positions))
        return self._encode(rows, lambda: None)

    def _set_max_length(self, tokens: int) -> None:
        if tokens != self._max_length:
            self._max_length = tokens
            self._prompts = self._make_prompts()
            self._warmup = self._prompts[0].encode_texts(self._warmup_texts)

    def _make_prompts(self) -> list[Prompt]:
        return [self._make_prompt(spec) for spec in self._job_specs()]

    def _job_specs(self) -> list[S]:
        spec = self._spec
        return [
            spec if template is None else replace(spec, prompt_template=template, text_columns=())
            for template in spec.job_templates
        ]

    def _make_prompt(self, spec: S) -> Prompt:
        return Prompt(spec, self._tokenizer, self._max_length)

    def _make_classifier(self, loaded: Loaded) -> Classifier:
        return Classifier(loaded.model, loaded.pad_token_id)

    def _take_shortcuts(self, tolerance: float) -> None:
        """Let the classifier take further shortcuts if they change its numbers by no more than the tolerance."""
        self._classifier.try_kept(self._warmup, tolerance)

    def _more_counters(self, logits: torch.Tensor) -> Counters:
        shared, self._classifier.shared_tokens = self._classifier.shared_tokens, 0
        return Counters(shared_tokens=shared)

    def _notes(self) -> list[str]:
        """Return a sentence for everything else that the user should know."""
        tokens = self._prompts[0].fixed_tokens()
        return [too_much_text(tokens, self._max_length, ())] if tokens > self._max_length else []

    def _ask_for_segments(self) -> list[str]:
        """Let the tokenizer give segment ids that it leaves out, if it is to be asked for them; return a note."""
        spec, tokenizer, texts = self._spec, self._tokenizer, max(1, len(self._spec.text_columns))
        if "token_type_ids" in tokenizer.model_input_names or "model_input_names" in tokenizer.init_kwargs:
            return []  # it gives what it is told to
        if spec.auto_class == LANGUAGE_MODEL or not loses_segments(type(tokenizer).__name__):
            return []
        config = from_pretrained(AutoConfig, spec, **spec.model_kwargs)
        is_asked = has_learnt_segments(config.to_dict(), config.transformers_version, texts)
        if is_asked is None or not any(tokenizer(*["a"] * texts, return_token_type_ids=True).token_type_ids):
            return []
        if is_asked and spec.asks_for_segments:
            tokenizer.model_input_names = [*tokenizer.model_input_names, "token_type_ids"]
        release = config.transformers_version or "before 4.2"
        how = f"{'asked for' if is_asked else 'left out'}, as transformers {release} saved its config"
        return [f"segment ids (token_type_ids) {how}; tokenizer_kwargs.model_input_names decides otherwise"]

    def load(self) -> Ready:
        spec = self._spec
        loaded = load(spec, self._tokenizer)
        self._set_max_length(loaded.max_length)
        self._classifier = self._make_classifier(loaded)
        notes = [*loaded.notes, *self._tokenizer_notes, *self._notes()]
        self._set_modes(loaded)
        warm_up = WarmUp(self._classifier, self._warmup, self._values, self._is_exact, self._in_float32)
        with self._passes(first=True):
            is_asked = "attn_implementation" in spec.asked
            not_compared = warm_up.check_attention(loaded.model, loaded.dtype, is_asked)
            if not_compared:
                notes.append(not_compared)
            if not warm_up.repeats():
                notes.append(
                    "the same rows get other numbers in each pass, as its forward draws random ones: a run that is "
                    "repeated gives other probabilities, as plain transformers does"
                )
            tolerates_padding = warm_up.tolerates_padding()
            if tolerates_padding and not spec.torch_compile:
                self._take_shortcuts(warm_up.tolerance)
            if loaded.attn_implementation == FLEX:
                memory = loaded.memory
                if memory is not None and loaded.max_room_bytes is not None:
                    # The largest that ``follow`` may ask for, so that nothing has to be compiled later.
                    memory = replace(memory, available_bytes=loaded.max_room_bytes)
                tokens = self._packed_tokens(memory)
                not_packed = warm_up.pack(loaded.model, tokens, loaded.dtype, spec.compile_timeout)
                if not_packed:
                    notes.append(not_packed)
                else:  # once more: packed rows share tokens in another way
                    self._take_shortcuts(warm_up.tolerance)
        if Shortcut.NO_MASK in self._classifier.taken:
            # Without a mask transformers would ask the device in each pass whether rows are packed into one.
            masking_utils.find_packed_sequence_indices = lambda position_ids: None
        if spec.torch_compile:
            compile_model(loaded.model, warm_up.run)
        if not tolerates_padding:
            notes.append(
                "its numbers change with padding, so only rows of equal length share a batch: slower"
            )
        is_size_set = spec.token_budget is not None or spec.batch_size is not None
        self._sizes = BatchSizes(
            loaded.token_budget,
            spec.batch_size,
            equal_lengths=not tolerates_padding,
            memory=loaded.memory,
            stages=self._classifier.stages if tolerates_padding and not is_size_set else 1,
        )
        return Ready(
            device=loaded.device_name,
            dtype=loaded.dtype,
            attn_implementation=loaded.attn_implementation,
            parameters=loaded.parameters,
            max_length=self._max_length,
            token_budget=self._sizes.tokens_at(min(self._max_length, spec.width or self._max_length)),
            notes=tuple(notes),
            room_bytes=self._choice().room_bytes,
            max_room_bytes=loaded.max_room_bytes,
        )

    def _packed_tokens(self, memory: MemoryLimit | None) -> int:
        """Return the tokens of a packed batch; longer rows come into padded batches."""
        budget, width = self._loaded.token_budget, self._spec.width or self._max_length
        return budget if memory is None else min(budget, memory.tokens_at(min(width, self._max_length)))

    def follow(self, choice: BatchChoice) -> None:
        super().follow(choice)
        if self._classifier.packed_tokens:
            self._classifier.packed_tokens = self._packed_tokens(self._sizes.memory)

    def use_job(self, job: int) -> None:
        self._job = job

    def predict(self, rows: npt.NDArray[np.int64], report: Report) -> Prediction:
        return self._predict(self._table.take(rows), report)

    def _predict(
        self,
        rows: Sequence[Mapping[str, object]],
        report: Report,
        groups: npt.NDArray[np.int64] | None = None,
    ) -> Prediction:
        """Predict rows of the table, as the job reads them; ``groups`` is that of ``Encoded``."""
        adapters = self._loaded.adapters
        if adapters is not None and adapters.use(self._job):
            self._classifier.forget()
        encoded = replace(self._encode(rows, lambda: report(0)), groups=groups)
        prediction = self._score(self._classifier, encoded, report)
        counters = replace(
            prediction.counters, truncated_rows=encoded.truncated_rows, cut_tokens=encoded.cut_tokens
        )
        return replace(prediction, counters=counters)

    def _encode(self, rows: Sequence[Mapping[str, object]], step: Callable[[], object]) -> Encoded:
        """Return token ids of rows, as the job reads them; ``step`` is called now and then."""
        return self._prompts[self._job].encode(rows, step)

    def _too_large(self, encoded: Encoded, row: int, in_float32: str) -> str:
        return (
            f"{encoded.lengths[row]:,} tokens do not fit into the memory of {self._loaded.device_name} "
            f"even alone{in_float32}; lower max_length ({self._max_length}), quantize, or give it more GPUs "
            "(num_gpus)"
        )
