"""Maps, and the encoder's keep floor, on made-up scores whose right answer is known."""

import json

import numpy as np
import pytest

from data.match import Similarity
from memory_runtime.corpus import AnnotatedWindow, Gold, read_windows
from memory_runtime.errors import ArtifactError, SchemaError
from memory_runtime.schema import Candidate, Kind, Layer, Turn, Window
from memory_runtime.weights import file_sha256
from serving import artifact as served
from tests import tiny
from training.calibrate import (
    Counts,
    Judged,
    apply_map,
    calibrate_encoder,
    calibration_error,
    count,
    fit_isotonic,
    fit_logit_map,
    fit_platt,
    floors,
    logit,
    pick_floor,
    read_rollout,
)
from training.run import read_json, write_json


class OneHot:
    """Equal texts are equal, all others unrelated."""

    def __init__(self):
        self.places = {}

    def embed(self, texts, *, kind):
        for text in texts:
            self.places.setdefault(text, len(self.places))
        rows = np.zeros((len(texts), 512), dtype=np.float32)
        rows[range(len(texts)), [self.places[t] for t in texts]] = 1.0
        return rows


THINGS = ("budget", "allergy", "address", "violin", "deadline", "passport", "sister", "garden")


def memory(thing, *, keep=1.0, turn="t0"):
    return Candidate(f"About the {thing} of this {thing} owner", (turn,), "user", thing,
                     Layer.CORE, Kind.FACT, keep=keep)


def window_row(n, things):
    return {"id": f"w{n}", "lang": "en", "source": "tiny",
            "turns": [{"id": f"t{m}", "speaker": "user", "text": "hm"} for m in range(6)],
            "gold": [{**memory(thing).to_json(), "literals": [], "scores": {
                name: 5 for name in ("reuse", "goal", "emphasis", "emotion", "commitment")}}
                for thing in things], "forbidden": []}


