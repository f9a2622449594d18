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
from ensemble.rundir import atomic_path, part_name
from ensemble.worker.compute import BatchSizes, Computed, Report, compute
from ensemble.worker.float32 import in_float32, uses_half_precision, why_not_float32
from ensemble.worker.load import Loaded, load
from ensemble.worker.predict import Classifier, good_rows, probabilities
from ensemble.worker.prompt import Encoded, Prompt
from ensemble.worker.rows import PublishedTable


@dataclass(frozen=True)
class ChunkWork:
    """What a chunk took, and what came of it.

    Real and computed tokens, forward passes, rows cut at max_length, OOM errors survived, and rows that were run
    again in float32; the part's name; rows of the table that are not in it, ascending, with the reasons.
    """

    tokens: int
    padded_tokens: int
    batches: int
    truncated_rows: int
    oom_events: int
    recomputed_rows: int
    part: str
    bad_rows: tuple[int, ...]
    bad_row_reasons: tuple[str, ...]


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
        """Compute a chunk and leave it as its part, without the rows that cannot be computed.

        Args:
            report: called after each step, such as a batch, with rows, tokens and padded tokens so far.

        Raises:
            WriteError: the part cannot be written.
            Exception: whatever comes out of tokenizer and model; which row is to blame is not known then.
        """
        rows = np.asarray(self._order[command.start : command.stop])
        encoded = self._prompt.encode(self._table.take(rows), lambda: report(0, 0, 0))
        computed = compute(self._classifier, encoded, self._sizes, report, self._in_float32)
        values = self._values(computed)
        good = good_rows(values, self._spec.activation)
        reasons = {
            **encoded.problems,
            **dict.fromkeys(computed.rows[~good].tolist(), self._not_finite(computed.float32_error)),
            **self._too_large(encoded, computed),
        }
        bad = sorted(reasons, key=rows.__getitem__)
        return ChunkWork(
            part=self._write(command, rows[computed.rows[good]], values[good]),
            bad_rows=tuple(rows[bad].tolist()),
            bad_row_reasons=tuple(reasons[row] for row in bad),
            tokens=int(encoded.lengths[computed.rows].sum()),
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

    def check_devices(self) -> None:
        """Raise what an earlier kernel has left behind, if CUDA can do nothing any more.

        Kernels run later than they are called, so that an error can show far from its cause.

        Raises:
            RuntimeError: the process is done for.
        """
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            for index in range(torch.cuda.device_count()):
                torch.cuda.synchronize(index)

    def _values(self, computed: Computed) -> npt.NDArray[np.float64]:
        """Probabilities of the computed rows in the config's order of labels: [rows, labels]."""
        if not len(computed.rows):
            return np.empty((0, len(self._spec.label_order)))
        # One copy from the device per chunk: a copy per batch would wait for each of them.
        return probabilities(computed.logits, self._spec.activation)[:, list(self._spec.label_order)]

    def _too_large(self, encoded: Encoded, computed: Computed) -> dict[int, str]:
        """Rows for which there is no memory, by their places in the chunk: why, and what to do about it."""
        again = f" in float32, which it needs because it overflows {self.dtype}"
        detours = {
            **dict.fromkeys(computed.too_large, ""),
            **dict.fromkeys(computed.too_large_in_float32, again),
        }
        return {
            row: (
                f"{encoded.lengths[row]:,} tokens do not fit into the memory of {self.device_name} even alone"
                f"{detour}; lower max_length ({self.max_length}), quantize, or give it more GPUs (num_gpus)"
            )
            for row, detour in detours.items()
        }

    def _not_finite(self, float32_error: str) -> str:
        """Why a row came out as no numbers, and what to do about it."""
        if self._why_not_float32 and self._uses_half_precision:
            why = f"a float16 overflow is likely, and {self._why_not_float32}: set dtype: bfloat16"
        elif float32_error:
            why = (
                f"it overflows {self.dtype}, and this model does not run in float32 ({float32_error}); "
                "set dtype: bfloat16 or float32"
            )
        else:
            tried = "float32 gave no better numbers" if self._in_float32 else "it was computed in float32"
            why = f"{tried}, so the weights of the checkpoint are damaged, or it cannot deal with this row"
        return f"came out as NaN, infinite or no probabilities; {why}"

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

    def _write(self, command: Predict, rows: npt.NDArray[np.int64], values: npt.NDArray[np.float64]) -> str:
        """Write a part; returns its name."""
        columns = [pa.array(rows)] + [pa.array(values[:, label]) for label in range(values.shape[1])]
        names = ["row"] + [f"p{label}" for label in range(values.shape[1])]
        buffer = pa.BufferOutputStream()
        pa_csv.write_csv(pa.table(columns, names=names), buffer)
        content = buffer.getvalue().to_pybytes()
        name = part_name(command.start, command.stop, content)
        with atomic_path(Path(self._spec.parts_dir) / name) as temporary:
            temporary.write_bytes(content)
        return name
