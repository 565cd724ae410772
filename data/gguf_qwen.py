"""Qwen2 weights and tokenizer from a GGUF file to Hugging Face layout.

Weights are dequantised once and written in bfloat16; the embedding and the output matrix,
which a GGUF keeps in two quantisations, become one tied matrix. Other architectures are refused.
"""

from dataclasses import dataclass
from pathlib import Path

import gguf
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen2Config
from transformers.models.qwen2 import Qwen2Tokenizer

from data.carriers import Report, no_report
from memory_runtime.errors import ArtifactError

ARCHITECTURE = "qwen2"
DTYPE = torch.bfloat16
TOP_LEVEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Token types of the GGUF format that become added tokens; "unused" ones only pad the matrix.
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer as a GGUF stores it."""

    tokens: list[str]
    token_types: list[int]
    merges: list[str]
    chat_template: str
    end_of_turn_id: int
    pad_id: int


def convert_gguf(model_path: Path, target: Path, *, report: Report = no_report) -> dict[str, str]:
    """Write config, weights, generation config and tokenizer of a Qwen2 GGUF into `target`.

    Args:
        model_path: Verified GGUF file.
        target: Empty directory.
        report: Receives the number of tensors done.

    Returns:
        What was done to the weights, for the provenance file.

    Raises:
        ArtifactError: another architecture, an unknown tensor, or a result that does not load.
    """
    reader = gguf.GGUFReader(model_path)
    architecture = _text(reader, "general.architecture")
    if architecture != ARCHITECTURE:
        raise ArtifactError(
            f"{model_path} holds the architecture {architecture!r}; only {ARCHITECTURE!r} can be "
            "converted; take the base in Hugging Face layout instead"
        )
    vocabulary = read_vocabulary(reader)
    write_tokenizer(vocabulary, target, max_length=_integer(reader, "qwen2.context_length"))
    _config(reader, vocabulary).save_pretrained(target)
    _generation_config(vocabulary).save_pretrained(target)
    embedding = _better_embedding(reader)
    weights = read_weights(reader, embedding, report=report)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    report("check", 0, 1)
    check_causal_lm(target)
    report("check", 1, 1)
    return {
        "dtype": "bfloat16",
        "source_name": _text(reader, "general.name"),
        "source_quantisation": _quantisations(reader),
        "tied_embedding_from": f"{embedding.name} ({embedding.tensor_type.name})",
    }


def read_weights(
    reader: gguf.GGUFReader, embedding: gguf.ReaderTensor, *, report: Report = no_report
) -> dict[str, torch.Tensor]:
    """Dequantise every tensor, [out, in] as in torch, under its Hugging Face name.

    `embedding` is the matrix that serves both as embedding and, tied, as output.
    """
    weights = {"model.embed_tokens.weight": _dequantise(embedding)}
    for number, tensor in enumerate(reader.tensors, start=1):
        if tensor.name not in ("token_embd.weight", "output.weight"):
            weights[hf_name(tensor.name)] = _dequantise(tensor)
        report("convert", number, len(reader.tensors))
    return weights


def hf_name(name: str) -> str:
    """Return the Hugging Face name of a GGUF tensor.

    Raises:
        ArtifactError: a tensor that a Qwen2 model does not have.
    """
    stem, _, leaf = name.rpartition(".")
    if stem in TOP_LEVEL_NAMES:
        return f"{TOP_LEVEL_NAMES[stem]}.{leaf}"
    block, _, inner = stem.partition(".")
    layer, _, module = inner.partition(".")
    if block != "blk" or not layer.isdecimal() or module not in LAYER_NAMES:
        raise ArtifactError(
            f"The GGUF holds a tensor {name!r} that no Qwen2 model has; allowed in a layer are "
            f"{', '.join(LAYER_NAMES)}; take the base in Hugging Face layout instead"
        )
    return f"model.layers.{layer}.{LAYER_NAMES[module]}.{leaf}"


def read_vocabulary(reader: gguf.GGUFReader) -> Vocabulary:
    """Read the tokenizer out of the GGUF's metadata."""
    types = reader.fields["tokenizer.ggml.token_type"]
    return Vocabulary(
        tokens=_texts(reader, "tokenizer.ggml.tokens"),
        token_types=[int(types.parts[index][0]) for index in types.data],
        merges=_texts(reader, "tokenizer.ggml.merges"),
        chat_template=_text(reader, "tokenizer.chat_template"),
        end_of_turn_id=_integer(reader, "tokenizer.ggml.eos_token_id"),
        pad_id=_integer(reader, "tokenizer.ggml.padding_token_id"),
    )


