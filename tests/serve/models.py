"""A tiny trained model in every file format, as `gpuflow train` and `gpuflow export` write it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from gpuflow.config import Config, ModelSpec, read_config
from gpuflow.engines import Engine, ModelInfo, open_engines
from gpuflow.engines.pytorch import EXTRA_FILE, load_checkpoint
from gpuflow.pipeline.stage import ImageSpec
from gpuflow.serve.export import export_model
from gpuflow.stages import STAGES
from gpuflow.training.trainer import Trainer, TrainerEvents
from tests.datasets import make_photos, write_config

CPU = torch.device("cpu")
SIDE = 32
ARCH = "squeezenet1_1"
FLOAT = ImageSpec(shape=(SIDE, SIDE, 3), dtype="float32", layout="nchw")
UINT8 = ImageSpec(shape=(SIDE, SIDE, 3), dtype="uint8", layout="hwc")
STAGES_EVAL = [{"decode": {}}, {"resize": {"shorter": 36}}, {"center_crop": {"size": SIDE}}, {"normalize": {}}]
STAGES_TRAIN = [{"decode": {}}, {"random_resized_crop": {"size": SIDE}}, {"normalize": {}}]


@dataclass(frozen=True, kw_only=True)
class Models:
    """A configuration and the files of its model. The `folded` files take uint8 pixels."""

    config: Path
    photos: Path
    checkpoint: Path
    onnx: Path
    pt2: Path
    folded_onnx: Path
    folded_pt2: Path

    def read(self, *overrides: str) -> Config:
        return read_config(self.config, STAGES, overrides)

    def module(self) -> nn.Module:
        """The trained model in torch."""
        return load_checkpoint(str(self.checkpoint))[0]


def make_models(root: Path) -> Models:
    """Photographs, one step of training, four exports."""
    make_photos(root / "photos", classes=3, each=4)
    config = write_config(
        root / "x.yaml",
        root / "photos",
        train=STAGES_TRAIN,
        val=STAGES_EVAL,
        fit={"model": ARCH, "epochs": 1, "lr": 0.01, "out": str(root / "run")},
        serve={"stages": STAGES_EVAL, "model": {"file": str(root / "run" / "last.pt")}},
    )
    read = read_config(config, STAGES)
    trainer = Trainer(read, device="cpu")
    trainer.run(TrainerEvents(), max_steps=1)
    files = {"onnx": "a.onnx", "pt2": "a.pt2", "folded_onnx": "folded.onnx", "folded_pt2": "folded.pt2"}
    for name, file in files.items():
        export_model(read, root / file, fold_normalize=name.startswith("folded"))
    paths = {name: root / file for name, file in files.items()}
    return Models(config=config, photos=root / "photos", checkpoint=trainer.checkpoint, **paths)


def engine(file: Path | str, image: ImageSpec = FLOAT, **settings: object) -> Engine:
    """One engine on the CPU with half of the cores, so that its spinning threads do not slow other tests."""
    model = ModelSpec.model_validate({"file": str(file), "instances": 2, **settings})
    return open_engines(model, image=image, device=CPU)[0]


def noise(count: int, image: ImageSpec = FLOAT) -> torch.Tensor:
    """Random images [count, C, H, W] in the dtype and layout of a pipeline's result."""
    generator = torch.Generator().manual_seed(count)
    assert image.shape[0] is not None and image.shape[1] is not None
    shape = (count, image.shape[2], image.shape[0], image.shape[1])
    if image.dtype == "uint8":
        images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    else:
        images = torch.randn(shape, generator=generator).to(getattr(torch, image.dtype))
    return images if image.layout == "nchw" else images.contiguous(memory_format=torch.channels_last)


def save_program(
    path: Path, module: nn.Module, *inputs: torch.Tensor, dynamic: bool = True, info: ModelInfo | None = None
) -> Path:
    """A model as `.pt2`: one that gpuflow did not export, or with the metadata `info` one that it might have."""
    batch = {0: torch.export.Dim("batch")} if dynamic else None
    program = torch.export.export(module.eval(), inputs, dynamic_shapes=tuple(batch for _ in inputs))
    torch.export.save(program, path, extra_files=None if info is None else {EXTRA_FILE: info.to_json()})
    return path
