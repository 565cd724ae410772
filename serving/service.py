"""Starts the service: `python -m serving.service --config configs/serving_cpu.yaml`.

BentoML imports this module in its worker process and finds `service` in it; the configuration
comes as an argument (`bentoml serve serving.service:service --arg config=FILE` does the same).
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import Any

DEFAULT_CONFIG = "configs/serving_cpu.yaml"
TARGET = "serving.service:service"

_log = logging.getLogger(__name__)


def __getattr__(name: str) -> Any:  # noqa: ANN401
    """Build `service` when BentoML asks for it, so that importing this module runs nothing."""
    if name != "service":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import bentoml

    from serving.bento import build_service
    from serving.config import load_config
    arguments = bentoml.use_arguments()
    globals()["service"] = build_service(
        load_config(vars(arguments).get("config", DEFAULT_CONFIG)))
    return globals()["service"]


def check(config_path: str | Path) -> Any:  # noqa: ANN401
    """Read the configuration and open its artifacts, before any process is started.

    Raises:
        ConfigError: The configuration is wrong.
        ArtifactError: A base or an artifact is missing, damaged or does not fit.
    """
    from memory_runtime.errors import ArtifactError
    from serving.artifact import open_artifact
    from serving.config import load_config
    config = load_config(config_path)
    for section in (config.encoder, config.reranker, config.embedder):
        if section is not None and not (Path(section.base) / "config.json").is_file():
            raise ArtifactError(f"no base at {section.base}; run `make setup`")
    if config.encoder is not None and config.encoder.mode == "tuned":
        open_artifact(config.encoder.artifact or "", base=config.encoder.base)
    if config.reranker is not None:
        open_artifact(config.reranker.artifact, base=config.reranker.base)
    return config


def start(config_path: str | Path, *, host: str | None = None, port: int | None = None) -> None:
    """Replace this process by BentoML's server; stops on SIGINT and SIGTERM.

    Raises:
        BartlettError: As `check`.
    """
    config = check(config_path)
    command = [
        sys.executable, "-m", "bentoml", "serve", TARGET,
        "--arg", f"config={Path(config_path).resolve()}",
        "--host", host or config.host, "--port", str(port if port is not None else config.port),
        # A batch that runs is finished before the worker goes.
        "--timeout-graceful-shutdown", "60",
    ]
    # BentoML reports usage to its makers unless told not to.
    environment = {**os.environ, "BENTOML_DO_NOT_TRACK": "True"}
    os.execve(sys.executable, command, environment)


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status when nothing was started."""
    from memory_runtime.errors import BartlettError
    parser = argparse.ArgumentParser(prog="python -m serving.service", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=DEFAULT_CONFIG, help="serving configuration (YAML)")
    parser.add_argument("--host", help="overrides the configuration")
    parser.add_argument("--port", type=int, help="overrides the configuration")
    options = parser.parse_args(arguments)
    try:
        start(options.config, host=options.host, port=options.port)
    except BartlettError as error:
        print(f"bartlett serve: {error}", file=sys.stderr)  # noqa: T201
    return 2


if __name__ == "__main__":
    sys.exit(main())
