"""Adapters that are averaged into one, against peft's own ``add_weighted_adapter`` and means by hand."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

from ensemble.members.huggingface.checkpoint.adapter_files import WEIGHTS
from ensemble.members.huggingface.spec import AdapterSource
from tests.checkpoints import adapter_reference, make_adapter, make_base, make_checkpoint, make_texts
from tests.members.huggingface.scoring.test_predict import LABELS, compute, worker_spec
from tests.sampling import one_in

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),  # peft on transformers 5
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False"),  # GPT-2; peft fixes it by itself
]
TEXTS = make_texts(15, longest=25)
ROWS = [{"text": text} for text in TEXTS]
HEADLESS: dict[str, Any] = {"task_type": None, "target_modules": ["q_proj", "v_proj"]}
# Of different ranks, scalings and layers.
DIFFERENT: list[dict[str, Any]] = [
    {**HEADLESS, "alpha_pattern": {"layers.1.self_attn.q_proj": 20}},
    {**HEADLESS, "r": 3, "lora_alpha": 5, "use_rslora": True, "layers_to_transform": [1]},
    {**HEADLESS, "r": 2, "target_modules": ["q_proj", "down_proj"], "rank_pattern": {"down_proj": 5}},
]


def averaged(base: Path, adapters: Sequence[Path], combination_type: str = "cat", **changes: Any) -> Any:
    source = AdapterSource(tuple(map(str, adapters)), combination_type)
    return worker_spec(base, dtype="float32", job_adapters=(source,), **changes)


def by_hand(base: Path, change: Callable[[Any], Any], first: Path) -> npt.NDArray[np.float64]:
    """Plain transformers and peft, row by row, after ``change`` of a model with the first adapter."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=3, ignore_mismatched_sizes=True, dtype=torch.float32, attn_implementation="eager"
    )
    model = change(peft.PeftModel.from_pretrained(model, str(first), adapter_name="a0")).eval()
    with torch.no_grad():
        rows = [
            model(**tokenizer([text], truncation=True, max_length=1024, return_tensors="pt")).logits[0]
            for text in TEXTS
        ]
    return np.stack([row.softmax(-1).double().numpy() for row in rows])


def by_peft(base: Path, adapters: Sequence[Path], combination_type: str) -> npt.NDArray[np.float64]:
    weight = 1 / len(adapters) ** (2 if combination_type == "linear" else 1)

    def combine(model: Any) -> Any:
        for number, adapter in enumerate(adapters[1:], 1):
            model.load_adapter(str(adapter), adapter_name=f"a{number}")
        names = [f"a{number}" for number in range(len(adapters))]
        model.add_weighted_adapter(names, [weight] * len(names), "mean", combination_type)
        model.set_adapter("mean")
        return model

    return by_hand(base, combine, adapters[0])


@pytest.mark.parametrize("combination_type", ["cat", "linear"])
def test_it_is_what_peft_makes_of_adapters_without_heads(combination_type: str, tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "llama", LABELS)
    adapters = [make_adapter(tmp_path / f"a{n}", base, 3, seed=n, **HEADLESS) for n in range(3)]
    expected = by_peft(base, adapters, combination_type)
    np.testing.assert_allclose(compute(averaged(base, adapters, combination_type), ROWS), expected, atol=1e-5)
    alone = adapter_reference(base, adapters[0], TEXTS, 3)
    assert np.abs(expected - alone).max() > 0.05, "the others must matter"
    other = by_peft(base, adapters, "linear" if combination_type == "cat" else "cat")
    assert np.abs(expected - other).max() > 0.01, "these are two models"


