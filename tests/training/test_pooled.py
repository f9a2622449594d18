"""Heads that are trained with their backbones, also of families without a classifier, against plain torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from transformers import CONFIG_MAPPING, AutoModel, AutoTokenizer, BitsAndBytesConfig

from ensemble.common.errors import CheckpointError
from ensemble.members.huggingface.training.steps import epoch_steps
from ensemble.members.pooled_cls.parent import PooledClassification, PooledSettings
from tests.checkpoints import facts_of, four_bits_tolerance, make_texts
from tests.members.pooled_cls.test_pooled_cls import make_backbone, member, pooled_reference, predict, softmax
from tests.releases.families import make_family
from tests.sampling import one_in
from tests.training.made import LABELS, make_spec, without_dropout
from tests.training.test_trainer import fail, files, interrupted, prepare, progress, run

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("default")]
TEXTS = make_texts(40, seed=4, longest=20)
TARGETS = np.eye(3)[np.random.default_rng(5).integers(0, 3, len(TEXTS))]
FAST = {"training_arguments": {"learning_rate": 3e-3}, "effective_batch_size": 12}
LORA = {**FAST, "method": "lora", "lora_config": {"r": 4, "lora_dropout": 0.1}}
# transformers has classifiers of none of these.
FAMILIES = ["granite", "gemma4_text", "lfm2", "cohere2", "qwen3_5_moe_text"]
MEMBER = {"task_type": "pooled_cls", "pooling_mode": "lasttoken"}
Weights = dict[str, torch.Tensor]


def make_decoder(folder: Path, architecture: str) -> Path:
    if architecture not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {architecture}")
    return make_backbone(folder, architecture, "AutoModelForCausalLM")


def head_of(out: Path) -> nn.Linear:
    tensors = load_file(out / "head.safetensors")
    head = nn.Linear(tensors["weight"].shape[1], len(tensors["weight"]))
    head.load_state_dict(tensors)
    return head


def plain(out: Path, base: Path, **options: Any) -> npt.NDArray[np.float64]:
    """What the last tokens' states and the head say by plain torch and peft, one row at a time."""
    from peft import PeftModel

    is_adapter = (out / "adapter_config.json").is_file()
    options = {"dtype": torch.float32, "attn_implementation": "eager", **options}
    model = AutoModel.from_pretrained(base if is_adapter else out, **options)
    model = PeftModel.from_pretrained(model, str(out)) if is_adapter else model
    tokenizer = AutoTokenizer.from_pretrained(out)
    with torch.no_grad():
        rows = [tokenizer([text], return_tensors="pt") for text in TEXTS]
        states = [model.eval()(**row).last_hidden_state[0, -1] for row in rows]
        probabilities = head_of(out)(torch.stack(states)).double().softmax(-1)
    return np.asarray(probabilities.numpy())


def ours(folder: Path, out: Path, base: Path, **keys: Any) -> npt.NDArray[np.float64]:
    """What a member predicts with the keys that a run takes from a training."""
    settings = {**MEMBER, "name": "m", "text_column": "text", "train": {"base_model": str(base)}}
    trained = PooledClassification(PooledSettings.model_validate(settings)).trained_settings(out)
    name, head = Path(trained["model_name_or_path"]), Path(trained["head"])
    others = {key: value for key, value in trained.items() if key == "adapter_name_or_path"}
    keys = {"pooling_mode": "lasttoken", **keys, **others}
    return predict(member(folder, name, head, {"text": TEXTS}, LABELS, **keys), len(TEXTS)).values


