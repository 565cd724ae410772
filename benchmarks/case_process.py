"""A process of its own over the store of a case: to be killed, or to write beside others.

    python -m benchmarks.case_process say|write|read DB

The job comes as one JSON line on standard input, reports go out as JSON lines.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.case_product import Product

READY = "ready"


def _tell(**fields: Any) -> None:  # noqa: ANN401
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def say(product: Product, job: dict[str, Any]) -> None:
    """Hand turns over, report it, and live on until the runner's signal comes."""
    product.say(job["user"], job.get("session"), job["turns"])
    _tell(state="said")
    while True:
        time.sleep(1)


def four_digits(process: int, i: int) -> str:
    """A number that belongs to one say of one process."""
    return f"{random.Random(f'{process}-{i}').randrange(1000, 10000)}"


def write(product: Product, job: dict[str, Any]) -> None:
    """Says of one of several processes, all of which start at once."""
    process, errors = job["process"], []
    user = job["user"].format(process=process)
    _tell(state=READY)
    sys.stdin.readline()
    for i in range(1, job["says"] + 1):
        text = job["text"].format(process=process, i=i, four_digits=four_digits(process, i))
        try:
            product.say(user, "s1", [{"role": "user", "text": text}])
            product.settle(user)
        # Whatever the product raises is what the case counts.
        except Exception as error:
            errors.append(repr(error))
    _tell(errors=errors)
    product.close()


def read(product: Product, job: dict[str, Any]) -> None:
    """Searches beside the writers until told to stop."""
    errors: list[str] = []
    _tell(state=READY)
    sys.stdin.readline()
    rng = random.Random(job["process"])
    stop = time.monotonic() + job["seconds"]
    while time.monotonic() < stop and len(errors) < 10:
        try:
            product.recall(rng.choice(job["users"]), "locker code", k=5)
        except Exception as error:
            errors.append(repr(error))
    _tell(errors=errors)
    product.close()


def main(arguments: list[str]) -> int:
    """Entry point."""
    work = {"say": say, "write": write, "read": read}[arguments[0]]
    product = Product(Path(arguments[1]))
    # Opened before the start signal, so that opening at once is part of what is tested.
    product.memory  # noqa: B018
    work(product, json.loads(sys.stdin.readline()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
