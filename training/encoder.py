"""Trains the encoder: LoRA on a causal LM that emits and scores memory candidates.

`python -m training.encoder configs/encoder_cpu.yaml [section.key=value ...]`. Resumes from its
last checkpoint; a time budget is turned into a number of steps before the first one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import Dataset, Sampler, SequentialSampler, Subset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

from data.bases import resolve
from memory_runtime.corpus import AnnotatedWindow, read_windows
from memory_runtime.errors import BartlettError, ConfigError
from memory_runtime.prompt import parse, prompt_sha256, quotes_sha256
from memory_runtime.weights import base_sha256
from training import run as runs
from training.config import EncoderConfig, config_hash, load_config
from training.initial import load_initial, open_initial
from training.losses import encoder_loss
from training.pack import (
    Row,
    RowWeights,
    Vocabulary,
    branch_mask,
    collate,
    pack_rows,
    shared_prefix,
)
from training.progress import MetricsCallback, ProgressCallback
from training.quotes import quoted
from training.rows import RowReport, build_rows
from training.tokenizer_file import compact_tokenizer

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class PackDataset(Dataset):
    """Packs in training order; each carries the divisor of its optimiser step."""

    def __init__(self, packs: list[list[Row]], accumulation: int, *, prefix: int) -> None:
        self._packs = packs
        self._prefix = prefix
        self._divisor: list[float] = []
        for start in range(0, len(packs), accumulation):
            group = packs[start : start + accumulation]
            total = sum(t.weight for pack in group for row in pack for t in row.targets)
            self._divisor += [total] * len(group)

    def __len__(self) -> int:
        return len(self._packs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        batch = collate(self._packs[index], prefix=self._prefix)
        return {**batch, "divisor": torch.tensor(self._divisor[index])}


def forward_loss(
    model: PreTrainedModel, pack: dict[str, Tensor], digit_ids: Tensor, *, alpha: float
) -> Tensor:
    """Loss of one pack, divided by the target weight of its whole optimiser step.

    The explicit mask keeps rows and branches apart; logits are made at the targets only.
    """
    mask = branch_mask(pack["rows"][0], pack["branch"][0])
    logits = model(
        input_ids=pack["input_ids"], position_ids=pack["position_ids"], attention_mask=mask,
        logits_to_keep=pack["source"], use_cache=False,
    ).logits[0]
    loss = encoder_loss(logits, pack["targets"], pack["scores"], pack["weights"], digit_ids,
                        alpha=alpha)
    return loss / pack["divisor"]


class EncoderTrainer(Trainer):
    """The stock trainer with our loss, over packs in a fixed order."""

    # The loss is divided by the weight of the whole step already (PackDataset).
    loss_is_scaled_for_ga = True

    def __init__(self, *, digit_ids: Tensor, alpha: float, **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(**kwargs)
        self._digit_ids = digit_ids
        self._alpha = alpha

    def compute_loss(
        self, model: PreTrainedModel, inputs: dict[str, Tensor], return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """See `forward_loss`."""
        return forward_loss(model, inputs, self._digit_ids.to(inputs["targets"].device),
                            alpha=self._alpha)

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Sampler:  # noqa: ANN401
        return SequentialSampler(self.train_dataset)


def load_model(config: EncoderConfig, base_dir: Path) -> PeftModel:
    """The base with its adapters: fresh and seeded, or those to go on from."""
    set_seed(config.seed)
    base = AutoModelForCausalLM.from_pretrained(
        base_dir, dtype=runs.pick_dtype(config.dtype), attn_implementation="sdpa",
        local_files_only=True)
    if config.optim.activation_checkpointing:
        base.enable_input_require_grads()
    layers = list(range(config.lora.first_layer, base.config.num_hidden_layers))
    if not layers:
        raise ConfigError(
            f"lora.first_layer: got {config.lora.first_layer}, but the base has "
            f"{base.config.num_hidden_layers} layers")
    model = get_peft_model(base, LoraConfig(
        task_type="CAUSAL_LM", r=config.lora.r, lora_alpha=config.lora.lora_alpha,
        lora_dropout=config.lora.lora_dropout, target_modules=list(PROJECTIONS),
        layers_to_transform=layers if config.lora.first_layer else None))
    if config.init:
        load_initial(model, Path(config.init))
    return model


def select_windows(windows: list[AnnotatedWindow], limit: int) -> list[AnnotatedWindow]:
    """At most `limit` windows, the small sources whole and the large ones thinned evenly."""
    groups: dict[str, list[AnnotatedWindow]] = {}
    for window in windows:
        groups.setdefault(window.source, []).append(window)
    room, chosen = limit, []
    for n, group in enumerate(sorted(groups.values(), key=len)):
        share = min(len(group), room // (len(groups) - n))
        chosen += [group[i * len(group) // share] for i in range(share)]
        room -= share
    return chosen


def prepare_rows(
    config: EncoderConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Row], RowReport, Vocabulary]:
    """Read windows, make rows, check them.

    Raises:
        ConfigError: No window fits.
    """
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    vocabulary = Vocabulary.of(tokenizer, stop)
    windows = select_windows(list(read_windows(config.data.train)), config.data.max_windows)
    if config.data.quotes:
        windows = [quoted(window) for window in windows]
    weights = RowWeights(config.loss.score_weight, config.loss.decision_weight)
    rows, report = build_rows(
        tokenizer, vocabulary, windows, max_row_tokens=config.data.max_row_tokens,
        score_branches=config.data.score_branches, weights=weights, seed=config.seed)
    if not rows:
        raise ConfigError(
            f"none of {len(windows)} windows fits data.max_row_tokens="
            f"{config.data.max_row_tokens}; raise it")
    by_id = {w.window.id: w for w in windows}
    for row in rows:
        check_row(row, by_id[row.id], tokenizer, vocabulary)
    return rows, report, vocabulary


def check_row(
    row: Row, annotated: AnnotatedWindow, tokenizer: PreTrainedTokenizerBase,
    vocabulary: Vocabulary,
) -> None:
    """What must hold of every row before an hour is spent on it.

    Raises:
        ConfigError: No target, no stop token, a score that is no digit, or a target text that
            does not parse back to the gold.
    """
    emitted = [t for t, b in zip(row.input_ids, row.branch, strict=True) if b == 1]
    faults = []
    if not row.targets or row.targets[0].source != row.num_prompt - 1:
        faults.append("its first target is not the first token after the prompt")
    if emitted[-1] != vocabulary.stop:
        faults.append("its completion does not end with the stop token")
    if any(t.score >= 0 and t.token not in vocabulary.digit_ids for t in row.targets):
        faults.append("a score position is not a digit token")
    text = tokenizer.decode(emitted[:-1])
    parsed = parse(text, annotated.window)
    if parsed.invalid or parsed.truncated or len(parsed.candidates) > len(annotated.gold):
        faults.append(f"its completion does not parse back: {text[:200]!r}")
    if faults:
        raise ConfigError(f"training row {row.id!r}: " + "; ".join(faults))


def speed_probe(
    model: PeftModel, packs: PackDataset, digit_ids: Tensor, config: EncoderConfig
) -> float:
    """Seconds of one forward and backward pass; leaves no trace in the model.

    The first pass warms up and is not counted.
    """
    seconds = []
    for n in range(min(len(packs), config.budget.probe_passes + 1)):
        started = time.perf_counter()
        batch = {name: value.to(model.device) for name, value in packs[n].items()}
        forward_loss(model, batch, digit_ids.to(model.device), alpha=0.3).backward()
        model.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - started)
    counted = seconds[1:] or seconds
    return sum(counted) / len(counted)


def freeze_steps(
    model: PeftModel, packs: PackDataset, digit_ids: Tensor, config: EncoderConfig
) -> dict[str, Any]:
    """Fix the number of steps: all epochs, or what the time budget allows."""
    accumulation = config.optim.accumulation
    full = math.ceil(len(packs) / accumulation)
    if not config.budget.train_minutes:
        return {"max_steps": full, "full_steps": full}
    pass_s = speed_probe(model, packs, digit_ids, config)
    allowed = int(config.budget.train_minutes * 60 / (pass_s * accumulation))
    steps = max(1, min(full, allowed))
    runs.log(f"speed probe: {pass_s:.2f} s a pass; {steps} of {full} steps fit "
             f"{config.budget.train_minutes:g} minutes")
    return {"max_steps": steps, "full_steps": full, "probe_pass_s": pass_s}


def training_arguments(config: EncoderConfig, max_steps: int) -> TrainingArguments:
    """Arguments of the stock trainer."""
    return TrainingArguments(
        output_dir=config.run_dir, max_steps=max_steps, per_device_train_batch_size=1,
        gradient_accumulation_steps=config.optim.accumulation, learning_rate=config.optim.lr,
        lr_scheduler_type=config.optim.schedule,
        warmup_steps=max(1, round(config.optim.warmup * max_steps)),
        max_grad_norm=config.optim.max_grad_norm, weight_decay=0.0,
        save_steps=config.budget.save_steps, save_total_limit=2, logging_steps=1,
        logging_nan_inf_filter=False, report_to=[], seed=config.seed, data_seed=config.seed,
        remove_unused_columns=False, dataloader_num_workers=0, disable_tqdm=True,
        activation_checkpointing=config.optim.activation_checkpointing,
        use_cpu=not torch.cuda.is_available(),
    )


def save_artifact(
    model: PeftModel, tokenizer: PreTrainedTokenizerBase, config: EncoderConfig, base_dir: Path,
    run: runs.Run, steps: int, report: RowReport, initial: dict[str, Any] | None = None,
) -> None:
    """Write the adapter in bfloat16 with all that serving verifies.

    `initial` is the manifest of the adapter that the run went on from.
    """
    before = initial.get("total_steps", initial["steps"]) if initial else 0
    target = Path(config.artifact_dir)
    part = target.with_name(target.name + ".part")
    part.mkdir(parents=True, exist_ok=True)
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    save_file({k: v.detach().to(torch.bfloat16).contiguous().cpu() for k, v in state.items()},
              part / runs.WEIGHTS)
    adapter = model.peft_config["default"]
    adapter.base_model_name_or_path = config.base
    adapter.inference_mode = True
    adapter.save_pretrained(part)
    tokenizer.save_pretrained(part / "tokenizer")
    compact_tokenizer(part / "tokenizer" / "tokenizer.json")
    runs.write_json(part / "calibration.json", default_calibration())
    card = model_card(config, report, steps, before)
    (part / "README.md").write_text(card, encoding="utf-8")
    base = {"name": config.base, "sha256": base_sha256(base_dir)}
    runs.write_manifest(part, kind="encoder", base=base, run=run, seed=config.seed, steps=steps,
                        extra={**contract(config), "total_steps": before + steps,
                               "initial": initial and initial["files"][runs.WEIGHTS],
                               "rows": dataclasses.asdict(report)})
    runs.publish(part, target)


def default_calibration() -> dict[str, Any]:
    """Identity maps and the field's default weights; `training.calibrate` replaces them."""
    identity = {"kind": "identity"}
    names = ("reuse", "goal", "emphasis", "emotion", "commitment")
    return {
        "keep_floor": 0.5, "empty_bias": 0.0, "keep": identity,
        "scores": dict.fromkeys(names, identity),
        "importance": {"reuse": 0.4, "goal": 0.3, "novelty": 0.2, "emphasis": 0.1,
                       "emotion": 0.05, "commitment": 0.05},
        "thresholds": {"long_term": 0.45},
    }


