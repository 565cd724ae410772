"""Reranker and embedder on tiny models."""

import numpy as np
import pytest
import torch
from transformers import BertForSequenceClassification, BertModel

from memory_runtime.errors import ArtifactError
from serving.artifact import apply_map, open_artifact
from serving.engine.embedder import load_embedder
from serving.engine.scorer import load_scorer
from tests import tiny

PAIRS = [("项目预算是多少？", "用户的项目预算上限是3万元。"), ("budget?", "no"), ("", ""),
         ("What can't Anna eat? " * 5, "Anna is allergic to peanuts 🥜. " * 20),
         ("lo que 🙂", "\u2028 \x00 <s> </s>"), ("long " * 400, "longer " * 900)]


@pytest.fixture(scope="module")
def scorer(pair_base, pair_artifact):
    artifact = open_artifact(pair_artifact, base=pair_base)
    return load_scorer(pair_base, artifact, dtype="float32", device="cpu", max_batch_tokens=600)


@pytest.fixture(scope="module")
def embedder(pair_base):
    return load_embedder(pair_base, dtype="float32", device="cpu", max_batch_tokens=256)


def test_merged_reranker_equals_the_unmerged_adapter(scorer, pair_base):
    unmerged = tiny.pair_adapter(pair_base)
    ids = scorer.encode(PAIRS)
    with torch.no_grad():
        expected = [float(unmerged(input_ids=torch.tensor([row])).logits) for row in ids]
    np.testing.assert_allclose(scorer.logits(PAIRS), expected, atol=1e-4)
    assert np.ptp(expected) > 0.01


def test_batched_logits_equal_single_ones_in_order(scorer):
    alone = [scorer.logits([pair])[0] for pair in PAIRS]
    np.testing.assert_allclose(scorer.logits(PAIRS), alone, atol=1e-5)
    np.testing.assert_allclose(scorer.logits(PAIRS[::-1]), alone[::-1], atol=1e-5)


def test_pairs_are_written_in_the_form_of_the_base_and_cut_at_512(scorer):
    rows = scorer.encode(PAIRS)
    tokens = scorer.tokenizer.convert_ids_to_tokens(rows[1])
    assert tokens[0] == "<s>" and tokens[-1] == "</s>" and tokens.count("</s>") == 3
    assert max(map(len, rows)) == 512


def test_score_is_the_calibrated_logit(scorer):
    documents = [document for _, document in PAIRS]
    logits = scorer.logits([("预算", document) for document in documents])
    mapping = scorer.artifact.calibration["relevance"]
    np.testing.assert_allclose(
        scorer.score("预算", documents), apply_map(mapping, logits, logits=True), atol=1e-6)
    assert scorer.score("x", []) == []


def test_reranker_that_is_not_a_number_is_an_error(pair_base, pair_artifact):
    broken = load_scorer(pair_base, open_artifact(pair_artifact), dtype="float32")
    with torch.no_grad():
        broken.model.classifier.weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError):
        broken.score("a", ["b"])


def test_an_encoder_artifact_is_no_reranker(pair_base, encoder_artifact):
    with pytest.raises(ArtifactError, match="a reranker is needed"):
        load_scorer(pair_base, open_artifact(encoder_artifact))


def test_embeddings_are_prefixed_mean_pooled_unit_vectors(embedder, pair_base):
    plain = BertModel.from_pretrained(pair_base, dtype=torch.float32).eval()
    texts = ["用户的预算是3万元", "x", "a much longer text " * 30, ""]
    got = embedder.embed(texts, kind="passage")
    assert got.dtype == np.float32 and got.shape == (4, embedder.num_dims)
    for text, vector in zip(texts, got, strict=True):
        ids = embedder.tokenizer(f"passage: {text}", truncation=True, max_length=512)["input_ids"]
        with torch.no_grad():
            mean = plain(torch.tensor([ids])).last_hidden_state[0].mean(0)
        np.testing.assert_allclose(vector, (mean / mean.norm()).numpy(), atol=1e-5)


def test_query_and_passage_differ_and_other_kinds_are_refused(embedder):
    query, passage = (embedder.embed(["预算"], kind=kind) for kind in ("query", "passage"))
    assert np.abs(query - passage).max() > 1e-3
    assert embedder.embed([], kind="query").shape == (0, embedder.num_dims)
    with pytest.raises(ValueError, match="allowed are"):
        embedder.embed(["x"], kind="document")


def test_loading_keeps_the_base_s_weights(scorer, pair_base):
    base = BertForSequenceClassification.from_pretrained(pair_base, num_labels=1)
    words = "bert.embeddings.word_embeddings.weight"
    assert torch.equal(scorer.model.state_dict()[words], base.state_dict()[words])
