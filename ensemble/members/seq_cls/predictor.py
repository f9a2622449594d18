"""A sequence classifier: tokenizer and first rows at once, the model once a device is free, then probabilities."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from ensemble.common.protocol import Ready
from ensemble.data.json_cells import TemplateProblem
from ensemble.data.published_table import PublishedTable
from ensemble.members.huggingface.loading.checks import ROWS, check_tokenizer
from ensemble.members.huggingface.loading.float32_retry import (
    in_float32,
    uses_half_precision,
    why_not_float32,
)
from ensemble.members.huggingface.loading.load import load, max_length
from ensemble.members.huggingface.loading.precision import capability, may_omit_mask
from ensemble.members.huggingface.loading.preload import (
    ReadAhead,
    checkpoint_folder,
    import_model_class,
    weight_files,
)
from ensemble.members.huggingface.loading.tokenizer import load_tokenizer
from ensemble.members.huggingface.scoring.classifier import Classifier, Shortcut, probabilities
from ensemble.members.huggingface.scoring.device_queue import never_look_for_packed_rows
from ensemble.members.huggingface.scoring.encode import Encoded, Prompt
from ensemble.members.huggingface.scoring.forward import BatchSizes, Computed, Mode, compute
from ensemble.members.huggingface.scoring.prefetch import Upcoming
from ensemble.members.huggingface.scoring.unsupported import told_in_a_sentence
from ensemble.members.huggingface.scoring.warmup import LONGEST, TEXTS, Rehearsal
from ensemble.members.huggingface.spec import ModelSpec
from ensemble.members.predictor import Prediction, Predictor, Report


class SequenceClassifier(Predictor):
    """Made, it holds neither model nor device.

    Args:
        spec: what to load, and how to feed it.
        table: its rows.

    Raises:
        OSError: the tokenizer's files cannot be read.
        ValueError: the tokenizer leaves no room for text, or is not the one that its files are for.
    """

    def __init__(self, spec: ModelSpec, table: PublishedTable) -> None:
        self._spec = spec
        self._table = table
        self._tokenizer = load_tokenizer(spec)
        # Of the model's own limit nothing is known yet.
        self._max_length = max_length(spec, self._tokenizer, None, [])
        self._prompt = Prompt(spec, self._tokenizer, self._max_length)
        first = []
        for row in table.take(np.arange(min(ROWS, table.rows))):
            with contextlib.suppress(TemplateProblem):
                first.append(self._prompt.render(row))
        folder = checkpoint_folder(spec.model_name_or_path, spec.revision)
        plain = [part for text in first for part in ([text] if isinstance(text, str) else text)]
        self._tokenizer_notes = tuple(check_tokenizer(spec, self._tokenizer, folder, plain))
        self._longest = max(first, key=lambda text: len("".join(text)), default=None)
        self._rehearsed = self._encode_rehearsal()
        # On a CPU both would want the same cores.
        self._prefetch = Upcoming(self._encode, in_background=spec.gpus > 0)
        self._reading: ReadAhead | None = None
        import_model_class(spec)

    def preload(self, limit_bytes: int) -> None:
        self._reading = ReadAhead(weight_files(self._spec), limit_bytes)

    def prepare(self, rows: npt.NDArray[np.int64]) -> None:
        self._prefetch.prepare(rows)

    def load(self) -> Ready:
        if self._reading is not None:
            self._reading.stop()
        loaded = load(self._spec, self._tokenizer)
        if loaded.max_length != self._max_length:
            self._max_length = loaded.max_length
            self._prompt = Prompt(self._spec, self._tokenizer, self._max_length)
            self._prefetch.forget()
            with self._prefetch.nobody_else():
                self._rehearsed = self._encode_rehearsal()
        self._loaded = loaded
        self._classifier = Classifier(loaded.model, loaded.pad_token_id)
        notes = [*loaded.notes, *self._tokenizer_notes]
        uses_half = uses_half_precision(loaded.model)
        # Why its overflows cannot be run again in float32; empty where they can, or where there are none.
        self._why_not_float32 = why_not_float32(loaded.model) if uses_half else ""
        can_retry = uses_half and not self._why_not_float32
        self._in_float32: Mode | None = partial(in_float32, loaded.model) if can_retry else None
        self._passes = partial(told_in_a_sentence, self._spec, loaded.model, loaded.device_name)
        with self._passes(first=True):
            bears_padding = self._bears_padding(notes)
        self._sizes = BatchSizes(loaded.token_budget, self._spec.batch_size, not bears_padding, loaded.memory)
        if not bears_padding:
            notes.append(
                "its numbers change with padding, so only rows of equal length share a batch: slower"
            )
        return Ready(
            device=loaded.device_name,
            dtype=loaded.dtype,
            attn_implementation=loaded.attn_implementation,
            parameters=loaded.parameters,
            max_length=self._max_length,
            token_budget=self._sizes.tokens_at(min(self._max_length, self._spec.width or self._max_length)),
            notes=tuple(notes),
        )

    def predict(self, rows: npt.NDArray[np.int64], report: Report) -> Prediction:
        encoded = self._prefetch.take(rows, lambda: report(0))
        with self._passes():
            computed = compute(self._classifier, encoded, self._sizes, report, self._in_float32)
        values = np.full((len(rows), len(self._spec.label_order)), np.nan)
        if len(computed.rows):
            found = probabilities(computed.logits, self._spec.activation)
            values[computed.rows] = found[:, list(self._spec.label_order)]
        return Prediction(
            values=values,
            bad_rows=encoded.problems | self._too_large(encoded, computed),
            counters=replace(computed.counters, truncated_rows=encoded.truncated_rows),
            advice=self._advice(computed.float32_error),
        )

    def check_device(self) -> None:
        # Kernels run later than they are called, so that an error can show far from its cause.
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            for index in range(torch.cuda.device_count()):
                torch.cuda.synchronize(index)

    def peak_gpu_memory_bytes(self) -> int | None:
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return None
        return max(torch.cuda.max_memory_reserved(index) for index in range(torch.cuda.device_count()))

    def _encode(self, rows: npt.NDArray[np.int64], step: Callable[[], None]) -> Encoded:
        return self._prompt.encode(self._table.take(rows), step)

    def _encode_rehearsal(self) -> Encoded:
        pairs = len(self._spec.text_columns) == 2
        texts: list[str | tuple[str, str]] = [(text, text) for text in TEXTS] if pairs else list(TEXTS)
        if isinstance(self._longest, str):
            texts.append(self._longest[:LONGEST])
        elif self._longest is not None:
            texts.append((self._longest[0][:LONGEST], self._longest[1][:LONGEST]))
        return self._prompt.encode_texts(texts)

    def _bears_padding(self, notes: list[str]) -> bool:
        loaded = self._loaded
        rehearsal = Rehearsal(
            self._classifier,
            self._rehearsed,
            self._spec.activation,
            is_exact=loaded.dtype == "float32" and self._spec.quantization_config is None,
            may_omit_mask=may_omit_mask(loaded.model, capability(self._classifier.device.type == "cuda")),
        )
        if skipped := rehearsal.check_attention(loaded.model, loaded.dtype, self._in_float32):
            notes.append(skipped)
        bears_padding = rehearsal.bears_padding(self._in_float32)
        if Shortcut.NO_MASK in self._classifier.taken:
            never_look_for_packed_rows()
        return bears_padding

    def _too_large(self, encoded: Encoded, computed: Computed) -> dict[int, str]:
        """Rows for which there is no memory, by their places in the chunk: why, and what to do about it."""
        again = f" in float32, which it needs because it overflows {self._loaded.dtype}"
        detours = {
            **dict.fromkeys(computed.too_large, ""),
            **dict.fromkeys(computed.too_large_in_float32, again),
        }
        return {
            row: (
                f"{encoded.lengths[row]:,} tokens do not fit into the memory of {self._loaded.device_name} even "
                f"alone{detour}; lower max_length ({self._max_length}), quantize, or give it more GPUs (num_gpus)"
            )
            for row, detour in detours.items()
        }

    def _advice(self, float32_error: str) -> str:
        """Why rows come out as no numbers, and what to do about it."""
        if self._why_not_float32:
            return f"a float16 overflow is likely, and {self._why_not_float32}: set dtype: bfloat16"
        if float32_error:
            return (
                f"it overflows {self._loaded.dtype}, and this model does not run in float32 ({float32_error}); "
                "set dtype: bfloat16 or float32"
            )
        tried = "it was computed in float32" if self._in_float32 is None else "float32 gave no better numbers"
        return f"{tried}, so the checkpoint's weights are damaged, or it cannot compute this row"
