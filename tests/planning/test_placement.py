"""Where members go, as arithmetic over checkpoints of full size that take no disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from bench.shapes import GEMMA_2_9B, GEMMA_3_270M, LLAMA_3_8B, make_full_size
from ensemble.common.gpus import Device
from ensemble.jobs.job import compile_models
from ensemble.members.huggingface.memory import CheckpointMemory, checkpoint_memory
from ensemble.members.huggingface.spec import choose_dtype, is_soft_capped
from ensemble.members.seq_cls.parent import SequenceClassification
from ensemble.planning.forecast import Speed
from ensemble.planning.placement import ModelFacts
from ensemble.planning.plan import Plan, plan_run
from tests.checkpoints import inspect_folder
from tests.planning.test_plan import config, make_plan

GIB = 1 << 30
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
LABELS = ["a", "b", "tie"]
MODELS = {
    "gemma": GEMMA_2_9B,
    "llama": LLAMA_3_8B,
    "gemma3": {**GEMMA_3_270M, "sliding_window": 512},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("full size")
    for name, shape in MODELS.items():
        make_full_size(folder / name, shape, LABELS)
    return folder


def card(number: int, gigabytes: float, capability: tuple[int, int] = (7, 5), used: float = 0) -> Device:
    return Device(f"GPU-{number}", "card", capability, int(gigabytes * GIB), int(used * GIB))


def plan(
    models: Path,
    devices: list[Device],
    *members: dict[str, Any],
    rows: int = 25_000,
    speeds: dict[str, Speed] | None = None,
    **keys: Any,
) -> Plan:
    base = {"max_length": 2048}
    asked = config(*({**base, "model_name_or_path": "llama", **member} for member in members), **keys)
    lengths = np.full(rows, 6000, dtype=np.int64)
    facts = {model.name: planned(models, model, lengths) for model in asked.models}
    return make_plan(asked, facts, devices, speeds=speeds)


def planned(models: Path, model: Any, lengths: npt.NDArray[np.int64]) -> ModelFacts:
    memory = known(models, model, lengths)
    return ModelFacts(model.name, SequenceClassification(model).request(), lengths, memory)


def test_a_gpu_without_tensor_cores_for_the_quantization_is_refused(models: Path) -> None:
    int8 = {"quantization_config": {"load_in_8bit": True}}
    (problem,) = plan(models, [card(0, 80, (7, 0)), card(1, 80, (9, 0))], int8).problems
    assert problem.startswith("models[0].quantization_config: load_in_8bit needs compute capability 7.5")
    assert not plan(models, [card(0, 80, (7, 5))], int8).problems
    assert not plan(models, [], int8).problems, "a CPU computes it, slowly"


def known(models: Path, model: Any, lengths: npt.NDArray[np.int64]) -> CheckpointMemory:
    checkpoint = inspect_folder(models / model.model_name_or_path, LABELS)
    return checkpoint_memory(model, checkpoint, lengths, len(LABELS))


def where(made: Plan) -> list[tuple[int, tuple[str, ...], int]]:
    return [(member.gpus, member.placement.devices, member.first_replicas) for member in made.models]


def test_a_model_that_fits_gets_one_gpu_and_one_that_does_not_gets_more(models: Path) -> None:
    two = [card(0, 15), card(1, 15)]
    assert where(plan(models, two, {"quantization_config": NF4})) == [(1, ("GPU-0", "GPU-1"), 2)]
    made = plan(models, two, {})  # 15 GB of float16
    assert where(made) == [(2, ("GPU-0", "GPU-1"), 1)]
    assert made.models[0].placement.reason.startswith(
        "its weights and its longest row are too large for one GPU, so a replica takes 2; "
    )
    assert where(plan(models, [card(0, 15), card(1, 80)], {})) == [(1, ("GPU-1",), 1)]
    assert "does not fit well on card (GPU-0)" in plan(models, [card(0, 15), card(1, 80)], {}).warnings[0]


def test_what_cannot_fit_is_said_with_what_would_help(models: Path) -> None:
    (problem,) = plan(models, [card(0, 12)], {}).problems
    assert "models[0] (m0): its weights take 14.0 GiB in float16" in problem
    assert "bnb_4bit_quant_type: nf4, bnb_4bit_use_double_quant: true} makes its weights 4." in problem
    assert "num_gpus: 2 of this size hold it (this run has 1)" in problem
    (problem,) = plan(models, [card(0, 8), card(1, 8)], {"num_gpus": 1}).problems
    assert "num_gpus: 3 of this size hold it (this run has 2)" in problem
    offloaded = {"max_memory": {0: "6GiB", "cpu": "20GiB"}}
    assert plan(models, [card(0, 8)], offloaded).problems == ()
    (problem,) = plan(models, [card(0, 8)], {"max_memory": {0: "6GiB", "cpu": "2GiB"}}).problems
    assert problem.startswith(
        "models[0].max_memory: 8.0 GiB in all, and the weights of m0 take 14.0 GiB; raise it"
    )


def test_on_the_cpu_too_what_cannot_fit_is_an_error_and_what_may_not_a_warning(models: Path) -> None:
    (asked,) = config({"model_name_or_path": "llama", "num_gpus": 0}).models
    facts = {"m0": planned(models, asked, np.full(10, 6000, dtype=np.int64))}  # 28 GiB in float32
    for total, used, result in ((24, 1, "problem"), (40, 20, "warning"), (40, 1, "")):
        host = Device("cpu", "CPU", None, total * GIB, used * GIB)
        made = make_plan(config({"model_name_or_path": "llama", "num_gpus": 0}), facts, [], host)
        assert len(made.problems) == (result == "problem")
        assert len(made.warnings) == (result == "warning")
        for text in (*made.problems, *made.warnings):
            assert text.startswith("models[0] (m0): on the CPU it takes about 28.4 GiB of memory, and ")


def test_a_long_row_that_does_not_fit_is_a_warning_with_the_length_that_does(models: Path) -> None:
    gemma = {"model_name_or_path": "gemma", "quantization_config": NF4, "max_length": 8192, "num_gpus": 1}
    assert plan(models, [card(0, 8)], gemma).warnings == (), "attention in blocks"
    gemma["attn_implementation"] = "eager"
    made = plan(models, [card(0, 15)], {**gemma, "max_num_batched_tokens": None}, rows=100)
    assert made.problems == ()
    made = plan(models, [card(0, 8)], {**gemma})
    (warning,) = made.warnings
    assert warning.startswith("models[0] (m0): a row of 6,064 tokens takes about ")
    length = int(warning.split("max_length: ")[1].split()[0])
    assert 64 < length < 6064
    assert plan(models, [card(0, 8)], {**gemma, "max_length": length}).warnings == ()


def test_the_budget_knows_that_eager_attention_is_quadratic(models: Path) -> None:
    budgets = {}
    for name in MODELS:
        for length in (2048, 4096, 6000):
            member = {"model_name_or_path": name, "quantization_config": NF4, "max_length": length}
            member |= {"attn_implementation": "eager"} if name == "gemma" else {}
            (made,) = plan(models, [card(0, 15, (8, 0))], member).models
            budgets[name, length] = made.placement.fits["GPU-0"].token_budget
    assert budgets["gemma", 2048] > budgets["gemma", 4096] > budgets["gemma", 6000]
    assert budgets["llama", 6000] == pytest.approx(budgets["llama", 2048], rel=0.01), "fused attention is not"
    llama = {"quantization_config": NF4, "max_length": 6000}
    (on_t4,) = plan(models, [card(0, 15)], llama).models
    assert on_t4.placement.fits["GPU-0"].token_budget == pytest.approx(budgets["llama", 6000], rel=0.01), (
        "shared keys are repeated where no fused kernel takes them as they are"
    )


def test_others_memory_counts_and_is_told_from_too_small(models: Path) -> None:
    made = plan(models, [card(0, 15, used=12), card(1, 15)], {"quantization_config": NF4})
    placement = made.models[0].placement
    assert placement.devices == ("GPU-1",)
    assert placement.held == ("GPU-0",)


def test_memory_that_others_hold_is_no_reason_to_cut_rows(models: Path) -> None:
    gemma = {"model_name_or_path": "gemma", "quantization_config": NF4}
    (member,) = plan(models, [card(0, 15, used=8)], gemma).models
    assert member.placement.fits["GPU-0"].verdict == "short"
    assert member.placement.held == ("GPU-0",), "worth waiting for"
    assert member.placement.devices == ("GPU-0",), "and taken when the time is over"
    assert member.placement.warnings == ()


def test_what_is_not_known_runs_anywhere_but_still_waits(models: Path) -> None:
    (member,) = plan(models, [card(0, 15, used=2), card(1, 15)], {"device_map": {"": 0}}).models
    assert member.placement.devices == ("GPU-0", "GPU-1")
    assert member.placement.held == ("GPU-0",)


def test_the_gpus_that_maps_name_are_leased(models: Path) -> None:
    two = [card(0, 15), card(1, 15)]
    assert where(plan(models, two, {"max_memory": {0: "8GiB", 1: "8GiB"}})) == [(2, ("GPU-0", "GPU-1"), 1)]
    (problem,) = plan(models, two, {"device_map": {"model": 2, "score": 0}}).problems
    assert problem.startswith("models[0].device_map: m0 asks for 3 GPUs, but 2 GPUs can be used here")


def test_a_gpu_that_cannot_hold_a_member_has_no_say_in_its_type(models: Path) -> None:
    mixed = [card(0, 15), card(1, 80, (8, 0))]
    gemma = {"model_name_or_path": "gemma"}
    (alone,) = plan(models, mixed, {**gemma, "num_gpus": 1}).models
    assert alone.placement.devices == ("GPU-1",)
    assert alone.placement.dtype == "bfloat16"
    (both,) = plan(models, mixed, {**gemma, "quantization_config": NF4}).models
    assert both.placement.dtype == "float16", "one type for all replicas"


def test_a_checkpoint_that_does_not_say_its_type_has_that_of_its_tensors(
    models: Path, tmp_path: Path
) -> None:
    folder = make_full_size(tmp_path / "llama", {**LLAMA_3_8B, "num_hidden_layers": 1}, LABELS)
    text = (folder / "config.json").read_text(encoding="utf-8")
    (folder / "config.json").write_text(text.replace('"dtype": "bfloat16",', ""), encoding="utf-8")
    assert "bfloat16" not in (folder / "config.json").read_text(encoding="utf-8")
    (member,) = plan(tmp_path, [card(0, 15, (8, 0))], {}).models
    assert member.placement.dtype == "bfloat16"


def test_a_batch_size_is_held_against_the_memory(models: Path) -> None:
    (warning,) = plan(models, [card(0, 15)], {"quantization_config": NF4, "batch_size": 256}).warnings
    assert warning.startswith("models[0] (m0): a batch of 524,288 tokens in rows of 2,048 takes about ")
    assert warning.endswith("; lower batch_size or max_num_batched_tokens")


def test_remedies_are_ones_that_the_rules_allow(models: Path) -> None:
    (problem,) = plan(models, [card(0, 15)], {"quantization_config": NF4}, max_workers_per_gpu=4).problems
    assert (
        "which max_workers_per_gpu: 4 makes 3.8 GiB each; max_workers_per_gpu: 1 gives it a whole GPU"
        in problem
    )
    assert "offload" not in problem
    slices = [Device(f"MIG-{number}", "slice", (8, 0), 5 * GIB, 0) for number in range(2)]
    (problem,) = plan(models, slices, {}).problems
    assert "num_gpus" not in problem


def test_workers_that_share_a_gpu_share_its_memory(models: Path) -> None:
    item = [card(0, 15)]
    assert plan(models, item, {"quantization_config": NF4}, max_workers_per_gpu=2).models[0].replicas == 2
    assert plan(models, item, {"quantization_config": NF4}, max_workers_per_gpu=4).problems


def test_as_many_share_a_gpu_as_memory_lets_run_at_the_same_time(models: Path) -> None:
    def workers(devices: list[Device], *members: dict[str, Any]) -> int:
        asked = config(
            *(
                {"max_length": 2048, "dtype": "bfloat16", "model_name_or_path": "gemma", **keys}
                for keys in members
            ),
            max_workers_per_gpu="auto",
        )
        lengths = np.full(25_000, 6000, dtype=np.int64)
        known = {model.name: planned(models, model, lengths) for model in asked.models}
        compiled = compile_models(asked.models, asked.labels)
        return plan_run(asked, compiled, known, devices, {}, (), trials=lambda *_: []).config.workers_per_gpu

    large = card(0, 95, (12, 0))
    assert workers([large], {}, {}) == 2
    assert workers([large], {}, {}, {"num_gpus": 0}) == 2, "one is on the CPU"
    assert workers([large], *[{}] * 4) == 4
    assert workers([large], *[{}] * 8) == 4, "more have no room for their largest batches"
    assert workers([replace(large, used_bytes=60 * GIB)], {}, {}) == 1, (
        "one after the other they fit beside others"
    )
    assert workers([replace(large, used_bytes=94 * GIB)], {}, {}) == 2, "both wait for what others hold"
    own = {"max_memory": {0: "60GiB"}}
    assert workers([large], own, own) == 1, "nobody knows how much of its 60 GiB each takes"
    assert workers([large], {}) == 1
    assert workers([large, card(1, 95, (12, 0))], {}, {}) == 1, "each has a GPU of its own"
    assert workers([large, card(1, 95, (12, 0))], {}, {}, {}) == 2
    assert workers([card(0, 40, (8, 0))], {}, {}) == 1
    assert workers([card(1, 40, (8, 0)), large], {}, {}, {}) == 1, "the smallest GPU decides"
    assert workers([], {"num_gpus": 0}) == 1


def test_gpus_that_torch_has_no_code_for_are_left_out(models: Path) -> None:
    old = replace(card(0, 16, (6, 0)), torch_problem="no code; choose another")
    (problem,) = plan(models, [old], {"quantization_config": NF4}, {"quantization_config": NF4}).problems
    assert problem == "card (GPU-0): no code; choose another"
    made = plan(models, [old, card(1, 15)], {"quantization_config": NF4})
    assert made.models[0].placement.devices == ("GPU-1",)
    assert made.warnings == ("m0 does not run on card (GPU-0): no code; choose another",)
    assert made.models[0].placement.dtype == "float16"
    assert not plan(models, [old], {"num_gpus": 0, "dtype": "bfloat16"}).problems


def test_members_run_at_the_same_time(models: Path) -> None:
    two = [card(0, 15), card(1, 15)]
    alike = plan(models, two, {"quantization_config": NF4}, {"quantization_config": NF4}, rows=300)
    assert [member.first_replicas for member in alike.models] == [1, 1]
    assert "at the same time" in alike.why
    chosen = plan(models, two, {"quantization_config": NF4, "replicas": 2}, {"quantization_config": NF4})
    assert chosen.models[0].first_replicas == 2, "what is asked for holds"
    assert plan(models, two, {}, {}).why == "", "each takes both GPUs: there is nothing to choose"


@pytest.mark.parametrize(
    ("asked", "stored", "gpus", "capability", "expected"),
    [
        ("auto", "bfloat16", 1, (8, 0), "bfloat16"),
        ("auto", "bfloat16", 1, (7, 5), "float16"),
        ("auto", "float32", 1, (9, 0), "float32"),
        ("auto", "bfloat16", 0, None, "float32"),
        ("bfloat16", "float32", 0, None, "bfloat16"),
        ("auto", None, 1, (8, 6), "auto"),
        ("auto", None, 1, (7, 5), "float16"),
    ],
)
def test_the_type_of_numbers_follows_the_device(
    asked: Any, stored: str | None, gpus: int, capability: tuple[int, int] | None, expected: str
) -> None:
    assert choose_dtype(asked, stored, gpus, capability) == expected


def test_soft_capping_rules_out_fused_attention(models: Path) -> None:
    names = [{"model_name_or_path": name} for name in ("gemma", "llama")]
    asked: Any = config(*names, {**names[0], "attn_implementation": "flex_attention"}).models
    memories = [known(models, model, np.ones(1, dtype=np.int64)) for model in asked]
    taken = [memory.attention("float16", 1, (7, 5)) for memory in memories]
    assert taken == ["capped_blocks", "sdpa", "flex_attention"]


@pytest.mark.parametrize(
    ("dtype", "gpus", "capability", "works", "expected"),
    [
        ("bfloat16", 1, (8, 0), True, "flash_attention_2"),
        ("bfloat16", 1, (8, 0), False, "flex"),
        ("bfloat16", 2, (8, 0), False, "capped_blocks"),
        ("float16", 2, (9, 0), True, "flash_attention_2"),
        ("float16", 1, (7, 5), True, "capped_blocks"),
        ("float32", 1, (8, 0), True, "capped_blocks"),
        ("auto", 1, None, True, "capped_blocks"),
        ("float32", 0, None, True, "capped_blocks"),
    ],
)
def test_flash_attention_only_where_it_works_and_helps(
    models: Path, dtype: str, gpus: int, capability: tuple[int, int] | None, works: bool, expected: str
) -> None:
    asked: Any = config(*({"model_name_or_path": name} for name in ("gemma", "llama"))).models
    gemma, llama = (
        replace(known(models, model, np.ones(1, dtype=np.int64)), has_flash_attention=works)
        for model in asked
    )
    assert gemma.attention(dtype, gpus, capability) == expected
    assert llama.attention(dtype, gpus, capability) == "sdpa", "as good"


@pytest.mark.parametrize(
    ("member", "devices", "expected"),
    [
        ({"quantization_config": NF4}, [card(0, 15)], "capped_blocks"),  # a T4
        ({}, [card(0, 22, (8, 9))], "flex"),  # an L4
        ({}, [card(0, 80, (9, 0))], "flex"),
        ({}, [card(0, 96, (12, 0))], "flex"),
        ({"quantization_config": NF4}, [card(0, 22, (8, 9))], "flex"),
        ({}, [card(0, 80, (8, 0)), card(1, 15)], "flex"),  # the T4 is too small for it
        ({"quantization_config": NF4}, [card(0, 80, (8, 0)), card(1, 15)], "capped_blocks"),
        ({"num_gpus": 2}, [card(0, 22, (8, 9)), card(1, 22, (8, 9))], "capped_blocks"),
        ({"dtype": "float32"}, [card(0, 80, (9, 0))], "capped_blocks"),
        ({"batch_size": 4}, [card(0, 80, (9, 0))], "capped_blocks"),
        ({"torch_compile": True}, [card(0, 80, (9, 0))], "capped_blocks"),
        ({"device_map": "auto"}, [card(0, 80, (9, 0))], "capped_blocks"),
        ({"num_gpus": 0}, [card(0, 80, (9, 0))], "capped_blocks"),
        ({"attn_implementation": "eager"}, [card(0, 80, (9, 0))], "eager"),
        ({"model_name_or_path": "llama"}, [card(0, 80, (9, 0))], "sdpa"),
        ({"model_name_or_path": "gemma3"}, [card(0, 22, (8, 9))], "flex"),
        ({"model_name_or_path": "gemma3"}, [card(0, 15)], "sdpa"),
        ({"model_name_or_path": "gemma3", "max_length": 512}, [card(0, 22, (8, 9))], "sdpa"),
        ({"model_name_or_path": "gemma3", "max_length": 513}, [card(0, 22, (8, 9))], "flex"),
    ],
)
def test_rows_are_packed_where_that_helps_and_works(
    models: Path, member: dict[str, Any], devices: list[Device], expected: str
) -> None:
    made = plan(models, devices, {"model_name_or_path": "gemma", **member})
    assert not made.problems
    assert made.models[0].placement.attention == expected


def test_labels_of_several_tokens_or_by_row_are_not_packed(models: Path) -> None:
    asked: Any = config({"model_name_or_path": "gemma"}).models
    memory = known(models, asked[0], np.ones(1, dtype=np.int64))
    scored = [replace(memory, vocabulary_positions=1, keeps_prompts=keeps) for keeps in (False, True)]
    assert [item.attention("bfloat16", 1, (9, 0)) for item in scored] == ["flex", "capped_blocks"]


@pytest.mark.fault(30)
def test_fused_attention_is_refused_where_it_leaves_out_the_cap(models: Path) -> None:
    gemma = {"model_name_or_path": "gemma", "quantization_config": NF4}
    (problem,) = plan(models, [card(0, 15)], {**gemma, "attn_implementation": "sdpa"}).problems
    assert problem.startswith("models[0].attn_implementation: sdpa leaves out the cap on attention scores")
    assert not plan(models, [card(0, 15)], {**gemma, "attn_implementation": "eager"}).problems


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"model_type": "gemma2", "attn_logit_softcapping": None}, False),
        ({"model_type": "gemma2", "attn_logit_softcapping": 30.0}, True),
        ({"model_type": "llama"}, False),
        ({"model_type": "gemma3", "text_config": {"attn_logit_softcapping": None}}, False),
        ({"model_type": "other", "text_config": {"attn_logit_softcapping": 20.0}}, True),
        ({"attn_logit_softcapping": None, "encoder": {"attn_logit_softcapping": 50.0}}, True),
    ],
)
def test_which_configs_cap_their_scores(document: dict[str, Any], expected: bool) -> None:
    assert is_soft_capped(document) is expected


def test_4_bits_that_would_fit_one_gpu_are_said_and_nothing_decided(models: Path) -> None:
    two = [card(0, 15), card(1, 15)]
    (llama,) = plan(models, two, {}).models  # 14 GiB in float16, of which neither holds a long row besides
    assert (llama.gpus, llama.replicas) == (2, 1)
    assert llama.placement.footprint is not None
    assert llama.placement.footprint.quantization == ""
    keys = (
        "quantization_config: {load_in_4bit: true, bnb_4bit_quant_type: nf4, bnb_4bit_use_double_quant: true}"
    )
    advice = f"{keys} makes its weights 4.3 GiB, to fit one, and gives other numbers"
    assert llama.placement.reason.endswith(f"a replica takes 2; {advice}")
    assert plan(models, two, {"num_gpus": 2}).models[0].placement.reason == "", "as the user wants"
    # No room for one that is quantized.
    small = [card(number, 5) for number in range(4)]
    assert plan(models, small, {}).models[0].placement.reason.endswith("so a replica takes 4")
