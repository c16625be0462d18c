from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from eagle3_core.data.vocabulary import (
    VOCABULARY_FILE,
    DraftVocabulary,
    answer_counts,
    build_vocabulary,
    load_vocabulary,
    save_vocabulary,
)
from eagle3_core.errors import DataError
from eagle3_core.identity import STEP_VERSION
from eagle3_core.store.dataset import Sample
from eagle3_core.store.files import hash_file


def _counts(size: int, **observed: int) -> np.ndarray:
    counts = np.zeros(size, np.int64)
    for name, count in observed.items():
        counts[int(name[1:])] = count
    return counts


def test_offsets_lead_from_draft_ids_to_the_observed_ids() -> None:
    vocabulary = build_vocabulary(_counts(12, _3=4, _5=2, _9=7), draft_size=3, tokenizer_size=12)
    assert vocabulary.d2t.tolist() == [3, 4, 7]
    assert vocabulary.d2t.dtype == np.int64
    assert vocabulary.draft_to_target.tolist() == [3, 5, 9]
    assert np.flatnonzero(vocabulary.t2d).tolist() == [3, 5, 9]
    assert vocabulary.t2d.shape == (12,)
    assert not vocabulary.is_identity


def test_fewer_observed_ids_than_the_draft_has_are_filled_with_unused_ones() -> None:
    counts = _counts(12, _3=4, _5=2, _9=7)
    vocabulary = build_vocabulary(counts, draft_size=5, tokenizer_size=12)
    assert vocabulary.draft_to_target.tolist() == [0, 1, 3, 5, 9]
    assert vocabulary.d2t.tolist() == build_vocabulary(counts, 5, 12).d2t.tolist()


def test_more_frequent_ids_win_and_ties_go_to_the_smaller_id() -> None:
    vocabulary = build_vocabulary(_counts(8, _1=5, _2=3, _4=3, _6=9), draft_size=3, tokenizer_size=8)
    assert vocabulary.draft_to_target.tolist() == [1, 2, 6]


def test_the_end_of_turn_is_there_even_if_it_never_occurred() -> None:
    counts = _counts(12, _3=4, _5=2, _9=7)
    vocabulary = build_vocabulary(counts, draft_size=3, tokenizer_size=12, required=[11])
    assert vocabulary.draft_to_target.tolist() == [3, 9, 11]
    assert vocabulary.coverage(counts) == pytest.approx(11 / 13)


def test_rows_without_a_token_are_never_chosen() -> None:
    counts = _counts(512, _505=1000, _3=1)
    vocabulary = build_vocabulary(counts, draft_size=500, tokenizer_size=500)
    assert vocabulary.t2d.shape == (512,)
    assert vocabulary.draft_to_target.tolist() == list(range(500))


def test_a_draft_between_tokenizer_and_embedding_size_is_refused() -> None:
    with pytest.raises(DataError, match=r"505; expected 1 to 500 .* or all 512 rows"):
        build_vocabulary(_counts(512), draft_size=505, tokenizer_size=500)


def test_the_whole_vocabulary_is_the_identity() -> None:
    vocabulary = build_vocabulary(_counts(512), draft_size=512, tokenizer_size=500)
    assert vocabulary.is_identity
    assert not vocabulary.d2t.any()
    assert vocabulary.t2d.all()


def test_a_draft_too_small_for_the_required_ids_is_refused() -> None:
    with pytest.raises(DataError, match="expected 2 to 12"):
        build_vocabulary(_counts(12), draft_size=1, tokenizer_size=12, required=[2, 3])


def test_only_answer_tokens_of_the_split_are_counted() -> None:
    def sample(split: str, ids: list[int], mask: list[int]) -> Sample:
        return Sample("k", "a", split, np.array(ids, np.int32), np.array(mask, np.uint8), 1, "stop")  # type: ignore[arg-type]

    samples = [sample("train", [1, 2, 2, 3], [0, 1, 1, 1]), sample("heldout", [1, 4], [0, 1])]
    assert answer_counts(samples, 6, "train").tolist() == [0, 0, 2, 1, 0, 0]
    assert answer_counts(samples, 6, "heldout").tolist() == [0, 0, 0, 0, 1, 0]


def test_a_saved_mapping_comes_back_and_damage_is_seen(tmp_path: Path) -> None:
    vocabulary = build_vocabulary(_counts(12, _3=4, _5=2, _9=7), draft_size=4, tokenizer_size=12)
    path = save_vocabulary(vocabulary, tmp_path)
    loaded = load_vocabulary(tmp_path)
    assert loaded.d2t.tolist() == vocabulary.d2t.tolist()
    assert loaded.t2d.tolist() == vocabulary.t2d.tolist()
    assert (loaded.d2t.dtype, loaded.t2d.dtype) == (np.int64, np.bool_)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(DataError, match=VOCABULARY_FILE):
        load_vocabulary(tmp_path)
    with pytest.raises(DataError, match="cannot read"):
        load_vocabulary(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("d2t", "t2d"), [([0, 0], [1, 0, 1]), ([0], [1, 0, 1]), ([5, 5], [1, 0, 1]), ([0, 1], [1, 1, 1])]
)
def test_a_mapping_whose_two_halves_disagree_is_refused(d2t: list[int], t2d: list[int]) -> None:
    with pytest.raises(DataError, match="one mapping"):
        DraftVocabulary(np.array(d2t, np.int64), np.array(t2d, bool))


def test_the_vocabulary_of_fixed_counts_changes_only_with_its_step_version(tmp_path: Path) -> None:
    """Golden output: when this fails and the change is meant, raise `STEP_VERSION["vocabulary"]` too."""
    counts = (np.arange(512) * 37) % 101
    path = save_vocabulary(build_vocabulary(counts, 64, 500, required=[2]), tmp_path)
    assert (STEP_VERSION["vocabulary"], hash_file(path)) == (1, "fe61e0f8186c0312472dace3c1088488")
