"""The tokenizer that lies in an adapter's folder, against plain transformers and peft one row at a time."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ensemble.common.digests import FileDigests
from ensemble.common.errors import CheckpointError
from ensemble.members.base import Assigned, OutputColumns
from ensemble.members.huggingface.loading.tokenizer import load_tokenizer
from ensemble.members.huggingface.spec import AdapterSource
from ensemble.members.seq_cls.parent import SequenceClassification, SequenceClassifierSettings
from tests.checkpoints import adapter_reference, label_reference, make_adapter, make_base, make_texts
from tests.members.causal_lm.test_causal_lm import SEVERAL, member, predict
from tests.members.huggingface.scoring.test_predict import LABELS, compute, worker_spec
from tests.pipeline.test_fingerprint import commit_to

pytest.importorskip("peft")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),  # peft on transformers 5
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`"),
]
TEXTS = [f"{text} [PART] {text[::-1]}" for text in make_texts(12, longest=20)]
ROWS = [{"text": text} for text in TEXTS]
SPARE = 8


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model whose embeddings have rows to spare."""
    from transformers import AutoModelForCausalLM

    folder = make_base(tmp_path_factory.mktemp("bases") / "llama", "llama")
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(model.config.vocab_size + SPARE)
    model.save_pretrained(folder)
    return folder


def add_tokenizer(folder: Path, base: Path, *tokens: str, **changes: Any) -> Any:
    """Save the base's tokenizer beside an adapter, with further tokens and settings, as peft's users do."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"additional_special_tokens": [*tokens]})
    for key, value in changes.items():
        setattr(tokenizer, key, value)
    tokenizer.save_pretrained(folder)
    return tokenizer


def plain(base: Path, adapter: Path, rows: int | None = None, task: str = "SequenceClassification") -> Any:
    """The base with its adapter as peft's users load it, with so many rows of embeddings."""
    import peft
    import transformers

    keys = {"num_labels": len(LABELS)} if task.startswith("Seq") else {}
    model = getattr(transformers, f"AutoModelFor{task}").from_pretrained(
        base, attn_implementation="eager", **keys
    )
    if rows is not None:
        model.resize_token_embeddings(rows)
    return peft.PeftModel.from_pretrained(model, str(adapter)).eval()


def expected(base: Path, adapter: Path, rows: int | None = None) -> npt.NDArray[np.float64]:
    import torch
    from transformers import AutoTokenizer

    model, tokenizer = plain(base, adapter, rows), AutoTokenizer.from_pretrained(adapter)
    with torch.no_grad():
        logits = [model(**tokenizer(text, return_tensors="pt")).logits[0] for text in TEXTS]
    return np.asarray(torch.stack(logits).softmax(-1).double().numpy())


