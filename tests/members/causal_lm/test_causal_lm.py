"""Language models scored at label tokens, against plain transformers run one row and one label at a time."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ensemble.common.digests import digest_of
from ensemble.common.errors import CheckpointError
from ensemble.common.protocol import CommonSpec
from ensemble.data.published_table import PublishedTable
from ensemble.members.base import Assigned, OutputColumns
from ensemble.members.causal_lm.parent import CausalLanguageModel, CausalSettings
from ensemble.members.causal_lm.predictor import CausalSpec
from ensemble.members.huggingface.loading.tokenizer import label_ids
from ensemble.members.huggingface.memory import CheckpointMemory
from tests.checkpoints import (
    four_bits_tolerance,
    label_reference,
    make_adapter,
    make_language_model,
    make_texts,
)
from tests.members.huggingface.scoring.test_predict import worker_spec
from tests.sampling import one_in
from tests.worker.test_session import publish

if TYPE_CHECKING:
    from ensemble.members.causal_lm.predictor import CausalMember
    from ensemble.members.predictor import Prediction

pytestmark = pytest.mark.usefixtures("one_thread")
LABELS = ("good", "bad", "so so")
# The tiny vocabulary has the space as a token of its own.
TEMPLATE = "{{ text }} "
ONE_TOKEN = {"good": "plants", "bad": "food", "so so": "a"}
# Three tokens, of which two labels share two; and one, three that begin with it, and five.
SEVERAL = {"good": "plants or", "bad": "plants any", "so so": "food or"}
UNEVEN = {"good": "plants", "bad": "plants or", "so so": "zebra"}


def kind(folder: Path, **keys: Any) -> CausalLanguageModel:
    given = {
        "name": "m",
        "model_name_or_path": str(folder),
        "prompt_template": TEMPLATE,
        "label_tokens": ONE_TOKEN,
        **keys,
    }
    return CausalLanguageModel(CausalSettings(**given))


def member(
    where: Path,
    folder: Path,
    texts: list[str] | Mapping[str, Any],
    labels: Any = LABELS,
    **keys: Any,
) -> CausalMember:
    """The child side, made of what the parent side tells it, and loaded."""
    from ensemble.members.causal_lm.predictor import CausalMember

    parent = kind(folder, **keys)
    inspected = parent.inspect(OutputColumns("id", labels))
    attention = parent.settings.attn_implementation
    assigned = Assigned(gpus=0, dtype=parent.settings.dtype, attention=attention)
    settings = parent.worker_settings(inspected, assigned, None)
    where = Path(tempfile.mkdtemp(dir=where))
    places = publish(where, {"text": texts} if isinstance(texts, list) else dict(texts))
    plain = worker_spec(folder, labels=labels, **places)
    common = CommonSpec(**{field.name: getattr(plain, field.name) for field in fields(CommonSpec)})
    made = CausalMember(CausalSpec.of(common, settings), PublishedTable(Path(common.table_path)))
    made.load()
    return made


def predict(made: CausalMember, rows: int) -> Prediction:
    return made.predict(np.arange(rows), lambda *_: None)


CASES = [
    ("llama", {"pad": None}, ONE_TOKEN),
    ("qwen2", {"pad": "<eos>", "side": "left"}, SEVERAL),
    ("gemma2", {"final_logit_softcapping": 2.0}, ONE_TOKEN),
    ("gemma2", {}, SEVERAL),
    ("granite", {}, SEVERAL),
    ("cohere", {}, ONE_TOKEN),
    ("gpt2", {"pad": None}, SEVERAL),
]


@pytest.mark.parametrize(
    ("architecture", "options", "label_tokens"),
    one_in(3, CASES),
    ids=[f"{case[0]}-{len(case[2]['bad'])}" for case in CASES],
)
def test_probabilities_equal_plain_transformers_whatever_the_batch(
    architecture: str, options: dict[str, Any], label_tokens: dict[str, str], tmp_path: Path
) -> None:
    folder = make_language_model(tmp_path / "a model", architecture, **options)
    texts = make_texts(30, longest=40)
    expected, others = label_reference(folder, [text + " " for text in texts], list(label_tokens.values()))
    assert expected.max(axis=1).std() > 0.02, "the checkpoint must tell rows apart"
    for batching in ({}, {"max_num_batched_tokens": 50}, {"batch_size": 7}):
        made = member(tmp_path, folder, texts, label_tokens=label_tokens, **batching)
        predictions = predict(made, len(texts))
        np.testing.assert_allclose(predictions.values, expected, atol=2e-5, err_msg=str(batching))
        assert predictions.counters.other_mass / len(texts) == pytest.approx(others, abs=1e-5)
        assert not predictions.bad_rows


EIGHT_BITS = {"load_in_8bit": True}
FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:MatMul8bitLt")  # it says that it casts to float16
@pytest.mark.parametrize(
    ("architecture", "bits", "label_tokens"),
    # In eight bits a pass's outliers decide which columns stay in float16: the same passes, then.
    [("llama", FOUR_BITS, SEVERAL), ("qwen2", EIGHT_BITS, ONE_TOKEN), ("gemma2", FOUR_BITS, SEVERAL)],
    ids=["llama-4", "qwen2-8", "gemma2-4"],
)
def test_a_quantized_model_gives_what_plain_transformers_gives(
    architecture: str, bits: dict[str, Any], label_tokens: dict[str, str], tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    folder, texts = make_language_model(tmp_path, architecture), make_texts(12, longest=25)
    plain = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        device_map={"": "cpu"},
        quantization_config=BitsAndBytesConfig(**bits, llm_int8_skip_modules=["lm_head"]),
    )
    prompts, verbalizers = [text + " " for text in texts], list(label_tokens.values())
    expected, _ = label_reference(folder, prompts, verbalizers, model=plain)
    whole, _ = label_reference(folder, prompts, verbalizers)
    assert np.abs(expected - whole).max() > 1e-3, "the bits must show"
    made = member(tmp_path, folder, texts, label_tokens=label_tokens, quantization_config=bits, batch_size=1)
    tolerance = 2e-5 if bits is EIGHT_BITS else max(2e-5, four_bits_tolerance())
    np.testing.assert_allclose(predict(made, len(texts)).values, expected, atol=tolerance)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft on transformers 5
@pytest.mark.parametrize("merge", one_in(2, [False, True]))
@pytest.mark.parametrize("whole", one_in(2, [["lm_head"], []]), ids=["layers and head", "layers"])
def test_an_adapter_of_a_language_model(whole: list[str], merge: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    folder, texts = make_language_model(tmp_path / "base", "llama"), make_texts(12, longest=25)
    settings: dict[str, Any] = (
        {"modules_to_save": whole, "target_modules": ["q_proj", "down_proj"]} if whole else {}
    )
    adapter = make_adapter(tmp_path / "adapter", folder, 0, **settings)
    plain = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), str(adapter))
    prompts, verbalizers = [text + " " for text in texts], list(SEVERAL.values())
    expected, _ = label_reference(folder, prompts, verbalizers, model=plain)
    without, _ = label_reference(folder, prompts, verbalizers)
    assert np.abs(expected - without).max() > 0.05
    made = member(
        *(tmp_path, folder, texts),
        label_tokens=SEVERAL,
        adapter_name_or_path=str(adapter),
        merge_adapter=merge,
    )
    np.testing.assert_allclose(predict(made, len(texts)).values, expected, atol=2e-5)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft on transformers 5
def test_adapters_of_views_and_what_all_prompts_begin_with(tmp_path: Path) -> None:
    """The keys and values of a prompt's beginning are those of one adapter."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    folder, texts = make_language_model(tmp_path / "base", "llama"), make_texts(6, longest=9)
    instruction = " ".join(make_texts(8, seed=7, longest=8))
    adapters = [make_adapter(tmp_path / f"a{n}", folder, 0, seed=n, r=2 + n) for n in range(2)]
    views = [{"name": adapter.name, "adapter_name_or_path": str(adapter)} for adapter in adapters]
    made = member(
        *(tmp_path, folder, texts),
        label_tokens=SEVERAL,
        prompt_template=f"{instruction} {TEMPLATE}",
        views=[*views, {"name": "base"}],
        max_length=2048,
    )
    prompts, verbalizers = [f"{instruction} {text} " for text in texts], list(SEVERAL.values())
    for view in (0, 1, 2):
        made.use_job(view)
        prediction = made.predict(np.arange(len(texts)), lambda *_: None)
        assert prediction.counters.shared_tokens > 0
        plain = AutoModelForCausalLM.from_pretrained(folder)
        if view < 2:
            plain = peft.PeftModel.from_pretrained(plain, str(adapters[view]))
        expected, _ = label_reference(folder, prompts, verbalizers, max_length=2048, model=plain)
        np.testing.assert_allclose(prediction.values, expected, atol=2e-5)


