"""Measures how far different ways to turn an image into a tensor differ: `gpuflow parity`.

A way is one implementation of a pipeline: training's loader, the serving graph, torchvision, OpenCV and others.

images      the images to compare: the user's own images, and images on which decoders are known to differ
prefixes    the pipeline up to each of its stages
base        the protocol of a way
ours        training and serving
others      the reference, and common alternatives
ways        all ways by name
measure     differences in levels of 0-255
accepted    which files training and serving accept
model       differences in logits and flipped predictions
pairs       the pairs of ways to compare, and their limits
study       runs all ways and compares them
report      the results; text and page show them
"""

from gpuflow.parity.page import write_report
from gpuflow.parity.report import Report
from gpuflow.parity.study import study
from gpuflow.parity.text import render

__all__ = ["Report", "render", "study", "write_report"]
