"""What ``validate`` shows of a run that has passed its checks."""

from __future__ import annotations

from collections.abc import Iterator

from ensemble.prepare import Prepared

_SHOWN_CHARACTERS = 160


def validation_lines(prepared: Prepared) -> Iterator[str]:
    """The table, the devices, and per member its checkpoint, its label order and its first row's text."""
    config, table = prepared.config, prepared.table
    yield f"{config.data.path}: {table.rows:,} rows, ids in {config.data.id_column!r}"
    for column, count in table.null_texts.items():
        if count:
            yield f"  {count:,} empty texts in {column!r}, read as empty strings"
    for text in (prepared.inventory.note, *prepared.warnings):
        if text:
            yield text
    for gpu in prepared.inventory.gpus:
        yield f"{gpu.name} ({gpu.uuid}), {gpu.used_bytes / 2**30:.1f} of {gpu.total_bytes / 2**30:.1f} GiB used"
    for member in prepared.plan.members:
        checkpoint = prepared.checkpoints[member.name]
        size = "" if checkpoint.weight_bytes is None else f", {checkpoint.weight_bytes / 2**20:,.0f} MiB"
        where = f"{member.replicas} x {member.gpus} GPU" if member.gpus else "CPU"
        yield (
            f"{member.name}: {checkpoint.architecture or checkpoint.model_type}{size}, weight "
            f"{member.model.weight:g}, {where}, {len(member.chunks)} chunks"
        )
        if member.name in prepared.previews:
            yield f"  first prompt: {_short(prepared.previews[member.name])}"
    yield f"{config.output_dir}: would hold the results. All checks passed."


def _short(text: str) -> str:
    line = text.replace("\n", "\\n")
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]}..."
