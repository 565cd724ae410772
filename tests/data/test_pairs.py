"""The groups that the reranker learns from: what answers, what does not, and what is never read."""

import builtins
import io
import json
import random
from pathlib import Path

import pytest

from data.pair_drafts import (
    Draft,
    Harvest,
    parallel_drafts,
    realmem_drafts,
    story_drafts,
    turn_drafts,
)
from data.pair_slots import (
    Fact,
    knowledge_facts,
    name_off,
    one_digit_off,
    service_facts,
    slot_drafts,
    wish_drafts,
)
from data.pairs import Miner, PairLimits, build_pairs, family, mine, select, split

AUTHORED = Path(__file__).parents[2] / "data" / "authored"


def turns(*texts, speakers=("user", "agent")):
    return [{"id": f"t{n}", "speaker": speakers[n % 2], "text": text}
            for n, text in enumerate(texts)]


def service_record(record_id="crosswoz/x1", **changes):
    memories = [("agent_inform", "t1", "酒店", "名称", "云天酒店"),
                ("agent_inform", "t3", "酒店", "电话", "010-63553377"),
                ("agent_inform", "t3", "酒店", "评分", "4.7分"),
                ("user_inform", "t0", "酒店", "酒店类型", "舒适型")]
    return {
        "id": record_id, "lang": "zh", "sessions": [{"id": "S1", "time": None, "turns": turns(
            "找一家舒适型酒店。", "推荐云天酒店。", "云天酒店电话多少？",
            "电话是010-63553377，评分4.7分。")}],
        "memories": [{"kind": k, "evidence": [t], "slot": [d, s, v]} for k, t, d, s, v in memories],
        **changes,
    }


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), "utf-8")


@pytest.fixture
def corpora(tmp_path):
    """A small folder with every corpus, those that must not be read included."""
    root = tmp_path / "external"
    write(root / "train_extra" / "crosswoz.jsonl", [
        service_record(f"crosswoz/x{n}") for n in range(4)])
    write(root / "train_extra" / "kdconv.jsonl", [{
        "id": "kdconv/k1", "lang": "zh", "topic": "燃情岁月", "sessions": [{
            "id": "S1", "time": None,
            "turns": turns("燃情岁月是哪年上映的？", "1994年12月16日上映的。",
                           speakers=("A", "B"))}],
        "memories": [{"kind": "kg_fact", "evidence": ["t1"],
                      "text": "燃情岁月（美国1994年电影） 上映时间：1994年12月16日"}]}])
    for persona in ("Ethan_Hunt", "Lin_Wanyu"):
        path = root / "dev" / "realmem.jsonl"
        row = realmem_record(f"realmem/{persona}")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    for name in ("locomo", "memsim", "madial_en", "halumem", "beam100k", "msc", "kdconv"):
        (root / "dev" / f"{name}.jsonl").write_text("not even JSON", "utf-8")
    return root


def realmem_record(record_id):
    sessions = [{"id": f"s{n}", "time": None, "turns": [
        {"id": f"s{n}t0", "speaker": "User", "text": f"My budget for trip {n} is {n}00 dollars."},
        {"id": f"s{n}t1", "speaker": "Assistant", "text": f"Noted for trip {n}."}]}
        for n in range(4)]
    memories = [{"id": f"Travel_{n}-DM#{n}", "kind": "dynamic", "evidence": [f"s{n}t0"],
                 "text": f"【Budget】 User's budget for trip number {n} is {n}00 dollars."}
                for n in range(4)]
    memories.append({"id": "Travel_9-DM#9", "kind": "dynamic", "evidence": [], "text": "None."})
    questions = [{"id": f"{record_id}-Q1", "question": "What is my budget for trip 1?",
                  "asked_at": "s2t0", "evidence_memories": ["Travel_1-DM#1"], "evidence": []}]
    return {"id": record_id, "lang": "en", "sessions": sessions, "memories": memories,
            "questions": questions}


def rows_of(folder):
    return [json.loads(line) for name in ("pairs_train.jsonl", "pairs_calibration.jsonl")
            for line in (folder / name).read_text("utf-8").splitlines()]


def test_every_group_has_a_query_and_negatives_that_are_no_positives(tmp_path, corpora):
    build_pairs(corpora, AUTHORED, tmp_path / "out", 7)
    rows = rows_of(tmp_path / "out")
    assert len(rows) > 300
    assert len({row["id"] for row in rows}) == len(rows)
    for row in rows:
        assert row["query"] and row["negatives"] and len(row["negatives"]) <= 19
        assert not set(row["negatives"]) & set(row["positives"])
        assert len(set(row["negatives"])) == len(row["negatives"])


def test_same_seed_gives_same_files_and_another_seed_another_split(tmp_path, corpora):
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        build_pairs(corpora, AUTHORED, tmp_path / name, seed)
    read = {name: (tmp_path / name / "pairs_train.jsonl").read_bytes() for name in "abc"}
    assert read["a"] == read["b"] != read["c"]


