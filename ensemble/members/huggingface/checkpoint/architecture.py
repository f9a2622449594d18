"""Read the numbers of an architecture from a ``config.json``, whatever their names in its family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ensemble.members.huggingface.checkpoint.quantization_keys import method_of, quantized_bits
from ensemble.members.huggingface.spec import is_soft_capped

_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_HEAD_DIM = ("head_dim", "d_kv", "attention_head_size")
_INTERMEDIATE = tuple(
    "intermediate_size n_inner ffn_dim hidden_dim d_ff encoder_ffn_dim ffn_hidden_size".split()
)
_POSITIONS = ("max_position_embeddings", "n_positions")

# transformers' defaults for numbers that a config.json leaves out (configuration_*.py of each family).
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 256, "num_key_value_heads": 16},
    "gemma2": {"head_dim": 256, "num_key_value_heads": 4, "sliding_window": 4096},
    "gemma3_text": {
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 262_208,
        "sliding_window": 4096,
    },
    "qwen3": {"head_dim": 128},
}
# Families whose MLP has no gate. A gated MLP takes more, so it is assumed for unknown families.
_PLAIN_MLP = (
    "albert bart bert big_bird bigcode bloom camembert codegen convbert ctrl data2vec-text deberta deberta-v2 "
    "distilbert electra ernie esm falcon fnet funnel gpt2 gpt_bigcode gpt_neo gpt_neox gptj layoutlm longformer "
    "mbart megatron-bert mpnet mpt nezha nystromformer openai-gpt opt persimmon phi plbart rembert roberta "
    "roberta-prelayernorm roformer squeezebert starcoder2 t5 umt5 mt5 xlm xlm-roberta xlm-roberta-xl "
    "xlnet xmod yoso"
).split()
# Families whose layers are known: the names of their tensors, and the memory of their MLP.
LOOKED_AT = (
    "bert camembert data2vec-text deberta deberta-v2 distilbert electra ernie falcon gemma gemma2 gemma3_text gpt2 "
    "llama ministral mistral olmo olmo2 opt phi3 qwen2 qwen3 roberta smollm3 xlm-roberta"
).split()
# Families that cannot take a row longer than their table of learnt positions.
_LEARNT_POSITIONS = (
    "albert bart bert big_bird biogpt camembert convbert data2vec-text deberta distilbert electra ernie gpt2 "
    "gpt_bigcode gpt_neo layoutlm longformer mbart megatron-bert mpnet nystromformer openai-gpt opt rembert "
    "roberta roberta-prelayernorm roformer squeezebert xlm xlm-roberta xlm-roberta-xl xmod"
).split()
# Families that count positions from the padding's id on, as RoBERTa does, and so lose pad_token_id + 1 positions.
_POSITIONS_AFTER_PADDING = (
    "camembert data2vec-text longformer mpnet roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl xmod"
).split()
# Gate and input of the MLP come out of one product, so that all of it lives until both are multiplied.
_FUSED_GATE = ("glm", "glm4", "modernbert", "phi3")
# Families whose layers all have the same window.
_ONE_MASK = ("ministral", "mistral", "mixtral", "phi3", "starcoder2")


@dataclass(frozen=True)
class Architecture:
    """Hold the numbers of a ``config.json`` that memory depends on.

    Attributes:
        max_positions: the longest row; None: positions are not learnt.
        soft_capping: whether attention scores go through tanh, as in Gemma-2.
        dtype: the stored type (float32, float16, bfloat16); None: not stored.
        quant_method, quant_bits, quantization: of a checkpoint that is stored quantized.
        masks: attention masks of a forward pass; two where only some layers have a window.
        fused_gate: whether the MLP's gate and input are one product.
        inner_copies: tensors of the intermediate size that live at the MLP's peak.
        relative_terms: how many of DeBERTa's c2p and p2c it has.
        position_buckets: half the size of DeBERTa's table of positions.
    """

    model_type: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int | None
    soft_capping: bool
    dtype: str | None
    quant_method: str | None
    quant_bits: int = 0
    quantization: Mapping[str, Any] | None = None
    masks: int = 1
    fused_gate: bool = False
    inner_copies: int = 3
    relative_terms: int = 0
    position_buckets: int = 0
    vocabulary: int = 0


def text_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the part that reads text: ``text_config`` takes precedence over the rest."""
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, Mapping) else dict(config)


