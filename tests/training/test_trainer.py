"""The built-in training against plain torch and transformers, and against itself after a kill."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.numpy import load_file
from sklearn.model_selection import StratifiedKFold
from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback

from ensemble.common.protocol import ChunkDone, Predict
from ensemble.data.published_table import PublishedTable
from ensemble.members.causal_lm.predictor import CausalMember
from ensemble.members.huggingface.spec import CLASSIFIER
from ensemble.members.huggingface.training import trainer as module
from ensemble.members.huggingface.training.arguments import judge_training, training_arguments
from ensemble.members.huggingface.training.program import lacks_memory
from ensemble.members.huggingface.training.steps import NotFinite, StepTrainer, divide, epoch_steps, make_plan
from ensemble.members.huggingface.training.trainer import TrainerSpec, Training
from ensemble.members.seq_cls.parent import SequenceClassifierSettings
from tests.checkpoints import (
    inspect_folder,
    make_checkpoint,
    make_language_model,
    make_texts,
    make_tokenizer,
    reference,
)
from tests.members.huggingface.scoring.test_compute import read_shard
from tests.members.huggingface.scoring.test_predict import with_ends, worker_spec
from tests.members.huggingface.scoring.test_segment_ids import make_model, ours
from tests.project import ROOT
from tests.sampling import one_in
from tests.training.made import LABEL_TOKENS, LABELS, make_spec, soft_targets, without_dropout
from tests.worker.test_session import publish, served

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("default")]
TEXTS = make_texts(50, seed=4, longest=30)
TARGETS = np.eye(3)[np.random.default_rng(5).integers(0, 3, 50)]
FAST = {"training_arguments": {"learning_rate": 3e-3}}
DEMO_LLAMA = ROOT / "demo" / "models" / "llama"
LORA = {**FAST, "method": "lora", "lora_config": {"r": 4, "lora_dropout": 0.1}}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("bert"), "bert", LABELS)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As Llama-3: no pad token."""
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama", LABELS, pad=None)


def prepare(spec: Mapping[str, Any]) -> Training:
    return Training(TrainerSpec(**spec))


def run(spec: Mapping[str, Any]) -> Path:
    prepare(spec).train()
    return Path(spec["out"])


