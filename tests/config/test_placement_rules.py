"""Keys of placement, adapters and quantization that do not go together."""

from __future__ import annotations

from typing import Any

import pytest

from tests.config.examples import Load, Problems, small

EIGHT_BITS = {"load_in_8bit": True}
OFFLOADED = {"load_in_8bit": True, "llm_int8_enable_fp32_cpu_offload": True}
# Two adapters that take turns.
TURNS = [{"name": "x", "adapter_name_or_path": "x"}, {"name": "y", "adapter_name_or_path": "y"}]


@pytest.mark.parametrize(
    ("keys", "start", "end"),
    [
        (
            {"num_gpus": 2, "max_memory": {0: "14GiB", 3: "14GiB"}},
            "models[0].max_memory.3 (line ",
            "there is no such GPU: a lease of 2 has GPUs 0 to 1; GPUs count from 0 within it",
        ),
        (
            {"num_gpus": 0, "max_memory": {"0": "14GiB", "cpu": "1GB"}},
            "models[0].max_memory.0 (line ",
            "there is no such GPU: num_gpus: 0 leaves only cpu; GPUs count from 0 within it",
        ),
        (
            {"quantization_config": EIGHT_BITS, "offload_folder": "disk"},
            "models[0].quantization_config (line ",
            "in float32",
        ),
        (
            {"quantization_config": EIGHT_BITS, "max_memory": {"0": "14GiB", "cpu": "1GB"}},
            "models[0].quantization_config (line ",
            "llm_int8_enable_fp32_cpu_offload: true, which keeps the offloaded layers in float32",
        ),
        (
            {"quantization_config": {"load_in_4bit": True}, "device_map": {"model": 0, "score": "cpu"}},
            "models[0].quantization_config (line ",
            "in float32",
        ),
        ({"merge_adapter": True}, "models[0].merge_adapter (line ", "add adapter_name_or_path"),
        (
            {"merge_adapter": True, "adapter_name_or_path": "x", "quantization_config": EIGHT_BITS},
            "models[0].merge_adapter (line ",
            "leave it unmerged, or drop quantization_config",
        ),
        (
            {"adapter_name_or_path": "x", "offload_folder": "disk"},
            "models[0].adapter_name_or_path (line ",
            "or merge the adapter into a checkpoint first",
        ),
        (
            {"torch_compile": True, "quantization_config": EIGHT_BITS},
            "models[0].torch_compile (line ",
            "drop quantization_config, or this",
        ),
        (
            {"torch_compile": True, "num_gpus": 2},
            "models[0].torch_compile (line ",
            "drop num_gpus, device_map, max_memory and offload_folder, or this",
        ),
        (
            {"torch_compile": True, "attn_implementation": "flex_attention"},
            "models[0].torch_compile (line ",
            "drop attn_implementation, or this",
        ),
        (
            {"torch_compile": True, "attn_implementation": "flex"},
            "models[0].torch_compile (line ",
            "drop attn_implementation, or this",
        ),
        (
            {"attn_implementation": "flex", "batch_size": 8},
            "models[0].batch_size (line ",
            "flex packs rows by max_num_batched_tokens; set that instead",
        ),
        (
            {"adapters": {"average": ["x", "y"]}, "adapter_name_or_path": "x"},
            "models[0].adapters (line ",
            "adapter_name_or_path is given as well; keep one of the two",
        ),
        (
            {"views": [{"name": "v", "adapters": {"average": ["x", "y"]}, "adapter_name_or_path": "x"}]},
            "models[0].views[0].adapters (line ",
            "adapter_name_or_path is given as well; keep one of the two",
        ),
        (
            {"adapters": {"average": ["x"]}},
            "models[0].adapters.average (line ",
            "needs two adapters; name a single one with adapter_name_or_path",
        ),
        (
            {"adapters": {"average": ["x", "y", "x"]}},
            "models[0].adapters.average[2] (line ",
            "the same adapter twice; name it once",
        ),
        (
            {"adapters": {"average": ["x", "y"], "combination_type": "svd"}},
            "models[0].adapters.combination_type (line ",
            "must be 'cat' or 'linear', not 'svd'",
        ),
        (
            {"checkpoints": {"average": ["x", "y"]}},
            "models[0].checkpoints (line ",
            "model_name_or_path or train names another one; keep one of the two",
        ),
        (
            {"views": [{"name": "v", "checkpoints": {"average": ["x", "y"]}, "model_name_or_path": "x"}]},
            "models[0].views[0].checkpoints (line ",
            "model_name_or_path or train names another one; keep one of the two",
        ),
        (
            {"checkpoints": {"average": ["x"]}, "model_name_or_path": None},
            "models[0].checkpoints.average (line ",
            "needs two checkpoints; name a single one with model_name_or_path",
        ),
        (
            {"checkpoints": {"average": ["x", "y", "y/../x"]}, "model_name_or_path": None},
            "models[0].checkpoints.average[2] (line ",
            "the same checkpoint twice; name it once",
        ),
        (
            {"checkpoints": {"average": []}},
            "models[0].checkpoints.average (line ",
            "must be a list of folders or names on the hub, not []",
        ),
        (
            {"checkpoints": ["x", "y"]},
            "models[0].checkpoints (line ",
            "must be a mapping of keys to values, not ['x', 'y']",
        ),
        (
            {
                "checkpoints": {"average": ["x", "y"]},
                "model_name_or_path": None,
                "model_kwargs": {"subfolder": "z"},
            },
            "models[0].model_kwargs.subfolder (line ",
            "checkpoints.average reads the folders themselves; drop this",
        ),
        (
            {"merge_adapter": True, "views": TURNS},
            "models[0].merge_adapter (line ",
            "those of other views; drop this",
        ),
        (
            {"torch_compile": True, "views": TURNS},
            "models[0].torch_compile (line ",
            "have several; drop this",
        ),
        (
            {"offload_folder": "disk", "views": TURNS},
            "models[0].views (line ",
            "or merge the adapter into a checkpoint first",
        ),
        (
            {"offload_folder": "disk", "adapters": {"average": ["x", "y"]}},
            "models[0].adapters (line ",
            "or merge the adapter into a checkpoint first",
        ),
    ],
)
def test_keys_that_exclude_each_other(keys: dict[str, Any], start: str, end: str, problems: Problems) -> None:
    (problem,) = problems(small(**keys))
    assert problem.startswith(start)
    assert problem.endswith(end)


