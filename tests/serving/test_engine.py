"""The decoding and scoring engine on a tiny random model."""

import copy
import dataclasses
import json

import numpy as np
import pytest
import torch
from transformers import Qwen2ForCausalLM

from memory_runtime.errors import SchemaError
from memory_runtime.prompt import (
    Parsed,
    messages,
    parse,
    parse_prompt_answer,
    prompt_ids,
    quote_grammar,
    quotes_sha256,
    score_line,
    wire_grammar,
)
from memory_runtime.quotes import language_of, quotations
from memory_runtime.schema import Candidate, Turn, Window
from serving.artifact import apply_map
from serving.engine.constrained import Grammars
from serving.engine.decode import Row, decode
from serving.engine.extractor import Extractor, Limits, without_repeats
from serving.engine.packing import common_prefix, plan_batches
from serving.engine.prefill import Prefiller
from serving.engine.score import branch_of, score_branches
from tests import tiny


@pytest.fixture(scope="module")
def plain(encoder_base):
    """The same weights under transformers' own attention."""
    return Qwen2ForCausalLM.from_pretrained(
        encoder_base, dtype=torch.float32, attn_implementation="sdpa").eval()


def greedy(model, ids, num):
    """transformers' own greedy generation, free text, stop token not removed."""
    out = model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        max_new_tokens=num, do_sample=False, eos_token_id=[2, 0], pad_token_id=0)
    return out[0, len(ids):].tolist()


def test_prefill_equals_plain_forward_with_and_without_shared_prefix(base_lm, plain):
    prompts = [prompt_ids(base_lm.tokenizer, w) for w in tiny.windows()[:4]]
    probe = prompt_ids(base_lm.tokenizer, Window("p", (Turn("t", "x", "?"),)))
    prefiller = Prefiller(base_lm)
    expected = [plain.model(torch.tensor([p])).last_hidden_state[0, -1] for p in prompts]
    for shown in (probe, None):
        state = prefiller.prefill(prompts, probe=shown)
        torch.testing.assert_close(state.last_hidden, torch.stack(expected), atol=1e-4, rtol=1e-4)
    assert state.num_prefix > 100
    alone = prefiller.prefill(prompts[:1])
    assert alone.num_prefix == 0
    torch.testing.assert_close(alone.last_hidden[0], expected[0], atol=1e-4, rtol=1e-4)


def test_free_decoding_equals_generate_of_transformers(base_lm, plain):
    prompts = [prompt_ids(base_lm.tokenizer, w) for w in tiny.windows()[:5]]
    rows = [Row(None, 12 + n) for n in range(5)]
    state = Prefiller(base_lm).prefill(prompts, room=20)
    decode(base_lm, state, rows)
    for n, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        expected = [i for i in greedy(plain, prompt, 12 + n) if i not in (2, 0)]
        assert row.ids == expected


def test_text_is_the_same_alone_and_in_a_batch(tuned):
    windows = tiny.windows()
    together = tuned.extract(windows)
    for window, extraction in zip(windows, together, strict=True):
        alone = tuned.extract([window])[0]
        assert alone.raw == extraction.raw
        for a, b in zip(alone.candidates, extraction.candidates, strict=True):
            assert a.text == b.text
            assert a.keep == pytest.approx(b.keep, abs=1e-5)


def test_kept_prefixes_do_not_grow_without_end(base_lm):
    prefiller = Prefiller(base_lm)
    for n in range(6):
        shared = list(range(3 + n, 60 + n))
        prefiller.prefill([[*shared, 5], [*shared, 6]])
    assert len(prefiller._prefixes) == 2


def test_grammar_output_always_parses(base_lm):
    """A random model writes noise; under the grammar every whole line is still a candidate."""
    windows = []
    for n in range(3):
        windows += [dataclasses.replace(w, id=f"{w.id}-{n}", goal="goal " * n)
                    for w in tiny.windows()]
    # A model that will not stop by itself is cut; lower the limit on text so that lines end.
    extractor = Extractor(base_lm, "base", limits=Limits(max_new_tokens=150, max_rows=24))
    finished = 0
    for window, extraction in zip(windows, extractor.extract(windows), strict=True):
        assert extraction.invalid == 0
        parsed = parse(extraction.raw, window)
        assert parsed.candidates == extraction.candidates
        assert parsed.truncated or not extraction.truncated
        finished += len(extraction.candidates)
    assert len(windows) >= 20 and finished > 0


