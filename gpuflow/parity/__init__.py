"""How far the ways are apart in which an image becomes a tensor: `gpuflow parity`.

images      what is compared: the user's own images, and hostile ones
prefixes    a pipeline up to each of its stages
base        what a way is
ours        training and serving
others      the reference, and what people do instead
ways        all of them by name
measure     levels
model       logits and flips
pairs       who is held to what
study       runs them all
report      what was found; text and page show it
"""

from gpuflow.parity.page import write_report
from gpuflow.parity.report import Report
from gpuflow.parity.study import study
from gpuflow.parity.text import render

__all__ = ["Report", "render", "study", "write_report"]
