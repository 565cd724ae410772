import json
from pathlib import Path

import pytest
import yaml

from data import sources
from data.build import DataConfig, corpus_windows, load, split_calibration, spread, thin, window_row
from data.sources import TRAINING_PERSONAS, WINDOW_SOURCES
from memory_runtime.corpus import read_window, read_windows
from memory_runtime.errors import ConfigError

ROOT = Path(__file__).parents[2]
EVALUATION_ONLY = ("locomo", "halumem", "memsim", "madial", "beam", "msc", "longmemeval", "noise")


def write(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))
    return path


def turns(*texts, prefix="t"):
    return [{"id": f"{prefix}{n}", "speaker": "user" if n % 2 == 0 else "agent", "text": text}
            for n, text in enumerate(texts)]


def test_a_booking_is_gold_and_a_look_up_is_nothing(tmp_path):
    def slot(n, turn, slot, value):
        return {"id": f"f{n}", "evidence": [turn], "kind": "user_inform",
                "slot": ["Restaurants_1", slot, value], "text": ""}
    booked = {"id": "sgd/1", "sessions": [{"id": "S1", "time": None, "turns": turns(
        "A table in Oslo please", "For when?", "Tonight at 7", "Your table is booked.")}],
        "memories": [slot(0, "t0", "city", "Oslo"), slot(1, "t2", "time", "7")]}
    looked = {"id": "sgd/2", "sessions": [{"id": "S1", "time": None, "turns": turns(
        "Any fish place in Oslo?", "Try Fjord.", "Thanks", "Bye")}],
        "memories": [slot(0, "t0", "city", "Oslo")]}
    first, second = sources.sgd_windows(write(tmp_path / "s.jsonl", [booked, looked]))
    assert [g.candidate.text for g in first.gold] == [
        "The user made a restaurant booking: city Oslo, time 7."]
    assert first.gold[0].candidate.evidence == ("t0", "t2", "t3")
    assert second.gold == ()


def test_look_ups_are_nothing_and_decisions_are_left_out(tmp_path):
    def record(n, last):
        return {"id": f"crosswoz/{n}", "sessions": [{"id": "S1", "time": None, "turns": turns(
            "想找人均100元的餐馆", "推荐您去聚宝源。", last, "不客气")}]}
    found = list(sources.crosswoz_windows(write(
        tmp_path / "c.jsonl", [record(1, "好，就去这家吧"), record(2, "谢谢")])))
    assert [(w.window.id, w.gold) for w in found] == [("crosswoz/2/0", ())]


def test_talk_about_oneself_is_no_window_of_nothing(tmp_path):
    def record(n, text):
        return {"id": f"kd/{n}", "sessions": [{"id": "S1", "time": None, "turns": turns(
            text, "导演是谁？", "是张三。", "哪年上映？", "2004年。")}]}
    found = list(sources.kdconv_windows(write(
        tmp_path / "k.jsonl", [record(1, "我最喜欢这部电影了"), record(2, "这部电影讲什么？")])))
    assert [w.window.id.split("/")[1] for w in found] == ["2"]


def test_only_training_personas_of_realmem_are_read(tmp_path):
    def record(name):
        return {"id": f"realmem/{name}", "sessions": [
            {"id": "s0", "time": "2026-01-01", "topic": "Plan:S1", "turns": turns(
                "My budget for the kitchen is at most 9000 dollars.", "Noted.", "Great.")}],
            "memories": [{"id": "m", "evidence": ["t0"], "kind": "static",
                          "text": "【Budget】 User's kitchen budget is at most 9000 dollars."}]}
    names = [p.split("/")[1] for p in TRAINING_PERSONAS]
    path = write(tmp_path / "r.jsonl", [record(n) for n in [*names, "Lin_Wanyu", "Adeleke_Okonjo"]])
    found = list(sources.realmem_windows(path))
    assert {w.window.id.split("/")[1] for w in found} == set(names)
    assert found[0].gold[0].candidate.text == "User's kitchen budget is at most 9000 dollars."


def test_no_source_is_one_that_is_for_evaluation_only(tmp_path):
    for name, path, *_ in WINDOW_SOURCES:
        assert not any(word in f"{name} {path}" for word in EVALUATION_ONLY)
    tree = yaml.safe_load((ROOT / "configs/data.yaml").read_text())
    tree["per_source"]["locomo"] = 5
    path = tmp_path / "d.yaml"
    path.write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError, match="locomo"):
        load(path)


@pytest.mark.parametrize("key", ["calibration_every", "max_calibration"])
@pytest.mark.parametrize("value", [0, -3, 1.5, "many", None])
def test_numbers_of_calibration_windows_are_checked(tmp_path, key, value):
    tree = yaml.safe_load((ROOT / "configs/data.yaml").read_text())
    path = tmp_path / "d.yaml"
    path.write_text(yaml.safe_dump(tree | {key: value}))
    with pytest.raises(ConfigError, match=f"{key}: got .* from 1"):
        load(path)


def test_absent_corpora_are_named(tmp_path):
    config = DataConfig(str(tmp_path), "", "", 7, 7, 9, 100, {"sgd": 3})
    windows, infos, absent = corpus_windows(config, tmp_path)
    assert (windows, infos) == ([], [])
    assert absent == [name for name, *_ in WINDOW_SOURCES]


def test_windows_survive_the_way_to_disk_and_back():
    for path in (ROOT / "data/authored").glob("windows_*.jsonl"):
        for annotated in read_windows(path):
            assert read_window(window_row(annotated)) == annotated


def test_thinning_keeps_a_third_of_nothing_at_most():
    windows = list(read_windows(ROOT / "data/authored/windows_train_zh.jsonl"))
    chosen = thin(windows, 12, seed=1)
    assert len(chosen) == 12 and sum(not w.gold for w in chosen) == 4


def test_calibration_windows_stay_where_they_are_when_a_file_grows():
    windows = list(read_windows(ROOT / "data/authored/windows_train_zh.jsonl"))
    before, after = (split_calibration([windows[:n], windows[:30]], 12) for n in (30, 60))
    assert {w.window.id for w in before[1]} <= {w.window.id for w in after[1]}
    assert not {w.window.id for w in after[0]} & {w.window.id for w in after[1]}
    learnt = {w.window.id for w in before[0]}
    assert learnt <= {w.window.id for w in after[0]}


def test_windows_are_taken_evenly_and_never_twice():
    windows = list(read_windows(ROOT / "data/authored/windows_train_zh.jsonl"))[:30]
    assert spread(windows, 3) == [windows[0], windows[10], windows[20]]
    assert spread(windows, 99) == windows and spread([], 5) == []


def test_authored_windows_hold_what_their_annotation_says():
    seen = set()
    for path in sorted((ROOT / "data/authored").glob("windows_*.jsonl")):
        for annotated in read_windows(path):
            text = {turn.id: turn.text for turn in annotated.window.turns}
            assert annotated.window.id not in seen and 4 <= len(text) <= 14
            seen.add(annotated.window.id)
            assert len(annotated.forbidden) >= 2
            for gold in annotated.gold:
                said = " ".join(text[turn_id] for turn_id in gold.candidate.evidence)
                assert all(w in said and w in gold.candidate.text for w in gold.literals)
                assert gold.has_scores
    assert len(seen) == 1110
