"""The recall command: figures of hand-made rankings, the arms, the refusal of learnt sets."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.arms import (
    Bm25Arm,
    CachedEmbedder,
    DenseArm,
    RerankedArm,
    RrfArm,
    fuse,
    untuned_scorer,
)
from benchmarks.pools import Document, Question
from benchmarks.product_arm import PASSED_OVER, ProductArm
from benchmarks.recall import (
    Finding,
    arm_names,
    by_group,
    figures,
    item,
    main,
    ranks_of,
    refuse_trained,
    run_arm,
)
from benchmarks.stand_ins import BigramEmbedder
from memory_runtime import MemoryConfig
from memory_runtime.errors import ConfigError
from tests.benchmarks.test_pools import record, write_set
from tests.tiny import pair_artifact, pair_base, write_manifest

POOL = tuple(Document(f"d{n}", text, "2026-01-01T10:00:00+00:00") for n, text in enumerate([
    "my locker code is 4471", "we went hiking on Sunday", "我的工位在三楼东侧",
    "the cat is called Max",
    "the lease costs 900 euros", "周末去爬山了", "my sister lives in Oslo"]))


def question(text, *evidence, category="c", pool=POOL):
    return Question(f"q-{text}", "r1", text, category, "en", evidence, pool,
                    "2026-02-01T10:00:00+00:00")


def finding(*ranks, category="c", arm="bm25"):
    return Finding(question("x", *(f"e{n}" for n in range(len(ranks))), category=category),
                   arm, ranks, tokens=10, ms=2.0)


def test_figures_of_both_poles():
    assert figures([finding(1), finding(1)])["mrr"] == 1.0
    assert figures([finding(1)])["recall@1"] == 1.0
    nothing = figures([finding(None, None)])
    assert [nothing[name] for name in ("recall@1", "recall@5", "recall@20", "mrr")] == [0, 0, 0, 0]


def test_recall_is_the_share_of_the_evidence_and_mrr_its_first_piece():
    made = figures([finding(2, 6, None), finding(21)])
    assert made["recall@1"] == 0.0
    assert made["recall@5"] == pytest.approx((1 / 3 + 0) / 2)
    assert made["recall@20"] == pytest.approx((2 / 3 + 0) / 2)
    assert made["mrr"] == pytest.approx((1 / 2 + 1 / 21) / 2)
    assert made["tokens"] == 10
    assert made["ms_p50"] == made["ms_p95"] == 2.0


def test_ranks_count_from_one_and_are_none_when_not_returned():
    assert ranks_of(["b", "z", "a"], ["a", "b", "c"]) == (2, None, 1)


def test_groups_are_set_and_arm_and_category():
    groups = by_group("locomo", [finding(1, category="a"), finding(None, category="b")])
    assert list(groups) == ["locomo/bm25", "locomo/bm25/a", "locomo/bm25/b"]
    assert groups["locomo/bm25"]["recall@1"] == 0.5
    assert groups["locomo/bm25/b"]["recall@1"] == 0.0


def test_items_name_ids_and_ranks_and_no_text():
    row = item("locomo", finding(3, None))
    assert (row["expected"], row["ranks"], row["verdict"]) == (["e0", "e1"], [3, None], "hit")
    assert set(row) == {"id", "arm", "category", "expected", "ranks", "verdict"}


def test_fusion_rewards_agreement():
    assert fuse([["a", "b", "c"], ["b", "d"]])[0] == "b"
    assert fuse([[], []]) == []


@pytest.mark.parametrize("make", [
    Bm25Arm, lambda: DenseArm(CachedEmbedder(BigramEmbedder())),
    lambda: RrfArm(CachedEmbedder(BigramEmbedder())),
    lambda: ProductArm(CachedEmbedder(BigramEmbedder()), None)])
def test_every_arm_finds_the_plain_answer_in_both_languages(make):
    questions = [question("what is the locker code", "d0"), question("工位", "d2")]
    found = run_arm("arm", make(), questions, label="test", extra_ms=3.0)
    assert [f.ranks for f in found] == [(1,), (1,)]
    assert all(f.ms > 3.0 and f.tokens > 0 for f in found)


def test_product_arm_counts_only_what_the_application_is_given():
    config = MemoryConfig()
    arm = ProductArm(CachedEmbedder(BigramEmbedder()), None, config)
    pool = tuple(Document(f"d{n}", "locker " + "code number " * 40 + str(n)) for n in range(9))
    arm.prepare(pool)
    ranking = arm.rank(question("locker code", "d0", pool=pool))
    arm.close()
    # Texts this long do not fit the token budget five times.
    assert PASSED_OVER in ranking[: config.recall.top_k]
    assert len([name for name in ranking if name]) == len(pool)
    assert len(set(ranking) - {PASSED_OVER}) == len(pool)


def test_product_arm_starts_every_pool_empty():
    arm = ProductArm(CachedEmbedder(BigramEmbedder()), None)
    for pool in (POOL[:3], POOL[3:]):
        arm.prepare(pool)
        assert set(arm.rank(question("the", "d0", pool=pool))) <= {d.id for d in pool} | {""}
    arm.close()


def test_product_arm_puts_the_rerankers_choice_first():
    class Wants:
        def score(self, query, documents):
            return [float("Max" in document) for document in documents]

    arm = ProductArm(CachedEmbedder(BigramEmbedder()), Wants())
    arm.prepare(POOL)
    assert arm.rank(question("locker code", "d0"))[0] == "d3"
    arm.close()


def test_vectors_are_made_once_and_queries_are_timed_apart():
    class Counting(BigramEmbedder):
        calls: list[str] = []

        def embed(self, texts, *, kind):
            self.calls += [f"{kind}:{text}" for text in texts]
            return super().embed(texts, kind=kind)

    inner = Counting()
    cached = CachedEmbedder(inner)
    cached.warm(["a", "b", "a"], kind="passage", label="x")
    cached.warm(["a"], kind="query", label="x")
    rows = cached.embed(["b", "a"], kind="passage")
    assert sorted(inner.calls) == ["passage:a", "passage:b", "query:a"]
    assert np.allclose(rows, BigramEmbedder().embed(["b", "a"], kind="passage"))
    cached.time_queries(["a"])
    assert cached.query_ms > 0
    assert cached.embed([], kind="query").shape[0] == 0


def test_untuned_cross_encoder_orders_the_first_twenty_the_same_way_twice(tmp_path):
    base = pair_base(tmp_path / "base")
    rankings = []
    for _ in range(2):
        arm = RerankedArm(CachedEmbedder(BigramEmbedder()), untuned_scorer(base))
        arm.prepare(POOL)
        rankings.append(arm.rank(question("locker code", "d0")))
    assert rankings[0] == rankings[1]
    assert set(rankings[0]) == {d.id for d in POOL}


def test_a_set_that_was_learnt_is_refused():
    refuse_trained("s", [question("x", "d0")], {"records": ["r2"]})
    with pytest.raises(ConfigError, match="r1"):
        refuse_trained("s", [question("x", "d0")], {"records": ["r1", "r2"]})


def test_arm_names_are_checked():
    assert arm_names("bm25, rrf") == ["bm25", "rrf"]
    with pytest.raises(ConfigError, match="nonesuch"):
        arm_names("nonesuch")


@pytest.fixture
def data(tmp_path):
    rows = [{"id": "q1", "question": "句子01", "category": "simple", "evidence": ["s0t1"]},
            {"id": "q2", "question": "句子11", "category": "other", "evidence": ["s1t1", "s1t2"]}]
    write_set(tmp_path / "sets", "locomo", [record("locomo/a", questions=rows)])
    return tmp_path / "sets"


def test_command_writes_the_result_of_every_arm(data, tmp_path):
    base = pair_base(tmp_path / "base")
    artifact, out = pair_artifact(tmp_path / "artifact", base), tmp_path / "out.json"
    assert main(["--data", str(data), "--sets", "locomo", "--base", str(base), "--artifact",
                 str(artifact), "--json", str(out)]) == 0
    made = json.loads(out.read_text(encoding="utf-8"))
    arms = ("bm25", "dense", "rrf", "rrf+base", "ours")
    assert {f"locomo/{arm}" for arm in arms} <= set(made["by"])
    assert "locomo/ours/simple" in made["by"]
    assert set(made["by"]["locomo/ours"]) >= {"recall@1", "recall@5", "recall@20", "mrr", "tokens",
                                              "ms_p50", "ms_p95"}
    assert made["metrics"] == {}
    assert len(made["items"]) == 2 * len(arms)
    assert {"embedder", "reranker"} <= set(made["meta"]["artifacts"])
    assert "句子" not in out.read_text(encoding="utf-8")


def test_command_refuses_a_learnt_set(data, tmp_path, capsys):
    base = pair_base(tmp_path / "base")
    artifact, out = pair_artifact(tmp_path / "artifact", base), tmp_path / "out.json"
    write_manifest(artifact, kind="reranker", base=base, records=["locomo/a"])
    assert main(["--data", str(data), "--sets", "locomo", "--arms", "ours", "--base", str(base),
                 "--artifact", str(artifact), "--json", str(out)]) == 2
    assert "refused" in capsys.readouterr().err
    assert not out.exists()
