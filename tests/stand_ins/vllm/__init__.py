"""A stand-in for vLLM: the names, arguments and results that configs/vllm_labels.py uses, over plain transformers.

Signatures and rules are those of vLLM 0.10 to 0.32 (``vllm/entrypoints/llm.py``, ``sampling_params.py``,
``lora/request.py``, ``v1/sample/sampler.py``). An argument that vLLM has and this does not is an error here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm.lora.request import LoRARequest  # type: ignore[import-not-found]


@dataclass
class SamplingParams:
    temperature: float = 1.0
    max_tokens: int | None = 16
    logprobs: int | None = None
    allowed_token_ids: list[int] | None = None


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None


@dataclass
class RequestOutput:
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]


class LLM:
    def __init__(
        self,
        model: str,
        *,
        tensor_parallel_size: int = 1,
        seed: int = 0,
        gpu_memory_utilization: float = 0.9,
        max_model_len: int | None = None,
        max_logprobs: int = 20,
        logprobs_mode: str = "raw_logprobs",
        enable_lora: bool = False,
        max_lora_rank: int = 16,
    ) -> None:
        assert tensor_parallel_size >= 1
        assert 0 < gpu_memory_utilization <= 1
        assert logprobs_mode in ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
        self._folder, self._limits = model, (max_model_len, max_logprobs, max_lora_rank)
        self._is_processed, self._has_lora = logprobs_mode == "processed_logprobs", enable_lora
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._models: dict[int, Any] = {}

    def get_tokenizer(self) -> Any:
        return self._tokenizer

    def generate(
        self,
        prompts: Sequence[dict[str, list[int]]],
        sampling_params: SamplingParams,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> list[RequestOutput]:
        max_model_len, max_logprobs, _ = self._limits
        if lora_request is not None and not self._has_lora:
            raise ValueError(f"Got lora_request {lora_request} but LoRA is not enabled!")
        if (sampling_params.logprobs or 0) > max_logprobs:
            raise ValueError(
                f"Requested sample logprobs of {sampling_params.logprobs}, more than {max_logprobs}"
            )
        assert (sampling_params.temperature, sampling_params.max_tokens) == (0.0, 1)
        outputs = []
        for prompt in prompts:
            tokens = prompt["prompt_token_ids"]
            if max_model_len is not None and len(tokens) + 1 > max_model_len:
                raise ValueError(f"The prompt has {len(tokens)} tokens, more than {max_model_len}")
            with torch.no_grad():
                logits = self._model(lora_request)(torch.tensor([tokens])).logits[0, -1].float()
            raw = logits.log_softmax(-1)
            if sampling_params.allowed_token_ids is not None:
                is_forbidden = torch.ones_like(logits, dtype=torch.bool)
                is_forbidden[sampling_params.allowed_token_ids] = False
                logits = logits.masked_fill(is_forbidden, float("-inf"))
            scores = logits.log_softmax(-1) if self._is_processed else raw
            chosen = int(logits.argmax())
            shown = scores.topk(sampling_params.logprobs or 0).indices.tolist()
            logprobs = {token: Logprob(float(scores[token])) for token in (chosen, *shown)}
            outputs.append(RequestOutput(tokens, [CompletionOutput([chosen], [logprobs])]))
        return outputs

    def _model(self, lora_request: LoRARequest | None) -> Any:
        number = 0 if lora_request is None else lora_request.lora_int_id
        if number not in self._models:
            options = {"dtype": torch.float32, "attn_implementation": "eager"}
            model = AutoModelForCausalLM.from_pretrained(self._folder, **options)
            if lora_request is not None:
                import peft

                model = peft.PeftModel.from_pretrained(model, lora_request.lora_path)
                if model.peft_config["default"].r > self._limits[2]:
                    raise ValueError(f"LoRA rank is greater than max_lora_rank {self._limits[2]}")
            self._models[number] = model.eval()
        return self._models[number]
