"""Speed of each objective's training step against MDLM's, on one network, in one run.

    python tests/benchmarks/objectives.py                                    width 256, 6 layers, L 256, vocabulary 4096, fp32
    python tests/benchmarks/objectives.py --precision bf16 --backbone llama --vocabulary 32000 --rounds 20

One process. In each round every objective takes one step (the whole of it: preliminary pass, forward, backward, clip, update), in an order
that turns from round to round; what counts is the median over rounds of its time divided by MDLM's in the same round, so that a slow spell of
the machine hits all alike. A verdict is unclear where the target lies between the quartiles: measure more rounds, or on a quieter machine. On
a CPU the same ratio of processor time is printed too, which hardly depends on what else runs.
Batches are made beforehand: noising runs ahead in a thread, and is timed on its own. So is the loss alone, on logits of the step's size:
its cost grows with the vocabulary and the network's with its FLOPs, which carries the ratio over to the 1.7B network.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from pretrain.backbones.config import BackboneConfig  # noqa: E402
from pretrain.build import OBJECTIVES, build_engine, build_objective  # noqa: E402
from pretrain.data.config import DataConfig  # noqa: E402
from pretrain.data.loader import Loader  # noqa: E402
from pretrain.data.random_text import RandomText  # noqa: E402
from pretrain.engine.config import PrecisionConfig  # noqa: E402
from pretrain.engine.loss import training_loss  # noqa: E402
from pretrain.objectives.config import EsoLMConfig, MDMPrimeConfig, ObjectiveConfig  # noqa: E402
from pretrain.parallel import groups as parallel_groups  # noqa: E402
from pretrain.parallel import platform  # noqa: E402
from pretrain.parallel.config import ParallelConfig  # noqa: E402
from pretrain.parallel.groups import Groups  # noqa: E402
from pretrain.rules import run_flops_per_token  # noqa: E402
from pretrain.run_config import BatchConfig, DurationConfig, RunConfig  # noqa: E402
from pretrain.selftest import assumed  # noqa: E402

LARGE = BackboneConfig(kind="dit", hidden=2176, layers=28, heads=17)
LARGE_LENGTH, LARGE_VOCABULARY = 2048, 131072
WARMUP = 2


@dataclass(frozen=True)
class Case:
    """An objective, and the share of MDLM's time that it may take."""

    label: str
    objective: ObjectiveConfig
    target: float | None


def cases(vocabulary: int) -> list[Case]:
    """MDLM first: the others are measured against it."""
    known = [
        Case("mdlm", ObjectiveConfig(name="mdlm"), None),
        Case("ar", ObjectiveConfig(name="ar"), None),
        Case("duo", ObjectiveConfig(name="duo"), 1.15),
        Case("esolm, alpha_0 = 1", ObjectiveConfig(name="esolm"), 1.05),
        Case("esolm, alpha_0 = 0.5", ObjectiveConfig(name="esolm", esolm=EsoLMConfig(alpha_0=0.5)), 1.45),
        Case("replaid", ObjectiveConfig(name="replaid"), 1.25),
        Case("mdm_prime", ObjectiveConfig(name="mdm_prime", mdm_prime=MDMPrimeConfig(digits=digits(vocabulary))), 1.15),
    ]
    return [case for case in known if case.objective.name in OBJECTIVES]


def digits(vocabulary: int) -> int:
    """Binary digits of its ids."""
    return math.ceil(math.log2(vocabulary))


@dataclass
class Contender:
    """One objective with its engine and one batch. Seconds of a step (wall and processor), of its losses, and of noising a batch, by round."""

    case: Case
    config: RunConfig
    step: Callable[[], object]
    loss: Callable[[], float]
    noise: Callable[[], object]
    steps: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    noises: list[float] = field(default_factory=list)

    def measure(self, device: torch.device) -> None:
        """One round."""
        before = time.process_time()
        self.steps.append(seconds(self.step, device))
        self.processor.append(time.process_time() - before)
        self.losses.append(self.loss())
        self.noises.append(seconds(self.noise, device))


def seconds(action: Callable[[], object], device: torch.device) -> float:
    """Wall time of an action, and of what it started on the device."""
    synchronize(device)
    start = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def prepare(case: Case, options: argparse.Namespace, precision: str, groups: Groups, device: torch.device) -> Contender:
    """The engine that training would build, and its first batch of random ids."""
    config = RunConfig(
        name=case.objective.name,
        tokenizer="none.model",
        objective=case.objective,
        backbone=BackboneConfig(kind=options.backbone, hidden=options.hidden, layers=options.layers, heads=options.heads or options.hidden // 64),
        data=DataConfig(loader="plain"),
        batch=BatchConfig(global_sequences=options.sequences, micro_sequences=options.micro, length=options.length),
        duration=DurationConfig(steps=1),
        precision=PrecisionConfig(compute=precision),  # type: ignore[arg-type]
    )
    objective = build_objective(case.objective, assumed(config, options.vocabulary))
    engine = build_engine(config, objective, groups, device)
    text = RandomText(
        config.batch, objective.vocabulary, corrupt=partial(objective.corrupt, evaluation=False), lookahead=objective.lookahead, seed=1,
        parts=objective.parts,
    )  # fmt: skip
    with Loader(text, config.data, config.batch, dp_rank=0, dp_size=1, steps=iter([0]), device=device) as loader:
        shard = next(loader)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    shape = (options.length, options.micro, objective.vocabulary.padded_size)
    logits_LBv = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)

    def losses() -> float:
        total = 0.0
        for batch in engine.prepared(shard, evaluation=False):
            scored = batch.targets["ids"].shape[1]  # Eso-LM's noisy stream may be shorter than the sequence
            fresh = logits_LBv[:scored].clone()  # the loss writes its gradient over the logits
            chunk = config.precision.loss_chunk
            total += seconds(partial(training_loss, objective, fresh, batch.targets, engine.vocab, scale=1e-4, chunk=chunk), device)
        return total

    return Contender(
        case, config, step=lambda: engine.train_step(shard, 1e-4), loss=losses, noise=lambda: [text.sample(i) for i in range(options.sequences)]
    )


