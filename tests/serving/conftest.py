"""Bases and artifacts shared by the serving tests."""

from pathlib import Path

import pytest
import torch

from tests import tiny


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tiny products are slower on two threads than on one, above all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("serving")


@pytest.fixture(scope="session")
def encoder_base(root) -> Path:
    return tiny.encoder_base(root / "tiny-encoder")


@pytest.fixture(scope="session")
def encoder_artifact(root, encoder_base) -> Path:
    return tiny.encoder_artifact(root / "encoder", encoder_base)


@pytest.fixture(scope="session")
def pair_base(root) -> Path:
    return tiny.pair_base(root / "tiny-pair")


@pytest.fixture(scope="session")
def pair_artifact(root, pair_base) -> Path:
    return tiny.pair_artifact(root / "reranker", pair_base)


@pytest.fixture(scope="session")
def base_lm(encoder_base):
    from serving.engine.loading import load_causal_lm

    return load_causal_lm(encoder_base, dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def tuned(encoder_artifact, encoder_base):
    from serving.artifact import open_artifact
    from serving.engine.extractor import Extractor, Limits
    from serving.engine.loading import load_causal_lm

    artifact = open_artifact(encoder_artifact, base=encoder_base)
    lm = load_causal_lm(encoder_base, artifact=artifact, dtype="float32", device="cpu")
    return Extractor(lm, "tuned", artifact, limits=Limits(max_new_tokens=90))
