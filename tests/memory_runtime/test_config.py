import re
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from memory_runtime import ConfigError, MemoryConfig, load_config
from memory_runtime.config import from_mapping

SHIPPED = Path(__file__).parents[2] / "configs" / "memory.yaml"


def test_the_shipped_file_shows_every_key_with_its_default():
    text = SHIPPED.read_text()
    # Uncommented, the keys that artifacts ship are there too.
    whole = re.sub(r"^( *)# ?(?=(?:  )?[a-z_]+:)", r"\1", text, flags=re.MULTILINE)
    assert yaml.safe_load(whole) == asdict(MemoryConfig())
    assert load_config(SHIPPED) == MemoryConfig()


def test_the_shipped_file_leaves_an_artifacts_operating_point_alone():
    calibrated = MemoryConfig().with_calibration(
        {"keep_floor": 0.3, "importance": {"reuse": 0.5}, "thresholds": {"long_term": 0.6}},
        {"relevance": {"kind": "identity"}, "blend": {"weight": 0.85}, "nothing_below": 0.1})
    assert calibrated != MemoryConfig()
    assert load_config(SHIPPED, base=calibrated) == calibrated


def test_all_faults_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        from_mapping({"recall": {"top_q": 3, "pool": "many"}, "reclal": {},
                      "admit": {"long_term": 1.5, "merge_cosine": True}})
    for part in ("recall.top_q", "recall.pool", "reclal", "admit.long_term", "merge_cosine"):
        assert part in str(caught.value)


@pytest.mark.parametrize("data", [
    {"recall": {"top_k": 0}}, {"ingest": {"idle_s": -1}}, {"store": {"embedder": 3}},
    {"recall": [1]}, {"ingest": {"background": 1}},
])
def test_a_value_that_does_not_fit_is_refused(data):
    with pytest.raises(ConfigError):
        from_mapping(data)


def test_calibration_goes_over_the_defaults_and_a_file_over_both(tmp_path):
    calibrated = MemoryConfig().with_calibration(
        {"keep_floor": 0.3, "importance": {"reuse": 0.5}, "thresholds": {"long_term": 0.6}},
        {"relevance": {"kind": "identity"}, "blend": {"weight": 0.85}})
    assert calibrated.importance.reuse == 0.5 and calibrated.importance.goal == 0.3
    assert calibrated.admit.long_term == 0.6 and calibrated.recall.blend_weight == 0.85
    path = tmp_path / "memory.yaml"
    path.write_text("admit:\n  long_term: 0.2\n")
    assert load_config(path, base=calibrated).admit.long_term == 0.2
    assert load_config(path, base=calibrated).recall.blend_weight == 0.85


def test_an_unreadable_file_is_a_config_error(tmp_path):
    path = tmp_path / "memory.yaml"
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(path)
    path.write_text("- a\n- b\n")
    with pytest.raises(ConfigError, match="mapping"):
        load_config(path)