def test_an_encoder_that_quotes_writes_nothing_but_quotations(tuned):
    """Even with random weights: no text, number or turn that the dialogue does not have."""
    manifest = tuned.artifact.manifest | {"quotes_sha256": quotes_sha256()}
    calibration = tuned.artifact.calibration | {"empty_bias": 1e6, "keep_floor": 0.0}
    artifact = dataclasses.replace(tuned.artifact, manifest=manifest, calibration=calibration)
    extractor = Extractor(tuned.lm, "tuned", artifact, limits=Limits(max_new_tokens=250))
    windows = [w for w in tiny.windows() if quotations(w.turns[0], language_of(w))]
    num = 0
    for window, extraction in zip(windows, extractor.extract(windows), strict=True):
        assert extraction.invalid == 0
        said = {turn.id: quotations(turn, language_of(window)) for turn in window.turns}
        for candidate in extraction.candidates:
            assert len(candidate.evidence) == 1
            assert candidate.text in said[candidate.evidence[0]]
        num += len(extraction.candidates)
    assert num >= 3


@pytest.mark.parametrize("text", [
    "，".join(f"第{n}个苹果" for n in range(5000)), "a," * 5000, "。 " * 3000, "😀, 😅; " * 2000,
    "x" * 20000, " \n\t ", "\\\"\\n,\x01\x1f,<|im_end|>, \ud83d,ok", "\u2028,\u0085,\r\n,ok",
])
def test_no_turn_is_too_odd_for_the_grammar_of_quotations(base_lm, text):
    window = Window("w", tuple(Turn(f"t{n}", "user", text) for n in range(3)))
    matcher, ids = Grammars(base_lm).lark(quote_grammar(window)), []
    rng = np.random.default_rng(0)
    while not matcher.is_done and len(ids) < 300:
        allowed = matcher.allowed().numpy().nonzero()[0]
        token = matcher.choose(torch.zeros(base_lm.num_rows), int(rng.choice(allowed)))
        if token in base_lm.stop_ids:
            break
        ids.append(token)
    assert parse(base_lm.tokenizer.decode(ids), window).invalid == 0


def test_repeats_of_a_candidate_are_dropped_and_the_first_stays():
    first, other = Candidate("a", ("t1",), keep=0.2), Candidate("a", ("t1",), subject="Ana")
    again = Candidate("a", ("t2",), keep=0.9)
    left = without_repeats(Parsed([first, other, again], 1, True, [0, 1, 3]))
    assert left == Parsed([first, other], 1, True, [0, 1])


def test_random_walks_through_the_wire_grammar_parse(base_lm):
    """Sampled uniformly from what the mask allows, not only what one model likes."""
    grammars, rng = Grammars(base_lm), np.random.default_rng(0)
    window = tiny.windows()[0]
    whole = 0
    for _ in range(25):
        matcher, ids = grammars.lark(wire_grammar(len(window.turns))), []
        while not matcher.is_done and len(ids) < 400:
            allowed = matcher.allowed().numpy().nonzero()[0]
            # Quotes end a string; prefer them now and then, or texts run to the limit.
            quotes = [i for i in allowed if '"' in base_lm.tokenizer.decode([int(i)])]
            pool = quotes if quotes and rng.random() < 0.5 else allowed
            token = int(rng.choice(pool))
            matcher.choose(torch.zeros(base_lm.num_rows), token)
            if token in base_lm.stop_ids:
                break
            ids.append(token)
        parsed = parse(base_lm.tokenizer.decode(ids), window)
        assert parsed.invalid == 0
        whole += len(parsed.candidates)
    assert whole > 20


def test_guess_inside_the_grammar_is_what_the_mask_would_choose(base_lm):
    grammars, generator = Grammars(base_lm), torch.Generator().manual_seed(3)
    fast, slow = (grammars.lark(wire_grammar(2)) for _ in range(2))
    for _ in range(60):
        logits = torch.randn(base_lm.num_rows, generator=generator)
        masked = int(logits.masked_fill(~slow.allowed(), -torch.inf).argmax())
        assert fast.choose(logits, int(logits.argmax())) == masked
        assert slow.choose(logits, masked) == masked
        if masked in base_lm.stop_ids:
            break


