"""Classifiers whose rows begin alike, against plain transformers run one row at a time."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest

from ensemble.common.protocol import CommonSpec
from ensemble.data.published_table import PublishedTable
from ensemble.members.base import Assigned, OutputColumns
from ensemble.members.seq_cls.parent import SequenceClassification, SequenceClassifierSettings
from tests.checkpoints import make_adapter, make_checkpoint, make_texts, reference
from tests.members.huggingface.scoring.test_predict import worker_spec
from tests.members.pooled_cls.test_pooled_cls import (
    linear,
    make_backbone,
    pooled_reference,
    save_head,
    softmax,
)
from tests.members.pooled_cls.test_pooled_cls import member as pooled_member
from tests.sampling import one_in
from tests.worker.test_session import publish

if TYPE_CHECKING:
    from ensemble.members.huggingface.memory import CheckpointMemory
    from ensemble.members.predictor import Prediction
    from ensemble.members.seq_cls.predictor import SequenceClassifier

pytestmark = pytest.mark.usefixtures("one_thread")
LABELS = ("yes", "no", "tie")
# Longer than the windows here, of 16 tokens.
EXAMPLES = " ".join(" ".join(make_texts(40, seed=9)).split()[:28])
TEMPLATE = EXAMPLES + " {{ text }}"


def kind(folder: Path, **keys: Any) -> SequenceClassification:
    settings = {"name": "m", "model_name_or_path": str(folder), "prompt_template": TEMPLATE, **keys}
    return SequenceClassification(SequenceClassifierSettings(**settings))


def member(
    where: Path, folder: Path, columns: Mapping[str, Sequence[Any]], labels: Any = LABELS, **keys: Any
) -> SequenceClassifier:
    """The child side, made of what the parent side tells it, and loaded."""
    from ensemble.members.seq_cls.predictor import ClassifierSpec, SequenceClassifier

    parent = kind(folder, **keys)
    inspected = parent.inspect(OutputColumns("id", tuple(labels)))
    settings = parent.worker_settings(inspected, Assigned(gpus=0, dtype=parent.settings.dtype), None)
    places = publish(
        Path(tempfile.mkdtemp(dir=where)), {name: list(cells) for name, cells in columns.items()}
    )
    plain = worker_spec(folder, labels=tuple(labels), activation=inspected.activation, **places)
    common = CommonSpec(**{field.name: getattr(plain, field.name) for field in fields(CommonSpec)})
    made = SequenceClassifier(ClassifierSpec.of(common, settings), PublishedTable(Path(common.table_path)))
    made.load()
    return made


def predict(made: Any, rows: int, report: Any = lambda *_: None) -> Prediction:
    prediction: Prediction = made.predict(np.arange(rows), report)
    return prediction


CASES = [
    ("llama", {"pad": None}),
    ("llama", {"pad": "<eos>", "side": "left"}),
    ("gemma2", {}),
    ("qwen3", {}),
    ("mistral", {}),
    ("gemma3_text", {"layers": 3}),
]


@pytest.mark.parametrize(("architecture", "options"), one_in(3, CASES), ids=str)
def test_what_all_rows_begin_with_is_computed_once(
    architecture: str, options: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path / "a model", architecture, LABELS, **options)
    texts = make_texts(24, longest=40)
    prompts = [f"{EXAMPLES} {text}" for text in texts]
    expected = reference(folder, prompts)
    assert expected.max(axis=1).std() > 0.02, "the checkpoint must tell rows apart"
    for batching in ({}, {"batch_size": 3}):
        made = member(tmp_path, folder, {"text": texts}, **batching)
        for rows in (len(texts), 11):  # the second time with what is kept of the first
            prediction = predict(made, rows)
            np.testing.assert_allclose(prediction.values, expected[:rows], atol=1e-5)
            assert prediction.counters.shared_tokens > 0.5 * prediction.counters.tokens
    assert not predict(made, 2).counters.shared_tokens, "not worth it"


@pytest.mark.parametrize("pad", ["<eos>", "<pad>"])
def test_the_head_reads_the_last_token_that_is_no_pad_even_of_what_rows_begin_with(
    pad: str, tmp_path: Path
) -> None:
    """The tokens of a row by itself may all be pad tokens."""
    folder = make_checkpoint(tmp_path / "model", "llama", LABELS, pad=pad)
    behind = ["<eos>", "<eos><eos>", " plants", " food <eos>", " a person", " body group <eos><eos>"]
    expected = reference(folder, [EXAMPLES + text for text in behind])
    made = member(tmp_path, folder, {"text": behind}, prompt_template=EXAMPLES + "{{ text }}")
    prediction = predict(made, len(behind))
    np.testing.assert_allclose(prediction.values, expected, atol=1e-5)
    assert prediction.counters.shared_tokens > 0


PARTS = ["plants or food", "plants", "a person of any place", "food", "body group so", "plants"]
# Rows of other lengths, and of one choice; the second and third have the same text.
TEXTS = [*(" ".join(text.split() * 3) for text in make_texts(5, seed=3, longest=20)), "a", "", "plants " * 30]
TEXTS[2] = TEXTS[1]
CHOICES = [[PARTS[(row + place) % 6] for place in range(1 + (row + 1) % 5)] for row in range(len(TEXTS))]
POSITIONS = tuple("01234")


def choices_reference(
    folder: Path, prompts: Sequence[str], model: Any = None, max_length: int = 1024
) -> npt.NDArray[np.float64]:
    """The probabilities of each row's choices by plain transformers, every text alone."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if model is None:
        model = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
    result = np.zeros((len(prompts), len(POSITIONS)))
    for row, (prompt, of_row) in enumerate(zip(prompts, CHOICES, strict=True)):
        with torch.no_grad():
            scores = [
                model.eval()(
                    **tokenizer(
                        f"{prompt} {text}", return_tensors="pt", truncation=True, max_length=max_length
                    )
                ).logits[0, 0]
                for text in of_row
            ]
        result[row, : len(scores)] = torch.stack(scores).double().softmax(0).numpy()
    return result


