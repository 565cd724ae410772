"""An E5S1 container to a BertModel and a fast Unigram tokenizer in Hugging Face layout."""

import re
import unicodedata
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import AutoTokenizer, BertConfig, BertModel, PreTrainedTokenizerFast

from data.carriers import Report, no_report
from data.e5s1 import Container, Pieces, Shape, read_container
from memory_runtime.errors import ArtifactError

DTYPE = torch.float16
METASPACE = "\u2581"
MASK = "<mask>"
# A private-use character stands for one that the container keeps but NFKC would change.
STAND_IN = 0xE000
EMBEDDING_NAMES = {
    "emb.word": "embeddings.word_embeddings.weight",
    "emb.pos": "embeddings.position_embeddings.weight",
    "emb.type": "embeddings.token_type_embeddings.weight",
    "emb.ln.w": "embeddings.LayerNorm.weight",
    "emb.ln.b": "embeddings.LayerNorm.bias",
}
LAYER_NAMES = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "ao": "attention.output.dense",
    "aln": "attention.output.LayerNorm",
    "fi": "intermediate.dense",
    "fo": "output.dense",
    "oln": "output.LayerNorm",
}
LEAVES = {"w": "weight", "b": "bias"}


def convert_e5s1(model_path: Path, target: Path, *, report: Report = no_report) -> dict[str, str]:
    """Write config, weights and tokenizer of an E5S1 container into `target`.

    Args:
        model_path: Verified container.
        target: Empty directory.
        report: Receives the number of tensors done.

    Returns:
        What was done to the weights, for the provenance file.

    Raises:
        ArtifactError: the container is damaged, or the result does not load.
    """
    container = read_container(model_path.read_bytes())
    bert_config(container).save_pretrained(target)
    write_tokenizer(container, target)
    save_file(state_dict(container, report), target / "model.safetensors", {"format": "pt"})
    report("check", 0, 1)
    check_bert(target, container.shape)
    report("check", 1, 1)
    return {
        "dtype": str(DTYPE).removeprefix("torch."),
        "source_quantisation": "Q4_0 matrices, F32 biases, norms and positions",
        "pooler": "none: the container has no pooler; pool by mean and normalise",
    }


def bert_config(container: Container) -> BertConfig:
    """Return the configuration of the container's model."""
    shape, pieces = container.shape, container.pieces
    config = BertConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=shape.feed_forward,
        max_position_embeddings=shape.max_positions,
        type_vocab_size=shape.token_types,
        layer_norm_eps=shape.eps,
        hidden_act="gelu",
        pad_token_id=pieces.pad,
        bos_token_id=pieces.bos,
        eos_token_id=pieces.eos,
        dtype=DTYPE,
    )
    config.architectures = ["BertModel"]
    return config


def state_dict(container: Container, report: Report = no_report) -> dict[str, torch.Tensor]:
    """Return the tensors under their BertModel names, matrices as [out, in]."""
    tensors = {}
    for number, (name, values) in enumerate(container.tensors.items(), start=1):
        full_name = hf_name(name)
        size = _size(full_name, container.shape)
        if values.size != int(np.prod(size)):
            raise ArtifactError(
                f"The tensor {name!r} has {values.size} weights, {size} was expected; the "
                "container's header and its tensors do not fit"
            )
        tensors[full_name] = torch.from_numpy(values.reshape(size).copy()).to(dtype=DTYPE)
        report("convert", number, len(container.tensors))
    return tensors


def hf_name(name: str) -> str:
    """Return the BertModel name of a tensor of the container.

    Raises:
        ArtifactError: a tensor that a BertModel does not have.
    """
    if name in EMBEDDING_NAMES:
        return EMBEDDING_NAMES[name]
    match = re.fullmatch(r"l(\d+)\.(\w+)\.([wb])", name)
    if match is None or match[2] not in LAYER_NAMES:
        raise ArtifactError(
            f"The container holds a tensor {name!r} that no BertModel has; allowed in a layer are "
            f"{', '.join(LAYER_NAMES)}"
        )
    return f"encoder.layer.{match[1]}.{LAYER_NAMES[match[2]]}.{LEAVES[match[3]]}"


def build_tokenizer(pieces: Pieces) -> Tokenizer:
    """Rebuild the Unigram tokenizer: NFKC, Metaspace, `<s> A </s> </s> B </s>`."""
    vocab = list(zip(pieces.texts, pieces.scores, strict=True))
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=pieces.unk, byte_fallback=False))
    tokenizer.normalizer = _normalizer(pieces)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(METASPACE, prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(METASPACE, prepend_scheme="always")
    bos, eos = pieces.texts[pieces.bos], pieces.texts[pieces.eos]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A {eos}",
        pair=f"{bos} $A {eos} {eos} $B {eos}",
        special_tokens=[(bos, pieces.bos), (eos, pieces.eos)],
    )
    special = [pieces.texts[i] for i in (pieces.bos, pieces.pad, pieces.eos, pieces.unk)]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    return tokenizer


