"""Quantization settings, before anything is loaded."""

from __future__ import annotations

import inspect
import json
import shutil
from typing import Any

import pytest

from ensemble.members.huggingface.checkpoint.quantization_methods import (
    method_of,
    quantization_problems,
    quantization_warnings,
    quantized_bits,
)
from ensemble.members.huggingface.loading.describe import unknown_keys
from tests.nvml.sim import Gpu, NvmlSim, gpu_uuid
from tests.project import Project

FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "float16"}


def wrong(
    settings: dict[str, Any] | None,
    stored: dict[str, Any] | None = None,
    merges_adapter: bool = False,
) -> list[str]:
    of_transformers = [] if settings is None else list(unknown_keys(settings))
    if any("is unknown" in sentence for sentence in of_transformers):
        return of_transformers
    return [*of_transformers, *quantization_problems(settings, stored, merges_adapter)]


def test_settings_that_are_right() -> None:
    assert wrong(None) == []
    assert wrong({"quant_method": "bitsandbytes", "_load_in_8bit": True, "load_in_8bit": True}) == []
    assert wrong(None, {**FOUR_BITS, "quant_method": "bitsandbytes"}) == []


@pytest.mark.parametrize(
    ("settings", "sentences"),
    [
        (
            {**FOUR_BITS, "bnb_4bit_quant_typ": "nf4"},
            [
                "quantization_config.bnb_4bit_quant_typ: there is no such key; did you mean bnb_4bit_quant_type?"
            ],
        ),
        (
            {"load_in_4bit": True, "load_in_8bit": True},
            ["quantization_config: load_in_4bit and load_in_8bit exclude each other; keep one"],
        ),
        (
            {"bnb_4bit_quant_type": "nf4"},
            ["quantization_config: it quantizes nothing; add load_in_4bit: true or load_in_8bit: true"],
        ),
        (
            {"quant_method": "higs", "bits": 4},
            ["quantization_config.quant_method: 'higs' is unknown; did you mean higgs?"],
        ),
        (
            {"quant_method": "eetq", "weight": "int8"},
            ["quantization_config.weight: there is no such key; did you mean weights?"],
        ),
    ],
)
def test_settings_that_are_wrong(settings: dict[str, Any], sentences: list[str]) -> None:
    assert wrong(settings) == sentences


def test_the_keys_are_those_of_the_installed_transformers() -> None:
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    for method, kind in AUTO_QUANTIZATION_CONFIG_MAPPING.items():
        method = method.removesuffix("_4bit").removesuffix("_8bit")
        parameters = set(inspect.signature(kind.__init__).parameters) - {"self", "kwargs"}
        settings: dict[str, Any] = {**dict.fromkeys(parameters), "quant_method": method}
        if method == "bitsandbytes":
            settings["load_in_4bit"] = True
        assert not [problem for problem in wrong(settings) if "no such key" in problem], method


def test_four_bits_without_a_type_are_warned_of() -> None:
    (message,) = quantization_warnings({"load_in_4bit": True}, None)
    assert "means fp4" in message
    assert "set bnb_4bit_quant_type: nf4" in message
    for settings, stored in (
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, None),  # said, so meant
        ({"load_in_8bit": True}, None),
        (
            {"load_in_4bit": True},
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
        ),  # its own type counts
        (None, None),
    ):
        assert not [text for text in quantization_warnings(settings, stored) if "fp4" in text]


def test_what_the_checkpoint_carries_goes_first() -> None:
    stored = {**FOUR_BITS, "quant_method": "bitsandbytes"}
    (other,) = wrong({"quant_method": "fp8"}, stored)
    assert other.startswith("quantization_config: it says fp8, but the checkpoint was saved in bitsandbytes")
    (merge,) = wrong(None, stored, merges_adapter=True)
    assert merge.startswith("merge_adapter: the checkpoint was saved in bitsandbytes")


