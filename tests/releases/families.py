"""A tiny checkpoint of every architecture family that the parity test goes through."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.checkpoints import make_tokenizer

_NUMBERS: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
_DECODER: dict[str, Any] = {**_NUMBERS, "num_key_value_heads": 2, "head_dim": 16}
_GPT2: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
_T5: dict[str, Any] = {
    **{"d_model": 64, "d_ff": 96, "d_kv": 16, "num_heads": 4, "num_layers": 2},
    "decoder_start_token_id": 0,
}
_BART: dict[str, Any] = {
    **{"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 256},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    **{"encoder_ffn_dim": 96, "decoder_ffn_dim": 96},
}
# What a cap far below the usual 50 changes shows in the first digit.
_CAPPED: dict[str, Any] = {**_DECODER, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 0.5}

# By model_type; a family that is listed twice has a suffix behind a colon.
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma": _DECODER,
    "gemma2": {**_CAPPED, "sliding_window": 16},
    "gemma2:default cap": {**_DECODER, "query_pre_attn_scalar": 16, "sliding_window": 16},
    "gemma3_text": {**_DECODER, "query_pre_attn_scalar": 16, "sliding_window": 16},
    "glm": {**_DECODER, "partial_rotary_factor": 0.5},
    "llama": _DECODER,
    "ministral": {**_DECODER, "sliding_window": 16},
    "mistral": {**_DECODER, "sliding_window": 16},
    "mixtral": {**_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": {**_DECODER, "sliding_window": 16},
    "qwen2": _DECODER,
    "qwen2_moe": {
        **_DECODER,
        "num_experts": 4,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3": _DECODER,
    "smollm3": _DECODER,
    "stablelm": _DECODER,
    "starcoder2": _DECODER,
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4},
    "falcon": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neo": {
        **{"hidden_size": 64, "num_layers": 2, "num_heads": 4, "intermediate_size": 96},
        **{"max_position_embeddings": 256, "attention_types": [[["global", "local"], 1]], "window_size": 16},
    },
    "gpt_neox": _NUMBERS,
    "gptj": {**_GPT2, "rotary_dim": 8},
    "mpt": {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 256},
    "opt": {**_NUMBERS, "ffn_dim": 96, "word_embed_proj_dim": 64},
    "persimmon": _NUMBERS,
    "phi": _NUMBERS,
    "xlnet": {"d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 96},
    "albert": {**_NUMBERS, "embedding_size": 32},
    "bert": _NUMBERS,
    "camembert": {**_NUMBERS, "type_vocab_size": 1},
    "deberta": {
        **{**_NUMBERS, "type_vocab_size": 0, "relative_attention": True, "position_biased_input": False},
        **{"pos_att_type": ["p2c", "c2p"], "max_relative_positions": 32},
    },
    "deberta-v2": {
        **{**_NUMBERS, "type_vocab_size": 0, "relative_attention": True, "position_biased_input": False},
        **{"pos_att_type": ["p2c", "c2p"], "position_buckets": 16, "norm_rel_ebd": "layer_norm"},
        "share_att_key": True,
    },
    "distilbert": {"dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 256},
    "electra": {**_NUMBERS, "embedding_size": 32},
    "ernie": _NUMBERS,
    "fnet": _NUMBERS,
    "megatron-bert": _NUMBERS,
    "modernbert": {
        **{**_NUMBERS, "local_attention": 16, "global_attn_every_n_layers": 2},
        **{"cls_token_id": 1, "sep_token_id": 2},
    },
    "mpnet": _NUMBERS,
    "rembert": {**_NUMBERS, "input_embedding_size": 32, "output_embedding_size": 32},
    "roberta": {**_NUMBERS, "type_vocab_size": 1},
    "xlm-roberta": {**_NUMBERS, "type_vocab_size": 1},
    "bart": _BART,
    "mbart": _BART,
    "t5": _T5,
    "umt5": _T5,
}
_ENCODERS = (
    "albert bert camembert deberta deberta-v2 distilbert electra ernie fnet megatron-bert modernbert mpnet rembert "
    "roberta xlm-roberta bart mbart t5 umt5"
).split()


def make_family(folder: Path, family: str, labels: Sequence[str], pad: str = "<pad>") -> Path:
    """Save a checkpoint of the family with a tokenizer; its random weights tell rows apart."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    model_type = family.partition(":")[0]
    kind = "encoder" if model_type in _ENCODERS else "decoder"
    tokenizer = make_tokenizer(folder, kind=kind, pad=pad)
    config = AutoConfig.for_model(
        model_type,
        **FAMILIES[family],
        # Some tokenizer classes add a token of their own, and real vocabularies have rows to spare.
        vocab_size=len(tokenizer) + 8,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=1,
        eos_token_id=4 if kind == "encoder" else 2,  # what ends a text: T5's and BART's heads look there
        id2label=dict(enumerate(labels)),
        label2id={label: index for index, label in enumerate(labels)},
        initializer_range=0.3,
    )
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():  # some families start with heads or biases of zero, which tell nothing apart
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2 or "norm" in name.lower() or ".ln_" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            elif parameter.std() < 0.1:
                parameter.normal_(std=0.25)
    model.save_pretrained(folder)
    return folder
