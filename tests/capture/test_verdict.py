"""Which shards are made anew, and why a verification fails."""

from __future__ import annotations

import pytest
import torch

from eagle3_core.capture.compare import LayerDistances, NextTokenCounts
from eagle3_core.capture.verdict import (
    CheckedSample,
    ComparedSample,
    Findings,
    condemned_shards,
    first_failure,
)
from eagle3_core.contracts import BadSample
from eagle3_core.sections import VerifyConfig

pytestmark = pytest.mark.engine

LIMITS = VerifyConfig(max_bad_samples=1, min_next_token_agreement=0.5)
GOOD, BAD = NextTokenCounts(rows=100, exact=100), NextTokenCounts(rows=10, exact=1)


def checked(*counts: NextTokenCounts) -> list[CheckedSample]:
    return [CheckedSample(f"k{i}", f"s{i}", found) for i, found in enumerate(counts)]


def compared(*is_right: bool) -> list[ComparedSample]:
    """Samples of which the layer 1 of three is the nearest, or not."""
    samples = []
    for number, right in enumerate(is_right):
        errors = torch.tensor([[0.5, 0.01, 0.6]] if right else [[0.01, 0.5, 0.6]])
        layer = LayerDistances(1, errors, torch.empty(0, 3))
        samples.append(ComparedSample(f"k{number}", f"s{number}", (layer,)))
    return samples


def bad(number: int) -> BadSample:
    return BadSample(key=f"k{number}", shard=f"s{number}", problem="capture id 2 has 1 NaN and 0 Inf")


def test_nothing_is_condemned_where_nothing_is_wrong() -> None:
    findings = Findings(checked=checked(GOOD, GOOD), compared=compared(True))
    assert condemned_shards(findings, LIMITS) == {}
    assert first_failure(findings, LIMITS) is None


def test_bad_samples_up_to_the_limit_are_left_out_and_above_it_their_shards_are_made_anew() -> None:
    allowed = Findings(bad=[bad(1)], checked=checked(GOOD))
    assert condemned_shards(allowed, LIMITS) == {}
    assert first_failure(allowed, LIMITS) is None
    above = Findings(bad=[bad(1), bad(2)], checked=checked(GOOD))
    assert list(condemned_shards(above, LIMITS)) == ["s1", "s2"]
    assert "2 bad samples" in str(first_failure(above, LIMITS))


def test_single_samples_of_other_tokens_or_layers_condemn_their_shards_alone() -> None:
    findings = Findings(checked=checked(GOOD, BAD), compared=compared(True, True, False))
    assert list(condemned_shards(findings, LIMITS)) == ["s1", "s2"]
    assert "do not give the next tokens of 1 samples (k1: 1 of 10 rows)" in str(
        first_failure(findings, LIMITS)
    )


def test_an_engine_that_is_wrong_everywhere_is_not_asked_to_make_the_same_again() -> None:
    findings = Findings(checked=checked(GOOD), compared=compared(False, False))
    assert condemned_shards(findings, LIMITS) == {}
    assert "use another engine version" in str(first_failure(findings, LIMITS))
    assert condemned_shards(Findings(checked=checked(BAD, BAD)), LIMITS) == {}


def test_damage_comes_first_and_every_reason_is_kept() -> None:
    findings = Findings(damaged={"s5": "cut"}, bad=[bad(1), bad(5)], checked=checked(GOOD))
    assert condemned_shards(findings, LIMITS)["s5"] == "cut"
    assert "1 shards are not what the plan says: s5: cut" in str(first_failure(findings, LIMITS))
    result = findings.result(6, 60, condemned_shards(findings, LIMITS))
    assert [one.shard for one in result.condemned] == ["s5", "s1"]
