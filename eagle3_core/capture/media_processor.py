"""Copied into the miniature of a multimodal wrapper: engines want an image processor though no image comes.

The published wrapper brings its own code for that; this stands in its place and refuses to be used.
"""

from __future__ import annotations

from typing import Any

from transformers.image_processing_utils import BaseImageProcessor


class MiniatureMediaProcessor(BaseImageProcessor):
    """Says how many frames and tokens a medium would have, and processes none."""

    def __init__(self, media_proc_cfg: dict[str, Any] | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.media_proc_cfg = media_proc_cfg or {}
        self.num_frames_per_chunk = self.media_proc_cfg.get("temporal_merge_kernel_size", 1)

    def media_tokens_calculator(self, media: Any) -> int:
        """One token, whatever it is."""
        return 1

    def preprocess(self, *media: Any, **settings: Any) -> Any:
        """Never called: the probe sends token ids only."""
        raise NotImplementedError("a miniature takes no images")
