"""The torchpipe graph of a configuration, as a value, a dict and TOML. Does not need torchpipe itself.

torchpipe schedules the instances of the nodes, and forms batches where no `RunningGraph` does. The nodes run gpuflow's
own code (`nodes.py`), so that serving gives the pixels of validation bit for bit; only a preset's operators are
torchpipe's.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gpuflow.config import Config, ModelSpec
from gpuflow.config.stage_entries import as_tuples
from gpuflow.decode.preset import Preset
from gpuflow.engines.base import model_error
from gpuflow.engines.onnx import info_of
from gpuflow.engines.tensorrt import PlanCache, Platform, Settings, cache_directory, cache_key
from gpuflow.errors import ConfigError, Problem
from gpuflow.pipeline.program import Program, fold, trace
from gpuflow.pipeline.stage import ImageSpec, Pipeline, Stage

_PRECISION = {"float32": "fp32", "float16": "fp16"}


def tensorrt_node(model: ModelSpec, *, image: ImageSpec, platform: Platform | None = None) -> dict[str, str]:
    """Return the parameters, as strings, of a node that builds and runs the model by `TensorrtTensor`.

    It takes CUDA tensors [1, C, H, W] in `data`, and tunes for the largest batch. torchpipe uses a cached engine if the
    file exists, so the file's name contains the hash; without a platform, each start builds the engine again.

    Raises:
        ConfigError: torchpipe's node cannot run such a model.
    """
    if image.dtype not in ("float32", "float16"):
        export = ", or export the model without --fold-normalize" if info_of(model.file).folded else ""
        rule = (
            f"takes {image.dtype} images, which torchpipe's TensorrtTensor does not; use serve.model.via=python{export}"
        )
        raise model_error(model.file, rule)
    node = {
        "backend": "S[TensorrtTensor,SyncTensor]",
        "model": model.file,
        "precision": _PRECISION[model.precision],
        "min": str(model.tensorrt.min_batch),
        "max": str(model.batch),
        "instance_num": str(model.instances),
    }
    if platform is not None:
        key = cache_key(model.file, Settings.of(model, image), platform)
        node["model::cache"] = str(PlanCache(cache_directory(model)).path(key, "torchpipe.trt"))
    return node


PREPROCESS, MODEL, PREDICT = OURS = ("GpuflowPreprocess", "GpuflowModel", "GpuflowPredict")
"""The names of gpuflow's nodes in torchpipe. The last one does the work of the first two: on a GPU each of these is
short, and their Python parts cannot run at the same time. As two nodes they would split the requests into smaller
batches, and each would wait for the other."""
NO_MODEL = ModelSpec(file="")
"""The default numbers, for a graph whose model the caller brings, or that has none."""
_CPU_INSTANCES = 4
"""Largest number of batches that threads decode at the same time: each waits for its slowest image. Of processes, which
share a batch, none would be free for another one."""
_GPU_INSTANCES = 2
"""Largest number of instances that preprocess on a GPU for a model that torchpipe runs."""
_PRESET_INSTANCES = 4
"""Largest number of instances of torchpipe's GPU decoder. They start one by one, each in more than a second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Graph:
    """A chain of nodes, or one.

    nodes: by their names within the graph, torchpipe's parameters, all of them text. origin: the configuration's file.
    preprocessing: the fingerprint of its stages. preset: the one whose operators the first node runs; None if it runs
    gpuflow's own code.
    """

    nodes: Mapping[str, Mapping[str, str]]
    origin: str
    preprocessing: str
    preset: Preset | None = None

    @property
    def native(self) -> bool:
        """Return True if some node runs torchpipe's own operators."""
        return any(node["backend"] not in OURS for node in self.nodes.values())

    @property
    def at_once(self) -> int:
        """Return how many images the nodes work on at a time."""
        nodes = self.nodes.values()
        return sum(int(n.get("threads") or int(n["instance_num"]) * int(n.get("batch", 1))) for n in nodes)

    def as_dict(self, prefix: str = "") -> dict[str, dict[str, str]]:
        """Return a new dict of parameters by node name for `torchpipe.pipe`, which changes it.

        prefix: of the node names, which are global to a process and never freed.

        Examples:
            >>> Graph(nodes={"preprocess": {}, "model": {}}, origin="x.yaml", preprocessing="").as_dict("a.")
            {'a.preprocess': {'next': 'a.model'}, 'a.model': {}}
        """
        nodes = {prefix + name: dict(node) for name, node in self.nodes.items()}
        for node, following in zip(nodes.values(), [*nodes][1:], strict=False):
            node["next"] = following
        return nodes


def lower(config: Config, *, device: str = "cpu") -> Graph:
    """Return the graph of a configuration's block `serve`.

    Args:
        config: a checked configuration. Without `serve.model` the graph ends with the images.
        device: where the model runs, `cpu` or `cuda`.

    Raises:
        ConfigError: there is no block `serve`, or its model has `via: torchpipe` and torchpipe cannot run it.
    """
    from gpuflow.config.resources import serving_processes_of, threads_of

    model, program = config.serve_block().model, config.programs["serve"]
    return chain(
        program,
        model,
        origin=config.path,
        threads=threads_of(config.run),
        processes=serving_processes_of(config.run, program),
        device=device,
    )


