"""Check a config and the files that it names: each function yields problems as sentences."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np

from ensemble.common.errors import ConfigError, DataError, EnsembleError
from ensemble.common.files import unreadable, unwritable_reason, without_links
from ensemble.common.host import usable_cpus
from ensemble.common.packages import installed_versions
from ensemble.common.text import gib, plural, quoted
from ensemble.config import LoadedConfig, MemberConfig, RunConfig, TuningConfig
from ensemble.config.schema import AllowedLabelsTable, AnswerConfig
from ensemble.data.answers import Answer, compile_format, halfway
from ensemble.data.json_cells import TemplateProblem, parse_json_cell
from ensemble.data.table import InputTable, row_text
from ensemble.jobs.job import Model, When, by_member
from ensemble.members.base import Inspection, MemberKind
from ensemble.merging.methods import METHODS, merge_method
from ensemble.merging.methods.base import Members
from ensemble.merging.post_process import PostProcess, RowRules
from ensemble.pipeline.prepared import merged_activation
from ensemble.pipeline.run_dir import RunDir
from ensemble.planning.plan import Plan

# The most by which the probabilities of a rule may miss a sum of 1.
_SUM_TOLERANCE = 1e-6
_RAW = "is for probabilities, and the models give raw values (regression)"
T = TypeVar("T")
Kinds: TypeAlias = Mapping[str, MemberKind[Any, Any]]


class Problems:
    """Collect errors of exit code 2, so that later checks still run."""

    def __init__(self) -> None:
        self._errors: list[EnsembleError] = []

    def value_of(self, key: str, make: Callable[..., T], *arguments: Any, **options: Any) -> T | None:
        """Return what a function makes; None if it raises an error, which is collected as by ``at``."""
        with self.at(key):
            return make(*arguments, **options)
        return None

    def demand(self, value: T | None) -> T:
        """Return a value that is None only if there are problems, which are raised."""
        if value is None:
            self.raise_any()
        assert value is not None
        return value

    @contextlib.contextmanager
    def at(self, key: str = "") -> Iterator[None]:
        """Collect the errors raised inside, prefixed with the key that they are about."""
        prefix = f"{key}: " if key else ""
        try:
            yield
        except EnsembleError as error:
            self._errors.append(type(error)([f"{prefix}{problem}" for problem in error.problems]))
        except OSError as error:  # such as a name that is too long for the file system
            self._errors.append(ConfigError(prefix + unreadable(error.filename or key, error)))
        except TemplateProblem as error:
            self._errors.append(ConfigError(f"{prefix}{error}"))

    def add(self, sentences: Iterable[str], kind: type[EnsembleError] = ConfigError) -> None:
        """Collect problems given as sentences."""
        with self.at():
            problems = list(sentences)
            if problems:
                raise kind(problems)

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(problem for error in self._errors for problem in error.problems)

    def raise_any(self) -> None:
        """Raise the collected errors: a single one as it is, several as one ConfigError."""
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            raise ConfigError(self.texts)


def rule_key(loaded: LoadedConfig, number: int) -> str:
    """Return the place of a rule's condition in the config."""
    return loaded.document.where(("rules", number, "when"))


def rule_problems(loaded: LoadedConfig, inspected: Mapping[str, Inspection]) -> Iterator[str]:
    """Yield problems of rules' values and masks that depend on what members give."""
    config = loaded.config
    if len(inspected) < len(config.models):
        return
    activation = merged_activation(inspected)
    for number, rule in enumerate(config.rules or ()):
        values, mask = rule.set or {}, rule.mask or ()
        at_set = loaded.document.where(("rules", number, "set"))
        at_mask = loaded.document.where(("rules", number, "mask"))
        total, has_all_labels = math.fsum(values.values()), len(values) == len(config.labels)
        if activation == "none":
            if mask:
                yield f"{at_mask}: {_RAW}; use set"
        elif any(not 0 <= value <= 1 for value in values.values()):
            yield f"{at_set}: a probability is a number from 0 to 1"
        elif activation != "softmax":
            continue
        elif total > 1 + _SUM_TOLERANCE or (has_all_labels and total < 1 - _SUM_TOLERANCE):
            yield f"{at_set}: the probabilities sum to {total:g}; those of exclusive labels sum to 1"
        elif set(mask) == set(config.labels):
            yield f"{at_mask}: masks every label; leave one"


