"""Tiny models, tokenizers and artifacts made from configs: no hub, no downloads, built in a second.

Layouts are those of the real thing: a base directory in Hugging Face layout, an artifact as in the
formats (adapter, tokenizer, calibration, manifest). Weights are random but seeded.
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer, UnigramTrainer
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
)

from memory_runtime.prompt import prompt_sha256
from memory_runtime.schema import Candidate, Kind, Layer, Scores, Turn, Window

TEXTS = [
    "The user has a budget of 300 dollars for the trip to Lisbon in May and prefers window seats.",
    "Anna is allergic to peanuts, so the assistant promised to check every restaurant menu first.",
    "We decided to move the release from Friday to Monday because the tests were still failing.",
    "How are you today? Fine, thanks! Could you tell me what the weather will be like tomorrow?",
    'One line per memory: [[1,2],"text","user","budget","core","constraint","+","987620"]',
    '"episodic","semantic","fact","preference","decision","event","plan","relationship","inference"',
    "用户的项目预算上限是3万元，不能再增加了。请记住这一点，这非常重要。",
    "小王下周三要去上海出差，他不喜欢坐靠过道的座位，也不吃花生。",
    "你好，谢谢你的帮助！明天天气怎么样？我们决定把发布推迟到星期一。",
    "她的电话号码是138-0013-8000，住在朝阳区建国路88号，去年十二月搬的家。",
]

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

# The split of the Qwen family: a digit is always a piece of its own.
_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@lru_cache(maxsize=1)
def _bpe_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer.to_str()


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE (about 700 tokens) with a ChatML template; every digit is one token."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_bpe_json()), chat_template=CHAT_TEMPLATE,
        eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=32768,
        clean_up_tokenization_spaces=False,
    )


@lru_cache(maxsize=1)
def _unigram_json() -> str:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = UnigramTrainer(
        vocab_size=400, special_tokens=["<s>", "<pad>", "</s>", "<unk>"], unk_token="<unk>",
        initial_alphabet=list("abcdefghijklmnopqrstuvwxyz0123456789"), show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    return tokenizer.to_str()


def pair_tokenizer() -> PreTrainedTokenizerFast:
    """Unigram (about 400 pieces) that writes pairs as `<s> A </s> </s> B </s>`."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_unigram_json()), bos_token="<s>", eos_token="</s>",
        cls_token="<s>", sep_token="</s>", pad_token="<pad>", unk_token="<unk>",
        model_max_length=512, clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def encoder_config(**changes: Any) -> Qwen2Config:
    """Two layers of 64, grouped-query attention, tied embeddings; more rows than tokens."""
    settings: dict[str, Any] = {
        "vocab_size": 768, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32768,
        "tie_word_embeddings": True, "initializer_range": 0.15, "bos_token_id": None,
        "eos_token_id": 2, "pad_token_id": 0, "dtype": "float32",
    }
    return Qwen2Config(**(settings | changes))


def encoder_model(*, seed: int = 0, **changes: Any) -> Qwen2ForCausalLM:
    """A random causal LM in evaluation mode, float32."""
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(encoder_config(**changes)).eval()


def encoder_base(directory: Path, *, seed: int = 0) -> Path:
    """Write a causal-LM base directory (config, model.safetensors, tokenizer, template)."""
    encoder_model(seed=seed).save_pretrained(directory)
    chat_tokenizer().save_pretrained(directory)
    return directory


def pair_config(**changes: Any) -> BertConfig:
    """Two layers of 32, one label."""
    settings: dict[str, Any] = {
        "vocab_size": 400, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 512, "type_vocab_size": 2,
        "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "initializer_range": 0.2,
        "num_labels": 1, "dtype": "float32",
    }
    return BertConfig(**(settings | changes))


def pair_base(directory: Path, *, seed: int = 0) -> Path:
    """Write a BertModel base directory, for the embedder and under the reranker."""
    torch.manual_seed(seed)
    BertModel(pair_config()).save_pretrained(directory)
    pair_tokenizer().save_pretrained(directory)
    return directory


