"""A parameter's first value as a pure function of (seed, logical name), drawn whole and then cut: no layout can change it."""

import hashlib

import numpy as np
import torch
from torch import Tensor

from pretrain.parallel.sharding import ParameterSpec


def initial_tensor(name: str, spec: ParameterSpec, seed: int) -> Tensor:
    """The full fp32 tensor of a logical parameter at step 0."""
    if spec.init == "zeros":
        return torch.zeros(spec.shape)
    if spec.init == "ones":
        return torch.ones(spec.shape)
    digest = hashlib.blake2b(f"{seed}/parameter/{name}".encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    if spec.init == "uniform":
        values = generator.random(spec.shape, dtype=np.float32)
        values *= 2 * spec.scale
        values -= spec.scale
    else:
        values = generator.standard_normal(spec.shape, dtype=np.float32)
        values *= spec.scale
    return torch.from_numpy(values)
