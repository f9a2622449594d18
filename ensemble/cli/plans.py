"""Show a config that has passed its checks, the plan of its run, and what a rehearsal forecasts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.cli.layout import Table, table
from ensemble.cli.runs import inputs_text, rule_text
from ensemble.common.gpus import device_names
from ensemble.common.host import threads_of
from ensemble.common.text import duration, gib, listed, plural, rate, shown_path
from ensemble.config import MemberConfig
from ensemble.config.schema import TrainConfig
from ensemble.config.values import weight_text
from ensemble.jobs.job import selections_of
from ensemble.jobs.when import when_text
from ensemble.pipeline.prepared import Prepared
from ensemble.pipeline.trained_members import missing_parts
from ensemble.pipeline.training_dir import Part, TrainingDir
from ensemble.pipeline.wait_for_gpus import held_texts
from ensemble.planning.placement import Fit
from ensemble.planning.plan import ModelPlan, Plan
from ensemble.scheduling.launchers.base import Node
from ensemble.training.command import disk_of_trainings

if TYPE_CHECKING:
    from ensemble.commands.rehearse import Rehearsal

_MEMORY = "member,parameters,weights,batch tokens,activations,attention,overhead,peak,usable,fit".split(",")
_VERDICTS = {
    "fits": "",
    "tight": "tight",
    "short": "tight: others use it",
    "held": "held by others",
    "never": "does not fit",
}
_SHOWN_CHARACTERS = 160  # of a prompt
_SHOWN_END = 40
_SHOWN_DIFFERENCE, _SHOWN_BEFORE = 80, 20  # of either prompt, and of what both have before


def validate(prepared: Prepared) -> Iterator[str | Table]:
    """Yield what was checked: table, devices, members, and the first prompts."""
    config, table = prepared.config, prepared.table
    yield f"{shown_path(config.data.path)}: {plural(table.rows, 'row')}, ids in {config.data.id_column!r}"
    yield from (*table.remarks, prepared.inventory.note, *prepared.warnings)
    if prepared.nodes:
        yield nodes_table(prepared.nodes)
    for gpu in prepared.inventory.gpus:
        yield f"{gpu.title}, {gib(gpu.used_bytes)} of {gib(gpu.total_bytes)} used"
    for place, member in enumerate(config.models):
        models = [model for model in prepared.plan.models if model.member == member.name]
        summary = " and ".join(dict.fromkeys(prepared.of_models[model.name].summary for model in models))
        how = " and ".join(map(_how, models))
        if member.training is not None:
            how = trainings_text(prepared, member)
        yield f"{member.name}: {summary}, weight {weight_text(member.weight)}, {how}"
        if member.input_names:
            yield f"{member.name}: {inputs_text(member.input_names)}"
        if member.when is not None:
            before = ", ".join(other.name for other in config.models[:place])
            yield f"{member.name}: runs {when_text(member.when)} ({before})"
        for number, when in member.views_with_when.items():
            title = member.counted_views[number].name
            yield f"{member.name} (view {title}): runs {when_text(when, 'views and members')}"
        first_prompt = prepared.previews.get(member.name, "")
        if first_prompt:
            yield f"{member.name}: {_prompt_text(first_prompt)}"
            label = member.label_behind_prompt
            if label:
                end = first_prompt[-_SHOWN_END:] + label
                yield f"{member.name}: with a label's text behind it, it ends in {end!r}"
        for view_of_member in member.counted_views:
            title = f"{member.name} (view {view_of_member.name})"
            prompt = prepared.previews.get(title, "")
            if prompt:
                yield f"{title}: {_difference_text(prompt, first_prompt)}"
                first_prompt = first_prompt or prompt
    if prepared.post.allowed is not None:
        yield prepared.post.allowed.text
    rules = prepared.post.rules
    if rules is not None:
        for number, (rule, rows) in enumerate(zip(rules.rules, rules.rows, strict=True)):
            yield rule_text(number, rule, int(rows.sum()), table.rows)
    yield f"All checks passed. A run would write its results to {shown_path(config.output_dir)}"


def _how(model: ModelPlan) -> str:
    """Return where a model runs, and its chunks."""
    if not model.needs_worker:
        return "no worker"
    where = "CPU"
    if model.gpus:
        each = " each" if model.replicas > 1 else ""
        where = f"{plural(model.replicas, 'replica')} on {plural(model.gpus, 'GPU')}{each}"
    return f"{where}, {chunks_text(model)}"


def _prompt_text(prompt: str) -> str:
    text = prompt.replace("\n", "\\n")
    cut = f"the first {_SHOWN_CHARACTERS} characters of " if len(text) > _SHOWN_CHARACTERS else ""
    return f"{cut}its first prompt: {text[:_SHOWN_CHARACTERS]}"


def _difference_text(prompt: str, first_prompt: str) -> str:
    """Return how a prompt begins, or where it differs from the first view's if that is further on."""
    if prompt == first_prompt:
        return "its first prompt is the same as in the first view"
    place = len(os.path.commonprefix([prompt, first_prompt]))  # noqa: RUF071
    if place + _SHOWN_DIFFERENCE <= _SHOWN_CHARACTERS:
        return _prompt_text(prompt)
    part = slice(place - _SHOWN_BEFORE, place - _SHOWN_BEFORE + _SHOWN_DIFFERENCE)
    text = f"...{prompt[part]} (in the first view: ...{first_prompt[part]})".replace("\n", "\\n")
    return f"its first prompt differs after {plural(place, 'character')}: {text}"