def chain(
    program: Program,
    model: ModelSpec | None,
    *,
    origin: str,
    threads: int,
    device: str,
    platform: Platform | None = None,
    gpu_decodes: bool = True,
    processes: int = 0,
) -> Graph:
    """Return the graph that preprocesses, then runs the model: one node if a GPU preprocesses, otherwise two.

    Args:
        program: of the block `serve`.
        model: its `model`; None if it has none or the caller brings the model.
        origin: the configuration's file.
        threads: that preprocess if neither the GPU nor processes do.
        device: where the model runs.
        platform: that an engine built by torchpipe is tied to; without it the engine is not cached.
        gpu_decodes: whether this GPU can run the program; used unless the stages set `backend: cpu`.
        processes: that preprocess if the GPU does not.
    """
    preset = program.decoder if isinstance(program.decoder, Preset) else None
    gpu_decodes = gpu_decodes and program.decoder.backend != "cpu" and preset is None
    stages, fingerprint = stages_to_json(program.pipeline.stages), program.pipeline.fingerprint
    if model is not None and model.via == "torchpipe":
        if preset is not None:
            rule = "is torchpipe, which has no node for the stages after a preset"
            problem = Problem.of(("serve", "model", "via"), rule, action="use python", code="config.conflict")
            raise ConfigError([replace(problem, place=f"{origin}:")])
        last = tensorrt_node(model, image=program.result, platform=platform)
        # torchpipe's node takes images on the GPU and cannot skip items that failed before.
        images = {"device": "cuda", "on_error": "raise"}
        if gpu_decodes:
            threads = min(threads, _GPU_INSTANCES)
    else:
        last = _model_parameters(model, device, stages)
        if device != "cpu" and gpu_decodes:
            both = {
                **last,
                "backend": PREDICT,
                "on_error": "pass",
                "patience": str(math.ceil((model or NO_MODEL).timeout_ms)),
            }
            return Graph(nodes={"serve": both}, origin=origin, preprocessing=fingerprint)
        batch = max(threads, int(last["batch"]))
        numbers = {"batch": str(batch), "threads": str(threads), "processes": str(processes)}
        images = {"device": "cpu", "on_error": "pass", **numbers}
        if preset is None:
            threads = 1 if processes else min(threads, _CPU_INSTANCES)
    if preset is not None:
        first = {"backend": preset.operators, **preset.operator_parameters}
        if preset.needs_gpu:
            threads = min(threads, _PRESET_INSTANCES)
    else:
        first = {"backend": PREPROCESS, "batching_timeout": "1", **images, "stages": stages}
    first["instance_num"] = str(threads)
    nodes = {"preprocess": first, "model": last}
    return Graph(nodes=nodes, origin=origin, preprocessing=fingerprint, preset=preset)


def _model_parameters(model: ModelSpec | None, device: str, stages: str) -> dict[str, str]:
    """Return the parameters of the node that runs the model."""
    numbers = model or NO_MODEL
    parameters = {
        "backend": MODEL,
        "instance_num": str(numbers.instances),
        # torchpipe takes whole milliseconds, and 0 turns batching off.
        "batching_timeout": str(max(1, math.ceil(numbers.timeout_ms))),
        "batch": str(numbers.batch),
        "device": device,
        "stages": stages,
    }
    if model is not None:
        parameters["model"] = model.model_dump_json(exclude_defaults=True)
    return parameters


# --- stages as text ---------------------------------------------------------------------------------------------------


def stages_to_json(stages: Sequence[Stage]) -> str:
    """Return stages with all parameters, so that a graph needs no other file: `[["resize", {"shorter": 256, ...}]]`."""
    fields = ({field.name: getattr(stage, field.name) for field in dataclasses.fields(stage)} for stage in stages)
    names = (stage.stage_name for stage in stages)
    return json.dumps(list(zip(names, fields, strict=True)), ensure_ascii=False)


def program_from_json(text: str, stages: Mapping[str, type[Stage]]) -> Program:
    """Return the program of stages that `stages_to_json` wrote, validated and folded.

    Args:
        stages: the known stage classes by name.

    Raises:
        ConfigError: an unknown stage, or stages that do not fit each other.
    """
    known = {**stages, Preset.stage_name: Preset}
    made = []
    for name, parameters in json.loads(text):
        if name not in known:
            rule, action = f"has the stage {name!r}, which is not known here", "install the package that brings it"
            raise ConfigError([Problem("the graph", rule, action=action, code="stage.unknown")])
        made.append(known[name](**as_tuples(parameters)))
    pipeline = Pipeline("serve", tuple(made))
    return fold(pipeline, trace(pipeline, serving=True))


# --- TOML -------------------------------------------------------------------------------------------------------------

_HEADER = """\
A torchpipe graph of {origin}, written by gpuflow {version}. Preprocessing {preprocessing}.

Run it, with gpuflow[serve] installed:

    import gpuflow.serve
    gpuflow.serve.register()

    import torch, torchpipe
    graph = torchpipe.pipe({file!r})
    request = {{"data": open("photo.jpg", "rb").read()}}
    graph(request)
    print(request["error"] if "error" in request else torch.from_dlpack(request["result"]))

Open this file once in a process: torchpipe never frees node names. Then call the graph from any thread; requests that
arrive at the same time become one batch. A relative path of the model file starts at the working directory.
"""


def to_toml(graph: Graph, *, file: str) -> str:
    """Return a graph as torchpipe reads it, with a header that says how to run it. file: where it will be saved."""
    from gpuflow.version import __version__

    header = _HEADER.format(
        origin=graph.origin, version=__version__, preprocessing=graph.preprocessing, file=file
    ).splitlines()
    lines = [f"# {line}".rstrip() for line in header]
    for name, parameters in graph.as_dict().items():
        lines += ["", f"[{name}]", *(f"{_key(key)} = {_string(value)}" for key, value in parameters.items())]
    return "\n".join(lines) + "\n"


def _key(text: str) -> str:
    return text if re.fullmatch(r"[A-Za-z0-9_-]+", text) else _string(text)


def _string(text: str) -> str:
    """Return a TOML string, literal if possible. JSON's escapes are valid in TOML too, but JSON does not escape DEL."""
    if text.isprintable() and "'" not in text and '"' in text:
        return f"'{text}'"
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
