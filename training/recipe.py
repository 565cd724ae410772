"""`make train`: every step from data to gate, over files; goes on where it was stopped.

A step is skipped when its outputs are there and were made by the same command from the same
inputs. The steps are commands of their own, so that each can be run by hand.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from data.bases import LINK_DIR
from memory_runtime.weights import file_sha256
from training.config import EncoderConfig, RerankerConfig, load_config
from training.run import WEIGHTS, log, read_json, write_json

WINDOWS_DEV = ("data/authored/windows_dev_zh.jsonl", "data/authored/windows_dev_en.jsonl")
EXTERNAL = Path("external_data")
BUILT = ("windows_train.jsonl", "windows_calibration.jsonl", "pairs_train.jsonl",
         "pairs_calibration.jsonl", "manifest.json")
BUILDERS = tuple(Path(f"{name}.py") for name in (
    "data/build", "data/sources", "data/pairs", "data/pair_drafts", "data/pair_slots",
    "memory_runtime/corpus", "memory_runtime/windows", "memory_runtime/literals",
    "memory_runtime/lexical"))
"""Code whose change makes other training files."""

WRITTEN_LATER = frozenset({"eval.json"})
"""The gate writes its verdict into the artifacts; that makes no report on them stale."""


QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
"""Keeps the notes of libraries out of the log; the steps show progress of their own."""


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        name: For the log and the stamp.
        command: Arguments of this interpreter.
        inputs: Files and directories that it reads.
        outputs: What it makes.
        resumes: It continues its own half-made outputs; else they are removed before it starts.
        verdict: Its exit status is the verdict of the whole recipe, not a breakdown.
        ignore: Names of files in its inputs that do not count.
    """

    name: str
    command: tuple[str, ...]
    inputs: tuple[Path, ...]
    outputs: tuple[Path, ...]
    resumes: bool = False
    verdict: bool = False
    ignore: frozenset[str] = field(default_factory=frozenset)


def fingerprint(step: Step) -> str:
    """Digest of the command and of everything that it reads."""
    digest = hashlib.sha256("\x00".join(step.command).encode())
    for path in step.inputs:
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in files:
            if file.exists() and file.name not in step.ignore:
                digest.update(f"{file}\x00{file_sha256(file)}\x00".encode())
    return digest.hexdigest()


def link_of(base: str) -> Path:
    """Where `make setup` and the trainers put a base."""
    return Path(base) if Path(base).is_dir() else LINK_DIR / base.rpartition("/")[2]


def external_marker() -> tuple[Path, ...]:
    """Files of the corpora that are there."""
    return tuple(sorted(p for p in EXTERNAL.glob("*/*.jsonl"))) if EXTERNAL.exists() else ()


def digests(step: Step) -> dict[str, str]:
    """Digests of the outputs that are files; a directory may be added to by later steps."""
    return {str(path): file_sha256(path) for path in step.outputs if path.is_file()}


def is_done(step: Step, stamp: Path) -> bool:
    """Whether a step's outputs are there, current, and as the step left them."""
    if not stamp.exists() or not all(path.exists() for path in step.outputs):
        return False
    noted = read_json(stamp)
    return (noted.get("fingerprint") == fingerprint(step)
            and noted.get("files", {}) == digests(step))


def remove(paths: Sequence[Path]) -> None:
    """Delete files and directories that may not be there."""
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def made_from(stamp: Path, started_from: Path) -> str | None:
    """Fingerprint under which the outputs were begun or made; None when no recipe did."""
    if started_from.exists():
        return started_from.read_text()
    return read_json(stamp).get("fingerprint") if stamp.exists() else None


