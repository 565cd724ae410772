import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from memory_runtime import Candidate, Memory, SchemaError, Scope, State, StoreError, Turn
from memory_runtime.sqlite import SqliteStore
from memory_runtime.store import MIGRATIONS
from tests.memory_runtime.stand_ins import Clock, HashEmbedder, TurnEncoder, said, settings

USER = Scope("u1")
ROOT = Path(__file__).parents[2]


def memory(path=":memory:", **parts) -> Memory:
    parts.setdefault("encoder", TurnEncoder())
    parts.setdefault("embedder", HashEmbedder())
    parts.setdefault("config", settings())
    parts.setdefault("clock", Clock())
    return Memory(path, **parts)


def texts(held: Memory, scope: Scope = USER) -> list[str]:
    return [m.candidate.text for m in held.get_all(scope)]


# --- scopes ---


NAMES = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\x00"),
                min_size=1, max_size=6).filter(str.strip)


@given(st.lists(st.tuples(NAMES, NAMES), min_size=2, max_size=5, unique=True))
@hypothesis_settings(max_examples=25, deadline=None,
                     suppress_health_check=[HealthCheck.too_slow])
def test_no_scope_ever_sees_another(pairs):
    held = memory()
    scopes = [Scope(user=user, tenant=tenant) for tenant, user in pairs]
    for n, scope in enumerate(scopes):
        held.add(said(f"My locker PIN is {1000 + n}."), scope=scope)
        held.flush(scope)
    for n, scope in enumerate(scopes):
        own = f"My locker PIN is {1000 + n}."
        assert texts(held, scope) == [own]
        found = held.search("locker PIN", scope, 10, include_turns=True, include_superseded=True)
        assert [m.candidate.text for m in found.memories] == [own]
        assert [hit.turn.text for hit in found.turns] == [own]
        assert held.answer("What is my locker PIN?", scope).memories[0].candidate.text == own
    held.close()


@pytest.mark.parametrize("other", ["lin1", "LIN", "li_", "li%", "l*n", "李四", "nobody"])
def test_names_that_look_like_patterns_match_only_themselves(other):
    held = memory()
    held.add(said("My locker PIN is 100."), scope=Scope("lin"))
    held.flush()
    assert held.search("locker PIN", Scope(other)).hits == ()


@pytest.mark.parametrize("call", [
    lambda m: m.search("x", None), lambda m: m.add([], scope=None), lambda m: m.get_all("u1"),
    lambda m: m.answer("x", None), lambda m: m.stats(None), lambda m: m.forget(None, session="s"),
    lambda m: m.search("x", Scope("")), lambda m: m.search("x", Scope("  ")),
])
def test_a_call_without_a_scope_is_refused(call):
    with pytest.raises(SchemaError):
        call(memory())


# --- adding ---


def test_the_same_call_again_changes_nothing():
    held = memory()
    turns = said("My shoe size is 43.", "My dentist is Dr Okafor.", "我的车停在B2层37号。")
    for _ in range(3):
        held.add(turns, scope=USER)
    held.flush(USER)
    held.add(turns, scope=USER)
    held.flush(USER)
    assert len(texts(held)) == 3
    assert held.add(turns, scope=USER).duplicates == 3


def test_a_client_key_makes_turns_without_ids_repeatable_and_without_one_they_are_not():
    held = memory()
    turn = Turn("", "user", "yes")
    assert held.add([turn], scope=USER, key="call-1").turn_ids
    assert held.add([turn], scope=USER, key="call-1").turn_ids == ()
    assert held.add([turn], scope=USER, key="call-2").turn_ids
    clock = Clock()
    live = memory(clock=clock)
    live.add([turn], scope=USER)
    clock.forward(60)
    live.add([turn], scope=USER)
    assert live.stats(USER).turns == 2


def test_one_turn_id_in_two_sessions_names_two_turns():
    held = memory()
    for session in ("a", "b"):
        held.add([Turn("t1", "user", f"Session {session} is about tea.", "user",
                       "2026-03-01T09:00:00Z", session)], scope=USER)
    held.flush(USER)
    evidence = [m.candidate.evidence for m in held.get_all(USER)]
    assert len(set(evidence)) == 2
    assert {held.turns(USER, ids)[0].session for ids in evidence} == {"a", "b"}


