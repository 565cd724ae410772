"""The runner of the cases: passes what holds, fails what does not, voids what it cannot do."""

from __future__ import annotations

import json

import pytest

from benchmarks.case_product import Product
from benchmarks.cases import judge, main, zones_of
from tests.tiny import encoder_artifact, encoder_base, pair_base


def case(steps, checks, **fields):
    return {"id": "c1", "area": "recall", "core": True, "needs": "runtime", "zh": False,
            "input": {"steps": steps}, "checks": checks, "expected": "", **fields}


def turn(text, at="2026-03-01T10:00:00+00:00", role="user"):
    return {"role": role, "at": at, "text": text}


def say(*texts, user="u1", **fields):
    return {"op": "say", "user": user, "session": "s1", "turns": [turn(t) for t in texts], **fields}


def verdict(steps, checks):
    return judge(case(steps, checks), Product)


def test_what_holds_passes_and_what_does_not_fails():
    steps = [say("My locker code is 4471.", "我喜欢喝茶。"), {"op": "list", "user": "u1"},
             {"op": "recall", "user": "u1", "query": "茶", "k": 3, "only": "lexical"}]
    assert verdict(steps, [{"at": 1, "do": "count", "match": "4471", "min": 1, "max": 1},
                           {"at": 2, "do": "rank", "n": 1, "match": "茶"}]) == ("pass", "")
    outcome, why = verdict(steps, [{"at": 1, "do": "count", "match": "4471", "max": 0}])
    assert outcome == "fail"
    assert "4471" in why


@pytest.mark.parametrize("step", [
    {"op": "tick", "days": 1}, {"op": "levitate"}, {"op": "prompt_seen"},
    {"op": "recall", "user": "u1", "query": "x", "only": "telepathy"},
    {"op": "call", "fn": "fly", "args": []}, {"op": "stub", "part": "reranker"},
    {"op": "stop", "signal": "TERM"}])
def test_what_cannot_be_done_is_void_with_its_reason(step):
    outcome, why = verdict([step], [])
    assert outcome == "void"
    assert why


def test_an_unknown_check_is_void():
    assert verdict([say("x")], [{"at": 0, "do": "levitates"}])[0] == "void"


def test_a_crash_of_the_product_is_a_failure():
    class Broken(Product):
        def list(self, user, *, include_superseded=False):
            raise ZeroDivisionError

    outcome, why = judge(case([{"op": "list", "user": "u1"}], []), Broken)
    assert outcome == "fail"
    assert "ZeroDivisionError" in why


def test_calls_without_a_user_are_refused_by_the_product():
    steps = [{"op": "recall", "query": "pin"}, {"op": "recall", "user": "", "query": "pin"}]
    assert verdict(steps, [{"at": n, "do": "refuses"} for n in (0, 1)]) == ("pass", "")


def test_users_are_kept_apart():
    steps = [{"op": "say_each", "texts": {"a": "My PIN is 100.", "a%": "My PIN is 101."}},
             {"op": "recall_each", "users": ["a", "a%", "nobody"], "query": "PIN", "k": 9}]
    checks = [{"at": 1, "do": "each_only_own"}, {"at": 1, "do": "empty_for", "user": "nobody"}]
    assert verdict(steps, checks) == ("pass", "")


def test_a_failing_model_loses_and_doubles_nothing():
    steps = [{"op": "stub", "part": "encoder", "raises_times": 1},
             {"op": "repeat", "say": say("My shoe size is 43."), "times": 2},
             {"op": "settle"}, {"op": "list", "user": "u1"}]
    assert verdict(steps, [{"at": 3, "do": "count", "match": "43", "min": 1, "max": 1}]
                   ) == ("pass", "")


def test_seeds_are_put_in_with_their_times():
    series = {"text": "desk {n}", "n": [1, 4], "from": "2026-01-01T00:00:00+00:00",
              "step_seconds": 86400}
    steps = [{"op": "seed", "user": "u1", "series": [series]},
             {"op": "recall", "user": "u1", "query": "desk", "k": 9,
              "after": "2026-01-03T00:00:00+00:00"}]
    assert verdict(steps, [{"at": 1, "do": "count", "match": "desk", "min": 2, "max": 2}]
                   ) == ("pass", "")