def grown_adapter(folder: Path, base: Path, labels: int, **settings: Any) -> int:
    """Save an adapter over embeddings that were grown for a tokenizer's new tokens; return their rows."""
    import torch
    import transformers

    name = "AutoModelForSequenceClassification" if labels else "AutoModelForCausalLM"
    grown = folder.parent / f"{folder.name}-base"
    shutil.copytree(base, grown)
    tokenizer = add_tokenizer(grown, base, *(f"[PART{number}]" for number in range(SPARE)), "[PART]")
    model = getattr(transformers, name).from_pretrained(base, **({"num_labels": labels} if labels else {}))
    torch.manual_seed(1)
    model.resize_token_embeddings(len(tokenizer))
    model.get_input_embeddings().weight.data[-1].normal_()
    model.save_pretrained(grown)
    make_adapter(folder, grown, labels, **settings)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(base)}))
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def test_the_tokenizer_beside_an_adapter_is_used(base: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", base, 3)
    spec = worker_spec(base, adapter_name_or_path=str(adapter))
    without = compute(spec, ROWS)
    add_tokenizer(adapter, base, "[PART]")
    got = compute(spec, ROWS)
    np.testing.assert_allclose(got, expected(base, adapter), atol=1e-5)
    assert np.abs(got - without).max() > 0.05, "the token must matter"


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "embed_tokens"]},  # peft saves the embeddings beside their adapter
        {"target_modules": ["q_proj"], "modules_to_save": ["score", "embed_tokens"]},
    ],
    ids=["saved_whole", "modules_to_save"],
)
def test_an_adapter_over_grown_embeddings_gets_rows_for_them(
    settings: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    adapter = tmp_path / "adapter"
    rows = grown_adapter(adapter, base, 3, **settings)
    got = compute(worker_spec(base, adapter_name_or_path=str(adapter)), ROWS)
    np.testing.assert_allclose(got, expected(base, adapter, rows), atol=1e-5)


@pytest.mark.parametrize("is_grown", [False, True])
def test_a_language_model_is_read_with_its_adapters_tokenizer_and_chat_template(
    is_grown: bool, base: Path, tmp_path: Path
) -> None:
    adapter, rows = tmp_path / "adapter", None
    if is_grown:
        settings = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}
        rows = grown_adapter(adapter, base, 0, **settings)
    else:
        make_adapter(adapter, base, 0)
    chat = "{% for message in messages %}[PART]{{ message.content }}{% endfor %}[PART]"
    tokenizer = add_tokenizer(adapter, adapter if is_grown else base, "[PART]", chat_template=chat)
    keys: dict[str, Any] = {"adapter_name_or_path": str(adapter), "prompt_template": "{{ text }}"}
    made = member(tmp_path, base, TEXTS, label_tokens=SEVERAL, apply_chat_template=True, **keys)
    prompts = [f"[PART]{text}[PART]" for text in TEXTS]
    tokenizer.save_pretrained(tmp_path / "alone")
    model = plain(base, adapter, rows, "CausalLM")
    texts = [*SEVERAL.values()]
    reference, _ = label_reference(tmp_path / "alone", prompts, texts, add_special_tokens=False, model=model)
    np.testing.assert_allclose(predict(made, len(TEXTS)).values, reference, atol=1e-5)


def settings_of(base: Path, *adapters: Path | None, **keys: Any) -> Any:
    views = [
        {"name": f"v{number}"} | ({} if adapter is None else {"adapter_name_or_path": str(adapter)})
        for number, adapter in enumerate(adapters)
    ]
    member = {"name": "m", "model_name_or_path": str(base), "text_column": "text", "views": views, **keys}
    return SequenceClassification(SequenceClassifierSettings.model_validate(member))


def test_adapters_whose_tokenizers_make_other_tokens_of_a_text_are_refused(
    base: Path, tmp_path: Path
) -> None:
    first, second, third = (make_adapter(tmp_path / name, base, 3) for name in ("first", "second", "third"))
    add_tokenizer(first, base, "[PART]")
    add_tokenizer(second, base, "[PART]", pad_token="<eos>")  # of no text
    columns = OutputColumns("id", ("LABEL_0", "LABEL_1", "LABEL_2"), tmp_path)
    settings_of(base, first, second).inspect(columns)
    for other in (third, None):
        with pytest.raises(CheckpointError) as caught:
            settings_of(base, first, other).inspect(columns)
        assert f"the tokenizer of {base if other is None else third} makes other tokens" in str(caught.value)
    with pytest.raises(CheckpointError, match="makes other tokens"):
        settings_of(base, None, adapters={"average": [str(first), str(third)]}).inspect(columns)
    # The worker finds the same, where the parent could not ask.
    spec = worker_spec(base)
    sources = (AdapterSource((str(first),)), AdapterSource((str(third),)))
    with pytest.raises(ValueError, match="makes other tokens"):
        compute(replace(spec, job_adapters=sources, job_templates=(None, None)), ROWS)