def read_architecture(config: Mapping[str, Any]) -> Architecture | None:
    """Return the numbers of a ``config.json``; None where it does not have them."""
    text = text_settings(config)
    model_type = str(text.get("model_type") or "")
    text = {
        **_DEFAULTS.get(model_type, {}),
        **{key: value for key, value in text.items() if value is not None},
    }
    hidden, layers = _number(text, _HIDDEN), _number(text, LAYER_KEYS)
    vocabulary = _number(text, ("vocab_size",))
    if not (hidden and layers and vocabulary):
        return None
    heads = _number(text, _HEADS) or 1  # FNet mixes tokens without attention
    quantization = config.get("quantization_config")
    stored = quantization if isinstance(quantization, Mapping) and quantization else None
    gated = model_type not in _PLAIN_MLP or "gated" in str(text.get("feed_forward_proj", ""))
    # The tokens that some layers look back at.  Qwen2 stores a window that it does not use.
    window = _number(text, ("sliding_window", "local_attention"))
    has_window = window > 0 and text.get("use_sliding_window") is not False
    terms = text.get("pos_att_type") or ()
    terms = terms.split("|") if isinstance(terms, str) else terms
    dtype = str(text.get("dtype") or text.get("torch_dtype") or "").removeprefix("torch.")
    return Architecture(
        model_type=model_type,
        layers=layers,
        hidden=hidden,
        intermediate=_number(text, _INTERMEDIATE) or 4 * hidden,
        heads=heads,
        kv_heads=1 if text.get("multi_query") else _number(text, _KV_HEADS) or heads,
        head_dim=_number(text, _HEAD_DIM) or max(1, hidden // heads),
        max_positions=_max_positions(model_type, text),
        soft_capping=is_soft_capped(config),
        dtype=dtype or None,
        quant_method=method_of(stored),
        quant_bits=quantized_bits(stored),
        quantization=stored,
        masks=2 if has_window and model_type not in _ONE_MASK else 1,
        fused_gate=model_type in _FUSED_GATE,
        inner_copies=_inner_copies(model_type, text, gated),
        relative_terms=len({"c2p", "p2c"} & {str(term).strip().lower() for term in terms}),
        position_buckets=_number(text, ("position_buckets", "max_relative_positions", *_POSITIONS)),
        vocabulary=vocabulary,
    )


def _number(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    values = (config.get(name) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)


def _max_positions(model_type: str, config: Mapping[str, Any]) -> int | None:
    learnt = model_type in _LEARNT_POSITIONS or (
        model_type == "deberta-v2" and config.get("position_biased_input", True)
    )
    positions = _number(config, _POSITIONS)
    if not learnt or not positions or config.get("position_embedding_type", "absolute") != "absolute":
        return None
    if model_type in _POSITIONS_AFTER_PADDING:
        return positions - int(config.get("pad_token_id", 1)) - 1
    return positions


def _inner_copies(model_type: str, config: Mapping[str, Any], gated: bool) -> int:
    if model_type in _FUSED_GATE:
        return 4
    if model_type not in LOOKED_AT:
        # Bloom's gelu holds six, a mixture of experts four for each expert of a token.
        return max(6, 4 * (_number(config, ("num_experts_per_tok", "top_k_experts")) or 1))
    # gelu_new is written out in products and sums: x, x / 2, its cube and a multiple of that live at once.
    if "gelu_new" in (config.get("activation_function"), config.get("hidden_act")):
        return 4
    # The activated gate, the input and their product; without a gate the function's input and output.
    return 3 if gated else 2
