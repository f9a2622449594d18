"""Define ``Prepared``, a run that has passed every check: the input of all later stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ensemble.common.digests import FileDigests
from ensemble.common.files import FileState
from ensemble.common.gpus import Inventory
from ensemble.common.protocol import Activation
from ensemble.config import LoadedConfig, RunConfig
from ensemble.data.row_files import FileCells
from ensemble.data.submission import Sample
from ensemble.data.table import DistinctCells, InputTable, TableNeeds, Truth
from ensemble.jobs.causes import Causes, settings_of_job
from ensemble.jobs.job import Job, Model, by_member, member_of
from ensemble.jobs.when import ExpectedShare
from ensemble.members.base import Inspection
from ensemble.members.registry import kind_for_checks
from ensemble.merging.metrics import LabelledRows, Metric
from ensemble.merging.post_process import PostProcess
from ensemble.planning.plan import ModelPlan, Plan
from ensemble.scheduling.launchers.base import Launcher, Node


@dataclass(frozen=True)
class Prepared:
    """Hold a run that has passed every check.

    Attributes:
        models: what workers load, with their jobs, in the config's order.
        of_models: what is known of each model, by its name.
        columns: of the table, that a member reads in any of its views, by member name.
        job_columns: the same of each job, by its name.
        job_rows: the rows that a job may compute, bool [rows], by its name, of jobs that may not compute all.
        previews: the first row's text of each member with a template, by member name; of a view by
            "member (view name)".
        file_states: of the members' files, by absolute path, from before anything was read of them.
        table_state: of the table's file, from before it was read.
        needs: what is read of the table.
        post: the labels that are possible in each row, and the rules for some rows.
        metrics: those that the config asks for.
        groups: the cells of the columns that divide rows for them, by column.
        shares: the share of the rows that each member or job with ``when`` is expected to compute, by name.
        files: the column that names files, by name of the members that read files.
        nodes: of the cluster; none on one machine.
        reuse: the directory of another run, from which rows are taken over; None: only from the run's own.
    """

    loaded: LoadedConfig
    table: InputTable
    models: tuple[Model, ...]
    of_models: dict[str, Inspection]
    columns: dict[str, tuple[str, ...]]
    plan: Plan
    launcher: Launcher
    inventory: Inventory
    sample: Sample | None
    warnings: tuple[str, ...]
    previews: dict[str, str]
    file_states: Mapping[str, FileState]
    table_state: FileState | None
    needs: TableNeeds
    shares: Mapping[str, ExpectedShare] = field(default_factory=dict)
    post: PostProcess = field(default_factory=PostProcess)
    metrics: tuple[Metric, ...] = ()
    groups: Mapping[str, DistinctCells] = field(default_factory=dict)
    job_columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    job_rows: Mapping[str, npt.NDArray[np.bool_]] = field(default_factory=dict)
    files: Mapping[str, FileCells] = field(default_factory=dict)
    nodes: tuple[Node, ...] = ()
    reuse: Path | None = None

    @property
    def config(self) -> RunConfig:
        return self.loaded.config

    @property
    def inspected(self) -> dict[str, Inspection]:
        """Return what is known of each member's first model, by the member's name."""
        return by_member(self.models, self.of_models)

    @property
    def truth(self) -> Truth | None:
        """Return the true labels if members can be scored by them."""
        truth = self.table.truth
        # Log loss and accuracy need probabilities of exclusive labels from every member.
        if truth is not None and truth.ndim == 1 and self.activation != "softmax":
            return None
        return truth

    @property
    def labelled(self) -> LabelledRows | None:
        """Return what is known of the rows to score the merged values by; None if they cannot be scored."""
        if self.truth is None:
            return None
        possible, labels = self.post.possible, self.config.labels
        return LabelledRows(self.truth, self.activation, possible, None, self.groups, labels)

    @property
    def activation(self) -> Activation:
        return merged_activation(self.inspected)

    @property
    def problems(self) -> tuple[str, ...]:
        """Return a sentence for each member that fits nowhere, or not on a node of the cluster."""
        return (*self.plan.problems, *(text for node in self.nodes for text in node.problems))

    def file_cells(self, job: Job) -> FileCells | None:
        """Return the cells that name files for a job; None if it reads no files."""
        cells = self.files.get(member_of(job.name))
        return cells and replace(cells, column=job.swap.get(cells.column, cells.column))

    def causes(self, plan: ModelPlan, job: Job, files: FileDigests) -> Causes:
        """Return everything that a job's probabilities depend on; the table must still have its columns.

        With ``hash_weights`` every byte of the weights counts; switching it on or off counts as a change.
        """
        kind, inspected = kind_for_checks(job.settings), self.of_models[plan.name]
        return Causes(
            settings=settings_of_job(self.config, job, kind.fingerprint(inspected, plan.placement)),
            content=kind.content(inspected, files),
            rows=self.table.digest(self.job_columns[job.name], self.file_cells(job)),
        )

    def even_value(self, member: str) -> float:
        """Return the value of every column in a row of which nothing is known."""
        return 0.5 if self.inspected[member].activation == "sigmoid" else 1 / len(self.config.labels)


def merged_activation(inspected: Mapping[str, Inspection]) -> Activation:
    """Return the activation of the merged values; see ``common_activation``."""
    return common_activation(inspection.activation for inspection in inspected.values())


def common_activation(activations: Iterable[Activation]) -> Activation:
    """Return what members are together: "softmax" only if each one is, "none" if any is."""
    present = set(activations)
    if "none" in present:
        return "none"
    return "sigmoid" if "sigmoid" in present else "softmax"
