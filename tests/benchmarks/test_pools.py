"""Pools are the same in every run, hold their evidence and nothing that came too late."""

from __future__ import annotations

import json

import pytest

from benchmarks.plain_bm25 import PlainBm25, tokens
from benchmarks.pools import (
    NUM_NOISE,
    SETS,
    Document,
    noise_pool,
    read_questions,
    set_names,
)
from memory_runtime.errors import ConfigError


def write_set(folder, name, records):
    folder.mkdir(exist_ok=True)
    lines = (json.dumps(record, ensure_ascii=False) for record in records)
    (folder / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")


def record(name, *, sessions=2, turns=3, **fields):
    return {"id": name, "lang": "zh", "sessions": [
        {"id": f"s{s}", "time": f"2026-01-0{s + 1}", "turns": [
            {"id": f"s{s}t{t}", "speaker": "user", "text": f"句子{s}{t}"} for t in range(turns)]}
        for s in range(sessions)], "memories": [], "questions": [], **fields}


def memory(name, session, turn, **fields):
    return {"id": name, "text": f"memory {name}", "evidence": [f"s{session}t{turn}"],
            "session": f"s{session}", **fields}


def noise(num=300):
    return [Document(f"noise:{n}", f"闲聊{n}", None, "user") for n in range(num)]


OWN = [Document("m0", "我的证号是7"), Document("m1", "今天下雨")]


def test_noise_pool_is_decided_by_the_question_id_alone():
    first, again = noise_pool("q1", OWN, noise()), noise_pool("q1", OWN, noise())
    assert first == again
    assert {d.id for d in first} != {d.id for d in noise_pool("q2", OWN, noise())}


def test_noise_pool_holds_the_trajectory_and_a_fixed_amount_of_noise():
    pool = noise_pool("q1", OWN, noise())
    assert len(pool) == len(OWN) + NUM_NOISE
    assert len({d.id for d in pool}) == len(pool)
    assert {"m0", "m1"} <= {d.id for d in pool}


def test_place_and_id_of_a_document_give_the_answer_away_in_no_pool():
    pools = [noise_pool(f"q{n}", OWN, noise()) for n in range(60)]
    places = [[d.id for d in pool].index("m0") for pool in pools]
    # Were the trajectory listed first, ties would put it ahead of the noise.
    assert 60 < sum(places) / len(places) < 142
    assert all("m0" not in d.text and "q" not in d.id for pool in pools for d in pool)


def test_memsim_questions_have_their_own_noise(tmp_path):
    questions = [{"id": f"q{n}", "question": "证号？", "category": "simple", "evidence": ["s0t0"]}
                 for n in range(2)]
    write_set(tmp_path, "memsim", [record("memsim/a", questions=questions)])
    write_set(tmp_path, "noise_zh", [{"id": f"x{n}", "text": f"闲聊{n}"} for n in range(300)])
    first, second = read_questions(tmp_path, "memsim")
    assert first.evidence == ("s0t0",)
    assert len(first.pool) == 6 + NUM_NOISE
    assert {d.id for d in first.pool} != {d.id for d in second.pool}
    assert read_questions(tmp_path, "memsim")[0] == first


def test_turn_pools_hold_the_whole_conversation_with_speakers(tmp_path):
    rows = [{"id": "q", "question": "?", "category": "temporal", "evidence": ["s1t2", "gone"]},
            {"id": "none", "question": "?", "category": "temporal", "evidence": []}]
    write_set(tmp_path, "locomo", [record("locomo/a", questions=rows)])
    (question,) = read_questions(tmp_path, "locomo")
    assert len(question.pool) == 6
    assert question.evidence == ("s1t2",)
    assert question.pool[0].text == "user: 句子00"


def test_realmem_pool_stops_before_the_turn_that_asks(tmp_path):
    memories = [memory("m0", 0, 0), memory("m1", 1, 0), memory("late", 1, 2)]
    rows = [{"id": "q", "question": "?", "category": "c", "evidence": [], "asked_at": "s1t1",
             "evidence_memories": ["m1", "late"]}]
    write_set(tmp_path, "realmem", [
        record("realmem/Lin_Wanyu", memories=memories, questions=rows),
        record("realmem/Ethan_Hunt", memories=memories, questions=rows)])
    (question,) = read_questions(tmp_path, "realmem")
    assert question.record == "realmem/Lin_Wanyu"
    assert [d.id for d in question.pool] == ["m0", "m1"]
    assert question.evidence == ("m1",)


def test_halumem_pool_leaves_out_traps_and_later_sessions(tmp_path):
    memories = [memory("m0", 0, 0), memory("trap", 0, 1, store=False), memory("m1", 1, 0)]
    rows = [{"id": "q", "question": "?", "category": "c", "evidence": [], "after_session": "s0",
             "evidence_memories": ["m0", "trap"]}]
    write_set(tmp_path, "halumem", [record("halumem/a", memories=memories, questions=rows)])
    (question,) = read_questions(tmp_path, "halumem")
    assert [d.id for d in question.pool] == ["m0"]
    assert question.evidence == ("m0",)


def test_limit_draws_the_same_questions_again(tmp_path):
    rows = [{"id": f"q{n}", "question": "?", "category": "c", "evidence": ["s0t0"]}
            for n in range(40)]
    write_set(tmp_path, "locomo", [record("locomo/a", questions=rows)])
    some = read_questions(tmp_path, "locomo", limit=7, seed=3)
    assert len(some) == 7
    assert some == read_questions(tmp_path, "locomo", limit=7, seed=3)
    assert some != read_questions(tmp_path, "locomo", limit=7, seed=4)


def test_set_names_know_short_forms_and_refuse_the_rest():
    assert set_names("madial, locomo") == ["madial_zh", "madial_en", "locomo"]
    assert set(set_names("all")) == set(SETS)
    with pytest.raises(ConfigError, match="nonesuch"):
        set_names("locomo,nonesuch")
    with pytest.raises(ConfigError):
        set_names(" , ")


def test_missing_set_is_an_error_that_names_it(tmp_path):
    with pytest.raises(ConfigError, match="locomo"):
        read_questions(tmp_path, "locomo")


def test_plain_bm25_finds_two_character_words_and_skips_stop_words():
    assert sorted(tokens("The 工位 is at B2")) == ["b2", "工位"]
    index = PlainBm25(["我的工位在三楼", "周末去爬山", "a stop word"])
    assert index.ranking("工位") == [0]
    assert index.ranking("the is at") == []
    assert PlainBm25([]).ranking("x") == []


def test_plain_bm25_prefers_the_rare_word():
    index = PlainBm25(["red car", "red house", "red zebra"])
    assert index.ranking("red zebra")[0] == 2
