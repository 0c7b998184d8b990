"""What a rank imports before its first step, and functions that are compiled when they are called."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pretrain.parallel.late_compile import compiled_at_first_call, late_compile

ROOT = Path(__file__).resolve().parents[2]
NOT_AT_START = ("torch._dynamo", "torch._inductor", "scipy", "wandb", "pandas", "transformers", "datasets", "nvidia.dali", "sklearn", "matplotlib")
"""Libraries that cost every rank megabytes, and that a start without validation, on a machine that compiles nothing, does not need."""


def test_a_rank_starts_without_compiler_scipy_and_wandb() -> None:
    code = f"import sys, json, pretrain.trainer; print(json.dumps([name for name in {NOT_AT_START} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert json.loads(done.stdout.splitlines()[-1]) == [], done.stderr


@pytest.mark.parametrize("as_decorator", [False, True])
def test_a_function_is_compiled_once_at_its_first_call(as_decorator: bool) -> None:
    compiled: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    def square(x: Tensor) -> Tensor:
        """Its square."""
        return x * x

    late = compiled_at_first_call(backend=backend)(square) if as_decorator else compiled_at_first_call(square, backend=backend)
    assert not compiled and late.__name__ == "square" and late.__doc__ == "Its square."
    for _ in range(2):
        assert torch.equal(late(torch.tensor([1.5, -2.0])), torch.tensor([2.25, 4.0]))
    assert len(compiled) == 1


def test_torch_compile_is_itself_again() -> None:
    before = torch.compile
    with pytest.raises(ValueError, match="broken"), late_compile():
        assert torch.compile is not before
        raise ValueError("a library that is broken")
    assert torch.compile is before
