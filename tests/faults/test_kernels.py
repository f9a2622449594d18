"""Kernels that are missing here, or do not take a layer's shape or type: one sentence, with what else works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint, make_tokenizer
from tests.faults.chunky import chunky_config, ids_of
from tests.faults.inject import Fault, Injected
from tests.faults.test_workers import run
from tests.project import LABELS, ROOT, Project, python_path

pytestmark = pytest.mark.usefixtures("warm")

FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
# Layers that bitsandbytes refuses there; elsewhere, where the repacking is only pretended, no kernel is reached.
REPACKS = {
    "PYTHONPATH": python_path(ROOT, ROOT / "tests" / "kernels"),
    "ENSEMBLE_TEST_AVX512_BF16": "1",
}


def one_member(project: Project, folder: Path, **keys: Any) -> dict[str, Any]:
    return project.config(
        models=[{"name": "narrow", "model_name_or_path": str(folder), **keys}],
        submission=None,
        ensemble={"method": "mean"},
    )


def why_it_failed(project: Project, printed: str) -> str:
    """The one fault of the one member, which was found before any chunk and tried by one worker."""
    (member,) = project.run_json()["members"]
    assert len(member["workers"]) == 1, printed
    (fault,) = member["faults"]
    assert (fault["rows"], fault["remedy"]) == (None, "given up")
    sentence: str = fault["message"]
    assert sentence in " ".join(printed.split())
    assert "Traceback" not in printed
    return sentence


@pytest.mark.long
@pytest.mark.fault(37)
def test_a_layer_that_is_too_narrow_for_four_bits(project: Project, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    folder = make_checkpoint(tmp_path / "narrow", "llama", LABELS, width=32)
    project.write_config(one_member(project, folder, quantization_config=FOUR_BITS))
    done = project.ensemble("run", "config.yaml", environment=REPACKS)
    assert done.returncode == 1, done.stdout
    sentence = why_it_failed(project, done.stderr)
    assert "fails in model.layers.0.self_attn.q_proj (Linear4bit(in_features=32, out_features=32" in sentence
    assert "what else may work: load_in_8bit: true in the place of load_in_4bit, or no quantiz" in sentence
    for settings in ({"load_in_8bit": True}, None):  # what it names does work
        project.write_config(one_member(project, folder, quantization_config=settings))
        done = project.ensemble("run", "config.yaml", environment=REPACKS)
        assert done.returncode == 0, done.stderr


@pytest.mark.fault(37)
@pytest.mark.long
def test_a_checkpoint_that_was_saved_in_four_bits_and_is_too_narrow(project: Project, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForSequenceClassification, BitsAndBytesConfig

    whole = make_checkpoint(tmp_path / "whole", "bert", LABELS, width=32)
    settings = BitsAndBytesConfig(**FOUR_BITS, llm_int8_skip_modules=["classifier"])
    model = AutoModelForSequenceClassification.from_pretrained(
        whole, quantization_config=settings, device_map={"": "cpu"}
    )
    model.save_pretrained(tmp_path / "saved")
    make_tokenizer(tmp_path / "saved", kind="encoder")
    project.write_config(one_member(project, tmp_path / "saved"))
    done = project.ensemble("run", "config.yaml", environment=REPACKS)
    sentence = why_it_failed(project, done.stderr)
    assert "(Linear4bit(in_features=32, out_features=32" in sentence
    assert sentence.endswith("the checkpoint that this one was quantized from, or a GPU (num_gpus: 1)")


@pytest.mark.fault(37)
def test_a_type_that_no_kernel_of_the_cpu_takes(project: Project, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "fnet", "fnet", LABELS)
    project.write_config(one_member(project, folder, dtype="bfloat16"))
    done = project.ensemble("run", "config.yaml")
    sentence = why_it_failed(project, done.stderr)
    assert "fails in fnet.encoder.layer.0.fourier" in sentence
    assert "work: dtype: float32, or a GPU" in sentence
    project.write_config(one_member(project, folder, dtype="float32"))
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.fault(37)
def test_a_kernel_that_is_missing_at_some_batch_ends_the_member_at_once(
    chunky: Project, tmp_path: Path
) -> None:
    """No halving down to single rows: it is no row's fault."""
    injected = Injected(
        tmp_path, Fault("raise", ids_of(chunky, 6), text="\"addmm_impl_cpu_\" not implemented for 'Half'")
    )
    chunky.write_config(chunky_config(chunky))
    code, printed = run(chunky, injected)
    assert code == 1
    assert len(injected.pids()) == 1, printed
    (member,) = chunky.run_json()["members"]
    (fault,) = member["faults"]
    assert (fault["rows"], fault["remedy"]) == ([4, 8], "given up")
    assert "fails in model.embed_tokens (Embedding(" in fault["message"]
    assert member["bad_rows"] == {}
