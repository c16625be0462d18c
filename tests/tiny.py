"""A tiny random Llama-type target with a byte-level tokenizer, for tests that need a real model.

`python -m tests.tiny FOLDER` writes one. Its chat is ChatML-like; three templates render the same text:

- `CHATML`: no generation tags, so answers have to be located.
- `CHATML_GENERATION`: generation tags around content and end-of-turn.
- `CHATML_STRICT`: like `CHATML`, and raises when roles do not alternate.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

UNKNOWN, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (UNKNOWN, IM_START, IM_END)
"""The first three ids: 0, 1 and 2. `IM_END` ends a turn and is the end-of-sequence token."""

_HEADER = "<|im_start|>' + message['role'] + '\\n' }}"
_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
CHATML = (
    "{% for message in messages %}{{ '"
    + _HEADER
    + "{{ message['content'] + '<|im_end|>' }}{{ '\\n' }}{% endfor %}"
    + _PROMPT
)
CHATML_GENERATION = (
    "{% for message in messages %}{{ '"
    + _HEADER
    + "{% if message['role'] == 'assistant' %}"
    + "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    + "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    + _PROMPT
)
CHATML_STRICT = (
    "{% set first = 1 if messages[0]['role'] == 'system' else 0 %}"
    "{% for message in messages[first:] %}"
    "{% if message['role'] != ['user', 'assistant'][loop.index0 % 2] %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{% endfor %}"
) + CHATML

_CORPUS = (
    "The cat sat on the mat and looked at the rain. What is the capital of France? "
    "Write a list of three fruits: apple, banana, cherry. def add(a, b): return a + b. "
    "Tell me about the sea, the moon and the stars. Please rewrite this sentence. "
    "How much is twelve plus thirty? There are seven days in a week and twelve months in a year. "
)


def make_tiny_target(
    folder: Path,
    *,
    num_layers: int = 8,
    hidden_size: int = 128,
    intermediate_size: int = 256,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    vocab_size: int = 512,
    tokenizer_size: int = 500,
    max_position_embeddings: int = 1024,
    tied: bool = False,
    dtype: Literal["float32", "bfloat16"] = "float32",
    initializer_range: float = 0.1,
    chat_template: str = CHATML,
    end_scale: float = 2.0,
    seed: int = 0,
) -> Path:
    """Write a random target to `folder` (one `model.safetensors`) and return the folder.

    Head size is `hidden_size / num_heads`, 32 by default: the smallest that vLLM's CPU attention takes.
    `vocab_size` counts embedding rows; only the first `tokenizer_size` have a token, the others are never
    generated. `end_scale` widens the end-of-turn row of the LM head, so that some greedy answers stop.
    """
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer(tokenizer_size, chat_template)
    end = tokenizer.convert_tokens_to_ids(IM_END)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=max_position_embeddings,
        initializer_range=initializer_range,
        tie_word_embeddings=tied,
        bos_token_id=tokenizer.convert_tokens_to_ids(IM_START),
        eos_token_id=end,
        pad_token_id=end,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    with torch.no_grad():
        model.lm_head.weight[end] *= end_scale
        model.lm_head.weight[tokenizer_size:] = 0
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=end, pad_token_id=end
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_tokenizer(tokenizer_size: int = 500, chat_template: str = CHATML) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with exactly `tokenizer_size` ids: special tokens, 256 bytes, merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=tokenizer_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_CORPUS], trainer)
    missing = tokenizer_size - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"<extra_{index}>" for index in range(missing)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=UNKNOWN,
        bos_token=IM_START,
        eos_token=IM_END,
        pad_token=IM_END,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = chat_template
    return wrapped


def write_prompts(path: Path, num_rows: int = 24) -> Path:
    """Write a small JSONL prompt source: three kinds, one of them with two user turns."""
    rows = []
    for index in range(num_rows):
        kind = ("question", "list", "dialogue")[index % 3]
        turns = [f"{kind} number {index}: what is it?"] + (["And then?"] if kind == "dialogue" else [])
        messages = [{"role": "user", "content": turn} for turn in turns]
        rows.append({"id": f"{kind}-{index}", "kind": kind, "messages": messages})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


if __name__ == "__main__":
    print(make_tiny_target(Path(sys.argv[1])))
