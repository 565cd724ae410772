"""Training of the reranker on a tiny model: steps, loss, resume, calibration, artifact."""

import json
import random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoTokenizer,
    BertForSequenceClassification,
    XLMRobertaForSequenceClassification,
)

from memory_runtime.errors import ArtifactError, ConfigError, SchemaError
from memory_runtime.weights import HEAD_OF_TYPE, base_sha256
from serving import export
from serving.artifact import check_base, open_artifact
from serving.engine.loading import merge_adapter
from serving.engine.scorer import load_scorer
from tests import tiny
from training import reranker
from training.calibrate import apply_map
from training.config import RerankerConfig, load_config
from training.reranker_calibration import (
    CANDIDATES,
    Ranked,
    blended,
    choose_groups,
    documents_of,
    fit_blend,
    fit_reranker,
    fuse,
    mean_reciprocal,
    reciprocal_of_first,
)
from training.reranker_rows import (
    Group,
    chunks,
    collate_step,
    draw,
    encode_pairs,
    plan_steps,
    read_groups,
)
from training.tokenizer_file import compact_tokenizer

CONFIG = """
base: {base}
run_dir: {dir}/run
artifact_dir: {dir}/artifact
dtype: float32
data: {{train: {dir}/train.jsonl, calibration: {dir}/calibration.jsonl, negatives: 3,
        max_pair_tokens: 64, calibration_groups: 12, embedder: {base}}}
lora: {{r: 4, lora_alpha: 8, first_layer: 1}}
optim: {{lr: 0.01, epochs: 2, queries_per_step: 3}}
budget: {{save_steps: 2}}
"""


