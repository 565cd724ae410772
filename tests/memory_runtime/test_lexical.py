import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memory_runtime.lexical import Bm25, overlap, reciprocal_rank, stem, terms, top_cosine

TEXTS = ["我的代号是青禾，工位在三楼东侧。", "周末我去爬山了。", "我喜欢看科幻电影。",
         "重启svc-a71后第3台机器恢复正常。", "我的会员卡号是ＶＩＰ８８２０３６。",
         "The houses cost 5,000 dollars"]


@pytest.mark.parametrize(("query", "place"), [
    ("代号", 0), ("工位", 0), ("青禾", 0), ("禾", 0), ("svc-a71", 3), ("a71", 3),
    ("VIP882036", 4), ("８８２０３６", 4), ("house", 5), ("5000", 5),
])
def test_a_short_query_finds_its_text_first(query, place):
    assert Bm25(TEXTS).search(query, 3)[0][0] == place


def test_word_forms_meet():
    assert stem("houses") == stem("house") and stem("cities") == stem("city")
    assert stem("planned") == stem("plan") and stem("hiking's") == "hiking"
    assert "class" in terms("class") and terms("5,000") == ["5000"]


def test_stop_words_can_be_left_out_of_a_query_but_never_all_of_it():
    bm25 = Bm25(["what is the matter", "tea"], skip_stop_words=True)
    assert bm25.search("what is the tea", 5)[0][0] == 1
    assert bm25.search("what is the", 5)[0][0] == 0


@given(st.lists(st.text("abc 猫狗鱼", min_size=1, max_size=12), min_size=1, max_size=12),
       st.text("abc 猫狗鱼", min_size=1, max_size=6), st.integers(0, 2**20))
@settings(max_examples=100, deadline=None)
def test_an_index_that_grew_and_shrank_equals_one_built_at_once(documents, query, seed):
    grown = Bm25()
    noise = ["猫 abc", "c c c"]
    for document in [*noise, *documents]:
        grown.add(document)
    for number in (0, 1):
        grown.remove(number)
    position = random.Random(seed).randrange(len(documents))
    grown.replace(2 + position, "狗")
    documents = [*documents[:position], "狗", *documents[position + 1 :]]
    at_once = Bm25(documents).search(query, 20)
    assert [(n - 2, pytest.approx(s)) for n, s in grown.search(query, 20)] == at_once


def test_only_allowed_documents_are_returned_and_the_cut_comes_after():
    bm25 = Bm25(["budget one", "budget two", "budget three budget"])
    assert [n for n, _ in bm25.search("budget", 1, allowed={0, 1})] == [0]


def test_coverage_is_the_share_of_meaning_that_a_document_holds():
    bm25 = Bm25(TEXTS)
    assert bm25.coverage("我的代号是什么？", TEXTS[0]) > 0.6
    assert bm25.coverage("我的代号是什么？", TEXTS[1]) == 0
    assert bm25.coverage("的", TEXTS[0]) == 0


def test_fusion_prefers_what_two_routes_found():
    halved = reciprocal_rank([["a"], ["a", "b"]], k=60, weights=[1.0, 0.5])
    assert halved == {"a": 1.5 / 61, "b": 0.5 / 62}
    fused = reciprocal_rank([["a", "b"], ["b", "c"]], k=60)
    assert max(fused, key=fused.__getitem__) == "b"
    assert fused["a"] == 1 / 61


def test_cosine_search_filters_before_the_cut():
    matrix = np.eye(3, dtype=np.float32)
    query = np.array([0.9, 0.3, 0.1], dtype=np.float32)
    allowed = np.array([False, True, True])
    assert [row for row, _ in top_cosine(matrix, query, 1, allowed)] == [1]


def test_overlap_is_symmetric_and_bounded():
    assert overlap({"a"}, {"a"}) == 1 and overlap(set(), {"a"}) == 0
