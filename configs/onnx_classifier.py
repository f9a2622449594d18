"""A member of configs/onnx.yaml: a classifier in ONNX Runtime, without torch; see scripts/export_onnx.py."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
import pandas as pd
from tokenizers import Tokenizer

from ensemble.members.python.child import Context


@dataclass
class Classifier:
    session: onnxruntime.InferenceSession
    tokenizer: Tokenizer
    labels: list[str]


def setup(context: Context) -> Classifier:
    """Called once in each process, before the first rows; what it returns is context.state."""
    checkpoint = Path(context.kwargs["checkpoint"])
    config = json.loads((checkpoint / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    tokenizer.enable_truncation(context.kwargs["max_length"])
    tokenizer.enable_padding(direction="right", pad_id=config["pad_token_id"])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = context.cpu_threads or 0  # 0: all
    provider = "CUDAExecutionProvider" if context.gpus else "CPUExecutionProvider"
    session = onnxruntime.InferenceSession(context.kwargs["model"], options, providers=[provider])
    return Classifier(session, tokenizer, list(config["id2label"].values()))


def predict(frame: pd.DataFrame, context: Context) -> pd.DataFrame:
    """The probabilities of a frame of some rows, whose index are the ids."""
    model: Classifier = context.state
    encoded = model.tokenizer.encode_batch(frame["gloss"].tolist())
    inputs = {
        "input_ids": np.array([row.ids for row in encoded], dtype=np.int64),
        "attention_mask": np.array([row.attention_mask for row in encoded], dtype=np.int64),
    }
    (probabilities,) = model.session.run(["probabilities"], inputs)
    return pd.DataFrame(probabilities, index=frame.index, columns=model.labels)
