"""Opens what training wrote: an adapter, its tokenizer and its calibration, all of it checked.

Training and serving meet on disk only; this file is serving's side of that meeting.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memory_runtime.errors import ArtifactError
from memory_runtime.prompt import prompt_sha256, quotes_sha256
from memory_runtime.schema import SCHEMA_VERSION, SCORE_NAMES
from memory_runtime.weights import HEAD_OF_TYPE, base_sha256, file_sha256, weight_files

KINDS = ("encoder", "reranker")
MAX_RANK = 64
REQUIRED_FILES = (
    "adapter_model.safetensors", "adapter_config.json", "calibration.json",
    "tokenizer/tokenizer.json",
)
HEADS = {
    ("classifier", "pooler"): ("bert.pooler.dense", "classifier"),
    ("classifier",): ("classifier.dense", "classifier.out_proj"),
}
"""Linear maps that a reranker adapter carries in full, [D, D] then [1, D], by its modules_to_save.

The first is the head of a BERT classifier, the second that of a RoBERTa one (bge-reranker).
"""
_HEAD_NAME = re.compile(r"(?:^|\.)(?:pooler|classifier)(?:\.|$)")
_BACKBONE = re.compile(r"^(?:bert|roberta)\.")

PEFT_PREFIX = "base_model.model."

_log = logging.getLogger(__name__)

# Settings of PEFT that change the arithmetic in ways the merge here does not follow.
_REFUSED_OPTIONS = (
    "use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "lora_bias", "fan_in_fan_out",
    "exclude_modules", "layers_pattern", "layer_replication", "target_parameters",
    "trainable_token_indices", "use_qalora", "use_bdlora", "alora_invocation_tokens",
    "megatron_config",
)


@dataclass(frozen=True, slots=True)
class Artifact:
    """A verified artifact directory.

    Attributes:
        path: The directory.
        kind: `encoder` or `reranker`.
        manifest: manifest.json.
        calibration: calibration.json.
        adapter: adapter_config.json.
    """

    path: Path
    kind: str
    manifest: dict[str, Any]
    calibration: dict[str, Any]
    adapter: dict[str, Any]

    @property
    def digest(self) -> str:
        """Short name of exactly these weights and this calibration."""
        listing = json.dumps(self.manifest["files"], sort_keys=True)
        return hashlib.sha256(listing.encode()).hexdigest()[:12]

    @property
    def name(self) -> str:
        """Directory name, for logs and /v1/models."""
        return self.path.name

    @property
    def quotes(self) -> bool:
        """Whether this encoder writes quotations and is decoded under their grammar."""
        return self.manifest.get("quotes_sha256") is not None

    @property
    def weights_path(self) -> Path:
        """The adapter's tensors."""
        return self.path / "adapter_model.safetensors"

    @property
    def tokenizer_path(self) -> Path:
        """Directory of the tokenizer that training used."""
        return self.path / "tokenizer"

    @property
    def scaling(self) -> float:
        """What the product B·A is multiplied by."""
        return float(self.adapter["lora_alpha"]) / int(self.adapter["r"])


def open_artifact(directory: str | Path, *, base: str | Path | None = None) -> Artifact:
    """Open and verify an artifact.

    Args:
        directory: The artifact directory.
        base: The base directory that it will be merged into; when given, the base's hash and the
            names and shapes of the adapter's tensors are checked against it.

    Raises:
        ArtifactError: A file is missing, damaged, of another schema or does not fit the base.
    """
    path = Path(directory)
    if not path.is_dir():
        raise ArtifactError(f"no artifact at {path}: not a directory; make one with `make train`")
    manifest = _read_json(path / "manifest.json")
    _check_manifest(path, manifest)
    _check_files(path, manifest["files"])
    calibration = _read_json(path / "calibration.json")
    faults = calibration_faults(manifest["kind"], calibration)
    if faults:
        raise ArtifactError(f"{path / 'calibration.json'}: " + "; ".join(faults))
    adapter = _read_json(path / "adapter_config.json")
    _check_adapter_config(path, manifest["kind"], adapter)
    artifact = Artifact(path, manifest["kind"], manifest, calibration, adapter)
    _check_adapter_keys(artifact)
    if base is not None:
        check_base(artifact, Path(base))
    return artifact


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ArtifactError(f"{path} is missing; the directory is no whole artifact") from error
    except (ValueError, OSError) as error:
        raise ArtifactError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise ArtifactError(f"{path} must hold a JSON object, got {type(data).__name__}")
    return data


