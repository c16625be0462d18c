"""Loads a small bf16 target in vLLM, in processes of its own, and prints how many tokens it answers."""

from __future__ import annotations

import sys
from pathlib import Path

from eagle3_core.config import parse_config
from eagle3_core.target.vllm_engine import load_vllm


def main(target: Path) -> None:
    """Answer one prompt."""
    from vllm import SamplingParams

    config = parse_config(
        {
            "name": "own-process",
            "target": {"model": str(target), "dtype": "bfloat16", "aux_layer_ids": [1, 2, 3]},
            "engine": {"max_model_len": 64, "max_num_seqs": 4, "kv_cache_gib": 1},
            "workspace": str(target.parent),
        }
    )
    llm = load_vllm(config, str(target))
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], sampling, use_tqdm=False)
    print(f"{len(output.outputs[0].token_ids)} tokens", flush=True)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