def choice_member(where: Path, folder: Path, begin: str = "", **keys: Any) -> SequenceClassifier:
    columns = {"text": TEXTS, "answers": [json.dumps(of_row) for of_row in CHOICES]}
    template = begin + "{{ text }} {{ answers }}"
    return member(
        where, folder, columns, POSITIONS, **{"prompt_template": template, "choices": "answers", **keys}
    )


@pytest.mark.parametrize("architecture", one_in(2, ["llama", "gemma2", "qwen3", "mistral"]))
@pytest.mark.parametrize("begin", one_in(2, ["", EXAMPLES + " "]), ids=["alone", "behind examples"])
def test_the_tokens_before_a_rows_choices_are_computed_once(
    begin: str, architecture: str, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path / "model", architecture, ["score"])
    expected = choices_reference(folder, [begin + text for text in TEXTS])
    for batching in ({"batch_size": 4}, {"max_num_batched_tokens": 60}, {}):
        made = choice_member(tmp_path, folder, begin, **batching)
        prediction = predict(made, len(TEXTS))
        np.testing.assert_allclose(prediction.values, expected, atol=1e-5, err_msg=str(batching))
        assert prediction.counters.shared_tokens > 0
    shapes: list[tuple[int, ...]] = []
    hook = made._classifier._body.register_forward_pre_hook(
        lambda _, __, inputs: shapes.append(tuple(inputs["input_ids"].shape)), with_kwargs=True
    )
    counters = predict(made, len(TEXTS)).counters
    hook.remove()
    assert counters.shared_tokens > 0.4 * counters.tokens
    passed = sum(rows * width for rows, width in shapes)
    assert passed <= counters.padded_tokens - counters.shared_tokens