def _check_manifest(path: Path, manifest: dict[str, Any]) -> None:
    where = path / "manifest.json"
    missing = [key for key in ("schema_version", "kind", "base", "files") if key not in manifest]
    if missing:
        raise ArtifactError(f"{where} lacks {missing}; write it with the trainer of this version")
    if manifest["schema_version"] != SCHEMA_VERSION:
        raise ArtifactError(
            f"{where}: schema_version is {manifest['schema_version']!r}, this version reads "
            f"{SCHEMA_VERSION}; train again or install the version that wrote it")
    if manifest["kind"] not in KINDS:
        raise ArtifactError(f"{where}: kind is {manifest['kind']!r}, allowed are {list(KINDS)}")
    base, files = manifest["base"], manifest["files"]
    if not isinstance(base, dict) or not {"name", "sha256"} <= set(base):
        raise ArtifactError(f"{where}: base must hold name and sha256, got {base!r}")
    if not isinstance(files, dict):
        raise ArtifactError(f"{where}: files must map names to sha256, got {files!r}")
    if manifest["kind"] == "encoder" and manifest.get("prompt_sha256") != prompt_sha256():
        raise ArtifactError(
            f"{where}: prompt_sha256 is {manifest.get('prompt_sha256')!r}, this version prompts "
            f"with {prompt_sha256()!r}; an encoder only works with the prompt it was trained on")
    if manifest.get("quotes_sha256") not in (None, quotes_sha256()):
        raise ArtifactError(
            f"{where}: quotes_sha256 is {manifest['quotes_sha256']!r}, this version quotes as "
            f"{quotes_sha256()!r}; train again or install the version that wrote it")


def _check_files(path: Path, files: dict[str, str]) -> None:
    unlisted = [name for name in REQUIRED_FILES if name not in files]
    # Everything in tokenizer/ gets loaded, so nothing may lie there unchecked.
    present = {p.relative_to(path).as_posix() for p in (path / "tokenizer").rglob("*")
               if p.is_file()}
    unlisted += sorted(present - set(files) - set(unlisted))
    if unlisted:
        raise ArtifactError(f"{path / 'manifest.json'} lists no hash for {unlisted}")
    for name, expected in files.items():
        file = path / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ArtifactError(f"manifest of {path} names {name!r}, outside of the artifact")
        if not file.is_file():
            raise ArtifactError(f"{file} is in the manifest but missing; copy the artifact again")
        got = file_sha256(file)
        if got != expected:
            raise ArtifactError(
                f"{file} is damaged or was edited: sha256 {got}, the manifest says {expected}")


# --- the adapter ---


def _check_adapter_config(path: Path, kind: str, adapter: dict[str, Any]) -> None:
    where = path / "adapter_config.json"
    if adapter.get("peft_type") != "LORA":
        raise ArtifactError(f"{where}: peft_type is {adapter.get('peft_type')!r}, allowed: LORA")
    refused = [name for name in _REFUSED_OPTIONS if adapter.get(name)]
    if refused:
        raise ArtifactError(
            f"{where}: {refused} cannot be served; train plain LoRA with one rank, one alpha")
    if adapter.get("bias", "none") != "none":
        raise ArtifactError(f"{where}: bias is {adapter['bias']!r}, allowed: 'none'")
    rank, alpha = adapter.get("r"), adapter.get("lora_alpha")
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        raise ArtifactError(f"{where}: r is {rank!r}, allowed are 1..{MAX_RANK}")
    if type(alpha) not in (int, float):
        raise ArtifactError(f"{where}: lora_alpha is {alpha!r}, must be a number")
    # PEFT adds "score", which no BERT has, for every sequence classifier.
    saved = sorted(set(adapter.get("modules_to_save") or ()) - {"score"})
    allowed = [list(names) for names in HEADS] if kind == "reranker" else [[]]
    if saved not in allowed:
        raise ArtifactError(f"{where}: modules_to_save is {saved}, for {kind} it must be "
                            f"{' or '.join(map(str, allowed))}")


def head_tensors(artifact: Artifact) -> set[str]:
    """Names of the head's weights and biases; empty for an encoder."""
    if artifact.kind != "reranker":
        return set()
    saved = tuple(sorted(set(artifact.adapter["modules_to_save"]) - {"score"}))
    return {f"{module}.{part}" for module in HEADS[saved] for part in ("weight", "bias")}


