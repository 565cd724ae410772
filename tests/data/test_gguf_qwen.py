"""Qwen2 GGUF files written here, converted to Hugging Face layout."""

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from data.gguf_qwen import convert_gguf, hf_name
from memory_runtime.errors import ArtifactError
from tests.tiny import CHAT_TEMPLATE

HIDDEN, LAYERS, HEADS, KV_HEADS, FEED_FORWARD = 64, 2, 4, 2, 96
MERGES = ["a b", "Ġ a"]
ADDED = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>"]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = ALPHABET + ["ab", "Ġa"] + ADDED + ["[PAD0]", "[PAD1]"]
TYPES = [1] * (len(ALPHABET) + 2) + [3, 3, 3, 4] + [5, 5]
Q8_0, Q4_0 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    kv = HIDDEN // HEADS * KV_HEADS
    sizes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,),
    }
    for i in range(LAYERS):
        for name, out in (("attn_q", HIDDEN), ("attn_k", kv), ("attn_v", kv)):
            sizes[f"blk.{i}.{name}.weight"] = (out, HIDDEN)
            sizes[f"blk.{i}.{name}.bias"] = (out,)
        sizes[f"blk.{i}.attn_output.weight"] = (HIDDEN, HIDDEN)
        for name in ("ffn_gate", "ffn_up"):
            sizes[f"blk.{i}.{name}.weight"] = (FEED_FORWARD, HIDDEN)
        sizes[f"blk.{i}.ffn_down.weight"] = (HIDDEN, FEED_FORWARD)
        for name in ("attn_norm", "ffn_norm"):
            sizes[f"blk.{i}.{name}.weight"] = (HIDDEN,)
    return {name: rng.normal(size=size).astype(np.float32) for name, size in sizes.items()}


def write_gguf(path, *, architecture="qwen2", weights=None, embedding=(Q4_0, Q8_0), left_out=()):
    """Write a model; `embedding` is the type of the input and of the output matrix."""
    writer = gguf.GGUFWriter(path, architecture)
    fields = {
        "block_count": LAYERS, "context_length": 128, "embedding_length": HIDDEN,
        "feed_forward_length": FEED_FORWARD, "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
    }
    for key, value in fields.items():
        if key not in left_out:
            writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.rope.freq_base", 1e6)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_name("tiny")
    writer.add_token_list(TOKENS)
    writer.add_token_types(TYPES)
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(TOKENS.index("<|im_end|>"))
    writer.add_pad_token_id(TOKENS.index("<|endoftext|>"))
    writer.add_chat_template(CHAT_TEMPLATE)
    weights = dict(weights or tensors())
    table = weights.pop("token_embd.weight")
    for name, kind in zip(("token_embd.weight", "output.weight"), embedding, strict=True):
        if kind is not None:
            writer.add_tensor(name, gguf.quants.quantize(table, kind), raw_dtype=kind)
    for name, values in weights.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def convert(path, target, **changes):
    target.mkdir()
    return convert_gguf(write_gguf(path, **changes), target)


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    directory = tmp_path_factory.mktemp("gguf")
    notes = convert(directory / "model.gguf", directory / "base")
    return directory / "base", notes


def test_every_weight_arrives_under_its_name(converted):
    model = AutoModelForCausalLM.from_pretrained(converted[0], dtype=torch.bfloat16)
    state = model.state_dict()
    for name, values in tensors().items():
        if name != "token_embd.weight":
            assert torch.equal(state[hf_name(name)], torch.from_numpy(values).bfloat16()), name
    assert model.config.tie_word_embeddings
    assert model.config.dtype == torch.bfloat16
    assert model.config.rms_norm_eps == 1e-6
    assert model.config.rope_parameters["rope_theta"] == 1e6


@pytest.mark.parametrize(
    ("kinds", "name"),
    [((Q4_0, Q8_0), "output"), ((Q8_0, Q4_0), "token_embd"), ((Q8_0, None), "token_embd")],
)
def test_tied_matrix_is_the_copy_with_more_bits(tmp_path, kinds, name):
    notes = convert(tmp_path / "model.gguf", tmp_path / "base", embedding=kinds)
    assert notes["tied_embedding_from"] == f"{name}.weight (Q8_0)"
    table = tensors()["token_embd.weight"]
    expected = gguf.quants.dequantize(gguf.quants.quantize(table, Q8_0), Q8_0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        assert torch.equal(module.weight, torch.from_numpy(expected).bfloat16())


def test_generation_ends_at_the_end_of_the_turn_and_of_the_text(converted):
    config = GenerationConfig.from_pretrained(converted[0])
    ends = [TOKENS.index("<|im_end|>"), TOKENS.index("<|endoftext|>")]
    assert config.eos_token_id == ends
    assert not config.do_sample


def test_tokenizer_keeps_the_ids_of_the_file(converted):
    tokenizer = AutoTokenizer.from_pretrained(converted[0])
    for token in ["ab", "Ġa", *ADDED]:
        assert tokenizer.convert_tokens_to_ids(token) == TOKENS.index(token)
    ids = tokenizer("<|im_start|>ab a<tool_call>").input_ids
    assert [TOKENS[i] for i in ids] == ["<|im_start|>", "ab", "Ġa", "<tool_call>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab a<tool_call>"
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "<|endoftext|>"


def test_padding_rows_of_the_matrix_are_no_tokens(converted):
    tokenizer = AutoTokenizer.from_pretrained(converted[0])
    assert len(tokenizer) == len(TOKENS) - 2
    model = AutoModelForCausalLM.from_pretrained(converted[0], dtype=torch.bfloat16)
    assert model.config.vocab_size == len(TOKENS)


def test_digits_chinese_and_composition_round_trip(converted):
    tokenizer = AutoTokenizer.from_pretrained(converted[0])
    assert [len(tokenizer(str(digit)).input_ids) for digit in range(10)] == [1] * 10
    assert tokenizer.decode(tokenizer("预算 30000 元").input_ids) == "预算 30000 元"
    assert tokenizer("e\u0301").input_ids == tokenizer("é").input_ids


def test_other_architectures_are_refused(tmp_path):
    with pytest.raises(ArtifactError, match="architecture 'llama'"):
        convert(tmp_path / "model.gguf", tmp_path / "base", architecture="llama")


def test_unknown_tensors_are_refused(tmp_path):
    weights = tensors() | {"blk.0.attn_q_norm.weight": np.ones(HIDDEN, dtype=np.float32)}
    with pytest.raises(ArtifactError, match="blk.0.attn_q_norm.weight"):
        convert(tmp_path / "model.gguf", tmp_path / "base", weights=weights)


def test_missing_fields_are_named(tmp_path):
    with pytest.raises(ArtifactError, match="qwen2.attention.head_count_kv"):
        convert(tmp_path / "model.gguf", tmp_path / "base", left_out=("attention.head_count_kv",))


def test_missing_weights_are_found_before_the_base_counts(tmp_path):
    weights = tensors()
    del weights["blk.1.ffn_up.weight"]
    with pytest.raises(ArtifactError, match="missing_keys.*layers.1.mlp.up_proj"):
        convert(tmp_path / "model.gguf", tmp_path / "base", weights=weights)


def test_template_without_turn_marks_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.data.test_gguf_qwen.CHAT_TEMPLATE", "{{ messages[0]['content'] }}")
    with pytest.raises(ArtifactError, match="chat template renders 's'"):
        convert(tmp_path / "model.gguf", tmp_path / "base")
