"""Arithmetic of the extraction benchmark on windows made by hand, both poles included."""

from __future__ import annotations

import pytest

from benchmarks.extraction_metrics import (
    Outcome,
    by_group,
    figures,
    harmonic,
    intervals,
    items_of,
    keep_curve,
    literal_survives,
    match_outcome,
)
from data.match import Similarity
from memory_runtime.corpus import AnnotatedWindow, Forbidden, Gold
from memory_runtime.models import Extraction
from memory_runtime.schema import Candidate, Kind, Layer, Scores, Turn, Window
from tests.data.test_match import WordEmbedder


def candidate(text, **fields):
    return Candidate(text, ("t1",), **fields)


def gold(text, *, must=True, literals=(), **fields):
    return Gold(candidate(text, **fields), literals, must)


def outcome(golds, kept, *, forbidden=(), lang="en", source="made", dropped=(), name="w",
            similarity=None, **extraction):
    window = Window(name, (Turn("t1", "user", "hello"),))
    annotated = AnnotatedWindow(window, lang, source, gold=tuple(golds), forbidden=tuple(forbidden))
    made = Extraction(list(kept), list(dropped), **extraction)
    return match_outcome(annotated, made, similarity=similarity or Similarity(WordEmbedder()),
                         seconds=2.0)


TEA = "The user drinks green tea every morning."
DOG = "The user owns a brown dog called Rex."
CAR = "The user drives an old blue van."


def test_perfect_predictions_score_one_and_empty_windows_stay_empty():
    scores = Scores(reuse=5 / 9)
    made = figures([
        outcome([gold(TEA, literals=("green tea",), scores=scores)],
                [candidate(TEA, scores=scores)]),
        outcome([], []),
    ])
    for name in ("precision", "recall_must", "f1", "literal_exactness", "layer_accuracy",
                 "kind_accuracy"):
        assert made[name] == 1.0, name
    for name in ("false_stores_per_empty", "empty_violated", "score_mae", "invalid"):
        assert made[name] == 0.0, name


def test_nothing_right_scores_zero():
    made = figures([
        outcome([gold(TEA)], [candidate(CAR)], forbidden=[Forbidden(CAR)]),
        outcome([], [candidate(DOG), candidate(CAR)]),
    ])
    assert (made["precision"], made["recall_must"], made["f1"]) == (0.0, 0.0, 0.0)
    assert made["forbidden_hits"] == 1.0
    assert made["false_stores_per_empty"] == 2.0
    assert made["empty_violated"] == 1.0
    assert made["layer_accuracy"] is None


def test_silence_has_no_precision_and_an_f1_of_zero():
    made = figures([outcome([gold(TEA)], [])])
    assert made["precision"] is None
    assert (made["recall_must"], made["f1"]) == (0.0, 0.0)


def test_optional_gold_helps_precision_and_never_hurts_recall():
    hit = figures([outcome([gold(TEA), gold(DOG, must=False)], [candidate(TEA), candidate(DOG)])])
    left_out = figures([outcome([gold(TEA), gold(DOG, must=False)], [candidate(TEA)])])
    assert hit["precision"] == left_out["precision"] == 1.0
    assert hit["recall_must"] == left_out["recall_must"] == 1.0


def test_counts_are_pooled_over_windows():
    made = figures([
        outcome([gold(TEA), gold(DOG)], [candidate(TEA), candidate(DOG)]),
        outcome([gold(CAR)], [candidate(TEA), candidate(DOG)]),
    ])
    assert made["precision"] == pytest.approx(2 / 4)
    assert made["recall_must"] == pytest.approx(2 / 3)
    assert made["f1"] == pytest.approx(harmonic(2 / 4, 2 / 3))


def test_layer_and_kind_count_matched_pairs_only():
    made = figures([outcome(
        [gold(TEA, layer=Layer.CORE, kind=Kind.PREFERENCE), gold(DOG, layer=Layer.CORE)],
        [candidate(TEA, layer=Layer.CORE, kind=Kind.FACT), candidate(DOG, layer=Layer.SEMANTIC),
         candidate(CAR, layer=Layer.CORE)])])
    assert made["layer_accuracy"] == 0.5
    assert made["kind_accuracy"] == 0.5


