"""A sequence classifier of any size run without computing: what its forward pass allocates, by ``PeakTracker``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention
from torch.overrides import TorchFunctionMode

from ensemble.members.causal_lm.scoring import LabelScorer, LabelTexts
from ensemble.members.huggingface.loading.flex_attention import register_flex
from ensemble.members.huggingface.scoring.classifier import Classifier
from ensemble.members.huggingface.scoring.encode import Encoded
from ensemble.members.huggingface.scoring.forward import Shortcut
from ensemble.members.huggingface.spec import FLEX
from tests.planning.tracking.tracker import PeakTracker


class LikeCuda(TorchFunctionMode):
    """Fake tensors of a CPU take the CPU's way through two functions; here they allocate what CUDA's would.

    A softmax of half precision into float32 is one kernel there, without a copy of its input (aten's
    SoftMax.cpp, softmax with dtype).  Attention is the memory-efficient kernel, the one for masked rows
    (attention.cu, _scaled_dot_product_efficient_attention): the mask is cast to the queries' type and padded to
    a multiple of 16 wide (attention.cpp, pad_bias), and a value of more than 128 wide is summed up in float32.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func is torch.nn.functional.softmax and options.get("dtype") is not None:
            return torch.empty_like(args[0], dtype=options["dtype"])
        if func is torch.nn.functional.scaled_dot_product_attention:
            query, _, value = args
            return _efficient_attention(query, value, options.get("attn_mask"))
        return func(*args, **options)


def _efficient_attention(query: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    bias = None
    if mask is not None:
        bias = mask.to(query.dtype)
        if beyond := mask.shape[-1] % 16:
            bias = bias.new_empty((*mask.shape[:-1], mask.shape[-1] + 16 - beyond))
    batch, heads, tokens, _ = query.shape
    size = value.shape[-1]
    out = query.new_empty((batch, tokens, heads, size))
    if size > 128 and query.dtype != torch.float32:
        out.new_empty(out.shape, dtype=torch.float32)
    return out.transpose(1, 2)


def encoded(lengths: Sequence[int], token_types: bool = False) -> Encoded:
    """Rows of these lengths; the ids do not matter."""
    names = ["input_ids", *(["token_type_ids"] if token_types else [])]
    rows = {name: [np.ones(length, dtype=np.int64) for length in lengths] for name in names}
    return Encoded(rows, np.asarray(lengths, dtype=np.int64), 0)


def peak_bytes(
    classifier: Classifier, lengths: Sequence[int], packed_tokens: int = 0, with_mask: bool = False
) -> int:
    """The peak of a batch with rows of these lengths, beyond what the classifier holds already.

    Args:
        packed_tokens: of a batch in which the rows stand one behind the other; 0: it is padded.
    """
    if packed_tokens:
        classifier.taken |= {Shortcut.NO_MASK}
    classifier.packed_tokens = packed_tokens
    rows = encoded(lengths)
    # Caches that grow once, such as DeBERTa's compiled helpers.
    classifier.logits(rows, np.arange(1), with_mask)
    tracker = PeakTracker()
    with tracker:
        classifier.logits(rows, np.arange(len(lengths)), with_mask)
    return tracker.peak_bytes


@contextlib.contextmanager
def _fake_flex() -> Iterator[None]:
    """Let torch's flex_attention allocate what its compiled kernel does, without computing.

    No kernel runs on fake tensors, but torch has a rule of what they get (flex_attention_fake_impl in
    _higher_order_ops/flex_attention.py), which is what the kernel is given (the end of the forward's lowering in
    _inductor/kernel/flex/flex_attention.py): the result, as the queries are laid out, and two float32 numbers
    for each query and head.
    """
    assert not flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = (
        True  # without it, a backend of its own is compiled
    )
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = False


@contextlib.contextmanager
def fake_classifier(
    config: Any,
    dtype: torch.dtype,
    attention: str,
    like_cuda: bool = True,
    adapt: Callable[[Any], object] = lambda model: None,
    labels: int = 0,
) -> Iterator[Any]:
    """A classifier of fake tensors, and the model it runs; every batch counts as one with padding.

    transformers skips masks where it sees that nothing is padded; with fake tensors it cannot look.

    Args:
        adapt: changes the model before it runs, such as by adding LoRA to it.
        labels: of one token, which a language model scores; 0: a sequence classifier.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    register_flex()
    auto_class = AutoModelForCausalLM if labels else AutoModelForSequenceClassification
    with torch.device("meta"):
        model = auto_class.from_config(config, dtype=dtype, attn_implementation=attention)
        adapt(model)
        model = model.to(dtype).eval()
    model.config.use_cache = False  # as the worker loads it
    with contextlib.ExitStack() as stack:
        if attention == FLEX:
            stack.enter_context(_fake_flex())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        if like_cuda:
            stack.enter_context(LikeCuda())
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = torch.nn.Parameter(_fake(parameter), requires_grad=False)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = _fake(buffer)
        classifier = Classifier(model, 0)
        if labels:
            texts = LabelTexts([(token,) for token in range(labels)], [1.0] * labels)
            classifier = LabelScorer(model, 0, texts, labels, positions=1)
        classifier._searches_pad_token = False  # an id that no row holds cannot be looked for without ids
        yield classifier, model


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
