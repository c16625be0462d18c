"""The step `prepare`: the target's answers, the tokenised dataset and the draft vocabulary.

Each of the three artifacts is reused if it is intact. The limits on what may be rejected are applied every
time and are no part of the artifacts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle3_core.contracts import PrepareResult, Rejection, StepSpec
from eagle3_core.data.conversations import Prompt, read_prompts
from eagle3_core.data.ledger import Ledger
from eagle3_core.data.regenerate import AnswerLog, Regenerated, regenerate
from eagle3_core.data.samples import (
    Conversation,
    build_samples,
    read_conversations,
    write_conversations,
)
from eagle3_core.data.template import ChatTemplate, load_chat_template
from eagle3_core.data.vocabulary import answer_counts, build_vocabulary, save_vocabulary
from eagle3_core.errors import DataError
from eagle3_core.identity import prompt_facts, prompt_files, prompt_hashes
from eagle3_core.step import Progress
from eagle3_core.store.dataset import (
    DATASET_FILE,
    content_hash,
    read_dataset,
    sample_counts,
    write_dataset,
)
from eagle3_core.store.files import atomic_file
from eagle3_core.store.open import open_store

if TYPE_CHECKING:
    from vllm import LLM

ANSWER_LOG = "answers.jsonl"

logger = logging.getLogger(__name__)


def run(spec: StepSpec, progress: Progress) -> PrepareResult:
    """Make the artifacts `conversations`, `dataset` and `vocabulary`.

    Raises:
        DataError: nothing was kept, too much was rejected, or a split is empty.
    """
    return _Preparation(spec, progress).run()


class _Preparation:
    """One run of the step."""

    def __init__(self, spec: StepSpec, progress: Progress) -> None:
        self._spec, self._config, self._progress = spec, spec.config, progress
        self._store = open_store(spec.config)
        self._generated_tokens, self._seconds = 0, 0.0

    @cached_property
    def _chat(self) -> ChatTemplate:
        return load_chat_template(
            Path(self._spec.target_path), trust_remote_code=self._config.target.trust_remote_code
        )

    def run(self) -> PrepareResult:
        if not self._reuses("dataset"):
            if "conversations" not in self._spec.outputs:
                raise DataError(
                    f"{self._spec.outputs['dataset'].ref} was imported and is not intact",
                    remedy="import it again (`eagle3 capture import`)",
                )
            if not self._reuses("conversations"):
                self._make_conversations()
            self._make_dataset()
        facts = self._facts("dataset")
        rejected = [Rejection.model_validate(rejection) for rejection in facts["rejected"]]
        self._check(Ledger(facts["num_read"], facts["num_kept"], rejected), facts)
        if not self._reuses("vocabulary") or self._result().content_hash != facts["content_hash"]:
            self._make_vocabulary(facts, rejected)
        return self._result().model_copy(update=self._speed())

    def _result(self) -> PrepareResult:
        return PrepareResult.model_validate(self._facts("vocabulary")["result"])

    def _reuses(self, kind: str) -> bool:
        ref = self._spec.outputs[kind].ref
        intact = self._store.is_intact(ref)
        if intact:
            logger.info("%s is there and intact", ref)
        return intact

    def _facts(self, kind: str) -> dict[str, Any]:
        return self._store.read(self._spec.outputs[kind].ref).facts

    def _folder(self, kind: str) -> Path:
        return self._store.fetch(self._spec.outputs[kind].ref)

    def _speed(self) -> dict[str, Any]:
        rate = self._generated_tokens / self._seconds if self._generated_tokens and self._seconds else None
        return {"generated_tokens": self._generated_tokens, "generated_tokens_per_second": rate}

    def _make_conversations(self) -> None:
        config = self._config
        started = time.monotonic()
        self._check_prompts()
        found = read_prompts(prompt_files(config), config.data.heldout_fraction, config.limit)
        logger.info(
            "%d prompts; %d rows rejected, %d left out by the limit",
            len(found.prompts), len(found.rejected), found.num_left_out,
        )  # fmt: skip
        with self._store.writer(self._spec.outputs["conversations"], self._spec.run_id) as writer:
            if writer.is_complete:
                return
            log = AnswerLog(writer.folder / ANSWER_LOG)
            try:
                made = regenerate(found.prompts, self._chat, config, self._load_engine, log, self._progress)
            finally:
                log.close()
            self._generated_tokens, self._seconds = made.generated_tokens, made.seconds
            conversations = _complete(found.prompts, made)
            writer.complete(
                [write_conversations(writer.folder, conversations)],
                seconds=time.monotonic() - started,
                num_read=found.num_read,
                num_kept=len(conversations),
                rejected=[r.model_dump() for r in (*found.rejected, *made.rejected)],
                num_left_out=found.num_left_out,
                num_replaced_answers=found.num_replaced_answers,
                prompt_files=prompt_facts(config),
                target_model=config.target.model,
                num_answer_tokens=sum(len(a.token_ids) for c in conversations for a in c.answers),
                generated_tokens_per_second=self._speed()["generated_tokens_per_second"],
            )

    def _check_prompts(self) -> None:
        """Refuse prompts that were changed after the run was planned: their id would be another one."""
        planned = self._spec.outputs["conversations"].identity["prompts"]
        if prompt_hashes(self._config) != planned:
            names = ", ".join(str(file) for file in prompt_files(self._config))
            raise DataError(f"the prompts were changed during the run: {names}", remedy="start the run again")

    def _load_engine(self) -> LLM:
        from eagle3_core.target.vllm_engine import load_vllm

        self._progress(0, None, "answers", "loading the target", force=True)
        return load_vllm(self._config, self._spec.target_path)

    def _make_dataset(self) -> None:
        started = time.monotonic()
        data, facts = self._config.data, self._facts("conversations")
        conversations = read_conversations(self._folder("conversations"))
        self._progress(0, len(conversations), "samples", "tokenising", force=True)
        made = build_samples(conversations, self._chat, data.max_length, data.min_trainable_tokens)
        earlier = [Rejection.model_validate(rejection) for rejection in facts["rejected"]]
        ledger = Ledger(facts["num_read"], len(made.samples), earlier + made.rejected)
        counts = sample_counts(made.samples)
        self._check(ledger, counts)
        if made.num_unmasked_answers:
            logger.warning(
                "%d earlier answers are not trained on: the tokenizer makes other tokens of their text",
                made.num_unmasked_answers,
            )
        with self._store.writer(self._spec.outputs["dataset"], self._spec.run_id) as writer:
            with atomic_file(writer.folder / DATASET_FILE) as handle:
                write_dataset(Path(handle.name), made.samples)
            writer.complete(
                [writer.folder / DATASET_FILE],
                seconds=time.monotonic() - started,
                num_read=ledger.num_read,
                num_kept=ledger.num_kept,
                rejected=[rejection.model_dump() for rejection in ledger.rejected],
                num_truncated=made.num_truncated,
                num_unmasked_answers=made.num_unmasked_answers,
                content_hash=content_hash(made.samples),
                **counts,
            )

    def _check(self, ledger: Ledger, counts: dict[str, Any]) -> None:
        ledger.check(self._config.data.max_rejected_fraction, is_rehearsal=self._config.limit is not None)
        for split in ("train", "heldout"):
            if not counts[f"num_{split}"]:
                raise DataError(
                    f"none of the {ledger.num_kept:,} samples is in the split {split}",
                    remedy="change data.heldout_fraction or the rows' `split`",
                )

    def _make_vocabulary(self, facts: dict[str, Any], rejected: list[Rejection]) -> None:
        started = time.monotonic()
        plan = self._spec.outputs["vocabulary"]
        draft_size, target_size = plan.identity["draft_vocab_size"], plan.identity["target_vocab_size"]
        samples = read_dataset(self._folder("dataset"))
        train = answer_counts(samples, target_size, "train")
        heldout = answer_counts(samples, target_size, "heldout")
        vocabulary = build_vocabulary(train, draft_size, self._chat.num_ids, self._chat.end_ids)
        result = PrepareResult(
            num_read=facts["num_read"],
            num_kept=facts["num_kept"],
            rejected=rejected,
            num_train=facts["num_train"],
            num_heldout=facts["num_heldout"],
            num_tokens=facts["num_tokens"],
            num_trainable_tokens=facts["num_trainable_tokens"],
            num_truncated=facts["num_truncated"],
            content_hash=facts["content_hash"],
            vocabulary_coverage=vocabulary.coverage(train + heldout),
            **self._speed(),
        )
        with self._store.writer(plan, self._spec.run_id) as writer:
            writer.complete(
                [save_vocabulary(vocabulary, writer.folder)],
                seconds=time.monotonic() - started,
                result=result.model_dump(mode="json"),
                draft_vocab_size=draft_size,
                num_observed_ids=int(np.count_nonzero(train)),
                train_coverage=vocabulary.coverage(train),
                heldout_coverage=vocabulary.coverage(heldout),
            )


def _complete(prompts: Sequence[Prompt], made: Regenerated) -> list[Conversation]:
    answers = made.answers
    return [Conversation(prompt, answers[prompt.key]) for prompt in prompts if prompt.key in answers]
