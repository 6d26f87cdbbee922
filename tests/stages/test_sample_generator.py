"""The torchvision stage's generator: every random function of torch draws from it, with its own distribution."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from gpuflow.stages.torch_parts import SampleGenerator

LIKE = torch.zeros(50, 40)
FUNCTIONS: dict[str, tuple[Callable[[], torch.Tensor], float, float]] = {
    "rand": (lambda: torch.rand(50, 40), 0.5, 12**-0.5),
    "rand_like": (lambda: torch.rand_like(LIKE), 0.5, 12**-0.5),
    "randn": (lambda: torch.randn(50, 40), 0.0, 1.0),
    "randn_like": (lambda: torch.randn_like(LIKE), 0.0, 1.0),
    "randint": (lambda: torch.randint(9, (50, 40)), 4.0, (80 / 12) ** 0.5),
    "randint from": (lambda: torch.randint(1, 10, (50, 40)), 5.0, (80 / 12) ** 0.5),
    "randint_like": (lambda: torch.randint_like(LIKE, 9), 4.0, (80 / 12) ** 0.5),
    "randint_like from": (lambda: torch.randint_like(LIKE, 1, 10), 5.0, (80 / 12) ** 0.5),
    "uniform_": (lambda: torch.empty(50, 40).uniform_(2, 3), 2.5, 12**-0.5),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_seed_decides_and_the_distribution_is_kept(name: str) -> None:
    draw, mean, deviation = FUNCTIONS[name]
    found = []
    state = torch.get_rng_state()
    for seed in (1, 1, 2):
        with SampleGenerator(seed) as generator:
            found.append(draw())
        assert generator.used
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert torch.equal(torch.get_rng_state(), state), "the user's generator is not touched"
    values = found[0].double()
    assert abs(values.mean().item() - mean) < 5 * deviation / 2000**0.5
    assert abs(values.std().item() / deviation - 1) < 0.1
    if deviation == 12**-0.5:
        assert mean - 0.5 <= values.min().item() and values.max().item() < mean + 0.5


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=str)
def other_default(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """A program's default dtype."""
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


MADE: dict[str, Callable[[], torch.Tensor]] = {
    "rand": lambda: torch.rand(9),
    "randn": lambda: torch.randn(3, 3),
    "uniform_": lambda: torch.empty(9).uniform_(2, 3),
    "normal": lambda: torch.normal(0.0, 1.0, (9,)),
    "bernoulli": lambda: torch.bernoulli(torch.full((9,), 0.5)),
    "dirichlet": lambda: torch._sample_dirichlet(torch.tensor([1.5, 2.0])),
    "linspace": lambda: torch.linspace(0, 1, 9),
    "tensor": lambda: torch.tensor([0.1, 0.2]),
    "arange": lambda: torch.arange(0.1, 1),
    "whole numbers": lambda: torch.full((9,), 7) + torch.tensor([1]) + torch.arange(9),
    "named": lambda: torch.rand(9, dtype=torch.float64),
    "like": lambda: torch.normal(torch.zeros(9, dtype=torch.float64), 1.0),
}
PLAIN = {}
for name, make in MADE.items():
    with SampleGenerator(5):
        PLAIN[name] = make()


@pytest.mark.parametrize("name", MADE)
def test_a_programs_default_dtype_changes_no_draw(name: str, other_default: torch.dtype) -> None:
    with SampleGenerator(5):
        made = MADE[name]()
    assert made.dtype == PLAIN[name].dtype
    assert torch.equal(made, PLAIN[name])
    assert torch.get_default_dtype() == other_default
    assert torch.rand(1).dtype == other_default
