"""Configs that nobody should write: strategies for YAML text, for values, and for changes to a good config."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any, Final

import yaml
from hypothesis import strategies as st

Steps = tuple[str | int, ...]

# What YAML gives a meaning to, what our keys are, and what has broken one reader or another.
PIECES: Final = [
    *(": ", ":", "- ", "-", "? ", ", ", "\n", "\n  ", "\n    ", "\r\n", "\t", " ", "{", "}", "["),
    *("]", "&a ", "*a", "<<: ", "<<: *a", "!!python/object/apply:os.system [id]"),
    *("!!python/name:os.system", "!!binary ", "!!set ", "!!int ", "!!float ", "!!null ", "!!merge "),
    *("!x ", "! ", "!<tag:x> ", "!!map ", '"', "'", "\\", '"\\ud800"', "\\ud83d\\ude00", "\\0"),
    *("\\U00110000", "\\xe9", "|", "|+9", ">-", "%TAG", "%YAML 9.9\n", "---\n", "...\n", "#", " #"),
    *("@", "`", "~", "null", "true", "yes", "0x", "0o9", "1_0", "1e999", "-1e-999", "9" * 101),
    *("9" * 5000, ".nan", ".inf", "-.INF", "1:30", "2024-01-31", "=", "<<", "0", "-0", "\x00"),
    *("\x07", "\x7f", "\x85", "\u2028", "\ufeff", "\ufffe", "\ue000", "é", "\U0001f600", "${X}"),
    *("${NO}", "${", "$${", "${X", "a", "b", "a.b", "a b", "", "id", "name", "models", "labels"),
    *("data", "path", "defaults", "weight", "limit", "model_name_or_path", "text_column"),
    "output_dir",
]
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=20).map("".join)
words = st.text(max_size=8) | st.sampled_from(PIECES)
# Numbers at the ends of what their types hold, and text that is nearly what some key takes.
AWKWARD: Final[list[Any]] = [
    *(None, True, False, 0, 1, -1, 2**31, 2**32, 2**63 - 1, 2**63, 10**99, -(10**99), 0.5, -0.0),
    *(1e308, 5e-324, float("nan"), float("inf"), "", " ", "~", "~nobody/x", "a\nb", "x\n"),
    *("a\u2028b", "x" * 5000, "\ufeff", ".", "/", "..", "neg", "winner_tie", "auto", "0", "9" * 400),
    *("9" * 5000, "\u0663", "1h", "0s", "1h30m", "${X}", "9" * 400 + "h", "1h" + " " * 3000 + "x"),
    *("14GiB", "1.5 TB", "9" * 400 + "GB", "9" * 5000 + "TiB", "cpu", "disk", "{{ x", "{{ x }}"),
    *("main", "0" * 40, "GPU-1", "sample", "continue", [], {}, [[]], [None], {"": None}, [0, 0]),
    *(["a", "b"], ["a"], [0.5], [True], ["GPU-1", 10**99], {"0": "14GiB", "cpu": 0}),
    *({"00": 1, "0": 2}, {"9" * 5000: 1}, {"9" * 9: "1GB"}, {"cpu": 10**99}),
    *({"a": "neg", "b": "neg"}, {"load_in_4bit": True}, {"": {"": {"": []}}}, {"token": "x"}),
    *(
        {"share": 0},
        {"margin_below": 1, "share": 1},
        {"entropy_above": 0},
        {"torch_dtype": "auto"},
        {"name": "a"},
        [{"name": "a"}, {"name": "A"}],
    ),
]
awkward = st.sampled_from(AWKWARD).map(copy.deepcopy)
values = awkward | st.recursive(
    awkward | words | st.integers() | st.floats(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=4),
    max_leaves=8,
)

# Every key that there is (a test holds this to the schema), with values that fit together.
_MEMBER: Final = {
    "name": "gemma2",
    "model_name_or_path": "org/gemma",
    "revision": "0123456789" * 4,
    "train": None,
    "adapter_name_or_path": None,
    "adapters": None,
    "merge_adapter": False,
    "weight": 0.5,
    "when": None,
    "calibration": {"temperature": 1.5, "scale": {"neg": 0.9}, "bias": {"2": -0.1, "neg": 0}},
    "prompt_template": "{{ prompt | fromjson }}",
    "text_column": None,
    "max_length": 512,
    "truncation_side": None,
    "truncation": {"fields": {"prompt": {"share": 0.4, "keep": "newest_turns"}}, "marker": "..."},
    "add_special_tokens": True,
    "views": [
        {"name": "as_is", "weight": 2},
        {
            "name": "swapped",
            "swap": {"columns": ["prompt", "t"], "labels": ["neg", 2]},
            "prompt_template": "{{ prompt }}",
        },
    ],
    "task_type": "seq_cls",
    "choices": None,
    "checkpoints": None,
    "problem_type": "single_label_classification",
    "label_map": {"LABEL_0": "neg", "1": 2},
    "batch_size": "auto",
    "max_num_batched_tokens": 4096,
    "dtype": "float16",
    "quantization_config": {"load_in_8bit": True, "llm_int8_enable_fp32_cpu_offload": True},
    "attn_implementation": "sdpa",
    "torch_compile": False,
    "compile_timeout": "3m",
    "allow_tf32": False,
    "expandable_segments": True,
    "max_split_size_mb": 128,
    "num_gpus": 2,
    "replicas": 1,
    "device_map": {"model": 0, "score": "cpu"},
    "max_memory": {"0": "14GiB", "cpu": 3},
    "offload_folder": "off",
    "trust_remote_code": True,
    "allow_pickle": False,
    "model_kwargs": {"deep": {"er": [1, None, {"x": 0.5}]}},
    "tokenizer_kwargs": {"use_fast": True},
}
GOOD: Final[dict[str, Any]] = {
    "data": {
        "path": "test.csv",
        "id_column": "id",
        "label_column": "label",
        "label_columns": None,
        "skip_unlabelled": False,
        "allowed_labels": {"path": "possible.csv", "key": "t", "column": "labels"},
    },
    "labels": ["neg", 2],
    "training": {
        "data": {"path": "train.csv", "label_column": "label"},
        "folds": {"n_splits": 3, "column": None, "group_column": "t", "seed": 1},
        "extra": [
            {
                **{"path": "more.csv", "weight": 0.5, "label_column": "l"},
                **{"label_columns": None, "labels": None},
            }
        ],
        "labels": "teacher.csv",
    },
    "models": [
        _MEMBER,
        {
            "name": "mate",
            "task_type": "csv",
            "path": "mate.parquet",
            "id_column": "key",
            "columns": {"p": "neg", "q": 2},
            "activation": "sigmoid",
            "values": "logits",
            "partial": True,
            "sha256": "0123456789abcdef" * 4,
        },
        {
            **{
                "name": "b",
                "model_name_or_path": "b",
                "text_column": ["t", "u"],
                "max_length": None,
                "when": {"share": 0.4},
                "views": [
                    {"name": "fold0", "adapter_name_or_path": "fold0"},
                    {"name": "whole", "model_name_or_path": "org/fold2", "revision": "main"},
                    {
                        **{"name": "mean", "adapters": {"average": ["fold0", "fold1"]}},
                        "when": {"share": "as_time_allows"},
                    },
                ],
            },
            "weight": [0.5, 0, 1],
        },
        {
            "name": "h",
            "model_name_or_path": "h",
            "text_column": "t",
            "train": {"base_model": "h", "method": "head", "C": 0.5, "pooling_mode": "cls"},
        },
        {
            "name": "t",
            "text_column": "t",
            "train": {
                "command": None,
                "base_model": "b",
                "num_gpus": 1,
                "method": "lora",
                "predict_with": "average",
                "training_arguments": {"learning_rate": 1e-4},
                "lora_config": {"r": 8},
                "effective_batch_size": 32,
                "per_device_train_batch_size": 4,
                "early_stopping": {"share": 0.2, "patience": 2},
            },
        },
        {
            "name": "c",
            "task_type": "causal_lm",
            "model_name_or_path": "c",
            "prompt_template": "{{ prompt }} It is",
            "label_tokens": {"neg": " bad", "2": " good"},
            "single_token": True,
            "length_normalize": "tokens",
            "apply_chat_template": True,
            "system_instruction": "Judge.",
            "truncation_side": "left",
        },
        {
            "name": "d",
            "task_type": "python",
            "predict": "theirs.code:predict",
            "setup": "prepare",
            "model": "models/d",
            "inputs": ["mate"],
            "columns": ["t"],
            "views": [{"name": "own"}, {"name": "other", "model": "models/e"}],
            "kwargs": {"deep": {"er": [1, None]}},
            "depends_on": ["model.bin"],
            "num_gpus": 1,
            "gpu_memory": "8GiB",
        },
        {
            "name": "f",
            "task_type": "pooled_cls",
            "model_name_or_path": "d",
            "text_column": "t",
            "head": "head.safetensors",
            "pooling_mode": "mean",
            "head_layers": ["dense", "tanh", 3],
            "head_layer_norm_eps": 1e-12,
            "head_labels": [2, "neg"],
            "views": [{"name": "own"}, {"name": "other", "head": "other.safetensors"}],
        },
        {
            "name": "g",
            "task_type": "image_cls",
            "model_name_or_path": "d",
            "image_column": "file",
            "image_folder": "images",
            "image_suffix": ".jpg",
            "processor_kwargs": {"do_normalize": False},
            "problem_type": "single_label_classification",
        },
    ],
    "defaults": {"max_length": 64, "model_kwargs": {"a": 1}, "weight": {"neg": 1, "2": 0.5}},
    "ensemble": {"method": "mean", "length_bins": [500, 2000]},
    "rules": [
        {"when": "{{ t == u }}", "set": {"neg": 0.5, "2": 0.5}},
        {"when": "{{ not t }}", "mask": [2]},
    ],
    "submission": {
        "sample": "s.csv",
        "path": "out.csv",
        "columns": {
            "p": "neg",
            "q": {"answer": "label", "names": {"neg": "no"}, "format": "{{ answer }} {{ t }}"},
            "r": {"answer": {"expected": [1, 2], "thresholds": [1.5]}},
            "s": {"answer": {"above": {"neg": 0.3, "2": 1}, "at_least": 1, "none": "-", "separator": ";"}},
            "u": {"answer": {"above": 0.5}},
        },
    },
    "output_dir": "runs/first",
    "copy_to": "file:///results/first",
    "report_to": ["trackio", "mlflow"],
    "metrics": [{"name": "auc", "group": "t"}, {"name": "macro_f1"}],
    "limit": 5,
    "seed": 1,
    "devices": [0, "GPU-1"],
    "max_workers_per_gpu": 1,
    "cpu_workers": 2,
    "wait_for_gpu": "10m",
    "retries": 1,
    "on_bad_row": "fail",
    "on_member_failure": "continue",
    "time_limit": "8h30m",
    "fill": "uniform",
    "hang_timeout": 90,
    "hash_weights": False,
    "standby": True,
    "report": False,
    "fitted_on": {
        "rows": 400,
        "sha256": "0123456789abcdef" * 4,
        "metric": "log_loss",
        "value": 0.4,
        "interval": [0.3, 0.5],
    },
    "tuned_on": {
        "devices": ["Tesla T4"],
        "versions": {"torch": "2.6.0"},
        "rows": 256,
        "tolerance": 0.02,
        "date": "2026-01-31",
    },
    "release_timeout": 2.5,
    "launcher": "local",
}


def places(value: object, steps: Steps = ()) -> Iterator[Steps]:
    """Every place within plain data below the value itself, the outer ones first."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, item in inner:
        yield (*steps, step)
        yield from places(item, (*steps, step))