def test_rows_of_choices_that_are_cut_or_do_not_end_with_them(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama", ["score"])
    made = choice_member(tmp_path, folder, max_length=48, truncation_side="right")
    expected = choices_reference(folder, TEXTS, max_length=48)
    np.testing.assert_allclose(predict(made, len(TEXTS)).values, expected, atol=1e-5)
    made = choice_member(tmp_path, folder, prompt_template="{{ answers }} {{ text }}")
    prediction = predict(made, len(TEXTS))
    assert not prediction.counters.shared_tokens
    assert not prediction.bad_rows


def test_bad_rows_begin_with_nothing(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama", LABELS)
    template = EXAMPLES + " {{ (text | fromjson)[0] }}"
    texts = ["broken"] * 5 + [json.dumps([text]) for text in make_texts(5, longest=9)]
    made = member(tmp_path, folder, {"text": texts}, prompt_template=template)
    assert len(predict(made, 5).bad_rows) == 5
    prediction = predict(made, 10)
    assert len(prediction.bad_rows) == 5
    expected = reference(folder, [f"{EXAMPLES} {json.loads(text)[0]}" for text in texts[5:]])
    np.testing.assert_allclose(prediction.values[5:], expected, atol=1e-5)
    assert prediction.counters.shared_tokens > 0


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft on transformers 5
def test_what_is_kept_is_that_of_a_views_adapter(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    import torch
    from transformers import AutoModelForSequenceClassification

    folder = make_checkpoint(tmp_path / "base", "llama", ["score"])
    adapters = [make_adapter(tmp_path / f"a{n}", folder, 1, seed=n, r=2 + n) for n in range(2)]
    views = [{"name": adapter.name, "adapter_name_or_path": str(adapter)} for adapter in adapters]
    made = choice_member(tmp_path, folder, EXAMPLES + " ", views=views)
    for view in (0, 1, 0):
        plain = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
        plain = peft.PeftModel.from_pretrained(plain, str(adapters[view]))
        made.use_job(view)
        prediction = predict(made, len(TEXTS))
        expected = choices_reference(folder, [f"{EXAMPLES} {text}" for text in TEXTS], plain)
        np.testing.assert_allclose(prediction.values, expected, atol=1e-5)
        assert prediction.counters.shared_tokens > 0


@pytest.mark.parametrize(
    ("architecture", "mode"),
    one_in(2, [("qwen3", "mean"), ("mistral", "mean"), ("gemma2", "lasttoken"), ("llama", "cls")]),
)
def test_a_pooled_decoder_keeps_hidden_states_of_what_rows_begin_with(
    architecture: str, mode: str, tmp_path: Path
) -> None:
    folder = make_backbone(tmp_path / "model", architecture)
    head, texts = linear(), make_texts(20, longest=40)
    prompts = [f"{EXAMPLES} {text}" for text in texts]
    expected = softmax(pooled_reference(folder, head, mode, prompts))
    path = save_head(tmp_path / "head.safetensors", head)
    for batching in ({}, {"batch_size": 3}):
        keys: dict[str, Any] = {
            "pooling_mode": mode,
            "prompt_template": TEMPLATE,
            "text_column": None,
            **batching,
        }
        made = pooled_member(tmp_path, folder, path, {"text": texts}, **keys)
        prediction = predict(made, len(texts))
        np.testing.assert_allclose(prediction.values, expected, atol=1e-5)
        assert bool(prediction.counters.shared_tokens) == (mode != "cls")


@pytest.mark.parametrize("architecture", one_in(3, ["mamba", "lfm2", "bert", "embeddinggemma"]))
def test_models_that_keep_other_states_or_see_later_tokens_compute_rows_whole(
    architecture: str, tmp_path: Path
) -> None:
    from ensemble.members.huggingface.scoring.forward import Shortcut

    if architecture == "embeddinggemma":
        folder = make_backbone(tmp_path / "model", "gemma3_text", "AutoModelForCausalLM")
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config["use_bidirectional_attention"] = True
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    else:
        saved_as = "AutoModel" if architecture == "bert" else "AutoModelForCausalLM"
        folder = make_backbone(tmp_path / "model", architecture, saved_as)
    head, texts = linear(), make_texts(8, longest=20)
    expected = softmax(pooled_reference(folder, head, "mean", [f"{EXAMPLES} {text}" for text in texts], 128))
    path = save_head(tmp_path / "head.safetensors", head)
    keys: dict[str, Any] = {"prompt_template": TEMPLATE, "text_column": None, "max_length": 128}
    made = pooled_member(tmp_path, folder, path, {"text": texts}, **keys)
    assert Shortcut.SHARED_PREFIX not in made._classifier.taken
    prediction = predict(made, len(texts))
    np.testing.assert_allclose(prediction.values, expected, atol=3e-5)
    assert not prediction.counters.shared_tokens


@pytest.mark.parametrize("fails", [0, 1, 2])
def test_batches_that_do_not_fit_into_memory_are_halved_and_a_single_row_runs_whole(
    fails: int, tmp_path: Path
) -> None:
    """The passes over what all rows share, what a row's choices share, and the choices."""
    from tests.oom.limit import AllocatorLimit

    folder = make_checkpoint(tmp_path / "model", "llama", ["score"])
    expected = choices_reference(folder, [f"{EXAMPLES} {text}" for text in TEXTS])
    for batching in ({}, {"batch_size": 1}):
        made = choice_member(tmp_path, folder, EXAMPLES + " ", **batching)
        with AllocatorLimit(fail_at=frozenset({fails})) as limit:
            prediction = predict(made, len(TEXTS))
        assert limit.refused == 1
        assert not prediction.bad_rows
        assert prediction.counters.oom_events == 1
        np.testing.assert_allclose(prediction.values, expected, atol=1e-5)
        shared = prediction.counters.shared_tokens / prediction.counters.tokens
        assert (shared > 0.4) == (fails > 0 and not batching), "else the rest runs whole"
        assert predict(made, len(TEXTS)).counters.shared_tokens, "the next chunk tries again"


def test_a_chunk_that_shares_is_not_left_before_its_end(tmp_path: Path) -> None:
    """Its rest would share other tokens, and a run that goes on would have other numbers."""
    folder = make_checkpoint(tmp_path / "model", "llama", LABELS)
    texts = [*make_texts(7, seed=2, longest=8), "other"]

    def is_left(template: str) -> bool:
        made = member(tmp_path, folder, {"text": texts}, prompt_template=template, batch_size=1)
        return predict(made, len(texts), lambda *_: False).is_partial

    assert is_left("{{ text }}")
    assert not is_left(TEMPLATE)
    # A single row that is the longest, and begins otherwise: what is left of the chunk shares.
    assert not is_left("{{ 'or ' * 60 if text == 'other' else '" + EXAMPLES + "' }} {{ text }}")


def test_what_is_left_of_a_chunk_has_the_same_numbers(tmp_path: Path) -> None:
    """Rows of which copies are left must not share what the whole chunk did not."""
    folder = make_checkpoint(tmp_path / "model", "llama", LABELS)
    texts = ["large " * 60, "group " * 55, *[f"{EXAMPLES} food"] * 5, f"{EXAMPLES} plants"]
    made = member(tmp_path, folder, {"text": texts}, prompt_template="{{ text }}", batch_size=1)
    whole = predict(made, len(texts))
    begun = predict(made, len(texts), lambda rows, *_: rows < 2)
    assert begun.is_partial
    rest = np.flatnonzero(np.isnan(begun.values).any(axis=1))
    begun.values[rest] = made.predict(rest, lambda *_: None).values
    np.testing.assert_array_equal(begun.values, whole.values)


def test_a_chunk_of_choices_is_not_left_before_its_end(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama", ["score"])
    made = choice_member(tmp_path, folder, prompt_template="{{ answers }} {{ text }}", batch_size=2)
    assert not predict(made, len(TEXTS), lambda *_: False).is_partial


@pytest.mark.long
def test_a_quantized_classifier_keeps_what_rows_begin_with(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    import torch
    from transformers import BitsAndBytesConfig

    from tests.checkpoints import four_bits_tolerance

    bits = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    folder, texts = make_checkpoint(tmp_path, "llama", LABELS), make_texts(12, longest=25)
    made = member(tmp_path, folder, {"text": texts}, quantization_config=bits)
    options = {"quantization_config": BitsAndBytesConfig(**bits), "device_map": {"": "cpu"}}
    expected = reference(folder, [f"{EXAMPLES} {text}" for text in texts], dtype=torch.float32, **options)
    prediction = predict(made, len(texts))
    np.testing.assert_allclose(prediction.values, expected, atol=max(1e-5, four_bits_tolerance()))
    assert prediction.counters.shared_tokens > 0


def test_rows_that_overflow_run_whole_in_float32(tmp_path: Path) -> None:
    from tests.members.huggingface.scoring.test_float32 import make_overflowing

    folder = make_overflowing(tmp_path / "model", "llama", factor=120)
    texts = make_texts(12, longest=25)
    expected = reference(folder, [f"{EXAMPLES} {text}" for text in texts])
    made = member(tmp_path, folder, {"text": texts}, dtype="float16")
    prediction = predict(made, len(texts))
    assert prediction.counters.recomputed_rows
    assert not prediction.bad_rows
    np.testing.assert_allclose(prediction.values, expected, atol=1e-2)


def memory_of(folder: Path, labels: Any = LABELS, **keys: Any) -> CheckpointMemory:
    from ensemble.members.huggingface.memory import CheckpointMemory

    parent = kind(folder, **keys)
    estimate = parent.memory(parent.inspect(OutputColumns("id", tuple(labels))), np.array([400]), len(labels))
    assert isinstance(estimate, CheckpointMemory)
    return estimate


def test_the_plan_knows_what_a_classifier_keeps(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama", ["score"])
    keys = {"prompt_template": EXAMPLES + " {{ text }} {{ answers }}", "choices": "answers"}
    with_choices = memory_of(folder, POSITIONS, **keys).footprint(0, None)
    plain = memory_of(folder, ["score"], prompt_template="{{ text }}").footprint(0, None)
    assert with_choices is not None
    assert plain is not None
    made = choice_member(tmp_path, folder, EXAMPLES + " ")
    kept: list[Any] = []
    keep = made._classifier._keep
    made._classifier._keep = lambda *arguments: kept.append(keep(*arguments)) or kept[-1]  # type: ignore[method-assign,func-returns-value]
    predict(made, len(TEXTS))
    held = [sum(keys.nbytes + values.nbytes for keys, values in item.layers) for item in kept]
    planned = with_choices.activation.fixed_bytes - plain.activation.fixed_bytes
    assert planned == pytest.approx(held[0], rel=0.1)
    assert plain.activation.bytes_per_kept_token == 0
    assert with_choices.activation.bytes_per_kept_token == pytest.approx(held[1] / kept[1].tokens.size)
    encoder = make_checkpoint(tmp_path / "bert", "bert", ["score"])
    for keeps_nothing in (
        memory_of(encoder, POSITIONS, **keys),
        memory_of(folder, ["score"], torch_compile=True),
    ):
        assert not keeps_nothing.shared_tokens
        assert not keeps_nothing.keeps_prompts


def test_groups_of_rows_begin_alike() -> None:
    from ensemble.members.huggingface.scoring.beginnings import find_beginnings
    from ensemble.members.huggingface.scoring.encode import Encoded

    generator = np.random.default_rng(0)

    def tokens(count: int) -> npt.NDArray[np.int64]:
        return generator.integers(1, 1000, count)

    shared, prompts = tokens(40), [tokens(101), tokens(50), tokens(20)]
    rows = [np.concatenate([shared, prompt, tokens(9 + place)]) for prompt in prompts for place in range(3)]
    lengths = np.array([len(row) for row in rows])
    encoded = Encoded({"input_ids": rows}, lengths, 0, groups=np.repeat(np.arange(3), 3))
    found = find_beginnings(encoded, lengths - 1)
    np.testing.assert_array_equal(found.shared, shared)
    # Whole steps of eight tokens; too few are not worth a pass.
    assert found.skipped.tolist() == [40 + 96] * 3 + [40 + 48] * 3 + [40] * 3
    assert found.widths.tolist() == [32] * 3 + [16] * 3 + [29, 30, 31]
    # The token that the head reads is in the row's own pass.
    places = lengths - 1
    places[0] = 40 + 50
    assert find_beginnings(encoded, places).skipped.tolist()[:4] == [40 + 48] * 4
    # Copies are not computed.
    first = np.array([0, 0, 0, 3, 4, 5, 6, 6, 8])
    copied = replace(encoded, first=first)
    assert find_beginnings(copied, lengths - 1).skipped[first].tolist() == [40] * 3 + [40 + 48] * 3 + [40] * 3
    without = find_beginnings(replace(encoded, groups=None), lengths - 1)
    assert without.skipped.tolist() == [40] * 9