def take_lock(stamps: Path) -> int:
    """Wait until no other recipe, and no step that one left behind, works here."""
    stamps.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(stamps / "lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log("another run of the recipe, or a step of it, is still at work here; waiting for it")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def run_step(step: Step, stamps: Path, lock: tuple[int, ...] = ()) -> int:
    """Run one step unless it is done; returns its exit status."""
    stamp = stamps / f"{step.name}.json"
    # A verdict costs nothing, and whoever asks again wants to see it.
    if not step.verdict and is_done(step, stamp):
        log(f"[{step.name}] up to date")
        return 0
    started_from = stamps / f"{step.name}.started"
    current = fingerprint(step)
    # What no recipe made is left to the step itself, which checks what it continues.
    if not step.resumes or made_from(stamp, started_from) not in (None, current):
        remove(step.outputs)
    stamps.mkdir(parents=True, exist_ok=True)
    started_from.write_text(current)
    log(f"[{step.name}] python -m {' '.join(step.command)}")
    started = time.monotonic()
    # A step that outlives a killed recipe keeps the lock, so that the next recipe waits for it.
    status = subprocess.run([sys.executable, "-m", *step.command], check=False,
                            pass_fds=lock, env={**os.environ, **QUIET}).returncode
    seconds = round(time.monotonic() - started, 1)
    if status == 0:
        write_json(stamp, {"fingerprint": current, "files": digests(step), "seconds": seconds})
        started_from.unlink()
        log(f"[{step.name}] done in {seconds} s")
    return status


def steps(encoder_yaml: str, reranker_yaml: str) -> list[Step]:
    """The recipe for a pair of configurations."""
    encoder = load_config(EncoderConfig, encoder_yaml)
    reranker = load_config(RerankerConfig, reranker_yaml)
    out = Path(encoder.run_dir).parent / "reports"
    encoder_dir, reranker_dir = Path(encoder.artifact_dir), Path(reranker.artifact_dir)
    built = Path("data/built")
    rollout = Path(encoder.run_dir) / "rollout_calibration.jsonl"
    dev = tuple(arg for path in WINDOWS_DEV for arg in ("--windows", path))
    dev_inputs = tuple(map(Path, WINDOWS_DEV))
    few = ("--few-shot", "configs/few_shot.jsonl")
    # On CPUs the reports are made on a part: windows of each file in one batch, questions a set.
    on_cpu = not torch.cuda.is_available()
    limit = ("--limit", "10", "--batch", "20") if on_cpu else ()
    questions = ("--limit", "60") if on_cpu else ()
    # All calibration windows in one batch: a step costs a CPU nearly the same for 8 and for 28.
    batch = ("--batch", "28") if on_cpu else ()
    # Calibration rewrites two files of the artifact; they do not make an adapter a new one.
    weights = (encoder_dir / WEIGHTS,)
    made = [
        Step("data", ("data.build", "configs/data.yaml"),
             (Path("configs/data.yaml"), Path("data/authored"), *BUILDERS, *external_marker()),
             tuple(built / name for name in BUILT)),
        Step("encoder", ("training.encoder", encoder_yaml),
             (Path(encoder_yaml), built / "windows_train.jsonl",
              *([Path(encoder.init) / WEIGHTS] if encoder.init else [])),
             (encoder_dir, Path(encoder.run_dir)), resumes=True),
        Step("rollout", ("serving.rollout", str(encoder_dir), encoder.data.calibration,
                         str(rollout), "--uncalibrated", *batch),
             (*weights, Path(encoder.data.calibration)), (rollout,), resumes=True),
        Step("calibrate", ("training.calibrate", "encoder", str(encoder_dir), "--rollout",
                           str(rollout), "--windows", encoder.data.calibration),
             (rollout,), (encoder_dir / "calibration.json",), resumes=True),
        Step("reranker", ("training.reranker", reranker_yaml),
             (Path(reranker_yaml), built / "pairs_train.jsonl", built / "pairs_calibration.jsonl"),
             (reranker_dir, Path(reranker.run_dir)), resumes=True),
        Step("extraction_prompt", ("benchmarks.extraction", *dev, "--encoder", "prompt",
                                   "--base", str(link_of(encoder.base)), *few, *limit,
                                   "--json", str(out / "extraction_prompt.json")),
             (*dev_inputs, Path("configs/few_shot.jsonl")), (out / "extraction_prompt.json",)),
        Step("extraction_tuned", ("benchmarks.extraction", *dev, "--encoder", "tuned",
                                  "--artifact", str(encoder_dir), *limit,
                                  "--json", str(out / "extraction_tuned.json")),
             (*dev_inputs, encoder_dir), (out / "extraction_tuned.json",), ignore=WRITTEN_LATER),
    ]
    if EXTERNAL.exists():
        made.append(Step(
            "recall", ("benchmarks.recall", "--data", str(EXTERNAL / "dev"), "--sets",
                       "locomo,memsim", "--arms", "bm25,rrf,ours", "--artifact",
                       str(reranker_dir), *questions, "--json", str(out / "recall.json")),
            (reranker_dir,), (out / "recall.json",), ignore=WRITTEN_LATER))
    made.append(Step("gate", ("training.evaluate", "configs/gate.yaml", "--reports", str(out),
                              "--encoder", str(encoder_dir), "--reranker", str(reranker_dir)),
                     (out, Path("configs/gate.yaml")), (encoder_dir / "eval.json",), verdict=True))
    return made


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    profile = "" if torch.cuda.is_available() else "_cpu"
    parser.add_argument("--encoder", default=f"configs/encoder{profile}.yaml")
    parser.add_argument("--reranker", default=f"configs/reranker{profile}.yaml")
    parser.add_argument("--from", dest="first", help="name of the step to begin with")
    args = parser.parse_args()
    made = steps(args.encoder, args.reranker)
    names = [step.name for step in made]
    if args.first and args.first not in names:
        raise SystemExit(f"error: --from: no step {args.first!r}; there are {names}")
    if not EXTERNAL.exists():
        log(f"{EXTERNAL}/ is not there: public corpora and the recall report are skipped")
    stamps = Path("runs/recipe")
    # SIGTERM ends the step too: subprocess.run kills its child when an exception passes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    lock = (take_lock(stamps),)
    started = time.monotonic()
    for step in made[names.index(args.first) if args.first else 0 :]:
        status = run_step(step, stamps, lock)
        if status:
            raise SystemExit(status if step.verdict else f"error: step {step.name} failed")
    log(f"make train: {(time.monotonic() - started) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