def model_card(config: EncoderConfig, report: RowReport, steps: int, before: int) -> str:
    """What the artifact is and what it learnt from."""
    sources = "\n".join(f"- {name}: {count} windows" for name, count in
                        sorted(report.by_source.items()))
    licences = "The texts are Apache-2.0 or MIT." + (
        " Schema-Guided Dialogue (sgd) is CC BY-SA 4.0 by Google." if "sgd" in report.by_source
        else "")
    history = f" after {before} steps of the adapter it went on from" if before else ""
    return (
        f"# Bartlett encoder\n\nLoRA r={config.lora.r} on {config.base}; emits and scores memory "
        f"candidates, English and Chinese. {steps} steps{history}, seed {config.seed}.\n\n"
        f"## Trained on\n{sources}\n\n{licences}\n\n"
        "Hashes and versions are in manifest.json; figures in eval.json, once it was judged.\n"
    )


def train(config: EncoderConfig) -> Path:
    """Run or resume a training run; returns the artifact directory."""
    if (done := finished(config)) is not None:
        runs.log(f"already trained: {done}")
        return done
    base_dir = resolve(config.base)
    initial = open_initial(Path(config.init), base_dir, quotes=config.data.quotes) \
        if config.init else None
    tokenizer = AutoTokenizer.from_pretrained(base_dir, local_files_only=True)
    rows, report, vocabulary = prepare_rows(config, tokenizer)
    runs.log(f"rows {report.used} ({report.empty} empty, {report.too_long} too long), tokens "
             f"{report.total_tokens}, prompt {report.prompt_tokens}, targets "
             f"{report.target_tokens}; {json.dumps(report.by_source)}")
    prefix = shared_prefix(rows)
    packs = PackDataset(
        [pack for epoch in range(config.optim.epochs)
         for pack in pack_rows(rows, config.optim.pack_tokens, seed=config.seed + epoch,
                               prefix=prefix)],
        config.optim.accumulation, prefix=prefix)
    digit_ids = torch.tensor(vocabulary.digit_ids)
    model = load_model(config, base_dir)
    run = runs.open_run(config, learns_from(config),
                        lambda: freeze_steps(model, packs, digit_ids, config),
                        **contract(config))
    max_steps = run.frozen["frozen"]["max_steps"]
    # The probe may have drawn random numbers for dropout; a resumed run draws none for it.
    set_seed(config.seed)
    checkpoint = run.last_checkpoint()
    run.trim_metrics(int(checkpoint.rpartition("-")[2]) if checkpoint else 0)
    trainer = EncoderTrainer(
        model=model, args=training_arguments(config, max_steps), digit_ids=digit_ids,
        alpha=config.loss.squared_error,
        # No more than the steps fixed above: a run resumed at its very end must not take another.
        train_dataset=Subset(packs, range(min(len(packs), max_steps * config.optim.accumulation))),
        data_collator=lambda items: items[0],
        callbacks=[ProgressCallback("encoder"), MetricsCallback(run.directory / "metrics.jsonl")])
    trainer.pop_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=checkpoint)
    save_artifact(model, tokenizer, config, base_dir, run, max_steps, report, initial)
    return Path(config.artifact_dir)