def fail(spec: Mapping[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run what must fail, as a process does, and return the problem that it leaves: none of memory."""
    monkeypatch.setattr(sys, "argv", ["trainer", str(folder / "spec.json")])
    with pytest.raises(SystemExit) as end:
        module.main()
    assert end.value.code == 1
    problem = json.loads((Path(spec["out"]) / "problem.json").read_text(encoding="utf-8"))
    assert problem["is_out_of_memory"] is False
    text: str = problem["text"]
    assert "\n" not in text
    return text


def progress(out: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((out / "progress.json").read_text(encoding="utf-8"))
    return read


def predicted(folder: Path, texts: list[str], checkpoint: Path, **settings: Any) -> npt.NDArray[np.float64]:
    """The probabilities that a worker of ours computes, [rows, labels]."""
    places = publish(folder / "worker", {"text": texts})
    code, events = served(worker_spec(checkpoint, **places, **settings), Predict(0, 0, len(texts)))
    assert code == 0, events
    done = next(event for event in events if isinstance(event, ChunkDone))
    part = read_shard(folder / "worker" / "shards", done.shard)
    return part[np.argsort(part[:, 0]), 1:]


def weights_of(folder: Path) -> dict[str, npt.NDArray[np.float32]]:
    """As transformers reads them: some releases write other names than those of the model."""
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    return {name: value.numpy() for name, value in model.state_dict().items()}


def files(out: Path) -> dict[str, bytes]:
    """All that a training leaves, but how it went."""
    return {path.name: path.read_bytes() for path in out.iterdir() if path.name != "progress.json"}


def test_a_loop_of_plain_torch_gives_the_same_weights(tmp_path: Path) -> None:
    base = without_dropout(make_checkpoint(tmp_path / "base", "bert", LABELS))
    weights = np.linspace(0.3, 1.0, len(TEXTS))
    own = {"learning_rate": 1e-3, "num_train_epochs": 3, "weight_decay": 0.1}
    out = run(make_spec(tmp_path, base, TEXTS, TARGETS, weights, train={"training_arguments": own}))

    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForSequenceClassification.from_pretrained(base, attn_implementation="eager").train()
    decayed: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (others if "LayerNorm" in name or name.endswith("bias") else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.999), eps=1e-8)
    lengths = np.array([len(tokenizer(text)["input_ids"]) for text in TEXTS])
    steps = [rows for epoch in range(3) for rows in epoch_steps(lengths, 16, 3, epoch)]
    for number, rows in enumerate(steps):
        warm_up = -(-len(steps) // 20)
        share = number / warm_up if number < warm_up else (len(steps) - number) / (len(steps) - warm_up)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * share
        batch = tokenizer([TEXTS[row] for row in rows], padding=True, return_tensors="pt")
        losses = torch.nn.functional.cross_entropy(
            model(**batch).logits, torch.from_numpy(TARGETS[rows]).float(), reduction="none"
        )
        (losses * torch.from_numpy(weights[rows]).float()).mean().backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    got, first = weights_of(out), weights_of(base)
    moved = max(float(np.abs(got[name] - first[name]).max()) for name in got)
    assert moved > 3e-3
    for name, value in model.state_dict().items():
        if name.endswith("key.bias"):  # it moves all scores of a row alike: its gradient is rounding alone
            continue
        np.testing.assert_allclose(got[name], value.numpy(), atol=1e-5, err_msg=name)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_classifier_learns_the_token_ids_that_predictions_see(
    llama: Path, side: str, tmp_path: Path
) -> None:
    member = {
        "text_column": None,
        "prompt_template": "Q: {{ text }}!",
        "max_length": 12,
        "truncation_side": side,
    }
    spec = make_spec(tmp_path, llama, TEXTS, TARGETS, member=member)
    examples = prepare(spec).examples
    tokenizer = AutoTokenizer.from_pretrained(llama, truncation_side=side)
    rows = np.arange(len(TEXTS))
    batch = examples.batch(rows)
    for number, text in enumerate(TEXTS):
        length = int(batch.inputs["attention_mask"][number].sum())
        expected = tokenizer(f"Q: {text}!", truncation=True, max_length=12)["input_ids"]
        assert batch.inputs["input_ids"][number, :length].tolist() == expected
    assert examples.lengths.max() == 12


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("pad", ["<eos>", None])
def test_a_classifier_learns_from_the_token_that_its_rows_are_read_at_alone(
    pad: str | None, method: str, tmp_path: Path
) -> None:
    """Also where texts end with the pad token, and whether or not the base stores a pad id."""
    base = make_checkpoint(tmp_path / "base", "llama", LABELS, pad=pad)
    texts = [*with_ends(TEXTS[:-1])]
    training = prepare(make_spec(tmp_path, base, texts, TARGETS, train={"method": method}))
    batch = training.examples.batch(np.arange(len(texts)))
    model = training.trainee.base.eval()
    with torch.inference_mode():
        with training.examples.reading(batch):
            together = model(**batch.inputs).logits
        for row, length in enumerate(batch.inputs["attention_mask"].sum(1).tolist()):
            alone = model(input_ids=batch.inputs["input_ids"][row : row + 1, :length]).logits
            torch.testing.assert_close(together[row : row + 1], alone, atol=1e-4, rtol=0)


def test_a_head_reads_the_eos_that_its_tokenizer_adds_where_the_base_has_no_pad_token(tmp_path: Path) -> None:
    """As the base does without a pad id; and in batches of the saved tokenizer, too."""
    out = run(make_spec(tmp_path, DEMO_LLAMA, TEXTS, TARGETS, train=FAST))
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForSequenceClassification.from_pretrained(out, dtype=torch.float32)
    texts = TEXTS[:8]
    with torch.inference_mode():
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        together = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        model.config.pad_token_id = None
        for row, text in enumerate(texts):
            ids = tokenizer(text, return_tensors="pt")["input_ids"]
            assert int(ids[0, -1]) == tokenizer.eos_token_id
            torch.testing.assert_close(together[row : row + 1], model(ids).logits, atol=1e-4, rtol=0)
    got = predicted(tmp_path, texts, out)
    np.testing.assert_allclose(got, together.softmax(-1).numpy(), atol=2e-5)


def test_a_language_model_learns_label_tokens_behind_the_prompts_of_predictions(tmp_path: Path) -> None:
    base = make_language_model(tmp_path / "base", "llama")
    member = {
        **{"task_type": "causal_lm", "text_column": None, "prompt_template": "Q: {{ text }} A:"},
        **{"label_tokens": LABEL_TOKENS, "max_length": 20},
    }
    spec = make_spec(tmp_path, base, TEXTS, TARGETS, member=member)
    training = prepare(spec)
    examples = training.examples
    predictor = CausalMember(training.member_spec, PublishedTable(Path(spec["table"])))
    predictor.load()
    seen = predictor._encode(predictor._table.take(np.arange(len(TEXTS))), lambda: None)
    batch = examples.batch(np.arange(len(TEXTS)))
    for number, prompt in enumerate(seen.inputs["input_ids"]):
        ids = predictor.label_ids(seen, number)[int(TARGETS[number].argmax())]
        length = int(batch.inputs["attention_mask"][number].sum())
        assert batch.inputs["input_ids"][number, :length].tolist() == [*prompt, *ids[:-1]]
        assert int(batch.reads[number, 0]) == len(prompt) - 1


@pytest.mark.parametrize("kind", one_in(2, ["llama", "bert"]))
def test_predictions_of_the_result_are_those_of_plain_transformers(
    kind: str, bert: Path, llama: Path, tmp_path: Path
) -> None:
    base = {"bert": bert, "llama": llama}[kind]
    out = run(make_spec(tmp_path, base, TEXTS, TARGETS, train=FAST))
    assert not (out / "saves").exists()
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert [config["id2label"][str(number)] for number in range(3)] == LABELS
    inspected = inspect_folder(out, LABELS[::-1])
    assert (inspected.label_order, inspected.activation) == ((2, 1, 0), "softmax")
    expected = reference(out, TEXTS[:24])
    assert np.abs(expected - reference(base, TEXTS[:24])).max() > 0.05
    got = predicted(tmp_path, TEXTS[:24], out)
    np.testing.assert_allclose(got, expected, atol=2e-5)


def test_an_adapter_predicts_by_plain_peft_what_it_learnt(bert: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    out = run(make_spec(tmp_path, bert, TEXTS, TARGETS, train={**LORA, "lora_config": {"lora_dropout": 0.0}}))
    config = json.loads((out / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["base_model_name_or_path"] == str(bert)
    assert (config["r"], config["lora_alpha"], config["task_type"]) == (16, 32, "SEQ_CLS")
    assert "classifier" in config["modules_to_save"]
    base = AutoModelForSequenceClassification.from_pretrained(bert, attn_implementation="eager")
    model = PeftModel.from_pretrained(base, out).eval()
    tokenizer = AutoTokenizer.from_pretrained(out)
    with torch.no_grad():
        expected = [
            model(**tokenizer(text, return_tensors="pt")).logits[0].softmax(-1).numpy() for text in TEXTS[:12]
        ]
    got = predicted(tmp_path, TEXTS[:12], bert, adapter_name_or_path=str(out))
    np.testing.assert_allclose(got, expected, atol=2e-5)


@pytest.mark.parametrize(
    ("method", "written", "is_asked"),
    [("lora", "4.57.3", True), ("lora", "5.1.0", False), ("full", "4.57.3", False)],
)
def test_pairs_are_learnt_with_the_segment_ids_with_which_the_result_predicts(
    method: str, written: str, is_asked: bool, tmp_path: Path
) -> None:
    base = make_model(tmp_path / "base", "albert", written)
    pairs = list(zip(TEXTS, reversed(TEXTS), strict=True))
    train = LORA if method == "lora" else FAST
    member = {"text_column": ["text", "other"]}
    spec = make_spec(tmp_path, base, TEXTS, TARGETS, others=TEXTS[::-1], train=train, member=member)
    training = prepare(spec)
    training.train()
    batch = training.examples.batch(np.arange(len(TEXTS)))
    assert ("token_type_ids" in batch.inputs) == is_asked
    with torch.no_grad():
        expected = training.trainee.model.eval()(**batch.inputs).logits.softmax(-1).numpy()
    out = Path(spec["out"])
    settings = {"adapter_name_or_path": str(out)} if method == "lora" else {}
    got, note = ours(tmp_path / "worker", base if method == "lora" else out, list(pairs), **settings)
    np.testing.assert_allclose(got, expected, atol=2e-5)
    assert ("asked for" in note) == is_asked


def test_a_lora_config_as_peft_saves_it_trains_what_its_keys_train(bert: Path, tmp_path: Path) -> None:
    keys = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": ["query", "value"]}
    base = AutoModelForSequenceClassification.from_pretrained(bert)
    get_peft_model(base, LoraConfig(task_type="SEQ_CLS", **keys)).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text(encoding="utf-8"))
    assert saved["inference_mode"] is True
    outs = []
    for name, lora in (("keys", keys), ("saved", saved)):
        spec = make_spec(tmp_path / name, bert, TEXTS, TARGETS, train={**LORA, "lora_config": lora})
        training = {"training_arguments": {}, "lora_config": spec["train"]["lora_config"]}
        model = AutoModelForSequenceClassification.from_pretrained(bert)
        problems, trainable = judge_training(training, CLASSIFIER, model)
        assert problems == []
        assert trainable is not None
        assert trainable > 0
        outs.append(files(run(spec))["adapter_model.safetensors"])
    assert outs[0] == outs[1]


class StopAfter(TrainerCallback):  # type: ignore[misc]
    """Ends the process's training behind a step, and whatever was saved stays."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == self._step:
            raise KeyboardInterrupt


def interrupted(spec: Mapping[str, Any], step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train up to a step, as a process that is killed there does."""
    init = StepTrainer.__init__

    def with_stop(self: StepTrainer, *arguments: Any) -> None:
        init(self, *arguments)
        self.add_callback(StopAfter(step))

    with monkeypatch.context() as patch:
        patch.setattr(StepTrainer, "__init__", with_stop)
        with pytest.raises(KeyboardInterrupt):
            run(spec)


@pytest.mark.parametrize(
    ("how", "stopping"),
    [
        pytest.param(FAST, {"share": 0.2, "patience": 1}, id="full"),
        pytest.param(LORA, None, id="lora"),
        pytest.param(LORA, {"share": 0.2, "patience": 1}, id="lora early", marks=pytest.mark.long),
    ],
)
def test_a_training_goes_on_to_the_same_bits(
    how: dict[str, Any], stopping: Any, bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {**how, "effective_batch_size": 12, "early_stopping": stopping}
    whole = run(make_spec(tmp_path / "a", bert, TEXTS, TARGETS, train=own))
    spec = make_spec(tmp_path / "b", bert, TEXTS, TARGETS, train=own, save_seconds=0.0)
    out = Path(spec["out"])
    per_epoch = -(-(40 if stopping else 50) // 12)
    for step in (2, per_epoch, per_epoch + 2):  # in the first epoch, between the two, in the second one
        interrupted(spec, step, monkeypatch)
        assert [path.name for path in out.glob("saves/*/save-*")] == [f"save-{step}"]
        assert progress(out)["steps"] == 2 * per_epoch
    run(spec)
    assert progress(out)["first_step"] == per_epoch + 2
    assert files(out) == files(whole)


def test_a_half_written_save_is_not_used(bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(make_spec(tmp_path / "a", bert, TEXTS, TARGETS, train=FAST))
    spec = make_spec(tmp_path / "b", bert, TEXTS, TARGETS, train=FAST, save_seconds=0.0)
    interrupted(spec, 3, monkeypatch)
    (saves,) = (Path(spec["out"]) / "saves").iterdir()
    (saves / "checkpoint-4").mkdir()
    (saves / "checkpoint-4" / "model.safetensors").write_bytes(b"half")
    assert files(run(spec)) == files(whole)


def test_saves_of_another_training_are_not_used(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec(tmp_path, bert, TEXTS, TARGETS, train=FAST, save_seconds=0.0)
    interrupted(spec, 3, monkeypatch)
    out = run({**spec, "optim": "sgd"})
    assert progress(out)["first_step"] == 0


def test_a_loss_that_is_no_number_ends_the_training_at_its_last_save(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"training_arguments": {"learning_rate": 1e30, "max_grad_norm": 0.0, "max_steps": 8}}
    spec = make_spec(tmp_path, bert, TEXTS, TARGETS, train=own, save_seconds=0.0)
    problem = fail(spec, tmp_path, monkeypatch)
    # The first step warms up, at a learning rate of 0.
    assert problem == "the loss of step 3 is nan; try a lower learning_rate in train.training_arguments"
    assert [path.name for path in Path(spec["out"]).glob("saves/*/save-*")] == ["save-2"]


def test_rows_without_end_are_told_by_their_step(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = TARGETS.copy()
    targets[:, 0] = np.nan
    spec = make_spec(tmp_path, bert, TEXTS, targets)
    problem = fail(spec, tmp_path, monkeypatch)
    assert problem.startswith("the loss of step 1 is nan; ")


def test_where_it_is_fp16_bf16_may_help(bert: Path, tmp_path: Path) -> None:
    training = prepare(make_spec(tmp_path, bert, TEXTS, TARGETS))
    model = training.trainee.model
    plan = make_plan(training.examples, np.arange(8), {**FAST, "effective_batch_size": 4}, 4, seed=0)
    trainer = StepTrainer(model, plan, training_arguments({}, training.trainee, "sgd", tmp_path, 4, 0))
    trainer.check_finite()
    model.classifier.bias.data[0] = np.nan
    text = "step 0 made weights that are not finite; try a lower learning_rate in train.training_arguments"
    with pytest.raises(NotFinite, match=f"^{text}$"):
        trainer.check_finite()
    trainer.args.fp16 = True  # which TrainingArguments takes on a GPU alone
    with pytest.raises(NotFinite, match=f"^{text}, or bf16 in place of fp16$"):
        trainer.check_finite()
    with pytest.raises(
        NotFinite, match=r"^the loss on the slice for early_stopping after step 0 is nan; try"
    ):
        trainer.mean_loss(np.arange(4))


def test_a_base_without_a_classification_head_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import ViTConfig

    base = tmp_path / "base"
    make_tokenizer(base)
    ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2).save_pretrained(base)
    spec = make_spec(tmp_path, base, TEXTS, TARGETS)
    problem = fail(spec, tmp_path, monkeypatch)
    assert "no classification head for ViTConfig" in problem


def test_target_modules_that_do_not_exist(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"method": "lora", "lora_config": {"target_modules": ["q_proj"]}}
    spec = make_spec(tmp_path, bert, TEXTS, TARGETS, train=own)
    problem = fail(spec, tmp_path, monkeypatch)
    assert problem.startswith("lora_config: ")


def test_out_of_memory_asks_for_smaller_batches() -> None:
    with pytest.raises(RuntimeError) as error:
        torch.empty(1 << 50)
    assert lacks_memory(error.value)
    assert lacks_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert lacks_memory(MemoryError())
    assert not lacks_memory(RuntimeError("of another sort"))
    assert not lacks_memory(OSError(28, "No space left on device"))


def test_a_head_for_other_labels_is_new_and_one_for_the_same_labels_stays(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "bert", ["tie", "yes", "no"])
    stored = load_file(base / "model.safetensors")["classifier.weight"]
    spec = make_spec(tmp_path / "a", base, TEXTS, soft_targets(50, 3))
    training = prepare(spec)
    trainee, examples = training.trainee, training.examples
    assert trainee.model.config.id2label == {0: "tie", 1: "yes", 2: "no"}
    np.testing.assert_array_equal(trainee.base.classifier.weight.detach(), stored)
    first = examples.batch(np.arange(4)).labels["targets"].numpy()
    np.testing.assert_array_equal(first, soft_targets(50, 3)[:4][:, [2, 0, 1]])
    assert trainee.notes == []
    spec = make_spec(tmp_path / "b", base, TEXTS, TARGETS, labels=["good", "bad", "none"])
    trainee = prepare(spec).trainee
    assert trainee.model.config.label2id == {"good": 0, "bad": 1, "none": 2}
    assert np.abs(trainee.base.classifier.weight.detach().numpy() - stored).min() > 0
    assert "the head is new" in trainee.notes[0]
    spec = make_spec(tmp_path / "c", base, TEXTS, np.eye(5)[np.arange(50) % 5], labels=list("abcde"))
    out = run({**spec, "train": {**spec["train"], "training_arguments": {"max_steps": 1}}})
    assert load_file(out / "model.safetensors")["classifier.weight"].shape == (5, 64)


@pytest.mark.parametrize("problem_type", ["multi_label_classification", "regression", None])
def test_losses_are_those_of_transformers_heads(problem_type: str | None, tmp_path: Path) -> None:
    base = without_dropout(make_checkpoint(tmp_path / "base", "bert", LABELS))
    targets = np.random.default_rng(1).random((50, 3)) if problem_type else TARGETS
    member = {"problem_type": problem_type}
    spec = make_spec(tmp_path, base, TEXTS, targets, member=member)
    training = prepare(spec)
    trainee, examples = training.trainee, training.examples
    assert trainee.model.config.problem_type == (problem_type or "single_label_classification")
    batch = examples.batch(np.arange(7))
    labels = (
        torch.from_numpy(targets[:7]).float() if problem_type else torch.from_numpy(targets[:7].argmax(1))
    )
    with torch.no_grad(), examples.reading(batch):
        outputs = trainee.model(**batch.inputs, labels=labels)
        assert abs(float(examples.loss(outputs, batch.labels, 7) - outputs.loss)) < 1e-6


def test_early_stopping_looks_at_whole_groups_that_are_not_trained_on(bert: Path, tmp_path: Path) -> None:
    groups = [row // 5 for row in range(len(TEXTS))]
    own = {
        "early_stopping": {"share": 0.2, "patience": 1},
        "training_arguments": {"learning_rate": 0.0, "num_train_epochs": 9},
    }
    spec = make_spec(tmp_path, bert, TEXTS, TARGETS, train=own, groups=groups)
    held_rows, rows = divide(np.array(groups), TARGETS == 1, 0.2, spec["seed"])
    assert len(held_rows) == 10
    assert {groups[row] for row in held_rows}.isdisjoint(groups[row] for row in rows)
    out = run(spec)  # whose loss never falls: the first epoch is the best
    assert progress(out)["step"] == 2 * 3
    before, after = weights_of(bert), weights_of(out)
    assert all((before[name] == after[name]).all() for name in before)


@pytest.mark.parametrize("seed", range(8))
def test_early_stopping_looks_at_each_labels_share_of_rows_as_scikit_learn_does(seed: int) -> None:
    truth = np.random.default_rng(seed).permutation(np.repeat([0, 1, 2, 3], [230, 41, 8, 1]))
    held_rows, rows = divide(np.arange(280), np.eye(4, dtype=bool)[truth], 0.2, seed)
    assert sorted([*held_rows, *rows]) == list(range(280))
    folds = StratifiedKFold(5, shuffle=True, random_state=seed).split(truth[truth < 3], truth[truth < 3])
    expected = np.array([np.bincount(truth[truth < 3][part], minlength=4) for _, part in folds])
    counts = np.bincount(truth[held_rows], minlength=4)
    assert (expected.min(axis=0) <= counts).all()
    assert (counts <= expected.max(axis=0)).all()


@pytest.mark.parametrize("seed", range(8))
def test_early_stopping_takes_no_labels_last_rows_nor_parts_of_groups(seed: int) -> None:
    random = np.random.default_rng(seed)
    groups = random.integers(0, 60, 300)
    truth = np.where(groups < 3, 1 + (groups == 2), 0)  # of one label two groups, of another a single one
    has_label = np.eye(3, dtype=bool)[truth] | (random.random((300, 3)) < [0.3, 0.0, 0.0])
    held_rows, rows = divide(groups, has_label, 0.5, seed)
    assert len(np.unique(groups[held_rows])) == round(0.5 * len(np.unique(groups)))
    assert set(groups[held_rows]).isdisjoint(groups[rows])
    assert has_label[rows].any(axis=0).all(), "each label is left to train on"
    assert truth[held_rows].max() == 1, "each label that two groups have is looked at"


def test_early_stopping_without_labels_takes_a_share_of_all_rows() -> None:
    held_rows, rows = divide(np.arange(40), np.zeros((40, 0), dtype=bool), 0.1, 0)
    assert (len(held_rows), len(rows)) == (4, 36)
    for has_label in (np.eye(3, dtype=bool), np.zeros((1, 1), dtype=bool)):
        with pytest.raises(ValueError, match="early_stopping: no rows can be held back"):
            divide(np.arange(len(has_label)), has_label, 0.5, 0)


def test_a_result_has_the_type_of_its_base(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "llama", LABELS, dtype="bfloat16")
    spec = make_spec(tmp_path, base, TEXTS, TARGETS, train={"training_arguments": {"max_steps": 2}})
    trainee = prepare(spec).trainee
    assert {parameter.dtype for parameter in trainee.model.parameters()} == {torch.float32}
    out = run(spec)
    assert json.loads((out / "config.json").read_text(encoding="utf-8"))["dtype"] == "bfloat16"


@pytest.mark.long
def test_four_bit_weights_carry_an_adapter(llama: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    spec = make_spec(
        tmp_path, llama, TEXTS, TARGETS, train={**FAST, "method": "qlora"}, gradient_checkpointing=True
    )
    trainee = prepare(spec).trainee
    assert trainee.base.config.quantization_config.bnb_4bit_quant_type == "nf4"
    out = run(spec)
    assert "base_model.model.score.weight" in load_file(out / "adapter_model.safetensors")


def test_a_base_for_another_problem_is_trained_for_that_of_the_member(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "bert", ["a", "b", "c"])
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    (base / "config.json").write_text(json.dumps({**config, "problem_type": "regression"}), encoding="utf-8")
    trainee = prepare(make_spec(tmp_path, base, TEXTS, TARGETS)).trainee
    assert trainee.activation == "softmax"
    assert trainee.base.config.problem_type == "single_label_classification"


def test_an_adapter_has_the_labels_of_its_training(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "llama", ["a", "b", "c"])
    out = run(
        make_spec(tmp_path, base, TEXTS, TARGETS, train={**LORA, "training_arguments": {"max_steps": 1}})
    )
    stored = json.loads((out / "labels.json").read_text(encoding="utf-8"))
    assert [stored["id2label"][str(number)] for number in range(3)] == LABELS
    inspected = inspect_folder(base, LABELS[::-1], adapter_name_or_path=str(out))
    assert inspected.label_order == (2, 1, 0)
    # Not one that a training of ours has written.
    (out / "labels.json").write_text('{"yes": 0, "no": 1}', encoding="utf-8")
    assert inspect_folder(base, ["a", "b", "c"], adapter_name_or_path=str(out)).label_order == (0, 1, 2)


def test_an_adapter_carries_what_its_base_lacks(tmp_path: Path) -> None:
    from transformers import DistilBertConfig, DistilBertForMaskedLM

    base = tmp_path / "base"
    tokenizer = make_tokenizer(base, kind="encoder")
    config = DistilBertConfig(vocab_size=len(tokenizer), dim=64, hidden_dim=96, n_layers=1, n_heads=4)
    DistilBertForMaskedLM(config).save_pretrained(base)
    out = run(
        make_spec(tmp_path, base, TEXTS, TARGETS, train={**LORA, "training_arguments": {"max_steps": 1}})
    )
    names = load_file(out / "adapter_model.safetensors")
    assert {"base_model.model.pre_classifier.weight", "base_model.model.classifier.bias"} <= names.keys()


def test_a_label_that_is_none_of_a_rows_choices_is_refused(tmp_path: Path) -> None:
    base = make_language_model(tmp_path / "base", "llama")
    spec = make_spec(tmp_path, base, TEXTS, TARGETS, member={"task_type": "causal_lm", "choices": "options"})
    options = [json.dumps([" a", " large"])] * len(TEXTS)
    spec["table"] = publish(tmp_path / "choices", {"text": TEXTS, "options": options})["table_path"]
    with pytest.raises(ValueError, match=r"choices: row \d+ of those to train on has 2 texts.*number 3"):
        prepare(spec)


def test_at_least_96_percent_of_tokens_are_real(bert: Path, tmp_path: Path) -> None:
    texts = make_texts(1500, seed=9, longest=90)
    targets = np.eye(3)[np.arange(1500) % 3]
    spec = make_spec(tmp_path, bert, texts, targets)
    training = prepare(spec)
    examples = training.examples
    plan = make_plan(examples, np.arange(1500), spec["train"], micro_batch=8, seed=3)
    tokens, padded_tokens = plan.tokens()[-1]
    assert tokens == 2 * examples.lengths.sum()
    assert tokens >= 0.96 * padded_tokens
    # Each epoch has each row once, in an order of its own.
    epochs = [
        np.concatenate(plan.steps[start : start + plan.steps_per_epoch])
        for start in (0, plan.steps_per_epoch)
    ]
    assert all(sorted(rows.tolist()) == list(range(1500)) for rows in epochs)
    assert (epochs[0] != epochs[1]).mean() > 0.9
    arguments = training_arguments({}, training.trainee, "adamw_torch", tmp_path, len(plan.steps), 0)
    trainer = StepTrainer(training.trainee.model, plan, arguments)
    assert len(trainer.get_train_dataloader()) == len(plan.steps)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"choices": "options"}, "a member with choices is trained by a command only"),
        ({"views": [{"name": "v", "model_name_or_path": "models/v"}]}, "makes the member's models"),
    ],
)
def test_members_that_are_not_trained_from_a_base(keys: dict[str, Any], problem: str) -> None:
    settings = {"name": "m", "text_column": "text", "train": {"base_model": "models/base"}, **keys}
    with pytest.raises(ValueError, match=problem):
        SequenceClassifierSettings.model_validate(settings)
