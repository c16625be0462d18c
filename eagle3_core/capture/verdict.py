"""Judges what the checks of a capture have found: which shards are made anew, and whether the stage fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from eagle3_core.capture.compare import WRONG_LAYER_RATIO, LayerDistances, NextTokenCounts, pooled
from eagle3_core.contracts import BadSample, CondemnedShard, LayerCheck, VerifyResult
from eagle3_core.errors import VerificationError
from eagle3_core.sections import VerifyConfig

MAX_LISTED = 10
MAKE_ANEW = "run the stages extract and verify again: extract makes these shards anew and keeps the others"


@dataclass(frozen=True)
class CheckedSample:
    """A sample whose meaning was checked.

    Attributes:
        key: of the sample.
        shard: file name.
        next_tokens: rows that give their next token.
    """

    key: str
    shard: str
    next_tokens: NextTokenCounts


@dataclass(frozen=True)
class ComparedSample:
    """A sample that was compared with a reference forward, with one distance for each stored layer."""

    key: str
    shard: str
    layers: tuple[LayerDistances, ...]

    @property
    def wrong(self) -> list[LayerDistances]:
        """The layers that are not what they claim to be."""
        return [layer for layer in self.layers if not layer.is_right]


@dataclass
class Findings:
    """All that was found in a capture.

    Attributes:
        damaged: shard and reason: structure, keys, ids, masks or counts are not what the plan says.
        bad: samples with values that are not finite.
        quarantined: samples that the capture has left out itself, within its own limit.
        checked: samples whose next tokens were checked.
        compared: samples that were compared with a reference forward.
    """

    damaged: dict[str, str] = field(default_factory=dict)
    bad: list[BadSample] = field(default_factory=list)
    quarantined: list[BadSample] = field(default_factory=list)
    checked: list[CheckedSample] = field(default_factory=list)
    compared: list[ComparedSample] = field(default_factory=list)

    @property
    def next_tokens(self) -> NextTokenCounts:
        """Over all checked samples."""
        return sum((one.next_tokens for one in self.checked), NextTokenCounts())

    @property
    def layers(self) -> list[LayerCheck]:
        """For each stored layer its distances in all compared samples together."""
        parts = zip(*(one.layers for one in self.compared), strict=True)
        return [pooled(found).check() for found in parts]

    def result(self, num_shards: int, num_samples: int, condemned: dict[str, str]) -> VerifyResult:
        """The findings as the step reports them."""
        counts = self.next_tokens
        return VerifyResult(
            num_shards=num_shards,
            num_samples=num_samples,
            num_rows_checked=counts.rows,
            num_exact=counts.exact,
            num_ties=counts.ties,
            agreement=counts.agreement,
            layers=self.layers,
            bad_samples=[*self.bad, *self.quarantined],
            condemned=[CondemnedShard(shard=shard, reason=why) for shard, why in condemned.items()],
        )


def condemned_shards(findings: Findings, limits: VerifyConfig) -> dict[str, str]:
    """Shard and reason of what is to be made anew.

    Where every checked sample is wrong in the same way the engine is: it would make the same shards again, so
    none is condemned for that.
    """
    found = dict(findings.damaged)
    if len(findings.bad) > limits.max_bad_samples:
        for bad in findings.bad:
            found.setdefault(bad.shard, f"{bad.key}: {bad.problem}")
    hopeless = [one for one in findings.checked if one.next_tokens.is_hopeless]
    if len(hopeless) < len(findings.checked):
        for one in hopeless:
            found.setdefault(one.shard, f"{_hopeless(one)} give their next token")
    wrong = [one for one in findings.compared if one.wrong]
    if len(wrong) < len(findings.compared):
        for compared in wrong:
            found.setdefault(compared.shard, _wrong_layer(compared.wrong[0], compared.key))
    return found


def first_failure(findings: Findings, limits: VerifyConfig) -> VerificationError | None:
    """Why the stage fails, or None."""
    judges = (_judge_damage, _judge_bad_samples, _judge_meaning, _judge_samples, _judge_layers)
    return next((error for judge in judges if (error := judge(findings, limits))), None)


def _judge_damage(findings: Findings, limits: VerifyConfig) -> VerificationError | None:
    if not findings.damaged:
        return None
    listed = _some([f"{shard}: {reason}" for shard, reason in findings.damaged.items()])
    return VerificationError(
        f"{len(findings.damaged)} shards are not what the plan says: {listed}", remedy=MAKE_ANEW
    )


def _judge_bad_samples(findings: Findings, limits: VerifyConfig) -> VerificationError | None:
    if len(findings.bad) <= limits.max_bad_samples:
        return None
    listed = _some([f"{bad.key} in {bad.shard}: {bad.problem}" for bad in findings.bad])
    return VerificationError(
        f"{len(findings.bad)} bad samples ({listed})",
        expected=f"at most {limits.max_bad_samples} (verify.max_bad_samples)",
        remedy=MAKE_ANEW,
    )


def _judge_meaning(findings: Findings, limits: VerifyConfig) -> VerificationError | None:
    counts, least = findings.next_tokens, limits.min_next_token_agreement
    if not counts.rows:
        return VerificationError(
            "no stored row could be checked for its next token", expected="answers of two tokens or more"
        )
    if counts.agreement >= least:
        return None
    return VerificationError(
        f"norm and LM head on the stored final states give the next token in {counts.agreement:.4f} "
        f"of {counts.rows:,} rows ({counts.exact:,} exact, {counts.ties:,} ties)",
        expected=f"at least {least} (verify.min_next_token_agreement)",
        remedy="the states are of another layer, another target or other tokens: use another engine version",
    )


def _judge_samples(findings: Findings, limits: VerifyConfig) -> VerificationError | None:
    hopeless = [one for one in findings.checked if one.next_tokens.is_hopeless]
    if not hopeless:
        return None
    return VerificationError(
        f"norm and LM head on the stored final states do not give the next tokens of "
        f"{len(hopeless)} samples ({_some(list(map(_hopeless, hopeless)))})",
        expected="most rows of every sample",
        remedy=f"their states are of other samples or layers: {MAKE_ANEW}",
    )


def _judge_layers(findings: Findings, limits: VerifyConfig) -> VerificationError | None:
    wrong = [_wrong_layer(layer, one.key) for one in findings.compared for layer in one.wrong]
    if not wrong:
        return None
    is_all = all(one.wrong for one in findings.compared)
    return VerificationError(
        f"stored layers are not the ones they claim to be ({len(wrong)} comparisons): {_some(wrong)}",
        expected=f"the own layer nearest, any other {WRONG_LAYER_RATIO:g} times as far",
        remedy="the engine counts layers otherwise or computes otherwise: use another engine version"
        if is_all
        else MAKE_ANEW,
    )


def _hopeless(one: CheckedSample) -> str:
    counts = one.next_tokens
    return f"{one.key}: {counts.exact + counts.ties} of {counts.rows} rows"


def _wrong_layer(layer: LayerDistances, key: str) -> str:
    return (
        f"capture id {layer.capture_id} is {layer.median_error:.4f} from its own layer and "
        f"{layer.nearest_wrong_median:.4f} from the nearest other (nearest is {layer.nearest_id}) in the "
        f"sample {key}"
    )


def _some(lines: Sequence[str]) -> str:
    more = f"; and {len(lines) - MAX_LISTED} more" if len(lines) > MAX_LISTED else ""
    return "; ".join(lines[:MAX_LISTED]) + more
