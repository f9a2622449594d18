"""Attach an adapter of peft to a loaded base, unmerged or merged, and check that no weight of it is random."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ensemble.common.text import listed, plural
from ensemble.members.huggingface.checkpoint.adapter_files import WEIGHTS
from ensemble.members.huggingface.checkpoint.tokenizer_files import TOKENIZER_FILES
from ensemble.members.huggingface.spec import AdapterSource, CheckpointSpec

_PICKLE = "adapter_model.bin"
PREFIX = "base_model.model."
_HEADS = ("classifier", "score")


@dataclass(frozen=True)
class AdapterFiles:
    """Hold an adapter's config, of peft, and the shapes of the tensors in its weights' file, by name.

    ``title`` is its name in sentences, ``content`` its tensors if they are in no file.
    """

    title: str
    folder: Path
    config: Any
    shapes: Mapping[str, tuple[int, ...]]
    content: Mapping[str, torch.Tensor] | None = None

    @property
    def tensors(self) -> Set[str]:
        return self.shapes.keys()

    def rows_of(self, embeddings: str) -> int | None:
        """Return the rows of the base's module of this name in the adapter; None: it has none of them."""
        for name, shape in self.shapes.items():
            if name.startswith(f"{PREFIX}{embeddings}."):
                if name.endswith(".weight") and ".lora_" not in name:
                    return shape[0]
                if name.endswith(".lora_embedding_A"):
                    return shape[1]
        return None

    def whole_modules(self) -> list[str]:
        """Return the modules that were trained as a whole, by their names within the base."""
        names = [name.removeprefix(PREFIX) for name in self.tensors if ".lora_" not in name]
        return sorted({name.rpartition(".")[0] for name in names})


def adapter_folder(name_or_path: str, allow_pickle: bool) -> Path:
    """Return the folder with an adapter's files, and those of a tokenizer beside it, from the hub if need be."""
    folder = Path(name_or_path)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    patterns = ["adapter_config.json", WEIGHTS, *TOKENIZER_FILES]
    if allow_pickle:
        patterns.append(_PICKLE)
    return Path(snapshot_download(name_or_path, allow_patterns=patterns))


def open_adapter(name_or_path: str, allow_pickle: bool = False) -> AdapterFiles:
    """Read an adapter's config and the names and shapes of its tensors, from a folder or the hub."""
    from peft import PeftConfig

    folder = adapter_folder(name_or_path, allow_pickle)
    config = PeftConfig.from_pretrained(str(folder))
    path = folder / WEIGHTS
    try:
        if not path.is_file() and allow_pickle:
            path = folder / _PICKLE
            content = torch.load(path, map_location="cpu", weights_only=True)
            shapes = {name: tuple(tensor.shape) for name, tensor in content.items()}
        else:
            with safe_open(path, framework="pt") as file:
                shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        hint = "" if allow_pickle else f", or set allow_pickle: true if it has an {_PICKLE} that you trust"
        raise ValueError(f"{folder} has no {path.name}; copy it too{hint}") from error
    except (SafetensorError, UnpicklingError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} is cut short or broken ({reason}); copy it again") from error
    return AdapterFiles(name_or_path, folder, config, shapes)


class JobAdapters:
    """Switch a model to the adapter of a job; the model is still of transformers' class.

    Args:
        model: of peft, with all adapters.
        names: peft's name of each job's adapter; None: the base alone.
    """

    def __init__(self, model: Any, names: Sequence[str | None]) -> None:
        self._tuner = model.base_model
        self._names = names
        self._current: str | None = ""
        self.use(0)

    def use(self, job: int) -> bool:
        """Let the model compute with the adapter of a job, and return whether it had another one before."""
        name = self._names[job]
        if name == self._current:
            return False
        if name is None:
            self._tuner.disable_adapter_layers()
        else:
            self._tuner.enable_adapter_layers()
            self._tuner.set_adapter(name, inference_mode=True)
        self._current = name
        return True


def attach_adapters(
    base: Any,
    adapters: Mapping[AdapterSource, AdapterFiles],
    missing: Sequence[str],
    spec: CheckpointSpec,
    notes: list[str],
) -> tuple[Any, JobAdapters | None]:
    """Return the base with adapters in its layers, still of transformers' class and in the base's type.

    Args:
        missing: parameters that the base's checkpoint does not have; each adapter must have them.

    Returns:
        and what switches between the adapters of jobs; None: all have the same adapter.
    """
    # All as long as each other: peft looks for names that contain an adapter's.
    names = {source: f"adapter{number:03}" for number, source in enumerate(adapters)}
    model: Any = None
    missing = [*missing, *_fit_embeddings(base, [*adapters.values()], spec)]
    for source, adapter in adapters.items():
        model = _attach(base, model, names[source], adapter, spec)
        trained = {tensor.replace(".base_layer.", ".") for tensor in adapter.tensors}
        random = [parameter for parameter in missing if PREFIX + parameter not in trained]
        if random:
            raise ValueError(
                f"neither {spec.model_name_or_path} nor its adapter {adapter.title} has weights for "
                f"{listed(random, 4, str)}; they would be random. Name an adapter that was trained with its head "
                "(task type SEQ_CLS), or a base that has one"
            )
    for key, parameter in model.named_parameters():
        # On a quantized base peft makes its layers in float32, whatever the base computes in.
        is_of_adapter = any(f".{name}." in f"{key}." for name in names.values())
        if is_of_adapter and parameter.is_floating_point() and parameter.dtype != base.dtype:
            parameter.data = parameter.data.to(base.dtype)
    how = "merged into the weights" if spec.merge_adapter else "unmerged"
    for source, adapter in adapters.items():
        config = adapter.config
        adapted = sum(_has_lora(module, names[source]) for module in base.modules())
        rank = f"rank {config.r}, over {plural(adapted, 'module')}, " if adapted else ""
        kind = config.peft_type.value.replace("LORA", "LoRA")
        notes.append(f"{kind} adapter {adapter.title}, {rank}{how}")
    if spec.merge_adapter:
        return model.merge_and_unload(safe_merge=True), None  # which refuses weights that come out as NaN
    by_job = [None if source is None else names[source] for source in spec.job_adapters]
    switch = JobAdapters(model, by_job)
    return model.get_base_model(), switch if len(set(by_job)) > 1 else None


