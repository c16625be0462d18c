"""An exported draft computes what the trainer computed: in speculators' own model, and in the real vLLM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3_core.capture.reference import ReferenceModel
from eagle3_core.config import RunConfig, parse_config
from eagle3_core.data.vocabulary import DraftVocabulary, build_vocabulary
from eagle3_core.serving import export
from eagle3_core.serving.acceptance import acceptance_figures, text_passes
from eagle3_core.serving.decoding import DecodingEngine
from eagle3_core.serving.lossless import load_reference
from eagle3_core.store.samples import SamplePlace
from eagle3_core.store.shards import CapturedSample
from eagle3_core.target.weights import FinalHead
from eagle3_core.training.draft import build_draft, checkpoint_tensors, teacher_of, trained_parameters
from eagle3_core.training.evaluate import HeldoutEvaluator
from eagle3_core.training.labels import LabelMaker
from eagle3_core.training.loader import PackReader, StoredSample, build_pack, label_states
from eagle3_core.training.loss import pack_loss, step_weights
from eagle3_core.training.ttt import Pack, ttt_forward
from tests.serving.drafts import AUX_IDS, END_TOKEN, NUM_TOKENS, Factory, make_factory, silent
from tests.tiny import make_tiny_target
from tests.training.examples import random_sample, speculators_forward

pytestmark = pytest.mark.engine

MAX_TOKENS = 24
SPOKEN = tuple(range(20, 26))
"""The only tokens that the target answers with: so few that a random draft is often right."""
DRAFT_SIZE = len(SPOKEN) + 1
FLAGS: list[dict[str, Any]] = [
    {"num_layers": 2, "fc_norm": True, "norm_output": True},
    {"norm_before_fc": True, "norm_before_residual": True},
]
DEPTHS = (3, 5)


@dataclass
class Made:
    """A random draft, as the trainer holds it and as it was exported."""

    factory: Factory
    config: RunConfig
    answers: dict[str, tuple[list[int], list[int]]]
    vocabulary: DraftVocabulary
    draft: Any
    folder: Path


@pytest.fixture(scope="module", params=range(len(FLAGS)), ids=lambda index: ",".join(FLAGS[index]))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("numerics")
    target = _terse_target(root / "target")
    depth = DEPTHS[request.param]
    factory = make_factory(root, target, max_tokens=MAX_TOKENS, num_speculative_tokens=depth)
    document = factory.config.model_dump(mode="json")
    document["target"]["dtype"] = document["train"]["compute_dtype"] = "float32"
    document["draft"] |= {"vocab_size": DRAFT_SIZE} | FLAGS[request.param]
    config = parse_config(document)
    answers = _greedy_answers(ReferenceModel(factory.target, "float32"))
    counts = np.zeros(factory.target.vocab_size, np.int64)
    for _, answer in answers.values():
        counts += np.bincount(answer, minlength=len(counts))
    vocabulary = build_vocabulary(counts, DRAFT_SIZE, NUM_TOKENS, [END_TOKEN])
    draft = _random_draft(config, factory, vocabulary)
    mapping = {"d2t": torch.from_numpy(vocabulary.d2t), "t2d": torch.from_numpy(vocabulary.t2d)}
    checkpoint = factory.add_checkpoint(
        draft.config.to_dict(), checkpoint_tensors(draft), mapping, str(request.param)
    )
    spec = factory.export_spec(checkpoint)
    export.run(spec, silent())
    folder = factory.store.folder(spec.outputs["export"].ref) / "vllm"
    return Made(factory, config, answers, vocabulary, draft, folder)


def _terse_target(folder: Path) -> Path:
    make_tiny_target(folder, num_layers=4)
    weights = load_file(folder / "model.safetensors")
    silent_rows = torch.ones(len(weights["lm_head.weight"]), dtype=torch.bool)
    silent_rows[list(SPOKEN)] = False
    weights["lm_head.weight"][silent_rows] = 0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _random_draft(config: RunConfig, factory: Factory, vocabulary: DraftVocabulary) -> Any:
    """Weights that bf16 holds exactly, all norms far from one."""
    draft = build_draft(config, factory.target, vocabulary)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in trained_parameters(draft).values():
            parameter += (0.3 if parameter.ndim == 1 else 0.1) * torch.randn(
                parameter.shape, generator=generator
            )
            parameter.copy_(parameter.bfloat16())
        draft.lm_head.weight.copy_(draft.lm_head.weight.bfloat16())
    return draft


def _greedy_answers(model: ReferenceModel) -> dict[str, tuple[list[int], list[int]]]:
    random = np.random.default_rng(5)
    answers = {}
    for number in range(12):
        prompt = random.integers(10, NUM_TOKENS, size=3 + number % 5).tolist()
        answer: list[int] = []
        while len(answer) < MAX_TOKENS and END_TOKEN not in answer:
            ids = torch.tensor(prompt + answer)
            answer.append(int(model.forward(ids, ())[1][-1].argmax()))
        answers[f"answer-{number}"] = (prompt, answer)
    return answers


def test_speculators_own_model_has_the_same_loss_with_the_exported_folder(made: Made) -> None:
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    config = Eagle3SpeculatorConfig.from_pretrained(made.folder)
    config.transformer_layer_config._attn_implementation = "eager"
    loaded = Eagle3DraftModel.from_pretrained(made.folder, config=config, dtype=torch.float32)
    # Its loader leaves an embedding that is not in the file as raw memory, and replaces it only where NaN is.
    torch.nn.init.constant_(loaded.embed_tokens.weight, torch.nan)
    loaded.load_verifier_weights()
    loaded.float()
    masks = ([0] * 7 + [1] * 12, [0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0])
    samples = [random_sample(made.factory.target, mask, f"s{i}", seed=i) for i, mask in enumerate(masks)]
    expected = speculators_forward(loaded, samples, 3, 0.8)
    pack = build_pack(samples, 3)
    found = pack_loss(
        ttt_forward(made.draft, pack, torch.float32),
        made.draft.lm_head.weight,
        pack.final_states,
        teacher_of(made.draft, torch.float32),
        pack.plan,
        step_weights(pack.plan.counts, 0.8),
    )
    assert found.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert tuple(loaded.config.eagle_aux_hidden_state_layer_ids) == AUX_IDS


def test_the_reference_of_the_lossless_check_chooses_the_targets_own_tokens(made: Made) -> None:
    next_logits = load_reference(made.config, made.factory.target.path)
    for prompt, answer in list(made.answers.values())[:3]:
        assert [int(next_logits(prompt + answer[:j]).argmax()) for j in range(3)] == answer[:3]
    assert next_logits([1, 2]).dtype == torch.float32


class InMemory(PackReader):
    """Captured samples that lie in no shard, and their labels."""

    def __init__(
        self, captured: Sequence[CapturedSample], prompt_lengths: Sequence[int], steps: int, maker: LabelMaker
    ) -> None:
        stored = [
            StoredSample(
                one.key, SamplePlace("", index), len(one.input_ids), length, len(one.input_ids) - length
            )
            for index, (one, length) in enumerate(zip(captured, prompt_lengths, strict=True))
        ]
        super().__init__(None, stored, steps)  # type: ignore[arg-type]
        self._captured, self._made = captured, maker.labels(map(label_states, captured))

    def packs(self, plan: Sequence[Sequence[int]]) -> Iterator[Pack]:
        for members in plan:
            labels = [self._made[index] for index in members]
            yield build_pack([self._captured[index] for index in members], self.num_steps, labels)


def _captured(made: Made) -> list[CapturedSample]:
    model, captured = ReferenceModel(made.factory.target, "float32"), []
    for key, (prompt, answer) in made.answers.items():
        ids = torch.tensor(prompt + answer)
        mask = torch.tensor([0] * len(prompt) + [1] * len(answer), dtype=torch.uint8)
        rows = 1 + mask[1:].nonzero().squeeze(-1)
        states, _ = model.forward(ids, (*AUX_IDS, made.factory.target.num_layers))
        captured.append(CapturedSample(key, ids.int(), mask, states[:, :3], states[rows, 3], rows))
    return captured


def test_vllm_accepts_in_every_pass_what_the_trainers_replay_accepts(made: Made) -> None:
    depth = made.config.benchmark.num_speculative_tokens
    prompts = [prompt for prompt, _ in made.answers.values()]
    with DecodingEngine(made.config, made.factory.target.path, made.folder) as engine:
        decoded = engine.decode(prompts, MAX_TOKENS)
    assert [one.token_ids for one in decoded] == [answer for _, answer in made.answers.values()]
    passes = [text_passes(one.drafted, one.accepted, len(one.token_ids)) for one in decoded]
    measured = acceptance_figures(passes, depth)

    maker = LabelMaker(FinalHead(made.factory.target), made.vocabulary)
    evaluator = HeldoutEvaluator(
        InMemory(_captured(made), list(map(len, prompts)), depth, maker), made.config, list(made.answers),
    )  # fmt: skip
    target_ids = torch.from_numpy(made.vocabulary.draft_to_target)
    found = evaluator.evaluate(made.draft, teacher_of(made.draft, torch.float32), target_ids)

    assert found.benchmark == found.heldout == measured
    accepted = Counter(one.accepted for group in passes for one in group)
    assert min(accepted[0], accepted[1], accepted[2]) >= 3, "always or never right would show nothing"
