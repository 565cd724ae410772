"""Trains the reranker: LoRA on an encoder that tells whether a document answers a query.

`python -m training.reranker configs/reranker_cpu.yaml [section.key=value ...]`. Resumes from its
last checkpoint; a time budget is turned into a number of steps before the first one; the finished
adapter is calibrated on groups that nothing was learnt from.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Sampler, SequentialSampler
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

from data.bases import resolve
from memory_runtime.errors import BartlettError, ConfigError
from memory_runtime.weights import HEAD_OF_TYPE, base_sha256, usable_positions
from training import run as runs
from training.calibrate import Floats
from training.config import RerankerConfig, config_hash, load_config
from training.embedding import BaseEmbedder
from training.progress import MetricsCallback, ProgressCallback, progress_bar
from training.reranker_calibration import (
    choose_groups,
    documents_of,
    fit_reranker,
    rank_groups,
)
from training.reranker_rows import (
    Drawn,
    Group,
    StepDataset,
    chunks,
    collate_step,
    encode_pairs,
    plan_steps,
    read_groups,
)
from training.tokenizer_file import compact_tokenizer

# --- loss ---


def pair_logits(model: PreTrainedModel, step: dict[str, Any]) -> Tensor:
    """Logits of all pairs of a step in its own order, [P] float32."""
    parts = [model(**batch).logits[:, 0].float() for batch in step["batches"]]
    logits = torch.cat(parts)
    return torch.zeros_like(logits).index_copy(0, step["order"], logits)


def reranker_loss(
    logits: Tensor, relevant: Tensor, query: Tensor, *, positive_weight: float,
    listwise_weight: float,
) -> Tensor:
    """Pointwise cross-entropy plus a softmax of each answer against its query's other documents.

    Args:
        logits: One per pair, [P], float32.
        relevant: 1.0 where the document answers, [P].
        query: Number of the query, [P].
        positive_weight: Weight of an answer beside a document that is none.
        listwise_weight: Weight of the softmax part; queries without an answer have none.

    Returns:
        Scalar, float32.
    """
    weights = torch.where(relevant > 0, positive_weight, 1.0)
    losses = F.binary_cross_entropy_with_logits(logits, relevant, reduction="none")
    pointwise = (weights * losses).sum() / weights.sum()
    listwise = []
    for number in query.unique():
        mine = query == number
        right, wrong = logits[mine & (relevant > 0)], logits[mine & (relevant == 0)]
        if len(right) and len(wrong):
            rows = torch.cat([right.unsqueeze(1), wrong.expand(len(right), -1)], dim=1)
            listwise.append((rows.logsumexp(1) - right).mean())
    return pointwise + listwise_weight * torch.stack(listwise).mean() if listwise else pointwise


def step_loss(model: PreTrainedModel, step: dict[str, Any], config: RerankerConfig) -> Tensor:
    """Loss of one step; by default an answer weighs as much as the negatives drawn for it."""
    return reranker_loss(
        pair_logits(model, step), step["relevant"], step["query"],
        positive_weight=config.optim.positive_weight or float(config.data.negatives),
        listwise_weight=config.optim.listwise_weight)


class RerankerTrainer(Trainer):
    """The stock trainer with our loss, over steps in a fixed order."""

    # Every step is one whole optimiser step; nothing is accumulated.
    loss_is_scaled_for_ga = True

    def __init__(self, *, config: RerankerConfig, **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(**kwargs)
        self._config = config

    def compute_loss(
        self, model: PreTrainedModel, inputs: dict[str, Any], return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """See `step_loss`."""
        return step_loss(model, inputs, self._config)

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Sampler:  # noqa: ANN401
        return SequentialSampler(self.train_dataset)


# --- model ---


def load_model(config: RerankerConfig, base_dir: Path) -> PeftModel:
    """The base with fresh adapters and its own head, or a fresh one where it has none; seeded.

    Raises:
        ConfigError: The base cannot carry a reranker of this configuration.
    """
    layers = check_base(config, AutoConfig.from_pretrained(base_dir, local_files_only=True))
    set_seed(config.seed)
    # So few steps do not overfit; without dropout a step is faster and the probe leaves no trace.
    base, report = AutoModelForSequenceClassification.from_pretrained(
        base_dir, num_labels=1, dtype=runs.pick_dtype(config.dtype), attn_implementation="sdpa",
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, classifier_dropout=0.0,
        ignore_mismatched_sizes=True, output_loading_info=True, local_files_only=True)
    # The loader would fill what does not fit with noise: a head of several labels, above all.
    if report["mismatched_keys"]:
        raise ConfigError(f"base: {config.base} does not fit a head of one label: "
                          f"{sorted(report['mismatched_keys'])}; give one with one label, or none")
    return get_peft_model(base, LoraConfig(
        task_type="SEQ_CLS", r=config.lora.r, lora_alpha=config.lora.lora_alpha,
        lora_dropout=config.lora.lora_dropout, target_modules=target_pattern(layers),
        modules_to_save=list(HEAD_OF_TYPE[base.config.model_type])))


def check_base(config: RerankerConfig, base: PretrainedConfig) -> range:
    """The layers that get adapters, after a look at the base before hours are spent on it.

    Raises:
        ConfigError: All that does not fit, at once.
    """
    # Other architectures need not even have the figures that are compared below.
    if base.model_type not in HEAD_OF_TYPE:
        raise ConfigError(f"base: {config.base} is of type {base.model_type!r}; rerankers are "
                          f"trained on {sorted(HEAD_OF_TYPE)}")
    layers, faults = range(config.lora.first_layer, base.num_hidden_layers), []
    if not layers:
        faults.append(f"lora.first_layer: got {config.lora.first_layer}, but the base has "
                      f"{base.num_hidden_layers} layers")
    longest = usable_positions(base.model_type, num_positions=base.max_position_embeddings,
                               pad_id=base.pad_token_id)
    if config.data.max_pair_tokens > longest:
        faults.append(f"data.max_pair_tokens: got {config.data.max_pair_tokens}, the base takes "
                      f"at most {longest}")
    if faults:
        raise ConfigError("\n".join(faults))
    return layers


def target_pattern(layers: range) -> str:
    """Every linear map of the layers, as one pattern; the pooler's `dense` stays out of it."""
    numbers = "|".join(map(str, layers))
    return (rf"(?:.*\.)?encoder\.layer\.(?:{numbers})\.(?:attention\.self\.(?:query|key|value)"
            r"|attention\.output\.dense|intermediate\.dense|output\.dense)")


