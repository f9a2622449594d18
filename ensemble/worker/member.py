"""One loaded member: a chunk of rows in, its part CSV on disk out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pa_csv
import torch

from ensemble.protocol import Predict, WorkerSpec
from ensemble.rundir import atomic_path, part_path
from ensemble.worker.compute import BatchSizes, Report, RowTooLargeError, compute
from ensemble.worker.float32 import in_float32, uses_half_precision, why_not_float32
from ensemble.worker.load import Loaded, load
from ensemble.worker.predict import Classifier, good_rows, probabilities
from ensemble.worker.prompt import Encoded, Prompt, RowError
from ensemble.worker.rows import PublishedTable


@dataclass(frozen=True)
class ChunkWork:
    """What a chunk took.

    Real and computed tokens, forward passes, rows cut at max_length, OOM errors survived, and rows that were run
    again in float32.
    """

    tokens: int
    padded_tokens: int
    batches: int
    truncated_rows: int
    oom_events: int
    recomputed_rows: int


class Member:
    """Loads a member and predicts chunks of its rows.

    Args:
        spec: what to load, and where rows come from and parts go.

    Raises:
        ValueError: the checkpoint cannot be used, with the reason.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._loaded: Loaded = load(spec)
        self._table = PublishedTable(Path(spec.table_path))
        self._order = np.load(spec.order_path, mmap_mode="r")
        self._prompt = Prompt(spec, self._loaded.tokenizer, self._loaded.max_length)
        self._classifier = Classifier(self._loaded.model, self._loaded.pad_token_id)
        self.dtype = self._loaded.dtype
        self._notes = list(self._loaded.notes)
        model = self._loaded.model
        self._why_not_float32 = why_not_float32(model)
        self._uses_half_precision = uses_half_precision(model)
        can_retry = self._uses_half_precision and not self._why_not_float32
        self._in_float32 = partial(in_float32, model) if can_retry else None
        bears_padding = self._bears_padding()
        self._sizes = BatchSizes(
            self._loaded.token_budget, spec.batch_size, not bears_padding, self._loaded.memory
        )
        if not bears_padding:
            self._notes.append(
                "its numbers change with padding, so only rows of equal length share a batch: slower"
            )
        self.max_length = self._loaded.max_length
        self.token_budget = self._sizes.tokens_at(min(self.max_length, spec.width or self.max_length))
        self.parameters = self._loaded.parameters
        self.attn_implementation = self._loaded.attn_implementation
        self.device_name = self._loaded.device_name

    def predict_chunk(self, command: Predict, report: Report) -> ChunkWork:
        """Compute a chunk and leave it as its part.

        Args:
            report: called after each batch with rows, tokens and padded tokens so far.
        """
        rows = np.asarray(self._order[command.start : command.stop])
        try:
            encoded = self._prompt.encode(self._table.take(rows))
        except RowError as error:
            raise ValueError(f"row {rows[error.row] + 1} of the table: prompt_template: {error}") from error
        try:
            computed = compute(self._classifier, encoded, self._sizes, report, self._in_float32)
        except RowTooLargeError as error:
            again = (
                f" in float32, which it needs because it overflows {self.dtype}" if error.in_float32 else ""
            )
            raise ValueError(
                f"row {rows[error.row] + 1} of the table, {error.tokens} tokens long, does not fit into the memory "
                f"of {self.device_name} even alone{again}; lower max_length ({self.max_length}), quantize, or give "
                "it more GPUs (num_gpus)"
            ) from error
        # One copy from the device per chunk: a copy per batch would wait for each of them.
        values = probabilities(computed.logits, self._spec.activation)[:, list(self._spec.label_order)]
        bad = rows[~good_rows(values, self._spec.activation)]
        if len(bad):
            raise ValueError(
                f"{len(bad)} rows came out as NaN, infinite or no probabilities, the first is row {bad[0] + 1} "
                f"of the table; {self._advice()}"
            )
        self._write(command.chunk, rows, values)
        return ChunkWork(
            tokens=int(encoded.lengths.sum()),
            padded_tokens=computed.padded_tokens,
            batches=computed.batches,
            truncated_rows=encoded.truncated_rows,
            oom_events=computed.oom_events,
            recomputed_rows=computed.recomputed_rows,
        )

    def peak_gpu_memory_bytes(self) -> int | None:
        """The most that torch held on one of this worker's GPUs, in bytes; None on a CPU."""
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return None
        return max(torch.cuda.max_memory_reserved(index) for index in range(torch.cuda.device_count()))

    def notes(self) -> tuple[str, ...]:
        """What the user should know of how the member was loaded."""
        return tuple(self._notes)

    def _advice(self) -> str:
        """What to do about rows that are not finite."""
        if self._why_not_float32 and self._uses_half_precision:
            return f"a float16 overflow is likely, and {self._why_not_float32}: set dtype: bfloat16"
        tried = "float32 gave no better numbers" if self._in_float32 else "they were computed in float32"
        return f"{tried}, so the weights of the checkpoint are damaged, or it cannot deal with these rows"

    def _bears_padding(self) -> bool:
        """Whether a short text gets the same numbers alone and padded to a long one's length."""
        texts = ["one", "one two three four five six seven eight nine ten eleven twelve"]
        pairs = len(self._spec.text_columns) == 2
        encoded = self._prompt.encode_texts([(text, text) for text in texts] if pairs else texts)
        try:
            probed = self._probe(encoded)
            if self._in_float32 is not None and not np.isfinite(probed).all():
                with self._in_float32():
                    probed = self._probe(encoded)
        except torch.OutOfMemoryError:
            return True  # too tight even for this: the first chunk will say so better
        exact = self.dtype == "float32" and self._spec.quantization_config is None
        return bool(np.allclose(probed[0], probed[1], rtol=0, atol=1e-4 if exact else 5e-2))

    def _probe(self, encoded: Encoded) -> npt.NDArray[np.float64]:
        """The first row's probabilities, alone and beside the second: [2, labels]."""
        return np.stack(
            [
                probabilities(self._classifier.logits(encoded, np.arange(rows)), self._spec.activation)[0]
                for rows in (1, 2)
            ]
        )

    def _write(self, chunk: int, rows: npt.NDArray[np.int64], values: npt.NDArray[np.float64]) -> None:
        columns = [pa.array(rows)] + [pa.array(values[:, label]) for label in range(values.shape[1])]
        names = ["row"] + [f"p{label}" for label in range(values.shape[1])]
        with atomic_path(part_path(Path(self._spec.parts_dir), chunk)) as temporary:
            pa_csv.write_csv(pa.table(columns, names=names), str(temporary))
