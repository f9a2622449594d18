"""Rows behind one another through compiled flex attention, against plain transformers run one row at a time."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ensemble.common.protocol import BatchChoice
from ensemble.data.published_table import PublishedTable
from ensemble.members.huggingface.scoring.batching import MemoryLimit
from ensemble.members.huggingface.spec import FLEX, AdapterSource
from tests.checkpoints import (
    adapter_reference,
    four_bits_tolerance,
    label_reference,
    make_adapter,
    make_checkpoint,
    make_language_model,
    make_texts,
    make_tokenizer,
    reference,
)
from tests.members.causal_lm import test_causal_lm as causal
from tests.members.huggingface.scoring.test_compiled import needs_compiler
from tests.members.huggingface.scoring.test_float32 import make_overflowing
from tests.members.huggingface.scoring.test_predict import LABELS, worker_spec
from tests.members.pooled_cls import test_pooled_cls as pooled
from tests.releases.families import FAMILIES, make_family
from tests.worker.test_session import publish

pytestmark = [
    pytest.mark.usefixtures("one_thread", "compiled"),
    # torch's compiler is warned of what it calls itself, and other releases deprecate other things.
    pytest.mark.filterwarnings("default"),
]
Values = npt.NDArray[np.float64]
TOKENS = 1024  # of a packed batch, whatever the model, so that nearly all share their compiled code
LONGEST = 1400
# The last is longer than a packed batch, and those before are longer than a block; some are empty.
TEXTS = [
    "a",
    *make_texts(40),
    "food and drink " * 30,
    "large animal " * 60,
    "river state mind body group " * 200,
]
# So much is the same for all rows, and so long: the windows here have 16 tokens.
EXAMPLES = " ".join(" ".join(make_texts(40, seed=9)).split()[:28])


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What is compiled here is kept for the tests behind, as it is for a user's next worker."""
    return os.environ.get("TORCHINDUCTOR_CACHE_DIR") or str(tmp_path_factory.mktemp("code"))