def member_problems(
    config: RunConfig, models: Sequence[Model], of_models: Mapping[str, Inspection]
) -> Iterator[str]:
    """Yield problems of members, alone and together, beside those that the inspection of their models raised."""
    for model in models:
        problems = model.kind.problems(of_models.get(model.name))
        yield from (f"models[{model.index}].{text}" for text in problems)
    inspected = by_member(models, of_models)
    raw = [name for name, inspection in inspected.items() if inspection.activation == "none"]
    for index, member in enumerate(config.models):
        if member.name in raw and member.calibration is not None:
            yield f"models[{index}].calibration: {_RAW}"
        yield from _when_problems(config, index, inspected, raw)
    for model in models:
        ours = of_models[model.name].activation if model.name in of_models else ""
        first = inspected[model.member].activation if model.member in inspected else ours
        if ours not in ("", first):
            yield f"{model.place}: gives {ours} values, others {first}, which have no mean; make it a member"
    yield from _choices_problems({model.member: model.kind for model in models})
    if raw and len(raw) < len(inspected):
        keys = {model.kind.activation_key for model in models if model.member in raw} - {""}
        remedy = f", or set {' and '.join(sorted(keys))}" if keys else ""
        yield (
            f"models: {', '.join(raw)} gives raw values (regression), the others probabilities; their mean means "
            f"nothing: run them separately{remedy}"
        )
    if raw and config.data.allowed_labels is not None:
        yield f"data.allowed_labels: {_RAW}"
    if raw and config.on_bad_row == "uniform":
        yield f"on_bad_row: uniform {_RAW}"
    if raw and config.time_limit is not None and config.fill == "uniform":
        yield f"fill: uniform {_RAW}; set prior (the mean of the rows that were computed) or sample"
    if len(inspected) == len(config.models):  # else a method could miss those that cannot be read
        activations = tuple(inspection.activation for inspection in inspected.values())
        weights = tuple(model.weight for model in config.models)
        members = Members(tuple(inspected), activations, config.labels, weights)
        yield from merge_method(config.ensemble, members).problems()


def _choices_problems(kinds: Kinds) -> Iterator[str]:
    """Yield members whose labels are not the positions of the same choices as those of the others."""
    columns = {name: kind.reads().choices for name, kind in kinds.items() if kind.needs_worker}
    named = [(name, column) for name, column in columns.items() if column is not None]
    if not named:
        return
    first, expected = named[0]
    for index, name in enumerate(kinds):
        column = columns.get(name, expected)
        if column is None:
            yield (
                f"models[{index}] ({name}): its labels mean the same in all rows, and those of {first} are "
                "positions in a row's choices; only members with choices and csv members merge with it"
            )
        elif column != expected:
            yield (
                f"models[{index}].choices: {column!r}, and {first} has {expected!r}; positions mean the same only "
                "in one column"
            )


def choice_counts(table: InputTable, column: str, labels: int) -> list[int]:
    """Return how many choices each row has.

    Raises:
        DataError: of the first row that does not have two to ``labels``.
    """
    counts = []
    for number, cells in enumerate(table.python_rows([column])):
        place = row_text(number, table.ids)
        try:
            choices = parse_json_cell(cells[column])
        except TemplateProblem as error:
            raise DataError(f"{place}: {quoted(column)} must hold a JSON list of texts: {error}") from None
        if not isinstance(choices, list) or not all(isinstance(text, str) and text for text in choices):
            raise DataError(f"{place}: {quoted(column)} must hold a JSON list of texts, none of them empty")
        if len(choices) < 2:
            count = "one choice" if choices else "no choices"
            raise DataError(
                f"{place} has {count} in {quoted(column)}; a row needs two or more to choose from"
            )
        if len(choices) > labels:
            raise DataError(
                f"{place} has {len(choices)} choices in {quoted(column)}, and labels has "
                f'{plural(labels, "position")}; let it go from "0" to the most that any row has'
            )
        counts.append(len(choices))
    return counts


def _when_problems(
    config: RunConfig, index: int, inspected: Mapping[str, Inspection], raw: Sequence[str]
) -> Iterator[str]:
    """Yield problems of each ``when`` of a member with the values of the members and views before it."""
    model, labels = config.models[index], len(config.labels)
    rules: dict[str, tuple[When, Sequence[MemberConfig]]] = {}
    if model.when is not None:
        rules[f"models[{index}].when"] = model.when, config.models[:index]
    for number, view in enumerate(model.all_views):
        if view.when is not None and view.weight > 0:
            rules[f"models[{index}].views[{number}].when"] = view.when, config.models[: index + 1]
    for place, (when, before) in rules.items():
        raw_before = [earlier.name for earlier in before if earlier.name in raw]
        if raw_before:
            yield (
                f"{place}: {', '.join(raw_before)} gives raw values (regression), and a margin is one of "
                "probabilities"
            )
            continue
        names = [earlier.name for earlier in before if earlier.has_weight or earlier is model]
        deciders = {inspected[name].activation for name in names if name in inspected}
        highest = math.log(labels) if deciders == {"softmax"} else labels * math.log(2)
        limit = when.get("entropy_above", -1.0)
        if deciders and not isinstance(limit, str) and limit >= highest:
            yield (
                f"{place}.entropy_above: no row of {plural(labels, 'label')} has an entropy above "
                f"{highest:.4g} nats; give a smaller number"
            )


def place_problems(loaded: LoadedConfig, models: Sequence[Model]) -> Iterator[str]:
    """Yield places where the run cannot write, or would write over what it reads."""
    config, rundir = loaded.config, RunDir(loaded.config.output_dir)
    # A run of the config.yaml that an earlier one left here writes it again as it is.
    is_kept = loaded.redactor(loaded.whole) == loaded.texts[0]
    kept = without_links(rundir.config) if is_kept else None
    inputs = [path for path in loaded.paths if without_links(path) != kept]
    inputs.append(config.data.path)
    inputs += [Path(name) for model in models for name in model.kind.sources()]
    folders: dict[str, Path | None] = {"output_dir": config.output_dir}
    if config.launcher == "local":  # else on the machines on which its workers run
        for model in models:
            folders[f"models[{model.index}].offload_folder"] = model.kind.request().offload_folder
    target = None
    if isinstance(config.data.allowed_labels, AllowedLabelsTable):
        inputs.append(config.data.allowed_labels.path)
    if config.submission is not None:
        inputs.append(config.submission.sample)
        target = config.submission.path
    if target is not None:
        folders["submission.path"] = target.parent
        if target.is_dir():
            yield f"submission.path: {target} is a directory; name a file in it"
        if any(without_links(target).is_relative_to(without_links(path)) for path in inputs):
            yield f"submission.path: {target} would replace what the run reads; choose another name"
    yield from rundir.endangered(inputs, target)
    reasons = [unwritable_reason(key, folder) for key, folder in folders.items() if folder is not None]
    yield from filter(None, reasons)


def run_warnings(
    loaded: LoadedConfig,
    inspected: Mapping[str, Inspection],
    table: InputTable,
    post: PostProcess,
    devices: Sequence[str],
) -> Iterator[str]:
    """Yield warnings about the run as a whole."""
    config, allowed, rules = loaded.config, post.allowed, post.rules
    if config.tuned_on is not None:
        yield from _differences_from_tuned(config.tuned_on, devices)
    if rules is not None and config.limit is None:  # a rule may well be true for no row of a trial
        for number, rows in enumerate(rules.rows):
            if not rows.any():
                yield f"{rule_key(loaded, number)}: is true for no row of the table"
    if allowed is not None and table.truth is not None:
        impossible = allowed.impossible_truths(table.truth)
        if len(impossible):
            first = row_text(int(impossible[0]), table.ids)
            rows = f"{plural(len(impossible), 'row')} whose true label is impossible, the first is {first}"
            key = "label_column" if config.data.allowed_labels is None else "allowed_labels"
            yield f"data.{key}: {rows}; no prediction can be right there"
    if {inspection.activation for inspection in inspected.values()} >= {"softmax", "sigmoid"}:
        yield (
            "models: some give exclusive labels (softmax), some independent ones (sigmoid); their mean is neither"
        )
    if table.truth is not None and table.truth.ndim == 1 and merged_activation(inspected) != "softmax":
        yield (
            "data.label_column: one true label for each row is for members whose labels exclude each other "
            "(softmax); no scores are shown; set data.label_columns"
        )


