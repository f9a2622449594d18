"""Show a run that has passed its checks: table, devices, members, and the first prompts."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ensemble.cli.layout import Table
from ensemble.cli.views.plan import chunks_text, nodes_table, trainings_text
from ensemble.cli.views.summary import rule_text
from ensemble.common.text import gib, listed, plural, shown_path
from ensemble.config.values import weight_text
from ensemble.members.base import NOT_ASKED
from ensemble.pipeline.prepared import Prepared
from ensemble.planning.cascade import when_text
from ensemble.planning.plan import ModelPlan

_SHOWN_CHARACTERS = 160
_SHOWN_END = 40
_SHOWN_DIFFERENCE, _SHOWN_BEFORE = 80, 20  # of either prompt, and of what both have before


def view(prepared: Prepared) -> Iterator[str | Table]:
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
    not_asked = [text.partition(f": {NOT_ASKED}")[0] for text in prepared.warnings if NOT_ASKED in text]
    passed = "All checks passed."
    if not_asked:
        passed = f"not checked: {listed(not_asked, 10, str)}, as said above. All other checks passed."
    yield f"{passed} A run would write its results to {shown_path(config.output_dir)}"


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
