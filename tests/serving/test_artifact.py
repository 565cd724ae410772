"""Artifacts open only when every byte and every key is as it should be."""

import json
import shutil

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from memory_runtime import weights
from memory_runtime.errors import ArtifactError
from memory_runtime.weights import base_sha256, file_sha256
from serving.artifact import apply_map, calibration_faults, open_artifact
from tests import tiny


@pytest.fixture
def encoder(encoder_artifact, tmp_path):
    return shutil.copytree(encoder_artifact, tmp_path / "encoder")


@pytest.fixture
def reranker(pair_artifact, tmp_path):
    return shutil.copytree(pair_artifact, tmp_path / "reranker")


def edit_json(path, **changes):
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in data.items() if v != "REMOVE"}))


def resign(directory, base, **changes):
    kind = json.loads((directory / "manifest.json").read_text())["kind"]
    tiny.write_manifest(directory, kind=kind, base=base, **changes)


def edit_tensors(directory, change):
    path = directory / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_whole_artifacts_open(encoder, encoder_base, reranker, pair_base):
    opened = open_artifact(encoder, base=encoder_base)
    assert opened.kind == "encoder" and opened.scaling == 2.0 and len(opened.digest) == 12
    assert open_artifact(reranker, base=pair_base).kind == "reranker"
    # The report of the evaluation is written later and is not part of what is hashed.
    (encoder / "eval.json").write_text("{}")
    assert open_artifact(encoder).digest == opened.digest


def test_nothing_there_says_what_to_run(tmp_path):
    with pytest.raises(ArtifactError, match="make train"):
        open_artifact(tmp_path / "none")
    with pytest.raises(ArtifactError, match=r"manifest\.json is missing"):
        open_artifact(tmp_path)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "calibration.json", "README.md",
                                  "tokenizer/tokenizer.json", "adapter_config.json"])
def test_one_changed_byte_in_any_file_is_noticed(encoder, name):
    path = encoder / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(ArtifactError, match="damaged or was edited"):
        open_artifact(encoder)


def test_missing_and_unlisted_files_are_noticed(encoder):
    (encoder / "tokenizer" / "extra.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"no hash for \['tokenizer/extra\.json'\]"):
        open_artifact(encoder)
    (encoder / "tokenizer" / "extra.json").unlink()
    (encoder / "README.md").unlink()
    with pytest.raises(ArtifactError, match="in the manifest but missing"):
        open_artifact(encoder)


@pytest.mark.parametrize(("changes", "message"), [
    ({"schema_version": 2}, "schema_version is 2, this version reads 1"),
    ({"kind": "decoder"}, "kind is 'decoder'"),
    ({"prompt_sha256": "f" * 64}, "prompt it was trained on"),
    ({"quotes_sha256": "f" * 64}, "train again"),
    ({"base": {"name": "x"}}, "name and sha256"),
    ({"base": "REMOVE"}, r"lacks \['base'\]"),
    ({"files": {}}, "no hash for"),
])
def test_manifests_that_do_not_fit_are_refused(encoder, changes, message):
    edit_json(encoder / "manifest.json", **changes)
    with pytest.raises(ArtifactError, match=message):
        open_artifact(encoder)


def test_paths_out_of_the_artifact_are_refused(encoder):
    manifest = json.loads((encoder / "manifest.json").read_text())
    edit_json(encoder / "manifest.json",
              files=manifest["files"] | {"../reranker/x": "0" * 64})
    with pytest.raises(ArtifactError, match="outside of the artifact"):
        open_artifact(encoder)


@pytest.mark.parametrize(("changes", "message"), [
    ({"use_dora": True}, "use_dora"),
    ({"use_rslora": True}, "use_rslora"),
    ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"r": 128}, r"r is 128, allowed are 1\.\.64"),
    ({"bias": "all"}, "bias"),
    ({"peft_type": "IA3"}, "LORA"),
    ({"lora_alpha": None}, "lora_alpha"),
])
def test_adapters_that_cannot_be_served_are_refused(encoder, encoder_base, changes, message):
    edit_json(encoder / "adapter_config.json", **changes)
    resign(encoder, encoder_base)
    with pytest.raises(ArtifactError, match=message):
        open_artifact(encoder)


def test_missing_and_unexpected_keys_are_refused(encoder, encoder_base):
    key = "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"
    edit_tensors(encoder, lambda tensors: tensors.pop(key))
    resign(encoder, encoder_base)
    with pytest.raises(ArtifactError, match=r"missing keys \['model\.layers\.0\.mlp\.up_proj"):
        open_artifact(encoder)
    edit_tensors(encoder, lambda tensors: tensors.pop(key.replace("lora_B", "lora_A")))
    resign(encoder, encoder_base)
    with pytest.raises(ArtifactError, match="target_modules names"):
        open_artifact(encoder, base=encoder_base)


def test_an_adapter_of_some_layers_only_opens_and_must_have_them_all(tmp_path, encoder_base):
    part = tiny.encoder_artifact(tmp_path / "part", encoder_base, layers=[1])
    open_artifact(part, base=encoder_base)
    edit_json(part / "adapter_config.json", layers_to_transform=[0, 1])
    resign(part, encoder_base)
    with pytest.raises(ArtifactError, match=r"model\.layers\.0\."):
        open_artifact(part, base=encoder_base)


