"""The tiny target answers in a real vLLM engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from eagle3_core.config import RunConfig
from eagle3_core.data.conversations import Prompt
from eagle3_core.data.regenerate import AnswerLog, Regenerated, regenerate
from eagle3_core.data.template import ChatTemplate, load_chat_template
from eagle3_core.step import Progress
from tests.tiny import CHATML_STRICT

if TYPE_CHECKING:
    from vllm import LLM

pytestmark = pytest.mark.engine

MAX_TOKENS = 24
PROMPTS = [
    Prompt(f"k{i}", None, "question", "train", None, (f"question {i}?", "And then?")[: 1 + (i % 4 == 0)])
    for i in range(12)
]


@pytest.fixture(scope="module")
def chat(tiny_target: Path) -> ChatTemplate:
    return load_chat_template(tiny_target)


@pytest.fixture(scope="module")
def config(make_config: Callable[..., RunConfig], tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return make_config(tmp_path_factory.mktemp("workspace"))


@pytest.fixture(scope="module")
def log_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "answers.jsonl"


@pytest.fixture(scope="module")
def answered(engine: LLM, chat: ChatTemplate, config: RunConfig, log_path: Path) -> Regenerated:
    return _regenerate(PROMPTS, chat, config, lambda: engine, log_path)


def _regenerate(
    prompts: list[Prompt], chat: ChatTemplate, config: RunConfig, load: Callable[[], Any], path: Path
) -> Regenerated:
    log = AnswerLog(path)
    try:
        return regenerate(prompts, chat, config, load, log, Progress("prepare"))
    finally:
        log.close()


def _no_engine() -> NoReturn:
    raise AssertionError("the engine was loaded although no answer is missing")


def _tokens(made: Regenerated) -> dict[str, list[list[int]]]:
    return {key: [answer.token_ids for answer in answers] for key, answers in made.answers.items()}


def test_every_turn_is_answered_and_ends_as_it_says(answered: Regenerated, chat: ChatTemplate) -> None:
    assert answered.rejected == []
    assert {key: len(turns) for key, turns in answered.answers.items()} == {
        prompt.key: len(prompt.turns) for prompt in PROMPTS
    }
    answers = [answer for turns in answered.answers.values() for answer in turns]
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}
    for answer in answers:
        ends = [token in chat.end_ids for token in answer.token_ids]
        if answer.finish_reason == "stop":
            assert ends == [False] * (len(ends) - 1) + [True]
        else:
            assert ends == [False] * MAX_TOKENS
    assert answered.generated_tokens == sum(len(answer.token_ids) for answer in answers)


def test_the_tokens_are_the_targets_greedy_ones(answered: Regenerated, tiny_target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    for key in ("k0", "k1"):
        for answer in answered.answers[key]:
            prompt = torch.tensor([answer.prompt_ids])
            whole = model.generate(prompt, max_new_tokens=MAX_TOKENS, do_sample=False)
            assert whole[0, prompt.shape[1] :].tolist() == answer.token_ids


def test_a_later_turn_sees_the_targets_own_earlier_answer(answered: Regenerated, chat: ChatTemplate) -> None:
    first, second = answered.answers["k4"]
    messages = [
        {"role": "user", "content": "question 4?"},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "And then?"},
    ]
    assert first.prompt_ids == chat.prompt_ids(messages[:1])
    assert second.prompt_ids == chat.prompt_ids(messages)


def test_an_interrupted_run_goes_on_with_what_is_missing(
    answered: Regenerated, engine: LLM, chat: ChatTemplate, config: RunConfig, log_path: Path, tmp_path: Path
) -> None:
    lines = log_path.read_bytes().splitlines(keepends=True)
    kept = lines[:5]
    rest = tmp_path / "answers.jsonl"
    rest.write_bytes(b"".join(kept) + lines[5][:30])
    resumed = _regenerate(PROMPTS, chat, config, lambda: engine, rest)
    assert _tokens(resumed) == _tokens(answered)
    assert 0 < resumed.generated_tokens < answered.generated_tokens
    assert rest.read_bytes().splitlines(keepends=True)[:5] == kept
    assert len(rest.read_bytes().splitlines()) == len(lines)
    again = _regenerate(PROMPTS, chat, config, _no_engine, rest)
    assert (_tokens(again), again.generated_tokens) == (_tokens(answered), 0)


def test_a_prompt_that_leaves_no_room_is_rejected_and_a_tight_one_is_cut(
    engine: LLM, chat: ChatTemplate, config: RunConfig, tmp_path: Path
) -> None:
    header = len(chat.prompt_ids([{"role": "user", "content": ""}]))
    room = config.engine.max_model_len - header
    prompts = [
        Prompt(key, None, "question", "train", None, ("\x01" * length,))
        for key, length in (("long", room), ("tight", room - 1))
    ]
    made = _regenerate(prompts, chat, config, lambda: engine, tmp_path / "log")
    assert [(r.key, "leaves no room in engine.max_model_len 128" in r.reason) for r in made.rejected] == [
        ("long", True)
    ]
    assert len(made.answers["tight"][0].token_ids) == 1


def test_a_conversation_that_the_template_refuses_is_rejected_alone(
    engine: LLM, chat: ChatTemplate, config: RunConfig, tmp_path: Path
) -> None:
    from tests.tiny import tiny_tokenizer

    strict = CHATML_STRICT.replace(
        "{% set first",
        "{% if 'bad' in messages[0]['content'] %}{{ raise_exception('no') }}{% endif %}{% set first",
    )
    refusing = ChatTemplate(tiny_tokenizer(500, strict), chat.end_ids, "strict")
    prompts = [Prompt(word, None, "question", "train", None, (word,)) for word in ("good", "bad")]
    made = _regenerate(prompts, refusing, config, lambda: engine, tmp_path / "log")
    assert list(made.answers) == ["good"]
    assert [(r.key, r.reason) for r in made.rejected] == [
        ("bad", "the chat template of strict refuses the conversation: TemplateError: no")
    ]


def test_sampled_answers_depend_on_the_seed_and_not_on_the_company(
    engine: LLM,
    chat: ChatTemplate,
    make_config: Callable[..., RunConfig],
    tmp_path: Path,
    answered: Regenerated,
) -> None:
    def sample(seed: int, prompts: list[Prompt]) -> dict[str, list[list[int]]]:
        generation = {"max_tokens": MAX_TOKENS, "temperature": 1.0, "seed": seed}
        config = make_config(tmp_path, data={"generation": generation})
        path = tmp_path / f"{seed}-{len(prompts)}"
        return _tokens(_regenerate(prompts, chat, config, lambda: engine, path))

    together = sample(1, PROMPTS[1:3])
    assert sample(1, PROMPTS[2:3])["k2"] == together["k2"]
    assert sample(2, PROMPTS[2:3])["k2"] != together["k2"]
    assert together["k2"] != _tokens(answered)["k2"]