def worker_warnings(plan: Plan) -> Iterator[str]:
    """Yield warnings about more workers on the CPU than this machine has cores or memory for."""
    workers, host = plan.config.cpu_workers, plan.host
    if workers == "auto":
        return
    if workers > usable_cpus() and plan.config.launcher == "local":
        yield (
            f"cpu_workers: {workers} workers share {plural(usable_cpus(), 'core')}, and take memory for a model "
            "each; more than one for each core end no sooner"
        )
    free_bytes = host.total_bytes - host.used_bytes if host is not None else plan.host_bytes
    if workers > 1 and plan.host_bytes > free_bytes:
        yield (
            f"cpu_workers: side by side they take about {gib(plan.host_bytes)} of memory, and {gib(free_bytes)} "
            "are free: they may be killed; lower it"
        )


def _differences_from_tuned(tuned: TuningConfig, devices: Sequence[str]) -> Iterator[str]:
    """Yield how this machine differs from the one on which ``tune`` measured."""
    advice = "its settings may be slower here, or not as near to float32: run tune again"
    if set(devices) != set(tuned.devices):
        measured, present = (", ".join(dict.fromkeys(names)) for names in (tuned.devices, devices))
        yield f"tuned_on: tune has measured on {measured}, and this is {present}; {advice}"
    installed = installed_versions(tuned.versions)
    different = [
        f"{name} {version}, and this is {installed.get(name, 'not installed')}"
        for name, version in tuned.versions.items()
        if installed.get(name) != version
    ]
    if different:
        yield f"tuned_on: tune has measured with {'; with '.join(different)}; {advice}"


def make_answers(loaded: LoadedConfig, problems: Problems) -> dict[str, Answer]:
    """Return the answer of each column that holds answers, except those whose format has a mistake."""
    submission, labels = loaded.config.submission, loaded.config.labels
    answers: dict[str, Answer] = {}
    for name, column in ({} if submission is None else submission.answers).items():
        with problems.at(f"{answer_key(loaded, name)}: format"):
            settings = AnswerConfig(top=1) if column.answer == "label" else column.answer
            numbers = settings.expected or ()
            by_label = settings.label_thresholds(name, labels)
            yes, no = ("1", "0") if len(by_label) == 1 else ("", "")
            answers[name] = Answer(
                texts=tuple(column.names.get(label, yes or label) for label in labels),
                top=settings.top or 1,
                above=tuple(by_label.get(label, math.inf) for label in labels) if by_label else (),
                at_least=settings.at_least or 0,
                none=no if settings.none is None else settings.none,
                separator=settings.separator,
                numbers=numbers,
                thresholds=settings.thresholds or halfway(numbers),
                template=None if column.format is None else compile_format(column.format),
            )
    return answers


def answer_key(loaded: LoadedConfig, column: str) -> str:
    """Return the place of a column with answers in the config."""
    return loaded.document.where(("submission", "columns", column))


def check_answers(
    loaded: LoadedConfig,
    answers: Mapping[str, Answer],
    table: InputTable | None,
    inspected: Mapping[str, Inspection],
    problems: Problems,
) -> None:
    """See whether numbers can be expected, and try the formats on each row of the table."""
    labels, method = loaded.config.labels, METHODS.load(loaded.config.ensemble.method)
    is_exclusive = RowRules.are_exclusive(merged_activation(inspected), method)
    for name, answer in answers.items():
        with problems.at(answer_key(loaded, name)):
            if answer.above and merged_activation(inspected) == "none":
                raise ConfigError(f"above: {_RAW}; use expected, with thresholds between numbers")
            if answer.numbers and len(labels) > 1 and not is_exclusive:
                raise ConfigError(
                    "expected: needs probabilities that sum to 1: softmax members, and a merge method that gives "
                    "probabilities"
                )
            if table is not None and answer.template is not None:
                values = np.broadcast_to(1.0, (table.rows, len(labels)))
                answer.cells(values, table, np.arange(table.rows))
