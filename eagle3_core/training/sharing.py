"""How many ranks train, and which of them computes which packs of a step: pure, and the same on every rank.

Packs and their grouping into steps follow from seed and epoch alone; only the sharing depends on ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from eagle3_core.config import RunConfig
from eagle3_core.errors import TrainingError


def num_ranks(config: RunConfig, num_devices: int) -> int:
    """How many ranks train: `train.num_ranks`, else one for each GPU that can have a pack; one on the CPU.

    Args:
        config: the run's.
        num_devices: visible GPUs.

    Raises:
        TrainingError: fewer GPUs are visible than the configuration names ranks, or none.
    """
    train = config.train
    if config.engine.device == "cpu":
        return train.num_ranks or 1
    if not num_devices:
        raise TrainingError(
            "no GPU is visible",
            expected="one at least, since engine.device is cuda",
            remedy="check driver and CUDA_VISIBLE_DEVICES, or set engine.device to cpu",
        )
    if train.num_ranks is None:
        return min(num_devices, train.packs_per_step)
    if train.num_ranks > num_devices:
        raise TrainingError(
            f"train.num_ranks is {train.num_ranks}, but {num_devices} GPUs are visible",
            expected="a GPU for each rank",
            remedy="lower train.num_ranks, or leave it out to use the GPUs that there are",
        )
    return train.num_ranks


def idle_gpus(config: RunConfig, num_devices: int) -> str:
    """Says that GPUs are left out for want of packs; empty if none is, or if `train.num_ranks` is set."""
    train = config.train
    if config.engine.device == "cpu" or train.num_ranks is not None or num_devices <= train.packs_per_step:
        return ""
    return f"training uses {train.packs_per_step} of {num_devices} GPUs, as many as train.packs_per_step"


def group_packs(num_packs: int, packs_per_step: int) -> list[range]:
    """Consecutive packs of each optimizer step of an epoch; the last step may have fewer."""
    starts = range(0, num_packs, packs_per_step)
    return [range(start, min(start + packs_per_step, num_packs)) for start in starts]


def share_packs(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Longest processing time first: each pack goes to the rank with the least so far.

    Costs 5, 4, 3, 3 and two ranks: [0, 3] and [1, 2], 8 and 7. Ties go to the lower pack and the lower rank.

    Args:
        costs: of each pack of a step, in any unit.
        num_ranks: that share it; those beyond the number of packs get none.

    Returns:
        For each rank its packs, increasing.
    """
    loads = [0.0] * num_ranks
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    for pack in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        rank = min(range(num_ranks), key=lambda index: (loads[index], len(shares[index]), index))
        loads[rank] += costs[pack]
        shares[rank].append(pack)
    return [sorted(share) for share in shares]
