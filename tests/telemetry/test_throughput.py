"""Throughput against hand arithmetic on a clock that the test moves; peaks against NVIDIA's data sheets."""

import numpy as np
import pytest
import torch

from pretrain.telemetry.throughput import Throughput, data_sheet_flops, device_peak, measure_matmul_peak, peak_memory_gib


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_window_arithmetic_leaves_out_validation_and_checkpoints() -> None:
    clock = Clock()
    meter = Throughput(6e9, 1e15, ranks=2, clock=clock)
    meter.add(50_000)
    clock.now += 3
    with meter.pause():
        clock.now += 1000
    meter.add(50_000)
    clock.now += 2
    # 100,000 tokens in 5 s: 20,000 tokens/s, 1.2e14 FLOP/s over two ranks, 6e13 each, 6% of 1e15.
    assert meter.read() == pytest.approx({"tokens_per_second": 20_000, "tflops_per_second": 60.0, "mfu": 0.06})
    meter.add(1_000)
    clock.now += 1
    assert meter.read()["tokens_per_second"] == pytest.approx(1_000)


def test_a_pause_counts_when_what_it_covers_fails() -> None:
    clock = Clock()
    meter = Throughput(1.0, 1.0, clock=clock)
    meter.add(10)
    clock.now += 1
    with pytest.raises(RuntimeError), meter.pause():
        clock.now += 9
        raise RuntimeError
    assert meter.read()["tokens_per_second"] == pytest.approx(10)


@pytest.mark.parametrize(
    ("name", "bf16", "fp8"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12, 1979e12),
        ("NVIDIA H100 PCIe", 756e12, 1513e12),
        ("NVIDIA H200", 989e12, 1979e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, None),
        ("NVIDIA B200", 2250e12, 4500e12),
        ("NVIDIA L40S", 362e12, 733e12),
        ("NVIDIA L4", 121e12, 242e12),
        ("Some Other Card", None, None),
    ],
)
def test_data_sheet_peaks(name: str, bf16: float | None, fp8: float | None) -> None:
    assert data_sheet_flops(name, "bf16") == bf16
    assert data_sheet_flops(name, "fp8") == fp8


def test_the_configured_peak_wins_and_says_so() -> None:
    peak = device_peak(torch.device("cpu"), "bf16", peak_tflops=2.5)
    assert (peak.flops, peak.source) == (2.5e12, "configured")


def test_a_measured_peak_is_plausible_and_measured_once() -> None:
    peak = measure_matmul_peak(torch.float32, seconds=0.05)
    assert 1e8 < peak < 1e14
    assert measure_matmul_peak(torch.float32, seconds=0.05) == peak


def test_peak_memory_follows_an_allocation() -> None:
    before = peak_memory_gib(torch.device("cpu"))
    held = np.ones(2**27)  # 1 GiB
    assert peak_memory_gib(torch.device("cpu")) >= min(before, 0.05) + 0.9 and held[0] == 1