@pytest.mark.parametrize(
    ("architecture", "how"), one_in(5, [(family, how) for how in (FAST, LORA) for family in FAMILIES])
)
def test_a_family_without_a_classifier_is_trained_killed_and_run(
    architecture: str, how: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_decoder(tmp_path / "base", architecture)
    whole = run(make_spec(tmp_path / "a", base, TEXTS, TARGETS, member=MEMBER, train=how))
    spec = make_spec(tmp_path / "b", base, TEXTS, TARGETS, member=MEMBER, train=how, save_seconds=0.0)
    for step in (2, 5):  # of four in an epoch
        interrupted(spec, step, monkeypatch)
    out = run(spec)
    assert progress(out)["first_step"] == 5
    assert files(out) == files(whole)

    expected = plain(out, base)
    assert np.abs(expected - expected.mean(axis=0)).max() > 0.05
    np.testing.assert_allclose(ours(tmp_path, out, base), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("architecture", "mode"), one_in(2, [("bert", "mean"), ("bert", "cls"), ("llama", "lasttoken")])
)
def test_a_loop_of_plain_torch_gives_the_same_backbone_and_head(
    architecture: str, mode: str, tmp_path: Path
) -> None:
    base = without_dropout(make_backbone(tmp_path / "base", architecture))
    weights = np.linspace(0.3, 1.0, len(TEXTS))
    # AdamW makes steps of gradients that are rounding alone.
    own = {
        "learning_rate": 0.05,
        "optim": "sgd",
        "weight_decay": 0.0,
        "warmup_steps": 0,
        "num_train_epochs": 1,
    }
    keys = {**MEMBER, "pooling_mode": mode, "head_dropout": 0.0}
    train = {"training_arguments": {**own, "lr_scheduler_type": "constant"}, "effective_batch_size": 12}
    spec = make_spec(tmp_path, base, TEXTS, TARGETS, weights, member=keys, train=train)
    training = prepare(spec)
    assert training.trainee.head is not None
    head = nn.Linear(64, 3)
    head.load_state_dict(training.trainee.head[-1].state_dict())
    training.train()

    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModel.from_pretrained(base, attn_implementation="eager").train()
    parameters = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    lengths = np.array([len(tokenizer(text)["input_ids"]) for text in TEXTS])
    for rows in epoch_steps(lengths, 12, 3, 0):
        loss = torch.zeros(())
        for row in rows.tolist():  # each alone, without padding
            (states,) = model(**tokenizer([TEXTS[row]], return_tensors="pt")).last_hidden_state
            pooled = {"mean": states.mean(0), "cls": states[0], "lasttoken": states[-1]}[mode]
            target = torch.from_numpy(TARGETS[row]).float()
            loss = loss + weights[row] * functional.cross_entropy(head(pooled), target) / len(rows)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    out = Path(spec["out"])
    got = AutoModel.from_pretrained(out).state_dict()
    first = AutoModel.from_pretrained(base).state_dict()
    assert max(float((first[name] - value).abs().max()) for name, value in got.items()) > 3e-3
    for name, value in model.state_dict().items():
        torch.testing.assert_close(got[name], value, atol=1e-5, rtol=0)
    torch.testing.assert_close(head_of(out).weight, head.weight, atol=1e-5, rtol=0)
    expected = softmax(pooled_reference(out, head_of(out), mode, TEXTS))
    np.testing.assert_allclose(ours(tmp_path, out, base, pooling_mode=mode), expected, atol=1e-5)


def test_layers_before_the_old_head_are_left_out(tmp_path: Path) -> None:
    base = make_family(tmp_path / "base", "modernbert", LABELS)
    assert "head.dense.weight" in load_file(base / "model.safetensors")
    keys, train = {**MEMBER, "pooling_mode": "cls"}, {"training_arguments": {"max_steps": 1}}
    out = run(make_spec(tmp_path, base, TEXTS, TARGETS, member=keys, train=train))
    expected = softmax(pooled_reference(base, head_of(out), "cls", TEXTS))
    np.testing.assert_allclose(ours(tmp_path, out, base, pooling_mode="cls"), expected, atol=1e-2)


@pytest.mark.parametrize("problem_type", ["multi_label_classification", "regression", None])
def test_losses_are_those_of_plain_torch(problem_type: str | None, tmp_path: Path) -> None:
    base = without_dropout(make_backbone(tmp_path / "base", "bert"))
    targets = np.random.default_rng(1).random((len(TEXTS), 3)) if problem_type else TARGETS
    keys = {**MEMBER, "pooling_mode": "mean", "problem_type": problem_type, "head_dropout": 0.0}
    training = prepare(make_spec(tmp_path, base, TEXTS, targets, member=keys))
    trainee, examples = training.trainee, training.examples
    assert trainee.label_order == [0, 1, 2]
    batch = examples.batch(np.arange(7))
    with torch.no_grad(), examples.reading(batch):
        outputs = trainee.model(**batch.inputs)
        loss = float(examples.loss(outputs, batch.labels, 7))
    assert trainee.head is not None
    logits = torch.from_numpy(pooled_reference(base, trainee.head.eval(), "mean", TEXTS[:7]))
    truth = torch.from_numpy(targets[:7])
    by_torch: dict[str | None, Callable[..., torch.Tensor]] = {
        "multi_label_classification": functional.binary_cross_entropy_with_logits,
        "regression": functional.mse_loss,
        None: functional.cross_entropy,
    }
    assert loss == pytest.approx(float(by_torch[problem_type](logits, truth)), abs=1e-5)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_head_is_drawn_alike_and_its_dropout_is_that_of_the_member(method: str, tmp_path: Path) -> None:
    base = make_backbone(tmp_path / "base", "bert", dtype="bfloat16")
    train = {"method": method, "training_arguments": {"max_steps": 1, "learning_rate": 0.0}}
    keys = {**MEMBER, "head_dropout": 0.25}
    spec = make_spec(tmp_path, base, TEXTS, TARGETS, member=keys, train=train)
    head = prepare(spec).trainee.head
    assert head is not None
    assert head[0].p == 0.25
    (weight, bias) = (parameter.detach().clone() for parameter in head[-1].parameters())
    assert float(weight.std()) == pytest.approx(0.21, rel=0.2), "as the base draws its layers"
    out = run(spec)
    left = load_file(out / "head.safetensors")
    assert {tensor.dtype for tensor in left.values()} == {torch.float32}
    torch.testing.assert_close(left, {"weight": weight, "bias": bias}, atol=0, rtol=0)
    if method == "full":
        names = load_file(out / "model.safetensors")
        assert {tensor.dtype for tensor in names.values()} == {torch.bfloat16}
    else:
        config = json.loads((out / "adapter_config.json").read_text(encoding="utf-8"))
        assert (config["task_type"], config["modules_to_save"]) == ("FEATURE_EXTRACTION", None)
        names = load_file(out / "adapter_model.safetensors")
        assert not (out / "labels.json").exists()
    assert not any("head" in name for name in names)


@pytest.mark.long
def test_a_head_over_four_bits_and_a_kept_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bitsandbytes")
    base = make_backbone(tmp_path / "base", "granite", "AutoModelForCausalLM")
    train = {**LORA, "method": "qlora", "early_stopping": {"share": 0.2, "patience": 1}}
    whole = run(make_spec(tmp_path / "a", base, TEXTS, TARGETS, member=MEMBER, train=train))
    spec = make_spec(tmp_path / "b", base, TEXTS, TARGETS, member=MEMBER, train=train, save_seconds=0.0)
    interrupted(spec, 4, monkeypatch)
    out = run(spec)
    assert progress(out)["first_step"] == 4
    assert files(out) == files(whole)
    settings = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    bits = BitsAndBytesConfig(**settings, bnb_4bit_compute_dtype=torch.float32)
    expected = plain(out, base, quantization_config=bits)
    quantized = ours(tmp_path, out, base, quantization_config=settings)
    np.testing.assert_allclose(quantized, expected, atol=four_bits_tolerance())


def test_the_first_token_of_a_decoder_is_no_place_for_a_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_backbone(tmp_path / "base", "llama")
    spec = make_spec(tmp_path, base, TEXTS, TARGETS, member={**MEMBER, "pooling_mode": "cls"})
    assert fail(spec, tmp_path, monkeypatch) == (
        "pooling_mode: cls takes the first token, and in this model no token sees those behind it; choose "
        "lasttoken or mean"
    )


def test_a_classifier_of_a_family_without_one_is_told_what_to_write(tmp_path: Path) -> None:
    base = make_decoder(tmp_path / "base", "granite")
    (problem,) = facts_of(base).problems
    assert (
        "has no model of the kind 'granite' for this task; to train a head on its backbone, write task_type: "
        f"pooled_cls, pooling_mode: lasttoken and train: {{base_model: {base}, method: lora}}; task_type: "
        "causal_lm runs its GraniteForCausalLM, or install a newer release"
    ) in problem


@pytest.mark.parametrize(
    ("left", "given", "expected"),
    [
        (["config.json", "head.safetensors"], {}, {"model_name_or_path": "", "head": "head.safetensors"}),
        (
            ["adapter_config.json", "head.safetensors"],
            {"model_name_or_path": "base"},
            {"model_name_or_path": "base", "adapter_name_or_path": "", "head": "head.safetensors"},
        ),
        (
            ["head.safetensors"],
            {"model_name_or_path": "base"},
            {"model_name_or_path": "base", "head": "head.safetensors"},
        ),
        (["head.safetensors"], {}, "has a head alone; name its backbone in the config (model_name_or_path)"),
        (
            ["config.json"],
            {},
            "has no head.safetensors; let the command write the head's tensors there, or name",
        ),
        (["config.json"], {"head": "mine.safetensors"}, {"model_name_or_path": ""}),
    ],
)
def test_a_command_may_leave_a_head_beside_its_backbone(
    left: list[str], given: Mapping[str, Any], expected: Any, tmp_path: Path
) -> None:
    for name in left:
        (tmp_path / name).write_text("{}")
    command = ["python", "train.py", "{train}", "{out}"]
    keys = {**MEMBER, "name": "m", "text_column": "text", "train": {"command": command}, **given}
    kind = PooledClassification(PooledSettings.model_validate(keys))
    if isinstance(expected, str):
        with pytest.raises(CheckpointError) as caught:
            kind.trained_settings(tmp_path)
        assert f"{tmp_path} {expected}" in str(caught.value)
        return
    places = {key: str(tmp_path / name) if name != "base" else name for key, name in expected.items()}
    assert kind.trained_settings(tmp_path) == places
