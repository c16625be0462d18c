"""Compares the drafts that speculators 0.9.0 and we train from equal data, steps and settings.

`python -m benchmarks.train_quality --workspace workspace` takes what the newest run there trained on;
`--profile P --capture ID` takes a capture in a store, `--tiny` a synthetic one. All drafts start from one set
of weights and take the same packs in the same order, a step each in turn, with the same learning rates,
optimizer, clipping and TTT steps. Beside these two, ours runs with a trained LM head, and with the acceptance
loss.

Our held-out estimator scores all: it counts a target's choice outside the draft vocabulary as a miss, which
speculators' own figures leave out. On documents whose loss starts after the first T - 1 rows both losses are
one function of the weights, so the two drafts differ by what rounding grows to; `--seeds` shows how far.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from benchmarks.quality_inputs import Inputs, NewLabels, inputs_of_capture, inputs_of_run, open_inputs
from benchmarks.quality_trainers import OURS, SPECULATORS, TRAINERS, Trial, begin, config_of, start_draft
from benchmarks.tiny_capture import tiny_config, write_tiny_capture
from eagle3_core.config import RunConfig, parse_config
from eagle3_core.errors import Eagle3Error
from eagle3_core.target.info import inspect_target
from eagle3_core.training.ahead import ReadAhead
from eagle3_core.training.draft import DTYPES, teacher_of
from eagle3_core.training.evaluate import HeldoutEvaluator, steps_to_unroll
from eagle3_core.training.loader import PackReader, plan_packs
from eagle3_core.training.noise import with_noise
from eagle3_core.training.schedule import learning_rate
from eagle3_core.training.ttt import Pack


def packs_in_order(reader: PackReader, config: RunConfig, num_steps: int) -> Iterator[tuple[int, Pack]]:
    """Epoch and pack of each optimizer step, as the training loop takes them."""
    lengths, train = [sample.num_tokens for sample in reader.samples], config.train
    left = num_steps
    for epoch in count():
        plan = plan_packs(lengths, train.pack_tokens, train.seed, epoch)[:left]
        with ReadAhead(reader.packs(plan)) as packs:
            yield from ((epoch, pack) for pack in packs)
        left -= len(plan)
        if not left:
            return


def take_steps(
    trials: Sequence[Trial],
    packs: Iterable[tuple[int, Pack]],
    num_steps: int,
    marks: Sequence[int],
    look: Callable[[int], None],
) -> None:
    """Take every step with each trainer in turn, and look at the start and after the steps in `marks`."""
    config = trials[0].config
    look(0)
    for step, (epoch, pack) in enumerate(packs):
        moved = pack.to(trials[0].draft.device)
        noisy = with_noise(moved, config.train, trials[0].draft.hidden_size, epoch)
        for trial in trials:
            trial.step(noisy, learning_rate(config.train, step, num_steps))
        if step + 1 in marks:
            look(step + 1)


def compare(
    inputs: Inputs, names: Sequence[str], evaluator: HeldoutEvaluator, num_steps: int, num_looks: int
) -> list[Trial]:
    """Train with all trainers from one draft, printing a row of the table at each evaluation."""
    config, device = inputs.config, inputs.config.engine.device
    reader = PackReader(inputs.source, inputs.index.splits["train"], config.train.ttt_steps)
    start = start_draft(inputs, reader)
    longest = max(config.train.pack_tokens, *(sample.num_tokens for sample in reader.samples))
    trials = [begin(name, start, config, longest) for name in names]
    target_ids = torch.from_numpy(inputs.vocabulary.draft_to_target).to(device)
    teacher = teacher_of(trials[0].draft, DTYPES[config.train.compute_dtype])

    def look(step: int) -> None:
        for trial in trials:
            is_known = step == 0 and trial is not trials[0]  # they have not parted yet
            found = (
                trials[0].looks[0][1] if is_known else evaluator.evaluate(trial.draft, teacher, target_ids)
            )
            trial.looks.append((step, found))
        print(row(step, [trial.lengths()[-1] for trial in trials], names), flush=True)

    print(f"\nseed {config.train.seed}: held-out acceptance length\n{header(names)}")
    packs = packs_in_order(reader, config, num_steps)
    take_steps(trials, packs, num_steps, looks_at(num_steps, num_looks), look)
    return trials


def looks_at(num_steps: int, num_looks: int) -> list[int]:
    """Steps after which the held-out split is looked at: evenly spread, the last one among them."""
    return sorted({max(1, round(num_steps * (number + 1) / num_looks)) for number in range(num_looks)})


def header(names: Sequence[str]) -> str:
    """First line of a table of acceptance lengths."""
    both = f"{'ours - speculators':>20}" if {SPECULATORS, OURS} <= set(names) else ""
    return f"{'step':>6}" + "".join(f"{name:>17}" for name in names) + both


def row(step: int, lengths: Sequence[float], names: Sequence[str]) -> str:
    """A line of it."""
    found = dict(zip(names, lengths, strict=True))
    both = f"{found[OURS] - found[SPECULATORS]:>+20.4f}" if {SPECULATORS, OURS} <= found.keys() else ""
    return f"{step:>6}" + "".join(f"{length:>17.4f}" for length in lengths) + both


def details(trials: Sequence[Trial]) -> Iterator[str]:
    """Lines of the last evaluation of each trainer."""
    step, last = trials[0].looks[-1]
    depth = last.heldout.num_speculative_tokens
    yield f"after {step} steps: K={depth}, {last.heldout.num_samples} answers; rates by position"
    yield (
        f"{'':17}{'length':>8}  {'accepted':{7 * depth}}{'accepted if all before':{max(24, 7 * depth)}}"
        f"{'agrees with argmax':{max(20, 7 * depth)}}{'held-out loss':>14}{'train loss':>12}{'s a step':>10}"
    )
    for trial in trials:
        found = trial.looks[-1][1]
        recent = trial.losses[-max(1, len(trial.losses) // 10) :]
        yield (
            f"{trial.name:17}{found.heldout.acceptance_length:8.4f}  "
            f"{rates(found.heldout.per_position):{7 * depth}}"
            f"{rates(found.heldout.conditional):{max(24, 7 * depth)}}"
            f"{rates(found.rates.unconditional[:depth]):{max(20, 7 * depth)}}"
            f"{found.loss:14.4f}{statistics.mean(recent):12.4f}{trial.seconds / len(trial.losses):10.3f}"
        )


def rates(values: Sequence[float | None]) -> str:
    """Shares by position; `-` where there are none."""
    return " ".join("-" if value is None else f"{value:.4f}" for value in values)


def gains(runs: Sequence[Sequence[Trial]]) -> dict[str, list[float]]:
    """What ours gains on speculators, and each of our options on ours, in acceptance length: one a seed."""
    found: dict[str, list[float]] = {}
    for trials in runs:
        last = {trial.name: trial.lengths()[-1] for trial in trials}
        for name, length in last.items():
            base = SPECULATORS if name == OURS else OURS
            if name != SPECULATORS and base in last:
                found.setdefault(f"{name} - {base}", []).append(length - last[base])
    return found


def verdict(found: dict[str, list[float]]) -> Iterator[str]:
    """A line for each gain."""
    for name, values in found.items():
        spread = f", standard deviation {statistics.stdev(values):.4f}" if len(values) > 1 else ""
        seeds = "1 seed" if len(values) == 1 else f"{len(values)} seeds"
        yield f"{name}: {statistics.mean(values):+.4f} in acceptance length ({seeds}{spread})"


def document(trial: Trial) -> dict[str, Any]:
    """A trainer's figures as JSON-able values."""
    looks = [
        {
            "step": step,
            "acceptance_length": found.heldout.acceptance_length,
            "heldout": found.heldout.model_dump(mode="json"),
            "agreement": asdict(found.rates),
            "heldout_loss": found.loss,
        }
        for step, found in trial.looks
    ]
    return {"losses": trial.losses, "seconds": trial.seconds, "evaluations": looks}


