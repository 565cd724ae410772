import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from memory_runtime.corpus import read_windows
from memory_runtime.errors import ConfigError
from memory_runtime.prompt import prompt_ids, quotes_sha256
from serving.artifact import open_artifact
from tests import tiny
from training import encoder
from training.config import EncoderConfig, load_config
from training.pack import (
    Labelled,
    Vocabulary,
    build_row,
    collate,
    pack_rows,
    shared_prefix,
)

ROOT = Path(__file__).parents[2]
CONFIG = """
base: {base}
run_dir: {dir}/run
artifact_dir: {dir}/artifact
dtype: float32
data: {{train: {dir}/windows.jsonl, max_row_tokens: 4000, score_branches: 2}}
lora: {{r: 4, lora_alpha: 8, lora_dropout: 0.1}}
optim: {{lr: 0.01, epochs: 3, pack_tokens: 1500, accumulation: 2}}
budget: {{save_steps: 2}}
"""


def annotated_rows():
    rows = []
    for n, window in enumerate(tiny.windows()):
        gold = [] if n % 3 == 2 else [
            {**c.to_json(), "scores": {k: 5 for k in c.to_json()["scores"]}, "literals": []}
            for c in tiny.candidates(window, num=2)]
        rows.append({
            "id": f"w{n}", "lang": "en", "source": "tiny",
            "turns": [dataclasses.asdict(t) for t in window.turns], "gold": gold,
            "forbidden": [{"text": "The user lives on the moon.", "why": "nobody said so"}]})
    return rows


@pytest.fixture
def config(tmp_path):
    tiny.encoder_base(tmp_path / "base")
    (tmp_path / "windows.jsonl").write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in annotated_rows()))
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.format(base=tmp_path / "base", dir=tmp_path))
    return path


def losses(directory):
    lines = (directory / "run" / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row["loss"] for row in map(json.loads, lines) if "loss" in row}


def make_rows():
    tokenizer = tiny.chat_tokenizer()
    vocabulary = Vocabulary.of(tokenizer, tokenizer.convert_tokens_to_ids("<|im_end|>"))
    rows = []
    for n, window in enumerate(tiny.windows()[:4]):
        made = tiny.candidates(window)
        gold = [Labelled(c, 1.0) for c in made[:n]]
        rows.append(build_row(tokenizer, vocabulary, window, gold,
                              [Labelled(c, 0.0, known_scores=False) for c in made]))
    return rows, vocabulary


def pack_loss(model, rows, vocabulary, *, prefix):
    batch = {**collate(rows, prefix=prefix), "divisor": torch.tensor(1.0)}
    return encoder.forward_loss(model, batch, torch.tensor(vocabulary.digit_ids), alpha=0.3)


def test_packed_equals_separate_with_and_without_a_shared_prefix():
    rows, vocabulary = make_rows()
    model = tiny.encoder_model().eval()
    separate = sum(pack_loss(model, [row], vocabulary, prefix=0) for row in rows)
    prefix = shared_prefix(rows)
    assert prefix > 10
    for shared in (0, prefix):
        packed = pack_loss(model, rows, vocabulary, prefix=shared)
        assert torch.allclose(packed, separate, rtol=1e-5)


def test_a_branch_does_not_see_its_siblings():
    rows, vocabulary = make_rows()
    row = rows[3]
    model = tiny.encoder_model().eval()
    emitted = [n for n, b in enumerate(row.branch) if b <= 1]
    alone = dataclasses.replace(
        row, input_ids=[row.input_ids[n] for n in emitted], branch=[row.branch[n] for n in emitted],
        position_ids=[row.position_ids[n] for n in emitted],
        targets=[t for t in row.targets if t.source < len(emitted)])
    together = dataclasses.replace(row, targets=alone.targets)
    assert torch.allclose(pack_loss(model, [alone], vocabulary, prefix=0),
                          pack_loss(model, [together], vocabulary, prefix=0), rtol=1e-5)


def test_training_conditions_on_exactly_what_serving_sends(config):
    settings = load_config(EncoderConfig, config)
    tokenizer = tiny.chat_tokenizer()
    rows, _, _ = encoder.prepare_rows(settings, tokenizer)
    windows = {w.window.id: w.window for w in read_windows(settings.data.train)}
    for row in rows:
        assert row.input_ids[: row.num_prompt] == prompt_ids(tokenizer, windows[row.id])


def test_packs_hold_every_row_once_within_the_budget():
    rows, _ = make_rows()
    packs = pack_rows(rows * 3, 1500, seed=1)
    assert sorted(r.id for p in packs for r in p) == sorted(r.id for r in rows * 3)
    assert all(sum(map(len, pack)) <= 1500 for pack in packs)
    with pytest.raises(ConfigError, match="pack_tokens"):
        pack_rows(rows, 10, seed=1)


def test_accumulated_equals_whole():
    rows, _ = make_rows()
    halves = encoder.PackDataset([rows[:2], rows[2:]], 2, prefix=0)
    whole = encoder.PackDataset([rows], 1, prefix=0)
    model, ids = tiny.encoder_model().eval(), torch.tensor(make_rows()[1].digit_ids)
    split = sum(encoder.forward_loss(model, halves[n], ids, alpha=0.3) for n in range(2))
    assert torch.allclose(split, encoder.forward_loss(model, whole[0], ids, alpha=0.3), rtol=1e-5)


