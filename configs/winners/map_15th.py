"""Scores MAP's test table with one LoRA classifier, as each of the six scripts of the 15th place did.

    python map_15th.py --base BASE --adapter ADAPTER --train train.csv --rows test.csv --out qwen3_14b.csv

Each row gets probabilities for the labels that train.csv has for its question, among those that begin with True_
where the student chose the right answer, and with False_ elsewhere. All other labels are impossible.
"""

import argparse

import pandas as pd
import torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BitsAndBytesConfig

BATCH_SIZE, MAX_LENGTH = 8, 250
PROMPT = """\
Question: {QuestionText}
Answer: {MC_Answer}
Correct?: {is_correct}
Explanation: {StudentExplanation}
"""

parser = argparse.ArgumentParser()
parser.add_argument("--base", required=True)
parser.add_argument("--adapter", required=True)
parser.add_argument("--four-bits", action="store_true")
parser.add_argument("--train", required=True)
parser.add_argument("--rows", required=True)
parser.add_argument("--out", required=True)
arguments = parser.parse_args()

# The texts NA and None are words here.
train, test = (
    pd.read_csv(path, dtype=str, keep_default_na=False) for path in (arguments.train, arguments.rows)
)
train["label"] = train["Category"] + ":" + train["Misconception"].replace("", "NA")
labels = sorted(train["label"].unique())
marked_right = train[train["label"].str.startswith("True")].groupby(["QuestionId", "MC_Answer"]).size()
right_answers = dict(marked_right.sort_values().index)  # of a question the one that was marked so most often
is_right = test["MC_Answer"] == test["QuestionId"].map(right_answers)
test["is_correct"] = is_right.map({True: "Yes", False: "No"})
seen = test["QuestionId"].map(train.groupby("QuestionId")["label"].agg(set))
possible = torch.tensor(
    [
        [label in of_question and label.startswith(f"{right}_") for label in labels]
        for of_question, right in zip(seen, is_right, strict=True)
    ]
)

tokenizer = AutoTokenizer.from_pretrained(arguments.base)
if tokenizer.pad_token is None:
    tokenizer.pad_token = tokenizer.eos_token
base = AutoModelForSequenceClassification.from_pretrained(
    arguments.base,
    num_labels=len(labels),
    pad_token_id=tokenizer.pad_token_id,
    dtype=torch.float16 if torch.cuda.is_available() else torch.float32,
    device_map="auto",
    quantization_config=BitsAndBytesConfig(load_in_4bit=True) if arguments.four_bits else None,
)
model = PeftModel.from_pretrained(base, arguments.adapter).eval()

probabilities = []
for start in range(0, len(test), BATCH_SIZE):
    rows = slice(start, start + BATCH_SIZE)
    texts = [PROMPT.format(**row) for row in test[rows].to_dict("records")]
    inputs = tokenizer(texts, padding=True, truncation=True, max_length=MAX_LENGTH, return_tensors="pt")
    with torch.inference_mode():
        logits = model(**inputs.to(base.device)).logits.double().cpu()
    probabilities += logits.masked_fill(~possible[rows], -torch.inf).softmax(dim=-1).tolist()
    print(f"{len(probabilities)} of {len(test)} rows", flush=True)
pd.DataFrame(probabilities, index=test["row_id"], columns=labels).to_csv(arguments.out)