@pytest.mark.parametrize(
    ("settings", "method", "bits"),
    [
        (None, None, 0),
        (FOUR_BITS, "bitsandbytes", 4),
        ({"load_in_8bit": True, "load_in_4bit": False, "quant_method": "bitsandbytes"}, "bitsandbytes", 8),
        ({"bnb_4bit_quant_type": "nf4"}, "bitsandbytes", 0),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq", 4),
        ({"quant_method": "awq", "w_bit": 4, "zero_point": True}, "awq", 4),
        ({"quant_method": "hqq", "nbits": 2}, "hqq", 2),
        ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, "torchao", 4),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", 8),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"}}
                },
            },
            "compressed-tensors",
            4,
        ),
    ],
)
def test_what_settings_mean(settings: dict[str, Any] | None, method: str | None, bits: int) -> None:
    assert (method_of(settings), quantized_bits(settings)) == (method, bits)


@pytest.mark.usefixtures("warm")
def test_validate_says_all_of_it_without_torch(project: Project) -> None:
    saved = project.folder / "saved"
    shutil.copytree(project.models / "llama", saved)
    config = json.loads((saved / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "aqlm"}
    (saved / "config.json").write_text(json.dumps(config))
    llama = str(project.models / "llama")
    project.write_config(
        project.config(
            models=[
                {"name": "a", "model_name_or_path": str(saved), "num_gpus": 0},
                {"name": "b", "model_name_or_path": llama, "quantization_config": {"load_in_4bits": True}},
                {"name": "c", "model_name_or_path": llama, "model_kwargs": {"device_map": "auto"}},
            ]
        )
    )
    done = project.ensemble("validate", "config.yaml")
    assert done.returncode == 2, done.stdout
    text = " ".join(done.stderr.split())
    assert (
        "models[0].model_name_or_path: needs the package aqlm, which is not installed: pip install aqlm; "
        in text
    )
    assert "pip download --no-deps aqlm on another machine" in text
    assert "pip install --no-deps --no-index --find-links FOLDER aqlm" in text
    assert (
        "models[1].quantization_config.load_in_4bits: there is no such key; did you mean load_in_4bit?"
        in (" ".join(done.stderr.split()))
    )
    assert "models[2].model_kwargs.device_map: use the model's own key device_map instead" in done.stderr
    assert "Traceback" not in done.stderr


def test_int8_is_chosen_with_a_word_about_neighbours() -> None:
    (warning,) = quantization_warnings({"load_in_8bit": True}, None)
    assert "an outlier in a row changes the numbers of the other rows in its batch" in warning
    assert not list(quantization_warnings({"load_in_8bit": True, "llm_int8_threshold": 0.0}, None))


@pytest.mark.parametrize("capability", [(7, 0), pytest.param((7, 5), marks=pytest.mark.long)])
def test_int8_on_a_gpu_without_its_products_is_refused(
    project: Project, nvml_sim: NvmlSim, capability: tuple[int, int]
) -> None:
    pytest.importorskip("bitsandbytes")
    nvml_sim.write([Gpu(gpu_uuid(0), name="Simulated V100", compute_capability=capability)])
    int8 = {"quantization_config": {"load_in_8bit": True}}
    model = {"name": "a", "model_name_or_path": str(project.models / "llama"), **int8}
    on_cpu = {**model, "name": "b", "num_gpus": 0}
    project.write_config(project.config(models=[model, on_cpu]))
    done = project.ensemble("validate", "config.yaml", environment=nvml_sim.environment())
    text = " ".join(done.stderr.split())
    assert done.returncode == (2 if capability < (7, 5) else 0), text
    expected = (
        "models[0].quantization_config: load_in_8bit needs compute capability 7.5, and the least capable GPU "
        "has 7.0; use load_in_4bit: true, leave such GPUs out (devices), or set num_gpus: 0"
    )
    assert (expected in text) == (capability < (7, 5)), text
    assert "models[1].quantization_config" not in text
