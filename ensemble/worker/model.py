"""A checkpoint's weights -> the model on its devices; refuses a head that nobody has trained."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForSequenceClassification

from ensemble.protocol import WorkerSpec
from ensemble.worker.precision import model_dtype
from ensemble.worker.quantization import quantization_config


def load_model(spec: WorkerSpec, on_gpu: bool, notes: list[str]) -> Any:
    """Load the model onto the devices this process can see.

    Args:
        on_gpu: whether the lease holds a GPU that torch can use.
        notes: takes sentences for the user.

    Raises:
        ValueError: weights are missing (a head that would be random), or a setting does not exist.
        OSError: the checkpoint's files cannot be read.
    """
    options: dict[str, Any] = dict(spec.model_kwargs)
    if spec.attn_implementation is not None:
        options["attn_implementation"] = spec.attn_implementation
    if spec.quantization_config is not None:
        options["quantization_config"] = quantization_config(spec.quantization_config)
    if spec.gpus > 1:
        options.setdefault("device_map", "auto")
    elif on_gpu or spec.quantization_config is not None:
        options.setdefault("device_map", {"": 0 if on_gpu else "cpu"})
    model, info = AutoModelForSequenceClassification.from_pretrained(
        spec.model_name_or_path,
        revision=spec.revision or "main",
        trust_remote_code=spec.trust_remote_code,
        dtype=model_dtype(spec, on_gpu, notes),
        output_loading_info=True,
        **options,
    )
    # With ignore_mismatched_sizes a head of another shape is thrown away and drawn anew.
    missing = sorted({*info["missing_keys"], *(str(key[0]) for key in info["mismatched_keys"])})
    if missing:
        raise ValueError(
            f"{spec.model_name_or_path} has no weights for {_some(missing)}; they would be random. "
            "Name a checkpoint that was trained for sequence classification"
        )
    return model


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