@pytest.mark.parametrize("by", one_in(2, ["tokens", "bytes"]))
def test_scores_are_normalized_by_length_on_request(by: str, tmp_path: Path) -> None:
    folder, texts = make_language_model(tmp_path, "llama"), make_texts(10)
    verbalizers = list(UNEVEN.values())
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = [float(len(tokenizer(text, add_special_tokens=False)["input_ids"])) for text in verbalizers]
    divisors = {"tokens": tokens, "bytes": [6.0, 9.0, 5.0]}[by]
    expected, _ = label_reference(folder, [text + " " for text in texts], verbalizers, divisors=divisors)
    made = member(tmp_path, folder, texts, label_tokens=UNEVEN, length_normalize=by)
    np.testing.assert_allclose(predict(made, len(texts)).values, expected, atol=2e-5)
    plain, _ = label_reference(folder, [text + " " for text in texts], verbalizers)
    assert np.abs(plain - expected).max() > 0.1


def test_a_long_prompt_loses_its_beginning_and_leaves_room_for_the_label(tmp_path: Path) -> None:
    folder, texts = make_language_model(tmp_path, "llama"), make_texts(12, longest=80)
    made = member(tmp_path, folder, texts, label_tokens=SEVERAL, max_length=16)
    expected, _ = label_reference(
        folder, [text + " " for text in texts], list(SEVERAL.values()), max_length=16
    )
    predictions = predict(made, len(texts))
    np.testing.assert_allclose(predictions.values, expected, atol=2e-5)
    assert predictions.counters.truncated_rows > 3


