"""Puts a plain target into a multimodal wrapper that nobody has a class for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def wrap(plain: Path, folder: Path, rename: dict[str, str], towers: dict[str, torch.Tensor]) -> Path:
    """The plain target inside a wrapper that transformers has no class for."""
    folder.mkdir()
    config = json.loads((plain / "config.json").read_text())
    wrapper = {"architectures": ["UnheardOf"], "model_type": "unheard_of", "text_config": config}
    wrapper["vision_config"] = {"num_hidden_layers": config["num_hidden_layers"]}
    (folder / "config.json").write_text(json.dumps(wrapper))
    tensors = dict(towers)
    for name, tensor in load_file(plain / "model.safetensors").items():
        start = next(start for start in rename if name.startswith(start))
        tensors[rename[start] + name.removeprefix(start)] = tensor
    names = sorted(tensors)
    files = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(names)}
    for file in set(files.values()):
        part = {name: tensors[name] for name in names if files[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 0}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for file in plain.glob("*token*"):
        shutil.copy(file, folder)
    return folder
