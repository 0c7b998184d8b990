"""What one rank of this machine has: its device, memory and arithmetic, read once before anything is allocated."""

import os
from dataclasses import dataclass
from pathlib import Path

from pretrain.errors import UserError
from pretrain.optional import require
from pretrain.run_config import RunConfig

GIB = 1024**3


@dataclass(frozen=True, kw_only=True)
class Machine:
    """memory is what one rank may still allocate, in bytes. bf16 is what precision.compute=auto resolves to. cuda_devices is 0 on a CPU."""

    device: str
    memory: float
    cuda_devices: int
    bf16: bool


def this_machine(local_ranks: int) -> Machine:
    """The device of this process; `local_ranks` processes share this machine. Imports torch."""
    import torch

    from pretrain.parallel.platform import bf16_is_fast

    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if devices:
        index = int(os.environ.get("LOCAL_RANK", 0)) % devices
        free, _ = torch.cuda.mem_get_info(index)
        return Machine(device=torch.cuda.get_device_name(index), memory=float(free), cuda_devices=devices, bf16=True)
    return Machine(device="CPU", memory=available_memory() / max(local_ranks, 1), cuda_devices=0, bf16=bf16_is_fast())


def available_memory() -> float:
    """Bytes that processes of this machine can still take: the system's, or less where a container or a batch job sets a limit."""
    import psutil  # type: ignore[import-untyped]

    available = float(psutil.virtual_memory().available)
    for limit, used in _cgroup_limits():
        available = min(available, max(limit - used, 0.0))
    return available


def check_machine(config: RunConfig, machine: Machine, local_ranks: int) -> None:
    """Raises UserError where this machine lacks what the run asks for: devices, bf16 or FP8."""
    if machine.cuda_devices and local_ranks > machine.cuda_devices:
        raise UserError(
            f"{local_ranks} processes on a machine with {machine.cuda_devices} GPUs, and each needs its own; "
            f"use torchrun --nproc-per-node {machine.cuda_devices}"
        )
    if machine.cuda_devices and config.precision.compute == "bf16":
        import torch

        if torch.cuda.get_device_capability() < (8, 0):
            raise UserError(f"precision.compute=bf16 needs a GPU with bf16 matrix units, and {machine.device} has none; use precision.compute=fp32")
    if config.precision.fp8:
        _check_fp8(machine)


def _check_fp8(machine: Machine) -> None:
    if not machine.cuda_devices:
        raise UserError("precision.fp8=true needs a CUDA GPU with FP8 matrix units, and this machine has no GPU; use precision.fp8=false")
    import torch

    if torch.cuda.get_device_capability() < (8, 9):
        raise UserError(f"precision.fp8=true needs a GPU with FP8 matrix units (Ada, Hopper or later), not {machine.device}; use precision.fp8=false")
    require("transformer_engine.pytorch", "precision.fp8=true", "pip install -e '.[gpu]'")


def _cgroup_limits() -> list[tuple[float, float]]:
    """(limit, used without page cache) in bytes of every memory cgroup (version 2) above this process."""
    found = []
    try:
        own = next(line[3:].strip() for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
        folder = Path("/sys/fs/cgroup") / own.lstrip("/")
        while True:
            limit = folder / "memory.max"
            if limit.exists() and (text := limit.read_text().strip()) != "max":
                cache = next((int(line.split()[1]) for line in (folder / "memory.stat").read_text().splitlines() if line.startswith("file ")), 0)
                found.append((float(text), float((folder / "memory.current").read_text()) - cache))
            if folder == Path("/sys/fs/cgroup"):
                return found
            folder = folder.parent
    except (OSError, StopIteration, ValueError):
        return found  # no cgroups of version 2: the system's figure stands
