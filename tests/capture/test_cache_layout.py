"""vLLM's two layouts of captured states."""

from __future__ import annotations

import pytest
import torch

from eagle3_core.capture.cache_layout import required_layout_name, token_first_view
from eagle3_core.errors import CaptureError

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("version", "shape", "name"),
    [
        ("0.26.0", (5, 16, 4, 8), "NHD"),
        ("0.28.1", (5, 16, 4, 8), "NHD"),
        ("0.29.0", (5, 4, 16, 8), "LBNHC"),
        ("0.32.0+cpu", (5, 4, 16, 8), "LBNHC"),
    ],
)
def test_each_version_is_read_token_first(version: str, shape: tuple[int, ...], name: str) -> None:
    cache = torch.zeros(shape)
    view = token_first_view(cache, version, block_size=16, num_layers=4, hidden_size=8)
    view[1, 7, 2] = 1.0
    assert view.shape == (5, 16, 4, 8)
    assert cache[1, 7, 2].sum() == 8 if name == "NHD" else cache[1, 2, 7].sum() == 8
    assert required_layout_name(version) == name


@pytest.mark.parametrize("shape", [(5, 16, 4, 8), (5, 4, 32, 8), (5, 3, 16, 8), (5, 4, 16, 9), (5, 4, 128)])
def test_any_other_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(CaptureError, match="holds captured states as"):
        token_first_view(torch.zeros(shape), "0.32.0", block_size=16, num_layers=4, hidden_size=8)


def test_a_version_that_was_never_seen_is_refused() -> None:
    with pytest.raises(CaptureError, match="too old"):
        required_layout_name("0.20.0")
