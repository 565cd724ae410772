"""Bases from a model hub: one commit, safetensors and tokenizer files only, every hash checked.

Nothing that could run code on loading (Python files, pickles) is ever downloaded.
"""

import datetime
import hashlib
import json
import re
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HTTPError,
    OfflineModeIsEnabled,
    RevisionResolutionError,
    XetDownloadError,
)
from huggingface_hub.hf_api import ModelInfo, RepoSibling

from data.basedir import (
    CHUNK_BYTES,
    PROVENANCE_NAME,
    build_base,
    check_base,
    disk_errors,
    file_sha256,
    is_base,
)
from memory_runtime.errors import ArtifactError

HUB_ERRORS = (
    EntryNotFoundError,
    HTTPError,
    OfflineModeIsEnabled,
    OSError,
    RevisionResolutionError,
    XetDownloadError,
)
DEFAULT_REVISION = "main"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# At the root, or in the numbered module folders of sentence-transformers. Exports to other
# runtimes live in folders of their own and are left out.
_WANTED = re.compile(
    r"(\d+_\w+/)?([\w.-]+\.safetensors|[\w.-]+\.json|[\w.-]+\.jinja|[\w.-]+\.model"
    r"|merges\.txt|vocab\.txt|LICENSE[\w.-]*|README\.md)"
)


@dataclass(frozen=True)
class HubFile:
    """A file of a commit, with the hash that the hub vouches for."""

    name: str
    size_bytes: int
    sha256: str | None
    """of files kept in large-file storage"""
    git_sha1: str | None
    """of all others: the hash of the git object"""


@dataclass(frozen=True)
class Snapshot:
    """What is to be downloaded of one commit."""

    repo_id: str
    commit: str
    license: str | None
    files: tuple[HubFile, ...]


def is_hub_id(spec: str) -> bool:
    """True for ORG/NAME."""
    return _HUB_ID.fullmatch(spec) is not None


def resolve_hub(
    repo_id: str, cache_dir: Path, *, revision: str | None = None, endpoint: str | None = None
) -> Path:
    """Return the verified directory of one commit of a hub model.

    Args:
        repo_id: ORG/NAME.
        cache_dir: Where bases are kept.
        revision: Commit, tag or branch. What a tag or branch points at is asked once and
            remembered, so that later calls need no network and give the same weights.
        endpoint: Address of the hub; huggingface_hub's own default when None.

    Raises:
        ArtifactError: the hub or the revision cannot be reached, there are no safetensors, or
            a file has another hash than the hub says; such a file is deleted.
    """
    home = cache_dir / "hub" / repo_id.replace("/", "--")
    name = revision or DEFAULT_REVISION
    commit = name if _COMMIT.fullmatch(name) else _remembered_commit(home, name)
    if commit is not None and is_base(home / commit):
        check_base(home / commit)
        return home / commit
    snapshot = _ask_hub(repo_id, commit or name, endpoint)
    target = home / snapshot.commit
    build = partial(
        _build_from_hub,
        snapshot=snapshot,
        downloads=home / "downloads" / snapshot.commit,
        endpoint=endpoint,
    )
    with disk_errors(f"Fetching {repo_id}", home):
        home.mkdir(parents=True, exist_ok=True)
        build_base(target, build, lock_path=home / f"{snapshot.commit}.lock")
        _remember_commit(home, name, snapshot.commit)
    return target


def _ask_hub(repo_id: str, revision: str, endpoint: str | None) -> Snapshot:
    """Ask which files a revision has and what their hashes are."""
    api = HfApi(endpoint=endpoint)
    try:
        info = api.model_info(repo_id, revision=revision, files_metadata=True)
    except HUB_ERRORS as error:
        raise ArtifactError(
            f"Cannot ask the hub about {repo_id!r} at {revision!r}: {_first_line(error)}; check "
            "the name, the revision, the network and, for a gated model, your token; or name a "
            "local directory"
        ) from error
    files = tuple(
        _hub_file(repo_id, sibling)
        for sibling in info.siblings or []
        if _WANTED.fullmatch(sibling.rfilename)
    )
    if info.sha is None or not any(file.name.endswith(".safetensors") for file in files):
        raise ArtifactError(
            f"{repo_id!r} at {revision!r} has no safetensors; pickled weights are never loaded: "
            "take another revision, or convert it elsewhere and name the directory"
        )
    return Snapshot(repo_id, info.sha, _license(info), files)