def adapter_shapes(artifact: Artifact) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the adapter, without PEFT's prefix."""
    shapes = tensor_shapes(artifact.weights_path)
    odd = [name for name in shapes if not name.startswith(PEFT_PREFIX)]
    if odd:
        raise ArtifactError(f"{artifact.weights_path}: unexpected keys {odd[:5]}")
    return {name.removeprefix(PEFT_PREFIX): shape for name, shape in shapes.items()}


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes in a safetensors file, read from its header alone."""
    try:
        with path.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size)) if size < 100_000_000 else None
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path} is no safetensors file: {error}") from error
    if not isinstance(header, dict):
        raise ArtifactError(f"{path} is no safetensors file: its header is {size} bytes long")
    return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}


def _check_adapter_keys(artifact: Artifact) -> None:
    """Every LoRA matrix has its partner and the configured rank; nothing else is in the file."""
    shapes, rank = adapter_shapes(artifact), int(artifact.adapter["r"])
    modules = lora_modules(shapes)
    expected = {f"{module}.lora_{side}.weight" for module in modules for side in "AB"}
    head = head_tensors(artifact)
    missing, extra = sorted(expected - set(shapes)), sorted(set(shapes) - expected - head)
    if missing or extra or not modules:
        raise ArtifactError(
            f"{artifact.weights_path}: missing keys {missing[:5]}, unexpected keys {extra[:5]}, "
            f"{len(modules)} LoRA modules")
    if not head <= set(shapes):
        saved = sorted(set(artifact.adapter["modules_to_save"]) - {"score"}, reverse=True)
        raise ArtifactError(
            f"{artifact.weights_path}: needs weight and bias of {' and '.join(saved)}, "
            f"got {sorted(head & set(shapes))}")
    for module in modules:
        a, b = shapes[f"{module}.lora_A.weight"], shapes[f"{module}.lora_B.weight"]
        if a[0] != rank or b[1] != rank:
            raise ArtifactError(
                f"{artifact.weights_path}: {module} has shapes {a} and {b}, r is {rank}")


def lora_modules(names: Iterable[str]) -> list[str]:
    """Modules that have a LoRA matrix, in order of name."""
    return sorted({name.split(".lora_")[0] for name in names if ".lora_" in name})


# --- the base ---


def check_base(artifact: Artifact, base: Path) -> None:
    """Refuse a base that the adapter was not trained on.

    Raises:
        ArtifactError: The hash differs, or a tensor has no place in the base.
    """
    expected, got = artifact.manifest["base"]["sha256"], base_sha256(base)
    if got != expected:
        raise ArtifactError(
            f"{artifact.path} was trained on {artifact.manifest['base']['name']} with sha256 "
            f"{expected}, the base at {base} has {got}; give the matching base directory")
    _check_head_fits(artifact, base)
    inside = {_BACKBONE.sub("", name): shape for file in weight_files(base)
              for name, shape in tensor_shapes(file).items()}
    shapes = adapter_shapes(artifact)
    modules = lora_modules(shapes)
    for module in modules:
        weight = inside.get(f"{_BACKBONE.sub('', module)}.weight")
        want = (shapes[f"{module}.lora_B.weight"][0], shapes[f"{module}.lora_A.weight"][1])
        if weight != want:
            raise ArtifactError(
                f"{artifact.path}: {module} is {want}, the base at {base} has {weight} there")
    linear = [name.removesuffix(".weight") for name, shape in inside.items()
              if len(shape) == 2 and name.endswith(".weight") and "embed" not in name]
    have = {_BACKBONE.sub("", module) for module in modules}
    wanted = {m for m in linear if _is_target(m, artifact.adapter) and not _HEAD_NAME.search(m)}
    missing = sorted(wanted - have - {"lm_head"})
    if missing:
        raise ArtifactError(f"{artifact.path}: target_modules names {missing[:5]}, whose LoRA "
                            "matrices are missing from the adapter")


def _check_head_fits(artifact: Artifact, base: Path) -> None:
    """A BERT head has no place in a RoBERTa model, nor the reverse."""
    if artifact.kind != "reranker":
        return
    try:
        config = json.loads((base / "config.json").read_text(encoding="utf-8"))
        kind, hidden = config.get("model_type"), config.get("hidden_size")
    except (OSError, ValueError, AttributeError) as error:
        raise ArtifactError(f"{base / 'config.json'} cannot be read: {error}") from error
    if kind not in HEAD_OF_TYPE:
        raise ArtifactError(f"the base at {base} is of type {kind!r}; rerankers are served on "
                            f"{sorted(HEAD_OF_TYPE)}")
    saved = set(artifact.adapter["modules_to_save"]) - {"score"}
    if saved != set(HEAD_OF_TYPE[kind]):
        raise ArtifactError(
            f"{artifact.path}: its head {sorted(saved)} is none of a {kind} model, which the base "
            f"at {base} is")
    # Checked here because copying a row into a matrix would repeat it without a word.
    dense, out = HEADS[HEAD_OF_TYPE[kind]]
    wanted = {f"{dense}.weight": (hidden, hidden), f"{dense}.bias": (hidden,),
              f"{out}.weight": (1, hidden), f"{out}.bias": (1,)}
    shapes = adapter_shapes(artifact)
    wrong = [f"{name} is {shapes[name]}, must be {shape}" for name, shape in wanted.items()
             if shapes[name] != shape]
    if wrong:
        raise ArtifactError(f"{artifact.path}: its head does not fit the base at {base}: "
                            + "; ".join(wrong))


def _is_target(module: str, adapter: dict[str, Any]) -> bool:
    targets = adapter.get("target_modules") or ()
    names = (module, f"bert.{module}", f"roberta.{module}")
    layers = adapter.get("layers_to_transform")
    if layers is not None:
        number = re.search(r"\.layers?\.(\d+)\.", module)
        if number is None or int(number[1]) not in ([layers] if type(layers) is int else layers):
            return False
    if targets == "all-linear":
        return True
    if isinstance(targets, str):
        return any(re.fullmatch(targets, name) for name in names)
    return any(name == t or name.endswith(f".{t}") for t in targets for name in names)


# --- calibration ---


def _map_faults(name: str, mapping: object) -> list[str]:
    kind = mapping.get("kind") if isinstance(mapping, dict) else None
    if not isinstance(mapping, dict) or kind not in ("identity", "platt", "isotonic"):
        return [f"{name} is {mapping!r}, allowed kinds are identity, platt, isotonic"]
    if kind == "platt" and not all(_is_number(mapping.get(k)) for k in ("a", "b")):
        return [f"{name} needs numbers a and b, got {mapping!r}"]
    if kind == "isotonic":
        x, y = mapping.get("x"), mapping.get("y")
        fits = isinstance(x, list) and isinstance(y, list) and 0 < len(x) == len(y)
        if not fits or not all(map(_is_number, [*x, *y])) or x != sorted(x) or y != sorted(y):
            return [f"{name} needs equally long, rising lists x and y of numbers"]
        if min(y) < 0 or max(y) > 1:
            return [f"{name} maps to {min(y)}..{max(y)}, allowed is 0..1"]
    return []


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and np.isfinite(value)


def calibration_faults(kind: str, calibration: dict[str, Any]) -> list[str]:
    """Everything that is wrong with a calibration, as sentences."""
    if kind == "reranker":
        return _map_faults("relevance", calibration.get("relevance"))
    floor, scores = calibration.get("keep_floor"), calibration.get("scores")
    faults = _map_faults("keep", calibration.get("keep"))
    if not _is_number(floor) or not 0 <= floor <= 1:
        faults.append(f"keep_floor is {floor!r}, allowed is 0..1")
    if not _is_number(calibration.get("empty_bias", 0.0)):
        faults.append(f"empty_bias is {calibration['empty_bias']!r}, must be a number")
    if not isinstance(scores, dict) or set(scores) != set(SCORE_NAMES):
        faults.append(f"scores must have a map for each of {list(SCORE_NAMES)}, got {scores!r}")
        return faults
    for name, mapping in scores.items():
        faults += _map_faults(f"scores.{name}", mapping)
    return faults


def apply_map(
    mapping: dict[str, Any], values: ArrayLike, *, logits: bool = False
) -> NDArray[np.float64]:
    """Apply a calibration map.

    Args:
        mapping: A MAP of calibration.json.
        values: Expected values in [0, 1] (the encoder's), or logits (the reranker's).
        logits: Which of the two.

    Returns:
        Probabilities, the shape of `values`, float64. The identity of a logit is its sigmoid.
    """
    x = np.asarray(values, dtype=np.float64)
    kind = mapping["kind"]
    if kind == "isotonic":
        return np.interp(x, mapping["x"], mapping["y"])
    if kind == "identity" and not logits:
        return np.clip(x, 0.0, 1.0)
    if not logits:
        clipped = np.clip(x, 1e-4, 1 - 1e-4)
        x = np.log(clipped / (1 - clipped))
    if kind == "platt":
        x = mapping["a"] * x + mapping["b"]
    # The exponent is clipped where a double would overflow; the result is 0 or 1 either way.
    return 1.0 / (1.0 + np.exp(np.clip(-x, -700.0, 700.0)))