@pytest.mark.parametrize("merge", [False, True], ids=["beside", "merged"])
def test_cat_is_the_exact_mean_whatever_ranks_scalings_and_layers(merge: bool, tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "llama", LABELS)
    adapters = [make_adapter(tmp_path / f"a{n}", base, 3, seed=n, **keys) for n, keys in enumerate(DIFFERENT)]

    def mean(model: Any) -> Any:
        """peft's own changes of the weights, one adapter at a time, added up in the base."""
        for number, adapter in enumerate(adapters[1:], 1):
            model.load_adapter(str(adapter), adapter_name=f"a{number}")
        for module in model.modules():
            for number in range(3):
                if f"a{number}" in getattr(module, "lora_A", ()):
                    module.get_base_layer().weight.data += module.get_delta_weight(f"a{number}") / 3
        return model.unload()

    expected = by_hand(base, mean, adapters[0])
    for order in (adapters, adapters[::-1]):
        got = compute(averaged(base, order, merge_adapter=merge), ROWS)
        np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("architecture", one_in(2, ["llama", "bert"]))
def test_heads_of_adapters_are_averaged_too(architecture: str, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    base = make_base(tmp_path / "base", "llama")
    if architecture == "bert":
        base = make_checkpoint(tmp_path / "bert", "bert", ["x", "y"])
    adapters = [make_adapter(tmp_path / f"a{n}", base, 3, seed=n) for n in range(3)]
    heads = [load_file(adapter / "adapter_model.safetensors") for adapter in adapters]

    def mean(model: Any) -> Any:
        deltas: dict[str, Any] = {}
        for adapter in adapters:
            other = peft.PeftModel.from_pretrained(make(), str(adapter))
            for name, module in other.get_base_model().named_modules():
                if "default" in getattr(module, "lora_A", ()):
                    deltas[name] = deltas.get(name, 0) + module.get_delta_weight("default") / 3
        plain = model.unload()
        for name, delta in deltas.items():
            plain.get_submodule(name).weight.data += delta
        for key in heads[0]:
            if ".lora_" not in key:
                value = torch.stack([head[key] for head in heads]).mean(0)
                plain.get_parameter(key.removeprefix("base_model.model.")).data = value
        return plain

    def make() -> Any:
        from transformers import AutoModelForSequenceClassification

        return AutoModelForSequenceClassification.from_pretrained(
            base, num_labels=3, ignore_mismatched_sizes=True, dtype=torch.float32
        )

    expected = by_hand(base, mean, adapters[0])
    np.testing.assert_allclose(compute(averaged(base, adapters), ROWS), expected, atol=1e-5)


def test_adapters_without_a_mean(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "llama", LABELS)
    first = make_adapter(tmp_path / "first", base, 3, **HEADLESS)
    cases: dict[str, tuple[dict[str, Any], str, str]] = {
        "dora": (
            {"use_dora": True},
            "cat",
            "dora has use_dora, and only plain LoRA can be averaged; make a view",
        ),
        "rank": (
            {"r": 6},
            "linear",
            "is .* in .*first and .* in .*rank; combination_type: linear needs equal ranks",
        ),
        "headed": (
            {"task_type": "SEQ_CLS"},
            "cat",
            r"score\.weight is not in .* and \[3, 64\] in .*headed; take",
        ),
    }
    for name, (settings, combination_type, message) in cases.items():
        other = make_adapter(tmp_path / name, base, 3, **{**HEADLESS, **settings})
        with pytest.raises(ValueError, match=message):
            compute(averaged(base, [first, other], combination_type), ROWS)
    kind = shutil.copytree(first, tmp_path / "kind") / "adapter_config.json"
    kind.write_text(json.dumps({**json.loads(kind.read_text()), "bias": "all"}))
    with pytest.raises(ValueError, match="kind has bias: all, and only plain LoRA"):
        compute(averaged(base, [first, kind.parent]), ROWS)
    bare = shutil.copytree(first, tmp_path / "bare")
    save_file({"base_model.model.score.weight": np.zeros((3, 64), np.float32)}, bare / WEIGHTS)
    with pytest.raises(ValueError, match="none of the adapters has a LoRA layer"):
        compute(averaged(base, [bare, bare]), ROWS)
