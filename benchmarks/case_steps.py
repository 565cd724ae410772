"""The step verbs of the cases, run one after another on the product.

What the product does not have raises `Unsupported`, which makes the case void with the reason.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from benchmarks.case_checks import Shown, StepResult, Unsupported
from benchmarks.case_product import Product
from benchmarks.stand_ins import BigramEmbedder, Faults, VerbatimEncoder
from memory_runtime.dates import interval, resolve_date
from memory_runtime.errors import BartlettError
from memory_runtime.verify import check_text

Step = dict[str, Any]

CHILD_S = 60
"""How long a child process may take before the step counts as failed."""
READER_S = 5.0


def spawn(kind: str, path: Path, job: dict[str, Any]) -> subprocess.Popen[str]:
    """A process of `benchmarks.case_process` that has been given its job."""
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.case_process", kind, str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).parents[1], env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert child.stdin is not None
    child.stdin.write(json.dumps(job) + "\n")
    child.stdin.flush()
    return child


def reply_of(child: subprocess.Popen[str]) -> dict[str, Any]:
    """The next line that a child tells; an error when it dies or is silent for too long."""
    assert child.stdout is not None
    timer = threading.Timer(CHILD_S, child.kill)
    timer.start()
    try:
        line = child.stdout.readline()
    finally:
        timer.cancel()
    if not line:
        child.wait(CHILD_S)
        return {"errors": [f"the process ended with status {child.returncode}"]}
    return json.loads(line)


@dataclass(slots=True)
class Run:
    """One case under way.

    Attributes:
        product: The store and its models.
        steps: All steps of the case, so that a say may know that a stop follows.
        results: What the steps so far brought forth.
    """

    product: Product
    steps: list[Step]
    results: list[StepResult] = field(default_factory=list)
    _child: subprocess.Popen[str] | None = field(default=None, init=False, repr=False)

    def all(self) -> list[StepResult]:
        """Run every step.

        Raises:
            Unsupported: A step is unknown, or the product has no such call.
        """
        try:
            for at, step in enumerate(self.steps):
                verb = step["op"]
                if verb not in _VERBS:
                    raise Unsupported(f"step {verb}: {_WHY_NOT.get(verb, 'not known')}")
                try:
                    self.results.append(_VERBS[verb](self, step, at))
                except BartlettError as error:
                    self.results.append(StepResult(refused=f"{type(error).__name__}: {error}"))
            return self.results
        finally:
            self._end_child(signal.SIGKILL)
            self.product.close()

    # --- dialogue ---

    def say(self, step: Step, at: int) -> StepResult:
        following = self.steps[at + 1]["op"] if at + 1 < len(self.steps) else ""
        if following == "stop":
            return self._say_in_child(step)
        if "turns_rule" in step:
            raise Unsupported("step say with turns_rule")
        self.product.say(step["user"], step.get("session"), step["turns"])
        if step.get("settle", True):
            self.product.settle(step["user"])
        return StepResult()

    def _say_in_child(self, step: Step) -> StepResult:
        """The say of a process that is about to be stopped."""
        self.product.close()
        job = {name: step.get(name) for name in ("user", "session", "turns")}
        self._child = spawn("say", self.product.path, job)
        told = reply_of(self._child)
        if told.get("state") != "said":
            raise RuntimeError(f"the say did not return: {told}")
        return StepResult()

    def say_each(self, step: Step, at: int) -> StepResult:
        said: dict[str, list[Shown]] = {}
        for user, text in step["texts"].items():
            self.product.say(user, "s1", [{"role": "user", "text": text}])
            self.product.settle(user)
            said[user] = [Shown(text)]
        return StepResult(by_user=said)

    def repeat(self, step: Step, at: int) -> StepResult:
        """The same call again; a client with a time-out does not wait for the one before."""
        limit, calls = step.get("client_timeout_seconds"), []
        errors: list[str] = []

        def call() -> None:
            try:
                self.product.say(step["say"]["user"], step["say"].get("session"),
                                 step["say"]["turns"])
            except BartlettError as error:
                errors.append(repr(error))

        # Opened here: three threads must share one store.
        _ = self.product.memory
        for _ in range(step["times"]):
            thread = threading.Thread(target=call)
            thread.start()
            thread.join(limit)
            calls.append(thread)
        for thread in calls:
            thread.join()
        return StepResult(numbers={"errors": len(errors)})

    def settle(self, step: Step, at: int) -> StepResult:
        self.product.settle(step.get("user"))
        return StepResult()

    def seed(self, step: Step, at: int) -> StepResult:
        texts, times = [], []
        for series in step.get("series", ()):
            first, last = series["n"]
            start = datetime.fromisoformat(series["from"])
            for n in range(first, last + 1):
                texts.append(series["text"].replace("{n}", str(n)))
                times.append((start + timedelta(
                    seconds=series["step_seconds"] * (n - first))).isoformat())
        for item in step.get("items", ()):
            texts.append(item["text"])
            times.append(item["at"])
        self.product.seed(step["user"], texts, times)
        return StepResult(numbers={"total": len(texts)})

    # --- reading ---

    def list(self, step: Step, at: int) -> StepResult:
        superseded = bool(step.get("include_superseded"))
        users = step.get("users") or [step["user"]]
        by_user = {user: self.product.list(user, include_superseded=superseded) for user in users}
        total = sum(len(memories) for memories in by_user.values())
        return StepResult(memories=[m for user in users for m in by_user[user]], by_user=by_user,
                          numbers={"total": total}, words={"integrity": self.product.integrity()})

    def recall(self, step: Step, at: int) -> StepResult:
        return StepResult(memories=self.product.recall(
            step.get("user"), step["query"], k=step.get("k"), now=step.get("now"),
            only=step.get("only"), after=step.get("after")))

    def recall_each(self, step: Step, at: int) -> StepResult:
        return StepResult(by_user={
            user: self.product.recall_every_way(user, step["query"], k=step.get("k"),
                                                now=step.get("now"))
            for user in step["users"]})

    def answer(self, step: Step, at: int) -> StepResult:
        reply = self.product.answer(step["user"], step["question"], now=step.get("now"))
        if step.get("also_ingest"):
            turn = {"role": "user", "text": step["question"], "at": step.get("now")}
            self.product.say(step["user"], "asked", [turn])
            self.product.settle(step["user"])
        return StepResult(reply=reply)

    def forget(self, step: Step, at: int) -> StepResult:
        if "ids" not in step:
            raise Unsupported("step forget without ids")
        return StepResult(numbers={"deleted": self.product.forget(step["user"], step["ids"])})

    def check_text(self, step: Step, at: int) -> StepResult:
        check = check_text(step["draft"], step["evidence"])
        return StepResult(verdict="accept" if check.accepted else "reject", wanted=step["want"])

    # --- the process ---

    def stop(self, step: Step, at: int) -> StepResult:
        if self._child is None:
            raise Unsupported("step stop that does not follow a say")
        time.sleep(step.get("after_seconds", 0))
        self._end_child(signal.Signals[f"SIG{step['signal']}"])
        return StepResult()

    def _end_child(self, how: signal.Signals) -> None:
        if self._child is not None:
            self._child.send_signal(how)
            self._child.communicate(timeout=CHILD_S)
            self._child = None

    def start(self, step: Step, at: int) -> StepResult:
        # The store is opened at the next use, by this process.
        return StepResult()

    def restart(self, step: Step, at: int) -> StepResult:
        self.product.close()
        return StepResult()

    def parallel(self, step: Step, at: int) -> StepResult:
        """Writers and readers in processes of their own, on one file, all started at once."""
        self.product.close()
        numbers = range(1, step["processes"] + 1)
        users = [step["user"].format(process=n) for n in numbers]
        children = [spawn("write", self.product.path, {
            "process": n, "says": step["says_each"], "user": step["user"], "text": step["text"]})
            for n in numbers]
        children += [spawn("read", self.product.path, {
            "process": n, "users": users, "seconds": READER_S})
            for n in range(step.get("readers", 0))]
        told = [reply_of(child) for child in children]
        for child in children:
            assert child.stdin is not None
            if child.poll() is None:
                child.stdin.write("go\n")
                child.stdin.flush()
        errors = [error for reply in told for error in reply.get("errors", ())]
        for child, ready in zip(children, told, strict=True):
            if "errors" not in ready:
                errors += reply_of(child).get("errors", ["no report"])
            child.communicate(timeout=CHILD_S)
        return StepResult(numbers={"errors": len(errors)}, words={"errors": "; ".join(errors[:3])})

    # --- the test bench ---

    def stub(self, step: Step, at: int) -> StepResult:
        """Make a stand-in fail on the calls that the step names."""
        part = {"encoder": self.product.encoder, "embedder": self.product.embedder}.get(
            step["part"])
        if not isinstance(part, (VerbatimEncoder, BigramEmbedder)):
            raise Unsupported(f"step stub of {step['part']}")
        known = {"op", "part", "raises_times", "raises_on_call", "times"}
        if set(step) - known:
            raise Unsupported(f"step stub with {sorted(set(step) - known)}")
        if "raises_times" in step:
            calls = set(range(1, step["raises_times"] + 1))
        else:
            first = step["raises_on_call"]
            calls = set(range(first, first + step.get("times", 1)))
        part.faults = Faults(calls)
        return StepResult()

    def call(self, step: Step, at: int) -> StepResult:
        """A library function."""
        if step["fn"] != "resolve_date":
            raise Unsupported(f"step call of {step['fn']}")
        return StepResult(values=[_day_or_days(resolve_date(text, step["reference"]))
                                  for text in step["args"]])

    def note(self, step: Step, at: int) -> StepResult:
        """Prose for the reader. What it asks for is built by the runner, where it can be."""
        return StepResult()

    def wait(self, step: Step, at: int) -> StepResult:
        time.sleep(step.get("seconds", 0))
        return StepResult()


def _day_or_days(iso: str | None) -> str | None:
    """A day as it is, a longer time as first/last."""
    if iso is None:
        return None
    first, last = interval(iso)
    return first.isoformat() if first == last else f"{first.isoformat()}/{last.isoformat()}"


_VERBS: dict[str, Callable[[Run, Step, int], StepResult]] = {
    "say": Run.say, "say_each": Run.say_each, "repeat": Run.repeat, "settle": Run.settle,
    "seed": Run.seed, "list": Run.list, "recall": Run.recall, "recall_each": Run.recall_each,
    "answer": Run.answer, "forget": Run.forget, "check_text": Run.check_text, "stop": Run.stop,
    "start": Run.start, "restart": Run.restart, "parallel": Run.parallel, "stub": Run.stub,
    "call": Run.call, "note": Run.note, "wait": Run.wait,
}
_WHY_NOT = {
    "tick": "the product has no maintenance to run, so time alone proves nothing",
    "prompt_seen": "the extractive answerer is sent no messages",
}