def choose_inputs(options: argparse.Namespace, scratch: Path) -> Inputs:
    """The inputs that the command line names."""
    if options.workspace:
        return inputs_of_run(options.workspace, options.run, options.set)
    if options.profile:
        return inputs_of_capture(options.profile, options.store, options.capture, options.target, options.set)
    config = tiny_config(scratch, options.set)
    refs = write_tiny_capture(scratch)
    return open_inputs(config, inspect_target(Path(config.target.model)), refs)


def with_settings(inputs: Inputs, seed: int | None, device: str | None) -> Inputs:
    """The same inputs with another seed or device; None leaves the configuration's."""
    document = inputs.config.model_dump(mode="json")
    if seed is not None:
        document["train"]["seed"] = seed
    if device is not None:
        document["engine"]["device"] = device
    return replace(inputs, config=parse_config(document))


def planned_steps(inputs: Inputs) -> int:
    """Optimizer steps of the configuration's epochs."""
    train, samples = inputs.config.train, inputs.index.splits["train"]
    lengths = [sample.num_tokens for sample in samples]
    return sum(
        len(plan_packs(lengths, train.pack_tokens, train.seed, epoch)) for epoch in range(train.num_epochs)
    )


def describe(inputs: Inputs, num_steps: int) -> str:
    """The line above the tables."""
    config, splits = inputs.config, inputs.index.splits
    train = config.train
    return (
        f"{config.name} on {config.engine.device}, {train.compute_dtype}: {len(splits['train'])} samples to "
        f"train on, {len(splits['heldout'])} held out, {len(inputs.index.skipped)} left out; {num_steps} "
        f"steps of packs of up to {train.pack_tokens} tokens, {train.ttt_steps} TTT steps with decay "
        f"{train.step_loss_decay:g}, {train.optimizer} at {train.learning_rate:g} ({train.schedule}), "
        f"clipping at {train.max_grad_norm:g}"
    )


