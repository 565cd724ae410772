"""One base directory on disk: built beside its place, moved there in one step, verified later.

Knows nothing of where the weights come from. A directory counts as a base only when its
manifest is there, and the manifest is written last.
"""

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from memory_runtime.errors import ArtifactError

MANIFEST_NAME = "base_manifest.json"
PROVENANCE_NAME = "provenance.json"
MANIFEST_FORMAT = 1
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class FileRecord:
    """What the manifest keeps of one file."""

    sha256: str
    size_bytes: int
    mtime_ns: int


Build = Callable[[Path], None]
"""Fills an empty directory with the files of a base."""


def file_sha256(path: Path) -> str:
    """Return the hex sha256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def is_base(directory: Path) -> bool:
    """True when the directory was finished by `build_base`; says nothing of damage since."""
    return (directory / MANIFEST_NAME).is_file()


@contextmanager
def locked(lock_path: Path) -> Iterator[None]:
    """Hold a file lock; the system frees it when the process dies, however it dies."""
    lock_path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(lock_path):
        yield


@contextmanager
def disk_errors(what: str, where: Path) -> Iterator[None]:
    """Turn an OSError of reading or writing files into an ArtifactError that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            hint = "free some space there, or set XDG_CACHE_HOME to a larger disk"
        else:
            hint = "check that the directory exists and may be written"
        raise ArtifactError(
            f"{what} failed: {error.strerror or error} under {where}; {hint}, then run "
            "`python -m data.bases` again"
        ) from error


def build_base(target: Path, build: Build, *, lock_path: Path) -> Path:
    """Build a base in a directory beside `target` and move it there in one step.

    Args:
        target: Final directory; returned at once if a base is already there.
        build: Fills the temporary directory; its errors leave nothing behind.
        lock_path: Lock shared by all processes that may build this target.

    Returns:
        `target`.

    Raises:
        ArtifactError: the disk is full or not writable, or `build` said so.
    """
    with disk_errors("Building a base", target.parent), locked(lock_path):
        if is_base(target):
            return target
        _remove_stale(target)
        work = Path(tempfile.mkdtemp(prefix=_work_prefix(target), dir=target.parent))
        try:
            build(work)
            write_manifest(work)
            _sync_tree(work)
            work.rename(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        _sync_directory(target.parent)
    return target


def write_manifest(directory: Path) -> None:
    """Hash every file of the directory and record it, the manifest itself excepted."""
    files = {}
    for path in _files_of(directory):
        # mkdtemp and some writers make files private; a base is shared by the users of a cache.
        path.chmod(0o644)
        status = path.stat()
        files[path.relative_to(directory).as_posix()] = {
            "sha256": file_sha256(path),
            "size_bytes": status.st_size,
            "mtime_ns": status.st_mtime_ns,
        }
    directory.chmod(0o755)
    document = {"format": MANIFEST_FORMAT, "files": files}
    (directory / MANIFEST_NAME).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def read_manifest(directory: Path) -> dict[str, FileRecord]:
    """Return the records of a base, by relative path.

    Raises:
        ArtifactError: no manifest, unreadable, or of another format.
    """
    path = directory / MANIFEST_NAME
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["format"] != MANIFEST_FORMAT:
            raise ValueError(f"format {document['format']}, allowed is {MANIFEST_FORMAT}")
        return {name: FileRecord(**record) for name, record in document["files"].items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"Cannot read the manifest {path}: {error}; {_how_to_rebuild(directory)}"
        ) from error


def check_base(directory: Path, *, is_full: bool = False) -> None:
    """Check every file of a base against its manifest.

    Size and time of change are compared; a file whose time differs, or every file when
    `is_full`, is hashed. Weights that a user changed are never replaced silently.

    Raises:
        ArtifactError: a file is missing or has other content; the message lists them all.
    """
    faults = []
    for name, record in read_manifest(directory).items():
        path = directory / name
        if not path.is_file():
            faults.append(f"{name} is missing")
            continue
        status = path.stat()
        if status.st_size != record.size_bytes:
            faults.append(f"{name} has {status.st_size} bytes, expected {record.size_bytes}")
        elif is_full or not _is_same_second(status.st_mtime_ns, record.mtime_ns):
            found = file_sha256(path)
            if found != record.sha256:
                faults.append(f"{name} has sha256 {found}, expected {record.sha256}")
    if faults:
        raise ArtifactError(
            f"The base in {directory} is damaged: {'; '.join(faults)}; {_how_to_rebuild(directory)}"
        )


def link_base(directory: Path, link: Path) -> Path:
    """Point the symbolic link at a base, replacing an older link in one step.

    Raises:
        ArtifactError: something that is not a link stands in the way.
    """
    if link.is_symlink() and link.resolve() == directory.resolve():
        return link
    if link.exists() and not link.is_symlink():
        raise ArtifactError(
            f"Cannot link {link} to the base in {directory}: a file or directory that is no link "
            "is there; move it away, or name it by its path instead"
        )
    with disk_errors("Linking a base", link.parent):
        link.parent.mkdir(parents=True, exist_ok=True)
        fresh = link.with_name(f".{link.name}.{os.getpid()}")
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(directory.resolve(), target_is_directory=True)
        fresh.replace(link)
    return link


def _is_same_second(one_ns: int, other_ns: int) -> bool:
    """Compare times as coarsely as archives keep them, so that a restored cache stays cheap."""
    return one_ns // 10**9 == other_ns // 10**9


def _how_to_rebuild(directory: Path) -> str:
    return f"delete {directory} and run `python -m data.bases` again"


def _work_prefix(target: Path) -> str:
    return f".{target.name}.work-"


def _remove_stale(target: Path) -> None:
    """Delete what a killed builder left; the caller holds the lock, so nobody is in there."""
    for entry in target.parent.glob(f"{_work_prefix(target)}*"):
        shutil.rmtree(entry)
    if target.exists():
        shutil.rmtree(target)


def _files_of(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def _sync_tree(directory: Path) -> None:
    for path in _files_of(directory):
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
    _sync_directory(directory)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
