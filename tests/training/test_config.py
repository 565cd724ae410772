from pathlib import Path

import pytest

from memory_runtime.errors import ConfigError
from training.config import EncoderConfig, RerankerConfig, config_hash, load_config

CONFIGS = Path(__file__).parents[2] / "configs"


def write(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return path


def test_every_fault_is_reported_at_once(tmp_path):
    path = write(tmp_path, "base: b\nartifact_dir: a\nseed: x\nlora: {r: 0, rank: 8}\nfoo: 1\n")
    with pytest.raises(ConfigError) as caught:
        load_config(EncoderConfig, path, ["optim.lr=hot", "nonsense"])
    message = str(caught.value)
    for part in ("run_dir: missing", "seed: expected int", "lora.r: 0 is out of range",
                 "lora.rank: unknown", "foo: unknown", "optim.lr: expected float", "nonsense"):
        assert part in message


def test_overrides_reach_nested_keys_and_change_the_hash(tmp_path):
    path = write(tmp_path, "base: b\nrun_dir: r\nartifact_dir: a\n")
    plain = load_config(EncoderConfig, path)
    changed = load_config(EncoderConfig, path, ["lora.r=4", "budget.train_minutes=2"])
    assert (changed.lora.r, changed.budget.train_minutes) == (4, 2.0)
    # YAML 1.1 reads a number without a point as text.
    assert load_config(EncoderConfig, path, ["optim.lr=5e-4"]).optim.lr == 5e-4
    assert config_hash(plain) != config_hash(changed)


@pytest.mark.parametrize("name", ["encoder.yaml", "encoder_cpu.yaml"])
def test_shipped_encoder_configs_parse(name):
    assert load_config(EncoderConfig, CONFIGS / name).base


@pytest.mark.parametrize("name", ["reranker.yaml", "reranker_cpu.yaml"])
def test_shipped_reranker_configs_parse(name):
    assert load_config(RerankerConfig, CONFIGS / name).base


def test_a_gpu_config_and_its_cpu_twin_have_the_same_keys():
    import yaml

    def keys(tree, prefix=""):
        return {f"{prefix}{k}" for k in tree} | {
            key for k, v in tree.items() if isinstance(v, dict) for key in keys(v, f"{k}.")}

    for gpu, cpu in (("encoder", "encoder_cpu"), ("reranker", "reranker_cpu")):
        trees = [yaml.safe_load((CONFIGS / f"{name}.yaml").read_text()) for name in (gpu, cpu)]
        assert keys(trees[0]) == keys(trees[1])