def write_tokenizer(container: Container, target: Path) -> None:
    """Write the tokenizer as transformers loads it."""
    pieces = container.pieces
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(pieces),
        bos_token=pieces.texts[pieces.bos],
        cls_token=pieces.texts[pieces.bos],
        eos_token=pieces.texts[pieces.eos],
        sep_token=pieces.texts[pieces.eos],
        pad_token=pieces.texts[pieces.pad],
        unk_token=pieces.texts[pieces.unk],
        mask_token=AddedToken(MASK, lstrip=True, normalized=False),
        model_max_length=container.shape.max_positions,
        # The model was trained with one token type only.
        model_input_names=["input_ids", "attention_mask"],
    )
    tokenizer.save_pretrained(target)


def check_bert(directory: Path, shape: Shape) -> None:
    """Load what was written, as a user would.

    Raises:
        ArtifactError: missing or unexpected weights, or a tokenizer of another size.
    """
    _, loaded = BertModel.from_pretrained(
        directory,
        add_pooling_layer=False,
        dtype=DTYPE,
        local_files_only=True,
        output_loading_info=True,
    )
    faults = [f"{kind}: {sorted(keys)}" for kind, keys in loaded.items() if keys]
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    if len(tokenizer) > shape.vocab:
        faults.append(f"{len(tokenizer)} tokens for {shape.vocab} embeddings")
    if faults:
        raise ArtifactError(
            f"The converted model in {directory} is not usable: {'; '.join(faults)}; the carrier "
            "or the installed transformers is not the one this was written for"
        )


def _normalizer(pieces: Pieces) -> normalizers.Normalizer:
    """NFKC with the exceptions of the container's own table.

    The table drops control characters and makes line breaks and zero-width characters spaces;
    it also keeps the full-width tilde, which Chinese ranges are written with. It maps single
    characters only, so NFKC proper adds what it lacks: composition of combining marks.
    """
    dropped, spaced, kept = _exceptions(pieces)
    steps: list[normalizers.Normalizer] = []
    if dropped:
        steps.append(normalizers.Replace(Regex(_character_class(dropped)), ""))
    if spaced:
        steps.append(normalizers.Replace(Regex(_character_class(spaced)), " "))
    stand_ins = {text: chr(STAND_IN + number) for number, text in enumerate(kept)}
    steps += [normalizers.Replace(text, stand_in) for text, stand_in in stand_ins.items()]
    steps.append(normalizers.NFKC())
    steps += [normalizers.Replace(stand_in, text) for text, stand_in in stand_ins.items()]
    steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip()]
    return normalizers.Sequence(steps)


def _exceptions(pieces: Pieces) -> tuple[list[str], list[str], list[str]]:
    """Return the characters that the table drops, makes a space, and keeps, unlike NFKC."""
    table = pieces.normalisation
    odd = {c: to for c, to in table.items() if to != unicodedata.normalize("NFKC", c)}
    dropped = sorted(c for c, to in odd.items() if to == "")
    spaced = sorted(c for c, to in odd.items() if to == " ")
    if len(dropped) + len(spaced) != len(odd):
        strange = sorted(c for c, to in odd.items() if to not in ("", " "))
        raise ArtifactError(
            f"The container normalises {strange} in a way that NFKC does not; only dropping a "
            "character or making it a space can be rebuilt"
        )
    used = {c for text in pieces.texts for c in text if c != METASPACE and c not in table}
    kept = sorted(c for c in used if unicodedata.normalize("NFKC", c) != c)
    return dropped, spaced, kept


def _character_class(characters: list[str]) -> str:
    return "[" + "".join(f"\\x{{{ord(c):04x}}}" for c in characters) + "]"


def _size(full_name: str, shape: Shape) -> tuple[int, ...]:
    """Return the size of a tensor, [out, in] for matrices."""
    fixed = {
        "embeddings.word_embeddings.weight": (shape.vocab, shape.hidden),
        "embeddings.position_embeddings.weight": (shape.max_positions, shape.hidden),
        "embeddings.token_type_embeddings.weight": (shape.token_types, shape.hidden),
    }
    if full_name in fixed:
        return fixed[full_name]
    is_matrix = full_name.endswith("weight") and "LayerNorm" not in full_name
    if "intermediate" in full_name:
        return (shape.feed_forward, shape.hidden) if is_matrix else (shape.feed_forward,)
    if is_matrix and "attention" not in full_name:
        return shape.hidden, shape.feed_forward
    return (shape.hidden, shape.hidden) if is_matrix else (shape.hidden,)