def contract(config: EncoderConfig) -> dict[str, str | None]:
    """Digests of what the encoder reads and writes; serving refuses others."""
    return {"prompt_sha256": prompt_sha256(),
            "quotes_sha256": quotes_sha256() if config.data.quotes else None}


def learns_from(config: EncoderConfig) -> list[str]:
    """Files that decide what a run learns; another content is another run."""
    return [config.data.train, *([str(Path(config.init) / runs.WEIGHTS)] if config.init else [])]


def finished(config: EncoderConfig) -> Path | None:
    """The artifact of this very configuration and data, if it is there."""
    manifest = Path(config.artifact_dir) / "manifest.json"
    resolved = Path(config.run_dir) / "resolved.json"
    if not manifest.exists() or not resolved.exists():
        return None
    have, want = runs.read_json(manifest), runs.read_json(resolved)
    if not all(Path(name).exists() for name in learns_from(config)):
        return None
    same = all(have.get(name) == value for name, value in contract(config).items()) and \
        config_hash(config) == have["config_sha256"] == want["config_sha256"] and \
        runs.data_hash(learns_from(config)) == have["data_sha256"]
    return Path(config.artifact_dir) if same else None


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", help="YAML file, for example configs/encoder_cpu.yaml")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    args = parser.parse_args()
    runs.quiet_libraries()
    try:
        print(train(load_config(EncoderConfig, args.config, args.overrides)))  # noqa: T201
    except BartlettError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
