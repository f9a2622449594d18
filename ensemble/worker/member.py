"""One member: tokenizer and rows at once, the model once a device is free; then chunks in, part CSVs out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

from ensemble.common.files import check_unchanged
from ensemble.common.protocol import Predict, WorkerSpec
from ensemble.data.json_cells import TemplateProblem
from ensemble.data.published_table import PublishedTable
from ensemble.members.huggingface.loading.checks import ROWS, check_tokenizer
from ensemble.members.huggingface.loading.float32_retry import (
    in_float32,
    uses_half_precision,
    why_not_float32,
)
from ensemble.members.huggingface.loading.load import Loaded, load, max_length
from ensemble.members.huggingface.loading.precision import capability, may_omit_mask
from ensemble.members.huggingface.loading.preload import (
    ReadAhead,
    checkpoint_folder,
    import_model_class,
    weight_files,
)
from ensemble.members.huggingface.loading.tokenizer import load_tokenizer
from ensemble.members.huggingface.scoring.classifier import Classifier, Shortcut
from ensemble.members.huggingface.scoring.device_queue import never_look_for_packed_rows
from ensemble.members.huggingface.scoring.encode import Encoded, Prompt
from ensemble.members.huggingface.scoring.forward import BatchSizes, Mode, Report, compute
from ensemble.members.huggingface.scoring.prefetch import Upcoming
from ensemble.members.huggingface.scoring.unsupported import told_in_a_sentence
from ensemble.members.huggingface.scoring.warmup import LONGEST, TEXTS, Rehearsal
from ensemble.worker.shard_writer import ChunkWork, Parts, Reasons, Writer


class Member:
    """Gets ready to load a member, loads it, and predicts chunks of its rows.

    Made, it holds neither model nor device.

    Args:
        spec: what to load, and where rows come from and parts go.
        write_failed: called by another thread when a part could not be written; ``finish`` says why.

    Attributes:
        unwritten_chunk: the number of the chunk whose part could not be written; None: there is none.

    Raises:
        OSError: the tokenizer's files, the table or its order cannot be read.
        ValueError: the tokenizer leaves no room for text, or is not the one that its files are for.
    """

    def __init__(self, spec: WorkerSpec, write_failed: Callable[[], None] = lambda: None) -> None:
        self._spec = spec
        with self._unchanged():
            self._tokenizer = load_tokenizer(spec)
        self._table = PublishedTable(Path(spec.table_path))
        self._order = np.load(spec.order_path, mmap_mode="r")
        # Of the model's own limit nothing is known yet.
        self.max_length = max_length(spec, self._tokenizer, None, [])
        self._prompt = Prompt(spec, self._tokenizer, self.max_length)
        first = self._first_texts()
        folder = checkpoint_folder(spec.model_name_or_path, spec.revision)
        plain = [part for text in first for part in ([text] if isinstance(text, str) else text)]
        with self._unchanged():
            self._tokenizer_notes = tuple(check_tokenizer(spec, self._tokenizer, folder, plain))
        self._longest = max(first, key=lambda text: len("".join(text)), default=None)
        self._rehearsed = self._encode_rehearsal()
        # On a CPU both would want the same cores.
        self._upcoming = Upcoming(self._encode, in_background=spec.gpus > 0)
        self._parts = Parts(Path(spec.parts_dir), spec.activation, spec.label_order, spec.files)
        self._writer = Writer(write_failed)
        self._reading: ReadAhead | None = None
        self._notes: list[str] = []
        import_model_class(spec)

    def read_ahead(self, limit_bytes: int) -> None:
        """Begin to read the weights' files, so that they lie in the page cache; ``load`` ends it."""
        self._reading = ReadAhead(weight_files(self._spec), limit_bytes)

    def prepare(self, start: int, stop: int) -> None:
        """A hint: rows ``order[start:stop]`` will probably come next.  Returns at once; from any thread."""
        self._upcoming.prepare(start, stop)

    def load(self) -> None:
        """Put the model on its devices; from then on there is all that ``Ready`` tells.

        Raises:
            ValueError: the checkpoint cannot be used, with the reason.
            OSError: its files cannot be read.
            FilesChanged: they are no longer those that the run has begun with.
        """
        if self._reading is not None:
            self._reading.stop()
        with self._unchanged():
            loaded = load(self._spec, self._tokenizer)
        if loaded.max_length != self.max_length:
            self.max_length = loaded.max_length
            self._prompt = Prompt(self._spec, self._tokenizer, self.max_length)
            self._upcoming.forget()
            with self._upcoming.nobody_else():
                self._rehearsed = self._encode_rehearsal()
        self._classifier = Classifier(loaded.model, loaded.pad_token_id)
        self.dtype = loaded.dtype
        self._notes = [*loaded.notes, *self._tokenizer_notes]
        self._in_float32 = self._float32_of(loaded)
        self._passes = partial(told_in_a_sentence, self._spec, loaded.model, loaded.device_name)
        with self._passes(first=True):
            bears_padding = self._bears_padding(loaded)
        self._sizes = BatchSizes(loaded.token_budget, self._spec.batch_size, not bears_padding, loaded.memory)
        if not bears_padding:
            self._notes.append(
                "its numbers change with padding, so only rows of equal length share a batch: slower"
            )
        self.token_budget = self._sizes.tokens_at(min(self.max_length, self._spec.width or self.max_length))
        self.parameters = loaded.parameters
        self.attn_implementation = loaded.attn_implementation
        self.device_name = loaded.device_name

    def predict_chunk(self, command: Predict, report: Report, written: Callable[[ChunkWork], None]) -> None:
        """Compute a chunk; a thread leaves it as its part, without the rows that cannot be computed.

        Returns when the device has nothing left to do for the chunk.  No more than one part is being written while
        the next chunk is computed.

        Args:
            report: called after each step, such as a batch, with rows, tokens and padded tokens so far.
            written: called by that thread when the part stands under its name.

        Raises:
            WriteError: an earlier part could not be written; ``unwritten_chunk`` says which.
            Exception: whatever comes out of tokenizer and model; which row is to blame is not known then.
        """
        self._writer.check()
        encoded = self._upcoming.take(command.start, command.stop, lambda: report(0, 0, 0))
        with self._passes():
            computed = compute(self._classifier, encoded, self._sizes, report, self._in_float32)
        rows = np.asarray(self._order[command.start : command.stop])
        values = self._parts.values(computed)

        def write() -> None:
            written(self._parts.write(command, rows, encoded, computed, values, self._reasons))

        self._writer.hand_over(command.chunk, write)

    def finish(self) -> None:
        """Wait until the last part stands under its name.

        Raises:
            WriteError: it could not be written; ``unwritten_chunk`` says which.
        """
        self._writer.wait()

    @property
    def unwritten_chunk(self) -> int | None:
        return self._writer.failed_chunk

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

    @contextlib.contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Whatever is read of the checkpoint's files meanwhile is of the files that the run has begun with."""
        try:
            yield
        finally:  # half a new file ends in an error that does not say so
            check_unchanged(self._spec.files)

    def _encode(self, start: int, stop: int, step: Callable[[], None]) -> Encoded:
        return self._prompt.encode(self._table.take(np.asarray(self._order[start:stop])), step)

    def _float32_of(self, loaded: Loaded) -> Mode | None:
        """What makes the model compute in float32 where it overflows; None where that makes no sense."""
        why_not, uses_half = why_not_float32(loaded.model), uses_half_precision(loaded.model)
        can_retry = uses_half and not why_not
        self._reasons = Reasons(
            self.dtype, loaded.device_name, self.max_length, why_not if uses_half else "", can_retry
        )
        return partial(in_float32, loaded.model) if can_retry else None

    def _first_texts(self) -> list[str | tuple[str, str]]:
        """Of the table's first rows, without those that the template fails on."""
        texts = []
        for row in self._table.take(np.arange(min(ROWS, self._table.rows))):
            with contextlib.suppress(TemplateProblem):
                texts.append(self._prompt.render(row))
        return texts

    def _encode_rehearsal(self) -> Encoded:
        pairs = len(self._spec.text_columns) == 2
        texts: list[str | tuple[str, str]] = [(text, text) for text in TEXTS] if pairs else list(TEXTS)
        if isinstance(self._longest, str):
            texts.append(self._longest[:LONGEST])
        elif self._longest is not None:
            texts.append((self._longest[0][:LONGEST], self._longest[1][:LONGEST]))
        return self._prompt.encode_texts(texts)

    def _bears_padding(self, loaded: Loaded) -> bool:
        rehearsal = Rehearsal(
            self._classifier,
            self._rehearsed,
            self._spec.activation,
            is_exact=self.dtype == "float32" and self._spec.quantization_config is None,
            may_omit_mask=may_omit_mask(loaded.model, capability(self._classifier.device.type == "cuda")),
        )
        if skipped := rehearsal.check_attention(loaded.model, self.dtype, self._in_float32):
            self._notes.append(skipped)
        bears_padding = rehearsal.bears_padding(self._in_float32)
        if Shortcut.NO_MASK in self._classifier.taken:
            never_look_for_packed_rows()
        return bears_padding