def test_what_no_store_takes_is_removed_and_counted():
    held = memory()
    added = held.add(said("门牌号\x00是 12-304。", "我女儿的小名是👩‍👧小满🎉。",
                          "快递放在\ud83d柜子里。"), scope=USER)
    held.flush(USER)
    assert added.cleaned == 2 and held.stats(USER).counters["cleaned"] == 2
    assert texts(held) == ["门牌号是 12-304。", "我女儿的小名是👩‍👧小满🎉。", "快递放在柜子里。"]
    assert "12-304" in held.search("门牌号", USER).memories[0].candidate.text


def test_an_open_session_keeps_its_tail_until_it_is_idle():
    clock, encoder = Clock(), TurnEncoder()
    held = memory(clock=clock, encoder=encoder)
    held.add(said(*[f"Fact number {n} is about item {n}" for n in range(20)]), scope=USER)
    waiting = held.stats(USER).pending
    assert 0 < waiting < 20
    clock.forward(61)
    held.add(said("Another session begins", session="s2"), scope=USER)
    assert held.stats(USER).pending == 1
    assert held.flush(USER).pending == 0
    assert sum(len(window.turns) for window in encoder.windows) == 21


def test_the_first_window_of_later_work_sees_what_came_before_as_context():
    encoder = TurnEncoder()
    held = memory(encoder=encoder)
    held.add(said("My cat is called Miso"), scope=USER)
    held.flush(USER)
    held.add(said("She is four years old", at="2026-03-01T09:05:00+08:00"), scope=USER)
    held.flush(USER)
    assert [t.text for t in encoder.windows[1].context] == ["My cat is called Miso"]
    assert encoder.windows[0].context == ()


def test_an_ungrounded_candidate_is_dropped_and_counted():
    held = memory(encoder=TurnEncoder(lambda c, t: replace(c, text=c.text.replace("3", "8"))))
    held.add(said("我的预算是3万元", "我喜欢喝茶"), scope=USER)
    held.flush(USER)
    assert texts(held) == ["我喜欢喝茶"]
    assert held.stats(USER).counters["ungrounded"] == 1


def test_a_directive_that_the_encoder_missed_is_kept_in_the_speakers_words():
    held = memory(encoder=TurnEncoder(lambda c, t: None))
    held.add(said("Whether this ships by Friday matters a lot to me.", "Nice weather."), scope=USER)
    held.flush(USER)
    (kept,) = held.get_all(USER)
    assert "matters a lot" in kept.candidate.text and kept.candidate.explicit


# --- failing models and crashes ---


def test_turns_survive_a_failing_encoder_and_are_seen_in_stats():
    encoder = TurnEncoder(failures=3)
    held = memory(encoder=encoder)
    held.add(said("My bike is a green tandem."), scope=USER)
    done = held.flush(USER)
    assert done.pending == 1 and len(done.errors) == 2
    stats = held.stats(USER)
    assert (stats.pending, stats.failing) == (1, 1) and "encoder is down" in stats.last_error
    assert held.flush(USER).pending == 0
    assert texts(held) == ["My bike is a green tandem."]
    assert held.stats(USER).failing == 0


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_failing_embedder_neither_loses_nor_doubles(call):
    held = memory(embedder=HashEmbedder(fail_on=call))
    turns = said("My shoe size is 43.", "My dentist is Dr Okafor.", "我的车停在B2层37号。")
    for _ in range(2):
        held.add(turns, scope=USER)
        held.flush(USER)
    assert len(texts(held)) == 3


def test_a_window_is_stored_wholly_or_not_at_all():
    held = memory()
    store = held._store
    real, calls = store.put, []

    def put(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("disk full")
        real(*arguments)

    store.put = put
    held.add(said("My shoe size is 43.", "My dentist is Dr Okafor."), scope=USER)
    with pytest.raises(RuntimeError):
        held.flush(USER)
    assert texts(held) == [] and held.stats(USER).pending == 2
    held.flush(USER)
    assert len(texts(held)) == 2
    assert len(held.search("shoe size dentist", USER).hits) == 2


CHILD = """
import sys, time
from memory_runtime import Memory, Scope
from tests.memory_runtime.stand_ins import HashEmbedder, TurnEncoder, said, settings

path, where = sys.argv[1:]

def stop():
    print("here", flush=True)
    time.sleep(60)

encoder = TurnEncoder()
if where == "encoding":
    encoder.extract = lambda windows: stop()
memory = Memory(path, encoder=encoder, embedder=HashEmbedder(), config=settings())
memory.add(said("My spare key is with Odile."), scope=Scope("u1"))
if where == "added":
    stop()
if where == "storing":
    real = memory._store.put
    memory._store.put = lambda *a: (real(*a), stop())
memory.flush(Scope("u1"))
"""


@pytest.mark.parametrize("where", ["added", "encoding", "storing"])
def test_kill_minus_nine_loses_nothing_and_doubles_nothing(tmp_path, where):
    path = tmp_path / "m.sqlite"
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path), where], stdout=subprocess.PIPE, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert child.stdout.readline() == b"here\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    for _ in range(2):
        with memory(path) as held:
            held.add(said("My spare key is with Odile."), scope=USER)
            held.flush()
            assert texts(held) == ["My spare key is with Odile."]