@pytest.mark.parametrize(
    ("architecture", "label_tokens"),
    one_in(3, [("gemma2", SEVERAL), ("llama", ONE_TOKEN), ("gpt2", ONE_TOKEN)]),
    ids=["gemma2", "llama", "gpt2"],
)
def test_what_all_prompts_begin_with_is_computed_once_and_changes_nothing(
    architecture: str, label_tokens: dict[str, str], tmp_path: Path
) -> None:
    folder = make_language_model(tmp_path / "model", architecture)
    # Longer than Gemma-2's window here, of 16 tokens.
    examples = " ".join(" ".join(make_texts(40, seed=9)).split()[:28])
    texts = make_texts(30, longest=20)
    prompts = [f"{examples} {text} " for text in texts]
    # The longest row is cut at its beginning, and so does not share it.
    template = {"prompt_template": examples + " {{ text }} ", "label_tokens": label_tokens}
    made = member(tmp_path, folder, texts, **template)
    from transformers import AutoTokenizer

    tokens = [len(ids) for ids in AutoTokenizer.from_pretrained(folder)(prompts)["input_ids"]]
    limit = max(tokens) + max(map(len, made._label_ids)) - 2
    expected, _ = label_reference(folder, prompts, list(label_tokens.values()), max_length=limit)
    for batching in ({}, {"batch_size": 3}):
        made = member(tmp_path, folder, texts, **template, **batching, max_length=limit)
        for rows in (len(texts), 17):  # the second time with what is kept of the first
            predictions = predict(made, rows)
            np.testing.assert_allclose(predictions.values, expected[:rows], atol=3e-5)
            assert predictions.counters.shared_tokens > 0.3 * predictions.counters.tokens
    assert not predict(made, 2).counters.shared_tokens, "not worth it"
    # What is not computed does not fill a batch: of whole rows it would hold one.
    budget = {"max_num_batched_tokens": max(tokens) + 20}
    predictions = predict(member(tmp_path, folder, texts, **template, **budget, max_length=limit), len(texts))
    np.testing.assert_allclose(predictions.values, expected, atol=3e-5)
    assert predictions.counters.batches < 0.6 * len(texts)


# Of several tokens and similar probabilities; "food" is a path of one token and the beginning of another.
BEHIND = {"good": "plants or food", "bad": "food or plants", "so so": "food or"}


