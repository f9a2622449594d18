"""Shortcuts through a model are taken where they change nothing, and only there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENS = {"vocab_size": 400, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_labels": 3}
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
BODY, MASKLESS = "LAST_TOKEN", "NO_MASK"
Config = Callable[[Any], Any]
# Their shortcuts, by what their code says: a forward of their own or not, whether attention says that it is causal.
CASES: dict[str, tuple[Config, set[str]]] = {
    "gpt2": (lambda t: t.GPT2Config(**GPT, **TOKENS), {BODY, MASKLESS}),
    "gptj": (lambda t: t.GPTJConfig(**GPT, rotary_dim=4, **TOKENS), {BODY, MASKLESS}),
    "opt": (
        lambda t: t.OPTConfig(**SMALL, ffn_dim=64, word_embed_proj_dim=16, **TOKENS),
        {BODY, MASKLESS},
    ),
    "falcon": (lambda t: t.FalconConfig(**SMALL, **TOKENS), {BODY, MASKLESS}),
    "falcon-alibi": (lambda t: t.FalconConfig(**SMALL, alibi=True, **TOKENS), {BODY, MASKLESS}),
    "bloom": (lambda t: t.BloomConfig(hidden_size=32, n_layer=2, n_head=4, **TOKENS), {BODY}),
    "llama": (
        lambda t: t.LlamaConfig(**SMALL, num_key_value_heads=2, **TOKENS),
        {BODY, MASKLESS},
    ),
    "llama-eager": (
        lambda t: t.LlamaConfig(**SMALL, **TOKENS, attn_implementation="eager"),
        {BODY, MASKLESS},
    ),
    "llama-both-ways": (
        lambda t: t.LlamaConfig(**SMALL, **TOKENS, is_causal=False, attn_implementation="eager"),
        {BODY},
    ),
    "gemma2": (
        lambda t: t.Gemma2Config(**SMALL, head_dim=8, num_key_value_heads=2, sliding_window=8, **TOKENS),
        {BODY, MASKLESS},
    ),
    "gemma3-both-ways": (
        lambda t: t.Gemma3TextConfig(
            **SMALL, head_dim=8, sliding_window=8, use_bidirectional_attention=True, **TOKENS
        ),
        {BODY},
    ),
    "qwen2": (
        lambda t: t.Qwen2Config(**SMALL, num_key_value_heads=2, **TOKENS),
        {BODY, MASKLESS},
    ),
    "mixtral": (
        lambda t: t.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4, **TOKENS),
        {BODY, MASKLESS},
    ),
    "bert": (lambda t: t.BertConfig(**SMALL, **TOKENS), set()),
    "xlnet": (lambda t: t.XLNetConfig(d_model=32, n_layer=2, n_head=4, d_inner=64, **TOKENS), set()),
}


def model_of(config: Any) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    config.use_cache = False
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.25)
    return model


def encoded_of(lengths: list[int], seed: int = 0) -> Any:
    from ensemble.members.huggingface.scoring.encode import Encoded

    chooser = np.random.default_rng(seed)
    ids = [chooser.integers(3, 400, length) for length in lengths]
    return Encoded({"input_ids": ids}, np.array(lengths), 0)


def softmax(logits: Any) -> Any:
    return logits.double().softmax(-1).numpy()


def warmed_up(model: Any) -> Any:
    from ensemble.members.huggingface.scoring.classifier import Classifier
    from ensemble.members.huggingface.scoring.warmup import WarmUp

    classifier = Classifier(model, 0)
    assert WarmUp(classifier, encoded_of([4, 14]), softmax, True).tolerates_padding()
    return classifier


def test_padding_takes_two_passes() -> None:
    """On a GPU each pass of a large model is a tenth of a second between two members."""
    import transformers

    model, passes = model_of(CASES["bert"][0](transformers)), []
    model.register_forward_hook(lambda *_: passes.append(1))
    warmed_up(model)
    assert len(passes) == 2


def looks_both_ways(model: Any) -> bool:
    """Whether a token's states depend on a later one."""
    import torch

    with torch.no_grad():
        item, other = (
            model.base_model(input_ids=torch.tensor([[5, 6, last]])).last_hidden_state[:, 0]
            for last in (7, 8)
        )
    return not torch.allclose(item, other)


def taken(classifier: Any) -> set[str]:
    return {shortcut.name for shortcut in classifier.taken}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")  # of missing kernels, where transformers falls back to plain torch
def test_every_shortcut_gives_what_the_model_itself_gives(name: str) -> None:
    import torch
    import transformers

    make, expected = CASES[name]
    config = make(transformers)
    if type(config) not in transformers.AutoModelForSequenceClassification._model_mapping:
        pytest.skip(f"transformers {transformers.__version__} has no classifier of this kind")
    model = model_of(config)
    encoded = encoded_of([1, 3, 9, 17, 33, 40, 40], seed=1)
    # One row at a time needs no padding.
    model.config.pad_token_id = model.config.get_text_config().pad_token_id = None
    with torch.no_grad():
        plain = [
            model(input_ids=torch.from_numpy(ids)[None]).logits[0] for ids in encoded.inputs["input_ids"]
        ]
    classifier = warmed_up(model)
    if name == "llama-both-ways" and not looks_both_ways(model):
        expected = {*expected, MASKLESS}  # as with transformers 5.0, which knows no such setting
    assert taken(classifier) == expected
    rows = np.array([4, 0, 6, 2, 5, 1, 3])
    got = classifier.logits(encoded, rows)
    np.testing.assert_allclose(got.numpy(), torch.stack(plain).numpy()[rows], rtol=1e-4, atol=2e-5)


def test_the_head_computes_nothing_but_the_last_tokens() -> None:
    import transformers

    model = model_of(CASES["llama"][0](transformers))
    classifier = warmed_up(model)
    computed: list[int] = []
    model.score.register_forward_hook(lambda _, inputs, __: computed.append(inputs[0][..., 0].numel()))
    classifier.logits(encoded_of([5, 9, 9]), np.arange(3))
    assert computed == [3]


def test_a_head_that_looks_at_other_tokens_runs_in_the_models_own_pass() -> None:
    import torch
    import transformers

    class Neighbours(torch.nn.Linear):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return super().forward(states + states.roll(1, dims=-2) if states.dim() > 2 else states)

    gpt2 = model_of(CASES["gpt2"][0](transformers))
    gpt2.score = Neighbours(32, 3)
    assert taken(warmed_up(gpt2)) == set()


def test_what_a_checkpoint_asks_for_besides_logits_is_not_computed(tmp_path: Any) -> None:
    import json

    import torch

    from ensemble.members.huggingface.loading.load import load
    from tests.checkpoints import make_checkpoint
    from tests.members.huggingface.scoring.test_predict import LABELS, worker_spec

    folder = make_checkpoint(tmp_path, "bert", LABELS)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "output_hidden_states": True, "use_cache": True})
    )
    loaded = load(worker_spec(folder))
    result = loaded.model(input_ids=torch.tensor([[3, 7, 4]]))
    assert result.hidden_states is None
    assert result.attentions is None
