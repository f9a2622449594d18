"""The rows of members with ``when``, as the members before them get on.

The rules are in ``planning.cascade``; here is what they are asked about, and who gets what comes of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ensemble.common.errors import DataError, EnsembleError
from ensemble.common.protocol import Activation, ChunkDone
from ensemble.common.shards import read_shard, shard_table
from ensemble.common.text import plural, shown_path
from ensemble.config import MemberConfig, RunConfig
from ensemble.data.ids import ID_COLUMN
from ensemble.data.predictions_csv import (
    PredictionFile,
    demand_as_written,
    is_as_written,
    read_predictions,
)
from ensemble.members.base import Inspection
from ensemble.merging.blocks import weights_by_bin, weights_of_rows
from ensemble.merging.calibration import calibrator
from ensemble.merging.methods.weighted_mean import scaled, weighted_mean
from ensemble.pipeline.fingerprint import changed_members, changed_sentence
from ensemble.pipeline.prepared import Prepared
from ensemble.pipeline.resume import MemberWork, mean_of_views, values_of
from ensemble.pipeline.run_dir import RunDir
from ensemble.planning.cascade import (
    COMPUTE,
    SKIP,
    UNKNOWN,
    ExpectedShare,
    Group,
    Grouping,
    closest_first,
    decide,
    doubts,
    row_costs,
)
from ensemble.planning.chunks import Chunk
from ensemble.planning.plan import MemberPlan
from ensemble.scheduling.state import MemberState

_Rows = npt.NDArray[np.bool_]
_Values = npt.NDArray[np.float64]


@dataclass
class _Cascade:
    """A member with ``when``.

    Attributes:
        before: the members that decide: those with a weight.
        doubt: of each row, NaN while a value is missing; and what was ``decided`` of it.
        is_done: rows that need not be computed any more, or are being computed; ``was_done`` before this run.
        costs: of each row, in shares of the work of the whole table.
    """

    member: MemberPlan
    when: Mapping[str, float]
    before: tuple[str, ...]
    doubt: _Values
    decided: npt.NDArray[np.int8]
    state: MemberState | None = None
    grouping: Grouping | None = None
    is_given: bool = False
    costs: _Values = field(default_factory=lambda: np.zeros(0))
    is_done: _Rows = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    was_done: _Rows = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))

    def forget(self) -> None:
        """Nothing is decided."""
        self.doubt[:] = np.nan
        self.decided = np.full(len(self.doubt), UNKNOWN, dtype=np.int8)
        self.is_given = False
        self.grouping = self.new_grouping()

    def new_grouping(self) -> Grouping:
        """Of the table's rows: those to compute are the same in each view."""
        return Grouping(self.chunks, self.member.order)

    @property
    def chunks(self) -> list[Chunk]:
        """Those of the whole table, in one view."""
        return [chunk for chunk in self.member.chunks if chunk.view == 0]