def write_tokenizer(vocabulary: Vocabulary, target: Path, *, max_length: int) -> None:
    """Write a fast Qwen2 tokenizer with the GGUF's chat template.

    Raises:
        ArtifactError: added tokens do not get the ids that the weights were trained with.
    """
    typed = list(enumerate(zip(vocabulary.tokens, vocabulary.token_types, strict=True)))
    added = {i: (t, kind) for i, (t, kind) in typed if kind in (CONTROL, USER_DEFINED)}
    tokenizer = Qwen2Tokenizer(
        # Added tokens stand in the vocabulary too: only so do they keep their ids, since the
        # constructor adds its own special tokens first and in its own order.
        vocab={token: i for i, (token, kind) in typed if kind == NORMAL or i in added},
        merges=[tuple(merge.split(" ")) for merge in vocabulary.merges],
        unk_token=None,
        eos_token=vocabulary.tokens[vocabulary.end_of_turn_id],
        pad_token=vocabulary.tokens[vocabulary.pad_id],
        model_max_length=max_length,
        chat_template=vocabulary.chat_template,
    )
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind == CONTROL, normalized=False)
            for token, kind in added.values()
        ]
    )
    wrong = [t for i, (t, _) in added.items() if tokenizer.convert_tokens_to_ids(t) != i]
    if wrong:
        raise ArtifactError(
            f"The added tokens {wrong} did not get the ids that the GGUF gives them; its "
            "vocabulary is not laid out like that of Qwen2"
        )
    tokenizer.save_pretrained(target)


def check_causal_lm(directory: Path) -> None:
    """Load what was written, as a user would, and check what the encoder relies on.

    Raises:
        ArtifactError: missing or unexpected weights, untied output, a digit that is not one
            token, or a chat template without turn marks.
    """
    model, loaded = AutoModelForCausalLM.from_pretrained(
        directory, dtype=DTYPE, local_files_only=True, output_loading_info=True
    )
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    faults = [f"{kind}: {sorted(keys)}" for kind, keys in loaded.items() if keys]
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        faults.append("the output matrix is not tied to the embedding")
    for digit in "0123456789":
        if len(tokenizer.encode(digit, add_special_tokens=False)) != 1:
            faults.append(f"the digit {digit} is not one token")
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
    )
    if prompt != expected:
        faults.append(f"the chat template renders {prompt!r}, expected {expected!r}")
    if faults:
        raise ArtifactError(
            f"The converted model in {directory} is not usable: {'; '.join(faults)}; the carrier "
            "or the installed transformers is not the one this was written for"
        )


def _config(reader: gguf.GGUFReader, vocabulary: Vocabulary) -> Qwen2Config:
    prefix = ARCHITECTURE
    config = Qwen2Config(
        vocab_size=len(vocabulary.tokens),
        hidden_size=_integer(reader, f"{prefix}.embedding_length"),
        intermediate_size=_integer(reader, f"{prefix}.feed_forward_length"),
        num_hidden_layers=_integer(reader, f"{prefix}.block_count"),
        num_attention_heads=_integer(reader, f"{prefix}.attention.head_count"),
        num_key_value_heads=_integer(reader, f"{prefix}.attention.head_count_kv"),
        max_position_embeddings=_integer(reader, f"{prefix}.context_length"),
        # Seven digits undo the trip through fp32 (9.999999974752427e-07).
        rms_norm_eps=float(f"{_number(reader, f'{prefix}.attention.layer_norm_rms_epsilon'):.7g}"),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": _number(reader, f"{prefix}.rope.freq_base"),
        },
        tie_word_embeddings=True,
        use_sliding_window=False,
        bos_token_id=vocabulary.pad_id,
        eos_token_id=vocabulary.end_of_turn_id,
        pad_token_id=vocabulary.pad_id,
        dtype=DTYPE,
    )
    config.architectures = ["Qwen2ForCausalLM"]
    return config


def _generation_config(vocabulary: Vocabulary) -> GenerationConfig:
    """Greedy; ends at the end of the turn or of the text."""
    return GenerationConfig(
        do_sample=False,
        bos_token_id=vocabulary.pad_id,
        eos_token_id=[vocabulary.end_of_turn_id, vocabulary.pad_id],
        pad_token_id=vocabulary.pad_id,
    )


def _better_embedding(reader: gguf.GGUFReader) -> gguf.ReaderTensor:
    """Return the copy of the embedding that was kept with more bits."""
    copies = [t for t in reader.tensors if t.name in ("token_embd.weight", "output.weight")]
    if not copies:
        raise ArtifactError(
            "The GGUF holds neither token_embd.weight nor output.weight; it is no language model"
        )
    return max(copies, key=lambda tensor: tensor.n_bytes / tensor.n_elements)


def _dequantise(tensor: gguf.ReaderTensor) -> torch.Tensor:
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    # A copy, since float32 tensors come as a read-only view of the file.
    return torch.from_numpy(values.copy()).to(dtype=DTYPE)


def _quantisations(reader: gguf.GGUFReader) -> str:
    return ", ".join(sorted({tensor.tensor_type.name for tensor in reader.tensors}))


def _field(reader: gguf.GGUFReader, key: str) -> gguf.ReaderField:
    if key not in reader.fields:
        raise ArtifactError(f"The GGUF has no field {key!r}; it is not a complete Qwen2 model")
    return reader.fields[key]


def _text(reader: gguf.GGUFReader, key: str) -> str:
    return str(_field(reader, key).contents())


def _integer(reader: gguf.GGUFReader, key: str) -> int:
    return int(_field(reader, key).contents())


def _number(reader: gguf.GGUFReader, key: str) -> float:
    return float(_field(reader, key).contents())


def _texts(reader: gguf.GGUFReader, key: str) -> list[str]:
    field = _field(reader, key)
    return [bytes(field.parts[index]).decode("utf-8") for index in field.data]
