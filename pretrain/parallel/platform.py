"""Megatron-core from PyPI, unmodified, on a machine without CUDA.

Megatron-core asks torch.cuda for its device, its random state and a few tensors. Where there is no CUDA, `prepare()` answers those
questions with the CPU; where there is, it does nothing. The changes are confined to what megatron-core reads at run time:
`torch.cuda.current_device` and friends, the `torch` name inside its schedules module, and the random-state helpers of its checkpointing.
"""

import os
import warnings
from types import ModuleType
from typing import Any

import torch


class _TorchOnCpu(ModuleType):
    """The `torch` module, except that factories asked for device="cuda" make their tensor on the CPU."""

    def __init__(self) -> None:
        super().__init__("torch")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*size: Any, **options: Any) -> torch.Tensor:
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = "cpu"
        return torch.zeros(*size, **options)


def device() -> torch.device:
    """Where this process computes."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def backend() -> str:
    """The torch.distributed backend that serves `device()`."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def silence_renamed_collectives() -> None:
    """torch 2.13 renamed two collectives; DeepSpeed and megatron-core still call them by their old names, which warns once per rank."""
    renamed = r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor|_all_gather_base|_reduce_scatter_base)` is "
    warnings.filterwarnings("ignore", message=renamed, category=FutureWarning)


def bf16_is_fast() -> bool:
    """Whether bf16 matrix products run on matrix units here: any CUDA device in use, or a CPU with AMX or AVX512-BF16."""
    if torch.cuda.is_available():
        return True
    probes = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(bool(getattr(torch.cpu, probe, lambda: False)()) for probe in probes)


def prepare() -> None:
    """Let megatron-core run on CPU and gloo; a no-op where CUDA is available. Safe to call more than once."""
    if torch.cuda.is_available():
        return
    import megatron.core.pipeline_parallel.schedules as schedules
    import megatron.core.tensor_parallel.random as megatron_random

    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.synchronize = lambda *_, **__: None
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    schedules.torch = _TorchOnCpu()
    random_module: Any = megatron_random
    random_module._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random_module._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def machine_share() -> tuple[int, int]:
    """(this process's number among those of its machine, how many these are): (0, 1) where no launcher says so."""
    return int(os.environ.get("LOCAL_RANK", 0)) if "LOCAL_WORLD_SIZE" in os.environ else 0, int(os.environ.get("LOCAL_WORLD_SIZE", 1))
