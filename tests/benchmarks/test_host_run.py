"""What the host benchmark reads in the logs of a run's steps."""

from __future__ import annotations

from benchmarks.host_run import engine_loads

REPLICAS = """\
# started 2026-11-30 11:44:49 UTC
2026-11-30 11:44:50,970 I eagle3_core.capture.extract: capturing 36 shards with vllm 0.26.0
[replica 1] 2026-11-30 11:45:31,150 I eagle3_core.target.vllm_engine: loaded /tmp/smollm2 in vLLM in 16.5 s
[replica 0] 2026-11-30 11:45:33,315 I eagle3_core.target.vllm_engine: loaded /tmp/smollm2 in vLLM in 19.0 s
2026-11-30 11:45:33,315 I eagle3_core.capture.replica: [replica 0] engine loaded in 42.3 s
"""


def test_every_engine_that_a_step_loads_is_found_with_the_seconds_before():
    assert engine_loads(REPLICAS) == [
        {"seconds_before": 25.5, "load_seconds": 16.5},
        {"seconds_before": 25.0, "load_seconds": 19.0},
    ]
    assert engine_loads("# started 2026-11-30 11:44:49 UTC\nno engine here\n") == []
    assert engine_loads("") == []