def test_score_error_stands_beside_the_median_predictor():
    golds = [gold(TEA, scores=Scores(reuse=0.0)), gold(DOG, scores=Scores(reuse=1.0)),
             gold(CAR, scores=Scores(reuse=1.0))]
    kept = [candidate(text, scores=Scores(reuse=0.5)) for text in (TEA, DOG, CAR)]
    made = figures([outcome(golds, kept)])
    # Five scores, of which only reuse errs: 0.5 each; the median 1.0 errs once by 1.
    assert made["score_mae"] == pytest.approx(0.5 / 5)
    assert made["score_mae_median"] == pytest.approx(1 / 3 / 5)
    assert made["reuse_spearman"] is None


def test_reuse_order_is_rank_correlated():
    def scored(make, *values):
        return [make(text, scores=Scores(reuse=value))
                for text, value in zip((TEA, DOG, CAR), values, strict=True)]

    golds = scored(gold, 0.1, 0.5, 0.9)
    same, back = scored(candidate, 0.2, 0.3, 0.4), scored(candidate, 0.4, 0.3, 0.2)
    assert figures([outcome(golds, same)])["reuse_spearman"] == pytest.approx(1.0)
    assert figures([outcome(golds, back)])["reuse_spearman"] == pytest.approx(-1.0)


def test_gold_without_scores_is_left_out_of_the_score_error():
    unscored = Gold(candidate(TEA), (), True, has_scores=False)
    assert figures([outcome([unscored], [candidate(TEA)])])["score_mae"] is None


@pytest.mark.parametrize(("literal", "text", "survives"), [
    ("3万元", "预算是30000元。", True),
    ("5,000", "It cost 5000.", True),
    ("ＡＢ-12", "code ab-12 works", True),
    ("3万元", "预算是4万元。", False),
    ("Rex", "The dog is called Max.", False),
])
def test_literal_survives_normalisation_and_nothing_else(literal, text, survives):
    assert literal_survives(literal, text) is survives


def test_invalid_is_a_count_and_cost_is_per_window():
    made = figures([outcome([], [candidate(TEA)], dropped=[candidate(DOG)], invalid=2,
                            prompt_tokens=30, completion_tokens=10, truncated=True)])
    assert made["invalid"] == 2
    assert made["tokens_per_window"] == 40
    assert made["completion_tokens_per_window"] == 10
    assert made["seconds_per_window"] == 2.0
    assert made["truncated"] == 1.0


def test_groups_are_languages_and_sources():
    groups = by_group([
        outcome([gold(TEA)], [candidate(TEA)]),
        outcome([gold("用户喜欢绿茶。")], [], lang="zh", source="other"),
    ])
    assert list(groups) == ["zh", "en", "made", "other"]
    assert groups["en"]["recall_must"] == 1.0
    assert groups["zh"]["recall_must"] == 0.0


def test_keep_curve_counts_what_the_floor_had_dropped():
    similarity = Similarity(WordEmbedder())
    made = outcome([gold(TEA), gold(DOG)], [candidate(TEA, keep=0.9)],
                   dropped=[candidate(DOG, keep=0.2)], similarity=similarity)
    curve = {row["keep"]: row for row in keep_curve([made], similarity=similarity)}
    assert curve[0.0]["recall_must"] == 1.0
    assert curve[0.5]["recall_must"] == 0.5
    assert curve[1.0]["precision"] is None


def test_every_prediction_and_gold_has_one_verdict():
    made = outcome([gold(TEA), gold(DOG)], [candidate(TEA), candidate(CAR)],
                   forbidden=[Forbidden(CAR)])
    rows = items_of(made)
    assert [row["verdict"] for row in rows] == ["matched", "missed", "extra"]
    assert len({row["id"] for row in rows}) == 3
    assert rows[0]["expected"]["text"] == rows[0]["got"]["text"] == TEA
    assert rows[2]["forbidden"] == [CAR]


def test_intervals_hold_the_figure():
    outcomes = [outcome([gold(TEA)], [candidate(TEA if n % 2 else CAR)]) for n in range(10)]
    low, high = intervals(outcomes)["f1"]
    assert low < figures(outcomes)["f1"] < high
    assert intervals(outcomes)["empty_violated"] is None


def test_outcome_is_what_was_matched():
    made = outcome([gold(TEA)], [candidate(TEA)])
    assert isinstance(made, Outcome)
    assert made.match.pairs[0].similarity == pytest.approx(1.0)