def test_a_whole_head_inside_an_encoder_is_refused(encoder, encoder_base):
    def add(tensors):
        first = next(iter(tensors.values()))
        tensors["base_model.model.lm_head.weight"] = first.clone()

    edit_tensors(encoder, add)
    resign(encoder, encoder_base)
    with pytest.raises(ArtifactError, match=r"unexpected keys \['lm_head\.weight'\]"):
        open_artifact(encoder)


def test_reranker_without_its_classifier_is_refused(reranker, pair_base):
    edit_tensors(reranker, lambda t: t.pop("base_model.model.classifier.bias"))
    resign(reranker, pair_base)
    with pytest.raises(ArtifactError, match="weight and bias of pooler and classifier"):
        open_artifact(reranker)


def test_a_head_of_another_shape_is_refused(reranker, pair_base):
    key = "base_model.model.bert.pooler.dense.weight"
    edit_tensors(reranker, lambda t: t.update({key: t[key][:1].clone()}))
    resign(reranker, pair_base)
    with pytest.raises(ArtifactError, match=r"pooler\.dense\.weight is \(1, 32\), must be "):
        open_artifact(reranker, base=pair_base)


def test_another_base_is_refused(encoder, tmp_path):
    other = tiny.encoder_base(tmp_path / "other", seed=9)
    with pytest.raises(ArtifactError, match="give the matching base"):
        open_artifact(encoder, base=other)


def test_adapter_of_another_shape_is_refused(encoder, reranker, pair_base, encoder_base):
    resign(encoder, pair_base)
    with pytest.raises(ArtifactError, match="has None there"):
        open_artifact(encoder, base=pair_base)


def test_base_hash_is_kept_and_renewed_when_the_file_changes(tmp_path, monkeypatch):
    base = tiny.pair_base(tmp_path / "base")
    model = base / "model.safetensors"
    first = base_sha256(base)
    assert first == file_sha256(model)
    hashed = []
    monkeypatch.setattr(weights, "file_sha256", lambda path: hashed.append(path) or "fresh")
    assert base_sha256(base) == first and not hashed
    model.write_bytes(model.read_bytes() + b" ")
    assert base_sha256(base) == "fresh" and hashed == [model]


def test_a_sharded_base_is_all_of_its_shards(tmp_path):
    base = tiny.encoder_base(tmp_path / "base")
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(base, max_shard_size="40KB")
    (base / "model.safetensors").unlink()
    first = base_sha256(base)
    shard = weights.weight_files(base)[1]
    shard.write_bytes(shard.read_bytes() + b" ")
    assert base_sha256(base) != first
    shard.unlink()
    with pytest.raises(ArtifactError, match=shard.name):
        base_sha256(base)


@pytest.mark.parametrize(("kind", "changes", "message"), [
    ("encoder", {"keep_floor": 1.5}, "keep_floor is 1.5"),
    ("encoder", {"keep_floor": None}, "keep_floor is None"),
    ("encoder", {"keep": {"kind": "spline"}}, "allowed kinds"),
    ("encoder", {"keep": {"kind": "platt", "a": 1}}, "numbers a and b"),
    ("encoder", {"keep": {"kind": "isotonic", "x": [0, 1], "y": [1, 0]}}, "rising lists"),
    ("encoder", {"keep": {"kind": "isotonic", "x": [0, 1], "y": [0, 2]}}, r"allowed is 0\.\.1"),
    ("encoder", {"scores": {}}, "a map for each"),
    ("reranker", {"relevance": {"kind": "isotonic", "x": [], "y": []}}, "rising lists"),
])
def test_calibration_faults_are_named(kind, changes, message):
    whole = tiny.ENCODER_CALIBRATION if kind == "encoder" else tiny.RERANKER_CALIBRATION
    assert calibration_faults(kind, whole) == []
    import re

    assert re.search(message, "; ".join(calibration_faults(kind, whole | changes)))


def test_faulty_calibration_stops_the_opening(encoder, encoder_base):
    edit_json(encoder / "calibration.json", keep_floor=-1)
    resign(encoder, encoder_base)
    with pytest.raises(ArtifactError, match="keep_floor is -1"):
        open_artifact(encoder)


def test_maps_do_what_the_format_says():
    x = np.array([0.0, 0.25, 0.5, 1.0])
    np.testing.assert_array_equal(apply_map({"kind": "identity"}, x), x)
    isotonic = {"kind": "isotonic", "x": [0.2, 0.6], "y": [0.1, 0.5]}
    np.testing.assert_allclose(apply_map(isotonic, x), [0.1, 0.15, 0.4, 0.5])
    platt = {"kind": "platt", "a": 2.0, "b": -1.0}
    clipped = np.clip(x, 1e-4, 1 - 1e-4)
    z = np.log(clipped / (1 - clipped))
    np.testing.assert_allclose(apply_map(platt, x), 1 / (1 + np.exp(-(2 * z - 1))))
    logits = np.array([-1e9, -2.0, 0.0, 3.0, 1e9])
    np.testing.assert_allclose(
        apply_map({"kind": "platt", "a": 0.5, "b": 1.0}, logits, logits=True),
        [0, 0.5, 1 / (1 + np.exp(-1.0)), 1 / (1 + np.exp(-2.5)), 1], atol=1e-12)
    assert apply_map({"kind": "identity"}, [0.0], logits=True)[0] == 0.5
