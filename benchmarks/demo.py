"""`make demo`: the whole way of a memory on two real conversations, one Chinese, one English.

Starts the service, feeds each conversation session by session, shows what was stored, asks five
questions each, shows what was recalled, the answer and its check, and the tokens that were saved.
Uses MemoryBank from external_data/ where it is there, else two held-out authored stories, whose
answers are judged by their patterns.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from memory_runtime import (
    Memory,
    MemoryConfig,
    RemoteEmbedder,
    RemoteEncoder,
    RemoteReranker,
    Scope,
    Turn,
)
from memory_runtime.corpus import role_of
from memory_runtime.errors import BartlettError, ConfigError
from memory_runtime.windows import estimate_tokens
from serving.config import EncoderSection, RerankerSection
from serving.config import load_config as load_serving

STORIES = {"zh": "data/authored/stories/as-zh-06.json", "en": "data/authored/stories/as-en-06.json"}
BANKS = {"zh": "dev/memorybank_zh.jsonl", "en": "dev/memorybank_en.jsonl"}
NUM_QUESTIONS = 5

console = Console(width=120)


@dataclass(frozen=True)
class Asked:
    """A question; the patterns are empty where the source has no answers."""

    text: str
    accept: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Conversation:
    """What is fed and what is asked."""

    name: str
    language: str
    turns: list[Turn]
    questions: list[Asked]
    asked_at: str | None = None


def _turns(sessions: list[dict[str, Any]]) -> list[Turn]:
    turns = []
    for session in sessions:
        at = session["time"]
        # A bare date says nothing of the hour; noon keeps it on its day in every time zone.
        stamp = at if "T" in at else f"{at}T12:00:00+00:00"
        turns += [Turn(f"{session['id']}/{t['id']}", t["speaker"], t["text"],
                       role_of(t["speaker"]), stamp, session["id"]) for t in session["turns"]]
    return turns


def story(path: Path) -> Conversation:
    """A detective scenario, with questions about facts that were told."""
    data = json.loads(path.read_text(encoding="utf-8"))
    told = [q for q in data["questions"] if q["kind"] != "never_said"][: NUM_QUESTIONS - 1]
    never = [q for q in data["questions"] if q["kind"] == "never_said"][:1]
    questions = [Asked(q["question"], q["accept"], q["wrong"]) for q in told + never]
    return Conversation(data["id"], data["lang"], _turns(data["sessions"]), questions,
                        data["questions"][0]["asked_at"])


def memorybank(path: Path, user: int) -> Conversation:
    """One MemoryBank user: ten days of talk and the data set's own questions."""
    lines = path.read_text(encoding="utf-8").splitlines()
    data = json.loads(lines[user])
    questions = [Asked(q["question"]) for q in data["questions"]][:NUM_QUESTIONS]
    return Conversation(data["id"], data["lang"], _turns(data["sessions"]), questions)


def conversations(options: argparse.Namespace) -> list[Conversation]:
    """The two conversations to show.

    Raises:
        ConfigError: A file that was asked for is not there.
    """
    made = []
    for language in ("zh", "en"):
        bank, path = options.data / BANKS[language], Path(STORIES[language])
        if bank.exists() and not options.stories:
            made.append(memorybank(bank, options.user))
        elif path.exists():
            made.append(story(path))
        else:
            raise ConfigError(f"neither {bank} nor {path} is there; run this from a checkout")
    return made


