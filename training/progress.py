"""Trainer callbacks: a progress bar with the time that is left, and metrics.jsonl."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


def progress_bar(unit: str) -> Progress:
    """A bar on stderr with count, elapsed and remaining time."""
    return Progress(
        TextColumn("[progress.description]{task.description}"), BarColumn(), MofNCompleteColumn(),
        TextColumn(unit), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"), console=Console(stderr=True),
    )


class ProgressCallback(TrainerCallback):
    """Shows loss, speed and the time that is left; off a terminal one line every 20 s."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._bar = progress_bar("steps")
        self._started = 0.0
        self._first_step = 0
        self._last_line = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        self._started, self._first_step = time.monotonic(), state.global_step
        self._task = self._bar.add_task(
            self._name, total=state.max_steps, completed=state.global_step, note="")
        if self._bar.console.is_terminal:
            self._bar.start()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
        logs: dict[str, float] | None = None, **kwargs: Any,  # noqa: ANN401
    ) -> None:
        if not logs or "loss" not in logs:
            return
        note = f"loss {logs['loss']:.3f}"
        self._bar.update(self._task, completed=state.global_step, note=note)
        now = time.monotonic()
        if not self._bar.console.is_terminal and now - self._last_line > 20:
            self._last_line = now
            done = max(1, state.global_step - self._first_step)
            left = (now - self._started) / done * (state.max_steps - state.global_step)
            self._bar.console.print(
                f"{self._name} {state.global_step}/{state.max_steps} {note} left {left:.0f} s",
                highlight=False)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        self._bar.stop()


class MetricsCallback(TrainerCallback):
    """Appends what the trainer logs to `metrics.jsonl`, one JSON object a line."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
        logs: dict[str, float] | None = None, **kwargs: Any,  # noqa: ANN401
    ) -> None:
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": state.global_step, **(logs or {})}) + "\n")
