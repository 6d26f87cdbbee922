"""A program's `torch.set_default_device` and `set_default_dtype` change nothing that a pipeline gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import pytest
import torch

from tests.datasets import TRAIN, pixels, write_config
from tests.forking import Python

SCRIPT = """
import sys, torch, gpuflow
from tests.datasets import pixels
torch.set_default_device(sys.argv[1])
torch.set_default_dtype(getattr(torch, sys.argv[2]))
where, *paths = sys.argv[3:]
for path in paths:
    with gpuflow.load(path, device=where) as loader:
        for batch in loader:
            print(batch.images.double().sum().item(), batch.labels.double().sum().item())
        loader.load_state_dict(loader.state_dict())
images = [torch.from_numpy(pixels(0, i)).permute(2, 0, 1).to(where) for i in range(5)]
with gpuflow.transform(paths[0], device=where) as transform:  # on this thread
    print(transform(images, epoch=0, positions=range(5)).double().sum().item())
"""


ON_A_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU"))


@pytest.mark.parametrize(
    ("device", "dtype", "where"),
    [
        ("meta", "float32", "cpu"),
        ("cpu", "float64", "cpu"),
        ("cpu", "bfloat16", "cpu"),
        pytest.param("cuda", "float32", "cpu", marks=ON_A_GPU),
        pytest.param("cuda", "float32", "cuda", marks=ON_A_GPU),
    ],
)
def test_nothing_depends_on_torchs_defaults(
    tmp_path: Path, device: str, dtype: str, where: str, python_with_torch: Python
) -> None:
    for label in range(2):
        (tmp_path / "photos" / f"class{label}").mkdir(parents=True)
        for number in range(4):
            name = tmp_path / "photos" / f"class{label}" / f"{number}.png"
            cv2.imwrite(str(name), pixels(label, number))
    policies: list[Any] = [
        {"decode": {}},
        {"affine": {"degrees": 20, "fill": 9}},
        {"random_resized_crop": {"size": 24}},
        {"torchvision": {"name": "RandomErasing", "p": 0.9}},
        {"color_jitter": {"contrast": 0.5, "saturation": 0.9, "hue": 0.3}},
        {"rand_augment": {}},
        {"trivial_augment": {}},
        {"normalize": {"dtype": "bfloat16"}},
    ]
    photos = tmp_path / "photos"
    paths = [
        write_config(tmp_path / "policies.yaml", photos, train=policies, run={"threads": 1}),
        write_config(tmp_path / "mixed.yaml", photos, train=[*TRAIN, {"mixup": {"alpha": 0.2}}]),
    ]
    plain, other = (
        python_with_torch(SCRIPT, *arguments, where, *map(str, paths), cwd=Path(__file__).parents[2])
        for arguments in (("cpu", "float32"), (device, dtype))
    )
    assert other.returncode == 0, other.stderr
    assert len(plain.stdout.splitlines()) == 5 and other.stdout == plain.stdout