@contextmanager
def service(config: Path, port: int, log: Path) -> Iterator[str]:
    """Run the service until the block ends; gives its address.

    Raises:
        ConfigError: It does not come up, or the port is taken; says where its log is.
    """
    # Else the questions would go to whatever listens there already.
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise ConfigError(f"port {port} is taken; stop what listens there or give --port")
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "serving.cli", "serve", "--config", str(config),
             "--port", str(port)], stdout=out, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_ready(process, url, log)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Wait until /readyz answers."""
    for _ in range(600):
        if process.poll() is not None:
            tail = "\n".join(log.read_text().splitlines()[-5:])
            raise ConfigError(f"the service stopped with status {process.returncode}:\n{tail}")
        try:
            with urllib.request.urlopen(f"{url}/readyz", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise ConfigError(f"the service was not ready after two minutes; see {log}")


def operating_point(config: Path) -> MemoryConfig:
    """Weights and thresholds that the served artifacts ship."""
    serving = load_serving(config)

    def shipped(section: EncoderSection | RerankerSection | None) -> dict[str, Any] | None:
        if section is None or section.artifact is None:
            return None
        path = Path(section.artifact) / "calibration.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    return MemoryConfig().with_calibration(shipped(serving.encoder), shipped(serving.reranker))


def show_memories(memory: Memory, scope: Scope) -> None:
    """What was stored, with layer, kind and scores."""
    table = Table("layer", "kind", "memory", "keep", "reuse", "goal", "importance", "state",
                  title="memories")
    for item in memory.get_all(scope):
        c = item.candidate
        table.add_row(c.layer.value, c.kind.value, c.text, f"{c.keep:.2f}",
                      f"{c.scores.reuse:.2f}", f"{c.scores.goal:.2f}", f"{item.importance:.2f}",
                      item.state.value)
    console.print(table)


def judge(asked: Asked, text: str) -> str:
    """right, altered, not right, or blank where the source has no answer."""
    def hit(patterns: list[str]) -> bool:
        return any(re.search(p, text, re.IGNORECASE) for p in patterns)

    if not asked.accept:
        return ""
    if hit(asked.wrong):
        return "ALTERED"
    return "right" if hit(asked.accept) else "not right"


def ask(memory: Memory, scope: Scope, talk: Conversation) -> list[str]:
    """Ask all questions; returns the verdicts."""
    verdicts = []
    history = sum(estimate_tokens(turn.text) for turn in talk.turns)
    for asked in talk.questions:
        answer = memory.answer(asked.text, scope, asked_at=talk.asked_at)
        shown = [hit.memory.candidate.text for hit in answer.recalled.hits]
        used = sum(map(estimate_tokens, shown))
        verdicts.append(judge(asked, answer.text))
        console.print(f"[bold]? {asked.text}[/bold]", highlight=False)
        for text in shown:
            console.print(f"    recalled: {text}", style="dim", highlight=False)
        check = "accepted" if answer.check.accepted else "conflict"
        console.print(f"  = {answer.text}  [{answer.status}, check {check}] {verdicts[-1]}",
                      highlight=False, markup=False)
        console.print(f"    {used} tokens recalled instead of {history} "
                      f"({1 - used / history:.0%} saved)", style="dim", highlight=False)
    return verdicts


def run(options: argparse.Namespace) -> None:
    """Show both conversations."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name, \
            service(options.config, options.port, Path(name) / "service.log") as url:
        console.print(f"service ready after {time.monotonic() - started:.0f} s")
        with Memory(Path(name) / "demo.sqlite", encoder=RemoteEncoder(url),
                    embedder=RemoteEmbedder(url), reranker=RemoteReranker(url),
                    config=operating_point(options.config)) as memory:
            for talk in conversations(options):
                scope = Scope(user=talk.name)
                begun = time.monotonic()
                console.rule(f"{talk.name}: {len(talk.turns)} turns")
                memory.add(talk.turns, scope=scope)
                for error in memory.flush(scope).errors:
                    console.print(f"a model failed: {error}", style="red", markup=False)
                console.print(f"read in {time.monotonic() - begun:.0f} s")
                show_memories(memory, scope)
                verdicts = ask(memory, scope, talk)
                if any(verdicts):
                    console.print(f"{verdicts.count('right')} of {len(verdicts)} right, "
                                  f"{verdicts.count('ALTERED')} altered")
    console.print(f"demo: {time.monotonic() - started:.0f} s")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=Path("configs/serving_cpu.yaml"))
    parser.add_argument("--port", type=int, default=3000)
    parser.add_argument("--data", type=Path, default=Path("external_data"))
    parser.add_argument("--user", type=int, default=0, help="which MemoryBank user")
    parser.add_argument("--stories", action="store_true", help="use the authored stories")
    logging.basicConfig(level=logging.WARNING)
    try:
        run(parser.parse_args())
    except BartlettError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