def _fit_embeddings(base: Any, adapters: Sequence[AdapterFiles], spec: CheckpointSpec) -> list[str]:
    """Give the base's embeddings the adapters' rows, and return the parameters that each adapter must have then.

    Whoever adds tokens for a training does so before it (``resize_token_embeddings``).

    Raises:
        ValueError: the views need embeddings of different rows.
    """
    embeddings, head = base.get_input_embeddings(), base.get_output_embeddings()
    names = {id(module): name for name, module in base.named_modules()}
    rows = len(embeddings.weight)
    rows_of = {adapter.title: adapter.rows_of(names[id(embeddings)]) or rows for adapter in adapters}
    if None in spec.job_adapters:
        rows_of[spec.model_name_or_path] = rows
    if len(set(rows_of.values())) > 1:
        each = ", ".join(f"{count:,} of {name}" for name, count in rows_of.items())
        raise ValueError(f"its views need embeddings of different rows ({each}); make a member of each")
    if {rows} == set(rows_of.values()):
        return []
    is_tied = head is None or head.weight is embeddings.weight
    base.resize_token_embeddings(next(iter(rows_of.values())), mean_resizing=False)
    resized = [names[id(embeddings)], *([] if is_tied else [names[id(head)]])]
    return [f"{name}.{key}" for name in resized for key, _ in base.get_submodule(name).named_parameters()]


def _attach(base: Any, model: Any, name: str, adapter: AdapterFiles, spec: CheckpointSpec) -> Any:
    """Return a model of peft with one more adapter, and check that each of its weights is the file's.

    Args:
        model: with the adapters before this one; None: it is the first.
        name: that peft gets for it.
    """
    from peft import PeftModel, get_peft_model_state_dict

    title, config = adapter.title, adapter.config
    is_not_for = f"adapter {title} is not for {spec.model_name_or_path}"
    trained_on = f"it was trained on {config.base_model_name_or_path}"
    if str(getattr(config.task_type, "value", config.task_type)) == "SEQ_CLS":
        # What peft's class for this task does. It would do so to further adapters, too, which may have no head.
        config.modules_to_save = [*dict.fromkeys([*(config.modules_to_save or ()), *_HEADS])]
    config.task_type = None  # peft's classes for tasks expect a base, and further adapters, of that task
    config.inference_mode = True
    options = {
        "autocast_adapter_dtype": False,  # otherwise half-precision adapters would become float32
        "torch_device": "cpu",  # to read the file; each tensor then goes where its layer is
    }
    try:
        with tempfile.TemporaryDirectory() as scratch:
            folder = str(adapter.folder)
            if adapter.content is not None:  # peft reads adapters from folders only
                folder = scratch
                save_file(dict(adapter.content), Path(folder) / WEIGHTS)
            if model is None:
                model = PeftModel.from_pretrained(base, folder, adapter_name=name, config=config, **options)
            else:
                model.add_adapter(name, config)  # otherwise it would be made by the config in the folder
                model.load_adapter(folder, adapter_name=name, **options)
    except KeyError as error:  # peft looks up every parameter of a module that was trained as a whole
        raise ValueError(
            f"adapter {title} has no weights for {error.args[0]}, which its config says it was trained with; copy "
            "it again"
        ) from error
    except (RuntimeError, ValueError) as error:
        # load_state_dict's list of shapes that differ, or that no layer has a name that the adapter looks for.
        lines = [line.strip() for line in str(error).splitlines() if "size mismatch" in line]
        if isinstance(error, RuntimeError) and not lines:
            raise
        reason = lines[0] if lines else " ".join(str(error).split())[:200]
        raise ValueError(f"{is_not_for}: {reason.rstrip('.')}; {trained_on}") from error

    # Every tensor of the file must be in the model now, and every one of the adapter in the file; peft only warns.
    expected = set(get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False))
    # An embedding may be saved whole beside its adapter, under the base's name or the one that peft gave it.
    of_model = set(model.state_dict())
    of_base = {key.replace(".base_layer.", ".") for key in of_model}
    lost = _comparable(adapter.tensors - expected - of_model - of_base)
    if lost:
        raise ValueError(f"{is_not_for}, which has no place for {listed(lost, 4, str)}; {trained_on}")
    of_base_too = _comparable(adapter.tensors - expected)
    if of_base_too and len(set(spec.job_adapters)) > 1:
        raise ValueError(
            f"adapter {title} brings {listed(of_base_too, 4, str)} of the base, which other views use, too; "
            "make it a member of its own"
        )
    absent = _comparable(expected - adapter.tensors)
    if absent:
        raise ValueError(
            f"adapter {title} has no weights for {listed(absent, 4, str)}; they would be random. Copy it again, or "
            "name the base that it was trained on"
        )
    return model


def _has_lora(module: Any, name: str) -> bool:
    return any(name in (getattr(module, key, None) or ()) for key in ("lora_A", "lora_embedding_A"))


def _comparable(names: Iterable[str]) -> list[str]:
    # transformers fuses a mixture's experts and renames them, and peft follows: those are not compared.
    return sorted(name.removeprefix(PREFIX) for name in names if ".experts." not in name)
