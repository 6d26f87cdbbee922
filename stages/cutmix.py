"""cutmix: replaces a box of each sample of a batch by the same box of another sample, as timm does."""

from __future__ import annotations

from typing import Annotated

from gpuflow.arrays import Bools
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Probability
from gpuflow.stages.mixup import MixMode, Mixup


@s.stage_class
class Cutmix(s.Mixing):
    """Put a box of its partner in the same batch into each sample.

    As timm's Mixup with cutmix_alpha only: the partner of sample i of n is sample n - 1 - i. Wrapped and skipped
    samples, and the middle one of an odd number, stay as they are. Labels become probabilities of the classes, float32
    [N, classes].

    Args:
        alpha: the share of own pixels is drawn from Beta(alpha, alpha); the box has the image's aspect ratio, lies
            around a uniform pixel and is cut at the image's edges.
        probability: that a batch, pair or sample is mixed.
        mode: what shares its random numbers: a `batch`, a `pair` of partners, or nothing (`elem`).
        label_smoothing: each label is 1 minus this for its class plus this share spread over all classes.
        correct_lambda: whether the label's share is that of the pixels outside a box that the image's edge cuts.

    Examples:
        >>> import numpy as np
        >>> mixture = Cutmix().draw(s.Keys(0, 0, np.arange(4)).stage("cutmix", 0), 224, 224, np.ones(4, bool))
        >>> bool((mixture.weights == 1).all()), mixture.changed.tolist()
        (True, [True, True, True, True])
    """

    stage_name = "cutmix"
    other_keys = {"cutmix_alpha": "alpha"}

    alpha: Annotated[float, s.Bounds(above=0, limit=1000)] = 1.0
    probability: Probability = 1.0
    mode: MixMode = "batch"
    label_smoothing: Probability = 0.0
    correct_lambda: bool = True

    @classmethod
    def examples(cls) -> tuple[Cutmix, ...]:
        return (
            cls(),
            cls(alpha=0.3, label_smoothing=0.1),
            cls(probability=0.5, mode="elem", correct_lambda=False),
            cls(mode="pair"),
        )

    @property
    def random(self) -> bool:
        return self.probability > 0

    def draw(self, keys: s.StageKeys, height: int, width: int, valid: Bools) -> s.Mixture:
        boxes_alone = Mixup(
            alpha=self.alpha,
            cutmix_alpha=self.alpha,
            switch_probability=1.0,
            probability=self.probability,
            mode=self.mode,
            correct_lambda=self.correct_lambda,
        )
        return boxes_alone.draw(keys, height, width, valid)
