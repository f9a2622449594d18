"""Predicted memory against what real models hold and allocate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch.nn.attention import flex_attention

from ensemble.members.footprint import Activation
from ensemble.members.huggingface.checkpoint.adapter_files import widest_lora
from ensemble.members.huggingface.checkpoint.facts import Architecture
from ensemble.members.huggingface.checkpoint.weight_files import Tensor, read_tensors
from ensemble.members.huggingface.loading.architecture import read_architecture
from ensemble.members.huggingface.loading.capped_attention import register_capped_blocks
from ensemble.members.huggingface.loading.model import quantization_config
from ensemble.members.huggingface.memory import Dtype, activation, weights
from ensemble.members.huggingface.scoring.classifier import Classifier
from tests.checkpoints import architecture_of, facts_of, make_checkpoint
from tests.planning.tracking.measure import fake_classifier, peak_bytes
from tests.sampling import one_in

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "float32"}
DOUBLE = {**NF4, "bnb_4bit_use_double_quant": True}
INT8 = {"load_in_8bit": True}


def decoder(**sizes: int) -> dict[str, int]:
    """Real widths, few layers: a layer's memory is freed before the next one runs."""
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    given = dict(zip(names, (sizes.pop(key) for key in ("hidden", "inner", "heads", "kv")), strict=True))
    return {**given, "num_hidden_layers": 2, "vocab_size": 32_000, "pad_token_id": 0, **sizes}