def test_half_an_emoji_and_nul_do_not_reach_the_store():
    steps = [say("parcel {LONE_SURROGATE}box", "door\x00 12"), {"op": "list", "user": "u1"}]
    checks = [{"at": 1, "do": "all_valid_utf8_no_nul"},
              {"at": 1, "do": "count", "match": "parcel|door", "min": 2}]
    assert verdict(steps, checks) == ("pass", "")


def test_drafts_and_dates_go_through_the_library():
    steps = [{"op": "check_text", "evidence": ["It kept 64%."], "draft": "It kept 66%.",
              "want": "reject"},
             {"op": "call", "fn": "resolve_date", "reference": "2026-12-16T10:00:00+08:00",
              "args": ["后天", "去年最后一个月"]}]
    checks = [{"at": 0, "do": "verdict"},
              {"at": 1, "do": "equal", "to": ["2026-12-18", "2025-12-01/2025-12-31"]}]
    assert verdict(steps, checks) == ("pass", "")


def test_time_zones_of_a_note_are_all_run():
    note = {"op": "note", "text": "Run three times with the server's TZ = UTC, Asia/Shanghai."}
    assert zones_of(case([note], [])) == ["UTC", "Asia/Shanghai"]
    assert zones_of(case([say("x")], [])) == [None]
    outcome, why = verdict([note, {"op": "list", "user": "u"}],
                           [{"at": 1, "do": "count", "match": ".", "min": 1}])
    assert outcome == "fail"
    assert "[UTC]" in why and "[Asia/Shanghai]" in why


@pytest.mark.slow
def test_a_killed_process_and_parallel_writers_lose_nothing():
    killed = [say("My spare key is with Odile.", settle=False),
              {"op": "stop", "signal": "KILL", "after_seconds": 0.1}, {"op": "start"},
              {"op": "settle"}, {"op": "list", "user": "u1"}]
    assert verdict(killed, [{"at": 4, "do": "count", "match": "Odile", "min": 1, "max": 1}]
                   ) == ("pass", "")
    together = [{"op": "parallel", "processes": 2, "says_each": 3, "user": "p{process}",
                 "text": "Code {process}-{i} is {four_digits}.", "readers": 1},
                {"op": "list", "users": ["p1", "p2"]}]
    checks = [{"at": 0, "do": "errors", "equal": 0}, {"at": 1, "do": "total", "equal": 6},
              {"at": 1, "do": "integrity", "equal": "ok"}]
    assert verdict(together, checks) == ("pass", "")


def test_command_reports_pass_fail_and_void(tmp_path):
    rows = [case([say("a")], []),
            case([say("a"), {"op": "list", "user": "u1"}],
                 [{"at": 1, "do": "count", "match": "b", "min": 1}], id="c2"),
            case([], [], id="c3", needs="gpu"), case([], [], id="c4", needs="model")]
    path, out = tmp_path / "cases.jsonl", tmp_path / "out.json"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert main(["--cases", str(path), "--json", str(out)]) == 0
    made = json.loads(out.read_text(encoding="utf-8"))
    assert made["metrics"] == {"passed": 1, "failed": 1, "void": 2}
    assert [item["verdict"] for item in made["items"]] == ["pass", "fail", "void", "void"]
    assert all(item["why"] for item in made["items"] if item["verdict"] != "pass")
    assert made["by"]["needs runtime"] == {"passed": 1, "failed": 1, "void": 0}


def test_cases_that_need_a_model_run_on_an_artifact(tmp_path):
    base, e5 = encoder_base(tmp_path / "lm"), pair_base(tmp_path / "e5")
    artifact = encoder_artifact(tmp_path / "artifact", base)
    rows = [case([say("hello"), {"op": "list", "user": "u1"}],
                 [{"at": 1, "do": "count", "match": "nothing of this", "max": 0}], needs="model")]
    path, out = tmp_path / "cases.jsonl", tmp_path / "out.json"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert main(["--cases", str(path), "--artifact", str(artifact), "--base", str(base), "--e5",
                 str(e5), "--json", str(out)]) == 0
    made = json.loads(out.read_text(encoding="utf-8"))
    assert made["metrics"]["passed"] == 1
    assert set(made["meta"]["artifacts"]) == {"encoder", "embedder"}


def test_an_unbuilt_backend_is_refused(tmp_path):
    path = tmp_path / "cases.jsonl"
    path.write_text(json.dumps(case([], [])), encoding="utf-8")
    assert main(["--cases", str(path), "--backend", "postgres", "--json",
                 str(tmp_path / "o.json")]) == 2