WRITER = """
import sys
from memory_runtime import Memory, Scope
from tests.memory_runtime.stand_ins import HashEmbedder, TurnEncoder, said, settings

path, name = sys.argv[1:]
with Memory(path, encoder=TurnEncoder(), embedder=HashEmbedder(), config=settings()) as memory:
    for n in range(10):
        memory.add(said(f"Locker code {name}-{n} is {4000 + n}.", session=f"s{n}"),
                   scope=Scope(name))
        memory.flush(Scope(name))
        memory.add(said(f"Shared shelf {name}-{n} is {7000 + n}.", session=f"{name}{n}"),
                   scope=Scope("all"))
        memory.flush(Scope("all"))
"""


def test_processes_write_one_new_file_at_once_without_error(tmp_path):
    path = tmp_path / "m.sqlite"
    names = ["p1", "p2", "p3"]
    children = [subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), name], cwd=ROOT, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)}) for name in names]
    failures = [child.communicate()[1].decode() for child in children]
    assert failures == ["", "", ""]
    with memory(path) as held:
        assert [len(texts(held, Scope(name))) for name in names] == [10, 10, 10]
        assert len(texts(held, Scope("all"))) == 30
    store = SqliteStore(path)
    assert store.check() == "ok"
    store.close()


def test_another_process_view_is_current(tmp_path):
    path = tmp_path / "m.sqlite"
    with memory(path) as one, memory(path) as two:
        assert two.search("spare key", USER).hits == ()
        one.add(said("My spare key is with Odile."), scope=USER)
        one.flush(USER)
        assert len(two.search("spare key", USER).hits) == 1
        one.forget(USER, everything=True)
        assert two.search("spare key", USER).hits == ()


def test_the_thread_encodes_behind_the_callers_back(tmp_path):
    config = settings(ingest={"background": True, "idle_s": 0.0})
    with Memory(tmp_path / "m.sqlite", encoder=TurnEncoder(), embedder=HashEmbedder(),
                config=config) as held:
        held.add(said("My bike is a green tandem."), scope=USER)
        deadline = time.monotonic() + 20
        while held.stats(USER).pending and time.monotonic() < deadline:
            time.sleep(0.01)
        assert texts(held) == ["My bike is a green tandem."]


def test_threads_may_share_one_memory():
    held, errors = memory(), []

    def work(name):
        try:
            for n in range(10):
                held.add(said(f"Code {name}-{n} is {3000 + n}.", session=f"{name}{n}"), scope=USER)
                held.flush(USER)
                held.search(f"code {name}", USER)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(f"w{n}",)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(texts(held)) == 30


def test_without_an_encoder_turns_wait():
    held = memory(encoder=None)
    held.add(said("My bike is a green tandem."), scope=USER)
    assert held.flush(USER).pending == 1


# --- reading and forgetting ---


def test_get_and_history_follow_one_memory():
    held = memory()
    held.add(said("My bike is a green tandem."), scope=USER)
    held.flush(USER)
    (item,) = held.get_all(USER)
    assert held.get(item.id, USER) == item and held.get(item.id, Scope("u2")) is None
    assert [event.event for event in held.history(item.id, USER)] == ["added"]
    assert held.history(item.id, Scope("u2")) == []


def test_vectors_of_another_embedder_are_not_compared(tmp_path):
    path = tmp_path / "m.sqlite"
    with memory(path) as held:
        held.insert([Candidate("My bike is a green tandem", ())], scope=USER)
    config = settings(store={"embedder": "other"})
    with memory(path, config=config) as held:
        assert held.stats(USER).stale_vectors == 1
        assert held.search("green tandem", USER, routes=("vector",)).hits == ()
        assert len(held.search("green tandem", USER).hits) == 1


def bytes_on_disk(path: Path) -> bytes:
    return b"".join(p.read_bytes() for p in path.parent.iterdir())


