"""Loads bases from directories and merges one adapter into them; nothing is fetched from a hub."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from memory_runtime.errors import ArtifactError
from serving.artifact import PEFT_PREFIX, Artifact, lora_modules
from serving.engine.attention import register_attention

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_log = logging.getLogger(__name__)


def pick_device(name: str = "auto") -> torch.device:
    """`auto` is CUDA where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the hardware multiplies it, else float32.

    Raises:
        ValueError: The name is unknown.
    """
    if name != "auto":
        if name not in DTYPES:
            raise ValueError(f"dtype is {name!r}, allowed are auto, {', '.join(DTYPES)}")
        return DTYPES[name]
    return torch.bfloat16 if device.type == "cuda" or _cpu_has_bf16() else torch.float32


def _cpu_has_bf16() -> bool:
    """Without these instructions torch's bfloat16 products are many times slower than float32."""
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return False
    lines = (line for line in info.read_text().splitlines() if line.startswith("flags"))
    flags = set(next(lines, "").split())
    return bool(flags & {"avx512_bf16", "amx_bf16"})


@contextmanager
def quietly() -> Iterator[None]:
    """Without the progress bars and the report of heads that the adapter is about to fill."""
    verbosity = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()


@dataclass(frozen=True, slots=True)
class LoadedLM:
    """A causal LM ready to run, with the ids that the engine asks for.

    Attributes:
        stop_ids: Tokens that end a completion.
        digit_ids: Ids of the digits 0 to 9, [10] int64, on the device.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    dtype: torch.dtype
    stop_ids: tuple[int, ...]
    digit_ids: Tensor
    max_positions: int

    @property
    def head(self) -> nn.Linear:
        """The output projection."""
        return self.model.get_output_embeddings()

    @property
    def num_rows(self) -> int:
        """Rows of the output projection; may exceed the tokenizer's vocabulary."""
        return self.head.weight.shape[0]


def load_causal_lm(
    base: str | Path, *, artifact: Artifact | None = None, dtype: str = "auto",
    device: str = "auto",
) -> LoadedLM:
    """Load a base, merge an encoder artifact into it, and look up the ids the engine needs.

    Raises:
        ArtifactError: No base there, or the digits are not one token each.
    """
    base, where = Path(base), pick_device(device)
    if not (base / "config.json").is_file():
        raise ArtifactError(f"no base at {base}: config.json is missing; run `make setup`")
    kind = pick_dtype(dtype, where)
    with quietly():
        model = AutoModelForCausalLM.from_pretrained(
            base, dtype=kind, attn_implementation=register_attention(), local_files_only=True)
    if artifact is not None:
        merge_adapter(model, artifact)
    model = model.to(where).eval().requires_grad_(False)
    source = artifact.tokenizer_path if artifact is not None else base
    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    return LoadedLM(
        model, tokenizer, where, kind, _stop_ids(model, tokenizer),
        _digit_ids(tokenizer).to(where), int(model.config.max_position_embeddings),
    )


def _stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    configured = model.generation_config.eos_token_id if model.generation_config else None
    listed = configured if isinstance(configured, list) else [configured]
    ids = [tokenizer.eos_token_id, *listed]
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def _digit_ids(tokenizer: PreTrainedTokenizerBase) -> Tensor:
    encoded = [tokenizer.encode(str(digit), add_special_tokens=False) for digit in range(10)]
    if any(len(ids) != 1 for ids in encoded):
        raise ArtifactError(
            f"the tokenizer writes the digits 0-9 as {encoded}; scores need one token each")
    return torch.tensor([ids[0] for ids in encoded], dtype=torch.int64)


@torch.no_grad()
def merge_adapter(model: nn.Module, artifact: Artifact) -> None:
    """Add B·A·scaling to the weights, in float32, and set the heads the adapter carries in full.

    Raises:
        ArtifactError: A tensor has no place in the model.
    """
    weights = dict(model.named_parameters())
    with safe_open(artifact.weights_path, framework="pt") as stored:
        names = {name.removeprefix(PEFT_PREFIX): name for name in stored.keys()}
        modules = lora_modules(names)
        whole = [name for name in names if ".lora_" not in name]
        absent = [name for name in [*(f"{m}.weight" for m in modules), *whole]
                  if name not in weights]
        if absent:
            raise ArtifactError(f"{artifact.path}: the base has no {absent[:5]}")
        for module in modules:
            a = stored.get_tensor(names[f"{module}.lora_A.weight"]).float()
            b = stored.get_tensor(names[f"{module}.lora_B.weight"]).float()
            weight = weights[f"{module}.weight"]
            weight.copy_(weight.float().add_((b @ a).to(weight.device), alpha=artifact.scaling))
        for name in whole:
            weights[name].copy_(stored.get_tensor(names[name]))
    _log.info("merged %s (%s, %d modules)", artifact.name, artifact.digest, len(modules))