def compare(options: argparse.Namespace, precision: str, groups: Groups, device: torch.device) -> None:
    """All objectives in one precision."""
    contenders = [prepare(case, options, precision, groups, device) for case in cases(options.vocabulary)]
    for number in range(WARMUP + options.rounds):
        turn = number % len(contenders)
        for contender in contenders[turn:] + contenders[:turn]:
            contender.measure(device)
        if number < WARMUP:
            for contender in contenders:
                for figures in (contender.steps, contender.processor, contender.losses, contender.noises):
                    figures.clear()
        print(f"\r{precision}: round {number + 1} of {WARMUP + options.rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    show(contenders, options, precision, device)


def show(contenders: list[Contender], options: argparse.Namespace, precision: str, device: torch.device) -> None:
    """The table of one precision."""
    reference, tokens = contenders[0], options.sequences * options.length
    flops = run_flops_per_token(reference.config, options.vocabulary)
    shape = f"{options.backbone}, width {options.hidden}, {options.layers} layers, L {options.length}, vocabulary {options.vocabulary}"
    table = Table(title=f"{precision}, {shape}; {options.sequences} sequences in micro-batches of {options.micro}; {device}, "
                        f"{torch.get_num_threads()} threads; medians of {options.rounds} rounds", title_justify="left")  # fmt: skip
    cpu = device.type == "cpu"
    columns = ["objective", "ms/step", "tokens/s", "time / MDLM", "quartiles", *(["processor"] if cpu else []), "FLOPs", "target", ""]
    for column in (*columns, "loss ms", "of step", "at 1.7B", "noising us/token"):
        table.add_column(column, justify="left" if column in ("objective", "") else "right")
    for contender in contenders:
        ratios, target = relative(contender.steps, reference.steps), contender.case.target
        ratio, (low, _, high) = statistics.median(ratios), statistics.quantiles(ratios, n=4)
        step, loss = statistics.median(contender.steps), statistics.median(contender.losses)
        processor = f"{statistics.median(relative(contender.processor, reference.processor)):.3f}"
        verdict = ("", "") if target is None else (f"{target:.2f}", "within" if high <= target else "over" if low > target else "unclear")
        work = run_flops_per_token(contender.config, options.vocabulary) / flops
        large = statistics.median(relative(at_large_size(contender, options), at_large_size(reference, options)))
        speed = [contender.case.label, f"{1e3 * step:.1f}", f"{tokens / step:,.0f}", f"{ratio:.3f}", f"{low:.3f}-{high:.3f}"]
        noising = f"{1e6 * statistics.median(contender.noises) / tokens:.2f}"
        row = [*speed, *([processor] if cpu else []), f"{work:.3f}", *verdict, f"{1e3 * loss:.1f}", f"{loss / step:.1%}", f"{large:.3f}", noising]
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 180, highlight=False).print(table)
    print(f"at 1.7B: time / MDLM on width {LARGE.hidden}, {LARGE.layers} layers, L {LARGE_LENGTH}, vocabulary {LARGE_VOCABULARY}, if the loss grows "
          "with the vocabulary (and the digits), and everything else with the FLOPs")  # fmt: skip


def relative(own: list[float], reference: list[float]) -> list[float]:
    """Round by round."""
    return [value / other for value, other in zip(own, reference, strict=True)]


def at_large_size(contender: Contender, options: argparse.Namespace) -> list[float]:
    """Seconds per token on the 1.7B network by round, carried over from this one."""
    growth = LARGE_VOCABULARY / options.vocabulary
    objective = contender.case.objective
    if objective.name == "mdm_prime":
        objective = replace(objective, mdm_prime=replace(objective.mdm_prime, digits=digits(LARGE_VOCABULARY)))
        growth *= digits(LARGE_VOCABULARY) / digits(options.vocabulary)
    batch = replace(contender.config.batch, length=LARGE_LENGTH)
    large = replace(contender.config, objective=objective, backbone=replace(LARGE, kind=options.backbone), batch=batch)
    flops = run_flops_per_token(large, LARGE_VOCABULARY) / run_flops_per_token(contender.config, options.vocabulary)
    rounds = zip(contender.steps, contender.losses, strict=True)
    return [((step - loss) * flops + loss * growth) / (options.sequences * options.length) for step, loss in rounds]


def main() -> None:
    """Parse, and compare in each precision."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 256), ("layers", 6), ("length", 256), ("vocabulary", 4096), ("sequences", 16), ("micro", 4), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--heads", type=int, help="default: one per 64 of width")
    parser.add_argument("--backbone", choices=("dit", "llama"), default="dit")
    parser.add_argument("--precision", choices=("fp32", "bf16"), nargs="+", default=["fp32"])
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds must be at least 2: quartiles need two")
    if options.sequences % (2 * options.micro):
        parser.error("--sequences must be a multiple of twice --micro: Eso-LM's halves are whole micro-batches")
    device = platform.device()
    groups = parallel_groups.initialize(ParallelConfig(), seed=1)
    for precision in options.precision:
        compare(options, precision, groups, device)
    parallel_groups.shutdown()


if __name__ == "__main__":
    main()