ENCODER = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
}
# The widths of Gemma-2-9B, Llama-3-8B, Qwen3-0.6B, Phi-3-mini, Gemma-3-270M, GPT-2 XL, and of the large encoders.
FAMILIES: dict[str, Callable[[], Any]] = {
    "gemma2": lambda: transformers.Gemma2Config(
        **decoder(hidden=3584, inner=14336, heads=16, kv=8, head_dim=256)
    ),
    "llama": lambda: transformers.LlamaConfig(**decoder(hidden=4096, inner=14336, heads=32, kv=8)),
    "qwen3": lambda: transformers.Qwen3Config(
        **decoder(hidden=1024, inner=3072, heads=16, kv=8, head_dim=128)
    ),
    "phi3": lambda: transformers.Phi3Config(
        **decoder(hidden=3072, inner=8192, heads=32, kv=32, bos_token_id=1, eos_token_id=2)
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **{**decoder(hidden=640, inner=2048, heads=4, kv=1, head_dim=256), "num_hidden_layers": 6},
        sliding_window=512,
    ),
    "gpt2": lambda: transformers.GPT2Config(n_embd=1600, n_layer=2, n_head=25, pad_token_id=0),
    "bert": lambda: transformers.BertConfig(**ENCODER),
    "modernbert": lambda: transformers.ModernBertConfig(**{**ENCODER, "intermediate_size": 2624}),
    "deberta-v2": lambda: transformers.DebertaV2Config(
        **{**ENCODER, "num_hidden_layers": 6},
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_biased_input=False,
        type_vocab_size=0,
        position_buckets=256,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
    ),
    "bloom": lambda: transformers.BloomConfig(
        hidden_size=1024, n_layer=2, n_head=16, vocab_size=32_000, pad_token_id=0
    ),
    "mixtral": lambda: transformers.MixtralConfig(**decoder(hidden=1024, inner=3584, heads=16, kv=4)),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "attention"),
    one_in(
        3,
        [
            ("gemma2", "eager"),
            ("gemma2", "capped_blocks"),
            ("llama", "sdpa"),
            ("llama", "eager"),
            ("qwen3", "sdpa"),
            ("phi3", "sdpa"),
            ("gemma3", "sdpa"),
            ("gpt2", "sdpa"),
            ("bert", "sdpa"),
            ("modernbert", "sdpa"),
            ("deberta-v2", "eager"),
        ],
    ),
)
def test_the_activation_of_real_widths_on_a_gpu(family: str, attention: str) -> None:
    config = FAMILIES[family]()
    register_capped_blocks()
    architecture = architecture_of(config)
    with fake_classifier(config, torch.bfloat16, attention) as (classifier, _):
        for rows, width in ((32, 24), (4, 500)):
            predicted = activation(architecture, "bfloat16", attention, 2, None, width)
            measured = peak_bytes(classifier, [width] * rows)
            assert 0.95 < predicted.bytes(rows * width, width) / measured < 1.7, (rows, width)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "labels", "targets"),
    [
        ("gemma2", 0, []),
        ("gemma2", 3, []),
        ("gemma3", 0, []),
        ("gemma3", 0, ["gate_proj", "up_proj"]),
        ("llama", 0, ["gate_proj", "up_proj"]),
    ],
)
@pytest.mark.skipif(not hasattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"), reason="torch 2.6")
@pytest.mark.filterwarnings("default")  # torch's compiler is warned of what it calls itself
def test_rows_one_behind_the_other(family: str, labels: int, targets: list[str]) -> None:
    config = FAMILIES[family]()
    lora = (config.intermediate_size, 64) if targets else (0, 0)

    def adapt(model: Any) -> None:
        if targets:
            peft = pytest.importorskip("peft")
            peft.inject_adapter_in_model(peft.LoraConfig(r=64, target_modules=targets), model)

    positions = int(labels > 0)
    with fake_classifier(config, torch.bfloat16, "flex", adapt=adapt, labels=labels) as (classifier, _):
        for tokens, width in ((4096, 512), (16384, 2048)):
            predicted = activation(
                architecture_of(config), "bfloat16", "flex", 2, None, width, lora, positions
            ).bytes(tokens, width)
            measured = peak_bytes(classifier, [width] * (tokens // width), packed_tokens=tokens)
            assert 1 <= predicted / measured < 1.12, (tokens, width, predicted / measured)


@pytest.mark.parametrize(
    ("family", "targets"),
    one_in(
        2,
        [
            ("llama", ["q_proj", "v_proj"]),
            ("llama", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
            ("phi3", ["qkv_proj", "gate_up_proj"]),
            ("gemma2", ["gate_proj", "up_proj"]),
            ("bert", ["query", "dense"]),
        ],
    ),
)
def test_lora_beside_the_layers(family: str, targets: list[str], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = FAMILIES[family]()
    attention = "eager" if family == "gemma2" else "sdpa"

    def adapt(model: Any) -> None:
        peft.inject_adapter_in_model(peft.LoraConfig(r=64, target_modules=targets), model)

    with fake_classifier(config, torch.bfloat16, attention, adapt=adapt) as (classifier, model):
        shapes = {
            name: tuple(named_parameter.shape)
            for name, named_parameter in model.named_parameters()
            if ".lora_" in name
        }
        measured = peak_bytes(classifier, [500] * 4)
    tensors = {name.replace(".default", ""): torch.empty(shape) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    predicted, plain = (
        activation(
            architecture_of(config),
            "bfloat16",
            attention,
            2,
            None,
            500,
            lora,
        ).bytes(2000, 500)
        for lora in (widest_lora(tmp_path), (0, 0))
    )
    assert 0.97 < predicted / measured < 1.7, (predicted, plain, measured)
    if "gate_proj" in targets:
        assert plain < predicted


@pytest.mark.parametrize(
    "family",
    [
        "bert",
        "bloom",
        pytest.param(
            "mixtral",
            marks=pytest.mark.skipif(
                not hasattr(torch, "_grouped_mm"), reason="its loop over experts cannot run on fake tensors"
            ),
        ),
    ],
)
def test_an_unusual_model_is_never_thought_too_small(family: str) -> None:
    config = FAMILIES[family]()
    attention = "sdpa" if family == "mixtral" else "eager"
    predicted = activation(architecture_of(config), "bfloat16", attention, 2, None, 500)
    with fake_classifier(config, torch.bfloat16, attention) as (classifier, _):
        for rows, width in ((32, 24), (4, 500)):
            measured = peak_bytes(classifier, [width] * rows)
            assert measured <= predicted.bytes(rows * width, width) * 1.005 < 3 * measured, (rows, width)


SMALL = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "num_hidden_layers": 3}
SMALL_CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SMALL, num_key_value_heads=2, vocab_size=200, pad_token_id=0),
    "gemma2": lambda: transformers.Gemma2Config(
        **SMALL, num_key_value_heads=2, head_dim=32, vocab_size=200, pad_token_id=0
    ),
    "bert": lambda: transformers.BertConfig(**SMALL, vocab_size=200),
    "gpt2": lambda: transformers.GPT2Config(n_embd=128, n_layer=3, n_head=4, vocab_size=200, pad_token_id=0),
}


@pytest.mark.parametrize("lengths", [[96, 90, 60, 40, 7, 3], [300, 290, 280]])
@pytest.mark.parametrize(
    ("family", "attention"),
    [("llama", "sdpa"), ("gemma2", "eager"), ("gemma2", "capped_blocks"), ("bert", "sdpa"), ("gpt2", "sdpa")],
)
def test_the_activation_of_models_that_really_run(family: str, attention: str, lengths: list[int]) -> None:
    config = SMALL_CONFIGS[family]()
    register_capped_blocks()
    model = transformers.AutoModelForSequenceClassification.from_config(config, attn_implementation=attention)
    model.config.use_cache = False
    measured = peak_bytes(Classifier(model.eval(), 0), lengths)
    width = max(lengths)
    predicted = activation(architecture_of(config), "float32", attention, 2, None, width)
    assert 0.8 < predicted.bytes(len(lengths) * width, width) / measured < 2


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    names = ("gemma2", "gpt2", "roberta", "deberta-v2")
    return {name: make_checkpoint(root / name, name, ["a", "b", "c"]) for name in names}


def load(folder: Path, dtype: Dtype, quantization: dict[str, Any] | None) -> Any:
    options: dict[str, Any] = {"dtype": getattr(torch, dtype)}
    if quantization is not None:
        options["quantization_config"] = quantization_config(quantization)
        options["device_map"] = {"": "cpu"}
    return transformers.AutoModelForSequenceClassification.from_pretrained(folder, **options)


def held_bytes(model: Any) -> int:
    """Parameters, and what bitsandbytes keeps beside them."""
    total = 0
    for parameter in model.parameters():
        total += parameter.nbytes
        if (state := getattr(parameter, "quant_state", None)) is not None:
            total += state.absmax.nbytes + state.code.nbytes
            if state.nested:
                total += state.offset.nbytes + state.state2.absmax.nbytes + state.state2.code.nbytes
        if (scales := getattr(parameter, "SCB", None)) is not None:
            total += scales.nbytes
    return total


def read(folder: Path) -> tuple[tuple[Tensor, ...], Architecture]:
    tensors = read_tensors(folder)
    architecture = facts_of(folder).architecture
    assert tensors is not None
    assert architecture is not None
    return tensors, architecture


@pytest.mark.filterwarnings("ignore")  # bitsandbytes' own
@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [("float32", None), ("bfloat16", None), ("bfloat16", NF4), ("bfloat16", DOUBLE), ("float16", INT8)],
)
@pytest.mark.parametrize("family", one_in(2, ["gemma2", "gpt2", "roberta", "deberta-v2"]))
def test_weights_as_they_are_loaded(
    checkpoints: dict[str, Path],
    family: str,
    dtype: Dtype,
    quantization: dict[str, Any] | None,
    tmp_path: Path,
) -> None:
    if quantization:
        pytest.importorskip("bitsandbytes")
    tensors, architecture = read(checkpoints[family])
    model = load(checkpoints[family], dtype, quantization)
    predicted = weights(tensors, architecture, dtype, quantization, 3)
    plain = transformers.AutoModelForSequenceClassification.from_config(model.config)
    assert predicted.parameters == sum(parameter.numel() for parameter in plain.parameters())
    assert predicted.bytes == pytest.approx(held_bytes(model), rel=0.02)
    embeddings = [module.weight for module in plain.modules() if isinstance(module, torch.nn.Embedding)]
    assert predicted.embedding_parameters == sum(weight.numel() for weight in embeddings) > 0
    if quantization:  # and the same once it has been stored that way
        model.save_pretrained(tmp_path)
        stored_tensors, stored_architecture = read(tmp_path)
        stored = weights(stored_tensors, stored_architecture, dtype, None, 3)
        assert stored.parameters == predicted.parameters
        assert stored.bytes == pytest.approx(held_bytes(load(tmp_path, dtype, None)), rel=0.02)


def test_a_causal_checkpoint_leaves_its_head_and_gets_another(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2, vocab_size=1000, num_labels=5)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    tensors, architecture = read(tmp_path)
    plain = transformers.AutoModelForSequenceClassification.from_config(config)
    predicted = weights(tensors, architecture, "float16", None, 5)
    assert predicted.parameters == sum(parameter.numel() for parameter in plain.parameters())
    layer = sum(parameter.numel() for parameter in plain.model.layers[0].parameters())
    assert predicted.largest_layer_bytes == 2 * max(layer, 1000 * 128)
    with_adapter = weights(tensors, architecture, "float16", None, 5, is_adapter_base=True)
    assert with_adapter.bytes == predicted.bytes


def test_what_only_looks_like_an_embedding_is_multiplied() -> None:
    """As ELECTRA and ALBERT project theirs, and some name the whole model after them."""
    names = {
        "electra.embeddings.word_embeddings.weight": 1000,
        "transformer.wte.weight": 1000,
        "gpt_neox.embed_in.weight": 1000,
        "shared.weight": 1000,
        "electra.embeddings_project.weight": 0,
        "albert.encoder.embedding_hidden_mapping_in.weight": 0,
        "embedding_model.layers.0.mlp.up_proj.weight": 0,
        "score.weight": 0,
    }
    config = {"model_type": "llama", "hidden_size": 10, "num_hidden_layers": 1, "vocab_size": 100}
    architecture = read_architecture(config, config)
    assert architecture is not None
    tensors = [Tensor(name, "F32", (100, 10)) for name in names]
    result = weights(
        [*tensors, Tensor("patch.embedding.weight", "F32", (10, 3, 4, 4))], architecture, "float32", None, 2
    )
    assert result.embedding_parameters == sum(names.values())


def test_a_checkpoint_of_gptq_keeps_its_bytes_and_unpacks_its_parameters() -> None:
    # A layer [in 256, out 128] in 4 bits and groups of 128, as AutoGPTQ stores it.
    tensors = [
        Tensor("model.layers.0.q.qweight", "I32", (32, 128)),
        Tensor("model.layers.0.q.qzeros", "I32", (2, 16)),
        Tensor("model.layers.0.q.scales", "F16", (2, 128)),
        Tensor("model.layers.0.q.g_idx", "I32", (256,)),
        Tensor("score.weight", "F16", (2, 256)),
    ]
    config = {
        **{"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 1, "vocab_size": 10},
        "quantization_config": {"quant_method": "gptq", "bits": 4},
    }
    architecture = read_architecture(config, config)
    assert architecture is not None
    predicted = weights(tensors, architecture, "float16", None, 2)
    assert predicted.parameters == 256 * 128 + 2 * 256
    assert predicted.bytes == sum(tensor.stored_bytes for tensor in tensors)


def test_bitsandbytes_makes_the_largest_weight_anew() -> None:
    architecture = architecture_of(FAMILIES["llama"]())
    plain = activation(architecture, "float16", "sdpa", 2, None, 500)
    packed = activation(architecture, "float16", "sdpa", 2, {**NF4, "bnb_4bit_compute_dtype": "float16"}, 500)
    assert packed == replace(plain, fixed_bytes=2 * 4096 * 14336)


def test_a_batch_that_fits_fits_and_one_token_more_does_not() -> None:
    needed = Activation(1000.0, 10.0, 3000.0, 5_000)
    for width in (8, 75, 900):
        tokens = needed.max_tokens(10_000_000, width)
        assert needed.bytes(tokens, width) <= 10_000_000 < needed.bytes(tokens + 1, width)
    assert needed.max_tokens(4_000, 10) == 0


def test_numbers_go_by_different_names_in_different_families() -> None:
    gpt2 = architecture_of(transformers.GPT2Config(n_embd=64, n_layer=3, n_head=4, n_positions=77))
    assert (gpt2.hidden, gpt2.layers, gpt2.heads, gpt2.max_positions) == (64, 3, 4, 77)
    assert gpt2.mlp_width == 4 * 256  # its activation is written out
    distilbert = architecture_of(transformers.DistilBertConfig(dim=96, n_layers=2, n_heads=3, hidden_dim=100))
    assert (distilbert.hidden, distilbert.head_dim, distilbert.mlp_width) == (96, 32, 200)
    # RoBERTa counts its positions from its padding's id on.
    assert architecture_of(transformers.RobertaConfig(max_position_embeddings=514)).max_positions == 512
    opt = transformers.OPTConfig(max_position_embeddings=64, num_hidden_layers=1)
    assert architecture_of(opt).max_positions == 64
    assert architecture_of(transformers.LlamaConfig(num_hidden_layers=2)).max_positions is None
    assert read_architecture({}, {"model_type": "resnet", "hidden_sizes": [768]}) is None


def test_a_sparse_nested_config_has_its_familys_numbers() -> None:
    # As google/gemma-3-4b-it stores it; the rest are the defaults of transformers' configuration.
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
    }
    expected = transformers.Gemma3TextConfig(**text)
    numbers = architecture_of(transformers.Gemma3Config(text_config=text, dtype="bfloat16"))
    assert (numbers.heads, numbers.kv_heads, numbers.head_dim) == (
        expected.num_attention_heads,
        expected.num_key_value_heads,
        expected.head_dim,
    )
    assert (numbers.dtype, numbers.masks) == ("bfloat16", 2)


def test_what_nobody_has_described_is_taken_from_its_own_file() -> None:
    stored = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    numbers = read_architecture({"quantization_config": {"quant_method": "gptq", "bits": 4}}, stored)
    assert numbers is not None
    assert (numbers.mlp_width, numbers.kv_heads, numbers.head_dim) == (288, 4, 16)
    assert (numbers.supports_sdpa, numbers.max_positions) == (None, None)


@pytest.mark.parametrize(("kind", "has_it"), [("bert", True), ("llama", True), ("xlnet", False)])
def test_fused_attention_where_transformers_has_it(kind: str, has_it: bool) -> None:
    config = transformers.AutoConfig.for_model(kind, num_hidden_layers=1, n_layer=1)
    assert architecture_of(config).supports_sdpa is has_it