def plan(prepared: Prepared) -> Iterator[str | Table]:
    """Yield devices, each model's memory, where it runs and why, and the time of the whole run."""
    made, gpus, host = prepared.plan, prepared.plan.gpus, prepared.plan.host
    yield f"{shown_path(prepared.config.data.path)}: {plural(prepared.table.rows, 'row')}"
    yield prepared.inventory.note
    names = device_names(gpus)
    for gpu in gpus:
        capability = ""
        if gpu.compute_capability is not None:
            capability = ", compute capability {}.{}".format(*gpu.compute_capability)
        free = gib(gpu.total_bytes - gpu.used_bytes)
        yield f"{names[gpu.uuid]}: {gpu.name} ({gpu.uuid}){capability}, {free} of {gib(gpu.total_bytes)} free"
    if prepared.nodes:
        yield nodes_table(prepared.nodes)
    yield from prepared.warnings
    yield from held_texts(gpus)
    workers = [model for model in made.models if model.needs_worker]
    to_train = prepared.config.trained_members
    if host is not None and not all(model.gpus for model in workers):
        yield f"CPU: {gib(host.total_bytes - host.used_bytes)} of {gib(host.total_bytes)} memory free"
    if workers:
        yield Table(_MEMORY, [[model.name, *_memory_cells(model)] for model in made.models], texts=["fit"])
    elif not to_train:
        yield "no member needs a worker: nothing is loaded, and a run merges what was made elsewhere"
    for model in made.models:
        yield _sentence(prepared, model)
    if to_train:
        yield "memory and time of a training are not known before the first has run"
        if any(model.training and model.training.base_model for model in to_train):
            yield "the first steps of a training from a base_model show how many rows fit at a time on a GPU"
        yield _disk_text(prepared)
    yield made.why
    yield from made.warnings
    if made.problems:
        return
    if made.seconds is not None and not to_train:
        report = shown_path(prepared.config.output_dir / "run.json")
        yield f"the whole run takes about {duration(made.seconds)}, by the speeds in {report}"
    elif workers and not to_train:
        yield "how long it takes is not known until a run, such as one with --limit 100, has measured the speed"


