"""Bases without a hub: a name, a path or a hub id becomes a verified directory of weights.

`python -m data.bases` fetches what the CPU profile needs; `--verify` hashes every file again.
A call with everything in place reads two small files and loads no model code.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import sys
from contextlib import closing
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from data.basedir import PROVENANCE_NAME, build_base, check_base, is_base, link_base
from data.carriers import CARRIERS, Carrier, Fetch, Report, assemble, no_report, pip_fetch
from memory_runtime.errors import ArtifactError

# Part of the directory name, so that a better conversion never meets files of an older one.
CONVERSION_VERSION = 1
LINK_DIR = Path("artifacts/bases")
TOOLS = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "gguf")


def default_cache_dir() -> Path:
    """Return where converted bases are kept for all checkouts of this user."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "bartlett" / "bases"


def resolve(
    spec: str,
    *,
    revision: str | None = None,
    cache_dir: Path | None = None,
    link_dir: Path | None = LINK_DIR,
    fetch: Fetch = pip_fetch,
    endpoint: str | None = None,
    report: Report = no_report,
) -> Path:
    """Return a verified base directory in Hugging Face layout, fetching it when it is not there.

    Args:
        spec: Name of a carrier, path of a directory, or hub id ORG/NAME; tried in this order.
        revision: Commit, tag or branch of a hub id. A commit is best: a branch is looked up
            once, and the commit it then pointed at is used from then on.
        cache_dir: Where bases are kept; the user's cache directory by default.
        link_dir: Where links to bases are made; None makes no link.
        fetch: Downloads the archive of a part of a carrier.
        endpoint: Address of the hub; huggingface_hub's own default when None.
        report: Receives (step, done, total); a hub's client shows its own progress.

    Returns:
        The link, or the directory itself when there is no link to make.

    Raises:
        ArtifactError: the name is unknown, a download failed, or content is not what it must be.
    """
    cache_dir = cache_dir or default_cache_dir()
    if revision is not None and (spec in CARRIERS or Path(spec).is_dir()):
        raise ValueError(
            f"revision={revision!r} was given with {spec!r}; only hub ids have revisions: drop it"
        )
    if spec in CARRIERS:
        directory = _resolve_carrier(CARRIERS[spec], cache_dir, fetch=fetch, report=report)
    elif Path(spec).is_dir():
        return _local_base(Path(spec))
    else:
        # Only this branch needs the hub's client, and it is slow to import.
        from data.hub import is_hub_id, resolve_hub

        if not is_hub_id(spec):
            raise ArtifactError(
                f"Unknown base {spec!r}: no directory, no hub id ORG/NAME and none of the "
                f"carriers {', '.join(CARRIERS)}; name one of these (`python -m data.bases` makes "
                "the links under artifacts/bases)"
            )
        directory = resolve_hub(spec, cache_dir, revision=revision, endpoint=endpoint)
    if link_dir is None:
        return directory
    return link_base(directory, link_dir / spec.rpartition("/")[2])


def carrier_directory(carrier: Carrier, cache_dir: Path) -> Path:
    """Return where the converted base of a carrier is kept."""
    return cache_dir / f"{carrier.sha256}.c{CONVERSION_VERSION}"


def _resolve_carrier(carrier: Carrier, cache_dir: Path, *, fetch: Fetch, report: Report) -> Path:
    target = carrier_directory(carrier, cache_dir)
    if is_base(target):
        check_base(target)
        return target
    build = partial(
        _build_from_carrier,
        carrier=carrier,
        downloads=cache_dir / "downloads" / carrier.sha256,
        fetch=fetch,
        report=report,
    )
    return build_base(target, build, lock_path=cache_dir / f"{carrier.sha256}.lock")


