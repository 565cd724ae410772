"""The memory part alone: `python -m memory_runtime add|search|answer|list --db FILE --user ID`.

Models come from a running service (`--url`). Without one, `add` stores turns that wait in the
journal, and search goes by words.
"""

from __future__ import annotations

import argparse
import sys

from memory_runtime.clients import RemoteEmbedder, RemoteEncoder, RemoteReranker, Service
from memory_runtime.config import MemoryConfig, load_config
from memory_runtime.errors import BartlettError
from memory_runtime.runtime import Memory
from memory_runtime.schema import Memory as Trace
from memory_runtime.schema import Scope, Turn


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--db", required=True, help="the SQLite file")
    common.add_argument("--user", required=True, help="whose memory")
    common.add_argument("--tenant", default="default")
    common.add_argument("--url", help="service with the models, like http://127.0.0.1:3000")
    common.add_argument("--config", help="YAML file of settings")
    parser = argparse.ArgumentParser(prog="python -m memory_runtime", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("add", parents=[common], help="take in turns and encode them")
    add.add_argument("text", nargs="*", help="turns; lines of standard input without any")
    add.add_argument("--session")
    add.add_argument("--at", help="ISO time at which it was said; now without")
    for name, what in (("search", "memories that bear on a query"), ("answer", "a checked reply")):
        command = commands.add_parser(name, parents=[common], help=what)
        command.add_argument("text")
        command.add_argument("--at", help="ISO time of asking; now without")
    commands.add_parser("list", parents=[common], help="all active memories")
    return parser


def _open(options: argparse.Namespace) -> Memory:
    config = load_config(options.config) if options.config else MemoryConfig()
    if not options.url:
        return Memory(options.db, config=config)
    service = Service(options.url)
    return Memory(options.db, config=config, encoder=RemoteEncoder(service),
                  embedder=RemoteEmbedder(service), reranker=RemoteReranker(service))


def _line(memory: Trace, score: float | None = None) -> str:
    lead = f"{score:.3f}  " if score is not None else ""
    candidate = memory.candidate
    return f"{lead}{memory.id}  [{candidate.layer.value}/{candidate.kind.value}]  {candidate.text}"


def _add(memory: Memory, scope: Scope, options: argparse.Namespace) -> int:
    texts = options.text or [line.rstrip("\n") for line in sys.stdin]
    turns = [Turn("", "user", text, "user", options.at, options.session)
             for text in texts if text.strip()]
    added = memory.add(turns, scope=scope)
    done = memory.flush(scope)
    print(f"{len(added.turn_ids)} turns added, {added.duplicates} known before, "
          f"{done.memories} memories, {done.pending} turns wait")
    for error in done.errors:
        print(error, file=sys.stderr)
    return 1 if done.errors and done.pending else 0


def _run(options: argparse.Namespace) -> int:
    scope = Scope(user=options.user, tenant=options.tenant)
    with _open(options) as memory:
        if options.command == "add":
            return _add(memory, scope, options)
        if options.command == "list":
            for item in memory.get_all(scope):
                print(_line(item))
        elif options.command == "search":
            for hit in memory.search(options.text, scope, asked_at=options.at).hits:
                print(_line(hit.memory, hit.score))
        else:
            print(memory.answer(options.text, scope, asked_at=options.at).text)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except BartlettError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
