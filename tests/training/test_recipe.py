import json
from pathlib import Path

import pytest

from training import recipe
from training.evaluate import EncoderGate, RerankerGate, encoder_checks, reranker_checks
from training.recipe import Step, run_step


def make_step(tmp_path, body, *, resumes=False):
    module = tmp_path / "step_under_test.py"
    module.write_text(body)
    return Step("made", ("step_under_test",), (tmp_path / "in.txt",), (tmp_path / "out.txt",),
                resumes=resumes)


APPEND = "open('out.txt', 'a').write(open('in.txt').read())"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.txt").write_text("x")
    return tmp_path


def test_a_finished_step_runs_again_only_when_its_inputs_change(here):
    step = make_step(here, APPEND)
    for _ in range(2):
        assert run_step(step, here / "stamps") == 0
    assert (here / "out.txt").read_text() == "x"
    (here / "in.txt").write_text("y")
    run_step(step, here / "stamps")
    assert (here / "out.txt").read_text() == "y"


def test_a_step_whose_output_was_removed_runs_again(here):
    step = make_step(here, APPEND)
    run_step(step, here / "stamps")
    (here / "out.txt").unlink()
    run_step(step, here / "stamps")
    assert (here / "out.txt").read_text() == "x"


@pytest.mark.parametrize("resumes, left", [(True, "xx"), (False, "x")])
def test_only_a_resuming_step_keeps_its_half_made_output(here, resumes, left):
    fails_once = (f"{APPEND}\nimport os, sys\n"
                  "if not os.path.exists('ok'): open('ok', 'w'); sys.exit(3)")
    step = make_step(here, fails_once, resumes=resumes)
    assert run_step(step, here / "stamps") == 3
    assert run_step(step, here / "stamps") == 0
    assert (here / "out.txt").read_text() == left


def test_a_step_that_rewrites_a_file_of_another_step_finds_it_and_runs_again_when_it_is_back(here):
    rewrite = "text = open('out.txt').read(); open('out.txt', 'w').write(text + 'c')"
    step = make_step(here, rewrite, resumes=True)
    for _ in range(2):
        (here / "out.txt").write_text("1")
        assert run_step(step, here / "stamps") == 0
        assert run_step(step, here / "stamps") == 0
        assert (here / "out.txt").read_text() == "1c"


def test_the_recipe_names_commands_that_exist():
    root = Path(__file__).parents[2]
    for step in recipe.steps(str(root / "configs/encoder_cpu.yaml"),
                             str(root / "configs/reranker_cpu.yaml")):
        assert (root / (step.command[0].replace(".", "/") + ".py")).exists(), step.name


def report(tmp_path, predicted, *, f1=0.5, invalid=0):
    """Two windows of four turns, the second with nothing to store; `predicted` stores in each."""
    rows = []
    for n in range(2):
        turns = [{"id": f"t{i}", "speaker": "user", "text": "x"} for i in range(4)]
        gold = [{"text": "g", "evidence": ["t0"], "layer": "core", "kind": "fact"}] * (n == 0)
        rows.append({"id": f"w{n}", "turns": turns, "gold": gold})
    path = tmp_path / "w.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    items = [{"id": f"w{n}/p{i}", "verdict": "extra"} for n in range(2)
             for i in range(predicted[n])]
    return {"metrics": {"f1": f1, "invalid": invalid}, "items": items,
            "meta": {"options": {"windows": [str(path)], "limit": None}}}


@pytest.mark.parametrize("predicted, missed", [
    ((0, 0), "stores per window with gold"),
    ((4, 4), "stores per turn"),
    ((1, 0), None),
])
def test_both_poles_of_selection_miss_the_gate(tmp_path, predicted, missed):
    checks = encoder_checks(EncoderGate(), report(tmp_path, predicted), None)
    assert {c.name for c in checks if not c.passed} == ({missed} if missed else set())


def test_an_encoder_below_its_prompted_base_misses_the_gate(tmp_path):
    tuned, prompt = report(tmp_path, (1, 0), f1=0.3), report(tmp_path, (1, 0), f1=0.31)
    checks = encoder_checks(EncoderGate(), tuned, prompt)
    assert [c.name for c in checks if not c.passed] == ["encoder f1 over prompted base"]


def test_a_reranker_below_fusion_misses_the_gate_on_that_set():
    by = {"a/rrf": {"mrr": 0.5}, "a/ours": {"mrr": 0.6}, "b/rrf": {"mrr": 0.5},
          "b/ours": {"mrr": 0.4}, "a/ours/x": {"mrr": 0.1}}
    checks = reranker_checks(RerankerGate(), {"by": by})
    assert [(c.name, c.passed) for c in checks] == [("a mrr over rrf", True),
                                                    ("b mrr over rrf", False)]
