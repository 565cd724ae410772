import io

import pytest

from memory_runtime import Candidate, Memory, MemoryConfig, Scope
from memory_runtime.__main__ import main


@pytest.fixture
def db(tmp_path):
    path = tmp_path / "m.sqlite"
    with Memory(path, config=MemoryConfig()) as memory:
        memory.insert([Candidate("The user's bike is a green tandem.", ())], scope=Scope("u1"))
    return str(path)


def run(capsys, *arguments):
    status = main(list(arguments))
    streams = capsys.readouterr()
    return status, streams.out, streams.err


def test_search_answer_and_list_read_the_store(db, capsys):
    status, out, _ = run(capsys, "search", "green tandem", "--db", db, "--user", "u1")
    assert status == 0 and "green tandem" in out
    assert "green tandem" in run(capsys, "answer", "What colour is the bike, green or red?",
                                 "--db", db, "--user", "u1")[1]
    assert "[episodic/fact]" in run(capsys, "list", "--db", db, "--user", "u1")[1]
    assert run(capsys, "list", "--db", db, "--user", "u2")[1] == ""


def test_add_without_models_keeps_turns_waiting(db, capsys, monkeypatch):
    status, out, _ = run(capsys, "add", "I moved to Tartu.", "--db", db, "--user", "u1")
    assert status == 0 and "1 turns added" in out and "1 turns wait" in out
    monkeypatch.setattr("sys.stdin", io.StringIO("one line\n\nanother line\n"))
    assert "2 turns added" in run(capsys, "add", "--db", db, "--user", "u1")[1]


def test_faults_are_told_on_stderr_with_a_status(db, capsys):
    status, _, err = run(capsys, "list", "--db", db, "--user", " ")
    assert status == 2 and "scope.user" in err
    status, _, err = run(capsys, "add", "x", "--db", db, "--user", "u1", "--at", "yesterday")
    assert status == 2 and "ISO" in err
    status, _, err = run(capsys, "search", "x", "--db", db, "--user", "u1", "--url",
                         "http://127.0.0.1:9")
    assert status == 2 and "is the service running" in err
