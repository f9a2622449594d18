"""Say why adapters cannot take turns on one base, or have no mean, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ensemble.members.huggingface.checkpoint.adapter_files import Adapter

# How the names of a plain LoRA's tensors end.
_MATRICES = (".lora_A.weight", ".lora_B.weight", ".lora_embedding_A", ".lora_embedding_B")


def uses_base_head(adapters: Sequence[Adapter | None]) -> bool:
    """Return whether one of these has no head of its own; None: the base alone."""
    return any(adapter is None or adapter.brings_head is False for adapter in adapters)


def shared_base_problems(adapters: Sequence[Adapter | None]) -> Iterator[str]:
    """Yield why adapters cannot take turns on one base; None: the base alone."""
    present = [adapter for adapter in adapters if adapter is not None]
    for adapter in present:
        if adapter.changes_base:
            yield (
                f"adapter {adapter.name} was trained with {adapter.changes_base}, which changes the base that the "
                "other views use; make it a member of its own"
            )
        if adapter.kind != present[0].kind:
            yield (
                f"adapter {present[0].name} is a {present[0].kind} and adapter {adapter.name} a {adapter.kind}; a "
                "model takes one kind, so make one of them a member of its own"
            )
    for adapter in present:
        for other in present:
            both = sorted(adapter.modules(is_whole=True) & other.modules(is_whole=False))
            if both:
                yield (
                    f"adapter {adapter.name} was trained with the whole of {both[0]}, to which adapter "
                    f"{other.name} adds; peft cannot hold both, so make one of them a member of its own"
                )
    with_heads = [adapter for adapter in present if adapter.head_rows is not None]
    for adapter in with_heads[1:]:
        if adapter.head_rows != with_heads[0].head_rows:
            yield (
                f"adapter {with_heads[0].name} has a head for {with_heads[0].head_rows} labels and adapter "
                f"{adapter.name} one for {adapter.head_rows}; views predict the same labels, so make one of them a "
                "member of its own"
            )


def average_problems(adapters: Sequence[Adapter], combination_type: str) -> Iterator[str]:
    """Yield why these adapters have no mean; those whose weights are not known yet are checked by the worker."""
    for adapter in adapters:
        setting = adapter.changes_base or adapter.not_averaged
        if adapter.kind != "LORA":
            setting = f"peft_type: {adapter.kind}"
        strange = [name for name in adapter.shapes if ".lora_" in name and not name.endswith(_MATRICES)]
        if setting or strange:
            yield (
                f"adapters.average: {adapter.name} has {setting or strange[0]}, and only plain LoRA can be "
                "averaged; make a view of each adapter"
            )
    with_shapes = [adapter for adapter in adapters if adapter.shapes]
    for adapter in with_shapes[1:]:
        yield from _difference(with_shapes[0], adapter, combination_type)


def _difference(first: Adapter, second: Adapter, combination_type: str) -> Iterator[str]:
    """Yield the first difference for which two adapters have no mean."""
    for name in sorted({*first.shapes, *second.shapes}):
        shape, other = first.shapes.get(name), second.shapes.get(name)
        if shape == other or (".lora_" in name and (shape is None or other is None)):
            continue
        if shape is None or other is None:
            holder, lacking = (first, second) if other is None else (second, first)
            yield (
                f"adapters.average: {holder.name} has {name}, which {lacking.name} lacks; average adapters "
                "that were trained with the same modules_to_save"
            )
            return
        rank_axis = int(name.endswith((".lora_B.weight", ".lora_embedding_B")))
        is_rank = ".lora_" in name and shape[1 - rank_axis] == other[1 - rank_axis]
        if is_rank and combination_type == "cat":
            continue
        sizes = f"{name} is {list(shape)} in {first.name} and {list(other)} in {second.name}"
        advice = "take adapters of one base with heads of the same labels"
        if is_rank:
            advice = "combination_type: linear needs equal ranks, so take cat"
        yield f"adapters.average: {sizes}; {advice}"
        return
