"""The prompts that ship with the package."""

from __future__ import annotations

from collections import Counter

import pytest

from eagle3_core.data.conversations import PromptSet, read_prompts
from eagle3_core.identity import BUILTIN_PROMPTS

HELDOUT_FRACTION = 0.1


@pytest.fixture(scope="module")
def found() -> PromptSet:
    return read_prompts([BUILTIN_PROMPTS], HELDOUT_FRACTION)


def test_there_are_at_least_400_different_usable_prompts(found: PromptSet) -> None:
    assert found.rejected == ()
    assert len(found.prompts) >= 400
    assert len({prompt.id for prompt in found.prompts}) == len(found.prompts)
    texts = {" ".join("\n".join(prompt.turns).lower().split()) for prompt in found.prompts}
    assert len(texts) == len(found.prompts)


def test_they_are_of_many_kinds_and_some_have_several_turns(found: PromptSet) -> None:
    kinds = Counter(prompt.kind for prompt in found.prompts)
    assert {"question", "code", "list", "rewriting", "arithmetic", "dialogue"} <= kinds.keys()
    assert min(kinds.values()) >= 10
    assert sum(len(prompt.turns) > 1 for prompt in found.prompts) >= 20


def test_every_kind_is_held_out_in_proportion(found: PromptSet) -> None:
    kinds = Counter(prompt.kind for prompt in found.prompts)
    heldout = Counter(prompt.kind for prompt in found.prompts if prompt.split == "heldout")
    assert all(abs(heldout[kind] - HELDOUT_FRACTION * count) < 1 for kind, count in kinds.items())
    assert sum(heldout.values()) == round(HELDOUT_FRACTION * len(found.prompts))


def test_no_prompt_gives_more_than_the_user_side(found: PromptSet) -> None:
    assert found.num_replaced_answers == 0
    assert all(len(turn) < 4000 for prompt in found.prompts for turn in prompt.turns)
