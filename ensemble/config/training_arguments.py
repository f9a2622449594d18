"""Name the keys of ``train.training_arguments`` that are not the user's to set, and values that train nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

_ORDER: Final = "the order of rows comes from the seed and their lengths, so that a killed training can go on"
_SAVES: Final = "a training saves as often as that takes little time, and goes on from the newest save"
_FOLDS: Final = (
    "the held-out fold has no say in a training; train.early_stopping looks at a slice of the rest"
)
_DEVICE: Final = "a training runs in one process, on the devices that train.num_gpus gives it"
_QUIET: Final = "a training reports to its run alone"
_ROWS: Final = "rows are encoded before the training, as they are for predictions"
# By key; a name that ends with "_" stands for all keys that begin with it.
OWNED: Final[Mapping[str, str]] = {
    "auto_find_batch_size": "it would begin again at step 0 with weights that are trained already; leave "
    "train.per_device_train_batch_size at auto, which finds the size before the training",
    "gradient_accumulation_steps": "it follows from train.effective_batch_size and the rows that fit",
    "per_device_train_batch_size": "train has a key of this name",
    "average_tokens_across_devices": "the loss is divided by the rows of the effective batch",
    "label_smoothing_factor": "training.labels may hold probabilities; smooth them there",
    **dict.fromkeys(
        ["group_by_length", "length_column_name", "train_sampling_strategy", "data_seed"], _ORDER
    ),
    "seed": "the run has a key of this name",
    "full_determinism": "a training on a CPU is the same bit for bit without it",
    "output_dir": "trainings are written below the run's output_dir",
    **dict.fromkeys(["resume_from_checkpoint", "ignore_data_skip", "enable_jit_checkpoint", "save_"], _SAVES),
    "restore_callback_states_from_checkpoint": _SAVES,
    **dict.fromkeys(["eval_", "do_", "load_best_model_at_end", "metric_for_best_model"], _FOLDS),
    **dict.fromkeys(["greater_is_better", "per_device_eval_batch_size"], _FOLDS),
    **dict.fromkeys(["report_to", "run_name", "project", "trackio_", "logging_", "disable_tqdm"], _QUIET),
    **dict.fromkeys(["push_to_hub", "hub_", "include_num_input_tokens_seen"], _QUIET),
    **dict.fromkeys(["deepspeed", "fsdp", "fsdp_", "ddp_", "local_rank", "use_cpu"], _DEVICE),
    **dict.fromkeys(["parallelism_config", "accelerator_config"], _DEVICE),
    **dict.fromkeys(["dataloader_", "remove_unused_columns", "label_names"], _ROWS),
}


def owned_keys(keys: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the keys of ``train.training_arguments`` that are not the user's, with a sentence that says why."""
    for key in keys:
        for name, reason in OWNED.items():
            if key == name or (name.endswith("_") and key.startswith(name)):
                yield key, f"is not set here: {reason}; drop it"
                break


def steps_problem(arguments: Mapping[str, Any]) -> str | None:
    """Return why ``num_train_epochs`` gives no training; None if it does, or is no number, or max_steps decides."""
    epochs, max_steps = arguments.get("num_train_epochs"), arguments.get("max_steps")
    if not isinstance(epochs, int | float) or (isinstance(max_steps, int) and max_steps > 0):
        return None
    if epochs > 0 and math.isfinite(epochs):
        return None
    return f"{epochs} epochs are no training; give a number above 0, or max_steps"