def write_case(folder, *, keeps):
    """Two windows, one with nothing in it; `keeps` gives the raw keep of each emitted thing."""
    windows = [window_row(0, THINGS[:4]), window_row(1, [])]
    (folder / "windows.jsonl").write_text("".join(json.dumps(w) + "\n" for w in windows))
    rows = []
    for n, emitted in enumerate(keeps):
        made = [memory(thing, keep=keep).to_json() for thing, keep in emitted.items()]
        rows.append({"id": f"w{n}", "candidates": [c for c in made if c["keep"] >= 0.5],
                     "dropped": [c for c in made if c["keep"] < 0.5]})
    (folder / "rollout.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder / "rollout.jsonl", folder / "windows.jsonl"


SEPARABLE = ({"budget": 0.9, "allergy": 0.8, "address": 0.7, "violin": 0.4, "sister": 0.2},
             {"garden": 0.3, "passport": 0.35, "deadline": 0.1})


@pytest.fixture
def artifact(tmp_path):
    base = tiny.encoder_base(tmp_path / "base")
    identity = {**tiny.ENCODER_CALIBRATION, "keep": {"kind": "identity"}, "keep_floor": 0.5}
    return tiny.encoder_artifact(tmp_path / "artifact", base, calibration=identity)


# --- maps ---


@pytest.mark.parametrize("mapping", [
    {"kind": "identity"}, {"kind": "platt", "a": 1.7, "b": -0.4},
    {"kind": "isotonic", "x": [-1.0, 0.2, 0.9], "y": [0.0, 0.4, 1.0]}])
@pytest.mark.parametrize("logits", [True, False])
def test_maps_in_training_equal_maps_in_serving(mapping, logits):
    values = np.linspace(-60, 60, 41) if logits else np.linspace(0, 1, 41)
    assert np.allclose(apply_map(mapping, values, logits=logits),
                       served.apply_map(mapping, values, logits=logits))


def test_platt_recovers_the_curve_that_made_the_labels():
    rng = np.random.default_rng(0)
    z = rng.normal(0, 2, 20000)
    labels = (rng.random(20000) < 1 / (1 + np.exp(-(0.7 * z - 1.2)))).astype(float)
    mapping = fit_platt(z, labels)
    assert mapping["a"] == pytest.approx(0.7, abs=0.05)
    assert mapping["b"] == pytest.approx(-1.2, abs=0.05)


def test_platt_stays_finite_on_separable_labels_and_needs_both():
    mapping = fit_platt(np.array([-2.0, -1.0, 1.0, 2.0]), np.array([0.0, 0.0, 1.0, 1.0]))
    assert 0 < mapping["a"] < 20
    with pytest.raises(ValueError, match="both labels"):
        fit_platt(np.array([1.0, 2.0]), np.array([1.0, 1.0]))


def test_isotonic_is_taken_only_with_many_positives_and_rises():
    rng = np.random.default_rng(0)
    z = rng.normal(0, 2, 4000)
    labels = (rng.random(4000) < 1 / (1 + np.exp(-z))).astype(float)
    assert fit_logit_map(z, labels)["kind"] == "isotonic"
    assert fit_logit_map(z[:500], labels[:500])["kind"] == "platt"
    mapping = fit_isotonic(z, labels)
    assert mapping["x"] == sorted(mapping["x"]) and mapping["y"] == sorted(mapping["y"])
    assert served.calibration_faults("reranker", {"relevance": mapping}) == []


def test_calibration_error_is_zero_for_the_truth_and_large_for_its_opposite():
    labels = np.repeat([0.0, 1.0], 75)
    assert calibration_error(labels, labels) == 0.0
    assert calibration_error(1 - labels, labels, bins=10) == 1.0


# --- floor ---


def test_floors_separate_every_two_neighbouring_values():
    assert floors(np.array([0.2, 0.8, 0.2, 0.4])) == pytest.approx([0.0, 0.3, 0.6])
    assert len(floors(np.linspace(0, 1, 1000))) == 41


def point(floor, kept, right, found, total=10):
    return Counts(floor, kept, right, found, total)


def test_the_floor_has_the_best_f1_and_ties_go_to_precision():
    points = [point(0.0, 40, 10, 10), point(0.3, 20, 10, 10), point(0.6, 5, 5, 5)]
    assert pick_floor(points, 100).floor == 0.6
    equal = [point(0.1, 20, 10, 10), point(0.7, 5, 5, 5), point(0.9, 10, 7, 6)]
    assert equal[0].f1 == equal[1].f1
    assert pick_floor(equal[:2], 100).floor == 0.7


def test_neither_pole_is_taken():
    nothing, everything, some = point(0.9, 0, 0, 0), point(0.0, 50, 9, 9), point(0.5, 9, 1, 1)
    assert pick_floor([nothing, everything, some], 50) is some
    assert pick_floor([nothing, everything], 50) is everything
    with pytest.raises(ArtifactError, match="no candidate"):
        pick_floor([nothing], 50)


def test_a_repeat_counts_once_and_takes_over_when_the_first_is_dropped():
    window = Window("w", (Turn("t0", "user", "hm"),))
    annotated = AnnotatedWindow(window, "en", "tiny", gold=(Gold(memory("budget")),))
    near = Candidate("About the budget of that budget owner", ("t0",), keep=0.9)
    judged = Judged(annotated, (memory("budget", keep=0.2), near))
    similarity = Similarity(OneHot())
    low, high = (count([judged], similarity, floor) for floor in (0.0, 0.5))
    assert (low.kept, low.right, low.must_found) == (2, 1, 1)
    assert (high.kept, high.right, high.must_found) == (1, 0, 0)


# --- the whole ---


def test_the_known_floor_is_found_and_the_artifact_sealed_anew(artifact, tmp_path):
    rollout, windows = write_case(tmp_path, keeps=SEPARABLE)
    before = (artifact / "calibration.json").read_text()
    fit = calibrate_encoder(artifact, rollout, windows, OneHot())
    opened = served.open_artifact(artifact)
    calibration = opened.calibration
    assert before != (artifact / "calibration.json").read_text()
    raw = {0.35: False, 0.4: True}
    for value, kept in raw.items():
        mapped = served.apply_map(calibration["keep"], [value])[0]
        assert (mapped >= calibration["keep_floor"]) == kept
    assert fit["f1"] == fit["precision"] == fit["recall_must"] == 1.0
    assert (fit["matched"], fit["candidates"], fit["kept"]) == (4, 8, 4)
    assert fit["ece_after"] < fit["ece_before"]
    assert all(m == {"kind": "identity"} for m in calibration["scores"].values())


def test_calibrating_again_gives_the_same_and_always_seals_the_artifact(artifact, tmp_path):
    rollout, windows = write_case(tmp_path, keeps=SEPARABLE)
    first = calibrate_encoder(artifact, rollout, windows, OneHot())
    written = (artifact / "calibration.json").read_text()
    # A kill between the two writes leaves a manifest that does not fit; running again mends it.
    manifest = read_json(artifact / "manifest.json")
    manifest["files"]["calibration.json"] = "0" * 64
    write_json(artifact / "manifest.json", manifest)
    assert calibrate_encoder(artifact, rollout, windows, OneHot()) == first
    assert (artifact / "calibration.json").read_text() == written
    sealed = read_json(artifact / "manifest.json")["files"]["calibration.json"]
    assert sealed == file_sha256(artifact / "calibration.json")


def test_keep_that_falls_with_the_truth_is_left_alone(artifact, tmp_path):
    rollout, windows = write_case(tmp_path, keeps=(
        {"budget": 0.1, "allergy": 0.2, "sister": 0.9}, {"garden": 0.8}))
    calibrate_encoder(artifact, rollout, windows, OneHot())
    calibration = served.open_artifact(artifact).calibration
    assert calibration["keep"] == {"kind": "identity"}
    assert calibration["keep_floor"] < 0.1


def test_an_encoder_that_emits_nothing_is_refused(artifact, tmp_path):
    rollout, windows = write_case(tmp_path, keeps=({}, {}))
    with pytest.raises(ArtifactError, match="no candidate"):
        calibrate_encoder(artifact, rollout, windows, OneHot())


def test_a_rollout_of_other_windows_is_refused(tmp_path):
    rollout, windows = write_case(tmp_path, keeps=SEPARABLE[:1])
    with pytest.raises(SchemaError, match="lacks 1 of 2"):
        read_rollout(rollout, list(read_windows(windows)))
    rollout.write_text('{"id": "w0"}\n')
    with pytest.raises(SchemaError, match="rollout line"):
        read_rollout(rollout, list(read_windows(windows)))


def test_a_reranker_has_no_keep_floor(tmp_path):
    base = tiny.pair_base(tmp_path / "base")
    artifact = tiny.pair_artifact(tmp_path / "artifact", base)
    with pytest.raises(ArtifactError, match="must be 'encoder'"):
        calibrate_encoder(artifact, tmp_path, tmp_path, OneHot())


def test_log_odds_are_clipped_as_the_format_says():
    assert logit(np.array([0.0, 1.0])) == pytest.approx([-9.21024, 9.21024], abs=1e-4)
