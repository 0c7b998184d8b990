"""Peak memory of the last stage's loss, for every objective, at the vocabulary and length of the 1.7B runs.

    python tests/benchmarks/loss_memory.py
    python tests/benchmarks/loss_memory.py --vocabulary 32001 --length 1024 --chunk 128 duo mdm_prime

One process and one sequence. bf16 logits are made, then the loss and its gradient at the logits are computed as training does, in slices of
`--chunk` positions. Printed: the logits, one slice in fp32, and what the loss needed at its peak beyond the logits, as bytes and in
slices. The gradient takes no memory of its own: it is written over the logits.
"""

import argparse
import gc
import sys
import threading
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np  # noqa: E402
import psutil  # noqa: E402
import torch  # noqa: E402

from pretrain.build import OBJECTIVES, build_objective  # noqa: E402
from pretrain.engine.loss import training_loss  # noqa: E402
from pretrain.objectives.base import Objective  # noqa: E402
from pretrain.objectives.config import MDMPrimeConfig, ObjectiveConfig  # noqa: E402
from pretrain.parallel.noise import Noise  # noqa: E402
from pretrain.parallel.vocab import VocabShard  # noqa: E402
from pretrain.parallel.vocabulary import Vocabulary  # noqa: E402

MIB = 2**20


class Peak:
    """The highest resident memory of this process while the block runs, above what it had before; on CUDA the allocator's own peak."""

    def __enter__(self) -> "Peak":
        gc.collect()
        self._process, self._running = psutil.Process(), True
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self._before = self._now()
        self._highest = self._before
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._running = False
        self._thread.join()
        if torch.cuda.is_available():
            self._highest = torch.cuda.max_memory_allocated()
        self.rise = self._highest - self._before

    def _now(self) -> int:
        return torch.cuda.memory_allocated() if torch.cuda.is_available() else self._process.memory_info().rss

    def _watch(self) -> None:
        while self._running:
            self._highest = max(self._highest, self._now())
            time.sleep(0.001)


def build(name: str, size: int) -> Objective:
    """The objective over a vocabulary of `size` classes."""
    digits = (size - 1).bit_length()
    config = ObjectiveConfig(name=name, mdm_prime=MDMPrimeConfig(digits=digits if name == "mdm_prime" else 15))  # type: ignore[arg-type]
    masked = config.has_mask
    padded = Vocabulary.padded(size, 128)
    vocabulary = Vocabulary(tokenizer_size=size - masked, model_size=size, padded_size=padded, mask_id=size - 1 if masked else None, eos_id=0)
    return build_objective(config, vocabulary)


def measure(name: str, size: int, length: int, chunk: int, device: torch.device) -> tuple[int, float, int]:
    """(peak bytes beyond the logits, seconds, bytes of the logits)."""
    objective = build(name, size)
    objective.modules().to(device)
    vocab = VocabShard.whole(objective.vocabulary)
    total = length + objective.lookahead
    tokens = np.random.default_rng(0).integers(1, objective.vocabulary.tokenizer_size, total)
    sample = objective.corrupt(tokens, np.zeros(total, np.int32), Noise(1, 0, 0, 8), evaluation=False)
    inputs = {key: torch.as_tensor(value)[None].to(device) for key, value in sample.inputs.items()}
    targets = {key: torch.as_tensor(value)[None].to(device) for key, value in sample.targets.items()}
    inputs, targets = objective.prepare(inputs, targets, evaluation=False)
    logits_LBv = torch.empty(length, 1, objective.vocabulary.padded_size, dtype=torch.bfloat16, device=device).normal_().requires_grad_()
    with Peak() as peak:
        start = time.perf_counter()
        training_loss(objective, logits_LBv.view_as(logits_LBv), targets, vocab, scale=1 / length, chunk=chunk)[0].backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    return peak.rise, seconds, logits_LBv.numel() * 2


def main() -> None:
    """Every objective named, one after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("objectives", nargs="*", default=list(OBJECTIVES), help=f"some of: {', '.join(OBJECTIVES)} (default: all)")
    parser.add_argument("--vocabulary", type=int, default=131072, help="classes of the model")
    parser.add_argument("--length", type=int, default=2048, help="tokens of the sequence")
    parser.add_argument("--chunk", type=int, default=128, help="positions of a slice (precision.loss_chunk)")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    slice_bytes = 4 * min(options.chunk, options.length) * Vocabulary.padded(options.vocabulary, 128)
    print(f"vocabulary {options.vocabulary}, length {options.length}, slices of {options.chunk}: one fp32 slice is {slice_bytes / MIB:.0f} MiB")
    print("| objective | bf16 logits, MiB | peak beyond the logits, MiB | in fp32 slices | seconds |\n|---|---|---|---|---|")
    for name in options.objectives:
        measure(name, options.vocabulary, min(options.length, options.chunk), options.chunk, device)  # warm allocators and caches
        rise, seconds, logits = measure(name, options.vocabulary, options.length, options.chunk, device)
        print(f"| {name} | {logits / MIB:.0f} | {rise / MIB:.0f} | {rise / slice_bytes:.2f} | {seconds:.2f} |", flush=True)


if __name__ == "__main__":
    main()
