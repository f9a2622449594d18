"""Tell from small files and from headers of weights why checkpoints have no mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ensemble.common.errors import CheckpointError
from ensemble.common.files import read_json
from ensemble.members.huggingface.checkpoint.hub import find_file, read_config
from ensemble.members.huggingface.checkpoint.weight_files import loaded_files, read_tensors, weight_problems

# Keys that change nothing that a trained model computes; those of dropout do not either.  Calls leave their
# truncation and padding in tokenizer.json.
_WITHOUT_EFFECT = (
    "_name_or_path transformers_version dtype torch_dtype use_cache label2id truncation padding".split()
)
_TENSOR, _MISSING = "tensor ", "missing"


def averaging_problems(names: Sequence[str]) -> Iterator[str]:
    """Yield what is wrong with checkpoints, and the first difference of each from the first of them."""
    first, first_name = dict[str, object](), ""
    for name in names:
        try:
            parts = _parts(name)
        except CheckpointError as error:
            yield from (f"checkpoints.average: {problem}" for problem in error.problems)
            continue
        first, first_name = first or parts, first_name or name
        for part in {**first, **parts}:
            ours, theirs = first.get(part, _MISSING), parts.get(part, _MISSING)
            # Other releases save other keys, and some trainings no tokenizer.
            may_lack = _MISSING in (ours, theirs) and not part.startswith(_TENSOR)
            if ours != theirs and not may_lack:
                yield (
                    f"checkpoints.average: {part} is {ours!s:.80} in {first_name} and {theirs!s:.80} in {name}; "
                    "average checkpoints that were trained from one base with the same labels"
                )
                break


def _parts(name: str) -> dict[str, object]:
    """Return what checkpoints must have in common; raise CheckpointError for one that is never averaged."""
    folder = Path(name)
    if not folder.is_dir():
        raise CheckpointError(f"{name} is no folder; correct the path, or download it from the hub first")
    config = read_config(find_file(name, "config.json"), f"{name}: its config.json")
    problems = [*weight_problems(folder, config, allow_pickle=True)]
    special = [key for key in ("quantization_config", "transformers_weights") if config.get(key)]
    special += ["an adapter beside it"] if (folder / "adapter_config.json").is_file() else []
    special += ["pickles"] if any(file.suffix != ".safetensors" for file in loaded_files(folder)) else []
    problems += [f"{name} has {reason}, and only plain safetensors are averaged" for reason in special]
    if problems:
        raise CheckpointError(problems)
    parts: dict[str, object] = {
        f"{key} of {file}": value
        for file in ("config.json", "preprocessor_config.json", "tokenizer.json")
        for key, value in read_json(folder / file).items()
        if key not in _WITHOUT_EFFECT and "drop" not in key
    }
    return parts | {f"{_TENSOR}{tensor.name}": list(tensor.shape) for tensor in read_tensors(folder) or ()}
