"""Attach an adapter of peft to a loaded base, unmerged or merged, and check that no weight of it is random."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ensemble.common.text import plural
from ensemble.members.huggingface.checkpoint.adapter_files import WEIGHTS
from ensemble.members.huggingface.spec import CheckpointSpec

_PICKLE = "adapter_model.bin"
_PREFIX = "base_model.model."
_NAME = "default"


@dataclass(frozen=True)
class AdapterFiles:
    """Hold an adapter's config, of peft, and the names of the tensors in its weights' file."""

    folder: Path
    config: Any
    tensors: frozenset[str]

    def whole_modules(self) -> list[str]:
        """Return the modules that were trained as a whole, by their names within the base."""
        names = [name.removeprefix(_PREFIX) for name in self.tensors if ".lora_" not in name]
        return sorted({name.rpartition(".")[0] for name in names})


def open_adapter(name_or_path: str, allow_pickle: bool = False) -> AdapterFiles:
    """Read an adapter's config and the names of its tensors, from a folder or the hub."""
    from peft import PeftConfig

    folder = Path(name_or_path)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        patterns = ["adapter_config.json", WEIGHTS]
        if allow_pickle:
            patterns.append(_PICKLE)
        folder = Path(snapshot_download(name_or_path, allow_patterns=patterns))
    config = PeftConfig.from_pretrained(str(folder))
    path = folder / WEIGHTS
    try:
        if not path.is_file() and allow_pickle:
            path = folder / _PICKLE
            names = frozenset(torch.load(path, map_location="cpu", weights_only=True))
        else:
            with safe_open(path, framework="pt") as file:
                names = frozenset(file.keys())
    except FileNotFoundError as error:
        hint = "" if allow_pickle else f", or set allow_pickle: true if it has an {_PICKLE} that you trust"
        raise ValueError(f"{folder} has no {path.name}; copy it too{hint}") from error
    except (SafetensorError, UnpicklingError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} is cut short or broken ({reason}); copy it again") from error
    return AdapterFiles(folder, config, names)


def attach_adapter(
    base: Any, adapter: AdapterFiles, missing: Sequence[str], spec: CheckpointSpec, notes: list[str]
) -> Any:
    """Return the base with the adapter in its layers, still of transformers' class and in the base's type.

    Args:
        missing: parameters that the base's checkpoint does not have; the adapter must have them.
    """
    from peft import PeftModel, get_peft_model_state_dict

    name, config = spec.adapter_name_or_path, adapter.config
    is_not_for = f"adapter {name} is not for {spec.model_name_or_path}"
    trained_on = f"it was trained on {config.base_model_name_or_path}"
    if str(getattr(config.task_type, "value", config.task_type)) != "SEQ_CLS":
        config.task_type = None  # peft's classes for other tasks expect a base of that task
    try:
        model = PeftModel.from_pretrained(
            base,
            str(adapter.folder),
            adapter_name=_NAME,
            config=config,
            autocast_adapter_dtype=False,  # otherwise half-precision adapters would become float32
            torch_device="cpu",  # to read the file; each tensor then goes where its layer is
        )
    except KeyError as error:  # peft looks up every parameter of a module that was trained as a whole
        raise ValueError(
            f"adapter {name} has no weights for {error.args[0]}, which its config says it was trained with; copy "
            "it again"
        ) from error
    except (RuntimeError, ValueError) as error:
        # load_state_dict's list of shapes that differ, or that no layer has a name that the adapter looks for.
        lines = [line.strip() for line in str(error).splitlines() if "size mismatch" in line]
        if isinstance(error, RuntimeError) and not lines:
            raise
        reason = lines[0] if lines else str(error)
        raise ValueError(f"{is_not_for}: {reason.rstrip('.')}; {trained_on}") from error

    # Every tensor of the file must be in the model now, and every one of the adapter in the file; peft only warns.
    expected = set(get_peft_model_state_dict(model, adapter_name=_NAME, save_embedding_layers=False))
    # An embedding may be saved whole beside its adapter, under the base's name or the one that peft gave it.
    of_model = set(model.state_dict())
    of_base = {key.replace(".base_layer.", ".") for key in of_model}
    lost = _comparable(adapter.tensors - expected - of_model - of_base)
    if lost:
        raise ValueError(f"{is_not_for}, which has no place for {some(lost)}; {trained_on}")
    absent = _comparable(expected - adapter.tensors)
    if absent:
        raise ValueError(
            f"adapter {name} has no weights for {some(absent)}; they would be random. Copy it again, or name the "
            "base that it was trained on"
        )
    random = [parameter for parameter in missing if _PREFIX + parameter not in adapter.tensors]
    if random:
        raise ValueError(
            f"neither {spec.model_name_or_path} nor its adapter {name} has weights for {some(random)}; they would "
            "be random. Name an adapter that was trained with its head (task type SEQ_CLS), or a base that has one"
        )

    for key, parameter in model.named_parameters():
        # On a quantized base peft makes its layers in float32, whatever the base computes in.
        if f".{_NAME}" in key and parameter.is_floating_point() and parameter.dtype != base.dtype:
            parameter.data = parameter.data.to(base.dtype)
    adapted = sum(map(_has_lora, base.modules()))
    rank = f"rank {config.r}, over {plural(adapted, 'module')}, " if adapted else ""
    how = "merged into the weights" if spec.merge_adapter else "unmerged"
    notes.append(f"{config.peft_type.value.replace('LORA', 'LoRA')} adapter {name}, {rank}{how}")
    # safe_merge refuses weights that come out as NaN.
    return model.merge_and_unload(safe_merge=True) if spec.merge_adapter else model.get_base_model()


def some(names: Sequence[str]) -> str:
    """Return the first few of many names, and how many there are beside them."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _has_lora(module: Any) -> bool:
    return any(_NAME in (getattr(module, key, None) or ()) for key in ("lora_A", "lora_embedding_A"))


def _comparable(names: Iterable[str]) -> list[str]:
    # transformers fuses a mixture's experts and renames them, and peft follows: those are not compared.
    return sorted(name.removeprefix(_PREFIX) for name in names if ".experts." not in name)
