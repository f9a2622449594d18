"""What ``validate`` shows of a run that has passed its checks."""

from __future__ import annotations

from collections.abc import Iterator

from ensemble.common.text import gib, plural, shown_path
from ensemble.config.values import weight_text
from ensemble.pipeline.validate import Prepared
from ensemble.planning.cascade import when_text

_SHOWN_CHARACTERS = 160


def view(prepared: Prepared) -> Iterator[str]:
    """The table, the devices, and per member its checkpoint, its weight and its first row's text."""
    config, table = prepared.config, prepared.table
    yield f"{shown_path(config.data.path)}: {plural(table.rows, 'row')}, ids in {config.data.id_column!r}"
    yield from (*table.remarks, prepared.inventory.note, *prepared.warnings)
    for gpu in prepared.inventory.gpus:
        yield f"{gpu.name} ({gpu.uuid}), {gib(gpu.used_bytes)} of {gib(gpu.total_bytes)} used"
    before: list[str] = []
    for member in prepared.plan.members:
        where = "CPU"
        if member.gpus:
            where = f"{plural(member.replicas, 'replica')} on {plural(member.gpus, 'GPU')}"
            where += " each" if member.replicas > 1 else ""
        how = f"{where}, {plural(len(member.chunks), 'chunk')}" if member.needs_worker else "no worker"
        summary = prepared.inspected[member.name].summary
        yield f"{member.name}: {summary}, weight {weight_text(member.model.weight)}, {how}"
        if member.model.when is not None:
            yield f"{member.name}: runs {when_text(member.model.when)} ({', '.join(before)})"
        before.append(member.name)
        if member.name in prepared.previews:
            prompt = prepared.previews[member.name].replace("\n", "\\n")
            cut = f"the first {_SHOWN_CHARACTERS} characters of " if len(prompt) > _SHOWN_CHARACTERS else ""
            yield f"{member.name}: {cut}its first prompt: {prompt[:_SHOWN_CHARACTERS]}"
    yield f"All checks passed. A run would write its results to {shown_path(config.output_dir)}"
