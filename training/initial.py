"""Goes on from an adapter that was trained before instead of from a fresh one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file

from memory_runtime.errors import ConfigError
from memory_runtime.prompt import prompt_sha256, quotes_sha256
from memory_runtime.weights import base_sha256, file_sha256
from training.run import WEIGHTS, read_json


def open_initial(directory: Path, base_dir: Path, *, quotes: bool = False) -> dict[str, Any]:
    """The manifest of an adapter to go on from, checked against base, prompt and its own digest.

    Args:
        directory: The artifact.
        base_dir: The base of the run.
        quotes: Whether the run learns quotations. An adapter that learnt to retell loses turn
            numbers and scores when it has to change its style (training/LOG.md).

    Raises:
        ConfigError: Says what does not fit; training from the base itself is always possible.
    """
    faults = []
    try:
        manifest = read_json(directory / "manifest.json")
        wanted = {"kind": "encoder", "base": base_sha256(base_dir), "prompt": prompt_sha256(),
                  "style of quotations": quotes_sha256() if quotes else None,
                  "weights": file_sha256(directory / WEIGHTS)}
        found = {"kind": manifest.get("kind"), "base": manifest["base"]["sha256"],
                 "prompt": manifest.get("prompt_sha256"),
                 "style of quotations": manifest.get("quotes_sha256"),
                 "weights": manifest["files"][WEIGHTS]}
        faults = [f"its {name} is {found[name]}, here {wanted[name]} is wanted"
                  for name in wanted if found[name] != wanted[name]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        faults = [f"it cannot be read: {error!r}"]
    if faults:
        raise ConfigError(f"init {directory}: {'; '.join(faults)}; give an adapter that fits, or "
                          "init='' to train from the base")
    return manifest


def load_initial(model: PeftModel, directory: Path) -> None:
    """Put the weights of an adapter into the model's fresh one.

    Raises:
        ConfigError: Rank, scale or the adapted modules differ.
    """
    theirs = read_json(directory / "adapter_config.json")
    ours = model.peft_config["default"]
    for name in ("r", "lora_alpha"):
        if theirs.get(name) != getattr(ours, name):
            raise ConfigError(f"init {directory}: {name} is {theirs.get(name)}, the configuration "
                              f"says {getattr(ours, name)}; make them equal, or init=''")
    state = load_file(directory / WEIGHTS)
    want = {name: value.shape for name, value in
            get_peft_model_state_dict(model, save_embedding_layers=False).items()}
    odd = sorted(name for name in want.keys() | state.keys()
                 if name not in state or want.get(name) != state[name].shape)
    if odd:
        raise ConfigError(f"init {directory}: {len(odd)} tensors differ from the configured "
                          f"adapter, first {odd[:3]}; check lora.first_layer, or init=''")
    set_peft_model_state_dict(model, {k: v.to(torch.float32) for k, v in state.items()})
