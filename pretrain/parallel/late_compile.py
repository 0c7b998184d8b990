"""Libraries that compile functions when they are imported, without the compiler until one of these functions is called.

megatron-core and DeepSpeed decorate functions with torch.compile that most runs never call, which loads torch's compiler: 90 MiB and two
seconds of every process of a node.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_compile: Callable[..., Any] = torch.compile


def compiled_at_first_call(function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    """`torch.compile(function, **options)`, put off until the result is called. Without a function: a decorator."""
    if function is None:
        return functools.partial(compiled_at_first_call, **options)

    @functools.cache
    def compiled() -> Callable[..., Any]:
        return _compile(function, **options)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    return call


@contextmanager
def late_compile() -> Iterator[None]:
    """torch.compile means `compiled_at_first_call` inside."""
    torch.compile = compiled_at_first_call  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = _compile