@pytest.fixture
def compiled(code: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With a compiler that has nothing in memory, but what tests before have left on disk."""
    import torch

    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", code)
    yield
    torch.compiler.reset()


def family(folder: Path, name: str, **settings: Any) -> Path:
    """A classifier of a family, of which rows may be long."""
    made = make_family(folder, name, LABELS)
    config = json.loads((made / "config.json").read_text(encoding="utf-8"))
    settings = {**config, "max_position_embeddings": 4096, **settings}
    (made / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    return made


def member(where: Path, folder: Path, texts: Sequence[str] = TEXTS, **changes: Any) -> Any:
    """A worker's predictor, loaded, with a view for each of ``adapters``."""
    from ensemble.members.seq_cls.predictor import ClassifierSpec, SequenceClassifier

    adapters = changes.pop("adapters", [None])
    places = publish(Path(tempfile.mkdtemp(dir=where)), {"text": list(texts)})
    given = {
        **{"attn_implementation": FLEX, "dtype": "float32", "token_budget": TOKENS, "max_length": LONGEST},
        **{"activation": "none", "asked": ("attn_implementation",), "compile_timeout": 500.0},
    }
    sources = tuple(None if adapter is None else AdapterSource((str(adapter),)) for adapter in adapters)
    spec = worker_spec(folder, **{**places, **given, **changes})
    spec = replace(spec, job_adapters=sources, job_templates=(None,) * len(sources))
    made: Any = SequenceClassifier(ClassifierSpec(**vars(spec)), PublishedTable(Path(spec.table_path)))
    made.ready = made.load()
    return made


def predict(made: Any, rows: Sequence[int] | npt.NDArray[np.int64]) -> Any:
    prediction = made.predict(np.asarray(rows), lambda *_: None)
    assert not prediction.bad_rows
    return prediction


def is_packed(made: Any) -> bool:
    return bool(made._classifier.packed_tokens == TOKENS)


def check(values: Values, expected: Values, tolerance: float = 2e-6) -> None:
    """Numbers of rows, by how large the largest of them are."""
    scale = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(values, expected, rtol=0, atol=tolerance * scale)


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize("name", ["gemma2", "gemma3_text", "mistral", "ministral", "llama"])
def test_rows_have_the_numbers_of_eager_attention_whatever_they_are_packed_with(
    name: str, tmp_path: Path
) -> None:
    """In ``FAMILIES`` the cap is so low that it shows in the first digit."""
    # Of Mistral longer than a block, of the others shorter.
    folder = family(tmp_path / "a model", name, **({"sliding_window": 200} if name == "mistral" else {}))
    expected = reference(folder, TEXTS, LONGEST, activation="none")
    assert expected.std(axis=0).min() > 0.1, "the checkpoint must tell rows apart"
    made = member(tmp_path, folder)
    assert is_packed(made), made.ready.notes
    every = predict(made, np.arange(len(TEXTS)))
    check(every.values, expected)
    lengths = made._prompts[0].encode([{"text": text} for text in TEXTS]).lengths
    assert max(lengths) > TOKENS
    short = lengths[lengths <= TOKENS].sum()
    assert every.counters.batches <= 2 * short / TOKENS + sum(lengths > TOKENS)
    assert every.counters.padded_tokens == every.counters.tokens, "there is no padding"
    for rows in ([0], [6], [3, 6], range(0, 40, 3), [41], [42], [43], [43, 0]):
        check(predict(made, rows).values, expected[rows])


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize("name", ["gemma2", "mistral"])
def test_what_rows_begin_with_is_computed_once_in_each_batch(name: str, tmp_path: Path) -> None:
    folder = family(tmp_path / "a model", name)
    texts = [f"{EXAMPLES} {text}" for text in make_texts(30)]
    expected = reference(folder, texts, LONGEST, activation="none")
    made = member(tmp_path, folder, texts)
    assert is_packed(made), made.ready.notes
    every = predict(made, np.arange(len(texts)))
    check(every.values, expected)
    assert every.counters.shared_tokens > 0.3 * every.counters.tokens
    check(predict(made, [3]).values, expected[[3]])


@needs_compiler
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft on transformers 5
@pytest.mark.parametrize(
    "bits", [None, {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}], ids=["", "nf4"]
)
def test_adapters_of_views_take_turns(bits: dict[str, Any] | None, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    options: dict[str, Any] = {}
    tolerance = 2e-6
    if bits is None:
        folder = family(tmp_path / "base", "gemma2")
    else:
        pytest.importorskip("bitsandbytes")
        folder = make_checkpoint(tmp_path / "base", "llama", LABELS)
        from transformers import BitsAndBytesConfig

        whole = BitsAndBytesConfig(**bits, llm_int8_skip_modules=["score"])
        options, tolerance = {"quantization_config": whole, "device_map": {"": "cpu"}}, four_bits_tolerance()
    adapters = [make_adapter(tmp_path / f"a{n}", folder, 3, seed=n, r=2 + n) for n in range(2)]
    texts = [f"{EXAMPLES} {text}" for text in make_texts(12)]
    made = member(tmp_path, folder, texts, adapters=adapters, activation="softmax", quantization_config=bits)
    assert is_packed(made), made.ready.notes
    expected = [adapter_reference(folder, adapter, texts, 3, LONGEST, **options) for adapter in adapters]
    assert np.abs(expected[0] - expected[1]).max() > 0.05, "the adapters must matter"
    for view in (0, 1, 0):
        made.use_job(view)
        check(predict(made, np.arange(len(texts))).values, expected[view], tolerance)


def language_model(where: Path, texts: list[str] | Mapping[str, Any], folder: Path, **keys: Any) -> Any:
    given = {"attn_implementation": FLEX, "dtype": "float32", "max_num_batched_tokens": TOKENS}
    return causal.member(where, folder, texts, **{**given, "compile_timeout": "500s", **keys})


@needs_compiler
@pytest.mark.long
def test_labels_of_one_token(tmp_path: Path) -> None:
    folder = make_language_model(
        tmp_path / "a model", "gemma2", attn_logit_softcapping=0.5, final_logit_softcapping=2.0
    )
    texts = make_texts(30)
    for before in ("", EXAMPLES + " "):
        prompts = [f"{before}{text} " for text in texts]
        expected, others = label_reference(folder, prompts, list(causal.ONE_TOKEN.values()))
        made = language_model(tmp_path, texts, folder, prompt_template=before + causal.TEMPLATE)
        assert is_packed(made)
        got = predict(made, np.arange(len(texts)))
        check(got.values, expected)
        assert got.counters.other_mass / len(texts) == pytest.approx(others, abs=1e-5)
        assert bool(got.counters.shared_tokens) == bool(before)


@pytest.mark.parametrize("choices", [None, ["plants", "food"]], ids=["labels", "choices"])
def test_texts_of_several_tokens_and_choices_are_not_packed(
    choices: list[str] | None, tmp_path: Path
) -> None:
    """Their tokens stand behind each prompt, for which padded batches keep keys and values."""
    folder, texts = make_language_model(tmp_path / "a model", "gemma2"), make_texts(12)
    keys: dict[str, Any] = {"label_tokens": causal.SEVERAL}
    if choices is not None:
        keys = {"label_tokens": {}, "choices": "answers", "labels": ("0", "1")}
    columns = {"text": texts, "answers": [json.dumps(choices)] * len(texts)}
    made = language_model(tmp_path, columns, folder, **keys)
    assert not is_packed(made)
    prompts, verbalizers = [text + " " for text in texts], choices or list(causal.SEVERAL.values())
    check(predict(made, np.arange(len(texts))).values, label_reference(folder, prompts, verbalizers)[0], 2e-5)


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize("mode", ["mean", "lasttoken"])
def test_pooled_states(mode: str, tmp_path: Path) -> None:
    folder, head = family(tmp_path / "a model", "gemma2"), pooled.linear()
    path = pooled.save_head(tmp_path / "head.safetensors", head)
    texts = make_texts(30)
    for before in ("", EXAMPLES + " "):
        rows = [before + text for text in texts]
        expected = pooled.softmax(pooled.pooled_reference(folder, head, mode, rows))
        made = pooled.member(
            tmp_path,
            folder,
            path,
            {"text": rows},
            attn_implementation=FLEX,
            pooling_mode=mode,
            max_num_batched_tokens=TOKENS,
            dtype="float32",
            compile_timeout="500s",
        )
        assert is_packed(made)
        got = predict(made, np.arange(len(texts)))
        check(got.values, expected)
        assert bool(got.counters.shared_tokens) == bool(before)


@needs_compiler
@pytest.mark.long
def test_rows_go_on_in_padded_batches_where_memory_is_too_short_for_packed_ones(tmp_path: Path) -> None:
    """And the next worker finds what this one has compiled."""
    import torch
    from torch._dynamo.utils import counters

    folder = family(tmp_path / "a model", "gemma2")
    expected = reference(folder, TEXTS, LONGEST, activation="none")
    made = member(tmp_path, folder)
    assert is_packed(made), made.ready.notes
    passes = []

    def refuse(module: Any, inputs: Any, keys: Mapping[str, Any]) -> None:
        passes.append(tuple(keys["input_ids"].shape))
        if len(passes) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory (a limit set by a test).")

    with made._classifier._body.register_forward_pre_hook(refuse, with_kwargs=True):
        prediction = predict(made, np.arange(len(TEXTS)))
    check(prediction.values, expected)
    assert prediction.counters.oom_events == 1
    assert [rows for rows, _ in passes[:2]] == [1, 1]
    assert max(rows for rows, _ in passes[2:]) > 1
    check(predict(made, np.arange(12)).values, expected[:12])

    torch.compiler.reset()
    counters.clear()
    made = member(tmp_path, folder)
    check(predict(made, np.arange(len(TEXTS))).values, expected)
    assert is_packed(made), made.ready.notes
    assert (counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]) == (1, 0)
    assert counters["stats"]["unique_graphs"] == 1, (
        "for layers with a window and without, and for all batches"
    )


@needs_compiler
@pytest.mark.long
def test_nothing_is_compiled_anew_where_batches_become_smaller(tmp_path: Path) -> None:
    """A worker is told so where another one has less memory, or had to halve its batches."""
    from torch._dynamo.utils import counters

    folder = family(tmp_path / "a model", "gemma2")
    expected = reference(folder, TEXTS, LONGEST, activation="none")
    counters.clear()
    made = member(tmp_path, folder)
    assert is_packed(made), made.ready.notes
    made._sizes.memory = MemoryLimit(TOKENS, bytes_per_token=1, bytes_per_token_pair=0)
    batches = []
    for room in (TOKENS, TOKENS // 2):
        made.follow(BatchChoice(room))
        prediction = predict(made, np.arange(len(TEXTS)))
        check(prediction.values, expected)
        batches.append(prediction.counters.batches)
    assert batches[0] < batches[1]
    assert counters["stats"]["unique_graphs"] == 1


@needs_compiler
@pytest.mark.long
def test_rows_are_packed_where_a_text_of_the_warm_up_overflows(tmp_path: Path) -> None:
    """In packed and padded batches alike; such rows are computed again in float32."""
    from ensemble.members.huggingface.scoring.warmup import WarmUp

    folder, texts = make_overflowing(tmp_path / "a model", "llama"), make_texts(60)
    asked = ("attn_implementation", "dtype")
    made = member(tmp_path, folder, texts, dtype="float16", asked=asked, max_length=128)
    encoding = made._prompts[0]
    encoded = encoding.encode([{"text": text} for text in texts])
    logits = made._classifier.logits(encoded, np.arange(len(texts)), with_mask=True)
    is_finite = logits.isfinite().all(dim=1).numpy()
    rows = [*np.flatnonzero(is_finite)[:2], np.flatnonzero(~is_finite)[0]]
    some = encoding.encode_texts([texts[row] for row in rows])
    warm_up = WarmUp(made._classifier, some, made._values, False, made._in_float32)
    made._loaded.model.set_attn_implementation(FLEX)  # its own texts overflow, so that it was left
    assert warm_up.tolerates_padding()
    assert not warm_up.pack(made._loaded.model, TOKENS, "float16", 500)
    expected = reference(folder, texts, 128, activation="none")
    check(predict(made, np.arange(len(texts))).values, expected, 2e-2)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        # Flex knows nothing of its sinks.
        ("gpt_oss", f"attn_implementation: {FLEX} gives other numbers than eager on the same texts"),
        ("bloom", f"attn_implementation: {FLEX} cannot be used, as BloomForSequenceClassification computes"),
        ("mpt", f"attn_implementation: {FLEX} cannot be used, as MptForSequenceClassification computes"),
        ("gptj", f"attn_implementation: {FLEX} cannot be used .*KeyError: '{FLEX}'"),
    ],
)
def test_a_model_with_attention_of_its_own_is_refused_by_name(
    name: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        member(tmp_path, make_odd(tmp_path / "a model", name), TEXTS[:9], max_length=120)


def test_rows_of_an_encoder_are_padded_and_that_is_told(tmp_path: Path) -> None:
    folder, texts = make_family(tmp_path / "a model", "bert", LABELS), make_texts(8)
    made = member(tmp_path, folder, texts, max_length=120)
    assert (
        f"sdpa attention instead of {FLEX}: this model, or its kind of labels or rows, cannot be packed"
        in made.ready.notes
    )
    expected = reference(folder, texts, 120, activation="none")
    check(predict(made, np.arange(len(texts))).values, expected)


def test_a_batch_too_small_for_the_warm_up_is_named(tmp_path: Path) -> None:
    made = member(tmp_path, family(tmp_path / "a model", "gemma2"), token_budget=300)
    (note,) = [note for note in made.ready.notes if f"instead of {FLEX}" in note]
    assert "a batch of 300 tokens has no room for the texts that it is tried on" in note


def make_odd(folder: Path, name: str) -> Path:
    if name in FAMILIES:
        return make_family(folder, name, LABELS)
    if name != "gpt_oss":
        return make_checkpoint(folder, name, LABELS)
    import torch
    from transformers import AutoModelForSequenceClassification, GptOssConfig

    tokenizer = make_tokenizer(folder)
    torch.manual_seed(0)
    config = GptOssConfig(
        **{"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "num_hidden_layers": 2},
        **{"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"head_dim": 16, "sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
        **{"initializer_range": 0.3, "id2label": dict(enumerate(LABELS)), "eos_token_id": 2},
    )
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder
