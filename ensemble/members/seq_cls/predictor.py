"""A sequence classifier: tokenizer and first rows at once, the model once a device is free, then probabilities."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from transformers import masking_utils

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
from ensemble.members.huggingface.loading.preload import (
    ReadAhead,
    checkpoint_folder,
    import_model_class,
    weight_files,
)
from ensemble.members.huggingface.loading.tokenizer import load_tokenizer
from ensemble.members.huggingface.scoring.classifier import Classifier, Shortcut, probabilities
from ensemble.members.huggingface.scoring.encode import Prompt, Text
from ensemble.members.huggingface.scoring.forward import BatchSizes, Mode, compute
from ensemble.members.huggingface.scoring.prefetch import Prefetch
from ensemble.members.huggingface.scoring.unsupported import told_in_a_sentence
from ensemble.members.huggingface.scoring.warmup import MAX_CHARACTERS, TEXTS, WarmUp
from ensemble.members.huggingface.spec import ModelSpec
from ensemble.members.predictor import Prediction, Predictor, Report


class SequenceClassifier(Predictor):
    """Made, it holds neither model nor device.

    Args:
        spec: what to load, and how its rows become token ids.
        table: its rows.

    Raises:
        OSError: the tokenizer's files cannot be read.
        ValueError: the tokenizer leaves no room for text, or is not the one that its files are for.
    """

    def __init__(self, spec: ModelSpec, table: PublishedTable) -> None:
        self._spec = spec
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
        self._tokenizer_notes = [*check_tokenizer(spec, self._tokenizer, folder, plain)]
        is_pair = len(spec.text_columns) == 2
        self._warmup_texts: list[Text] = [(text, text) if is_pair else text for text in TEXTS]
        if first:
            longest = max(first, key=lambda text: len("".join(text)))
            cut = [part[:MAX_CHARACTERS] for part in ([longest] if isinstance(longest, str) else longest)]
            self._warmup_texts.append((cut[0], cut[1]) if is_pair else cut[0])
        self._warmup = self._prompt.encode_texts(self._warmup_texts)
        # On a CPU both would want the same cores.
        self._prefetch = Prefetch(
            lambda rows, step: self._prompt.encode(table.take(rows), step), in_background=spec.gpus > 0
        )
        self._reading: ReadAhead | None = None
        import_model_class(spec)

    def preload(self, limit_bytes: int) -> None:
        self._reading = ReadAhead(weight_files(self._spec), limit_bytes)

    def prepare(self, rows: npt.NDArray[np.int64]) -> None:
        self._prefetch.prepare(rows)

    def load(self) -> Ready:
        if self._reading is not None:
            self._reading.begin_load()
        spec = self._spec
        self._loaded = loaded = load(spec, self._tokenizer)
        if loaded.max_length != self._max_length:
            self._max_length = loaded.max_length
            self._prompt = Prompt(spec, self._tokenizer, self._max_length)
            self._warmup = self._prefetch.start_over(lambda: self._prompt.encode_texts(self._warmup_texts))
        self._classifier = Classifier(loaded.model, loaded.pad_token_id)
        notes = [*loaded.notes, *self._tokenizer_notes]
        uses_half = uses_half_precision(loaded.model)
        # Why its overflows cannot be run again in float32; empty where they can, or where there are none.
        self._why_not_float32 = why_not_float32(loaded.model) if uses_half else ""
        can_retry = uses_half and not self._why_not_float32
        self._in_float32: Mode | None = partial(in_float32, loaded.model) if can_retry else None
        self._passes = partial(told_in_a_sentence, spec, loaded.model, loaded.device_name)
        warm_up = WarmUp(
            self._classifier,
            self._warmup,
            spec.activation,
            is_exact=loaded.dtype == "float32" and spec.quantization_config is None,
            in_float32=self._in_float32,
        )
        with self._passes(first=True):
            if skipped := warm_up.check_attention(loaded.model, loaded.dtype):
                notes.append(skipped)
            bears_padding = warm_up.bears_padding()
        if Shortcut.NO_MASK in self._classifier.taken:
            # Without a mask transformers asks the device at each pass whether rows are packed into one; none are.
            masking_utils.find_packed_sequence_indices = lambda position_ids: None
        if not bears_padding:
            notes.append(
                "its numbers change with padding, so only rows of equal length share a batch: slower"
            )
        self._sizes = BatchSizes(loaded.token_budget, spec.batch_size, not bears_padding, loaded.memory)
        self._starts_in_float32 = False
        return Ready(
            device=loaded.device_name,
            dtype=loaded.dtype,
            attn_implementation=loaded.attn_implementation,
            parameters=loaded.parameters,
            max_length=self._max_length,
            token_budget=self._sizes.tokens_at(min(self._max_length, spec.width or self._max_length)),
            notes=tuple(notes),
        )

    def predict(self, rows: npt.NDArray[np.int64], report: Report) -> Prediction:
        encoded = self._prefetch.take(rows, lambda: report(0))
        with self._passes():
            computed = compute(
                self._classifier, encoded, self._sizes, report, self._in_float32, self._starts_in_float32
            )
        if computed.mostly_overflows:
            # Such as Gemma-3, of which nearly every row does: trying first would be for nothing.
            self._starts_in_float32, self._sizes = True, self._sizes.for_float32()
        values = np.full((len(rows), len(self._spec.label_order)), np.nan)
        if len(computed.rows):
            found = probabilities(computed.logits, self._spec.activation)
            values[computed.rows] = found[:, list(self._spec.label_order)]
        bad_rows = dict(encoded.problems)
        again = f" in float32, which it needs because it overflows {self._loaded.dtype}"
        for places, in_what in ((computed.too_large, ""), (computed.too_large_in_float32, again)):
            for place in places:
                bad_rows[place] = (
                    f"{encoded.lengths[place]:,} tokens do not fit into the memory of {self._loaded.device_name} "
                    f"even alone{in_what}; lower max_length ({self._max_length}), quantize, or give it more GPUs "
                    "(num_gpus)"
                )
        # Why rows come out as no numbers, and what to do about it.
        if self._why_not_float32:
            advice = f"a float16 overflow is likely, and {self._why_not_float32}: set dtype: bfloat16"
        elif computed.float32_error:
            advice = (
                f"it overflows {self._loaded.dtype}, and this model does not run in float32 "
                f"({computed.float32_error}); set dtype: bfloat16 or float32"
            )
        else:
            tried = (
                "it was computed in float32" if self._in_float32 is None else "float32 gave no better numbers"
            )
            advice = f"{tried}, so the checkpoint's weights are damaged, or it cannot compute this row"
        counters = replace(computed.counters, truncated_rows=encoded.truncated_rows)
        return Prediction(values, bad_rows, counters, advice)

    def check_device(self) -> None:
        # Kernels run later than they are called, so that an error can show far from its cause.
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            for index in range(torch.cuda.device_count()):
                torch.cuda.synchronize(index)

    def peak_gpu_memory_bytes(self) -> int | None:
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return None
        return max(torch.cuda.max_memory_reserved(index) for index in range(torch.cuda.device_count()))
