"""Speed of Eso-LM's samplers with their key/value cache, against masked diffusion and autoregression, on one small DiT with random weights.

    python tests/benchmarks/sampling.py 256 512 1024
    python tests/benchmarks/sampling.py 8192 --patience 20 --rounds 1 --only MDLM Eso-LM --threads 1

Every sampler draws the same number of tokens from the same network. MDLM takes L ancestral steps and evaluates only sequences that a step
changes; Eso-LM takes the same steps (and so as many evaluations) with its cache; AR decodes from a cache. Rounds are interleaved, so that a
slow spell of the machine hits all of them, and times are medians.

Beside each time stands what explains it: network evaluations, positions asked about, and floating-point operations,

    2 (12 n d^2) per position + 4 n d per position and key that it sees + 2 d V per drawn token + conditioning per evaluation and sequence

for n layers of width d (`COUNTED` in the table, from a dry run that draws the same reveals without a network), and a time that a model with
two constants of this run predicts: calls * (time of a cached call of one position and its draw) + operations / (rate of a full forward pass).
Operations alone overstate what a cache saves while calls are small; the first constant says by how much.

A sampler whose network would take longer than --patience seconds asks it in earnest in a sample of its calls only: one in the middle of each of n
equal parts of the trajectory, at least 8, which stands for its part; noise, draws and the rest are done for every call. Such times carry the
number of calls that were made. On a busy machine, --cpu-time counts the seconds of one thread instead of those of the clock.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from pretrain.hf_model.attention_patterns import KeyValueCache  # noqa: E402
from pretrain.hf_model.configuration_network import NetworkConfig  # noqa: E402
from pretrain.hf_model.modeling_dit import TIME_FREQUENCIES, DiT  # noqa: E402
from pretrain.hf_model.network_input import Attention, NetworkInput  # noqa: E402
from pretrain.hf_model.sampling_ar import sample_ar  # noqa: E402
from pretrain.hf_model.sampling_draw import TokenLaw  # noqa: E402
from pretrain.hf_model.sampling_esolm import sample_esolm, sample_esolm_block, sample_esolm_left_to_right  # noqa: E402
from pretrain.hf_model.sampling_mdlm import sample_mdlm  # noqa: E402
from pretrain.hf_model.sampling_network import CausalDenoiser, Request  # noqa: E402

Sampler = Callable[[CausalDenoiser, Tensor, Request], object]
"""Fills masks [B, L]."""


clock = time.perf_counter
"""Seconds; replaced by those of this process with --cpu-time."""


@dataclass
class Work:
    """What a sampler asked of its network."""

    calls: int = 0
    sequences: int = 0
    positions: int = 0
    pairs: int = 0
    drawn: int = 0

    def flops(self, config: NetworkConfig) -> float:
        """Multiply-adds twice, over matrix products; pairs are a query and a key that it sees."""
        layer = 4 * config.hidden**2 + 2 * config.hidden * config.ffn
        conditioning = config.cond_dim * (TIME_FREQUENCIES + config.cond_dim + (6 * config.layers + 2) * config.hidden)
        trunk = config.layers * (2 * layer * self.positions + 4 * config.hidden * self.pairs)
        return trunk + 2 * conditioning * self.sequences + 2 * config.hidden * config.vocab_size * self.drawn


@dataclass
class Meter:
    """A denoiser that counts its work, and does that of the calls in `weights` only; elsewhere every token is equally likely.

    weights  number of a call that is made -> how many calls it stands for; None: every call is made.
    seconds  of the network in the calls that were made; `represented`: in those that they stand for.
    """

    config: NetworkConfig
    network: DiT | None = None
    weights: dict[int, int] | None = None
    work: Work = field(default_factory=Work)
    seconds: float = 0.0
    represented: float = 0.0

    @property
    def weight(self) -> int:
        """Of the call that is being made; 0 where it is only counted."""
        if self.network is None:
            return 0
        return 1 if self.weights is None else self.weights.get(self.work.calls, 0)

    def _timed(self, compute: Callable[[], Tensor]) -> Tensor:
        start = clock()
        result = compute()
        spent = clock() - start
        self.seconds += spent
        self.represented += self.weight * spent
        return result

    def features(self, inputs: NetworkInput, cache: KeyValueCache | None = None) -> Tensor:
        """Count, then compute."""
        batch, width = inputs.positions_BL.shape
        causal = width * (width + 1) // 2
        cached = 0 if cache is None else cache.length
        old = batch * cached if isinstance(cached, int) else int(cached.sum())
        self.work.calls += 1
        self.work.sequences += batch
        self.work.positions += batch * width
        self.work.pairs += batch * (causal if inputs.attention is Attention.CAUSAL else width * width) + old * width
        network = self.network
        if network is not None and self.weight:
            return self._timed(lambda: network.features(inputs, cache))
        if cache is not None:
            cache.advance(width)
        return torch.zeros(batch, width, self.config.hidden if network is not None else 1)

    def logits(self, features: Tensor) -> Tensor:
        """The head, on drawn positions only."""
        self.work.drawn += len(features)
        network = self.network
        if network is not None and self.weight:
            return self._timed(lambda: network.logits(features))
        return torch.zeros(len(features), self.config.vocab_size)

    def new_cache(self, batch: int, capacity: int) -> KeyValueCache:
        """Of the network, or one that holds nothing."""
        if self.network is not None:
            return self.network.new_cache(batch, capacity)
        return KeyValueCache(layers=0, batch=batch, kv_heads=1, capacity=capacity, head_dim=1, dtype=torch.float32, device=torch.device("cpu"))


def samplers(length: int) -> dict[str, Sampler]:
    """Name -> sampler of `length` tokens."""
    return {
        f"MDLM, ancestral, T = {length}": lambda network, ids_BL, asked: sample_mdlm(network, ids_BL, length, asked),
        "AR, cache": lambda network, ids_BL, asked: sample_ar(network, torch.zeros_like(ids_BL[:, :1]), length, asked),
        f"Eso-LM, ancestral, T = {length}, alpha_0 = 1": partial(with_steps, sample_esolm, length, alpha_0=1.0),
        f"Eso-LM, ancestral, T = {length}, alpha_0 = 0.5": partial(with_steps, sample_esolm, length, alpha_0=0.5),
        "Eso-LM, left to right": sample_esolm_left_to_right,
        f"Eso-LM, block, {length // 4} steps": partial(with_steps, sample_esolm_block, length // 4),
        f"MDLM, ancestral, T = {length // 4}": lambda network, ids_BL, asked: sample_mdlm(network, ids_BL, length // 4, asked),
    }


def with_steps(sampler: Callable[..., object], steps: int, network: CausalDenoiser, ids_BL: Tensor, request: Request, **options: float) -> object:
    """Steps in their place."""
    return sampler(network, ids_BL, steps, request, **options)


def random_network(config: NetworkConfig) -> DiT:
    """A DiT with no zeros left: AdaLN-Zero would have every token equally likely."""
    network, generator = DiT(config).eval(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.5 * parameter.shape[-1] ** -0.5)
    return network


@torch.no_grad()
def constants(network: DiT, batch: int, length: int) -> tuple[float, float]:
    """Seconds of a cached call of one position at half the length with its draw, beyond its operations; seconds per operation of a full pass."""
    config, cache = network.config, network.new_cache(batch, length)
    law, uniform_B = TokenLaw(mask_id=config.vocab_size - 1), torch.full((batch,), 0.5, dtype=torch.float64)
    cache.advance(length)

    def seconds(width: int, attention: Attention, cached: int) -> tuple[float, float]:
        ids_BL, meter, times = torch.zeros(batch, width, dtype=torch.long), Meter(config, network), list[float]()
        inputs = NetworkInput(ids_BL=ids_BL, positions_BL=ids_BL, conditioning_B=torch.zeros(batch), attention=attention)
        while len(times) < 5 or (sum(times) < 0.5 and len(times) < 100):
            start = clock()
            if cached:
                cache.rewind(torch.full((batch,), cached))
                law.draw(meter.logits(meter.features(inputs, cache)[:, 0]), uniform_B)
            else:
                meter.features(inputs)
            times.append(clock() - start)
        return statistics.median(times), meter.work.flops(config) / len(times)

    whole, operations = seconds(length, Attention.FULL, 0)
    rate = whole / operations
    call, operations = seconds(1, Attention.CAUSAL, length // 2)
    return max(call - operations * rate, 0.0), rate


@dataclass(frozen=True)
class Timed:
    """Seconds of one run, or what they would have been had all calls been made; and the calls that were."""

    seconds: float
    calls: int


def sampled_calls(calls: int, wanted: int) -> dict[int, int]:
    """Numbers from 1 of the calls in the middle of `wanted` nearly equal parts, and the sizes of these."""
    edges = [calls * i // wanted for i in range(wanted + 1)]
    return {(start + end) // 2 + 1: end - start for start, end in pairwise(edges)}


def measure(sampler: Sampler, network: DiT, ids_BL: Tensor, asked: Request, patience: float, planned: Work, rate: float) -> Timed:
    """Run with as many calls of the network as patience allows for."""
    each = planned.flops(network.config) * rate / planned.calls
    calls = min(planned.calls, max(8, int(patience / each)))
    meter = Meter(network.config, network, None if calls == planned.calls else sampled_calls(planned.calls, calls))
    start = clock()
    sampler(meter, ids_BL, asked)
    assert meter.work == planned
    return Timed(clock() - start - meter.seconds + meter.represented, calls)


def report(network: DiT, length: int, options: argparse.Namespace) -> None:
    """Measure one length and print its table."""
    batch, config = options.batch, network.config
    mask_id = config.vocab_size - 1
    ids_BL = torch.full((batch, length), mask_id)
    asked = Request(law=TokenLaw(mask_id=mask_id), vocab_size=config.vocab_size, seed=1, sequences_B=torch.arange(batch))
    chosen = {name: sampler for name, sampler in samplers(length).items() if name.startswith(tuple(options.only))}
    planned = {}
    for name, sampler in chosen.items():
        meter = Meter(config)
        sampler(meter, ids_BL, asked)
        planned[name] = meter.work
    timed: dict[str, list[Timed]] = {name: [] for name in chosen}
    call, rate = constants(network, batch, length)
    for turn in range(options.rounds):
        for name, sampler in chosen.items():
            print(f"round {turn + 1} of {options.rounds}: {name}", end="\033[K\r", file=sys.stderr, flush=True)
            timed[name].append(measure(sampler, network, ids_BL, asked, options.patience, planned[name], rate))
    seconds = {name: statistics.median(run.seconds for run in runs) for name, runs in timed.items()}
    flops = {name: work.flops(config) for name, work in planned.items()}
    model = {name: planned[name].calls * call + flops[name] * rate for name in chosen}
    slowest, autoregressive = (next((name for name in chosen if name.startswith(kind)), next(iter(chosen))) for kind in ("MDLM", "AR"))
    print(f"\nL = {length}, batch {batch}; {1e3 * call:.2f} ms per call, {1e-9 / rate:.1f} GFLOP/s in a full forward pass\n")
    head = "                                             | measured            | COUNTED per sequence        | MDLM's over this one's     | AR's |"
    print(head)
    columns = "|  seconds   tokens/s |   NFE  positions     GFLOP  |    time  (model)     FLOPs | time | calls made"
    print(f"{'sampler':44s} {columns}")
    for name in chosen:
        work, made = planned[name], min(run.calls for run in timed[name])
        print(
            f"{name:44s} | {seconds[name]:9.2f} {batch * length / seconds[name]:10,.0f} |"
            f" {work.sequences / batch:5.0f} {work.positions / batch:10,.0f} {flops[name] / batch / 1e9:9.2f}  |"
            f" {seconds[slowest] / seconds[name]:6.1f}x {model[slowest] / model[name]:7.1f}x {flops[slowest] / flops[name]:8.1f}x |"
            f" {seconds[autoregressive] / seconds[name]:4.2f}x| {'all' if made == work.calls else made} of {work.calls}"
        )


def main() -> None:
    """Each length on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lengths", nargs="*", type=int, default=[256, 512, 1024], help="tokens per sequence")
    for name, default in (("batch", 1), ("hidden", 128), ("layers", 4), ("heads", 4), ("vocabulary", 4096), ("rounds", 3), ("threads", 0)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--patience", type=float, default=30.0, help="seconds of network in one run, beyond which calls are sampled; default 30")
    parser.add_argument("--only", nargs="*", default=[""], help="beginnings of the names of the samplers to run")
    parser.add_argument("--cpu-time", action="store_true", help="seconds of this process, in one thread")
    options = parser.parse_args()
    if options.cpu_time:
        global clock
        clock, options.threads = time.process_time, 1
    if options.threads:
        torch.set_num_threads(options.threads)
    config = NetworkConfig(
        kind="dit", vocab_size=options.vocabulary + 1, hidden=options.hidden, layers=options.layers, heads=options.heads,
        kv_heads=options.heads, ffn=4 * options.hidden,
    )  # fmt: skip
    network = random_network(config)
    threads = torch.get_num_threads()
    print(f"DiT {config.hidden} x {config.layers}, vocabulary {options.vocabulary}, fp32, {threads} threads, torch {torch.__version__}")
    for length in options.lengths:
        report(network, length, options)


if __name__ == "__main__":
    main()
