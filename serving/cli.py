"""The console script `bartlett`. Heavy imports stay inside the command functions."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from memory_runtime.errors import BartlettError


def _serve(options: argparse.Namespace) -> int:
    from serving.service import start
    start(options.config, host=options.host, port=options.port)
    return 0


def _verify(options: argparse.Namespace) -> int:
    from serving.artifact import open_artifact
    artifact = open_artifact(options.directory, base=options.base)
    against = f", fits {options.base}" if options.base else ", base not checked (--base DIR)"
    _say(f"{artifact.path}: {artifact.kind} {artifact.digest}, "
         f"{len(artifact.manifest['files'])} files as written{against}")
    return 0


def _export(options: argparse.Namespace) -> int:
    from serving.artifact import open_artifact
    from serving.export import export_reranker
    from serving.rollout import base_of
    base = base_of(options.directory, options.base)
    out = export_reranker(open_artifact(options.directory, base=base), base, options.out)
    _say(f"{out}: load it with sentence_transformers.CrossEncoder({str(out)!r})")
    return 0


def _say(text: str) -> None:
    print(text)  # noqa: T201


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bartlett", description="Selective memory for LLM apps")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="serve encoder, reranker and embedder over HTTP")
    serve.add_argument("--config", default="configs/serving_cpu.yaml")
    serve.add_argument("--host", help="overrides the configuration")
    serve.add_argument("--port", type=int, help="overrides the configuration")
    serve.set_defaults(run=_serve)
    artifact = commands.add_parser("artifact", help="look after trained artifacts")
    actions = artifact.add_subparsers(required=True, metavar="ACTION")
    verify = actions.add_parser("verify", help="check hashes, schema, keys and calibration")
    verify.add_argument("directory", type=Path)
    verify.add_argument("--base", type=Path, help="also check that it fits this base")
    verify.set_defaults(run=_verify)
    export = actions.add_parser("export", help="write a reranker merged, for CrossEncoder and TEI")
    export.add_argument("directory", type=Path)
    export.add_argument("out", type=Path)
    export.add_argument("--base", type=Path, help="base directory (default: the artifact's)")
    export.set_defaults(run=_export)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    options = build_parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except BartlettError as error:
        print(f"bartlett: {error}", file=sys.stderr)  # noqa: T201
        return 2


if __name__ == "__main__":
    sys.exit(main())