def test_a_killed_run_resumes_to_the_same_end(config, tmp_path):
    def start(directory):
        text = config.read_text().replace(f"{tmp_path}/run", f"{directory}/run")
        own = directory / "config.yaml"
        own.write_text(text.replace(f"{tmp_path}/artifact", f"{directory}/artifact"))
        return [sys.executable, "-m", "training.encoder", str(own)]

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir(), killed.mkdir()
    subprocess.run(start(whole), cwd=ROOT, check=True, capture_output=True)
    process = subprocess.Popen(start(killed), cwd=ROOT, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
    while process.poll() is None and not list((killed / "run").glob("checkpoint-*")):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    subprocess.run(start(killed), cwd=ROOT, check=True, capture_output=True)
    assert losses(killed) == losses(whole)
    adapters = [load_file(d / "artifact" / "adapter_model.safetensors") for d in (whole, killed)]
    assert all(torch.equal(adapters[0][k], adapters[1][k]) for k in adapters[0])
    assert losses(whole)[max(losses(whole))] < losses(whole)[1]
    artifact = open_artifact(whole / "artifact")
    assert artifact.kind == "encoder" and artifact.manifest["steps"] == max(losses(whole))


def test_a_half_written_checkpoint_is_removed(tmp_path):
    from training.run import Run
    good, cut = tmp_path / "checkpoint-2", tmp_path / "checkpoint-4"
    good.mkdir(), cut.mkdir()
    (good / "trainer_state.json").write_text("{}")
    (cut / "trainer_state.json").write_text('{"half')
    assert Run(tmp_path, {}).last_checkpoint() == str(good)
    assert not cut.exists()


def test_another_configuration_or_other_data_does_not_resume(config):
    encoder.train(load_config(EncoderConfig, config))
    with pytest.raises(ConfigError, match="config_sha256"):
        encoder.train(load_config(EncoderConfig, config, ["optim.lr=0.02"]))
    with open(load_config(EncoderConfig, config).data.train, "a") as file:
        file.write(json.dumps({**annotated_rows()[0], "id": "more"}) + "\n")
    with pytest.raises(ConfigError, match="data_sha256"):
        encoder.train(load_config(EncoderConfig, config))


def test_a_time_budget_becomes_a_frozen_step_count(config):
    settings = load_config(EncoderConfig, config, ["budget.train_minutes=0.00001"])
    encoder.train(settings)
    frozen = json.loads((Path(settings.run_dir) / "resolved.json").read_text())["frozen"]
    assert frozen["max_steps"] == 1 and frozen["full_steps"] > 1


def test_a_base_without_digit_tokens_is_refused():
    class NoDigits:
        def encode(self, text, add_special_tokens=True):
            return [1, 2]

    with pytest.raises(Exception, match="digit"):
        Vocabulary.of(NoDigits(), 0)


def test_a_run_goes_on_from_an_artifact(config, tmp_path):
    first = encoder.train(load_config(EncoderConfig, config))
    more = ["optim.lr=0.0", f"init={first}", f"run_dir={tmp_path}/run2",
            f"artifact_dir={tmp_path}/second"]
    second = encoder.train(load_config(EncoderConfig, config, more))
    # Nothing is learnt at rate 0, so the weights are those it began with.
    ours, theirs = (load_file(path / "adapter_model.safetensors") for path in (second, first))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    before, after = (json.loads((path / "manifest.json").read_text()) for path in (first, second))
    assert after["initial"] == before["files"]["adapter_model.safetensors"]
    assert after["total_steps"] == before["steps"] + after["steps"]


@pytest.mark.parametrize(("change", "message"), [
    ("lora.r=2", "r is 4"), ("lora.first_layer=1", "tensors differ")])
def test_an_adapter_of_another_shape_is_no_start(config, tmp_path, change, message):
    first = encoder.train(load_config(EncoderConfig, config, ["optim.epochs=1"]))
    more = [change, f"init={first}", f"run_dir={tmp_path}/run2"]
    with pytest.raises(ConfigError, match=message):
        encoder.train(load_config(EncoderConfig, config, more))


def test_what_learnt_to_retell_is_no_start_for_quotations(config, tmp_path):
    first = encoder.train(load_config(EncoderConfig, config, ["optim.epochs=1"]))
    again = [f"init={first}", "data.quotes=true", f"run_dir={tmp_path}/run2"]
    with pytest.raises(ConfigError, match="its style of quotations is None"):
        encoder.train(load_config(EncoderConfig, config, again))


def test_an_encoder_that_quotes_says_so_and_is_not_taken_for_one_that_retells(config):
    plain = encoder.train(load_config(EncoderConfig, config, ["optim.epochs=1"]))
    assert json.loads((plain / "manifest.json").read_text())["quotes_sha256"] is None
    quoting = load_config(EncoderConfig, config, [
        "optim.epochs=1", "data.quotes=true", f"run_dir={plain}-run2"])
    assert encoder.finished(quoting) is None
    manifest = json.loads((encoder.train(quoting) / "manifest.json").read_text())
    assert manifest["quotes_sha256"] == quotes_sha256()


def test_a_damaged_adapter_or_one_of_another_prompt_is_no_start(config, tmp_path):
    first = encoder.train(load_config(EncoderConfig, config, ["optim.epochs=1"]))
    again = load_config(EncoderConfig, config, [f"init={first}", f"run_dir={tmp_path}/run2"])
    manifest = json.loads((first / "manifest.json").read_text())
    (first / "manifest.json").write_text(json.dumps({**manifest, "prompt_sha256": "old"}))
    with pytest.raises(ConfigError, match="its prompt is old"):
        encoder.train(again)
    (first / "manifest.json").write_text(json.dumps(manifest))
    with (first / "adapter_model.safetensors").open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"!")
    with pytest.raises(ConfigError, match="its weights is"):
        encoder.train(again)
    with pytest.raises(ConfigError, match="cannot be read"):
        encoder.train(dataclasses.replace(again, init=str(tmp_path / "nowhere")))