def test_a_side_to_cut_on_in_the_config_holds_for_the_tokenizers_of_all_adapters(
    base: Path, tmp_path: Path
) -> None:
    left, right = (make_adapter(tmp_path / side, base, 3) for side in ("left", "right"))
    for adapter in (left, right):
        add_tokenizer(adapter, base, "[PART]")
        settings = json.loads((adapter / "tokenizer_config.json").read_text())
        settings["truncation_side"] = adapter.name
        (adapter / "tokenizer_config.json").write_text(json.dumps(settings))
    columns = OutputColumns("id", ("LABEL_0", "LABEL_1", "LABEL_2"), tmp_path)
    sources = (AdapterSource((str(left),)), AdapterSource((str(right),)))
    spec = replace(worker_spec(base), job_adapters=sources, job_templates=(None, None))
    with pytest.raises(CheckpointError, match="makes other tokens"):
        settings_of(base, left, right).inspect(columns)
    with pytest.raises(ValueError, match="makes other tokens"):
        load_tokenizer(spec)
    settings_of(base, left, right, truncation_side="left").inspect(columns)
    assert load_tokenizer(replace(spec, truncation_side="left")).truncation_side == "left"


@pytest.mark.parametrize("limit", [12, 90])
def test_rows_of_an_adapter_on_the_hub_are_cut_at_its_own_tokenizers_limit(
    limit: int, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    limited = Path(shutil.copytree(base, tmp_path / "limited"))
    add_tokenizer(limited, base, model_max_length=40)
    snapshot = commit_to(tmp_path / "cache", "people/adapter", "1" * 40, [])
    make_adapter(snapshot, limited, 3)
    add_tokenizer(snapshot, base, model_max_length=limit)
    kind = settings_of(limited, Path("people/adapter"))
    inspected = kind.inspect(OutputColumns("id", ("LABEL_0", "LABEL_1", "LABEL_2"), tmp_path))
    settings = kind.worker_settings(inspected, Assigned(gpus=0, dtype="float32", attention=None), None)
    rows = [{"text": text * 4} for text in TEXTS]
    spec = worker_spec(limited, adapter_name_or_path="people/adapter")
    got = compute(replace(spec, max_length=settings["max_length"]), rows)
    texts = [row["text"] for row in rows]
    np.testing.assert_allclose(got, adapter_reference(limited, snapshot, texts, 3, limit), atol=1e-5)
    assert np.abs(got - adapter_reference(limited, snapshot, texts, 3, 40)).max() > 1e-3


CODE = """from transformers import PreTrainedTokenizerFast


class Own(PreTrainedTokenizerFast):
    pass
"""


def test_a_tokenizer_with_code_of_its_own_is_loaded_where_that_is_allowed(base: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", base, 3)
    add_tokenizer(adapter, base, "[PART]")
    settings = json.loads((adapter / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "tokenization_own.Own"]}}
    (adapter / "tokenizer_config.json").write_text(json.dumps(settings))
    (adapter / "tokenization_own.py").write_text(CODE)
    columns = OutputColumns("id", ("LABEL_0", "LABEL_1", "LABEL_2"), tmp_path)
    with pytest.raises(CheckpointError, match="then set trust_remote_code: true"):
        settings_of(base, adapter).inspect(columns)
    allowed = settings_of(base, adapter, trust_remote_code=True)
    inspected = allowed.inspect(columns)
    job = SequenceClassification(allowed.settings.as_view(allowed.settings.views[0]))
    before = job.content(inspected, FileDigests(False))
    tokenizer = load_tokenizer(worker_spec(base, adapter_name_or_path=str(adapter), trust_remote_code=True))
    assert type(tokenizer).__name__ == "Own"
    (adapter / "tokenization_own.py").write_text(f"{CODE}\n# another one\n")
    assert job.content(inspected, FileDigests(False)) != before, "its code decides what it computes"
    settings["auto_map"] = {"AutoTokenizer": [None, "org/other--tokenization_own.Own"]}
    (adapter / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match="takes its code from another repository"):
        allowed.inspect(columns)


def test_the_tokenizer_beside_an_adapter_is_part_of_what_was_computed(base: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", base, 3)
    columns = OutputColumns("id", ("LABEL_0", "LABEL_1", "LABEL_2"), tmp_path)

    def digest() -> str:
        kind = settings_of(base, adapter)
        return str(kind.content(kind.inspect(columns), FileDigests(False))["tokenizer"])

    digests = [digest()]
    for token in ("[PART]", "[OTHER]"):
        add_tokenizer(adapter, base, token)
        digests.append(digest())
    assert len({*digests}) == 3
