"""Measures how far different ways to turn an image into a tensor differ: `gpuflow parity`.

A way is one implementation of a pipeline: training's loader, the serving graph, torchvision, OpenCV and others.

images      the images to compare: the user's own images, and images on which decoders are known to differ
ways        the protocol of a way, the pipeline up to each of its stages, training and serving
others      the reference, common alternatives and other libraries; the table of all ways
measure     differences in levels of 0-255
pairs       the pairs of ways to compare, and their limits; differences in logits and flipped predictions
study       runs all ways and compares them; which files training and serving accept
report      the results, for the terminal, as a page and as JSON
"""

from gpuflow.parity.report import Report, render, write_report
from gpuflow.parity.study import study

__all__ = ["Report", "render", "study", "write_report"]