def nodes_table(nodes: Sequence[Node]) -> Table:
    """Return a table of what each node of a cluster has, and whether it has the members' models."""

    def free_of_gpus(node: Node) -> str:
        return gib(sum(gpu.total_bytes - gpu.used_bytes for gpu in node.gpus)) if node.gpus else ""

    return table(
        nodes,
        {
            "node": lambda node: node.name,
            "GPUs": lambda node: len(node.gpus),
            "free of GPUs": free_of_gpus,
            "CPUs": lambda node: node.cpus,
            "free memory": lambda node: gib(node.available_bytes),
            "free disk": lambda node: gib(node.free_disk_bytes),
            "models": lambda node: node.models_text,
        },
        texts=["models"],
    )


def document(prepared: Prepared) -> dict[str, Any]:
    """Describe a config that was checked and planned."""
    config, plan = prepared.config, prepared.plan
    return {
        "problems": prepared.problems,
        "warnings": [*prepared.table.remarks, *prepared.warnings, *plan.warnings],
        "output_dir": config.output_dir.absolute(),
        "table": config.data.path.absolute(),
        "rows": prepared.table.rows,
        "labels": config.labels,
        "devices": plan.gpus,
        "seconds": plan.seconds,
        "members": [_model_facts(prepared, model) for model in plan.models],
    }


def _model_facts(prepared: Prepared, model: ModelPlan) -> dict[str, Any]:
    fit, needed = _least_fit(model), model.placement.footprint
    return {
        "name": model.name,
        "member": model.member,
        "task_type": model.model.task_type,
        "weight": model.model.weight,
        "inputs": model.model.input_names,
        "replicas": model.replicas,
        "gpus_per_replica": model.gpus,
        "chunks": len(model.chunks),
        "devices": model.placement.devices,
        "problems": model.placement.problems,
        "fit": fit and fit.verdict,
        "room_bytes": fit and fit.room_bytes,
        "parameters": needed and needed.weights.parameters,
        "weight_bytes": needed and needed.weights.bytes,
        "peak_bytes": needed and needed.peak_bytes(model.gpus, _batch_tokens(fit, needed.width)),
        "seconds": _seconds(model),
        "training": _training_facts(prepared, model),
    }


def _training_facts(prepared: Prepared, model: ModelPlan) -> dict[str, Any] | None:
    """Return how a member is trained, and which trainings lack; None if none does."""
    train = model.model.training
    if train is None:
        return None
    missing, outdated = _missing_parts(prepared, model.model), prepared.loaded.outdated.get(model.member, {})
    return {
        "method": None if train.command else train.method,
        "base_model": train.base_model,
        "command": train.command,
        "num_gpus": _gpus_of_training(prepared, train),
        "missing": missing and [part.name for part in missing],
        "outdated": {Part(fold).name: why for fold, why in outdated.items() if why},
    }


def _seconds(model: ModelPlan) -> float | None:
    """Return how long a member takes on its replicas; None if its speed is not known."""
    if not model.replicas or not model.speed.is_measured:
        return None
    return model.demand.startup_seconds + model.demand.compute_seconds / model.replicas


def _least_fit(model: ModelPlan) -> Fit | None:
    """Return how a member fits on the device with the least room, of those that it runs on."""
    fits = model.placement.fits
    usable = [fits[uuid] for uuid in model.placement.devices if uuid in fits]
    return min(usable or fits.values(), key=lambda fit: fit.room_bytes, default=None)


def _batch_tokens(fit: Fit | None, width: int) -> int:
    """Return the tokens of a full batch of the longest rows, which have ``width``."""
    return max(fit.token_budget if fit is not None else 0, width)


def _memory_cells(model: ModelPlan) -> list[str]:
    """Return what a replica takes of each of its devices with a full batch of the longest rows."""
    needed, fit = model.placement.footprint, _least_fit(model)
    if model.model.training is not None:
        return ["", "not trained yet"]
    if not model.needs_worker:
        return ["", "none"]
    room = [] if fit is None else [gib(fit.room_bytes), _VERDICTS[fit.verdict]]
    if needed is not None:
        tokens = _batch_tokens(fit, needed.width)
        activation, width = needed.activation, needed.width
        return [
            _count(needed.weights.parameters),
            gib(needed.weights.bytes),
            f"{tokens:,}",
            gib(activation.bytes(tokens, width) - activation.bytes_per_token_pair * tokens * width),
            gib(activation.bytes_per_token_pair * tokens * width),
            gib(needed.context_bytes),
            gib(needed.peak_bytes(model.gpus, tokens)),
            *room,
        ]
    if isinstance(model.request.gpu_memory, int):
        return [*[""] * 6, gib(model.request.gpu_memory), *room]
    return ["", "not known"]