# --- budget ---


def speed_probe(
    model: PeftModel, steps: list[list[Drawn]], tokenizer: PreTrainedTokenizerBase,
    config: RerankerConfig,
) -> float:
    """Seconds of one forward and backward step; leaves no trace in the model.

    The first step warms up and is not counted.
    """
    seconds = []
    for step in steps[: config.budget.probe_passes + 1]:
        started = time.perf_counter()
        batch = _to(collate_step(step, tokenizer, config.data.max_pair_tokens), model.device)
        step_loss(model, batch, config).backward()
        model.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - started)
    counted = seconds[1:] or seconds
    return sum(counted) / len(counted)


def _to(step: dict[str, Any], device: torch.device) -> dict[str, Any]:
    moved = {name: step[name].to(device) for name in ("order", "relevant", "query")}
    return {**moved, "batches": [{k: v.to(device) for k, v in batch.items()}
                                 for batch in step["batches"]]}


def freeze_steps(
    model: PeftModel, steps: list[list[Drawn]], tokenizer: PreTrainedTokenizerBase,
    config: RerankerConfig,
) -> dict[str, Any]:
    """Fix the number of steps: all epochs, or what the time budget allows."""
    full = len(steps)
    if not config.budget.train_minutes:
        return {"max_steps": full, "full_steps": full}
    step_s = speed_probe(model, steps, tokenizer, config)
    allowed = int(config.budget.train_minutes * 60 / step_s)
    chosen = max(1, min(full, allowed))
    runs.log(f"speed probe: {step_s:.2f} s a step; {chosen} of {full} steps fit "
             f"{config.budget.train_minutes:g} minutes")
    return {"max_steps": chosen, "full_steps": full, "probe_step_s": step_s}


def training_arguments(config: RerankerConfig, max_steps: int) -> TrainingArguments:
    """Arguments of the stock trainer."""
    return TrainingArguments(
        output_dir=config.run_dir, max_steps=max_steps, per_device_train_batch_size=1,
        gradient_accumulation_steps=1, learning_rate=config.optim.lr, lr_scheduler_type="linear",
        warmup_steps=max(1, math.ceil(config.optim.warmup * max_steps)),
        max_grad_norm=config.optim.max_grad_norm, weight_decay=0.0,
        save_steps=config.budget.save_steps, save_total_limit=2, logging_steps=1,
        logging_nan_inf_filter=False, report_to=[], seed=config.seed, data_seed=config.seed,
        remove_unused_columns=False, dataloader_num_workers=0, disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )


