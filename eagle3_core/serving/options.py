"""What serving engines make of a draft's options: one table, read from their own files.

Read in vLLM 0.32.0 (`models/llama_eagle3.py`, `models/qwen3_eagle3.py`, the configuration of speculators) and
SGLang 0.5.16 (`srt/models/llama_eagle3.py`). vLLM knows every option of a draft. SGLang passes over an option
that it does not know, and over its weights, without a word: acceptance would fall and nothing would say why.
"""

from __future__ import annotations

from eagle3_core.config import RunConfig
from eagle3_core.errors import ConfigError

READ_IN = {"vllm": "vLLM 0.32.0", "sglang": "SGLang 0.5.16"}
UNSERVED: dict[str, dict[str, str]] = {
    "vllm": {},
    "sglang": {
        "norm_before_residual": "its first layer always takes the state before the norm as residual",
        "norm_before_fc": "it has no norm of the concatenated states",
        "block": "its EAGLE-3 layers have no norms of queries and keys",
        "sliding_window": "its window comes from the server's arguments alone, never from the draft",
        "num_layers": "it reads the norm of later layers from `hidden_norm`, which such a draft lacks",
    },
}
"""By engine: options of `draft` that it ignores when they differ from their default, and how."""


def check_served(config: RunConfig) -> str:
    """Hold the draft's options against every engine that will serve it.

    Raises:
        ConfigError: names the engine and the option that it would ignore.
    """
    engines = tuple(dict.fromkeys((*config.export.engines, *config.export.serving)))
    default = type(config.draft)()
    for engine in engines:
        for option, reason in UNSERVED[engine].items():
            value = getattr(config.draft, option)
            if value != getattr(default, option):
                raise ConfigError(
                    f"draft.{option} is {value}, which {READ_IN[engine]} would ignore: {reason}",
                    expected=f"{getattr(default, option)} for a draft that {engine} serves",
                    remedy=f"leave draft.{option} at its default, or take {engine} out of the export section",
                )
    return f"the draft's options are known to {' and '.join(engines)}"
