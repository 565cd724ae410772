"""The E5S1 reader on containers built here, and the conversion it feeds."""

import struct

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, BertModel

from data.bert_e5 import convert_e5s1, hf_name
from data.e5s1 import dequantise_q4_0, read_container
from memory_runtime.errors import ArtifactError
from tests.data.tiny_carriers import (
    HIDDEN,
    LAYERS,
    NORMALISATION,
    SPECIAL,
    VOCAB,
    WORDS,
    ContainerSpec,
    is_quantised,
    quantise_q4_0,
    tiny_tensors,
)


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    directory = tmp_path_factory.mktemp("e5")
    model_path = directory / "model.bin"
    model_path.write_bytes(ContainerSpec().build())
    target = directory / "base"
    target.mkdir()
    convert_e5s1(model_path, target)
    return target


def test_reader_returns_what_was_written():
    container = read_container(ContainerSpec().build())
    shape, pieces = container.shape, container.pieces
    assert (shape.hidden, shape.layers, shape.vocab, shape.eps) == (HIDDEN, LAYERS, VOCAB, 1e-12)
    assert pieces.texts == SPECIAL + WORDS
    assert pieces.scores[len(SPECIAL) :] == [-1.0 - i / 8 for i in range(len(WORDS))]
    assert (pieces.bos, pieces.eos, pieces.pad, pieces.unk) == (0, 2, 1, 3)
    assert pieces.normalisation == NORMALISATION
    for name, values in tiny_tensors().items():
        # Half a step of the coarsest block, plus the rounding of its fp16 scale.
        limit = np.abs(values).max() / 7 * 0.51 if is_quantised(name) else 0.0
        assert np.abs(container.tensors[name] - values.reshape(-1)).max() <= limit, name


def test_q4_0_block_has_low_nibbles_first_and_eight_as_zero():
    codes = bytes(low | ((15 - low) << 4) for low in range(16))
    raw = np.float16(0.5).tobytes() + codes + np.float16(-2).tobytes() + b"\x88" * 16
    expected = [(low - 8) * 0.5 for low in range(16)] + [(7 - low) * 0.5 for low in range(16)]
    assert dequantise_q4_0(raw, 64).tolist() == expected + [0.0] * 32


def test_q4_0_keeps_values_that_lie_on_its_grid():
    grid = np.random.default_rng(1).integers(-7, 8, size=(5, 32)).astype(np.float32)
    grid[:, 0] = 7
    grid *= np.array([0.25, 1, 2, 0.5, 4], dtype=np.float32)[:, None]
    assert np.array_equal(dequantise_q4_0(quantise_q4_0(grid), grid.size), grid.reshape(-1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"magic": b"GGUF"}, "magic b'GGUF'"),
        ({"version": 2}, "version 2"),
        ({"block": 64}, "blocks of 64"),
        ({"kind_of_last": 7}, "has type 7"),
        ({"bytes_of_last": 3}, "takes 3 bytes"),
    ],
)
def test_reader_refuses_what_it_does_not_know(change, message):
    with pytest.raises(ArtifactError, match=message):
        read_container(ContainerSpec(**change).build())


def test_reader_refuses_every_truncation():
    data = ContainerSpec().build()
    lengths = [*range(0, 400, 7), *range(400, len(data), 997), len(data) - 1]
    for length in lengths:
        with pytest.raises(ArtifactError, match="truncated"):
            read_container(data[:length])


def test_reader_refuses_sizes_from_a_damaged_header():
    data = bytearray(ContainerSpec().build())
    struct.pack_into("<i", data, 44, -5)  # number of pieces
    with pytest.raises(ArtifactError, match="damaged"):
        read_container(bytes(data))


def test_converted_weights_are_the_dequantised_ones(converted):
    container = read_container(ContainerSpec().build())
    saved = load_file(converted / "model.safetensors")
    assert len(saved) == len(container.tensors)
    for name, values in container.tensors.items():
        expected = torch.from_numpy(values.copy()).to(dtype=torch.float16)
        assert torch.equal(saved[hf_name(name)].reshape(-1), expected), name


def test_converted_model_loads_complete_and_runs(converted):
    model, loaded = BertModel.from_pretrained(
        converted, add_pooling_layer=False, dtype=torch.float32, output_loading_info=True
    )
    assert not any(loaded.values())
    tokens = AutoTokenizer.from_pretrained(converted)(["a b", "c"], padding=True,
                                                      return_tensors="pt")
    assert model(**tokens).last_hidden_state.shape == (*tokens.input_ids.shape, HIDDEN)


def test_tokenizer_frames_single_texts_and_pairs(converted):
    tokenizer = AutoTokenizer.from_pretrained(converted)
    pieces = tokenizer.convert_ids_to_tokens
    assert pieces(tokenizer("a").input_ids) == ["<s>", "▁a", "</s>"]
    assert pieces(tokenizer("a", "b").input_ids) == ["<s>", "▁a", "</s>", "</s>", "▁b", "</s>"]
    assert set(tokenizer("a", "b")) == {"input_ids", "attention_mask"}
    assert tokenizer.pad_token_id == 1


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("ａ\n\tb", "a b"),  # full width, line break and tab
        ("a\u200bb", "a b"),  # zero-width space
        ("a\x07b", "ab"),  # control character
        (" a   b ", "a b"),
        ("e\u0301", "é"),  # composed, as NFKC does
    ],
)
def test_tokenizer_normalises_as_the_container_says(converted, text, plain):
    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert tokenizer(text).input_ids == tokenizer(plain).input_ids
    assert tokenizer.unk_token_id not in tokenizer(text).input_ids


def test_tokenizer_keeps_the_full_width_tilde_that_nfkc_would_change(converted):
    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert tokenizer.tokenize("3～3天") == ["▁", "3", "～", "3", "天"]


def test_conversion_refuses_a_normalisation_it_cannot_rebuild(tmp_path):
    model_path = tmp_path / "model.bin"
    model_path.write_bytes(ContainerSpec(normalisation={"a": "b"}).build())
    with pytest.raises(ArtifactError, match="normalises \\['a'\\]"):
        convert_e5s1(model_path, tmp_path)


@pytest.mark.parametrize("name", ["l0.zz.w", "pooler.w", "l0.q.c", "lx.q.w"])
def test_unknown_tensor_names_are_refused(name):
    with pytest.raises(ArtifactError, match="no BertModel has"):
        hf_name(name)


def test_conversion_refuses_tensors_that_do_not_fit_the_header(tmp_path):
    tensors = tiny_tensors()
    tensors["emb.pos"] = tensors["emb.pos"][:-1]
    model_path = tmp_path / "model.bin"
    model_path.write_bytes(ContainerSpec(tensors=tensors).build())
    with pytest.raises(ArtifactError, match="emb.pos"):
        convert_e5s1(model_path, tmp_path)