def test_a_forgotten_memory_is_gone_from_every_table_and_from_the_file(tmp_path):
    path = tmp_path / "m.sqlite"
    held = memory(path, encoder=TurnEncoder(lambda c, t: replace(c, attribute="shoe size")))
    held.add(said("My shoe size is 43 zebra."), scope=USER)
    held.flush(USER)
    held.add(said("My shoe size is 44 zebra.", at="2026-03-05T09:00:00+08:00", session="s2"),
             scope=USER)
    held.flush(USER)
    (current,) = held.get_all(USER)
    assert b"zebra" in bytes_on_disk(path)
    done = held.forget(USER, memory_id=current.id)
    assert (done.memories, done.turns, done.bytes_removed) == (2, 2, True)
    assert held.get_all(USER, states=list(State)) == []
    assert held.search("shoe size zebra", USER, include_turns=True).turns == ()
    assert held.history(current.id, USER) == []
    assert b"zebra" not in bytes_on_disk(path)
    held.add(said("My shoe size is 43 zebra."), scope=USER)
    assert held.flush(USER).windows == 0
    held.close()


def test_forgetting_turns_takes_what_rests_on_them_alone():
    held = memory()
    held.add(said("My bike is a green tandem.", "我喜欢喝茶", session="a"), scope=USER)
    held.add(said("My bike is a green tandem.", at="2026-03-02T09:00:00+08:00", session="b"),
             scope=USER)
    held.flush(USER)
    assert len(texts(held)) == 2
    held.forget(USER, session="a")
    assert texts(held) == ["My bike is a green tandem."]
    held.forget(USER, session="b")
    assert texts(held) == []


def test_forgetting_reaches_the_journal_and_leaves_others_alone():
    held = memory(encoder=TurnEncoder(failures=99))
    for user in ("u1", "u2"):
        held.add(said("My bike is a green tandem."), scope=Scope(user))
    assert held.forget(USER, everything=True).journal == 1
    assert held.stats(USER).turns == 0 and held.stats(Scope("u2")).pending == 1


def test_forget_names_exactly_one_thing():
    for arguments in ({}, {"session": "a", "everything": True}):
        with pytest.raises(SchemaError, match="exactly one"):
            memory().forget(USER, **arguments)


# --- the file ---


def test_every_statement_names_the_partition_key():
    held, seen = memory(encoder=TurnEncoder(failures=1)), []
    held._store._db.set_trace_callback(seen.append)
    held.add(said("My shoe size is 43.", "My shoe size is 43.", "Remember: no peanuts"),
             scope=USER)
    held.flush(USER)
    held.insert([Candidate("My bike is green", ())], scope=USER)
    (first, *_) = held.get_all(USER)
    held.search("shoe", USER, include_turns=True)
    held.history(first.id, USER)
    held.stats(USER)
    held.forget(USER, memory_id=first.id)
    held.forget(USER, session="s1")
    held.forget(USER, everything=True)
    tables = re.compile(r"\b(?:INTO|FROM|UPDATE|JOIN) (turns|memories|slots|evidence|history|"
                        r"journal|counters|scopes)\b")
    touching = [sql for sql in seen if tables.search(sql)]
    assert len({tables.search(sql)[1] for sql in touching}) == 8
    for sql in touching:
        inserts = "INSERT" in sql and "VALUES ('default', 'u1'" in sql
        assert inserts or "tenant = 'default' AND " in sql, sql
    for statement in MIGRATIONS[0]:
        if statement.startswith("CREATE TABLE"):
            assert 'PRIMARY KEY (tenant, "user"' in statement


def test_a_file_that_is_not_ours_is_refused(tmp_path):
    path = tmp_path / "m.sqlite"
    path.write_bytes(b"this is no database" * 100)
    with pytest.raises(StoreError, match="cannot open"):
        memory(path)


def test_a_file_of_a_newer_library_is_refused(tmp_path):
    path = tmp_path / "m.sqlite"
    store = SqliteStore(path)
    with store.transaction():
        store._db.execute("UPDATE meta SET value = '99' WHERE key = 'schema'")
    store.close()
    with pytest.raises(StoreError, match="upgrade"):
        memory(path)


def test_a_closed_memory_says_so():
    held = memory()
    held.close()
    held.close()
    with pytest.raises(StoreError):
        held.get_all(USER)


def test_importing_the_runtime_loads_no_model_library():
    code = ("import sys, memory_runtime; "
            "sys.exit(bool({'torch', 'transformers', 'yaml'} & set(sys.modules)))")
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
