"""What lies in artifacts/released/ must be what this version can use."""

from pathlib import Path

import pytest

from serving.artifact import open_artifact
from training.config import EncoderConfig, load_config
from training.run import read_json

ROOT = Path(__file__).parents[1]
RELEASED = sorted(path for path in (ROOT / "artifacts" / "released").iterdir() if path.is_dir())
MAX_BYTES = 25_000_000


@pytest.mark.parametrize("path", RELEASED, ids=lambda path: path.name)
def test_a_release_is_whole_and_fits_this_prompt(path):
    artifact = open_artifact(path)
    assert artifact.manifest["steps"] > 0
    assert "authored" in artifact.manifest["rows"]["by_source"]


def test_a_release_stays_small():
    sizes = [file.stat().st_size for path in RELEASED for file in path.rglob("*") if file.is_file()]
    assert 0 < sum(sizes) <= MAX_BYTES


def test_the_cpu_profile_goes_on_from_a_release_of_its_own_shape():
    config = load_config(EncoderConfig, ROOT / "configs" / "encoder_cpu.yaml")
    adapter = read_json(ROOT / config.init / "adapter_config.json")
    assert (adapter["r"], adapter["lora_alpha"]) == (config.lora.r, config.lora.lora_alpha)
    assert ROOT / config.init in RELEASED