@pytest.mark.parametrize(
    "architecture", one_in(3, ["gemma2", "gemma3_text", "qwen3", "mistral", "llama", "gpt2"])
)
@pytest.mark.parametrize("begins_alike", one_in(2, [True, False]))
def test_labels_of_several_tokens_run_behind_the_keys_and_values_of_their_prompt(
    architecture: str, begins_alike: bool, tmp_path: Path
) -> None:
    """Rows of other lengths than the window, here of 16 tokens, whose padding must not stand within it."""
    import torch

    from ensemble.members.huggingface.scoring.forward import Shortcut

    options: dict[str, Any] = {"n_positions": 300} if architecture == "gpt2" else {}
    folder = make_language_model(tmp_path / "model", architecture, **options)
    texts = make_texts(24, longest=40)
    examples = " ".join(" ".join(make_texts(40, seed=9)).split()[:28]) + " " if begins_alike else ""
    keys = {"label_tokens": BEHIND, "length_normalize": "tokens"}
    made = member(tmp_path, folder, texts, **keys, prompt_template=examples + "{{ text }} ")
    divisors = [float(len(ids)) for ids in made._label_ids]
    prompts = [f"{examples}{text} " for text in texts]
    expected, others = label_reference(folder, prompts, list(BEHIND.values()), divisors=divisors)
    assert expected.max(axis=1).std() > 0.02, "the checkpoint must tell rows apart"
    assert Shortcut.KEPT_PROMPT in made._classifier.taken
    widths: list[int] = []
    hook = made._classifier._body.register_forward_hook(
        lambda _, __, output: widths.append(output.last_hidden_state.shape[1])
    )
    predictions = predict(made, len(texts))
    hook.remove()
    np.testing.assert_allclose(predictions.values, expected, atol=2e-5)
    assert predictions.counters.other_mass / len(texts) == pytest.approx(others, abs=1e-5)
    assert bool(predictions.counters.shared_tokens) == begins_alike
    behind = max(map(len, made._label_ids)) - 1
    passes = predictions.counters.batches
    assert sum(width <= behind for width in widths) == 2 * passes, "a pass for each of two paths"
    assert sum(width > behind for width in widths) == passes + begins_alike, "and one for the prompts"
    with made._classifier._spread.forward_pass(), torch.inference_mode():  # as the float32 retry does it
        encoded = made._prompts[0].encode(made._table.take(np.arange(5)))
        scores = made._classifier.logits(encoded, np.arange(5), with_mask=True)
    np.testing.assert_allclose(made._values(scores), expected[:5], atol=2e-5)


@pytest.mark.parametrize("architecture", one_in(2, ["mamba", "lfm2"]))
def test_a_model_without_keys_and_values_computes_the_prompt_before_each_label(
    architecture: str, tmp_path: Path
) -> None:
    from ensemble.members.huggingface.scoring.forward import Shortcut

    folder, texts = make_language_model(tmp_path / "model", architecture), make_texts(8, longest=25)
    expected, _ = label_reference(folder, [text + " " for text in texts], list(BEHIND.values()))
    made = member(tmp_path, folder, texts, label_tokens=BEHIND)
    assert Shortcut.KEPT_PROMPT not in made._classifier.taken
    np.testing.assert_allclose(predict(made, len(texts)).values, expected, atol=3e-5)


def test_a_row_runs_whole_where_memory_is_too_short_for_its_keys_and_values(tmp_path: Path) -> None:
    from tests.oom.limit import AllocatorLimit

    folder, texts = make_language_model(tmp_path / "model", "llama"), make_texts(3, longest=20)
    expected, _ = label_reference(folder, [text + " " for text in texts], list(BEHIND.values()))
    made = member(tmp_path, folder, texts, label_tokens=BEHIND, batch_size=1)
    with AllocatorLimit(fail_at=frozenset({1})) as limit:  # the first label's pass
        predictions = predict(made, len(texts))
    assert limit.refused == 1
    assert not predictions.bad_rows
    assert not made._classifier._keeps_prompts  # type: ignore[attr-defined]
    np.testing.assert_allclose(predictions.values, expected, atol=3e-5)


@pytest.mark.parametrize(
    ("keys", "changes"),
    [
        ({"label_tokens": SEVERAL}, True),
        ({"label_tokens": {}, "choices": "texts"}, True),
        ({"length_normalize": "tokens"}, True),
        ({"apply_chat_template": True}, True),
        ({"apply_chat_template": True, "system_instruction": "Answer."}, True),
        ({"torch_compile": True}, True),
        ({"single_token": True}, False),
        ({"label_tokens": dict(reversed(ONE_TOKEN.items()))}, False),
    ],
)
def test_keys_that_change_scores_change_the_fingerprint(
    keys: dict[str, Any], changes: bool, tmp_path: Path
) -> None:
    folder = make_language_model(tmp_path, "llama")

    def fingerprint(**keys: Any) -> str:
        parent = kind(folder, **keys)
        return digest_of(parent.fingerprint(parent.inspect(OutputColumns("id", LABELS)), Assigned(gpus=0)))

    without_system = {key: value for key, value in keys.items() if key != "system_instruction"}
    before = fingerprint(**(without_system if without_system != keys else {}))
    assert (fingerprint(**keys) != before) == changes