@pytest.mark.parametrize(
    "keys",
    [
        {"num_gpus": 2, "max_memory": {0: "14GiB", "1": "14GiB"}},
        {"max_memory": {"5": "14GiB"}},
        {"num_gpus": 0, "quantization_config": EIGHT_BITS, "max_memory": {"cpu": "1GB"}},
        {"quantization_config": OFFLOADED, "offload_folder": "disk", "max_memory": {"cpu": "1GB"}},
        {"quantization_config": EIGHT_BITS, "device_map": {"model": 0, "score": 1}},
        {"adapter_name_or_path": "x", "merge_adapter": True},
        {"adapters": {"average": ["x", "y"]}, "merge_adapter": True},
        {"views": TURNS, "adapter_name_or_path": "z", "quantization_config": EIGHT_BITS},
        {"views": TURNS[:1], "merge_adapter": True, "torch_compile": True},
        {"checkpoints": {"average": ["x", "y"]}, "model_name_or_path": None, "adapter_name_or_path": "z"},
        {"views": [{"name": "v", "checkpoints": {"average": ["x", "y"]}, "adapter_name_or_path": "z"}]},
        {"adapter_name_or_path": "x", "quantization_config": EIGHT_BITS},
    ],
)
def test_keys_that_go_together(keys: dict[str, Any], load: Load) -> None:
    given = {key for key, value in keys.items() if value is not None}
    assert given <= load(small(**keys)).config.models[0].model_fields_set
