"""The last-token layer: a decoder's last layer computes each row's last token alone.  The head sees nothing else.

Keys and values are needed of every token; queries, the projection after attention and the feed-forward are not.  In
a model of four layers that is a fifth of the work, in one of 42 a fiftieth.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

# Of a layer, what works on one position at a time, as the decoders of transformers that look like Llama name it.
_PARTS = ("self_attn.q_proj", "self_attn.o_proj", "mlp")


def last_token_parts(model: Any) -> list[nn.Module]:
    """Parts of a model's last layer that can compute single positions: [rows, tokens, numbers] -> the same."""
    layers = getattr(getattr(model, model.base_model_prefix, None), "layers", None)
    if not isinstance(layers, nn.ModuleList) or getattr(model, "hf_quantizer", None) is not None:
        return []
    known = dict(layers[-1].named_modules())
    return [known[name] for name in _PARTS if name in known and _is_linear(known[name])]


def _is_linear(part: nn.Module) -> bool:
    """Whether all its weights belong to linear layers, which know nothing of positions."""
    owners = [module for module in part.modules() if next(module.parameters(recurse=False), None) is not None]
    return bool(owners) and all(isinstance(module, nn.Linear) for module in owners)


@contextlib.contextmanager
def last_token_only(parts: list[nn.Module], last: torch.Tensor) -> Iterator[None]:
    """While this lasts, parts compute the positions ``last``, int64 [rows], whose outcome stands in all positions.

    What the other positions hold afterwards is of no use, and nobody uses it.
    """
    tokens = 0

    def take(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        nonlocal tokens
        states, *others = inputs
        tokens = states.shape[1]
        rows = torch.arange(len(states), device=states.device)
        return (states[rows, last.to(states.device)][:, None], *others)

    def give(_: nn.Module, __: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return output.expand(-1, tokens, -1)

    with contextlib.ExitStack() as hooks:
        for part in parts:
            hooks.callback(part.register_forward_pre_hook(take).remove)
            hooks.callback(part.register_forward_hook(give).remove)
        yield