def test_prompt_mode_answers_are_the_schema_s_json(base_lm):
    windows = tiny.windows()
    few_shot = [(windows[0], tiny.candidates(windows[0])), (windows[1], [])]
    extractor = Extractor(base_lm, "prompt", few_shot=few_shot, limits=Limits(max_new_tokens=80))
    for window, extraction in zip(windows, extractor.extract(windows), strict=True):
        assert extraction.raw.startswith('{"memories":[')
        assert extraction.invalid == 0
        assert parse_prompt_answer(extraction.raw, window).candidates == extraction.candidates
        if not extraction.truncated:
            json.loads(extraction.raw)


def test_generate_under_a_schema_is_json_and_free_text_stops_at_the_limit(base_lm):
    extractor = Extractor(base_lm, "base")
    chat = [{"role": "user", "content": "Say yes."}]
    schema = {"type": "object", "properties": {"answer": {"enum": ["yes", "no"]}},
              "required": ["answer"], "additionalProperties": False}
    assert json.loads(extractor.generate(chat, schema=schema))["answer"] in ("yes", "no")
    text = extractor.generate(chat, max_tokens=7)
    assert len(base_lm.tokenizer.encode(text, add_special_tokens=False)) <= 7 * 3
    with pytest.raises(ValueError, match="does not compile"):
        extractor.generate(chat, schema={"type": "nonsense"})


def test_packed_scores_equal_independent_ones(tuned):
    """Against plain one-by-one forward passes of the merged model, without any of our attention."""
    windows = tiny.windows()
    counts = (4, 1, 7, 2, 3, 5, 2, 1)
    pairs = [(w, tiny.candidates(w, num=n)) for w, n in zip(windows, counts, strict=True)]
    packed = tuned.expected_digits(pairs)
    model = Qwen2ForCausalLM(copy.deepcopy(tuned.lm.model.config)).eval()
    model.load_state_dict(tuned.lm.model.state_dict())
    model.set_attn_implementation("sdpa")
    try:
        for (window, candidates), values in zip(pairs, packed, strict=True):
            prompt = prompt_ids(tuned.lm.tokenizer, window)
            for candidate, row in zip(candidates, values, strict=True):
                np.testing.assert_allclose(
                    row, _independent(model, tuned.lm, prompt, score_line(candidate, window)),
                    atol=1e-5)
    finally:
        model.set_attn_implementation(tuned.lm.model.config._attn_implementation)


def _independent(model, lm, prompt, line):
    branch = branch_of(lm.tokenizer, line)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *branch.ids]])).logits[0].float()
    at = len(prompt) + branch.first_digit - 1
    digits = logits[at : at + 6][:, lm.digit_ids].softmax(-1)
    return (digits @ (torch.arange(10) / 9)).numpy()


def test_branch_is_tokenised_in_the_pieces_of_training(base_lm):
    window = tiny.windows()[1]
    line = score_line(tiny.candidates(window)[0], window)
    branch = branch_of(base_lm.tokenizer, line)
    assert len(branch.ids) == branch.first_digit + 6
    assert base_lm.tokenizer.decode(branch.ids[branch.first_digit:]) == line.digits
    assert base_lm.tokenizer.decode(branch.ids[: branch.first_digit]) == line.head