def _hub_file(repo_id: str, sibling: RepoSibling) -> HubFile:
    sha256 = sibling.lfs.sha256 if sibling.lfs is not None else None
    if sibling.size is None or (sha256 is None and sibling.blob_id is None):
        raise ArtifactError(
            f"The hub gives no size or hash for {sibling.rfilename} of {repo_id!r}, so it cannot "
            "be verified; use a hub that does, or name a local directory"
        )
    return HubFile(sibling.rfilename, sibling.size, sha256, sibling.blob_id)


def _license(info: ModelInfo) -> str | None:
    name = info.card_data.get("license") if info.card_data is not None else None
    return None if name is None else str(name)


def _build_from_hub(
    target: Path, *, snapshot: Snapshot, downloads: Path, endpoint: str | None
) -> None:
    """Download and verify every file, then move them into `target`."""
    for file in snapshot.files:
        _download(snapshot, file, downloads, endpoint)
    for file in snapshot.files:
        place = target / file.name
        place.parent.mkdir(parents=True, exist_ok=True)
        (downloads / file.name).rename(place)
    provenance = json.dumps(_provenance(snapshot), indent=1, ensure_ascii=False)
    (target / PROVENANCE_NAME).write_text(provenance + "\n", encoding="utf-8")
    shutil.rmtree(downloads)


def _download(snapshot: Snapshot, file: HubFile, downloads: Path, endpoint: str | None) -> None:
    """Download one file unless an earlier run did, and check its hash.

    The hub's client goes on in the middle of a file when a connection breaks, but not after
    the process has died: then it starts that file again.
    """
    try:
        path = hf_hub_download(
            snapshot.repo_id,
            file.name,
            revision=snapshot.commit,
            local_dir=downloads,
            endpoint=endpoint,
        )
    except HUB_ERRORS as error:
        raise ArtifactError(
            f"Downloading {file.name} of {snapshot.repo_id!r} failed: {_first_line(error)}; run "
            "again: files that are complete are kept"
        ) from error
    fault = _fault(Path(path), file)
    if fault is not None:
        Path(path).unlink()
        raise ArtifactError(
            f"{file.name} of {snapshot.repo_id!r} at {snapshot.commit} {fault}; it was deleted. "
            "Run again; if it happens again, do not trust this hub"
        )


def _fault(path: Path, file: HubFile) -> str | None:
    """Return what is wrong with a downloaded file."""
    size_bytes = path.stat().st_size
    if size_bytes != file.size_bytes:
        return f"has {size_bytes} bytes, the hub says {file.size_bytes}"
    expected = file.sha256 or file.git_sha1
    found = file_sha256(path) if file.sha256 is not None else git_blob_sha1(path)
    return None if found == expected else f"has the hash {found}, the hub says {expected}"


def git_blob_sha1(path: Path) -> str:
    """Return the id that git gives to a file of this content."""
    digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _provenance(snapshot: Snapshot) -> dict[str, object]:
    return {
        "name": snapshot.repo_id.rpartition("/")[2],
        "upstream": snapshot.repo_id,
        "revision": snapshot.commit,
        "license": snapshot.license,
        "files": {file.name: file.sha256 or file.git_sha1 for file in snapshot.files},
        "bytes": sum(file.size_bytes for file in snapshot.files),
        "conversion": None,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _remembered_commit(home: Path, revision: str) -> str | None:
    path = _revision_path(home, revision)
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None


def _remember_commit(home: Path, revision: str, commit: str) -> None:
    if revision == commit:
        return
    path = _revision_path(home, revision)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(commit + "\n", encoding="utf-8")
    fresh.replace(path)


def _revision_path(home: Path, revision: str) -> Path:
    """Return the file that remembers a revision; a branch name may contain slashes."""
    return home / "revisions" / f"{hashlib.sha256(revision.encode()).hexdigest()}.txt"


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
