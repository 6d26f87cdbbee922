"""What stages build of torch: a part of a model, and random functions that draw from a generator of one sample.

Only functions import this module, because processes that only draw random numbers do not need torch.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class NormalizeModule(torch.nn.Module):
    """Computes (image / 255 - mean) / std of uint8 images [N, C, H, W], as `Normalize.table` does for each level."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...], dtype: torch.dtype) -> None:
        super().__init__()
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(values, dtype=torch.float32, device="cpu")[:, None, None])
        self._dtype = dtype

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return ((images.to(torch.float32) * (1.0 / 255) - self.mean) / self.std).to(self._dtype)


def on_cpu() -> AbstractContextManager[Any]:
    """Return a block in which tensors without a named device are on the CPU, also where a program has set a default."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


class SampleGenerator(TorchFunctionMode):
    """Passes each random function called inside the block a generator seeded here. Affects only this thread.

    Numbers for a GPU are drawn on the CPU and copied, so that both devices get the same numbers. See also `on_cpu`.
    They are drawn in float32, also where a program has set another default dtype.

    It sees the functions that Python calls. A mode that sees the operators below them (TorchDispatchMode) is not safe
    with several threads: where two call an operator for the first time at once, torch 2.11 keeps the address of an
    object that is then freed, and the process crashes later.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.used = False
        self._generator = torch.Generator().manual_seed(seed)
        self._with_cpu = ExitStack()

    def __enter__(self) -> SampleGenerator:
        self._with_cpu.enter_context(on_cpu())
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._with_cpu.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), func.__name__
        if name in _MAKERS and torch.get_default_dtype() != torch.float32:
            _name_float32(func, args, kwargs)
        if name not in _DRAWS and name not in _LIKE:
            return func(*args, **kwargs)
        self.used = True
        if name in _LIKE:
            return self._draw_like(name, *args, **kwargs)
        kwargs["generator"] = self._generator
        device = args[0].device if args and isinstance(args[0], torch.Tensor) else kwargs.get("device")
        if device is None or torch.device(device).type == "cpu":
            return func(*args, **kwargs)
        moved = [x.cpu() if isinstance(x, torch.Tensor) else x for x in args]
        result = func(*moved, **{**kwargs, **({"device": "cpu"} if "device" in kwargs else {})})
        return args[0].copy_(result) if result is moved[0] else result.to(device)

    def _draw_like(self, name: str, like: torch.Tensor, *bounds: int, **kwargs: Any) -> torch.Tensor:
        """Draw by the in-place function of the same distribution, because these functions take no generator."""
        bounds += tuple(kwargs.pop(key) for key in ("low", "high") if key in kwargs)
        result = torch.empty_like(like, **{**kwargs, "device": "cpu"})
        draw = getattr(result, _LIKE[name])
        draw(*((0, *bounds) if len(bounds) == 1 else bounds), generator=self._generator)
        return result.to(kwargs.get("device") or like.device)


def _name_float32(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Name float32 in a call that would make a tensor of the program's default dtype, which is another one.

    That default is one of the process, so that no thread can set it for a while.
    """
    given = any(isinstance(value, torch.Tensor) for value in (*args, kwargs.get("out")))  # whose dtype counts
    if given or kwargs.get("dtype") is not None:
        return
    if func.__name__ not in _OF_VALUES or func(*args, **kwargs).is_floating_point():
        kwargs["dtype"] = torch.float32


_OF_VALUES = frozenset(("arange", "full", "tensor"))
"""Functions of torch whose results are of the default dtype if their arguments are floats."""
_MAKERS = _OF_VALUES | {"empty", "eye", "linspace", "logspace", "normal", "ones", "rand", "randn", "zeros"}
"""These, and the ones whose results are of the default dtype. `torch.normal` is one where it takes no tensor."""
_DRAWS = frozenset(
    (
        *("bernoulli", "binomial", "multinomial", "normal", "poisson", "rand", "randint", "randn", "randperm"),
        *("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"),
        *("_sample_dirichlet", "_standard_gamma"),
    )
)
"""Names of the functions and methods of torch that take a generator. A test compares them with torch's own list."""
_LIKE = {"rand_like": "uniform_", "randint_like": "random_", "randn_like": "normal_"}
