from dataclasses import replace

import pytest

from memory_runtime import Candidate, Layer, Memory, SchemaError, Scope, State
from memory_runtime.recall import is_only_about_time
from tests.memory_runtime.stand_ins import (
    Clock,
    HashEmbedder,
    TurnEncoder,
    WordReranker,
    said,
    settings,
)

USER = Scope("u1")


def memory(**parts) -> Memory:
    config = parts.pop("config", settings())
    return Memory(":memory:", encoder=parts.pop("encoder", TurnEncoder()),
                  embedder=parts.pop("embedder", HashEmbedder()), config=config,
                  clock=parts.pop("clock", Clock()), **parts)


def told(*texts, **parts) -> Memory:
    """A memory that was told these texts."""
    held = memory(**parts)
    held.add(said(*texts), scope=USER)
    held.flush(USER)
    return held


def texts(found) -> list[str]:
    return [m.candidate.text for m in found.memories]


FACTS = ("我的代号是青禾，工位在三楼东侧。", "周末我去爬山了。", "我喜欢看科幻电影。",
         "楼下新开了一家面馆。")


@pytest.mark.parametrize("query", ["代号", "工位", "青禾", "禾"])
@pytest.mark.parametrize("routes", [("lexical",), ("lexical", "vector", "time")])
def test_a_two_character_query_finds_its_memory_first(query, routes):
    assert "青禾" in texts(told(*FACTS).search(query, USER, routes=routes))[0]


def test_filters_act_inside_the_search():
    held = memory()
    old = [Candidate(f"Quarterly budget figure for desk {n}", ()) for n in range(300)]
    new = [Candidate(f"Quarterly budget figure for the {c} office", ()) for c in ("Oslo", "Cork")]
    held.insert(old, scope=USER, observed_at="2020-01-01T00:00:00Z")
    held.insert(new, scope=USER, observed_at="2026-06-01T00:00:00Z")
    found = held.search("quarterly budget figure", USER, after="2026-05-29T00:00:00Z",
                        routes=("vector",))
    assert len(found.hits) == 2 and all("office" in text for text in texts(found))


def test_labels_limit_a_search_only_when_asked():
    held = memory()
    for session in ("a", "b"):
        held.insert([Candidate(f"The tea of session {session} is green", ())],
                    scope=Scope("u1", session=session))
    assert len(held.search("green tea", Scope("u1", session="a")).hits) == 2
    assert len(held.search("green tea", USER, session="a").hits) == 1


def test_superseded_values_come_back_only_when_asked_and_are_flagged():
    held = memory(encoder=TurnEncoder(lambda c, t: replace(c, attribute="预算")))
    held.add(said("我的预算是3万元"), scope=USER)
    held.flush(USER)
    held.add(said("我的预算是5万元", at="2026-03-05T09:00:00+08:00", session="s2"), scope=USER)
    held.flush(USER)
    assert texts(held.search("预算", USER)) == ["我的预算是5万元"]
    both = held.search("预算", USER, include_superseded=True)
    assert {hit.memory.candidate.text: hit.is_superseded for hit in both.hits} == {
        "我的预算是5万元": False, "我的预算是3万元": True}


def test_a_failing_reranker_leaves_the_fused_order_and_says_so():
    plain = told(*FACTS).search("我的工位在哪", USER)
    broken = told(*FACTS, reranker=WordReranker(failing=True)).search("我的工位在哪", USER)
    assert texts(broken) == texts(plain)
    assert broken.degraded and not broken.reranked and not plain.degraded


def test_the_reranker_decides_within_its_weight():
    favourite = {"楼下新开了一家面馆。": 0.99}
    held = told(*FACTS, reranker=WordReranker(fixed=favourite),
                config=settings(recall={"blend_weight": 1.0}))
    first = held.search("我的工位在哪", USER).hits[0]
    assert first.memory.candidate.text == "楼下新开了一家面馆。" and first.relevance == 0.99
    blind = told(*FACTS, reranker=WordReranker(fixed=favourite),
                 config=settings(recall={"blend_weight": 0.0}))
    assert "工位" in texts(blind.search("我的工位在哪", USER))[0]


def test_results_stay_inside_top_k_and_the_token_budget():
    many = [f"The garden has {n} bees and a long wall of grey stone" for n in range(100, 140)]
    held = memory(config=settings(recall={"token_budget": 30}))
    held.insert([Candidate(text, ()) for text in many], scope=USER)
    assert len(held.search("bees in the garden", USER).hits) == 2
    assert len(memory(config=settings()).search("bees", USER).hits) == 0
    wide = memory()
    wide.insert([Candidate(text, ()) for text in many], scope=USER)
    assert len(wide.search("bees in the garden", USER).hits) == 5
    assert len(wide.search("bees in the garden", USER, 30).hits) == 30


@pytest.mark.parametrize("question", ["What did I do yesterday?", "我昨天做了什么？"])
def test_yesterday_is_a_day_of_the_askers_calendar(question):
    held = memory()
    for n, (at, text) in enumerate([
            ("2026-03-08T23:50:00+08:00", "Watered the office plants."),
            ("2026-03-09T23:30:00+08:00", "Posted my tax form."),
            ("2026-03-10T00:30:00+08:00", "Booked the dentist.")]):
        held.add(said(text, at=at, session=f"s{n}"), scope=USER)
    held.flush(USER)
    found = held.search(question, USER, asked_at="2026-03-10T09:00:00+08:00")
    assert texts(found) == ["Posted my tax form."]


def test_only_a_question_about_nothing_but_time_is_cut_to_it():
    assert is_only_about_time("What happened yesterday?") and is_only_about_time("昨天干了什么")
    assert not is_only_about_time("What did the dentist say yesterday?")
    assert not is_only_about_time("昨天牙医说了什么")


