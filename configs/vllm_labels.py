"""A member of configs/vllm.yaml: a chat model in vLLM, scored on one token for each label."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

from ensemble.members.python.child import Context


@dataclass
class Model:
    llm: LLM
    tokenizer: Any
    label_tokens: list[int]
    adapters: list[LoRARequest | None]


def setup(context: Context) -> Model:
    """Called once in each process, before the first rows; what it returns is context.state."""
    kwargs = context.kwargs
    adapters = kwargs.get("adapters", [])
    llm = LLM(
        model=kwargs["model"],
        tensor_parallel_size=max(1, context.gpus),
        seed=context.seed,
        enable_lora=bool(adapters),
        max_logprobs=len(context.labels),
        # After allowed_token_ids, so that all labels are there and nothing else is. vLLM's default is before it.
        logprobs_mode="processed_logprobs",
        **kwargs.get("engine", {}),
    )
    tokenizer = llm.get_tokenizer()
    label_tokens = []
    for label in context.labels:
        text = kwargs["label_tokens"][label]
        tokens = tokenizer.encode(text, add_special_tokens=False)
        if len(tokens) != 1 or tokens[0] in label_tokens:
            raise ValueError(
                f"label_tokens: {label}: {text!r} is not one token of its own; choose another text"
            )
        label_tokens += tokens
    requests = [LoRARequest(f"adapter{number}", number, path) for number, path in enumerate(adapters, 1)]
    return Model(llm, tokenizer, label_tokens, requests or [None])


def predict(frame: pd.DataFrame, context: Context) -> np.ndarray:
    """The probabilities of a frame of some rows, [rows, labels]; with several adapters, the mean over them."""
    model: Model = context.state
    prompts = [{"prompt_token_ids": prompt_tokens(row, context)} for row in frame.to_dict("records")]
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=1,
        allowed_token_ids=model.label_tokens,
        logprobs=len(model.label_tokens),
    )
    total = np.zeros((len(frame), len(model.label_tokens)))
    for adapter in model.adapters:
        outputs = model.llm.generate(prompts, sampling, use_tqdm=False, lora_request=adapter)
        first_tokens = [output.outputs[0].logprobs[0] for output in outputs]
        total += np.exp([[token[number].logprob for number in model.label_tokens] for token in first_tokens])
    return total / total.sum(axis=1, keepdims=True)


def prompt_tokens(row: dict[str, Any], context: Context) -> list[int]:
    tokenizer, limit = context.state.tokenizer, context.kwargs["max_cell_tokens"]
    cells = {}
    for name, cell in row.items():
        tokens = tokenizer.encode(str(cell), add_special_tokens=False)
        cells[name] = str(cell) if len(tokens) <= limit else tokenizer.decode(tokens[:limit])
    question = [{"role": "user", "content": context.kwargs["prompt"].format(**cells)}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)
