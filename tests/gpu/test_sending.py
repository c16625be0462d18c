"""Packs on their way to a GPU that works: they arrive whole, and nobody waits for them.

`python -m pytest -m gpu tests/gpu/test_sending.py` in an environment with torch's CUDA build.
"""

from __future__ import annotations

import pytest
import torch

from eagle3_core.store.shards import CapturedSample
from eagle3_core.training.ahead import ReadAhead
from eagle3_core.training.loader import build_pack
from eagle3_core.training.sending import Sender

pytestmark = [pytest.mark.engine, pytest.mark.gpu]
ROWS, HIDDEN = 1024, 2048
BUSY_CYCLES = 40_000_000


@pytest.fixture(autouse=True)
def _needs_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")


def sample(number: int) -> CapturedSample:
    """One whose states are all its number."""
    states = torch.full((ROWS + 1, 4, HIDDEN), float(number), dtype=torch.bfloat16)
    rows = torch.arange(1, ROWS + 1)
    return CapturedSample(
        key=str(number),
        input_ids=torch.full((ROWS + 1,), number, dtype=torch.int32),
        loss_mask=torch.ones(ROWS + 1, dtype=torch.uint8),
        aux_states=states[:, :3],
        final_states=states[1:, 3],
        final_rows=rows,
    )


def test_packs_arrive_whole_though_memory_is_used_again_and_the_gpu_is_behind() -> None:
    sender = Sender(torch.device("cuda"))
    packs = (sender.send(build_pack([sample(number)], 2, pinned=True)) for number in range(24))
    sums = []
    with ReadAhead(packs) as ahead:
        for pack in ahead:
            assert pack.sent is not None
            here = pack.to(torch.device("cuda"))
            assert here.sent is None
            torch.cuda._sleep(BUSY_CYCLES)
            sums.append(
                torch.stack(
                    [here.aux_states.double().mean(), here.final_states.double().mean(),
                     here.input_ids.double().mean(), here.positions.double().mean()]
                )
            )  # fmt: skip
            del here, pack
    found = torch.stack(sums).cpu()
    numbers = torch.arange(24, dtype=torch.float64)
    wanted = torch.stack([numbers, numbers, numbers, torch.full_like(numbers, (ROWS + 1) / 2)], 1)
    assert torch.equal(found, wanted)


def test_nobody_waits_for_a_pack_that_is_sent() -> None:
    sender, device = Sender(torch.device("cuda")), torch.device("cuda")
    packs = [build_pack([sample(number)], 2, pinned=True) for number in range(3)]
    sender.send(packs[0]).to(device)
    torch.cuda.synchronize()
    torch.cuda._sleep(100 * BUSY_CYCLES)
    here = [sender.send(pack).to(device) for pack in packs[1:]]
    assert not torch.cuda.current_stream().query()  # the GPU still does what was asked before
    assert [float(pack.aux_states[0, 0]) for pack in here] == [1.0, 2.0]
