"""Bases from a hub, spoken to over loopback: pinned, resumed, verified, free of code."""

import json

import huggingface_hub.constants
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from data.basedir import PROVENANCE_NAME, check_base
from data.bases import resolve
from data.hub import git_blob_sha1
from memory_runtime.errors import ArtifactError
from tests.data.hub_server import COMMIT, Hub, git_sha1
from tests.tiny import chat_tokenizer

REPO = "tiny-org/tiny-qwen"
CHUNK = 1024


@pytest.fixture(scope="module")
def model_files(tmp_path_factory):
    """A sharded Qwen2 with tokenizer, and the files that must never be fetched."""
    directory = tmp_path_factory.mktemp("model")
    tokenizer = chat_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(directory, max_shard_size="60KB")
    tokenizer.save_pretrained(directory)
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    assert sum(name.endswith(".safetensors") for name in files) > 1
    return files | {
        "README.md": b"---\nlicense: apache-2.0\n---\n", "1_Pooling/config.json": b"{}",
        "modeling_evil.py": b"raise SystemExit", "pytorch_model.bin": b"pickle",
        "training_args.pt": b"pickle", "onnx/model.safetensors": b"export",
        "onnx/config.json": b"{}",
    }


@pytest.fixture
def hub(model_files, monkeypatch):
    # A machine that is set to work offline or behind a proxy still has its loopback address.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    # The client keeps whole chunks only; its own are larger than these models.
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", CHUNK)
    hub = Hub(REPO, dict(model_files))
    hub.start()
    yield hub
    hub.stop()


@pytest.fixture
def fetch(hub, tmp_path):
    def call(**changes):
        options = {"revision": COMMIT, "cache_dir": tmp_path / "cache",
                   "link_dir": tmp_path / "links", "endpoint": hub.url}
        return resolve(REPO, **(options | changes))

    return call


def shard(hub: Hub) -> str:
    return max((name for name in hub.files if "-of-" in name), key=lambda n: len(hub.files[n]))


def rest_of(hub: Hub, name: str) -> str:
    """The range that is left after a transfer of one half."""
    return f"bytes={len(hub.files[name]) // 2 // CHUNK * CHUNK}-"


def test_sharded_model_arrives_whole_and_loads(fetch, hub, model_files, tmp_path):
    path = fetch()
    assert path == tmp_path / "links" / "tiny-qwen"
    assert COMMIT in path.resolve().name
    model, loaded = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(loaded.values())
    torch.manual_seed(0)
    for name, weight in Qwen2ForCausalLM(model.config).state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name
    assert AutoTokenizer.from_pretrained(path)("7").input_ids == chat_tokenizer()("7").input_ids
    provenance = json.loads((path / PROVENANCE_NAME).read_text("utf-8"))
    assert (provenance["revision"], provenance["license"]) == (COMMIT, "apache-2.0")
    assert provenance["files"][shard(hub)] == hub.etag(shard(hub))


def test_code_pickles_and_exports_are_never_asked_for(fetch, hub):
    path = fetch()
    here = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
    unwanted = {"modeling_evil.py", "pytorch_model.bin", "training_args.pt",
                "onnx/model.safetensors", "onnx/config.json"}
    assert not unwanted & (here | hub.names_asked())
    assert "1_Pooling/config.json" in here


def test_second_call_asks_nothing(fetch, hub):
    path = fetch()
    hub.requests.clear()
    assert fetch() == path
    assert hub.requests == []


def test_branch_stays_at_the_commit_it_was_first_seen_at(fetch, hub):
    path = fetch(revision=None)
    hub.requests.clear()
    assert fetch(revision="main").resolve() == path.resolve()
    assert fetch(revision=COMMIT).resolve() == path.resolve()
    assert hub.requests == []


def test_cut_transfer_goes_on_in_the_middle_of_the_shard(fetch, hub):
    name = shard(hub)
    hub.cut_once.add(name)
    check_base(fetch(), is_full=True)
    assert hub.ranges_of(name) == [None, rest_of(hub, name)]


def test_finished_files_of_an_interrupted_download_are_not_fetched_again(fetch, hub, tmp_path):
    name = shard(hub)
    hub.cut_once.add(name)
    hub.down.add(name)
    with pytest.raises(ArtifactError, match=f"Downloading {name}.*run again"):
        fetch()
    assert not (tmp_path / "links").exists()
    hub.down.clear()
    done = hub.names_asked() - {"info", name}
    assert done
    hub.requests.clear()
    check_base(fetch(), is_full=True)
    assert hub.ranges_of(name) == [None]
    assert not any(hub.ranges_of(other) for other in done)


@pytest.mark.parametrize("kind", ["shard", "config"])
def test_wrong_content_is_deleted_and_never_counts(fetch, hub, tmp_path, kind):
    name = shard(hub) if kind == "shard" else "config.json"
    content = bytearray(hub.files[name])
    content[len(content) // 2] ^= 1
    hub.served[name] = bytes(content)
    with pytest.raises(ArtifactError, match=f"{name} .*has the hash .*it was deleted"):
        fetch()
    assert not list((tmp_path / "cache").rglob(name))
    assert not (tmp_path / "links").exists()
    hub.served.clear()
    assert (fetch() / name).read_bytes() == hub.files[name]


def test_short_file_is_refused(fetch, hub, tmp_path):
    name = "config.json"
    hub.served[name] = hub.files[name][:-3]
    with pytest.raises(ArtifactError, match="config.json.*bytes"):
        fetch()
    assert not (tmp_path / "links").exists()


def test_repository_with_pickles_only_is_refused(fetch, hub):
    hub.files = {"config.json": b"{}", "pytorch_model.bin": b"pickle"}
    with pytest.raises(ArtifactError, match="no safetensors.*pickled"):
        fetch()


def test_unknown_revision_is_an_error_that_names_it(fetch):
    with pytest.raises(ArtifactError, match="'no-such-branch'"):
        fetch(revision="no-such-branch")


def test_hub_that_is_away_is_an_error_that_says_so(fetch, hub, tmp_path):
    with pytest.raises(ArtifactError, match="Cannot ask the hub"):
        fetch(endpoint="http://127.0.0.1:9")


def test_git_hash_of_a_file_is_the_one_git_gives(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"hello\n")
    assert git_blob_sha1(path) == "ce013625030ba8dba906f756967f9e9ca394464a" == git_sha1(b"hello\n")
