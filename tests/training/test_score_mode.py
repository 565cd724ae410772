"""What is learnt is what is served: digits read in training and in serving are the same numbers."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from memory_runtime.prompt import NUM_DIGITS
from memory_runtime.schema import Candidate, Window
from serving.engine.extractor import Extractor
from serving.engine.loading import load_causal_lm
from tests import tiny
from training.calibrate import Counts, Judged, fit_bias, pick_point
from training.losses import expected_score
from training.pack import Labelled, Vocabulary, branch_mask, build_row, collate


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    return load_causal_lm(tiny.encoder_base(tmp_path_factory.mktemp("base")), dtype="float32",
                          device="cpu")


def trained_values(lm, window: Window, candidates: list[Candidate]) -> np.ndarray:
    """Expected digits at the score positions of a training row, [N, 6]."""
    tokenizer = lm.tokenizer
    vocabulary = Vocabulary.of(tokenizer, tokenizer.convert_tokens_to_ids("<|im_end|>"))
    row = build_row(tokenizer, vocabulary, window, [], [Labelled(c, c.keep) for c in candidates])
    pack = collate([row])
    scored = pack["scores"] >= 0
    model = tiny.encoder_model().eval()
    with torch.no_grad():
        logits = model(
            input_ids=pack["input_ids"], position_ids=pack["position_ids"], use_cache=False,
            attention_mask=branch_mask(pack["rows"][0], pack["branch"][0]),
            logits_to_keep=pack["source"][scored]).logits[0]
    values = expected_score(logits[:, list(vocabulary.digit_ids)])
    return values.reshape(len(candidates), NUM_DIGITS).numpy()


@pytest.mark.parametrize("number", range(4))
def test_scores_in_training_equal_scores_in_serving(lm, number):
    window = tiny.windows()[number]
    candidates = [replace(c, attribute="anything") for c in tiny.candidates(window)]
    (served,) = Extractor(lm, "base").expected_digits([(window, candidates)])
    np.testing.assert_allclose(served, trained_values(lm, window, candidates), atol=1e-5)


def test_the_first_token_is_weighed_by_the_bias_alone(lm):
    """Silent or not follows the noted odds; the odds themselves do not move."""
    from serving.engine.decode import FirstChoice, Row

    logits = torch.tensor([[2.0, 0.0, 1.0], [0.0, 2.0, 1.0]])
    rows = [Row(None, 5), Row(None, 5)]
    moved = FirstChoice(empty=0, some=1, bias=3.0).weigh(logits, rows)
    assert [row.empty_log_odds for row in rows] == [2.0, -2.0]
    assert moved.argmax(-1).tolist() == [2, 1] and logits[0, 0] == 2.0


def test_a_bias_silences_exactly_the_windows_above_it():
    def judged(odds):
        return Judged(None, (Candidate("x", ("t",)),), odds)  # type: ignore[arg-type]

    windows = [judged(odds) for odds in (-2.0, 1.0, 4.0, None)]
    assert [len(w.silenced(0.0).candidates) for w in windows] == [1, 0, 0, 1]
    assert all(w.silenced(5.0).candidates for w in windows)


def spoken(odds, *, full):
    annotated = type("A", (), {"window": tiny.windows()[0], "gold": ("g",) if full else ()})()
    return Judged(annotated, (Candidate("x", ("t",)),), odds)


def test_the_bias_lies_where_full_and_empty_windows_are_even():
    apart = [*(spoken(x, full=True) for x in (1.0, 2.0, 3.0)),
             *(spoken(x, full=False) for x in (6.0, 7.0, 8.0))]
    assert 3.0 < fit_bias(apart) < 6.0
    centred = [*(spoken(-x, full=True) for x in (1, 2)), *(spoken(x, full=False) for x in (1, 2))]
    assert fit_bias(centred) == 0.0
    assert fit_bias([]) == 0.0
    # One odd window among many moves it little.
    many = [*(spoken(-4.0, full=True) for _ in range(15)),
            *(spoken(4.0, full=False) for _ in range(12)), spoken(6.0, full=True)]
    assert fit_bias(many) < 2.0


def test_a_silent_encoder_gets_the_bias_that_lets_its_right_windows_speak(monkeypatch):
    """Right candidates behind odds up to 3, wrong ones behind odds over 5."""
    monkeypatch.setattr("training.calibrate.count", lambda windows, similarity, floor: Counts(
        floor, kept=sum(len(w.candidates) for w in windows),
        right=sum(len(w.candidates) for w in windows if w.empty_log_odds < 4),
        must_found=sum(len(w.candidates) for w in windows if w.empty_log_odds < 4), must_total=3))
    windows = [spoken(odds, full=odds < 4) for odds in (1.0, 2.0, 3.0, 6.0, 7.0)]
    bias, best = pick_point(windows, None)
    assert 3.0 < bias < 6.0 and (best.kept, best.f1) == (3, 1.0)


def test_an_encoder_that_would_say_nothing_at_all_is_let_speak(monkeypatch):
    monkeypatch.setattr("training.calibrate.count", lambda windows, similarity, floor: Counts(
        floor, kept=sum(len(w.candidates) for w in windows), right=1, must_found=1, must_total=1))
    bias, best = pick_point([spoken(5.0, full=False), spoken(6.0, full=False)], None)
    assert bias == 7.0 and best.kept == 2
