"""Builds the training files: `python -m data.build [configs/data.yaml]`.

Windows for the encoder, question groups for the reranker, and a manifest that names every source
with licence, digest and record ids. Nothing held out for reports is read here.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import random
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from data.pairs import build_pairs
from data.sources import WINDOW_SOURCES, SourceInfo, fits, source_info, story_windows
from memory_runtime.corpus import AnnotatedWindow, read_windows
from memory_runtime.errors import BartlettError, ConfigError
from memory_runtime.prompt import to_digit
from memory_runtime.schema import SCORE_NAMES


@dataclass(frozen=True)
class DataConfig:
    """Keys of configs/data.yaml."""

    external_dir: str
    authored_dir: str
    built_dir: str
    seed: int
    calibration_every: int
    max_calibration: int
    max_window_tokens: int
    per_source: dict[str, int]


def load(path: Path) -> DataConfig:
    """Read the configuration.

    Raises:
        ConfigError: Keys are missing or unknown, or a source is not one that may be trained on.
    """
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    names = {f.name for f in dataclasses.fields(DataConfig)}
    known = {name for name, *_ in WINDOW_SOURCES}
    faults = [f"missing key {k}" for k in sorted(names - tree.keys())]
    faults += [f"unknown key {k}, allowed {sorted(names)}" for k in sorted(tree.keys() - names)]
    faults += [f"per_source.{k}: no such source, allowed {sorted(known)}"
               for k in sorted(tree.get("per_source", {}).keys() - known)]
    faults += [f"{k}: got {tree[k]!r}, must be a whole number from 1"
               for k in ("calibration_every", "max_calibration")
               if k in tree and (type(tree[k]) is not int or tree[k] < 1)]
    if faults:
        raise ConfigError(f"{path}: " + "; ".join(faults))
    return DataConfig(**tree)


def training_stories(authored_dir: Path) -> list[Path]:
    """Stories that may be learnt from; number 06 of each language is kept for the reports."""
    stories = (authored_dir / "stories").glob("as-*.json")
    return sorted(path for path in stories if not path.stem.endswith("-06"))


def window_row(annotated: AnnotatedWindow) -> dict[str, Any]:
    """A window in the form of formats.md."""
    window = annotated.window
    gold = []
    for item in annotated.gold:
        c = item.candidate
        row = {
            "text": c.text, "layer": c.layer.value, "kind": c.kind.value, "subject": c.subject,
            "attribute": c.attribute, "evidence": list(c.evidence),
            "literals": list(item.literals), "event_time": c.event_time, "polarity": c.polarity,
            "explicit": c.explicit, "must": item.must,
        }
        if item.has_scores:
            scores = dataclasses.asdict(c.scores)
            row["scores"] = {name: to_digit(scores[name]) for name in SCORE_NAMES}
        gold.append(row)
    return {
        "id": window.id, "lang": annotated.language, "source": annotated.source,
        "domain": annotated.domain, "session_time": window.session_time, "goal": window.goal,
        "known": list(window.known),
        "turns": [{"id": t.id, "speaker": t.speaker, "role": t.role, "text": t.text}
                  for t in window.turns],
        "gold": gold,
        "forbidden": [dataclasses.asdict(f) for f in annotated.forbidden],
    }


def thin(windows: list[AnnotatedWindow], limit: int, seed: int) -> list[AnnotatedWindow]:
    """At most `limit` windows, a third of them (where there are as many) with nothing in them."""
    generator = random.Random(seed)
    empty = [w for w in windows if not w.gold]
    full = [w for w in windows if w.gold]
    generator.shuffle(empty)
    generator.shuffle(full)
    num_empty = min(len(empty), limit // 3 if full else limit)
    chosen = empty[:num_empty] + full[: limit - num_empty]
    return sorted(chosen, key=lambda w: w.window.id)


def corpus_windows(
    config: DataConfig, external: Path
) -> tuple[list[AnnotatedWindow], list[SourceInfo], list[str]]:
    """Windows of the public corpora that are there; names of those that are not."""
    chosen, infos, absent = [], [], []
    for name, relative, licence, reader in WINDOW_SOURCES:
        path = external / relative
        if not path.exists():
            absent.append(name)
            continue
        fitting = [w for w in reader(path)
                   if len(w.window.turns) > 2 and fits(w.window, config.max_window_tokens)]
        part = thin(fitting, config.per_source.get(name, 0), config.seed)
        chosen += part
        infos.append(source_info(name, path, licence, [w.window.id for w in part]))
    return chosen, infos, absent


def write_lines(path: Path, rows: list[dict[str, Any]]) -> str:
    """Write JSON lines; returns the digest of the file."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
    return hashlib.sha256(text.encode()).hexdigest()


def split_calibration(
    files: list[list[AnnotatedWindow]], step: int
) -> tuple[list[AnnotatedWindow], list[AnnotatedWindow]]:
    """Every `step`-th window of each file calibrates.

    Counted within its file, so that windows added at the end change the side of no other: an
    adapter that goes on being trained must not meet its calibration windows.

    Returns:
        Windows to learn from, windows to calibrate on.
    """
    calibration = [w for windows in files for w in windows[step - 1 :: step]]
    taken = {w.window.id for w in calibration}
    return [w for windows in files for w in windows if w.window.id not in taken], calibration


def spread(windows: list[AnnotatedWindow], limit: int) -> list[AnnotatedWindow]:
    """At most `limit` of the windows, evenly over their order."""
    num = min(limit, len(windows))
    return [windows[n * len(windows) // num] for n in range(num)]


def build(config: DataConfig) -> dict[str, Any]:
    """Build everything; returns the manifest.

    Raises:
        ConfigError: There is no authored corpus.
    """
    authored_dir, built = Path(config.authored_dir), Path(config.built_dir)
    files = sorted(authored_dir.glob("windows_train_*.jsonl"))
    if not files:
        raise ConfigError(f"{authored_dir} holds no windows_train_*.jsonl; check authored_dir")
    train, calibration = split_calibration(
        [list(read_windows(path)) for path in files], config.calibration_every)
    calibration = spread(calibration, config.max_calibration)
    train += [w for path in training_stories(authored_dir) for w in story_windows(path)]
    external = Path(config.external_dir)
    corpora, infos, absent = corpus_windows(config, external)
    digests = {
        "windows_train.jsonl": write_lines(
            built / "windows_train.jsonl", [window_row(w) for w in train + corpora]),
        "windows_calibration.jsonl": write_lines(
            built / "windows_calibration.jsonl", [window_row(w) for w in calibration]),
    }
    infos += build_pairs(external if external.exists() else None, authored_dir, built, config.seed)
    for name in ("pairs_train.jsonl", "pairs_calibration.jsonl"):
        digests[name] = hashlib.sha256((built / name).read_bytes()).hexdigest()
    manifest = {
        "files": digests, "absent": absent,
        "sources": [{**dataclasses.asdict(i), "records": len(i.records)} for i in infos],
        "records": sorted({record for info in infos for record in info.records}),
        "windows": dict(Counter(w.source for w in train + corpora)),
        "empty": sum(not w.gold for w in train + corpora),
    }
    write_lines(built / "manifest.json", [manifest])
    return manifest


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", nargs="?", default="configs/data.yaml", type=Path)
    try:
        manifest = build(load(parser.parse_args().config))
    except (BartlettError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    for name in manifest["absent"]:
        sys.stderr.write(f"{name}: not in the external folder, skipped\n")
    print(f"windows {manifest['windows']}, {manifest['empty']} of them empty")  # noqa: T201


if __name__ == "__main__":
    main()
