"""The torchvision stage's generator: every random function of torch draws from it, with its own distribution."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gpuflow.stages.sample_generator import SampleGenerator

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