def test_turns_that_became_no_memory_can_still_be_found():
    held = memory(encoder=TurnEncoder(lambda c, t: None))
    held.add(said("The bus was late because of the snow"), scope=USER)
    held.flush(USER)
    found = held.search("snow bus", USER, include_turns=True)
    assert not found.hits and found.turns[0].turn.text.startswith("The bus")
    assert not held.search("snow bus", USER).turns


def test_explain_names_the_terms_of_a_score_and_the_reason_of_an_absence():
    held = told(*FACTS)
    ids = {m.candidate.text: m.id for m in held.get_all(USER)}
    why = held.explain("我的工位", ids[FACTS[0]], USER)
    assert why.returned and why.rank == 1 and why.hit.ranks["lexical"] == 1
    assert why.hit.cosine > 0 and why.hit.bm25 > 0
    absent = held.explain("工位", "m-unknown", USER)
    assert not absent.returned and "no such memory" in absent.reason
    few = told(*FACTS, config=settings(recall={"top_k": 1}))
    cut = [few.explain("我的工位 面馆", m.id, USER) for m in few.get_all(USER)]
    assert sum(item.returned for item in cut) == 1
    assert any("beyond top_k" in item.reason for item in cut)


def test_unknown_routes_are_refused():
    with pytest.raises(SchemaError, match="routes"):
        memory().search("x", USER, routes=("magic",))


def test_query_syntax_is_only_text():
    held = told(*FACTS)
    for query in ('"', "* OR *", "NEAR(a b)", "'; DROP TABLE memories; --", "%", "\x00", ""):
        held.search(query, USER)
    assert len(held.get_all(USER)) == 4


# --- answers ---


def test_an_answer_quotes_the_memory_and_nothing_else():
    answer = told(*FACTS).answer("我的工位在哪？", USER)
    assert answer.status == "answered" and FACTS[0] in answer.text
    assert answer.check.accepted and answer.tokens <= 60
    assert [m.candidate.text for m in answer.memories] == [FACTS[0]]


@pytest.mark.parametrize(("question", "reply"), [
    ("What is the name of my parrot?", "Nothing recorded about that."),
    ("我的血型是什么？", "没有记录。"),
])
def test_what_was_never_said_is_not_answered(question, reply):
    answer = told(*FACTS).answer(question, USER)
    assert (answer.status, answer.text, answer.memories) == ("nothing_recorded", reply, ())


def test_the_calibrated_floor_decides_when_there_is_a_reranker():
    low = told(*FACTS, reranker=WordReranker(fixed={FACTS[0]: 0.29}),
               config=settings(answer={"nothing_below": 0.3}))
    assert low.answer("工位", USER).status == "nothing_recorded"
    high = told(*FACTS, reranker=WordReranker(fixed={FACTS[0]: 0.31}),
                config=settings(answer={"nothing_below": 0.3}))
    assert high.answer("工位", USER).status == "answered"


def test_at_most_two_memories_and_sixty_tokens_are_quoted():
    long = [f"The {colour} house by the river has a garden with {n} bees, an old stone wall, "
            "a gate that squeaks and a view over the whole valley down to the sea"
            for n, colour in enumerate(("red", "blue", "green", "white"), start=20)]
    answer = told(*long).answer("house by the river garden bees wall gate view valley", USER)
    assert 1 <= len(answer.memories) <= 2 and answer.tokens <= 60


def test_an_answer_in_another_language_is_a_bare_quotation():
    held = memory(reranker=WordReranker(fixed={FACTS[0]: 0.9}))
    held.insert([Candidate(FACTS[0], (), layer=Layer.CORE)], scope=USER)
    assert held.answer("Where is my desk?", USER).text == FACTS[0]


def test_a_superseded_value_is_never_asserted():
    held = memory(encoder=TurnEncoder(lambda c, t: replace(c, attribute="budget")))
    held.add(said("My budget is 300 dollars"), scope=USER)
    held.add(said("My budget is 500 dollars now", at="2026-03-05T09:00:00+08:00", session="s2"),
             scope=USER)
    held.flush(USER)
    answer = held.answer("What is my budget?", USER)
    assert "500" in answer.text and "300" not in answer.text


class Writer:
    """A generator that says what it is told to, one reply a call."""

    def __init__(self, *replies):
        self.replies, self.chats = list(replies), []

    def generate(self, messages, *, max_tokens=200):
        self.chats.append(list(messages))
        reply = self.replies.pop(0)
        if reply is None:
            raise RuntimeError("down")
        return reply


def test_a_draft_that_follows_is_used_and_memory_text_is_never_in_the_system_role():
    writer = Writer("工位在三楼东侧。")
    answer = told(*FACTS, generator=writer).answer("我的工位在哪？", USER)
    assert answer.text == "工位在三楼东侧。" and answer.status == "answered"
    assert all(FACTS[0] not in m["content"] for m in writer.chats[0] if m["role"] == "system")


def test_a_draft_with_another_number_gets_one_retry_and_then_the_quotation():
    writer = Writer("工位在4楼408号。", "工位在5楼。")
    answer = told(*FACTS, generator=writer).answer("我的工位在哪？", USER)
    assert FACTS[0] in answer.text and answer.degraded and len(writer.chats) == 2
    assert told(*FACTS, generator=Writer(None)).answer("我的工位在哪？", USER).degraded


def test_states_other_than_living_are_not_recalled():
    held = told(*FACTS)
    assert {m.state for m in held.get_all(USER)} == {State.ACTIVE}
    assert held.get_all(USER, states=[State.SUPERSEDED]) == []