class Cascades:
    """Those of a run; none where no member has ``when``.

    Args:
        works: by member name; what is done of a member before this run.
    """

    def __init__(self, prepared: Prepared, rundir: RunDir, works: Mapping[str, MemberWork]) -> None:
        config, rows = prepared.config, prepared.table.rows
        self._prepared = prepared
        self._works = works
        self._rundir = rundir
        self._cascades: dict[str, _Cascade] = {}
        self._values: dict[
            str, _Values
        ] = {}  # of a member with views the mean, once all of a row's are there
        self._parts: dict[str, list[_Values]] = {}  # in each view
        self._has: dict[str, _Rows] = {}
        self._ended: set[str] = set()
        self._left_out: set[str] = set()
        for number, member in enumerate(prepared.plan.members):
            if (when := member.model.when) is None:
                continue
            unknown = np.full(rows, UNKNOWN, dtype=np.int8)
            self._cascades[member.name] = _Cascade(
                member, when, config.deciders(number), np.full(rows, np.nan), unknown
            )
        for name in {name for one in self._cascades.values() for name in one.before}:
            self._read(name)
            if works[name].is_complete and name not in self._cascades:
                self._ended.add(name)
        self._update()

    def wanted(self, member: str) -> _Rows | None:
        """The rows that the member is to have by what is known now; None: all."""
        found = self._cascades.get(member)
        return None if found is None else found.decided == COMPUTE

    def unknown_rows(self, member: str) -> int:
        """Of how many rows it is not known yet whether the member is to have them."""
        found = self._cascades.get(member)
        return 0 if found is None else int((found.decided == UNKNOWN).sum())

    def is_covered(self, member: str) -> bool:
        """Whether what is done of a member is all that it is to have."""
        found = self._cascades.get(member)
        if found is None:
            return bool(self._works[member].has_rows.all())
        wanted = np.tile(found.decided == COMPUTE, len(self._works[member].parts))
        return bool((found.decided != UNKNOWN).all() and self._works[member].has_rows[wanted].all())

    def begin(self, members: Sequence[MemberPlan], states: Sequence[MemberState]) -> None:
        """Give members their first rows.

        Args:
            members: as they were planned, with the chunks of the whole table.
            states: of the same members.
        """
        for member, state in zip(members, states, strict=True):
            found = self._cascades.get(member.name)
            if found is None or not state.plan.waits_for:
                continue
            found.member, found.state, found.is_given = member, state, False
            found.grouping = found.new_grouping()
            found.costs = row_costs(member.chunks, member.order)
            found.was_done = self._works[member.name].has_rows.copy()
            found.is_done = found.was_done.copy()
            if member.views > 1 and member.name in self._values:  # it may have been complete, as one mean
                self._read(member.name)
        self._update()

    def chunk_done(self, state: MemberState, done: ChunkDone) -> None:
        """A member's shard stands."""
        if not self._cascades:
            return
        name = state.plan.name
        table = shard_table(read_shard(self._works[name].shards_dir / done.shard), self._prepared.table.rows)
        if table is None:  # the member will not get far with it
            return
        rows, folder = table.column("row").to_numpy(), done.shard.rpartition("/")[0]
        folders = [one.shards_dir.name for one in self._works[name].views]
        view = folders.index(folder) if folder in folders else 0
        if (own := self._cascades.get(name)) is not None and own.state is not None:
            own.is_done[rows + view * self._prepared.table.rows] = True
            own.is_done[list(done.bad_rows)] = True
        if name in self._values:
            for label in range(len(self._prepared.config.labels)):
                self._parts[name][view][rows, label] = table.column(f"p{label}").to_numpy()
            self._take_bad_rows(name, state.bad_rows)
            self._average(name, rows)
            self._update()

    def bad_rows(self, state: MemberState) -> None:
        """Rows of a member cannot be computed."""
        if state.plan.name in self._values:
            self._take_bad_rows(state.plan.name, state.bad_rows)
            self._update()

    def ended(self, state: MemberState) -> None:
        """No row of a member comes any more.

        Those that wait for one that failed go by the others, if its failure lets the run go on; else they wait for
        the run that has it.
        """
        name = state.plan.name
        if name not in self._values:
            return
        if state.failure is None:
            self._average(name, is_over=True)
            self._ended.add(name)
        elif state.failure.is_dropped or self._prepared.config.on_member_failure == "continue":
            self._left_out.add(name)
            for one in self._cascades.values():
                if name not in one.before:
                    continue
                one.forget()
                if one.state is not None:
                    for chunk in one.state.in_hand.values():
                        one.is_done[one.state.order[chunk.start : chunk.stop]] = True
                    one.state.decide_anew(len(one.doubt) * one.member.views)
        self._update()

    def _read(self, name: str) -> None:
        """Take what is done of a member that others go by: once complete its mean, before that each view."""
        work, rows, labels = self._works[name], self._prepared.table.rows, len(self._prepared.config.labels)
        works = (work,) if work.is_complete else work.parts
        parts = [values_of(self._rundir, one, labels) for one in works]
        self._parts[name] = parts
        self._values[name] = parts[0] if len(parts) == 1 else np.full((rows, labels), np.nan, order="F")
        self._has[name] = np.zeros(rows, dtype=np.bool_)
        self._average(name)
        if not work.is_complete:
            self._take_bad_rows(name, work.noted_bad_rows)

    def _take_bad_rows(self, name: str, bad_rows: Mapping[int, str]) -> None:
        """They get equal probabilities, or else the member will fail."""
        if bad_rows and self._prepared.config.on_bad_row == "uniform":
            rows = self._prepared.table.rows
            for row in bad_rows:
                self._parts[name][row // rows][row % rows] = self._prepared.even_value(name)
            self._average(name, np.array([row % rows for row in bad_rows]))

    def _average(self, name: str, rows: npt.NDArray[np.int64] | None = None, is_over: bool = False) -> None:
        """Give rows their mean over the views, where all of these are there, or where no more come."""
        rows = np.arange(self._prepared.table.rows) if rows is None else rows
        parts = [one[rows] for one in self._parts[name]]
        is_there = ~np.isnan(parts).any(axis=2)
        has = is_there.any(axis=0) if is_over else is_there.all(axis=0)
        if len(parts) > 1:
            mean = mean_of_views(parts, self._works[name].weights)
            self._values[name][rows[has]] = mean[has]
        self._has[name][rows] = has

    def _update(self) -> None:
        for one in self._cascades.values():
            before = [name for name in one.before if name not in self._left_out]
            is_new = np.isnan(one.doubt)
            for name in before:
                is_new &= self._is_known(name)
            if is_new.any():
                rows = np.flatnonzero(is_new)
                ((rule, _),) = one.when.items()
                is_exclusive = all(self._prepared.inspected[name].activation == "softmax" for name in before)
                one.doubt[rows] = doubts(rule, self._mean(before, rows), is_exclusive)
                one.decided = decide(one.when, one.doubt)
            if one.state is not None:
                self._grow(one, one.state)

    def _is_known(self, name: str) -> _Rows:
        """The rows of which it is known what the member gives to them, if anything."""
        is_known = self._has[name] | (name in self._ended)
        if (own := self._cascades.get(name)) is not None:
            return np.asarray((own.decided == SKIP) | ((own.decided == COMPUTE) & is_known))
        return np.asarray(is_known)

    def _mean(self, names: Sequence[str], rows: npt.NDArray[np.int64]) -> _Values:
        """The members' weighted mean, [rows, labels]; NaN in a row that no member with a weight has."""
        config = self._prepared.config
        models = [model for model in config.models if model.name in names and model.has_weight]
        if not models:
            return np.full((len(rows), len(config.labels)), np.nan)
        values = [self._values[model.name][rows] for model in models]
        is_present = np.array([self._has[model.name][rows] for model in models])
        for present, model in zip(is_present, models, strict=True):
            if (own := self._cascades.get(model.name)) is not None:
                present &= own.decided[rows] == COMPUTE
        activations = [self._prepared.inspected[model.name].activation for model in models]
        return _mean(config, models, activations, values, is_present, self._prepared.table.text_bytes[rows])

    def _grow(self, one: _Cascade, state: MemberState) -> None:
        groups: list[Group] = []
        unknown = int((one.decided == UNKNOWN).sum())
        if self._prepared.config.time_limit is not None:
            if not unknown and not one.is_given:
                order, max_rows = one.member.order[: len(one.doubt)], one.member.rows_at_a_time()
                groups = closest_first(one.doubt, one.decided, one.chunks, order, max_rows)
                one.is_given = True
        elif one.grouping is not None:
            groups = one.grouping.take(one.decided)
        views, rows = one.member.views, len(one.doubt)
        left = [
            (Group(group.rows + view * rows, group.cost).without(one.is_done), view)
            for view in range(views)
            for group in groups
        ]
        wanted = np.tile(one.decided == COMPUTE, views)
        is_reused = wanted & one.was_done
        is_idle = np.tile(one.decided == SKIP, views) | is_reused
        state.grow(
            [(group.rows, group.cost, view) for group, view in left if len(group.rows)],
            unknown_rows=unknown * views,
            rows=int(wanted.sum()),
            reused_rows=int(is_reused.sum()),
            idle_cost=float(one.costs[is_idle].sum()) if not is_idle.all() else 1.0,
            may_grow=not (self._ended | self._left_out).issuperset(one.before),
        )


def expected_shares(
    config: RunConfig,
    inspected: Mapping[str, Inspection],
    given: Mapping[str, _Values],
    ids: pa.ChunkedArray | None,
    folder: Path,
    place: str = "",
    is_named: bool = False,
) -> dict[str, ExpectedShare]:
    """For each member with ``when``: by the predictions of the members before it, as far as there are any.

    Args:
        given: values of members that need no worker, [rows, labels], NaN where they lack a row.
        ids: of the table's rows; None: it cannot be read.
        folder: the directory of a run, of these rows or of others, such as a labelled sample.
        place: what it is called; empty: its path.
        is_named: the user has named the directory; else predictions that are not by this config are left out.

    Raises:
        DataError: the user has named predictions that are not by this config, or were changed since.
    """
    place = place or f"in {shown_path(folder)}"
    rundir, found = RunDir(folder), dict[str, ExpectedShare]()
    files: dict[str, PredictionFile] = {}
    stale = _stale(config, folder, is_named)
    for model in config.models:
        if model.name not in stale:
            with contextlib.suppress(DataError):
                file = read_predictions(rundir.predictions(model.name))
                if file.labels == config.labels and len(file.ids):
                    files[model.name] = file
                    continue
        if model.name in given and ids is not None:
            path = rundir.predictions(model.name)
            files[model.name] = PredictionFile(path, ID_COLUMN, config.labels, ids, given[model.name])
    for number, model in enumerate(config.models):
        if model.when is None:
            continue
        before = [one for one in config.models[:number] if one.has_weight]
        ((rule, limit),) = model.when.items()
        if rule == "share":
            found[model.name] = ExpectedShare(limit, "as when says")
        elif any(isinstance(one.weight, tuple) for one in before):
            found[model.name] = ExpectedShare(1.0, "all are assumed: weights by length bin are not looked up")
        elif missing := [one.name for one in before if one.name not in files or one.name not in inspected]:
            names = " and ".join(missing)
            why = f"all are assumed, as there are no predictions of {names} {place}"
            found[model.name] = ExpectedShare(1.0, why)
        else:
            rows = max((files[one.name].ids for one in before), key=len)
            activations = [inspected[one.name].activation for one in before]
            of_members = [
                files[one.name].join(rows, may_lack=True, may_have_others=True)[0].copy(order="F")
                for one in before
            ]
            is_present = np.array([~np.isnan(one).any(axis=1) for one in of_members])
            mean = _mean(
                config, before, activations, of_members, is_present, np.zeros(len(rows), dtype=np.int64)
            )
            decided = decide(model.when, doubts(rule, mean, set(activations) == {"softmax"}))
            why = f"by the predictions of {plural(len(rows), 'row')} {place}"
            found[model.name] = ExpectedShare(float((decided == COMPUTE).mean()), why)
    return found


def _stale(config: RunConfig, folder: Path, is_named: bool) -> Collection[str]:
    """Return the members by which ``when`` decides whose predictions in a run's directory are not by this config.

    Raises:
        DataError: there is such a member, and ``is_named``.
    """
    rundir = RunDir(folder)
    names = {
        name
        for number, model in enumerate(config.models)
        if model.when is not None and "share" not in model.when
        for name in config.deciders(number)
        if rundir.predictions(name).exists()
    }
    if is_named:
        for name in sorted(names):
            demand_as_written(rundir.predictions(name))
    changed: Mapping[str, Sequence[str]] = {}
    with contextlib.nullcontext() if is_named else contextlib.suppress(EnsembleError):
        changed = changed_members(config, names, folder) if names else {}
    if changed and is_named:
        raise DataError(
            f"--predictions-from: {folder}: {changed_sentence(changed)}; run the config there with these settings "
            "first, or leave the option out"
        )
    return {*changed, *(name for name in names if is_as_written(rundir.predictions(name)) is False)}


def _mean(
    config: RunConfig,
    models: Sequence[MemberConfig],
    activations: Sequence[Activation],
    values: Sequence[_Values],
    is_present: _Rows,
    text_bytes: npt.NDArray[np.int64],
) -> _Values:
    """The weighted mean of members after calibration, [rows, labels].

    Args:
        models: some with a weight, and their activations.
        values: [rows, labels] each, which calibration changes; NaN where ``is_present`` [members, rows] is False.
        text_bytes: of the rows, for weights by length bin.
    """
    for model, activation, own in zip(models, activations, values, strict=True):
        if (calibrate := calibrator(model.calibration, activation, config.labels)) is not None:
            calibrate(own)
    edges = config.ensemble.length_bins or ()
    weights = weights_by_bin([model.weight for model in models], config.labels, len(edges) + 1)
    weights = weights_of_rows(weights, edges, text_bytes)
    mean = weighted_mean(weights, values, is_present)
    return scaled(mean) if weights.shape[2] > 1 and set(activations) == {"softmax"} else mean
