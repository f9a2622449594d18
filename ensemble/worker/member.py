"""One loaded member: a chunk of rows in, its part CSV on disk out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pa_csv
import torch

from ensemble.protocol import Predict, WorkerSpec
from ensemble.rundir import atomic_path, part_path
from ensemble.worker.batching import make_batches
from ensemble.worker.load import Loaded, load
from ensemble.worker.predict import Classifier, good_rows, probabilities
from ensemble.worker.prompt import Encoded, Prompt
from ensemble.worker.rows import PublishedTable

Report = Callable[[int, int, int], None]


@dataclass(frozen=True)
class ChunkWork:
    """What a chunk took: real tokens, computed tokens, forward passes, rows cut at max_length."""

    tokens: int
    padded_tokens: int
    batches: int
    truncated_rows: int


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
        self._classifier = Classifier(
            self._loaded.model,
            self._loaded.pad_token_id,
            pad_left=self._loaded.tokenizer.padding_side == "left",
        )
        self.token_budget = self._loaded.token_budget
        self.max_length = self._loaded.max_length
        self.parameters = self._loaded.parameters
        self.dtype = self._loaded.dtype
        self.attn_implementation = self._loaded.attn_implementation
        self.device_name = self._loaded.device_name

    def predict_chunk(self, command: Predict, report: Report) -> ChunkWork:
        """Compute a chunk and leave it as its part.

        Args:
            report: called after each batch with rows, tokens and padded tokens so far.
        """
        rows = np.asarray(self._order[command.start : command.stop])
        encoded = self._prompt.encode(self._table.take(rows))
        batches = make_batches(encoded.lengths, self.token_budget, self._spec.batch_size)
        values, padded_tokens = self._run(encoded, batches, report)
        bad = rows[~good_rows(values, self._spec.activation)]
        if len(bad):
            raise ValueError(
                f"{len(bad)} rows came out as NaN, infinite or no probabilities, the first is row {bad[0] + 1} "
                f"of the table; a float16 overflow is likely, try dtype: bfloat16 or float32"
            )
        self._write(command.chunk, rows, values)
        return ChunkWork(int(encoded.lengths.sum()), padded_tokens, len(batches), encoded.truncated_rows)

    def peak_gpu_memory_bytes(self) -> int | None:
        """The most that torch held on this worker's GPUs together, in bytes; None on a CPU."""
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return None
        return sum(torch.cuda.max_memory_reserved(index) for index in range(torch.cuda.device_count()))

    def notes(self) -> tuple[str, ...]:
        """What the user should know of how the member was loaded."""
        return self._loaded.notes

    def _run(
        self, encoded: Encoded, batches: list[npt.NDArray[np.int64]], report: Report
    ) -> tuple[npt.NDArray[np.float64], int]:
        """float64 [rows, labels] in the config's label order, and the tokens computed for it."""
        computed: list[torch.Tensor] = []
        rows = tokens = padded_tokens = 0
        for batch in batches:
            computed.append(self._classifier.logits(encoded, batch))
            lengths = encoded.lengths[batch]
            rows += len(batch)
            tokens += int(lengths.sum())
            padded_tokens += int(lengths.max()) * len(batch)
            report(rows, tokens, padded_tokens)
        # One copy from the device per chunk: a copy per batch would wait for each of them.
        together = probabilities(torch.cat(computed), self._spec.activation)
        values = np.empty_like(together)
        values[np.concatenate(batches)] = together
        return values[:, list(self._spec.label_order)], padded_tokens

    def _write(self, chunk: int, rows: npt.NDArray[np.int64], values: npt.NDArray[np.float64]) -> None:
        columns = [pa.array(rows)] + [pa.array(values[:, label]) for label in range(values.shape[1])]
        names = ["row"] + [f"p{label}" for label in range(values.shape[1])]
        with atomic_path(part_path(Path(self._spec.parts_dir), chunk)) as temporary:
            pa_csv.write_csv(pa.table(columns, names=names), str(temporary))