def test_scores_do_not_depend_on_the_scoring_budget(tuned):
    pairs = [(w, tiny.candidates(w, num=3)) for w in tiny.windows()[:4]]
    small = dataclasses.replace(tuned.limits, max_score_tokens=64, max_rows=2)
    narrow = Extractor(tuned.lm, "tuned", tuned.artifact, limits=small)
    for a, b in zip(tuned.expected_digits(pairs), narrow.expected_digits(pairs), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_score_candidates_is_calibrated_and_keeps_order_and_text(tuned):
    window = tiny.windows()[0]
    candidates = tiny.candidates(window, num=4)
    raw = tuned.expected_digits([(window, candidates)])[0]
    scored = tuned.score_candidates(window, candidates)
    assert [c.text for c in scored] == [c.text for c in candidates]
    keeps = apply_map(tuned.artifact.calibration["keep"], raw[:, 0])
    np.testing.assert_allclose([c.keep for c in scored], keeps, atol=1e-6)
    np.testing.assert_allclose([c.scores.reuse for c in scored], raw[:, 1], atol=1e-6)
    assert tuned.score_candidates(window, []) == []


def test_emitted_candidates_are_scored_after_the_prompt_not_after_each_other(tuned):
    """What extract returns as keep is what score mode says of the same candidate."""
    seen = 0
    for window, extraction in zip(tiny.windows(), tuned.extract(tiny.windows()), strict=True):
        emitted = parse(extraction.raw, window).candidates
        if not emitted:
            continue
        again = tuned.score_candidates(window, emitted)
        got = [c.keep for c in extraction.candidates]
        assert got == pytest.approx([c.keep for c in again], abs=1e-5)
        seen += len(emitted)
    assert seen > 0


def test_candidates_under_the_floor_are_dropped_but_returned(tuned):
    windows = tiny.windows()
    free = [c.keep for e in tuned.extract(windows) for c in e.candidates]
    floor = sorted(free)[len(free) // 2]
    calibration = tuned.artifact.calibration | {"keep_floor": floor}
    strict = Extractor(tuned.lm, "tuned",
                       dataclasses.replace(tuned.artifact, calibration=calibration),
                       limits=tuned.limits)
    found = strict.extract(windows)
    kept = [c.keep for e in found for c in e.candidates]
    dropped = [c.keep for e in found for c in e.dropped]
    assert min(kept) >= floor
    assert all(keep < floor for keep in dropped)
    assert len(kept) + len(dropped) == len(free)


def test_too_long_a_window_is_refused_with_its_size(tuned):
    limits = dataclasses.replace(tuned.limits, max_prompt_tokens=500)
    extractor = Extractor(tuned.lm, "tuned", tuned.artifact, limits=limits)
    with pytest.raises(SchemaError, match=r"'w6' makes a prompt of \d+ tokens, allowed are 500"):
        extractor.extract([tiny.windows()[6]])


def test_mode_and_artifact_must_go_together(base_lm, tuned):
    with pytest.raises(ValueError, match="do not go together"):
        Extractor(base_lm, "tuned")
    with pytest.raises(ValueError, match="do not go together"):
        Extractor(base_lm, "base", tuned.artifact)
    with pytest.raises(ValueError, match="allowed are"):
        Extractor(base_lm, "best")


def test_not_a_number_is_an_error(encoder_base):
    from serving.engine.loading import load_causal_lm

    lm = load_causal_lm(encoder_base, dtype="float32")
    with torch.no_grad():
        lm.model.base_model.norm.weight.fill_(torch.nan)
    state = Prefiller(lm).prefill([[5, 6, 7]], room=4)
    with pytest.raises(FloatingPointError):
        decode(lm, state, [Row(None, 4)])
    branch = branch_of(lm.tokenizer, score_line(tiny.candidates(tiny.windows()[0])[0],
                                               tiny.windows()[0]))
    with pytest.raises(FloatingPointError):
        score_branches(lm, state, [[branch]], max_tokens=512)


def test_merged_weights_give_what_the_unmerged_adapter_gives(tuned, encoder_base):
    unmerged = tiny.encoder_adapter(encoder_base)
    ids = prompt_ids(tuned.lm.tokenizer, tiny.windows()[0])
    with torch.no_grad():
        expected = unmerged(torch.tensor([ids])).logits[0, -1]
        base = unmerged.get_base_model()
        with unmerged.disable_adapter():
            untuned = base(torch.tensor([ids])).logits[0, -1]
    state = Prefiller(tuned.lm).prefill([ids])
    got = tuned.lm.head(state.last_hidden)[0]
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)
    assert (got - untuned).abs().max() > 0.1


def test_batches_hold_every_item_once_within_budget():
    lengths = [5, 300, 7, 50, 50, 9, 1, 120]
    batches = list(plan_batches(lengths, max_tokens=120, max_rows=3))
    assert sorted(n for batch in batches for n in batch) == list(range(8))
    for batch in batches:
        longest = max(lengths[n] for n in batch)
        assert len(batch) == 1 or (longest * len(batch) <= 120 and len(batch) <= 3)
    for batch in plan_batches(lengths, max_tokens=10_000, max_padding=1.2):
        used = [lengths[n] for n in batch]
        assert max(used) * len(used) <= 1.2 * sum(used)


def test_common_prefix_of_rows():
    assert common_prefix([[1, 2, 3], [1, 2, 4], [1, 2]]) == 2
    assert common_prefix([[1], [2]]) == 0
    assert common_prefix([[1, 2]]) == 2
    assert common_prefix([]) == 0


def test_chat_of_training_and_serving_are_one(tuned):
    window = tiny.windows()[2]
    assert tuned._wire_prompt(window) == prompt_ids(tuned.lm.tokenizer, window)
    assert messages(window)[1]["content"].startswith("time:")