def test_only_files_and_personas_for_training_are_read(tmp_path, corpora, monkeypatch):
    opened = []
    original = builtins.open

    def watched(path, *args, **kwargs):
        opened.append(str(path))
        return original(path, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", watched)
    monkeypatch.setattr(io, "open", watched)
    infos = build_pairs(corpora, AUTHORED, tmp_path / "out", 7)
    external = {Path(p).relative_to(corpora).as_posix() for p in opened if str(corpora) in p}
    assert external == {"dev/realmem.jsonl", "train_extra/kdconv.jsonl",
                        "train_extra/crosswoz.jsonl"}
    records = {record for info in infos for record in info.records}
    assert "realmem/Ethan_Hunt" in records and "realmem/Lin_Wanyu" not in records
    assert not any(record.endswith("-06") for record in records)
    assert not any("Lin_Wanyu" in row["id"] for row in rows_of(tmp_path / "out"))


def test_absent_corpora_are_named_and_skipped(tmp_path, caplog):
    build_pairs(tmp_path / "nowhere", AUTHORED, tmp_path / "out", 7)
    assert {"realmem", "kdconv", "crosswoz", "sgd", "memorybank"} <= {
        record.getMessage().split(":")[0] for record in caplog.records}
    assert {row["source"] for row in rows_of(tmp_path / "out")} == {
        "stories", "windows", "statement_to_turn"}


def test_no_dialogue_is_on_both_sides(tmp_path, corpora):
    build_pairs(corpora, AUTHORED, tmp_path / "out", 7)
    sides = []
    for name in ("pairs_train.jsonl", "pairs_calibration.jsonl"):
        lines = (tmp_path / "out" / name).read_text("utf-8").splitlines()
        sides.append({json.loads(line)["id"].split("/")[0] for line in lines
                      if json.loads(line)["id"].startswith(("as-", "aw-"))})
    assert not sides[0] & sides[1]
    assert {i[:5] for i in sides[1]} == {"as-en", "as-zh", "aw-en", "aw-zh"}


def test_split_holds_back_the_same_share_of_every_family():
    dialogues = {f"sgd/{n}" for n in range(40)} | {f"as-zh-0{n}" for n in range(1, 6)} | {"solo/1"}
    held = split(dialogues, 0.1, 3)
    count = {name: sum(family(d) == name for d in held) for name in ("sgd", "as-zh", "solo")}
    assert count == {"sgd": 4, "as-zh": 1, "solo": 0}


def test_caps_hold_and_are_spread_over_dialogues():
    drafts = [Draft(f"s/{d}/{n}", "en", "sgd", d, d, "q?", ("p",)) for d in "ab"
              for n in range(50 if d == "a" else 3)]
    chosen = select(drafts, PairLimits(per_source={("sgd", "en"): 6}), 1)
    assert len(chosen) == 6
    assert sum(d.dialogue == "b" for d in chosen) == 3
    assert select(drafts, PairLimits(per_source={}), 1) == []


# --- stories ---


def story():
    return {
        "id": "as-en-01", "lang": "en",
        "sessions": [{"id": "s1", "turns": turns("I live in Rome.", "Nice.", "I moved to Pisa.")}],
        "facts": [{"id": "f1", "text": "Ann lives in Rome", "evidence": ["t0"],
                   "superseded_by": "f2"},
                  {"id": "f2", "text": "Ann lives in Pisa", "evidence": ["t2"]}],
        "questions": [{"id": "q1", "question": "Where does she live now?", "facts": ["f2"]},
                      {"id": "q2", "question": "How old is she?", "facts": []}],
    }


def test_superseded_values_are_the_first_negatives():
    harvest = Harvest()
    story_drafts(story(), harvest)
    draft = next(d for d in harvest.drafts if d.id == "as-en-01/q1")
    assert draft.positives == ("Ann lives in Pisa", "I moved to Pisa.")
    found = mine(draft, Miner(harvest.pools[draft.pool]), PairLimits())
    assert found == ("Ann lives in Rome", "I live in Rome.", "Nice.")


def test_never_said_questions_have_no_positives():
    harvest = Harvest()
    story_drafts(story(), harvest)
    draft = next(d for d in harvest.drafts if d.id == "as-en-01/q2")
    assert draft.positives == ()
    assert len(mine(draft, Miner(harvest.pools[draft.pool]), PairLimits())) == 5


# --- RealMem and turns ---


def test_memories_after_the_question_are_no_candidates():
    harvest = Harvest()
    realmem_drafts(realmem_record("realmem/Ethan_Hunt"), harvest)
    draft = next(d for d in harvest.drafts if d.source == "realmem")
    found = mine(draft, Miner(harvest.pools[draft.pool]), PairLimits())
    assert found == ("User's budget for trip number 0 is 000 dollars.",)


def test_questions_that_name_nothing_take_negatives_of_their_own_dialogue_only():
    record = {"id": "kdconv/k", "lang": "zh", "sessions": [{"id": "S", "turns": turns(
        "它是哪年上映的呀？", "1994年12月上映的。", "燃情岁月的导演是谁？", "导演是爱德华。",
        speakers=("A", "B"))}]}
    harvest = Harvest()
    turn_drafts(record, harvest, source="kdconv", names={"燃情岁月"})
    assert [d.pool for d in harvest.drafts] == [None, "kdconv/answers"]
    assert set(harvest.drafts[0].hard) == {"燃情岁月的导演是谁？", "导演是爱德华。"}


def test_parallel_turns_answer_across_languages_and_unlike_sessions_are_left_out():
    def record(language, sessions):
        return {"id": f"mb-{language}/0", "group": "mb/0", "lang": language, "source": "mb",
                "sessions": [{"id": f"d{n}", "turns": turns(*texts, speakers=("AI", "Ann"))}
                             for n, texts in enumerate(sessions)]}
    harvest = Harvest()
    parallel_drafts(record("zh", [["你好，你今天去哪里了？", "我去了绿禾公园散步。"],
                                  ["只有一句话在这里。"]]),
                    record("en", [["Hello, where were you today?", "I went to the park."],
                                  ["Here are two turns.", "Not one."]]), harvest)
    assert {(d.query, d.positives) for d in harvest.drafts} == {
        ("你好，你今天去哪里了？", ("Hello, where were you today?",)),
        ("我去了绿禾公园散步。", ("I went to the park.",)),
        ("Hello, where were you today?", ("你好，你今天去哪里了？",)),
        ("I went to the park.", ("我去了绿禾公园散步。",))}


# --- slots ---


def test_slot_questions_pair_with_statement_and_turn():
    facts = list(service_facts(service_record()))
    assert [(f.name, f.slot, f.value) for f in facts] == [
        ("云天酒店", "电话", "010-63553377"), ("云天酒店", "评分", "4.7分")]
    harvest = Harvest()
    slot_drafts(facts, harvest, random.Random(1), source="s")
    asked = next(d for d in harvest.drafts if d.id == "s/crosswoz/x1/0/asked")
    assert asked.positives == ("云天酒店的电话是010-63553377。", "电话是010-63553377，评分4.7分。")
    assert "云天酒店的评分是4.7分。" in asked.hard


def test_changed_digits_are_negatives_only_where_the_question_holds_the_number():
    harvest = Harvest()
    slot_drafts(list(service_facts(service_record())), harvest, random.Random(1), source="s")
    for draft in harvest.drafts:
        wrong = [t for t in draft.hard if t.startswith("云天酒店的电话是")
                 and t != "云天酒店的电话是010-63553377。"]
        assert bool(wrong) == draft.id.endswith("/backwards")
        assert not set(wrong) & set(draft.positives)
        if wrong:
            assert "010-63553377" in draft.query


def test_attributes_with_two_values_ask_nothing():
    facts = [Fact("r", "en", "Soo Yuan", "time", value, "turn") for value in ("6 pm", "7 pm")]
    harvest = Harvest()
    slot_drafts(facts, harvest, random.Random(1), source="s")
    assert harvest.drafts == []


def test_a_turn_that_names_two_things_tells_of_neither():
    record = service_record()
    record["memories"].insert(1, {"kind": "agent_inform", "evidence": ["t1"],
                                  "slot": ["酒店", "名称", "贵都大酒店"]})
    assert list(service_facts(record)) == []


def test_changed_wishes_ask_nothing():
    record = service_record()
    record["memories"].append({"kind": "user_inform", "evidence": ["t2"],
                               "slot": ["酒店", "酒店类型", "高档型"]})
    harvest = Harvest()
    wish_drafts(record, harvest, random.Random(1), source="w")
    assert harvest.drafts == []
    wish_drafts(service_record(), harvest, random.Random(1), source="w")
    assert harvest.drafts[0].positives == ("用户想要酒店类型为舒适型的酒店。", "找一家舒适型酒店。")


def test_knowledge_facts_lose_the_gloss_of_the_name():
    record = {"id": "k", "sessions": [{"turns": turns("a", "b")}], "memories": [
        {"text": "恋恋笔记本（美国2004年电影） 导演：尼克·卡索维茨。", "evidence": ["t1"]}]}
    (fact,) = knowledge_facts(record)
    assert fact.statement == "恋恋笔记本的导演是尼克·卡索维茨。"


@pytest.mark.parametrize("seed", range(5))
def test_one_digit_off_changes_exactly_one_digit(seed):
    text = "电话010-6355"
    changed = one_digit_off(text, random.Random(seed))
    assert sum(a != b for a, b in zip(text, changed, strict=True)) == 1
    assert one_digit_off("no digit", random.Random(seed)) is None


@pytest.mark.parametrize("seed", range(5))
def test_a_name_that_is_off_is_no_real_name(seed):
    names = ["云天酒店", "云海酒店", "Soo Yuan House", "La Marsa Grill"]
    for name in names:
        assert name_off(name, names, random.Random(seed)) not in names


def test_mined_texts_that_hold_the_answer_are_left_out():
    draft = Draft("i", "en", "s", "r", "d", "the phone of Soo Yuan", ("Its phone is 555-12.",),
                  answers=("555-12",))
    miner = Miner(dict.fromkeys(["Call Soo Yuan at 555-12", "The phone of La Marsa", "Hi"], 0))
    assert mine(draft, miner, PairLimits()) == ("The phone of La Marsa", "Hi")
