"""The merge of a run: members' rows in, ensemble and submission out, block by block.

Owns where each member's rows come from, which rows are filled in and how, and which files the merged rows go to.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ensemble.common.errors import MergeError
from ensemble.common.files import atomic_path
from ensemble.common.text import plural
from ensemble.data.csv_file import csv_cells, csv_lines, header_line
from ensemble.data.predictions_csv import PredictionsReader, SpilledRows
from ensemble.merging.blocks import MergedMember, RowSource, block_spans, merge_blocks
from ensemble.merging.methods import merge_method
from ensemble.merging.methods.base import Members
from ensemble.merging.metrics import Score, Scoring
from ensemble.merging.row_checks import RowCheck
from ensemble.pipeline.run_dir import RunDir
from ensemble.pipeline.validate import Prepared, scores_make_sense

_Values = npt.NDArray[np.float64]
# More than the members: their text is made meanwhile.
_MAX_THREADS = 16


@dataclass(frozen=True)
class MergeInput:
    """One member to merge.

    Attributes:
        predictions: its sealed CSV; None where it has none.
        gathered: what its parts hold instead, NaN where no part has the row; called once.
        place: where its rows come from, for messages.
    """

    name: str
    weight: float
    predictions: Path | None
    gathered: Callable[[], _Values]
    place: Path


@dataclass
class Merged:
    """What a merge gave: scores by member (and the ensemble's), rows per member, rows filled in, files."""

    scores: dict[str, Score] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    filled_rows: int = 0
    files: dict[str, Path] = field(default_factory=dict)


class Merge:
    """Merges members of one run once.

    Args:
        even: what stands in a row of which nothing is known.
    """

    def __init__(self, prepared: Prepared, rundir: RunDir, even: float) -> None:
        self._prepared = prepared
        self._config = prepared.config
        self._table = prepared.table
        self._rundir = rundir
        self._even = even
        self._labels = prepared.config.labels
        self._merged = Merged()
        self._members: list[MergedMember] = []
        has_truth = self._table.truth is not None and scores_make_sense(prepared.inspected)
        self._truth = self._table.truth if has_truth else None

    def write(self, inputs: Sequence[MergeInput]) -> Merged:
        """Merge the members' values, score them where the truth is known, write ensemble and submission.

        Args:
            inputs: none, or all without a weight, and every row is filled in.

        Raises:
            MergeError: the CSVs do not fit together, or rows are missing.
            WriteError: the disk is full or the like.
        """
        if not any(one.weight for one in inputs):
            inputs = ()
        threads = min(len(os.sched_getaffinity(0)), _MAX_THREADS)
        with (
            _frugal_allocator(),
            contextlib.ExitStack() as opened,  # closed when the pool's threads are done with them
            ThreadPoolExecutor(threads, "merge") as pool,
        ):
            blocks = self._merged_blocks(inputs, opened, pool)
            if self._config.time_limit is not None:
                blocks = self._filled(blocks, any(one.predictions is None for one in inputs) or not inputs)
            scoring = Scoring(self._truth) if self._truth is not None and inputs else None
            self._write_blocks(blocks, pool, threads, scoring)
        return self._merged

    def _merged_blocks(
        self, inputs: Sequence[MergeInput], opened: contextlib.ExitStack, pool: ThreadPoolExecutor
    ) -> Iterator[tuple[int, _Values]]:
        table = self._table
        if not inputs:
            for start, stop in block_spans(table.rows, len(self._labels)):
                yield start, np.full((stop - start, len(self._labels)), np.nan, order="F")
            return
        folder = self._rundir.work_dir
        sealed = sum(one.predictions is not None for one in inputs)
        sources: list[RowSource] = []
        for one in inputs:
            if one.predictions is None:
                sources.append(SpilledRows(one.gathered(), folder))
            else:
                id_column = self._config.data.id_column
                reader = PredictionsReader(
                    one.predictions, id_column, self._labels, table.ids, folder, sealed
                )
                sources.append(reader)
            opened.callback(sources[-1].close)
        names = tuple(one.name for one in inputs)
        activations = tuple(self._prepared.inspected[name].activation for name in names)

        def open_members() -> list[MergedMember]:
            self._members = []
            for one, source, activation in zip(inputs, sources, activations, strict=True):
                source.rewind()
                check = RowCheck(str(one.place), activation, table.ids, may_lack_rows=one.predictions is None)
                scoring = Scoring(self._truth) if self._truth is not None else None
                self._members.append(MergedMember(one.name, one.weight, source, check, scoring))
            return self._members

        method = merge_method(self._config.ensemble, Members(names, activations, self._labels))
        yield from merge_blocks(method, open_members, table.ids, table.text_bytes, pool)

    def _filled(
        self, blocks: Iterator[tuple[int, _Values]], may_lack_rows: bool
    ) -> Iterator[tuple[int, _Values]]:
        """The blocks with something in each row, where the config says what."""
        rule = self._config.fill
        if rule == "prior" and may_lack_rows:  # the mean of all rows must be known first
            whole = np.empty((self._table.rows, len(self._labels)), order="F")
            for start, values in blocks:
                whole[start : start + len(values)] = values
            self._merged.filled_rows = fill_rows(whole, rule, None, self._even)
            for start, stop in block_spans(*whole.shape):
                yield start, whole[start:stop]
            return
        given, sample = None, self._prepared.sample
        for start, values in blocks:
            if np.isnan(values[:, 0]).any():
                if given is None and rule == "sample" and sample is not None:
                    given = sample.values(self._table.ids)
                own = None if given is None else given[start : start + len(values)]
                self._merged.filled_rows += fill_rows(values, rule, own, self._even)
            yield start, values

    def _write_blocks(
        self,
        blocks: Iterator[tuple[int, _Values]],
        pool: ThreadPoolExecutor,
        threads: int,
        scoring: Scoring | None,
    ) -> None:
        """Write the files whose rows stand in the table's order, then the submission where its rows do not."""
        rundir, sample, table, merged = self._rundir, self._prepared.sample, self._table, self._merged
        header = (self._config.data.id_column, *self._labels)
        targets = [_Target(rundir.ensemble, header, (None, *range(len(self._labels))))]
        whole: _Values | None = None
        if sample is not None and sample.is_in_order(table.ids):
            targets.append(_Target(rundir.submission, sample.columns, sample.label_numbers))
        elif sample is not None:
            whole = np.empty((table.rows, len(self._labels)), order="F")
        texts: deque[Future[list[pa.Buffer]]] = deque()
        missing = 0
        with contextlib.ExitStack() as files:
            streams: list[BinaryIO] = []
            for target in reversed(
                targets
            ):  # from the last to the first, because the first then gets its name first
                # Under another name, which becomes its own where nothing goes wrong before the end of the "with".
                temporary = files.enter_context(atomic_path(target.path))
                streams.insert(0, files.enter_context(temporary.open("wb")))
                streams[0].write(header_line(target.header))

            def put(lines: list[pa.Buffer]) -> None:
                for stream, text in zip(streams, lines, strict=True):
                    stream.write(text)

            for start, values in blocks:
                missing += int(np.isnan(values[:, 0]).sum())
                if whole is not None:
                    whole[start : start + len(values)] = values
                if scoring is not None:
                    scoring.add(start, values)
                texts.append(pool.submit(self._text, start, values, targets))
                if len(texts) > threads:
                    put(texts.popleft().result())
            for text in texts:
                put(text.result())
            if missing:
                raise MergeError(
                    f"no member has probabilities for {plural(missing, 'row')}; run the same command again"
                )
        merged.files["ensemble"] = rundir.ensemble
        for member in self._members:
            merged.rows[member.name] = member.check.reached
            if member.scoring is not None and member.check.reached == table.rows:
                merged.scores[member.name] = member.scoring.score()
        if scoring is not None:
            score = scoring.score()
            # What fills rows that no member reached says nothing of the members.
            merged.scores[ENSEMBLE_ROW] = (
                replace(score, no_better_than_prior=False) if merged.filled_rows else score
            )
        self._submit(whole)

    def _text(self, start: int, values: _Values, targets: Sequence[_Target]) -> list[pa.Buffer]:
        """The lines of a block for each target; numbers become text once for all."""
        ids = csv_cells(pa.concat_arrays(self._table.ids.slice(start, len(values)).chunks))
        numbers = [csv_cells(pa.array(column)) for column in values.T]
        return [
            csv_lines([ids if index is None else numbers[index] for index in target.columns])
            for target in targets
        ]

    def _submit(self, whole: _Values | None) -> None:
        config, sample = self._config, self._prepared.sample
        if config.submission is None or sample is None:
            return
        written = self._rundir.submission
        if whole is not None:
            with atomic_path(written) as temporary:
                sample.write(temporary, self._table.ids, whole)
        # A trial on the first rows must not take the place of a real submission.
        if config.submission.path is not None and config.limit is None:
            config.submission.path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_path(config.submission.path) as temporary:
                shutil.copyfile(written, temporary)
            written = config.submission.path
        self._merged.files["submission"] = written


@dataclass(frozen=True)
class _Target:
    """A CSV of the merged rows; ``columns`` are label numbers, or None for the ids."""

    path: Path
    header: Sequence[str]
    columns: Sequence[int | None]


@contextlib.contextmanager
def _frugal_allocator() -> Iterator[None]:
    """pyarrow's usual allocator holds on to some 60 MB more while five files are read by turns."""
    before = pa.default_memory_pool()
    with contextlib.suppress(NotImplementedError):  # pyarrow can be built without it
        pa.set_memory_pool(pa.jemalloc_memory_pool())
    try:
        yield
    finally:
        pa.set_memory_pool(before)


def fill_rows(
    values: _Values,
    rule: Literal["uniform", "prior", "sample"],
    sample_values: _Values | None,
    even: float | None = None,
) -> int:
    """Fill the rows that hold NaN, in place; the others stay as they are, bit for bit.

    Args:
        values: float64 [rows, labels].
        rule: ``uniform``: 1 over the number of labels; ``prior``: the mean of the other rows, uniform where there
            are none; ``sample``: the row of ``sample_values``.
        sample_values: float64 [rows, labels], all finite; only ``sample`` needs them.
        even: the value of ``uniform`` where labels do not exclude each other; None: 1 over their number.

    Returns:
        how many rows were filled.

    Raises:
        ValueError: ``sample`` without values of the right shape.
    """
    empty = np.isnan(values).any(axis=1)
    if rule == "sample":
        if sample_values is None or sample_values.shape != values.shape:
            raise ValueError("fill: sample needs the sample's values, one for each of the values to fill")
        values[empty] = sample_values[empty]
    elif rule == "prior" and not empty.all():
        # Column by column, where the rows need not be copied.
        values[empty] = [column.mean(where=~empty) for column in values.T]
    else:
        values[empty] = 1.0 / values.shape[1] if even is None else even
    return int(empty.sum())


ENSEMBLE_ROW = "ensemble"
