"""Runs the example of docs/transformers_trainer.md, and logs which pixels each step trained on.

Arguments: a folder with photos.yaml, the log, steps between checkpoints, steps whose gradients are accumulated.
Each rank has a log.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.integrations.killing import ROOT, Log, hashes

[CODE] = re.findall(r"```python\n(.*?)```", (ROOT / "docs/transformers_trainer.md").read_text(), flags=re.DOTALL)
path, save_steps, accumulated = Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])


class Killer(transformers.TrainerCallback):  # type: ignore[misc, unused-ignore]
    def on_step_end(self, *_: Any, **__: Any) -> None:
        log.kill_if_due()

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        log.kill_if_due()


class Logged(transformers.Trainer):  # type: ignore[misc, unused-ignore]
    def __init__(self, model: Any, args: Any, **options: Any) -> None:
        args.save_steps, args.gradient_accumulation_steps, args.disable_tqdm = save_steps, accumulated, True
        super().__init__(model, args, **options)
        self.add_callback(Killer())

    def compute_loss(self, model: Any, inputs: Any, *others: Any, **options: Any) -> Any:
        if not model.training:
            return super().compute_loss(model, inputs, *others, **options)
        log.write(pixels=hashes(inputs["pixel_values"]), labels=inputs["labels"].tolist(), step=self.state.global_step)
        loss, outputs = super().compute_loss(model, inputs, *others, **options, return_outputs=True)
        torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(outputs.logits, inputs["labels"]))
        return loss


log = Log(path.with_suffix(f".{os.environ.get('RANK', '0')}.jsonl"))
torch.manual_seed(0)
names: dict[str, Any] = {"Logged": Logged}
before, after = CODE.split("class PhotoTrainer(Trainer):")
try:
    exec(compile(f"{before}class PhotoTrainer(Logged):{after}", "docs/transformers_trainer.md", "exec"), names)
finally:
    if "trainer" in names:
        log.write(epoch=names["trainer"].state.epoch)
        torch.save(names["trainer"].model.state_dict(), log.path.with_suffix(".pt"))