# --- calibration and artifact ---


@torch.inference_mode()
def score_documents(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, queries: list[str],
    documents: list[list[str]], max_tokens: int,
) -> list[Floats]:
    """Logits of each query's documents, float64, with a progress bar."""
    pairs = [(query, text) for query, found in zip(queries, documents, strict=True)
             for text in found]
    rows = encode_pairs(tokenizer, pairs, max_tokens)
    logits = np.zeros(len(rows))
    model.eval()
    with progress_bar("pairs") as bar:
        task = bar.add_task("calibration", total=len(rows), note="")
        for chosen, batch in chunks(rows, tokenizer.pad_token_id):
            batch = {name: value.to(model.device) for name, value in batch.items()}
            logits[chosen] = model(**batch).logits[:, 0].float().cpu().numpy()
            bar.advance(task, len(chosen))
    ends = np.cumsum([len(found) for found in documents])[:-1]
    return np.split(logits, ends)


def round_adapter(model: PeftModel) -> None:
    """Round what was trained to the bfloat16 that is written, so that it is what gets judged."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16).to(parameter.dtype)


def calibrate(
    model: PeftModel, tokenizer: PreTrainedTokenizerBase, config: RerankerConfig
) -> tuple[dict[str, Any], dict[str, Any]]:
    """calibration.json and its figures, on groups that nothing was learnt from."""
    groups = choose_groups(read_groups(config.data.calibration), config.data.calibration_groups,
                           seed=config.seed)
    documents = [documents_of(group, seed=config.seed) for group in groups]
    logits = score_documents(model, tokenizer, [group.query for group in groups],
                             [found for found, _ in documents], config.data.max_pair_tokens)
    ranked = rank_groups(groups, documents, logits, BaseEmbedder(resolve(config.data.embedder)))
    calibration, figures = fit_reranker(ranked)
    for arm, values in figures["mrr"].items():
        runs.log(f"MRR {arm:6s} " + " ".join(f"{k} {v:.3f}" for k, v in values.items()))
    runs.log(f"calibration error {figures['ece_before']:.3f} before, {figures['ece_after']:.3f} "
             f"after; blend weight {calibration['blend']['weight']}")
    return calibration, figures


def data_records(config: RerankerConfig) -> list[str]:
    """Ids of all records that the data were built of, where their manifest lies beside them."""
    path = Path(config.data.train).with_name("manifest.json")
    return list(runs.read_json(path)["records"]) if path.exists() else []


def save_artifact(
    model: PeftModel, tokenizer: PreTrainedTokenizerBase, config: RerankerConfig, base_dir: Path,
    run: runs.Run, sources: dict[str, int],
) -> None:
    """Calibrate, then write the adapter in bfloat16 with all that serving verifies."""
    steps = run.frozen["frozen"]["max_steps"]
    round_adapter(model)
    calibration, figures = calibrate(model, tokenizer, config)
    target = Path(config.artifact_dir)
    part = target.with_name(target.name + ".part")
    part.mkdir(parents=True, exist_ok=True)
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    save_file({k: v.detach().to(torch.bfloat16).contiguous().cpu() for k, v in state.items()},
              part / "adapter_model.safetensors")
    adapter = model.peft_config["default"]
    adapter.base_model_name_or_path = config.base
    adapter.inference_mode = True
    adapter.save_pretrained(part)
    tokenizer.save_pretrained(part / "tokenizer")
    compact_tokenizer(part / "tokenizer" / "tokenizer.json")
    runs.write_json(part / "calibration.json", calibration)
    (part / "README.md").write_text(model_card(config, sources, steps, figures), encoding="utf-8")
    base = {"name": config.base, "sha256": base_sha256(base_dir)}
    runs.write_manifest(part, kind="reranker", base=base, run=run, seed=config.seed, steps=steps,
                        extra={"records": data_records(config), "groups": sources,
                               "calibration_figures": figures})
    runs.publish(part, target)


def model_card(
    config: RerankerConfig, sources: dict[str, int], steps: int, figures: dict[str, Any]
) -> str:
    """What the artifact is, what it learnt from and how it did on the groups held back."""
    listed = "\n".join(f"- {name}: {count} groups" for name, count in sorted(sources.items()))
    columns = sorted({name for values in figures["mrr"].values() for name in values})
    table = [f"| arm | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    table += [f"| {arm} | " + " | ".join(f"{values.get(c, 0.0):.3f}" for c in columns) + " |"
              for arm, values in figures["mrr"].items()]
    return (
        f"# Bartlett reranker\n\nLoRA r={config.lora.r} on {config.base} and a head trained in "
        "full; the calibrated probability that a memory or a turn answers a question, English and "
        f"Chinese. {steps} steps, seed {config.seed}.\n\n"
        f"## Trained on\n{listed}\n\nSchema-Guided Dialogue (sgd) is CC BY-SA 4.0 by Google; the "
        "other sources are Apache-2.0 or MIT.\n\n"
        f"## On {figures['queries']} held-back questions (MRR among at most 20 documents)\n"
        + "\n".join(table) +
        f"\n\nCalibration error {figures['ece_before']:.3f} before the map, "
        f"{figures['ece_after']:.3f} after (cross-fitted).\n\n"
        "Figures on public sets are in eval.json; hashes and versions in manifest.json.\n"
    )


# --- the run ---


def prepare_steps(config: RerankerConfig) -> tuple[list[list[Drawn]], dict[str, int]]:
    """Steps of all epochs, and how many groups each source gives.

    Raises:
        ConfigError: A data file is missing or holds no group.
    """
    missing = [path for path in (config.data.train, config.data.calibration)
               if not Path(path).exists()]
    if missing:
        raise ConfigError(f"data files are missing: {missing}; run `make data` first")
    groups: list[Group] = read_groups(config.data.train)
    if not groups:
        raise ConfigError(f"{config.data.train} holds no question group; run `make data` again")
    steps = plan_steps(groups, num_negatives=config.data.negatives,
                       queries_per_step=config.optim.queries_per_step,
                       epochs=config.optim.epochs, seed=config.seed)
    return steps, dict(Counter(group.source for group in groups))


def train(config: RerankerConfig) -> Path:
    """Run or resume a training run; returns the artifact directory."""
    if (done := finished(config)) is not None:
        runs.log(f"already trained: {done}")
        return done
    base_dir = resolve(config.base)
    tokenizer = AutoTokenizer.from_pretrained(base_dir, local_files_only=True)
    data_files = [config.data.train, config.data.calibration]
    steps, sources = prepare_steps(config)
    runs.log(f"groups {sum(sources.values())}; {json.dumps(sources)}")
    model = load_model(config, base_dir)
    run = runs.open_run(config, data_files,
                        lambda: freeze_steps(model, steps, tokenizer, config))
    max_steps = run.frozen["frozen"]["max_steps"]
    set_seed(config.seed)
    checkpoint = run.last_checkpoint()
    run.trim_metrics(int(checkpoint.rpartition("-")[2]) if checkpoint else 0)
    trainer = RerankerTrainer(
        model=model, args=training_arguments(config, max_steps), config=config,
        # A run resumed at its very end must not take another step.
        train_dataset=StepDataset(steps[:max_steps], tokenizer, config.data.max_pair_tokens),
        data_collator=lambda items: items[0],
        callbacks=[ProgressCallback("reranker"), MetricsCallback(run.directory / "metrics.jsonl")])
    trainer.pop_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=checkpoint)
    save_artifact(model, tokenizer, config, base_dir, run, sources)
    return Path(config.artifact_dir)


def finished(config: RerankerConfig) -> Path | None:
    """The artifact of this very configuration and data, if it is there."""
    manifest = Path(config.artifact_dir) / "manifest.json"
    resolved = Path(config.run_dir) / "resolved.json"
    data_files = [config.data.train, config.data.calibration]
    if not all(Path(path).exists() for path in (manifest, resolved, *data_files)):
        return None
    have, want = runs.read_json(manifest), runs.read_json(resolved)
    same = config_hash(config) == have["config_sha256"] == want["config_sha256"] and \
        runs.data_hash(data_files) == have["data_sha256"]
    return Path(config.artifact_dir) if same else None


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", help="YAML file, for example configs/reranker_cpu.yaml")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    args = parser.parse_args()
    runs.quiet_libraries()
    try:
        print(train(load_config(RerankerConfig, args.config, args.overrides)))  # noqa: T201
    except BartlettError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