@pytest.fixture(autouse=True)
def one_thread():
    """Threads of a tiny model only wait for each other, for seconds on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def group_row(n):
    """Texts about the same number belong together, so that there is something to learn."""
    positives = [] if n % 5 == 4 else [f"The budget of Anna is {n} dollars.", f"小王预算{n}元。"]
    return {"id": f"g{n}", "lang": "zh" if n % 2 else "en", "source": "tiny",
            "query": f"预算{n}元吗？" if n % 2 else f"Who has a budget of {n} dollars?",
            "positives": positives, "negatives": [f"{text} {m}" for m, text in
                                                  enumerate(tiny.TEXTS) if m != n]}


@pytest.fixture
def config(tmp_path):
    tiny.pair_base(tmp_path / "base")
    for name, numbers in (("train", range(15)), ("calibration", range(15, 27))):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps(group_row(n), ensure_ascii=False) + "\n" for n in numbers))
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.format(base=tmp_path / "base", dir=tmp_path))
    return path


def losses(directory):
    lines = (directory / "run" / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row["loss"] for row in map(json.loads, lines) if "loss" in row}


# --- steps ---


def groups():
    return [Group(f"g{n}", "en", "tiny", f"query {n}", tuple(f"p{m}" for m in range(n % 4)),
                  tuple(f"n{m}" for m in range(15))) for n in range(10)]


def test_every_epoch_asks_every_query_once_in_another_order():
    steps = plan_steps(groups(), num_negatives=4, queries_per_step=3, epochs=2, seed=1)
    asked = [drawn.query for step in steps for drawn in step]
    assert sorted(asked[:10]) == sorted(asked[10:]) == sorted(g.query for g in groups())
    assert asked[:10] != asked[10:]
    assert steps == plan_steps(groups(), num_negatives=4, queries_per_step=3, epochs=2, seed=1)


def test_drawn_documents_are_one_or_two_answers_and_half_near_negatives():
    for group in groups():
        drawn = draw(group, 6, random.Random(group.id))
        assert len(drawn.positives) in ((0,) if not group.positives else (1, 2))
        assert len(set(drawn.negatives)) == 6
        assert sum(t in group.negatives[:8] for t in drawn.negatives) == 3
    few = Group("g", "en", "tiny", "q", ("p",), ("n0", "n1"))
    assert set(draw(few, 6, random.Random(0)).negatives) == {"n0", "n1"}


def test_batched_logits_equal_those_of_single_pairs():
    tokenizer = tiny.pair_tokenizer()
    step = plan_steps(groups(), num_negatives=7, queries_per_step=8, epochs=1, seed=2)[0]
    torch.manual_seed(0)
    model = BertForSequenceClassification(tiny.pair_config()).eval()
    together = reranker.pair_logits(model, collate_step(step, tokenizer, 64))
    pairs = [(d.query, t) for d in step for t in (*d.positives, *d.negatives)]
    alone = [model(input_ids=torch.tensor([ids])).logits[0, 0]
             for ids in encode_pairs(tokenizer, pairs, 64)]
    assert torch.allclose(together, torch.stack(alone), atol=1e-5)


def test_chunks_hold_every_row_once_and_mask_the_padding():
    rows = [[0] * n for n in (3, 40, 5, 7, 2, *range(2, 30))]
    seen = []
    for chosen, batch in chunks(rows, 1):
        seen += chosen
        assert batch["attention_mask"].sum(1).tolist() == [len(rows[n]) for n in chosen]
        assert (batch["input_ids"][batch["attention_mask"] == 0] == 1).all()
    assert sorted(seen) == list(range(len(rows)))


def test_long_pairs_keep_both_sides():
    ids = encode_pairs(tiny.pair_tokenizer(), [("short query", "word " * 300)], 40)[0]
    whole = encode_pairs(tiny.pair_tokenizer(), [("short query", "x")], 40)[0]
    assert len(ids) == 40 and ids[-1] == 2 and ids[: whole.index(2) + 2] == whole[
        : whole.index(2) + 2]


def test_a_bad_line_is_named(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(group_row(1)) + '\n{"id": "x"}\n')
    with pytest.raises(SchemaError, match=r"pairs\.jsonl:2"):
        read_groups(path)


# --- loss ---


def loss_of(logits, listwise_weight=0.0, positive_weight=1.0):
    return reranker.reranker_loss(
        torch.tensor(logits), torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([0, 0, 0, 1]),
        positive_weight=positive_weight, listwise_weight=listwise_weight).item()


def test_pointwise_loss_is_weighted_cross_entropy():
    assert loss_of([0.0, 0.0, 0.0, 0.0]) == pytest.approx(np.log(2))
    expected = (3 * np.log1p(np.exp(-1)) + 3 * np.log1p(np.exp(-2))) / 6
    assert loss_of([1.0, -2.0, -2.0, -2.0], positive_weight=3.0) == pytest.approx(expected)


def test_listwise_part_compares_an_answer_with_its_own_query_only():
    plain, both = loss_of([1.0, 0.0, 0.5, 9.0]), loss_of([1.0, 0.0, 0.5, 9.0], listwise_weight=2.0)
    expected = np.log(np.exp([1.0, 0.0, 0.5]).sum()) - 1.0
    assert both - plain == pytest.approx(2 * expected, rel=1e-5)


def test_a_step_without_answers_has_a_finite_loss():
    loss = reranker.reranker_loss(torch.zeros(3), torch.zeros(3), torch.tensor([0, 0, 1]),
                                  positive_weight=4.0, listwise_weight=1.0)
    assert loss.item() == pytest.approx(np.log(2))


# --- model ---


def test_only_the_upper_layers_and_the_head_are_trained(config):
    settings = load_config(RerankerConfig, config)
    model = reranker.load_model(settings, config.parent / "base")
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all(
        ".layer.1." in name or "pooler.modules_to_save" in name or "classifier.modules" in name
        for name in trained)
    for part in ("query", "key", "value", "attention.output.dense", "intermediate.dense"):
        assert any(f"{part}.lora_A" in name for name in trained)
    assert not any("pooler" in name and "lora" in name for name in trained)
    with pytest.raises(ConfigError, match="first_layer"):
        reranker.load_model(load_config(RerankerConfig, config, ["lora.first_layer=2"]),
                            config.parent / "base")


# --- the run ---


def test_an_interrupted_run_resumes_to_the_same_end(config, tmp_path, monkeypatch):
    whole, cut = tmp_path / "whole", tmp_path / "cut"

    def settings(directory):
        return load_config(RerankerConfig, config, [
            f"run_dir={directory}/run", f"artifact_dir={directory}/artifact"])

    reranker.train(settings(whole))
    original, taken = reranker.RerankerTrainer.training_step, []

    def stop_at_four(self, *args, **kwargs):
        taken.append(None)
        if len(taken) == 4:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(reranker.RerankerTrainer, "training_step", stop_at_four)
        with pytest.raises(KeyboardInterrupt):
            reranker.train(settings(cut))
    assert not (cut / "artifact").exists()
    reranker.train(settings(cut))
    assert losses(cut) == losses(whole)
    adapters = [load_file(d / "artifact" / "adapter_model.safetensors") for d in (whole, cut)]
    assert all(torch.equal(adapters[0][k], adapters[1][k]) for k in adapters[0])
    calibrations = [(d / "artifact" / "calibration.json").read_text() for d in (whole, cut)]
    assert calibrations[0] == calibrations[1]


def test_a_finished_run_is_not_repeated_and_other_settings_do_not_resume(config):
    settings = load_config(RerankerConfig, config)
    target = reranker.train(settings)
    written = (target / "manifest.json").stat().st_mtime_ns
    assert reranker.train(settings) == target
    assert (target / "manifest.json").stat().st_mtime_ns == written
    with pytest.raises(ConfigError, match="config_sha256"):
        reranker.train(load_config(RerankerConfig, config, ["optim.lr=0.02"]))


def test_a_time_budget_becomes_a_frozen_step_count(config):
    settings = load_config(RerankerConfig, config, ["budget.train_minutes=0.00001"])
    reranker.train(settings)
    resolved = json.loads((config.parent / "run" / "resolved.json").read_text())["frozen"]
    assert resolved["max_steps"] == 1 and resolved["full_steps"] == 10


def test_missing_and_empty_data_are_refused(config):
    settings = load_config(RerankerConfig, config, ["data.train=nowhere.jsonl"])
    with pytest.raises(ConfigError, match="nowhere"):
        reranker.train(settings)
    (config.parent / "train.jsonl").write_text("")
    with pytest.raises(ConfigError, match="no question group"):
        reranker.train(load_config(RerankerConfig, config))


def test_serving_opens_the_artifact_and_scores_as_training_did(config):
    settings = load_config(RerankerConfig, config)
    (config.parent / "manifest.json").write_text(json.dumps({"records": ["tiny/1", "tiny/2"]}))
    base = config.parent / "base"
    artifact = open_artifact(reranker.train(settings), base=base)
    assert artifact.kind == "reranker"
    assert artifact.manifest["records"] == ["tiny/1", "tiny/2"]
    assert artifact.manifest["steps"] == max(losses(config.parent)) == 10
    assert losses(config.parent)[10] < losses(config.parent)[1]
    assert "CC BY-SA 4.0" in (artifact.path / "README.md").read_text()
    model = BertForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
    merge_adapter(model.eval(), artifact)
    tokenizer = AutoTokenizer.from_pretrained(artifact.tokenizer_path)
    group = read_groups(settings.data.calibration)[0]
    served = reranker.score_documents(model, tokenizer, [group.query], [list(group.positives)],
                                      settings.data.max_pair_tokens)[0]
    trained = reranker.load_model(settings, base)
    state = load_file(artifact.weights_path)
    names = dict(trained.named_parameters())
    with torch.no_grad():
        for key, value in state.items():
            name = key.replace(".lora_A.", ".lora_A.default.").replace(
                ".lora_B.", ".lora_B.default.")
            for head in HEAD_OF_TYPE["bert"]:
                name = name.replace(f"{head}.", f"{head}.modules_to_save.default.")
            names[name].copy_(value)
    ours = reranker.score_documents(trained, tokenizer, [group.query], [list(group.positives)],
                                    settings.data.max_pair_tokens)[0]
    assert np.allclose(served, ours, atol=1e-4)
    relevance = apply_map(artifact.calibration["relevance"], ours, logits=True)
    assert ((relevance >= 0) & (relevance <= 1)).all()


def test_a_compact_tokenizer_cuts_texts_the_same_way(tmp_path):
    tokenizer = tiny.pair_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    before = (tmp_path / "tokenizer.json").stat().st_size
    compact_tokenizer(tmp_path / "tokenizer.json")
    assert (tmp_path / "tokenizer.json").stat().st_size < before / 1.5
    again = AutoTokenizer.from_pretrained(tmp_path)
    for text in tiny.TEXTS:
        assert again(text, text[::-1])["input_ids"] == tokenizer(text, text[::-1])["input_ids"]


# --- calibration ---


def ranked(n, *, logits, fused, language="en", positive=0):
    size = len(logits)
    relevant = np.zeros(size)
    relevant[positive] = 1.0
    group = Group(f"g{n}", language, "tiny", "q", ("p",), ("n",))
    return Ranked(group, relevant, np.array(fused), np.array(fused), np.array(fused),
                  np.array(logits))


def test_rank_of_the_first_answer_counts_ties_against_it():
    relevant = np.array([0.0, 1.0, 0.0, 1.0])
    assert reciprocal_of_first(np.array([3.0, 2.0, 1.0, 0.0]), relevant) == 0.5
    assert reciprocal_of_first(np.array([1.0, 1.0, 1.0, 0.0]), relevant) == pytest.approx(1 / 3)


def test_mean_reciprocal_rank_counts_languages_alike():
    items = [ranked(0, logits=[1, 0], fused=[1, 0])] * 3 + [
        ranked(1, logits=[0, 1], fused=[1, 0], language="zh")]
    assert mean_reciprocal(items, [i.logits for i in items]) == {"en": 1.0, "zh": 0.5, "all": 0.75}


def test_fused_ranks_lie_in_the_unit_interval_and_ignore_texts_without_a_shared_word():
    fused = fuse(np.array([5.0, 0.0, 0.0]), np.array([0.1, 0.9, 0.5]))
    assert fused.min() == 0.0 and fused.max() == 1.0
    assert fused.argmax() == 0 and fused[1] > fused[2]


@pytest.mark.parametrize("good, weight", [("logits", 1.0), ("fused", 0.0)])
def test_blend_follows_the_arm_that_ranks_better(good, weight):
    rng = np.random.default_rng(0)
    items = []
    for n in range(40):
        right = [5.0, *rng.normal(-5, 0.1, 5)]
        noise = list(rng.permutation(6) / 5)
        arms = {"logits": (right, noise), "fused": (list(rng.normal(0, 3, 6)),
                                                    [1.0, 0.1, 0.2, 0.3, 0.0, 0.25])}[good]
        items.append(ranked(n, logits=arms[0], fused=arms[1]))
    best = fit_blend(items, {"kind": "platt", "a": 1.0, "b": 0.0})
    scores = [blended(i, {"kind": "platt", "a": 1.0, "b": 0.0}, best) for i in items]
    assert mean_reciprocal(items, scores)["all"] == 1.0
    assert abs(best - weight) <= 0.5


def test_calibration_brings_overconfident_logits_to_the_truth():
    rng = np.random.default_rng(1)
    items = []
    for n in range(80):
        truth = rng.normal(-2, 1.5, 12)
        relevant = (rng.random(12) < 1 / (1 + np.exp(-truth))).astype(float)
        group = Group(f"g{n}", "en", "tiny", "q", (), ())
        zeros = np.linspace(0, 1, 12)
        items.append(Ranked(group, relevant, zeros, zeros, zeros, 4 * truth + 3))
    calibration, figures = fit_reranker(items)
    assert calibration["relevance"]["kind"] == "platt"
    assert calibration["relevance"]["a"] == pytest.approx(0.25, abs=0.05)
    assert figures["ece_before"] > 0.1 > 0.04 > figures["ece_after"]


def test_calibration_groups_balance_the_languages_and_hold_twenty_documents():
    many = [Group(f"g{n}", "zh" if n < 10 else "en", "tiny", "q", ("p", "q"),
                  tuple(f"n{m}" for m in range(30))) for n in range(60)]
    chosen = choose_groups(many, 16, seed=1)
    assert sum(g.language == "zh" for g in chosen) == 8 and len(chosen) == 16
    texts, relevant = documents_of(many[0], seed=1)
    assert len(texts) == CANDIDATES == len(relevant) and relevant.sum() == 2
    assert {texts[n] for n in np.flatnonzero(relevant)} == {"p", "q"}
    assert "n19" not in texts


def test_a_classifier_base_keeps_its_head_and_its_artifact_is_served(config, tmp_path):
    base = tiny.roberta_base(tmp_path / "roberta")
    settings = load_config(RerankerConfig, config, [f"base={base}", "optim.lr=0.0"])
    artifact = open_artifact(reranker.train(settings), base=base)
    assert "pooler" not in artifact.adapter["modules_to_save"]
    scorer = load_scorer(base, artifact, dtype="float32", device="cpu")
    pairs = [("budget?", "The budget of Anna is 3 dollars."), ("预算", "小王预算7元。"),
             ("long " * 600, "x")]
    ids = scorer.encode(pairs)
    assert max(map(len, ids)) == 512
    # Nothing was learnt at rate 0: what is served is the head that the base came with.
    plain = XLMRobertaForSequenceClassification.from_pretrained(base, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = [float(plain(input_ids=torch.tensor([row])).logits) for row in ids]
    np.testing.assert_allclose(scorer.logits(pairs), wanted, atol=1e-2)
    assert np.ptp(wanted) > 0.05


def trained_two_steps(config, base, monkeypatch):
    """The artifact, and the very model that was trained."""
    kept, load = [], reranker.load_model
    monkeypatch.setattr(reranker, "load_model", lambda *a: kept.append(load(*a)) or kept[-1])
    settings = load_config(RerankerConfig, config, [
        f"base={base}", "optim.epochs=1", "optim.queries_per_step=8", "lora.first_layer=0"])
    artifact = open_artifact(reranker.train(settings), base=base)
    assert artifact.manifest["steps"] == 2
    return artifact, kept[0]


@pytest.mark.parametrize("make_base", [tiny.pair_base, tiny.roberta_base])
def test_served_logits_equal_those_of_the_trained_model(config, tmp_path, monkeypatch, make_base):
    base = make_base(tmp_path / "other")
    artifact, trained = trained_two_steps(config, base, monkeypatch)
    scorer = load_scorer(base, artifact, dtype="float32", device="cpu")
    documents = [*tiny.TEXTS, "", "long " * 700]
    ours = reranker.score_documents(
        trained, scorer.tokenizer, ["预算？"], [documents], 512)[0]
    served = scorer.logits([("预算？", text) for text in documents])
    np.testing.assert_allclose(served, ours, atol=1e-5)
    assert np.ptp(ours) > 0.01


def test_two_steps_move_the_head_away_from_that_of_the_base(config, tmp_path, monkeypatch):
    base = tiny.roberta_base(tmp_path / "roberta")
    artifact, _ = trained_two_steps(config, base, monkeypatch)
    before, after = load_file(base / "model.safetensors"), load_file(artifact.weights_path)
    for name in ("classifier.dense.weight", "classifier.out_proj.weight"):
        moved = (after[f"base_model.model.{name}"].float() - before[name]).abs()
        # Two steps at rate 0.01 and the rounding to bfloat16: a fresh head would be elsewhere.
        assert 0 < moved.max() < 0.03


def test_an_exported_classifier_is_that_which_is_served(config, tmp_path, monkeypatch):
    from sentence_transformers import CrossEncoder

    base = tiny.roberta_base(tmp_path / "roberta", max_position_embeddings=130)
    artifact, _ = trained_two_steps(config, base, monkeypatch)
    scorer = load_scorer(base, artifact, dtype="float32", device="cpu")
    pairs = [("预算？", "用户的预算是3万元。"), ("long " * 300, "Anna")]
    # 130 positions, of which RoBERTa leaves the first two unused.
    assert max(map(len, scorer.encode(pairs))) == 128
    loaded = CrossEncoder(str(export.export_reranker(artifact, base, tmp_path / "out")),
                          device="cpu")
    np.testing.assert_allclose(loaded.predict(pairs), scorer.logits(pairs), atol=1e-5)


@pytest.mark.parametrize(("changes", "overrides", "message"), [
    ({"max_position_embeddings": 34}, [], "max_pair_tokens: got 64, the base takes at most 32"),
    ({"num_labels": 3}, [], "does not fit a head of one label: .*out_proj"),
    ({}, ["lora.first_layer=2"], "first_layer: got 2"),
])
def test_bases_that_cannot_carry_the_reranker_are_refused_before_training(
        config, tmp_path, changes, overrides, message):
    base = tiny.roberta_base(tmp_path / "roberta", **changes)
    with pytest.raises(ConfigError, match=message):
        reranker.load_model(load_config(RerankerConfig, config, overrides), base)


def test_a_causal_base_is_no_reranker(config, tmp_path):
    base = tiny.encoder_base(tmp_path / "causal")
    with pytest.raises(ConfigError, match=r"type 'qwen2'; rerankers are trained on \['bert'"):
        reranker.load_model(load_config(RerankerConfig, config), base)


def test_a_head_of_another_architecture_is_refused(config, tmp_path):
    artifact = open_artifact(reranker.train(load_config(RerankerConfig, config)))
    other = tiny.roberta_base(tmp_path / "roberta")
    artifact.manifest["base"]["sha256"] = base_sha256(other)
    with pytest.raises(ArtifactError, match=r"its head .*pooler.* is none of a xlm-roberta model"):
        check_base(artifact, other)


def test_a_roberta_head_is_refused_under_a_bert_base(config, tmp_path, monkeypatch):
    base = tiny.roberta_base(tmp_path / "roberta")
    artifact, _ = trained_two_steps(config, base, monkeypatch)
    other = config.parent / "base"
    artifact.manifest["base"]["sha256"] = base_sha256(other)
    with pytest.raises(ArtifactError, match=r"its head \['classifier'\] is none of a bert model"):
        check_base(artifact, other)
    with pytest.raises(ArtifactError, match="the base has no"):
        load_scorer(other, artifact, dtype="float32", device="cpu")
