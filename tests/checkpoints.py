"""Tiny checkpoints of the real architectures, made on the spot, and the plain transformers reference."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bench.tokenizer import save_tokenizer
from ensemble.members import questions
from ensemble.members.huggingface.spec import BACKBONE, CLASSIFIER, LANGUAGE_MODEL
from ensemble.members.questions import Answer, Question
from ensemble.members.seq_cls.parent import SequenceClassifierSettings

if TYPE_CHECKING:
    from ensemble.members.huggingface.checkpoint.facts import Architecture, Facts
    from ensemble.members.huggingface.checkpoint.inspect import Checkpoint

WORDS = (
    "any of various plants having leaves or flowers a person who works in an office large animal with long tail "
    "the act of doing something small building used for food and drink river state mind body group place"
).split()


def answers_of_this_process(module: str, asked: Sequence[Question]) -> list[Answer]:
    """Answer as the process of a module such as ``loading/describe.py`` does."""
    describe = import_module(module).describe
    lines = [
        json.dumps(describe({"folder": str(item.folder), **item.names, **item.arguments}), default=str)
        for item in asked
    ]
    return [Answer(json.loads(line)) for line in lines]


def facts_of(folder: Path, auto_class: str = CLASSIFIER, **keys: Any) -> Facts:
    """What transformers makes of a checkpoint."""
    from ensemble.members.huggingface.checkpoint.inspect import ask_facts, checkpoint_question

    settings = {"name": "m", "model_name_or_path": str(folder), "text_column": "text", **keys}
    model = SequenceClassifierSettings.model_validate(settings)
    return ask_facts(checkpoint_question(model, folder, auto_class))


def prime(folder: Path, *auto_classes: str) -> Path:
    """Ask about a checkpoint in this process, where tests do so, and let commands find the answers."""
    if questions.ask_process is answers_of_this_process:
        for auto_class in auto_classes or (CLASSIFIER, LANGUAGE_MODEL, BACKBONE):
            facts_of(folder, auto_class)
    return folder


def architecture_of(config: Any) -> Architecture:
    """The numbers of a model that is never made, by its config."""
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        architecture = facts_of(Path(folder)).architecture
    assert architecture is not None
    return architecture


def make_texts(count: int, seed: int = 0, longest: int = 60) -> list[str]:
    """Texts of very different lengths, a few of them empty."""
    chooser = random.Random(seed)
    texts = []
    for index in range(count):
        words = 0 if index % 37 == 5 else max(1, int(chooser.lognormvariate(2.2, 0.8)))
        texts.append(" ".join(chooser.choice(WORDS) for _ in range(min(words, longest))))
    return texts


def make_tokenizer(
    folder: Path, *, kind: str = "decoder", pad: str | None = "<pad>", side: str = "right"
) -> Any:
    """A byte-level BPE trained on a few words; ``kind`` "encoder" adds [CLS] and [SEP] around texts."""
    return save_tokenizer(folder, WORDS * 3, vocabulary=400, kind=kind, pad=pad, side=side)


def make_sentencepiece(folder: Path) -> Any:
    """A Unigram model as sentencepiece has it: a space before each text, and bytes for what it does not know."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    trained = Tokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<pad>", "<bos>", "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    trained.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    vocabulary = [(token, score) for token, score in json.loads(trained.to_str())["model"]["vocab"]]
    vocabulary += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=2, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Metaspace()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", 1)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", unk_token="<unk>"
    )
    fast.save_pretrained(folder)
    return fast


def make_wordpiece(folder: Path) -> Any:
    """A WordPiece model with BERT's rules: lower case, no accents, [CLS] and [SEP] around texts."""
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertTokenizerFast

    trained = BertWordPieceTokenizer(lowercase=True)
    trained.train_from_iterator([" ".join(WORDS)] * 3, vocab_size=300, show_progress=False)
    fast = BertTokenizerFast(tokenizer_object=trained._tokenizer)
    fast.save_pretrained(folder)
    return fast


def make_checkpoint(
    folder: Path,
    architecture: str,
    labels: Sequence[str],
    *,
    seed: int = 0,
    pad: str | None = "<pad>",
    side: str = "right",
    problem_type: str | None = None,
    dtype: str = "float32",
    width: int = 64,
    layers: int = 2,
) -> Path:
    """Save a tiny checkpoint with a tokenizer; weights are random but spread enough to tell rows apart.

    Args:
        width: of the hidden states.  Where a CPU has AVX512_BF16, bitsandbytes repacks 4-bit weights for a kernel
            that takes inputs in blocks of 64 and outputs in blocks of 32.
    """
    import torch
    import transformers

    kind = "encoder" if architecture in ("bert", "deberta-v2", "roberta", "fnet") else "decoder"
    tokenizer = make_tokenizer(folder, kind=kind, pad=pad, side=side)
    pad_token_id = tokenizer.pad_token_id
    common: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "pad_token_id": pad_token_id,
        "id2label": dict(enumerate(labels)),
        "label2id": {label: index for index, label in enumerate(labels)},
        "initializer_range": 0.21,
    }
    if problem_type is not None:
        common["problem_type"] = problem_type
    torch.manual_seed(seed)
    config = _config(transformers, architecture, common, width, layers)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return prime(folder, CLASSIFIER)


