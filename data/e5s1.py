"""Reader of the E5S1 container, and its conversion to a BertModel in Hugging Face layout.

The container holds a multilingual E5: hyper-parameters, the Unigram tokenizer and the tensors,
matrices in Q4_0 blocks. Reading needs numpy only; converting needs torch and transformers.
"""

import struct
from dataclasses import dataclass

import numpy as np

from memory_runtime.errors import ArtifactError

MAGIC = b"E5S1"
VERSION = 1
BLOCK = 32
FLOAT32, Q4_0 = 0, 1
# fp16 scale, then 16 bytes of two weights each.
Q4_0_BLOCK = np.dtype([("scale", "<f2"), ("nibbles", "u1", (BLOCK // 2,))])


@dataclass(frozen=True)
class Shape:
    """Hyper-parameters of the model in the container."""

    hidden: int
    layers: int
    heads: int
    feed_forward: int
    vocab: int
    max_positions: int
    token_types: int
    eps: float


@dataclass(frozen=True)
class Pieces:
    """The Unigram tokenizer of the container."""

    texts: list[str]
    scores: list[float]
    bos: int
    eos: int
    pad: int
    unk: int
    normalisation: dict[str, str]
    """character to replacement; every character that is not here stays"""


@dataclass(frozen=True)
class Container:
    """All of an E5S1 file; tensors are flat, float32."""

    shape: Shape
    pieces: Pieces
    tensors: dict[str, np.ndarray]


class _Cursor:
    """Reads little-endian values one after the other and never past the end."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0

    def take(self, size: int) -> bytes:
        if size < 0 or self.position + size > len(self.data):
            raise ArtifactError(
                f"The E5S1 container ends at byte {len(self.data)}, but {size} bytes are due at "
                f"{self.position}: it is truncated or damaged; delete it and download it again"
            )
        chunk = self.data[self.position : self.position + size]
        self.position += size
        return chunk

    def values(self, layout: str) -> tuple[int | float, ...]:
        return struct.unpack(f"<{layout}", self.take(struct.calcsize(f"<{layout}")))

    def integers(self, layout: str) -> tuple[int, ...]:
        return tuple(int(value) for value in self.values(layout))


def read_container(data: bytes) -> Container:
    """Parse a whole E5S1 container.

    Raises:
        ArtifactError: wrong magic or version, truncated, or an unknown tensor type.
    """
    cursor = _Cursor(data)
    magic = cursor.take(len(MAGIC))
    (version,) = cursor.integers("I")
    if magic != MAGIC or version != VERSION:
        raise ArtifactError(
            f"Not an E5S1 container: magic {magic!r} version {version}, allowed is {MAGIC!r} "
            f"version {VERSION}; check which file of the carrier was taken"
        )
    return Container(_read_shape(cursor), _read_pieces(cursor), _read_tensors(cursor))


def dequantise_q4_0(raw: bytes, count: int) -> np.ndarray:
    """Return `count` float32 weights of Q4_0 blocks.

    Low nibbles are weights 0-15 of a block, high nibbles 16-31; 8 is zero.
    """
    blocks = np.frombuffer(raw, dtype=Q4_0_BLOCK)
    nibbles = blocks["nibbles"]
    weights = np.concatenate([nibbles & 0x0F, nibbles >> 4], axis=1).astype(np.float32) - 8.0
    weights *= blocks["scale"].astype(np.float32)[:, None]  # [blocks, 32]
    return weights.reshape(-1)[:count]


def _read_shape(cursor: _Cursor) -> Shape:
    hidden, layers, heads, feed_forward, vocab, max_positions, token_types = cursor.integers("7i")
    eps, block = cursor.values("fi")
    if block != BLOCK:
        raise ArtifactError(
            f"The E5S1 container has blocks of {block} weights; only {BLOCK} can be read"
        )
    return Shape(
        hidden=hidden,
        layers=layers,
        heads=heads,
        feed_forward=feed_forward,
        vocab=vocab,
        max_positions=max_positions,
        token_types=token_types,
        # Seven digits undo the trip through fp32.
        eps=float(f"{eps:.7g}"),
    )


def _read_pieces(cursor: _Cursor) -> Pieces:
    count, bos, eos, pad, unk = cursor.integers("5i")
    (blob_bytes,) = cursor.integers("Q")
    offsets = np.frombuffer(cursor.take(4 * (count + 1)), dtype="<u4")
    scores = np.frombuffer(cursor.take(4 * count), dtype="<f4")
    blob = cursor.take(blob_bytes)
    texts = [blob[offsets[i] : offsets[i + 1]].decode("utf-8") for i in range(count)]
    return Pieces(texts, scores.tolist(), bos, eos, pad, unk, _read_normalisation(cursor))


def _read_normalisation(cursor: _Cursor) -> dict[str, str]:
    count, size = cursor.integers("iI")
    inner = _Cursor(cursor.take(size))
    table = {}
    for _ in range(count):
        source, length = inner.integers("IB")
        table[chr(source)] = "".join(chr(code) for code in inner.integers(f"{length}I"))
    return table


def _read_tensors(cursor: _Cursor) -> dict[str, np.ndarray]:
    (count,) = cursor.integers("i")
    tensors = {}
    for _ in range(count):
        (name_bytes,) = cursor.integers("H")
        name = cursor.take(name_bytes).decode("utf-8")
        kind, size, offset, raw_bytes = cursor.integers("BIQQ")
        tensors[name] = _read_tensor(cursor.data, name, kind, size, offset, raw_bytes)
    return tensors


def _read_tensor(
    data: bytes, name: str, kind: int, size: int, offset: int, raw_bytes: int
) -> np.ndarray:
    expected = {FLOAT32: 4 * size, Q4_0: -(-size // BLOCK) * Q4_0_BLOCK.itemsize}
    if kind not in expected:
        raise ArtifactError(
            f"The tensor {name!r} has type {kind}; allowed are {FLOAT32} (float32) and {Q4_0} "
            "(Q4_0)"
        )
    if raw_bytes != expected[kind]:
        raise ArtifactError(
            f"The tensor {name!r} of {size} weights takes {raw_bytes} bytes, expected "
            f"{expected[kind]}; the container is damaged"
        )
    body = _Cursor(data)
    body.position = offset
    raw = body.take(raw_bytes)
    return np.frombuffer(raw, dtype="<f4") if kind == FLOAT32 else dequantise_q4_0(raw, size)
