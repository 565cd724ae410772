"""Prints what a training run would need, from its configuration alone: no weights, no GPU.

`python -m training.plan configs/encoder.yaml [--gpu H100] [--rows N] [--row-tokens T]`. The model
is built on the meta device from the base's config.json, or from the shapes kept here for bases
that are not on this machine.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from memory_runtime.errors import BartlettError, ConfigError
from training.config import EncoderConfig, load_config
from training.encoder import PROJECTIONS

# (dense bf16 TFLOP/s, memory GB) from the makers' data sheets.
GPUS = {
    "A100": (312.0, 80.0), "H100": (989.0, 80.0), "H200": (989.0, 141.0),
    "L40S": (362.0, 48.0), "A6000": (155.0, 48.0), "RTX4090": (165.0, 24.0),
}

UTILISATION = 0.35
"""Share of the peak that a LoRA step without fused kernels reaches; a guess until measured."""

# config.json of the hub bases, as far as it shapes parameters.
SHAPES: dict[str, PreTrainedConfig] = {
    "Qwen/Qwen2.5-7B-Instruct": Qwen2Config(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
        num_attention_heads=28, num_key_value_heads=4, tie_word_embeddings=False),
    "Qwen/Qwen3-8B": Qwen3Config(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, tie_word_embeddings=False),
    "Qwen2.5-Coder-0.5B-Instruct": Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
        num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True),
}


@dataclass(frozen=True)
class Plan:
    """What a run needs. Memory in GB, compute in PFLOP."""

    parameters: int
    trainable: int
    base_gb: float
    adapter_gb: float
    optimizer_gb: float
    gradient_gb: float
    activation_gb: float
    logits_gb: float
    tokens: int
    petaflop: float

    @property
    def total_gb(self) -> float:
        """Sum of the parts, without the allocator's slack."""
        return (self.base_gb + self.adapter_gb + self.optimizer_gb + self.gradient_gb
                + self.activation_gb + self.logits_gb)

    def hours(self, gpu: str) -> float:
        """Expected hours on one card of this name."""
        peak, _ = GPUS[gpu]
        return self.petaflop * 1e15 / (peak * 1e12 * UTILISATION) / 3600


def base_config(base: str) -> PreTrainedConfig:
    """Shapes of a base: from its directory if it is here, else from the table.

    Raises:
        ConfigError: Neither is there.
    """
    for path in (Path(base), Path("artifacts/bases") / base.rpartition("/")[2]):
        if (path / "config.json").exists():
            return AutoConfig.from_pretrained(path, local_files_only=True)
    if base not in SHAPES:
        raise ConfigError(f"no shapes for base {base!r}; fetch it, or name one of {list(SHAPES)}")
    return SHAPES[base]


def activation_bytes_per_token(shape: PreTrainedConfig, *, checkpointing: bool, width: int) -> int:
    """Bytes kept for the backward pass per token.

    With checkpointing one hidden state per layer stays, and one layer is recomputed at a time.
    """
    per_layer = width * (16 * shape.hidden_size + 4 * shape.intermediate_size)
    if checkpointing:
        return shape.num_hidden_layers * width * shape.hidden_size + per_layer
    return shape.num_hidden_layers * per_layer


def make_plan(config: EncoderConfig, *, rows: int, row_tokens: int, target_share: float) -> Plan:
    """Count parameters, bytes and FLOPs of a run."""
    shape = base_config(config.base)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
        parameters = sum(p.numel() for p in model.parameters())
        embedding = model.get_input_embeddings().weight.numel()
        layers = list(range(config.lora.first_layer, shape.num_hidden_layers))
        model = get_peft_model(model, LoraConfig(
            task_type="CAUSAL_LM", r=config.lora.r, lora_alpha=config.lora.lora_alpha,
            target_modules=list(PROJECTIONS), layers_to_transform=layers))
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    width = 4 if config.dtype == "float32" else 2
    pack = config.optim.pack_tokens
    matmul = parameters - embedding * (1 if shape.tie_word_embeddings else 2)
    tuned = len(layers) / shape.num_hidden_layers
    # Forward 2 FLOPs a weight; frozen weights cost the gradient of their input only (2 more);
    # adapters cost 6; logits only at targets; recomputation repeats the forward pass.
    forward = 2 * matmul * (2 if config.optim.activation_checkpointing else 1)
    per_token = forward + 2 * matmul * tuned + 6 * trainable
    per_target = 4 * shape.vocab_size * shape.hidden_size
    tokens = rows * row_tokens * config.optim.epochs
    per_token_bytes = activation_bytes_per_token(
        shape, checkpointing=config.optim.activation_checkpointing, width=width)
    gigabyte = 1e9
    return Plan(
        parameters=parameters, trainable=trainable, base_gb=parameters * width / gigabyte,
        adapter_gb=trainable * 4 / gigabyte, optimizer_gb=trainable * 8 / gigabyte,
        gradient_gb=trainable * 4 / gigabyte, activation_gb=per_token_bytes * pack / gigabyte,
        logits_gb=pack * target_share * shape.vocab_size * (width + 8) / gigabyte,
        tokens=tokens, petaflop=tokens * (per_token + target_share * per_target) / 1e15)


def plan_table(plan: Plan, gpus: list[str]) -> Table:
    """The plan for a terminal."""
    table = Table("what", "value", title="training plan")
    table.add_row("parameters", f"{plan.parameters:,}")
    table.add_row("trainable", f"{plan.trainable:,} ({plan.trainable / plan.parameters:.2%})")
    memory = {
        "base": plan.base_gb, "adapter": plan.adapter_gb, "optimizer": plan.optimizer_gb,
        "gradient": plan.gradient_gb, "activation": plan.activation_gb, "logits": plan.logits_gb,
        "total": plan.total_gb,
    }
    for name, value in memory.items():
        table.add_row(f"{name} memory", f"{value:.2f} GB")
    table.add_row("tokens", f"{plan.tokens:,}")
    table.add_row("compute", f"{plan.petaflop:,.1f} PFLOP")
    for gpu in gpus:
        room = "fits" if plan.total_gb * 1.1 < GPUS[gpu][1] else "does not fit"
        table.add_row(gpu, f"{plan.hours(gpu):.2f} h at {UTILISATION:.0%} of peak, {room}")
    return table


def measured_rows(path: str) -> dict[str, Any]:
    """Rows, mean tokens and target share of an artifact's manifest, if it is there."""
    manifest = Path(path) / "manifest.json"
    report = json.loads(manifest.read_text())["rows"] if manifest.exists() else None
    if not report:
        return {"rows": 5000, "row_tokens": 700, "target_share": 0.15}
    return {"rows": report["used"], "row_tokens": report["total_tokens"] // report["used"],
            "target_share": report["target_tokens"] / report["total_tokens"]}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--gpu", choices=sorted(GPUS), action="append")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--row-tokens", type=int)
    args = parser.parse_args()
    try:
        config = load_config(EncoderConfig, args.config, args.overrides)
        size = measured_rows(config.artifact_dir)
        plan = make_plan(
            config, rows=args.rows or size["rows"],
            row_tokens=args.row_tokens or size["row_tokens"], target_share=size["target_share"])
    except BartlettError as error:
        raise SystemExit(f"error: {error}") from error
    Console().print(plan_table(plan, args.gpu or list(GPUS)))


if __name__ == "__main__":
    main()