def test_the_plan_knows_keys_and_values_of_a_batch_whose_labels_have_several_tokens(tmp_path: Path) -> None:
    folder, texts = make_language_model(tmp_path, "llama"), make_texts(20)

    def per_token(**keys: Any) -> float:
        parent = kind(folder, **keys)
        estimate = parent.memory(parent.inspect(OutputColumns("id", LABELS)), np.array([400]), 3)
        assert isinstance(estimate, CheckpointMemory)
        whole = replace(estimate, keeps_prompts=False).footprint(0, None)
        footprint = estimate.footprint(0, None)
        assert footprint is not None
        assert whole is not None
        return (footprint.activation.bytes(1000, 100) - whole.activation.bytes(1000, 100)) / 1000

    assert per_token() == 0
    layers: list[Any] = []
    made = member(tmp_path, folder, texts, label_tokens=BEHIND)
    made._classifier._model.register_forward_hook(
        lambda _, __, output: layers.append((output.get("cache") or output.get("past_key_values")).layers)
    )
    predict(made, 1)
    tokens = layers[0][0].keys.shape[-2]
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers[0]) / tokens
    assert per_token(label_tokens=BEHIND) == pytest.approx(kept, rel=0.01)


@pytest.mark.long
def test_rows_run_whole_where_memory_is_too_short_for_what_they_share(tmp_path: Path) -> None:
    from tests.oom.limit import AllocatorLimit

    folder = make_language_model(tmp_path / "model", "llama")
    examples = " ".join(" ".join(make_texts(40, seed=9)).split()[:40])
    texts = make_texts(8, longest=20)
    expected, _ = label_reference(folder, [f"{examples} {text} " for text in texts], list(SEVERAL.values()))
    # The pass over what they share; a row by itself beside it.
    for fails, batching in ((0, {}), (1, {"batch_size": 1})):
        template = {"prompt_template": examples + " {{ text }} ", "label_tokens": SEVERAL}
        made = member(tmp_path, folder, texts, **template, **batching)
        with AllocatorLimit(fail_at=frozenset({fails})) as limit:
            predictions = predict(made, len(texts))
        assert limit.refused == 1
        assert not predictions.bad_rows
        assert not predictions.counters.shared_tokens
        assert predictions.counters.oom_events == 1
        np.testing.assert_allclose(predictions.values, expected, atol=3e-5)
        assert predict(made, len(texts)).counters.shared_tokens, "the next chunk tries again"


