"""The Open Inference Protocol (KServe v2): its requests for the outputs of the model, and its answers.

    {"id": "1", "parameters": {"timeout": 500000},
     "inputs": [{"name": "image", "datatype": "BYTES", "shape": [2], "data": ["/9j/4AAQ...", "iVBORw0K..."]}],
     "outputs": [{"name": "logits", "parameters": {"binary_data": true}}]}

`data` has the encoded images as base64. With the extension for binary tensors they follow the JSON instead: each after
its length in four bytes, the lowest first. The header Inference-Header-Content-Length then has the length of the JSON.
"""

from __future__ import annotations

import json
import math
import re
from reprlib import repr as shortened
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Base64Bytes, BaseModel, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from gpuflow.engines.base import activated
from gpuflow.errors import dotted
from gpuflow.serve.http.body import read_images, too_many
from gpuflow.serve.http.limits import Refused, RequestLimits, Reservation

_LENGTH = "Inference-Header-Content-Length"
# Commas and brackets of a request's JSON: 32 MB of short lists would take Python many seconds, and gigabytes.
_MOST_PARTS = 10_000
# Functions from a Prediction to each output: float32 [K], or the name of the most likely class [1].
_OUTPUTS: dict[Any, Any] = {
    "logits": lambda prediction: prediction.logits,
    "probabilities": lambda prediction: activated(prediction.logits, prediction.activation),
    "labels": lambda prediction: np.array([prediction.top(1)[0][0]], object),
}

# --- requests ---------------------------------------------------------------------------------------------------------

_Count = Annotated[int, Field(ge=1, le=1 << 53)]


class _Parameters(BaseModel):
    """The parameters of a request, of its input or of an output; others are ignored. timeout: microseconds."""

    timeout: _Count = 1 << 53
    binary_data: bool | None = None
    binary_data_output: bool = False
    classification: None = None
    shared_memory_region: None = None


class _Output(BaseModel):
    name: Literal["logits", "probabilities", "labels"]
    parameters: _Parameters = _Parameters()


class _Input(BaseModel):
    name: Literal["image"]
    datatype: Literal["BYTES"]
    shape: list[_Count]
    data: list[Base64Bytes] | None = None
    parameters: _Parameters = _Parameters()


class _Request(BaseModel):
    id: str = Field(default="", max_length=1000)
    inputs: tuple[_Input]
    outputs: list[_Output] = []
    parameters: _Parameters = _Parameters()


async def read_request(
    request: Request, limits: RequestLimits, reservation: Reservation
) -> tuple[list[bytes], _Request]:
    """Return the encoded images of a request, and its other values. Raises as `read_images`."""
    (body,), _ = await read_images(request, limits, reservation)
    length, most = request.headers.get(_LENGTH, str(len(body))), min(limits.max_images, limits.max_queue)
    if not re.fullmatch("[0-9]{1,18}", length) or (size := int(length)) > len(body):
        raise _bad(f"{_LENGTH} must be at most {len(body)}, the length of the body, got {shortened(length)}")
    if sum(map(body[:size].count, (b",", b"[", b"{"))) > _MOST_PARTS:
        raise _bad(f"the JSON must have at most {_MOST_PARTS:,} commas and brackets; send images as base64 or binary")
    try:
        asked = _Request.model_validate(json.loads(body[:size]))
    except ValidationError as error:
        fault = error.errors()[0]
        raise _bad(f"{dotted(('request', *fault['loc']))}: {fault['msg']}, got {shortened(fault['input'])}") from error
    except (ValueError, RecursionError) as error:
        raise _bad(f"the body must begin with JSON, whose length is {_LENGTH}: {error}") from error
    reservation.shorten(asked.parameters.timeout / 1e6)
    tensor = asked.inputs[0]
    if (count := math.prod(tensor.shape)) > most:
        raise too_many(most)
    images = tensor.data
    if images is None:
        images = []
        for _ in range(count):
            begin = size + 4
            size = begin + int.from_bytes(body[size:begin], "little")
            images.append(body[begin:size])
    if len(images) != count or size != len(body):
        raise _bad(f"inputs[0] must be {count} images up to byte {len(body)}, got {len(images)} up to byte {size}")
    return images, asked


def _bad(reason: str) -> Refused:
    return Refused(400, "bad_request", reason)


# --- answers ----------------------------------------------------------------------------------------------------------


def describe_model(name: str, classes: int) -> dict[str, Any]:
    """Return the metadata of the model. -1 stands for any size, and for an unknown number of classes.

    Examples:
        >>> describe_model("pets", 2)["outputs"][0]
        {'name': 'logits', 'datatype': 'FP32', 'shape': (-1, 2)}
    """
    return {
        "name": name,
        "versions": ["1"],
        "platform": "gpuflow",
        "inputs": [_described("image", -1, 1)],
        "outputs": [_described(output, -1, 1 if output == "labels" else classes) for output in _OUTPUTS],
    }


def _described(name: str, *shape: int) -> dict[str, Any]:
    return {"name": name, "datatype": "BYTES" if name in ("image", "labels") else "FP32", "shape": shape}


def encode_answer(name: str, request: _Request, predictions: list[Any]) -> Response:
    """Return the outputs that a request asks for, each as JSON or as a binary tensor."""
    outputs, tensors = [], b""
    wanted = {output.name: output.parameters.binary_data for output in request.outputs} or dict.fromkeys(_OUTPUTS)
    for each, binary in wanted.items():
        values = np.stack([_OUTPUTS[each](prediction) for prediction in predictions])
        output, listed = _described(each, *values.shape), values.ravel().tolist()
        if request.parameters.binary_data_output if binary is None else binary:
            data = values.tobytes()
            if each == "labels":
                data = b"".join(len(text).to_bytes(4, "little") + text for text in map(str.encode, listed))
            output["parameters"] = {"binary_data_size": len(data)}
            tensors += data
        else:
            output["data"] = listed
        outputs.append(output)
    text = json.dumps({"id": request.id, "model_name": name, "model_version": "1", "outputs": outputs}).encode()
    kind = "application/octet-stream" if tensors else "application/json"
    return Response(text + tensors, headers={_LENGTH: str(len(text))}, media_type=kind)
