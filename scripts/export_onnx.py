#!/usr/bin/env python3
"""Export a sequence classifier to ONNX, for configs/onnx.yaml.

    pip install onnx onnxruntime
    python scripts/export_onnx.py demo/models/gemma2 runs/gemma2.onnx

The file takes token ids and attention mask, int64 [rows, tokens], padded on the right, and gives probabilities,
float32 [rows, labels], in the checkpoint's order of labels.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description="Export a sequence classifier to ONNX.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    # The exporter and the tracer warn of what holds here: the file is compared with the model below.
    warnings.simplefilter("ignore")
    import onnxruntime
    import torch
    from transformers import AutoModelForSequenceClassification

    class Probabilities(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = AutoModelForSequenceClassification.from_pretrained(
                options.checkpoint, dtype=torch.float32, attn_implementation="eager"
            )

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            found = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
            logits: torch.Tensor = found.logits
            return logits.softmax(-1)

    model = Probabilities().eval()
    pad = model.model.config.pad_token_id
    if pad is None:
        sys.exit(
            f"{options.checkpoint}: its config.json has no pad_token_id, by which rows of a batch are pooled"
        )

    def rows(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.full((len(lengths), max(lengths)), pad)
        for row, length in enumerate(lengths):
            ids[row, :length] = 5 + row + torch.arange(length)
        return ids, (ids != pad).long()

    options.output.parent.mkdir(parents=True, exist_ok=True)
    names, axes = ["input_ids", "attention_mask"], {0: "rows", 1: "tokens"}
    partial = options.output.with_name(f"{options.output.name}.partial")
    with torch.no_grad():
        torch.onnx.export(
            model,
            rows(3, 7),
            str(partial),
            input_names=names,
            output_names=["probabilities"],
            dynamic_axes={**dict.fromkeys(names, axes), "probabilities": {0: "rows"}},
            opset_version=17,
            dynamo=False,  # the newer exporter needs another package
        )
        session = onnxruntime.InferenceSession(str(partial), providers=["CPUExecutionProvider"])
        given = rows(40, 1, 12)
        (found,) = session.run(None, {name: one.numpy() for name, one in zip(names, given, strict=True)})
        off = float((model(*given) - torch.from_numpy(found)).abs().max())
    if off > 1e-5:
        sys.exit(f"the exported model differs by {off:.1e} from the one in PyTorch")
    partial.replace(options.output)
    print(f"{options.output}: differs by at most {off:.1e} from the one in PyTorch")


if __name__ == "__main__":
    main()