def _config(transformers: Any, architecture: str, common: dict[str, Any], width: int, layers: int) -> Any:
    decoder = {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": width // 4,
        "max_position_embeddings": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    encoder = {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
    }
    if architecture == "gemma2":
        return transformers.Gemma2Config(
            **decoder, **common, query_pre_attn_scalar=width // 4, sliding_window=16
        )
    if architecture == "llama":
        return transformers.LlamaConfig(**decoder, **common)
    if architecture == "qwen3":
        return transformers.Qwen3Config(**decoder, **common)
    if architecture == "mistral":
        return transformers.MistralConfig(**decoder, **common, sliding_window=16)
    if architecture == "gemma3_text":  # every sixth layer, here the last one, sees all tokens
        return transformers.Gemma3TextConfig(
            **decoder,
            **common,
            query_pre_attn_scalar=width // 4,
            sliding_window=16,
            layer_types=[*["sliding_attention"] * (layers - 1), "full_attention"],
        )
    if architecture == "lfm2":  # convolutions beside attention
        return transformers.Lfm2Config(
            **decoder, **common, layer_types=["conv", *["full_attention"] * (layers - 1)]
        )
    if architecture == "cohere2":
        return transformers.Cohere2Config(
            **decoder,
            **common,
            sliding_window=16,
            layer_types=[*["sliding_attention"] * (layers - 1), "full_attention"],
        )
    if architecture == "gemma4_text":  # each layer has embeddings of its own
        return transformers.CONFIG_MAPPING[architecture](
            **decoder,
            **common,
            sliding_window=16,
            layer_types=[*["sliding_attention"] * (layers - 1), "full_attention"],
            global_head_dim=width // 4,
            vocab_size_per_layer_input=common["vocab_size"],
            hidden_size_per_layer_input=width // 4,
            num_kv_shared_layers=0,
        )
    if architecture == "qwen3_5_moe_text":  # recurrent layers beside attention, and a mixture of experts
        linear = {f"linear_{name}": 2 for name in ("num_key_heads", "num_value_heads")}
        linear |= {f"linear_{name}_head_dim": width // 4 for name in ("key", "value")}
        return transformers.CONFIG_MAPPING[architecture](
            **decoder,
            **common,
            **linear,
            layer_types=[*["linear_attention"] * (layers - 1), "full_attention"],
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=width // 2,
            shared_expert_intermediate_size=width // 2,
        )
    if architecture == "mamba":
        return transformers.MambaConfig(hidden_size=width, num_hidden_layers=layers, **common)
    if architecture == "granite":  # its logits are divided
        return transformers.GraniteConfig(**decoder, **common, logits_scaling=3.0)
    if architecture == "cohere":  # its logits are multiplied, and its head is the embeddings
        return transformers.CohereConfig(**decoder, **common, logit_scale=0.2)
    if architecture == "qwen2":
        return transformers.Qwen2Config(**decoder, **common, tie_word_embeddings=True)
    if architecture == "gpt2":
        return transformers.GPT2Config(
            n_embd=width, n_layer=layers, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2, **common
        )
    if architecture == "bert":
        return transformers.BertConfig(**encoder, **common)
    if architecture == "roberta":
        return transformers.RobertaConfig(**encoder, type_vocab_size=2, **common)
    if architecture == "deberta-v2":
        return transformers.DebertaV2Config(
            **encoder,
            **common,
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
            position_biased_input=False,
            type_vocab_size=0,
            position_buckets=16,
            norm_rel_ebd="layer_norm",
            share_att_key=True,
        )
    if architecture == "fnet":
        return transformers.FNetConfig(
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=layers,
            max_position_embeddings=128,
            **common,
        )
    if architecture == "gemma3":
        text = {
            **decoder,
            "vocab_size": common["vocab_size"],
            "query_pre_attn_scalar": width // 4,
            "sliding_window": 16,
        }
        vision = {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        }
        return transformers.Gemma3Config(text_config=text, vision_config=vision, **common)
    raise ValueError(architecture)


def make_base(folder: Path, architecture: str, *, seed: int = 0, **options: Any) -> Path:
    """A tiny language model without a classification head, as the ones that adapters are trained on."""
    import torch
    import transformers

    make_checkpoint(folder, architecture, ["LABEL_0", "LABEL_1"], seed=seed, **options)
    config = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(seed)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return prime(folder)


def make_language_model(
    folder: Path,
    architecture: str,
    *,
    seed: int = 0,
    pad: str | None = "<pad>",
    side: str = "right",
    **settings: Any,
) -> Path:
    """A tiny language model with a tokenizer, of which texts are told apart by the token that comes next.

    Args:
        settings: of its config.
    """
    import torch
    import transformers

    tokenizer = make_tokenizer(folder, pad=pad, side=side)
    common = {
        "vocab_size": len(tokenizer) + 8,  # Qwen2's class of tokenizers adds a token of its own
        "pad_token_id": tokenizer.pad_token_id,
        "initializer_range": 0.21,
    }
    torch.manual_seed(seed)
    config = _config(transformers, architecture, common, width=64, layers=3)
    config.update(settings)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return prime(folder, LANGUAGE_MODEL)


def label_reference(
    folder: Path,
    prompts: Sequence[str],
    label_texts: Sequence[str],
    max_length: int = 1024,
    divisors: Sequence[float] = (),
    add_special_tokens: bool = True,
    model: Any = None,
    **options: Any,
) -> tuple[npt.NDArray[np.float64], float]:
    """Probabilities over the labels' texts by plain transformers, each behind each prompt alone, in float32.

    Args:
        model: None: the folder's.
        options: for ``from_pretrained`` of model and tokenizer.

    Returns:
        float64 [rows, labels], and the mean probability of a next token that begins no label.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    if model is None:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", **options
        )
    texts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in label_texts]
    room = max_length - max(map(len, texts)) + 1
    rows, others = [], []
    for prompt in prompts:
        ids = tokenizer(prompt, add_special_tokens=add_special_tokens)["input_ids"]
        if len(ids) > room:
            ids = ids[:1] + ids[len(ids) - room + 1 :]  # the first one is <bos>
        scores = []
        for label, divisor in zip(texts, divisors or [1.0] * len(texts), strict=True):
            with torch.no_grad():
                logits = model.eval()(torch.tensor([ids + label[:-1]])).logits[0].double()
            tokens = logits.log_softmax(-1)[len(ids) - 1 :]
            scores.append(sum(float(tokens[place, token]) for place, token in enumerate(label)) / divisor)
        others.append(1 - float(tokens[0].exp()[sorted({label[0] for label in texts})].sum()))
        rows.append(torch.tensor(scores, dtype=torch.float64).softmax(-1).numpy())
    return np.stack(rows), float(np.mean(others))


def make_adapter(folder: Path, base: Path, labels: int, *, seed: int = 0, **settings: Any) -> Path:
    """A LoRA adapter on this base with a head of its own, saved by peft; no part of it is without effect.

    Args:
        labels: 0: it is one for a language model, and has no head of its own.
    """
    import peft
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    torch.manual_seed(seed)
    if labels:
        model = AutoModelForSequenceClassification.from_pretrained(
            base, num_labels=labels, ignore_mismatched_sizes=True
        )
    else:
        model = AutoModelForCausalLM.from_pretrained(base)
    defaults = {
        "task_type": "SEQ_CLS" if labels else "CAUSAL_LM",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": "all-linear",
    }
    adapted = peft.get_peft_model(model, peft.LoraConfig(**{**defaults, **settings}))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # zero at first, which would leave the base as it is
            torch.nn.init.normal_(parameter, std=0.2)
    adapted.save_pretrained(folder)
    return folder


def four_bits_tolerance() -> float:
    """How far probabilities of two ways through the same 4-bit weights may be apart on this CPU.

    With AVX512_BF16 bitsandbytes multiplies in bfloat16, of which a rounding is 2**-9 of a number, and not in the
    same order for every number of rows.
    """
    from bitsandbytes import functional

    has_kernel = getattr(functional, "has_avx512bf16", bool)  # releases before 0.49 have none
    return 2e-2 if has_kernel() else 1e-4


def adapter_reference(
    base: Path, adapter: Path, texts: Sequence[str], labels: int, max_length: int = 1024, **options: Any
) -> npt.NDArray[np.float64]:
    """Probabilities of plain transformers and peft, one row at a time.

    Args:
        options: for the base's ``from_pretrained``.
    """
    import peft
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForSequenceClassification.from_pretrained(
        base,
        num_labels=labels,
        ignore_mismatched_sizes=True,
        **{"dtype": torch.float32, "attn_implementation": "eager", **options},
    )
    adapted = peft.PeftModel.from_pretrained(model, str(adapter)).eval()
    rows = []
    with torch.no_grad():
        for text in texts:
            inputs = tokenizer([text], truncation=True, max_length=max_length, return_tensors="pt")
            rows.append(adapted(**inputs).logits[0].float().softmax(-1).double().numpy())
    return np.stack(rows)


def reference(
    folder: Path,
    texts: Sequence[str] | Sequence[tuple[str, str]],
    max_length: int = 1024,
    activation: str = "softmax",
    truncation_side: str = "right",
    **options: Any,
) -> npt.NDArray[np.float64]:
    """Probabilities of plain transformers, one row at a time, in float32: what every batch must equal.

    With eager attention by name: left to itself transformers takes one that is wrong for Gemma-2 before 5.22.

    Args:
        options: for the model's ``from_pretrained``.
    """
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, truncation_side=truncation_side)
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, **{"dtype": torch.float32, "attn_implementation": "eager", **options}
    )
    model.eval()
    rows = []
    with torch.no_grad():
        for text in texts:
            # Lists of one, because a bare empty second text would be taken for no second text at all.
            arguments = [[part] for part in text] if isinstance(text, tuple) else [[text]]
            inputs = tokenizer(*arguments, truncation=True, max_length=max_length, return_tensors="pt")
            logits = model(**inputs).logits[0]
            if activation == "softmax":
                logits = logits.softmax(-1)
            rows.append((logits.sigmoid() if activation == "sigmoid" else logits).double().numpy())
    return np.stack(rows)


def make_image_checkpoint(
    folder: Path, architecture: str, labels: Sequence[str], *, seed: int = 0, **processor: Any
) -> Path:
    """Save a tiny image classifier (vit, resnet, convnext) with its image processor; weights are random.

    Args:
        processor: settings of the image processor that are not its defaults.
    """
    import torch
    import transformers

    common: dict[str, Any] = {
        "id2label": dict(enumerate(labels)),
        "label2id": {label: index for index, label in enumerate(labels)},
    }
    shapes: dict[str, dict[str, Any]] = {
        "vit": {
            **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64},
            **{"image_size": 32, "patch_size": 8, "initializer_range": 0.3},
        },
        "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
        "convnext": {"num_stages": 2, "hidden_sizes": [8, 16], "depths": [1, 1], "initializer_range": 0.3},
    }
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(architecture, **shapes[architecture], **common)
    model = transformers.AutoModelForImageClassification.from_config(config)
    with torch.no_grad():  # so that images are told apart
        head = [module for module in model.modules() if isinstance(module, torch.nn.Linear)][-1]
        head.weight *= 6 if architecture == "resnet" else 3
    model.save_pretrained(folder)
    sizes = (
        {"size": {"height": 32, "width": 32}} if architecture == "vit" else {"size": {"shortest_edge": 48}}
    )
    settings = {
        "image_processor_type": "ViTImageProcessor" if architecture == "vit" else "ConvNextImageProcessor",
        **sizes,
        **processor,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def image_reference(folder: Path, paths: Sequence[Path]) -> npt.NDArray[np.float64]:
    """Probabilities of transformers' pipeline in float32, one image at a time, in the model's order of labels."""
    from importlib.util import find_spec

    from PIL import Image
    from transformers import pipeline
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    # Without torchvision, which rounds otherwise.
    backend = find_spec("transformers.image_processing_backends")
    without: dict[str, Any] = {"use_fast": False} if backend is None else {"backend": "pil"}
    classify = pipeline(
        "image-classification",
        model=str(folder),
        image_processor=AutoImageProcessor.from_pretrained(folder, **without),
        device="cpu",
        dtype="float32",
    )
    labels = classify.model.config.id2label
    rows = []
    for path in paths:
        with Image.open(path) as image:  # by itself it leaves files of several frames open
            scores = {item["label"]: item["score"] for item in classify(image, top_k=len(labels))}
        rows.append([scores[labels[index]] for index in range(len(labels))])
    return np.array(rows)


def inspect_folder(
    name_or_path: str | Path,
    labels: Sequence[str],
    label_map: Mapping[str, str] | None = None,
    problem_type: str | None = None,
    **keys: Any,
) -> Checkpoint:
    """What is known of a member's checkpoint before it is loaded; ``keys`` are further ones of the member."""
    from ensemble.members.huggingface.checkpoint.inspect import inspect_checkpoint
    from ensemble.members.seq_cls.parent import SequenceClassifierSettings

    given: dict[str, Any] = {
        "name": "m",
        "model_name_or_path": str(name_or_path),
        "text_column": "text",
        **keys,
    }
    return inspect_checkpoint(SequenceClassifierSettings(**given), labels, label_map or {}, problem_type)
