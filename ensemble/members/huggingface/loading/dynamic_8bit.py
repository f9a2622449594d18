"""Compute products of linear layers in 8 bits: ``quant_method: dynamic_int8`` and ``dynamic_fp8``.

A weight is quantized as the checkpoint loads, with a scale for each output; a layer's inputs are quantized in each
pass, with a scale for each token. So no row depends on its neighbours, and no layer waits for the host, as both do
with bitsandbytes' int8. Tensor cores multiply int8 (``torch._int_mm``) or FP8 E4M3 (``torch._scaled_mm``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

from ensemble.members.huggingface.checkpoint.quantization_methods import DYNAMIC_INT8, DYNAMIC_METHODS
from ensemble.members.huggingface.memory.sizes import UNQUANTIZED

# The largest number of each type.
_LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# Products take sizes that are multiples of this, and _int_mm more than 16 tokens (torch,
# aten/src/ATen/native/cuda/Blas.cpp).
_MULTIPLE, _LEAST_TOKENS = 16, 32
# Products in int32 and inputs in float32 live for so many tokens at a time.
_TOKENS_PER_BLOCK = 1024


def register_dynamic_methods() -> None:
    """Make both methods known to transformers in this process."""
    for method in DYNAMIC_METHODS:
        if method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
            register_quantization_config(method)(DynamicConfig)
            register_quantizer(method)(DynamicQuantizer)


def quantize(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each row to numbers of a type, and return them with the rows' scales.

    Args:
        values: [rows, numbers].
        dtype: int8 or float8_e4m3fn.

    Returns:
        ``quantized``, [rows, numbers], and ``scales``, float32 [rows, 1]; their product is near ``values``.
    """
    limit = _LIMITS[dtype]
    numbers = values.float()
    scales = numbers.abs().amax(1, keepdim=True).clamp_(min=torch.finfo(torch.float16).tiny) / limit
    numbers = (numbers / scales).clamp_(-limit, limit)
    return (numbers.round_() if dtype is torch.int8 else numbers).to(dtype), scales


class DynamicLinear(nn.Module):
    """Compute a linear layer in 8 bits, once loading has put numbers of ``dtype`` into ``weight``."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        # Until loading has quantized it, it has the layer's own type: transformers 5.0 casts what it reads to the
        # type that it finds.
        self.weight = linear.weight
        scale = torch.empty(linear.out_features, 1, dtype=torch.float32, device=linear.weight.device)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = linear.bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.weight.dtype != self.dtype:  # the checkpoint lacks it, such as the weight of an unused pooler
            return functional.linear(hidden, self.weight, self.bias)
        tokens = hidden.reshape(-1, hidden.shape[-1])
        result = tokens.new_empty(len(tokens), len(self.weight))
        for start in range(0, len(tokens), _TOKENS_PER_BLOCK):
            block = slice(start, start + _TOKENS_PER_BLOCK)
            result[block] = self._product(tokens[block])
        if self.bias is not None:
            result += self.bias
        return result.view(*hidden.shape[:-1], -1)

    def _product(self, tokens: torch.Tensor) -> torch.Tensor:
        quantized, scales = quantize(tokens, self.dtype)
        if self.dtype is not torch.int8:
            return torch._scaled_mm(
                quantized,
                self.weight.T,
                scale_a=scales,
                scale_b=self.scale.T,
                out_dtype=torch.bfloat16,  # the only type that CUDA has for a scale per row
            )
        missing = max(0, _LEAST_TOKENS - len(tokens))
        sums = torch._int_mm(functional.pad(quantized, (0, 0, 0, missing)), self.weight.T)
        return sums[: len(tokens)] * scales * self.scale.T


class DynamicConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """Hold ``quantization_config``, as transformers wants it."""

    def __init__(self, quant_method: str) -> None:
        self.quant_method = quant_method


class DynamicQuantizer(HfQuantizer):  # type: ignore[misc]
    """Put :class:`DynamicLinear` into a model before its weights are loaded, and quantize them one by one."""

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        is_int8 = self.quantization_config.quant_method == DYNAMIC_INT8
        skipped = {*UNQUANTIZED, *(model._keep_in_fp32_modules or ())}
        count = 0
        for name, module in list(model.named_modules()):
            if type(module) is not nn.Linear or not skipped.isdisjoint(name.split(".")):
                continue
            if module.in_features % _MULTIPLE or module.out_features % _MULTIPLE:
                continue
            model.set_submodule(name, DynamicLinear(module, torch.int8 if is_int8 else torch.float8_e4m3fn))
            count += 1
        if not count:
            raise ValueError(
                f"quantization_config: {type(model).__name__} has no linear layers for "
                f"{self.quantization_config.quant_method}; drop it"
            )

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        owner, _, name = param_name.rpartition(".")
        return name == "weight" and isinstance(model.get_submodule(owner), DynamicLinear)

    def param_element_size(self, model: Any, param_name: str, param: torch.Tensor) -> float:
        return 1 if self.param_needs_quantization(model, param_name) else param.element_size()

    def get_quantize_ops(self) -> Any:
        return _Quantize()

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


class _Quantize(ConversionOps):  # type: ignore[misc]
    def convert(self, input_dict: dict[str, Any], model: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """Return a layer's ``weight`` and ``scale`` for the weight in the checkpoint, by their names."""
        tensors: dict[str, torch.Tensor] = {}
        for name, value in input_dict.items():
            owner = name.removesuffix(".weight")
            value = value[0] if isinstance(value, list) else value
            weight, scale = quantize(value, model.get_submodule(owner).dtype)
            tensors[name] = nn.Parameter(weight, requires_grad=False)
            tensors[f"{owner}.scale"] = nn.Parameter(scale, requires_grad=False)
        return tensors