def _build_from_carrier(
    target: Path, *, carrier: Carrier, downloads: Path, fetch: Fetch, report: Report
) -> None:
    model_path = assemble(carrier, downloads, fetch=fetch, report=report)
    notes = _convert(carrier, model_path, target, report)
    (target / "LICENSE").write_text(_license_note(carrier), encoding="utf-8")
    provenance = json.dumps(_provenance(carrier, notes), indent=1, ensure_ascii=False)
    (target / PROVENANCE_NAME).write_text(provenance + "\n", encoding="utf-8")
    shutil.rmtree(downloads)


def _convert(carrier: Carrier, model_path: Path, target: Path, report: Report) -> dict[str, str]:
    # Model code loads only when something is to be converted.
    if carrier.layout == "gguf":
        from data.gguf_qwen import convert_gguf

        return convert_gguf(model_path, target, report=report)
    from data.bert_e5 import convert_e5s1

    return convert_e5s1(model_path, target, report=report)


def _provenance(carrier: Carrier, notes: dict[str, str]) -> dict[str, object]:
    return {
        "name": carrier.name,
        "upstream": carrier.upstream,
        "license": carrier.license,
        "carrier": [
            {
                "package": part.package,
                "version": part.version,
                "member": part.member,
                "sha256": part.sha256,
            }
            for part in carrier.parts
        ],
        "model_sha256": carrier.sha256,
        "model_bytes": carrier.size_bytes,
        "conversion": {"version": CONVERSION_VERSION, "layout": carrier.layout} | notes,
        "tools": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in TOOLS},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _license_note(carrier: Carrier) -> str:
    packages = ", ".join(f"{part.package} {part.version}" for part in carrier.parts)
    return (
        f"{carrier.name}\n\n"
        f"The weights and the tokenizer in this directory come from {carrier.upstream}\n"
        f"by {carrier.attribution}, licensed under {carrier.license}\n"
        f"(text: https://spdx.org/licenses/{carrier.license}.html).\n\n"
        f"Changes: quantised by the publisher of the carrier ({packages});\n"
        "dequantised and written in Hugging Face layout by Bartlett. See provenance.json.\n"
        "They come without warranty of any kind, as that license says.\n"
    )


def _local_base(path: Path) -> Path:
    if not (path / "config.json").is_file():
        raise ArtifactError(
            f"{path} is a directory without config.json, so it holds no base in Hugging Face "
            f"layout; name another directory, a hub id or one of {', '.join(CARRIERS)}"
        )
    if is_base(path):
        check_base(path)
    return path


class _Bars:
    """Progress bars, one for each step; nothing is shown before the first step."""

    def __init__(self, name: str, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, console=console)
        self.name = name
        self.tasks: dict[str, TaskID] = {}

    def __call__(self, step: str, done: int, total: int) -> None:
        if step not in self.tasks:
            self.progress.start()
            self.tasks[step] = self.progress.add_task(f"{self.name}: {step}", total=total)
        self.progress.update(self.tasks[step], completed=done)

    def close(self) -> None:
        if self.tasks:
            self.progress.stop()


def _fetch_all(specs: list[str], revision: str | None, console: Console, *, is_full: bool) -> None:
    for spec in specs:
        with closing(_Bars(spec, console)) as bars:
            path = resolve(spec, revision=revision, report=bars)
        if is_full:
            check_base(path, is_full=True)
        note = " (every file verified)" if is_full else ""
        console.print(f"{spec} -> {path}{note}", markup=False, soft_wrap=True)


def main(arguments: list[str] | None = None) -> int:
    """Fetch bases and link them under artifacts/bases; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m data.bases", description=main.__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"default: {' '.join(CARRIERS)}; or a hub id"
    )
    parser.add_argument("--revision", help="commit, tag or branch; only with hub ids")
    parser.add_argument("--verify", action="store_true", help="hash every file again")
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    try:
        _fetch_all(
            options.names or list(CARRIERS), options.revision, console, is_full=options.verify
        )
    except (ArtifactError, ValueError) as error:
        console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