CHAT = (
    "<bos>{% for message in messages %}{% if message.role == 'system' and forbids is defined %}"
    "{{ raise_exception('System role not supported') }}{% endif %}[{{ message.role }}] {{ message.content | trim }}"
    "<eos>{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.mark.parametrize("side", one_in(2, ["left", "right"]))
def test_a_chat_template_stands_whole_around_a_message_that_is_cut(side: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = make_language_model(tmp_path / "model", "llama")
    (folder / "chat_template.jinja").write_text(CHAT, encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [text for text in make_texts(25, longest=30) if text]
    behind = "<eos>[assistant] "

    def tokens_of(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def prompts(before: str) -> list[str]:
        room = limit - 2 - len(tokens_of(before + behind))
        kept = ((tokens[-room:] if side == "left" else tokens[:room]) for tokens in map(tokens_of, texts))
        return [f"{before}{tokenizer.decode(kept_one)}{behind}" for kept_one in kept]

    before = "<bos>[system] say place or body<eos>[user] "
    limit = len(tokens_of(before + behind)) + 14
    made = member(
        *(tmp_path, folder, texts),
        prompt_template=None,
        text_column="text",
        apply_chat_template=True,
        system_instruction="say place or body",
        label_tokens=SEVERAL,
        truncation_side=side,
        max_length=limit,
    )
    labels = list(SEVERAL.values())
    expected, _ = label_reference(folder, prompts(before), labels, add_special_tokens=False)
    predictions = predict(made, len(texts))
    np.testing.assert_allclose(predictions.values, expected, atol=2e-5)
    assert 3 < predictions.counters.truncated_rows < len(texts)


def test_chats_that_cannot_be_had_are_named_before_the_model_loads(tmp_path: Path) -> None:
    folder = make_language_model(tmp_path / "model", "llama")
    template = folder / "chat_template.jinja"
    template.write_text("{% set forbids = 1 %}" + CHAT, encoding="utf-8")
    chat = {"apply_chat_template": True, "system_instruction": "say place or body"}
    with pytest.raises(ValueError, match=r"system_instruction: .* refuses it \(System role not supported\)"):
        member(tmp_path, folder, ["a"], **chat)
    template.write_text(CHAT, encoding="utf-8")
    with pytest.raises(ValueError, match=r"the chat template and system_instruction take \d+ tokens"):
        member(tmp_path, folder, ["a"], max_length=20, **chat)
    template.unlink()
    with pytest.raises(ValueError, match=r"apply_chat_template: the tokenizer of .* has no chat template"):
        member(tmp_path, folder, ["a"], **chat)


def test_a_prompt_that_cannot_be_had_is_named_before_the_model_loads(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, processors

    folder = make_language_model(tmp_path / "model", "llama")
    template = {"prompt_template": "plants or food " * 8 + "{{ text }} "}
    (folder / "chat_template.jinja").write_text(CHAT, encoding="utf-8")
    chat = {"apply_chat_template": True, "system_instruction": "plants or food", "max_length": 50}
    with pytest.raises(ValueError, match="more than the 50 that max_length"):
        member(tmp_path, folder, ["a"], **template, **chat)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ends = [(name, tokenizer.token_to_id(name)) for name in ("<bos>", "<eos>")]
    tokenizer.post_processor = processors.TemplateProcessing("<bos> $A <eos>", special_tokens=ends)
    tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(ValueError, match="ends each text with <eos>, behind which no label can follow"):
        member(tmp_path, folder, ["a"])


def test_the_head_sees_only_the_positions_that_are_read(tmp_path: Path) -> None:
    folder, texts = make_language_model(tmp_path, "gemma2"), make_texts(9, longest=40)
    made = member(tmp_path, folder, texts, label_tokens=SEVERAL)
    seen: list[tuple[int, ...]] = []
    head = made._loaded.model.get_output_embeddings()
    handle = head.register_forward_hook(lambda _, __, output: seen.append(tuple(output.shape)))
    predict(made, len(texts))
    handle.remove()
    longest = max(len(ids) for ids in made._label_ids)
    assert seen
    assert {shape[1] for shape in seen} <= set(range(1, longest + 1))


@pytest.mark.parametrize(
    "architecture", one_in(2, ["qwen2", "llama"]), ids=["shared with embeddings", "a head of its own"]
)
def test_rows_that_overflow_run_again_and_no_head_is_upcast_as_a_whole(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from transformers import AutoModelForCausalLM

    from ensemble.members.huggingface.loading import float32_retry

    folder, texts = make_language_model(tmp_path, architecture), make_texts(40)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():  # beyond 65,504 on some token of each, and back at once
        for name, parameter in model.named_parameters():
            if "gate_proj" in name or "up_proj" in name:
                parameter.mul_(65)
            if "down_proj" in name:
                parameter.mul_(1 / 65**2)
    model.half().save_pretrained(folder)
    shape = tuple(model.get_input_embeddings().weight.shape)
    seen: list[tuple[int, ...]] = []

    class Upcasts(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dtype is torch.float32:
                seen.append(tuple(result.shape))
            return result

    monkeypatch.setattr(float32_retry, "_PIECE_WEIGHTS", 64 * 50)
    made = member(tmp_path, folder, texts, label_tokens=SEVERAL, dtype="float16")
    with Upcasts():  # type: ignore[no-untyped-call]
        predictions = predict(made, len(texts))
    assert predictions.counters.recomputed_rows > 0
    expected, others = label_reference(folder, [text + " " for text in texts], list(SEVERAL.values()))
    np.testing.assert_allclose(predictions.values, expected, atol=1e-2)
    assert predictions.counters.other_mass / len(texts) == pytest.approx(others, abs=1e-2)
    assert (50, shape[1]) in seen
    assert shape not in seen


def test_a_label_has_the_tokens_that_it_has_behind_other_text(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    # As Llama-2's: a space is put before the first word of every text.
    pieces = ["▁", "▁good", "good", ":", "▁:", "<unk>", "go", "od", "g", "o", "d"]
    merges = [("▁", "good"), ("go", "od"), ("g", "o"), ("o", "d"), ("▁", ":")]
    numbers = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(numbers, merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    encode = lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)  # noqa: E731
    assert label_ids(encode, " good") == (numbers["▁good"],)
    assert label_ids(encode, "good") == (numbers["good"],)


def test_labels_that_cannot_be_told_apart_are_named_before_anything_loads(tmp_path: Path) -> None:
    folder = make_language_model(tmp_path, "llama")

    def problems(**keys: Any) -> list[str]:
        with pytest.raises(CheckpointError) as caught:
            kind(folder, **keys).inspect(OutputColumns("id", LABELS))
        return list(caught.value.problems)

    (first,) = problems(label_tokens=ONE_TOKEN | {"bad": "zebra"}, single_token=True)
    assert first.startswith("label_tokens.bad: its text is 5 tokens, and single_token demands one")
    for text, token in (("<pad>", "pad_token"), ("a<eos>", "eos_token")):
        with pytest.raises(ValueError, match=rf"label_tokens.bad: its text holds the tokenizer's {token}"):
            member(tmp_path, folder, ["a"], label_tokens=ONE_TOKEN | {"bad": text})


def test_labels_without_the_space_that_their_tokenizer_needs_are_warned_of(tmp_path: Path) -> None:
    folder = make_language_model(tmp_path, "llama")

    def warnings(prompt: str, **keys: Any) -> list[str]:
        return [*kind(folder, **keys).prompt_warnings(prompt)]

    spaced = {label: f" {text}" for label, text in ONE_TOKEN.items()}
    assert warnings("Answer:", label_tokens=spaced) == []
    for prompt in ("Answer: ", "Answer\n", ""):
        assert warnings(prompt) == []
    (glued,) = warnings("Answer:")
    assert "in text a space would stand before them ('Answer:plants')" in glued


def test_two_texts_of_the_same_tokens(tmp_path: Path) -> None:
    import json

    folder = make_language_model(tmp_path, "llama")
    path = folder / "tokenizer.json"
    stored = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(stored | {"normalizer": {"type": "Lowercase"}}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"label_tokens\.bad: its text has"):
        kind(folder, label_tokens=ONE_TOKEN | {"bad": "Plants"}).inspect(OutputColumns("id", LABELS))


def test_a_classifier_is_refused(tmp_path: Path) -> None:
    from tests.checkpoints import make_checkpoint

    folder = make_checkpoint(tmp_path, "llama", LABELS)
    with pytest.raises(CheckpointError, match=r"no head over the vocabulary; .*task_type: seq_cls runs it"):
        kind(folder).inspect(OutputColumns("id", LABELS))


def test_an_encoder_is_refused_although_transformers_would_run_it(tmp_path: Path) -> None:
    import json

    from tests.checkpoints import make_checkpoint

    folder = make_checkpoint(tmp_path, "bert", LABELS)
    config = json.loads((folder / "config.json").read_text())
    for named in ("BertForPreTraining", "BertModel"):
        (folder / "config.json").write_text(json.dumps({**config, "architectures": [named]}))
        with pytest.raises(CheckpointError, match=rf"{named}\) is an encoder: its tokens see those behind"):
            kind(folder).inspect(OutputColumns("id", LABELS))
    other = {**config, "architectures": ["DebertaV2Model"], "model_type": "deberta-v2"}
    (folder / "config.json").write_text(json.dumps(other))
    with pytest.raises(CheckpointError, match="of the kind 'deberta-v2'"):
        kind(folder).inspect(OutputColumns("id", LABELS))
    saved = {**config, "architectures": ["BertLMHeadModel"], "is_decoder": True}
    (folder / "config.json").write_text(json.dumps(saved))
    kind(folder).inspect(OutputColumns("id", LABELS))


def test_the_plan_knows_keys_and_values_of_what_prompts_begin_with(tmp_path: Path) -> None:
    folder, texts = make_language_model(tmp_path, "llama"), make_texts(30)
    examples = " ".join(" ".join(make_texts(40, seed=9)).split()[:60])

    def fixed(template: str) -> int:
        parent = kind(folder, prompt_template=template)
        estimate = parent.memory(parent.inspect(OutputColumns("id", LABELS)), np.array([40]), 3)
        assert isinstance(estimate, CheckpointMemory)
        footprint = estimate.footprint(0, None)
        assert footprint is not None
        return footprint.activation.fixed_bytes

    made = member(tmp_path, folder, texts, prompt_template=examples + " {{ text }} ")
    assert predict(made, len(texts)).counters.shared_tokens
    prefix = made._classifier._prefix
    assert prefix is not None
    held = sum(keys.nbytes + values.nbytes for keys, values in prefix.layers)
    assert held == prefix.tokens.size * 3 * 2 * 2 * 16 * 4, (
        "3 layers, keys and values, 2 heads of 16, float32"
    )
    planned = fixed(examples + " {{ text }} ") - fixed("{{ text }}")
    assert planned == pytest.approx(held, rel=0.1)


def test_the_plan_knows_the_vocabularys_logits(tmp_path: Path) -> None:
    folder = make_language_model(tmp_path, "llama")
    lengths = np.array([40, 4], dtype=np.int64)

    def needed(vocabulary: int, **keys: Any) -> float:
        parent = kind(folder, **keys)
        inspected = parent.inspect(OutputColumns("id", LABELS))
        estimate = parent.memory(inspected, lengths, 3)
        assert isinstance(estimate, CheckpointMemory)
        assert estimate.architecture is not None
        big = replace(estimate, architecture=replace(estimate.architecture, vocabulary=vocabulary))
        footprint = big.footprint(0, None)
        assert footprint is not None
        # Untied: embeddings and head.
        assert footprint.weights.parameters == sum(item.elements for item in big.tensors or ())
        return footprint.activation.bytes(1040, 104)  # ten rows

    # float32 logits, and their exponentials
    assert needed(256_000) - needed(0) == pytest.approx(10 * 256_000 * 8)
    uneven = {"label_tokens": UNEVEN}
    assert needed(256_000, **uneven) - needed(0, **uneven) == pytest.approx(5 * 10 * 256_000 * 8)


def choice_rows(rows: int) -> tuple[list[str], list[list[str]]]:
    """Texts, and two to four choices for each; the fourth row repeats the third with other choices."""
    texts = make_texts(rows, longest=25)
    texts[3] = texts[2]
    parts = ["plants or food", "plants", "a person who works", "food", "mind body group", "plants any"]
    choices = [[parts[(row + 2 * place) % 6] for place in range(2 + row % 3)] for row in range(rows)]
    return texts, choices


@pytest.mark.parametrize("architecture", one_in(2, ["llama", "gemma2", "lfm2"]))
@pytest.mark.parametrize("normalize", one_in(2, ["none", "tokens"]))
def test_choices_of_each_row_equal_plain_transformers(
    architecture: str, normalize: str, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    folder = make_language_model(tmp_path / "model", architecture)
    texts, choices = choice_rows(14)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    limit = 40
    expected = np.zeros((len(texts), 4))
    others = 0.0
    for row, (text, of_row) in enumerate(zip(texts, choices, strict=True)):
        divisors = [float(len(tokenizer(item, add_special_tokens=False)["input_ids"])) for item in of_row]
        values, other = label_reference(
            folder,
            [text + " "],
            of_row,
            max_length=limit,
            divisors=divisors if normalize == "tokens" else [],
        )
        expected[row, : len(of_row)] = values[0]
        others += other
    for batching in ({}, {"batch_size": 5}):
        made = member(
            tmp_path,
            folder,
            {"text": texts, "answers": [json.dumps(of_row) for of_row in choices]},
            labels=("0", "1", "2", "3"),
            label_tokens={},
            choices="answers",
            length_normalize=normalize,
            max_length=limit,
            **batching,
        )
        predictions = predict(made, len(texts))
        np.testing.assert_allclose(predictions.values, expected, atol=3e-5)
        assert (predictions.values[expected == 0] == 0).all(), "choices that a row does not have"
        assert predictions.counters.other_mass == pytest.approx(others, abs=1e-4)
        assert not predictions.bad_rows
        assert predictions.counters.truncated_rows > 0
        assert not predictions.counters.recomputed_rows
    assert len({tuple(row) for row in predictions.values[2:4]}) == 2, "the same text with other choices"


def test_a_long_choice_runs_in_passes_of_fewer_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ensemble.members.causal_lm import predictor

    monkeypatch.setattr(predictor, "CHOICE_POSITIONS", 4)
    folder = make_language_model(tmp_path / "model", "llama")
    texts, choices = choice_rows(6)
    columns = {"text": texts, "answers": choices}
    made = member(tmp_path, folder, columns, labels=("0", "1", "2", "3"), label_tokens={}, choices="answers")
    sizes: list[int] = []
    made._classifier._model.get_output_embeddings().register_forward_hook(
        lambda _, __, output: sizes.append(output.shape[0] * output.shape[1])
    )
    predictions = predict(made, 6)
    assert max(sizes) <= 6 * 4
    assert predictions.values[0].sum() == pytest.approx(1)
