"""Name the keys of ``train.training_arguments`` that this package sets itself, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

_ORDER: Final = (
    "the order of rows comes from the seed and the lengths, so that a killed training goes on alike"
)
_SAVES: Final = (
    "saves are made as often as they cost little time, and the newest is kept until the training ends"
)
_FOLDS: Final = (
    "the held-out fold has no say in a training; early_stopping looks at a slice of the other rows"
)
_DEVICE: Final = "a training runs in a process of its own on the devices that num_gpus gives it"
_QUIET: Final = "a training reports to its run alone: progress, log and report"
_ROWS: Final = "rows come from training.data and are encoded as they are for predictions"
# By key, or by the beginning of keys where it ends with "_".
OWNED: Final = {
    "auto_find_batch_size": "it would start again at step 0 with weights that are already trained, and with a "
    "smaller effective batch; per_device_train_batch_size: auto finds the size before the training",
    "gradient_accumulation_steps": "it follows from effective_batch_size and per_device_train_batch_size",
    "per_device_train_batch_size": "set train.per_device_train_batch_size",
    "average_tokens_across_devices": "the loss is divided by the rows of the effective batch",
    "label_smoothing_factor": "the loss is that of training.labels, which may be probabilities; smooth them there",
    "group_by_length": _ORDER,
    "train_sampling_strategy": _ORDER,
    "length_column_name": _ORDER,
    "data_seed": _ORDER,
    "seed": "set the run's seed",
    "full_determinism": "a training is bit for bit the same on a CPU; on GPUs it would be several times slower",
    "output_dir": "trainings are written below the run's output_dir",
    "resume_from_checkpoint": _SAVES,
    "ignore_data_skip": _SAVES,
    "restore_callback_states_from_checkpoint": _SAVES,
    "enable_jit_checkpoint": _SAVES,
    "save_": _SAVES,
    "load_best_model_at_end": _FOLDS,
    "metric_for_best_model": _FOLDS,
    "greater_is_better": _FOLDS,
    "eval_": _FOLDS,
    "per_device_eval_batch_size": _FOLDS,
    "do_": _FOLDS,
    "report_to": _QUIET,
    "run_name": _QUIET,
    "project": _QUIET,
    "trackio_": _QUIET,
    "logging_": _QUIET,
    "disable_tqdm": _QUIET,
    "push_to_hub": _QUIET,
    "hub_": _QUIET,
    "deepspeed": _DEVICE,
    "fsdp": _DEVICE,
    "fsdp_": _DEVICE,
    "ddp_": _DEVICE,
    "local_rank": _DEVICE,
    "use_cpu": _DEVICE,
    "parallelism_config": _DEVICE,
    "accelerator_config": _DEVICE,
    "dataloader_": _ROWS,
    "remove_unused_columns": _ROWS,
    "label_names": _ROWS,
    "include_num_input_tokens_seen": _QUIET,
}


def owned_keys(keys: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each key that is not the user's to set, with a sentence that says why."""
    for key in keys:
        for name, reason in OWNED.items():
            if key == name or (name.endswith("_") and key.startswith(name)):
                yield key, f"is not a key to set here: {reason}; drop it"
                break
