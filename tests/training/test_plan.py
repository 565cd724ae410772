from pathlib import Path

import pytest

from memory_runtime.errors import ConfigError
from training.config import EncoderConfig, load_config
from training.plan import base_config, make_plan

CONFIGS = Path(__file__).parents[2] / "configs"


def plan(name="encoder.yaml", *overrides, rows=1000):
    config = load_config(EncoderConfig, CONFIGS / name, list(overrides))
    return make_plan(config, rows=rows, row_tokens=700, target_share=0.15)


def test_the_7b_plan_has_the_published_sizes():
    made = plan()
    assert made.parameters == 7_615_616_512
    assert made.trainable == 80_740_352


def test_memory_and_time_follow_the_settings():
    assert plan("encoder.yaml", "lora.r=16").trainable * 2 == plan().trainable
    assert plan("encoder.yaml", "lora.first_layer=14").petaflop < plan().petaflop
    assert plan(rows=2000).hours("H100") == pytest.approx(2 * plan().hours("H100"))
    assert plan("encoder.yaml", "optim.activation_checkpointing=false").activation_gb > \
        3 * plan().activation_gb
    assert plan().hours("A100") > plan().hours("H100")


def test_an_unknown_base_is_refused():
    with pytest.raises(ConfigError, match="no/such"):
        base_config("no/such-model")