def _sentence(prepared: Prepared, model: ModelPlan) -> str:
    """Return where a member runs and why, and how long it takes."""
    placement, needed, seconds = model.placement, model.placement.footprint, _seconds(model)
    if placement.problems:
        return f"{model.name}: cannot run here"
    if model.model.training is not None:
        return f"{model.name}: not trained yet: {trainings_text(prepared, model.model)}"
    if not model.needs_worker:
        return f"{model.name}: {prepared.of_models[model.name].summary}, which need no worker"
    facts = [where_text(prepared.plan, model, len(prepared.inventory.hosts)), placement.reason]
    if needed is not None:
        stored = f"{needed.quantization} weights, {needed.dtype}" if needed.quantization else needed.dtype
        facts.append(f"{stored}, {needed.attention} attention")
        labels = plural(len(prepared.config.labels), "label")
        facts.append(f"rows of up to {plural(needed.width, 'token')}, {labels} each")
    facts.append(chunks_text(model))
    titles = {job.name: job.title for job in model.jobs if job.view}
    if model.model.input_names:
        facts.append(inputs_text(model.model.input_names))
    for selection in selections_of(model.jobs).values():
        if not selection.when:
            continue
        title = titles.get(selection.name, "")
        rule = when_text(selection.when, "views and members" if title else "members")
        expected = prepared.shares[selection.name]
        facts.append(f"{title} runs {rule}: {expected.share:.0%} of the rows, {expected.why}".strip())
    if seconds is not None:
        saved = (model.whole_seconds - model.demand.compute_seconds) / model.replicas
        less = f", {duration(saved)} less than for all rows" if saved else ""
        facts.append(f"about {duration(seconds)}{less}")
    return f"{model.name}: {'; '.join(filter(None, facts))}"


def chunks_text(model: ModelPlan) -> str:
    """Return how many chunks a model's work is, such as ``6 chunks of 2 views``."""
    views = sum(bool(job.view) for job in model.jobs)
    of_views = f" of {plural(views, 'view')}" if views else ""
    return plural(len(model.chunks), "chunk") + of_views


def trainings_text(prepared: Prepared, model: MemberConfig) -> str:
    """Return which trainings of a member lack, and how and where they are done."""
    train, missing = model.training, _missing_parts(prepared, model)
    assert train is not None
    which = "a training for each fold of its column"
    if missing is not None:
        which = (
            f"{plural(len(missing), 'training')} to do ({listed([part.text for part in missing], 10, str)})"
        )
    how = (
        "by its command"
        if train.command
        else f"{train.method}, from {shown_path(Path(str(train.base_model)))}"
    )
    gpus = _gpus_of_training(prepared, train)
    where = f"on {plural(gpus, 'GPU')} each" if gpus else "on the CPU"
    where += f", after {', '.join(model.input_names)}" if model.input_names else ""
    return f"{which}, {how}, {where}"


def _disk_text(prepared: Prepared) -> str:
    """Return what the missing trainings write; empty where it is not known, or nothing."""
    if any(_missing_parts(prepared, model) is None for model in prepared.config.trained_members):
        return ""
    written, free = disk_of_trainings(prepared.loaded)
    if not written or free is None:
        return ""
    folder = shown_path(TrainingDir(prepared.config.output_dir).root)
    return f"trainings from a base_model write about {gib(written)} to {folder}, where {gib(free)} are free"


