"""How fast a run is: tokens/s, TFLOP/s and model FLOPs utilisation (MFU) over a window that leaves out validation and checkpoints.

MFU = achieved FLOP/s / peak FLOP/s per rank. The achieved FLOPs are the model's (`flops_per_token`, which says how it counts attention),
not those of recomputation; the peak is the dense figure of the device's data sheet, or a measured one, and always carries its source.
"""

import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

Compute = Literal["fp32", "bf16", "fp8"]

# Dense FLOP/s (never the sparse figure) by a part of `torch.cuda.get_device_name()`, most specific first: fp32 without TF32, bf16, fp8 (0: none).
# NVIDIA data sheets: H100 (2023), H200 (2024), A100 (2021), HGX B200 (2025), L40S (2023), L4 (2023), RTX 4090 (Ada whitepaper, fp32 accumulate).
_DATA_SHEETS: tuple[tuple[str, dict[Compute, float]], ...] = (
    ("B200", {"fp32": 75e12, "bf16": 2250e12, "fp8": 4500e12}),
    ("H200", {"fp32": 67e12, "bf16": 989e12, "fp8": 1979e12}),
    ("H100 PCIe", {"fp32": 51e12, "bf16": 756e12, "fp8": 1513e12}),
    ("H100 NVL", {"fp32": 60e12, "bf16": 835e12, "fp8": 1671e12}),
    ("H100", {"fp32": 67e12, "bf16": 989e12, "fp8": 1979e12}),
    ("A100", {"fp32": 19.5e12, "bf16": 312e12, "fp8": 0.0}),
    ("L40S", {"fp32": 91.6e12, "bf16": 362e12, "fp8": 733e12}),
    ("L4", {"fp32": 30.3e12, "bf16": 121e12, "fp8": 242e12}),
    ("RTX 4090", {"fp32": 82.6e12, "bf16": 165e12, "fp8": 330e12}),
)


@dataclass(frozen=True)
class Peak:
    """FLOP/s of one rank's device, and where the figure comes from (for the log: an MFU without its denominator says nothing)."""

    flops: float
    source: str


def device_peak(device: torch.device, compute: Compute, peak_tflops: float | None = None) -> Peak:
    """The peak that MFU is counted against: the configured one, else the data sheet's, else (CPU, unknown GPU) a measured matrix product."""
    if peak_tflops is not None:
        return Peak(peak_tflops * 1e12, "configured")
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        flops = data_sheet_flops(name, compute)
        if flops:
            return Peak(flops, f"{name}, dense {compute}, data sheet")
    dtype = torch.float32 if compute == "fp32" else torch.bfloat16
    return Peak(measure_matmul_peak(dtype, device), f"measured {str(dtype).removeprefix('torch.')} matrix product on {device.type}")


def data_sheet_flops(name: str, compute: Compute) -> float | None:
    """Dense FLOP/s of the device called `name`, or None where the table does not know it."""
    for part, figures in _DATA_SHEETS:
        if part in name:
            return figures[compute] or None
    return None


@cache
def measure_matmul_peak(dtype: torch.dtype, device: torch.device | str = "cpu", seconds: float = 0.6) -> float:
    """FLOP/s of the fastest square matrix product that this process's threads reach in about `seconds` (measured once per process).

    The three storage orders of a linear layer's forward and backward products are tried: CPUs without bf16 units differ threefold between them.
    """
    device = torch.device(device)
    best = 0.0
    for size in (512, 1024, 2048) if device.type == "cpu" else (4096, 8192):
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        orders = ((a, b.t()), (a, b), (a.t(), b))
        deadline = time.perf_counter() + seconds / 2
        for repeat in range(1000):
            left, right = orders[repeat % 3]
            start = time.perf_counter()
            torch.mm(left, right)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            now = time.perf_counter()
            if repeat > 2:  # the first call of each order pays for packing and thread start-up
                best = max(best, 2 * size**3 / (now - start))
            if now > deadline and repeat > 4:
                break
        if 16 * size**3 / best > seconds:  # the next size would not finish twice
            break
    return best


class Throughput:
    """Counts the tokens of a window and the time spent on them.

    flops_per_token  training FLOPs of the model per input token, forward and backward.
    peak_flops       peak FLOP/s of one rank.
    ranks            ranks that share the tokens.
    clock            seconds, monotonic.
    """

    def __init__(self, flops_per_token: float, peak_flops: float, *, ranks: int = 1, clock: Callable[[], float] = time.perf_counter) -> None:
        self._flops_per_token = flops_per_token
        self._peak_flops = peak_flops
        self._ranks = ranks
        self._clock = clock
        self._reset()

    def add(self, tokens: int) -> None:
        """Tokens (of all ranks) of one finished step."""
        self._tokens += tokens

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave the time inside out of the window: validation, checkpoints."""
        start = self._clock()
        try:
            yield
        finally:
            self._paused += self._clock() - start

    def read(self) -> dict[str, float]:
        """tokens_per_second of all ranks, tflops_per_second per rank and mfu since the last `read`; starts a new window."""
        seconds = max(self._clock() - self._start - self._paused, 1e-9)
        tokens_per_second = self._tokens / seconds
        flops = tokens_per_second * self._flops_per_token / self._ranks
        self._reset()
        return {"tokens_per_second": tokens_per_second, "tflops_per_second": flops / 1e12, "mfu": flops / self._peak_flops}

    def _reset(self) -> None:
        self._start = self._clock()
        self._tokens = 0
        self._paused = 0.0


def peak_memory_gib(device: torch.device) -> float:
    """Most memory held so far: by this process's tensors on CUDA, by the whole process (resident set) on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