def inside(content: Any, steps: Steps) -> Any:
    for step in steps:
        content = content[step]
    return content


@st.composite
def changed_configs(draw: st.DrawFn) -> dict[str, Any]:
    """A good config with up to four of its values replaced, taken away, renamed, moved or wrapped."""
    content = copy.deepcopy(GOOD)
    for _ in range(draw(st.integers(1, 4))):
        known = list(places(content))
        if not known:
            break
        *outer, last = steps = draw(st.sampled_from(known))
        around = inside(content, tuple(outer))
        change = draw(st.sampled_from(["replace", "replace", "remove", "rename", "move", "wrap", "add"]))
        if change == "replace":
            around[last] = draw(values)
        elif change == "remove":
            del around[last]
        elif change == "wrap":
            around[last] = draw(st.sampled_from([[around[last]], {"a": around[last]}, [[around[last]] * 3]]))
        elif change == "move":
            *home, new = target = draw(st.sampled_from(known))
            if target[: len(steps)] != steps:
                inside(content, tuple(home))[new] = copy.deepcopy(around[last])
        elif isinstance(around, dict):
            around[draw(words)] = around.pop(last) if change == "rename" else draw(values)
    return content


@st.composite
def written(draw: st.DrawFn, content: dict[str, Any]) -> str:
    """Plain data as YAML, in one of the ways in which programs write it."""
    if draw(st.sampled_from(["json", "json", "yaml"])) == "json":
        text = json.dumps(
            content, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 1, 4]))
        )
    else:
        # Quotes around every word: PyYAML writes 1e5 without them, which is a number in YAML 1.2.
        flow, unicode = draw(st.sampled_from([None, True, False])), draw(st.booleans())
        text = yaml.safe_dump(content, default_flow_style=flow, allow_unicode=unicode, default_style='"')
    return draw(st.sampled_from(["", "\ufeff"])) + text


_STEPS: Final = [
    *("models", "models.0", "models[1]", "gemma2", "labels", "0", "9999999", "-1", "weight", "data", "path"),
    *("defaults", "x", "", "[0]", "[", "limit", "device_map", "é", "\udcff", "a b", "\n", "time_limit", "1"),
]
override_lists = st.lists(
    st.builds(
        "{}={}".format,
        st.lists(st.sampled_from(_STEPS) | st.text(max_size=4), min_size=1, max_size=5).map(".".join),
        texts | st.sampled_from(["1", "null", "[1", "{a: b}", "9" * 5000, "&a [*a]"]),
    )
    | texts,
    max_size=4,
)