def run(options: argparse.Namespace, scratch: Path) -> None:
    """All seeds of a comparison; the file of figures is written after each."""
    inputs = with_settings(choose_inputs(options, scratch), None, options.device)
    num_steps = options.steps or planned_steps(inputs)
    base = config_of(OURS, inputs.config)
    heldout = inputs.index.splits["heldout"]
    reader = PackReader(inputs.source, heldout, steps_to_unroll(base), NewLabels(inputs, heldout))
    evaluator = HeldoutEvaluator(reader, base, ())
    print(describe(inputs, num_steps))
    runs: list[list[Trial]] = []
    for seed in options.seeds or [inputs.config.train.seed]:
        seeded = with_settings(inputs, seed, None)
        runs.append(compare(seeded, options.trainers, evaluator, num_steps, options.evaluations))
        print("\n".join(details(runs[-1])))
        if options.json:
            options.json.write_text(json.dumps(result(inputs.config, num_steps, runs), indent=1))
    print("\n" + "\n".join(verdict(gains(runs))))


def result(config: RunConfig, num_steps: int, runs: Sequence[Sequence[Trial]]) -> dict[str, Any]:
    """Every figure of the seeds done so far, as JSON-able values."""
    return {
        "config": config.model_dump(mode="json"),
        "steps": num_steps,
        "seeds": [trials[0].config.train.seed for trials in runs],
        "runs": [{trial.name: document(trial) for trial in trials} for trials in runs],
        "gains": gains(runs),
    }


def main() -> None:
    """Compare on what the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--workspace", type=Path, help="of a run that came as far as training")
    data.add_argument("--profile", help="of a capture in a store: path or name")
    data.add_argument("--tiny", action="store_true", help="a small synthetic capture, for seconds")
    parser.add_argument("--run", help="id of a run in the workspace; the newest by default")
    parser.add_argument("--capture", help="with --profile: the capture's id")
    parser.add_argument("--store", help="with --profile: root of the store, if not the profile's")
    parser.add_argument("--target", type=Path, help="with --profile: the target's folder")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override; repeatable"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="the configuration's by default")
    parser.add_argument("--steps", type=int, help="optimizer steps; those of the configuration by default")
    parser.add_argument("--evaluations", type=int, default=4, help="evaluations after the first")
    parser.add_argument(
        "--seeds", type=int, nargs="+", help="several trainings; the configuration's by default"
    )
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=list(TRAINERS))
    parser.add_argument("--json", type=Path, help="write all figures to a file")
    options = parser.parse_args()
    if options.profile and not options.capture:
        parser.error("--profile needs --capture")
    if min(options.evaluations, options.steps or 1) < 1:
        parser.error("--steps and --evaluations are at least 1")
    try:
        with tempfile.TemporaryDirectory() as scratch:
            run(options, Path(scratch))
    except Eagle3Error as error:
        parser.exit(error.exit_code, f"{error}\n")


if __name__ == "__main__":
    main()
