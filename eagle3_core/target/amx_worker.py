"""Asks for AMX where vLLM computes on the CPU: each of its workers imports this (`worker_extension_cls`).

Linux lets a process use AMX tiles once it has asked for them; one that it starts anew has to ask again. vLLM
takes its AMX kernels wherever the processor has tiles, and leaves the asking to matrix products. Small ones
do without, and all do where `ONEDNN_MAX_CPU_ISA` says so: the worker ends in an illegal instruction.
"""

from __future__ import annotations

import torch

torch.cpu._init_amx()


class AmxWorker:
    """Adds nothing to vLLM's worker: the module was imported before the worker computes."""