def _missing_parts(prepared: Prepared, model: MemberConfig) -> list[Part] | None:
    """Return the trainings of a member that are to be done; None if a column says how many, and none has begun."""
    training = prepared.config.training
    has_begun = TrainingDir(prepared.config.output_dir).trained_rows(model.name).is_file()
    is_counted = training is None or training.folds.splits is not None or has_begun
    return missing_parts(prepared.loaded, model) if is_counted else None


def _gpus_of_training(prepared: Prepared, train: TrainConfig) -> int:
    """Return how many GPUs each training takes; 0: the CPU."""
    return min(1, len(prepared.inventory.gpus)) if train.num_gpus is None else train.num_gpus


def where_text(plan: Plan, model: ModelPlan, nodes: int) -> str:
    """Return on what a member runs, on how many ``nodes`` of a cluster, and how many replicas wait for room."""
    replicas, later = plural(model.first_replicas, "replica"), ""
    if more := model.replicas - model.first_replicas:
        later = f", and {more} more when {'GPUs' if model.gpus else 'cores'} are free"
    if not model.gpus:
        cpu = f"the CPUs of {plural(nodes, 'node')}" if nodes else "the CPU"
        cores = threads_of(plan.cpus, model.cpu_share)
        share = f", with {plural(cores, 'core')} of {plan.cpus}" if cores < plan.cpus else ""
        return f"{replicas} on {cpu}{share}{later}"
    numbers = {gpu.uuid: str(number) for number, gpu in enumerate(plan.gpus)}
    used = [numbers[uuid] for uuid in model.placement.devices]
    if not used:
        return "no GPU has room now"
    if model.gpus == model.replicas == 1:
        return f"{replicas} on GPU {' or '.join(used)}"
    over = f" over {model.gpus} GPUs each" if model.gpus > 1 else ""
    return f"{replicas}{over} on GPUs {', '.join(used)}{later}"


def _count(parameters: int) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if parameters >= size:
            return f"{parameters / size:.2f} {letter}"
    return str(parameters)


def rehearse(rehearsal: Rehearsal) -> Iterator[str | Table]:
    """Yield the forecast of each member, time, memory and disk of the whole run, and problems."""
    yield f"by a run of {rehearsal.sample_rows:,} of {plural(rehearsal.rows, 'row')}:"
    yield table(
        rehearsal.members,
        {
            "member": lambda member: member.name,
            "replicas": lambda member: member.replicas,
            "start-up": lambda member: duration(member.startup_seconds),
            "computing": lambda member: duration(member.compute_seconds),
            "rows/s": lambda member: rate(
                member.rows / member.compute_seconds if member.compute_seconds else None
            ),
            "host memory": lambda member: gib(member.peak_memory_bytes),
            "GPU memory": lambda member: gib(member.peak_gpu_memory_bytes),
            "rows at limit": lambda member: member.rows_at_limit,
        },
    )
    yield from rehearsal.assumed
    seconds, limit, other = rehearsal.seconds, rehearsal.time_limit_seconds, rehearsal.other_seconds
    time = f"the whole run would take about {duration(seconds)}"
    if limit is not None:
        time += f", {seconds / limit:.0%} of time_limit ({duration(limit)})"
    if other > 0:
        time += f"; {duration(other)} of it are neither start-up nor computing of a member"
    yield time
    if rehearsal.host_bytes is not None:
        known = rehearsal.host_free_bytes is not None
        free = f" of {gib(rehearsal.host_free_bytes)} that are free" if known else ""
        yield f"memory: {gib(rehearsal.host_bytes)}{free}, all processes that run at a time together"
    parts = ", ".join(f"{purpose} {gib(size)}" for purpose, size in rehearsal.disk_bytes.items() if size)
    yield (
        f"disk: {gib(sum(rehearsal.disk_bytes.values()))} of {gib(rehearsal.disk_free_bytes)} that are free at "
        f"{shown_path(rehearsal.output_dir)} ({parts})"
    )
    yield from (f"! {text}" for text in (*rehearsal.warnings, *rehearsal.problems))
    if limit is not None and not rehearsal.problems:
        yield f"It would end in time, {duration(limit - seconds)} before the limit."
