"""Which rank computes which packs of an optimizer step: pure, and the same on every rank.

Packs and their grouping into steps follow from seed and epoch alone; only the sharing depends on ranks.
"""

from __future__ import annotations

from collections.abc import Sequence


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