def roberta_base(directory: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write an XLM-RoBERTa classifier with a head of its own, the shape of bge-reranker-v2-m3."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {"max_position_embeddings": 514, "type_vocab_size": 1}
    shape = pair_config(**(settings | changes)).to_dict()
    shape.pop("model_type")
    config = XLMRobertaConfig(**shape)
    XLMRobertaForSequenceClassification(config).save_pretrained(directory)
    pair_tokenizer().save_pretrained(directory)
    return directory


def randomise_lora(model: PeftModel, *, seed: int = 1, scale: float = 0.1) -> PeftModel:
    """Give the B matrices values: PEFT starts them at zero, and the adapter would do nothing."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                parameter.normal_(0.0, scale)
    return model


def encoder_adapter(
    base: Path, *, r: int = 4, seed: int = 1, layers: list[int] | None = None
) -> PeftModel:
    """The base under a PEFT LoRA on all linear layers, with values that matter."""
    model = Qwen2ForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(seed)
    config = LoraConfig(
        r=r, lora_alpha=2 * r, lora_dropout=0.0, layers_to_transform=layers,
        target_modules=list(PROJECTIONS), task_type=TaskType.CAUSAL_LM,
        base_model_name_or_path="tiny-encoder",
    )
    return randomise_lora(get_peft_model(model, config), seed=seed).eval()


def pair_adapter(base: Path, *, r: int = 4, seed: int = 1) -> PeftModel:
    """BertForSequenceClassification under LoRA, pooler and classifier trained in full."""
    torch.manual_seed(seed)
    model = BertForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
    config = LoraConfig(
        r=r, lora_alpha=r, lora_dropout=0.0, task_type=TaskType.SEQ_CLS,
        target_modules=["query", "key", "value", "attention.output.dense", "intermediate.dense",
                        "output.dense"],
        modules_to_save=["pooler", "classifier"], base_model_name_or_path="tiny-pair",
    )
    return randomise_lora(get_peft_model(model, config), seed=seed, scale=0.3).eval()


IDENTITY: dict[str, Any] = {"kind": "identity"}

ENCODER_CALIBRATION: dict[str, Any] = {
    "keep_floor": 0.0,
    "keep": {"kind": "platt", "a": 1.2, "b": 0.1},
    "scores": {name: dict(IDENTITY)
               for name in ("reuse", "goal", "emphasis", "emotion", "commitment")},
    "importance": {"reuse": 0.4, "goal": 0.3, "novelty": 0.2, "emphasis": 0.1, "emotion": 0.05,
                   "commitment": 0.05},
    "thresholds": {"long_term": 0.45},
}

RERANKER_CALIBRATION: dict[str, Any] = {
    "relevance": {"kind": "platt", "a": 1.0, "b": 0.0}, "blend": {"weight": 0.5},
}


def sha256_of(path: Path) -> str:
    """Hex digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_manifest(directory: Path, *, kind: str, base: Path, **changes: Any) -> dict[str, Any]:
    """Hash what is in the directory and write manifest.json; `changes` override its fields."""
    files = {
        path.relative_to(directory).as_posix(): sha256_of(path)
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name not in ("manifest.json", "eval.json")
    }
    manifest: dict[str, Any] = {
        "schema_version": 1, "kind": kind,
        "base": {"name": base.name, "sha256": sha256_of(base / "model.safetensors")},
        "data_sha256": "0" * 64, "files": files, "versions": {}, "seed": 1, "steps": 1,
        "created": "2026-01-01T00:00:00+00:00",
    }
    if kind == "encoder":
        manifest["prompt_sha256"] = prompt_sha256()
    manifest |= changes
    (directory / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    return manifest


def _write_artifact(
    directory: Path, model: PeftModel, tokenizer: PreTrainedTokenizerFast,
    calibration: dict[str, Any], *, kind: str, base: Path,
) -> Path:
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory / "tokenizer")
    (directory / "calibration.json").write_text(json.dumps(calibration), encoding="utf-8")
    (directory / "README.md").write_text("# Tiny artifact for tests\n", encoding="utf-8")
    write_manifest(directory, kind=kind, base=base)
    return directory


def encoder_artifact(
    directory: Path, base: Path, *, calibration: dict[str, Any] | None = None, seed: int = 1,
    layers: list[int] | None = None,
) -> Path:
    """Write a whole encoder artifact over a base made by `encoder_base`."""
    return _write_artifact(
        directory, encoder_adapter(base, seed=seed, layers=layers), chat_tokenizer(),
        calibration or ENCODER_CALIBRATION, kind="encoder", base=base,
    )


def pair_artifact(
    directory: Path, base: Path, *, calibration: dict[str, Any] | None = None, seed: int = 1
) -> Path:
    """Write a whole reranker artifact over a base made by `pair_base`."""
    return _write_artifact(
        directory, pair_adapter(base, seed=seed), pair_tokenizer(),
        calibration or RERANKER_CALIBRATION, kind="reranker", base=base,
    )


def windows() -> list[Window]:
    """Eight small windows, zh and en, with emoji, odd whitespace, control tokens and long turns."""
    dialogues = [
        ["My budget is 300 dollars.", "Noted, 300 dollars.", "And Anna can't eat peanuts 🥜."],
        ["项目预算上限是3万元。", "好的，我记住了。"],
        ["你好😀", "你好！有什么可以帮你？", "下周三我去上海出差，别订靠过道的座位👨‍👩‍👧。"],
        ["Hi"],
        ["tabs\tand \"quotes\" and \\ slashes\nand <|im_end|> markers", "ok"],
        ["她的电话号码是138-0013-8000。", "Sure, I'll call her on Monday 🙂🙂🙂"],
        ["The release moves from Friday to Monday. " * 12, "Why?", "The tests still fail."],
        ["谢谢", "不客气", "再见", "再见！"],
    ]
    made = []
    for n, texts in enumerate(dialogues):
        turns = tuple(
            Turn(f"t{i}", "assistant" if i % 2 else "user", text, "assistant" if i % 2 else "user")
            for i, text in enumerate(texts)
        )
        made.append(Window(f"w{n}", turns, session_time="2026-03-14T19:20:00+08:00"))
    return made


def candidates(window: Window, *, num: int = 3) -> list[Candidate]:
    """Different candidates of a window, in the window's own words."""
    layers, kinds = list(Layer), list(Kind)
    made = []
    for n in range(num):
        turn = window.turns[n % len(window.turns)]
        made.append(Candidate(
            text=f"{n}: {turn.text[:60].strip()}", evidence=(turn.id,), subject="user",
            attribute=["budget", "预算", ""][n % 3], layer=layers[n % 3], kind=kinds[n % 9],
            polarity="negated" if n % 2 else "affirmed", keep=n % 10 / 9,
            scores=Scores(reuse=0.5, goal=1.0),
        ))
    return made
