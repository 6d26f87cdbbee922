"""The HTTP application around a predictor: routes, admission, answers.

    POST /predict?top_k=5   an image as the body: {"predictions": [{"label", "index", "probability"}, ...]}
                            a form with files: {"results": [one such object, or {"error": {...}}, for each file]}
    POST /seen              an image as the body: a PNG of the image that the model gets
    POST /v2/models/NAME/infer   the Open Inference Protocol: see open_inference
    GET  /v2, /v2/health/live, /v2/health/ready, /v2/models/NAME, /v2/models/NAME/ready   of that protocol, too
    GET  /healthz, /readyz, /metrics, /openapi.json, and / for a web page

Every error is answered by {"error": {"kind", "reason"}}: 400 a malformed request, 404 no such path, 405 another method,
408 a head or a body that does not arrive, 413 too large, 415 another media type or a compressed body, 422 not an image,
500 the model failed, 501 no picture of the model's input, 503 with Retry-After while the service is full, overloaded,
loading or shutting down, 504 no answer in time. A form is a 422 only if none of its files is an image, and a 500 if no
file has predictions and the model's logits of some are not finite. Below /v2 an error is {"error": reason}, and a 400
if an image is bad.

The service never reads a path or a URL that a client names.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from importlib import resources
from typing import Any, TypeVar

import numpy as np

from gpuflow.decode.codecs import probe
from gpuflow.errors import (
    BadSampleError,
    DecoderError,
    MissingExtra,
    PredictorError,
    PredictorTimeout,
    near_word,
    suggest,
)

try:
    import prometheus_client  # noqa: F401
    import python_multipart  # noqa: F401
    from fastapi import FastAPI, Request
    from fastapi.responses import HTMLResponse, JSONResponse, Response
    from starlette.exceptions import HTTPException
    from starlette.middleware.cors import CORSMiddleware
    from starlette.requests import ClientDisconnect
    from starlette.types import ASGIApp
except ModuleNotFoundError as error:
    raise MissingExtra("the service", str(error.name), "serve") from error

from gpuflow.runtime.threads import DaemonPool
from gpuflow.serve.http.body import BodyMiddleware, check_headers, error_at, error_content, read_images
from gpuflow.serve.http.limits import (
    CLOSED_HERE,
    CONTENT_TYPE,
    ROUTES,
    TIMEOUT_HEADER,
    Metrics,
    Occupancy,
    Refused,
    RequestLimits,
    Reservation,
    busy,
    whole_number,
)
from gpuflow.serve.http.open_inference import describe_model, encode_answer, read_request
from gpuflow.serve.model_input import Pictures, most_pixels
from gpuflow.serve.predictor import NOT_FINITE, Prediction, Predictor
from gpuflow.version import __version__

__all__ = ["Health", "RequestLimits", "Service", "check_origins", "create_app"]

_LONG = 16
"""An image of which one side is more than this many times the other counts with the pixels that it is resized to."""
_SHORT_BYTES = 1 << 18
"""Headers of images of this size are read in at most 20 ms, even if they are made to take long."""
_CHECK_SECONDS, _ANSWER_SECONDS = 5.0, 10.0
"""The time between two checks of the decoders, and the limit for one of them."""
_RESTART_SECONDS = 5.0
"""After which a request may be sent again while the model is loaded or the service shuts down."""
_LABELS = 5
"""The number of labels of an image if the request does not say it."""
_DISCONNECTED = 499
"""The status that is counted, as nginx does, for a request whose connection ended before its answer."""

_FAILED: Mapping[str, Any] = error_content("model", NOT_FINITE)
"""The result of an image for which the model gave such logits, in a form with others."""

T = TypeVar("T")


def create_app(
    predictor: Predictor | Future[Predictor],
    limits: RequestLimits = RequestLimits(),  # noqa: B008
    *,
    cors: Sequence[str] = (),
    name: str = "model",
) -> FastAPI:
    """Return the application; its `state.service` is the Service. It does not close the predictor.

    Args:
        predictor: may be a future while the model is loaded; until it is done, requests are refused.
        cors: the origins whose pages may send requests, such as `https://example.org`; `*` for all.
        name: of the model, in the paths of the Open Inference Protocol.

    Raises:
        ValueError: a value of `cors` is not an origin.
    """
    check_origins(cors)
    if isinstance(predictor, Predictor):
        loaded: Future[Predictor] = Future()
        loaded.set_result(predictor)
        predictor = loaded
    service = Service(predictor, limits, name)
    app = FastAPI(title="gpuflow", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.service = service
    shares: dict[str, Any] = {
        "allow_origins": list(cors),
        "allow_methods": ["GET", "POST"],
        "allow_headers": ["Content-Type", "Authorization", TIMEOUT_HEADER],
        "expose_headers": ["Retry-After", "Server-Timing"],
    }

    def shared(answer: ASGIApp) -> ASGIApp:
        return CORSMiddleware(answer, **shares) if cors else answer

    async def internal(request: Request, error: Exception) -> ASGIApp:
        """Return the answer in place of an exception, which Starlette writes to the server's log afterwards."""
        reason = "internal error; the log of the service has the traceback"
        return shared(JSONResponse(error_at(request.url.path, "internal", reason), 500))

    if cors:
        app.add_middleware(CORSMiddleware, **shares)
    app.add_middleware(
        BodyMiddleware,
        metrics=service.metrics,
        occupancy=service.occupancy,
        closing=lambda: service.draining,
        shared=shared,
    )
    app.add_exception_handler(HTTPException, service.refusal)
    app.add_exception_handler(ClientDisconnect, service.refusal)
    app.add_exception_handler(Exception, internal)  # type: ignore[arg-type]  # it needs no more than an ASGI app
    answers = {
        "/": _page(),
        "/healthz": service.healthz,
        "/readyz": service.readyz,
        "/metrics": service.exposition,
        "/v2": service.metadata,
        "/v2/health/live": service.healthz,
        "/v2/health/ready": service.readyz,
    }
    for path in (f"/v2/models/{name}", f"/v2/models/{name}/versions/1"):
        answers |= {path: service.model, f"{path}/ready": service.readyz}
        app.add_route(f"{path}/infer", service.infer, methods=["POST"], include_in_schema=False)
    for path, answer in answers.items():
        app.add_route(path, answer, include_in_schema=False)
    labelled = _REQUEST | {"parameters": [*_REQUEST["parameters"], _TOP_K]}
    app.post("/predict", openapi_extra=labelled, responses=_documented(_PREDICTIONS))(service.predict)
    app.post("/seen", openapi_extra=_REQUEST, responses=_documented(_PICTURE, 501))(service.seen)
    return app


def check_origins(cors: Sequence[str]) -> None:
    """Raise ValueError for a value of `--cors` that browsers would never send as an origin.

    Examples:
        >>> check_origins(["https://example.org", "example.org"])
        Traceback (most recent call last):
        ValueError: --cors: must be an origin without a path, such as https://example.org, or *, got 'example.org'
    """
    for origin in cors:
        if origin != "*" and not re.fullmatch(r"https?://[^/?#\s@]+", origin):
            raise ValueError(
                f"--cors: must be an origin without a path, such as https://example.org, or *, got {origin!r}"
            )


class Service:
    """Handles requests by a predictor: admits a bounded number of images, and answers every error.

    draining: set it to refuse new requests. occupancy: what requests take up now.
    """

    def __init__(self, predictor: Future[Predictor], limits: RequestLimits, name: str) -> None:
        self.limits, self.name, self.draining = limits, name, False
        self._health = Health(lambda: self.predictor.check())
        self.occupancy = Occupancy(limits)
        predictor.add_done_callback(self._set_predictor)
        self.metrics = Metrics(
            queue=lambda: self.occupancy.queue_length,
            held=lambda: self.occupancy.held_bytes,
            ready=lambda: self._refusal() is None and self._health.fault is None,
            batches=lambda: self.predictor.batches if self.loaded else {},
        )

    def _set_predictor(self, loading: Future[Predictor]) -> None:
        if loading.exception() is None:
            self.occupancy.predictor = loading.result()

    @property
    def loaded(self) -> bool:
        return self.occupancy.predictor is not None

    @property
    def predictor(self) -> Predictor:
        """Return the loaded predictor. A service that is not loaded refuses all requests that need it."""
        assert self.occupancy.predictor is not None
        return self.occupancy.predictor

    # --- routes -----------------------------------------------------------------------------------------------------

    async def predict(self, request: Request) -> Response:
        """Answer with the most likely labels of one image, or of every file of a form."""
        begun = time.perf_counter()
        _refuse_unknown(request, {"top_k"})
        top_k = whole_number("top_k", request.query_params.getlist("top_k")) or _LABELS
        answers, several = await self._answered(request, read_images)
        found = [self._result(answer, top_k) for answer in answers]
        bad, failed = sum("error" in result for result in found), found.count(_FAILED)
        if failed and bad == len(found):
            raise Refused(500, "model", NOT_FINITE)
        for _ in range(failed):
            self.metrics.error("model")
        self.metrics.images.inc(len(found) - bad)
        content: dict[str, Any] = {"results": found} if several else dict(found[0])
        if several and bad == len(found):
            content |= error_content("bad_image", f"none of {bad} files is an image") if bad > 1 else found[0]
        milliseconds = (time.perf_counter() - begun) * 1000
        return JSONResponse(
            content,
            422 if bad == len(found) else 200,
            {"Server-Timing": f"total;dur={milliseconds:.1f}"},
        )

    async def infer(self, request: Request) -> Response:
        """Answer a request of the Open Inference Protocol with the outputs of the model for its images."""
        answers, asked = await self._answered(request, read_request)
        for index, answer in enumerate(answers):
            if isinstance(answer, BadSampleError):
                raise Refused(400, "bad_image", str(answer.located(index, "image")))
            if not math.isfinite(answer.logits.max()):
                raise Refused(500, "model", NOT_FINITE)
        self.metrics.images.inc(len(answers))
        return encode_answer(self.name, asked, answers)

    async def seen(self, request: Request) -> Response:
        """Answer with the image that the model gets, as a PNG; see Pictures."""
        _refuse_unknown(request, set())

        async def read_one(*arguments: Any) -> Any:
            images, several = await read_images(*arguments)
            if len(images) > 1:
                raise Refused(400, "bad_request", f"/seen takes one image, got {len(images)}")
            if not self.predictor.gives_images:
                raise Refused(
                    501,
                    "no_picture",
                    "the model runs inside torchpipe, which does not return its input; set serve.model.via=python",
                )
            return images, several

        submit = lambda files, *, deadline: [self.predictor.submit_image(files[0], deadline=deadline)]  # noqa: E731
        (answer,), _ = await self._answered(request, read_one, submit)
        if isinstance(answer, BadSampleError):
            return JSONResponse(self._bad_image(answer), 422)
        pictures = Pictures(self.predictor.image, self.predictor.pipeline)
        return Response(await asyncio.to_thread(pictures.png, answer), media_type="image/png")

    async def healthz(self, request: Request) -> Response:
        """Answer with 200 while the process runs."""
        return JSONResponse({"status": "alive", "live": True})

    async def readyz(self, request: Request) -> Response:
        """Answer with 200 while requests are admitted and every idle decoder decodes a test image, otherwise 503."""
        refused = self._refusal()
        if refused is not None:
            return JSONResponse({"status": refused.kind, "ready": False}, 503, refused.headers)
        if (fault := await self._health.refresh()) is not None:
            return JSONResponse({"status": "failing", "ready": False, "reason": fault}, 503)
        described = {"image": str(self.predictor.image), "preprocessing": self.predictor.preprocessing}
        return JSONResponse({"status": "ready", "ready": True, **described})

    async def metadata(self, request: Request) -> Response:
        """Answer with the name and the version of the service, in the Open Inference Protocol."""
        return JSONResponse({"name": "gpuflow", "version": __version__, "extensions": ["binary_tensor_data"]})

    async def model(self, request: Request) -> Response:
        """Answer with the inputs and outputs of the model, in that protocol."""
        classes = self.predictor.classes if self.loaded else None
        return JSONResponse(describe_model(self.name, len(classes or ()) or -1))

    async def exposition(self, request: Request) -> Response:
        """Answer with the metrics."""
        return Response(self.metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})

    # --- the queue --------------------------------------------------------------------------------------------------

    def _refusal(self) -> Refused | None:
        """Return why no request is admitted now, other than for a full queue; None if requests are admitted."""
        if self.draining:
            reason = "the service is shutting down; retry later or on another server"
            return busy("draining", reason, _RESTART_SECONDS)
        if not self.loaded:
            return busy("loading", "the model is still being loaded", _RESTART_SECONDS)
        return None

    async def _answered(
        self, request: Request, read: Callable[..., Any], submit: Callable[..., Any] | None = None
    ) -> tuple[list[Any], Any]:
        """Return the answer for each image that `read` finds in a request, and what else it returns. Raises Refused."""
        check_headers(request, self.limits)
        if (refused := self._refusal()) is not None:
            raise refused
        milliseconds = whole_number(TIMEOUT_HEADER, request.headers.getlist(TIMEOUT_HEADER)) or math.inf
        with self.occupancy.admit(milliseconds / 1000) as reservation:
            images, others = await read(request, self.limits, reservation)
            sizes = await self._sizes(images)
            futures = self._submit(images, sizes, reservation, submit or self.predictor.submit_all)
            return await self._answers(request, futures, reservation), others

    async def _sizes(self, images: Sequence[bytes]) -> list[int | BadSampleError]:
        """Return `_pixels` of each image. Long headers are read on another thread: this one answers all callers."""
        if sum(map(len, images)) <= _SHORT_BYTES:
            return [self._pixels(data) for data in images]
        return await asyncio.to_thread(lambda: [self._pixels(data) for data in images])

    def _submit(
        self,
        images: list[bytes],
        sizes: Sequence[int | BadSampleError],
        reservation: Reservation,
        submit: Callable[..., Sequence[Future[T]]],
    ) -> list[asyncio.Future[T]]:
        """Submit images of these sizes together and empty the list: from now on only the predictor has their bytes,
        until it decodes them."""
        files, images[:] = tuple(images), ()
        reservation.reserve(len(files), sum(size for size in sizes if isinstance(size, int)))
        for data in files:
            reservation.submit_one(len(data))
        accepted = [data for data, size in zip(files, sizes, strict=True) if isinstance(size, int)]
        try:
            deadline = time.monotonic() + reservation.seconds
            submitted = iter(submit(accepted, deadline=deadline) if accepted else ())
        except PredictorError as error:
            raise Refused(500, "model", str(error)) from error
        return [self._answer(size, submitted) for size in sizes]

    def _pixels(self, data: bytes) -> int | BadSampleError:
        """Return the pixels of an image, or the error that it is too large for the limits. For a long image, which a
        resize may enlarge a lot, that is the most that it ever has.

        If the header cannot be read, return 0, because the decoder says why; for a preset, which would decode such a
        file of any size, return the error.
        """
        limits, file, predictor = self.limits, np.frombuffer(data, np.uint8), self.predictor
        try:
            header = probe(file, max_pixels=limits.max_pixels, max_scans=limits.max_scans, formats=predictor.formats)
        except BadSampleError as error:
            return error if predictor.has_preset or error.code == "sample.too_large" else 0
        short, long = sorted((header.height, header.width))
        if predictor.pipeline is not None and long > _LONG * short:
            return most_pixels(predictor.pipeline, *header.upright_size)
        return short * long

    def _answer(self, size: int | BadSampleError, submitted: Iterator[Future[T]]) -> asyncio.Future[T]:
        """Return a future of one image's answer: the next one of the predictor, or one with the error that it has."""
        if isinstance(size, BadSampleError):
            refused: asyncio.Future[T] = asyncio.get_running_loop().create_future()
            refused.set_exception(size)
            return refused
        answer = asyncio.wrap_future(next(submitted))
        self.occupancy.pixels += size
        answer.add_done_callback(partial(self._release_pixels, size))
        return answer

    def _release_pixels(self, size: int, _: asyncio.Future[Any]) -> None:
        self.occupancy.pixels -= size

    async def _answers(
        self, request: Request, futures: Sequence[asyncio.Future[T]], reservation: Reservation
    ) -> list[T | BadSampleError]:
        """Return the answer for each image. If the model fails or time runs out, cancel the rest and raise Refused."""
        seconds = reservation.seconds
        disconnected = asyncio.ensure_future(_disconnected(request))
        disconnected.add_done_callback(lambda _: _cancel(futures))
        for future in futures:
            future.add_done_callback(partial(_cancel_others, futures))
        try:
            _, unanswered = await asyncio.wait(futures, timeout=seconds)
            if disconnected.done():
                raise ClientDisconnect
            if unanswered:
                in_flight = self.occupancy.queue_length
                raise Refused(
                    504, "timeout", f"no answer within {round(seconds, 3):g} s, with {in_flight} images in flight"
                )
            if any(_is_late(future) for future in futures):
                raise self.occupancy.busy("overloaded", f"no answer was possible within {round(seconds, 3):g} s")
        finally:
            disconnected.cancel()
            _cancel(futures)
        found: list[T | BadSampleError] = []
        for answer in [future.exception() or future.result() for future in futures]:
            if isinstance(answer, PredictorError):
                raise Refused(500, "model", str(answer)) from answer
            if isinstance(answer, BaseException) and not isinstance(answer, BadSampleError):
                raise answer
            found.append(answer)
        return found

    # --- answers ----------------------------------------------------------------------------------------------------

    def _result(self, answer: Prediction | BadSampleError, top_k: int) -> Mapping[str, Any]:
        if isinstance(answer, BadSampleError):
            return self._bad_image(answer)
        try:
            ranked = answer.ranked(top_k)
        except PredictorError:
            return _FAILED
        name = "value" if answer.activation == "none" else "probability"
        return {"predictions": [{"label": label, "index": index, name: value} for index, label, value in ranked]}

    def _bad_image(self, error: BadSampleError) -> dict[str, Any]:
        self.metrics.error("bad_image")
        return error_content("bad_image", error.reason, stage=error.stage)

    async def refusal(self, request: Request, error: Exception) -> Response:
        """Return the answer to a refused request, and count it by its kind."""
        if isinstance(error, Refused):
            refused = error
        elif isinstance(error, HTTPException):
            kind = "method" if error.status_code == 405 else "not_found" if error.status_code == 404 else "bad_request"
            hint = suggest(request.url.path, ROUTES, else_all=False) if error.status_code == 404 else ""
            named = hint and f"; {hint.replace('{name}', self.name)}"
            reason = f"{request.method} {request.url.path}: {error.detail}{named}"
            refused = Refused(error.status_code, kind, reason, dict(error.headers or {}))
        else:
            assert isinstance(error, ClientDisconnect)
            refused = Refused(_DISCONNECTED, "disconnected", "the client closed the connection")
        if refused.status_code != _DISCONNECTED or CLOSED_HERE not in request.scope.get("state", ()):
            self.metrics.error(refused.kind)  # a connection that the service closed was counted then
        content = error_at(request.url.path, refused.kind, refused.detail)
        return JSONResponse(content, refused.status_code, refused.headers)


class Health:
    """Knows whether a service's decoders work, checked at most every few seconds when a client asks for it.

    check: raises an exception, mostly DecoderError, if a decoder does not work. fault: its text at the last check; None
    if all work.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self.fault: str | None = None
        self._check, self._checked = check, -math.inf
        self._lock = asyncio.Lock()
        self._pool: DaemonPool | None = None

    async def refresh(self) -> str | None:
        """Return the fault. If the last check is some seconds old, check again."""
        async with self._lock:
            if time.monotonic() - self._checked >= _CHECK_SECONDS:
                self.fault = await self._run_check()
                self._checked = time.monotonic()
        return self.fault

    async def _run_check(self) -> str | None:
        if self._pool is None:
            self._pool = DaemonPool(1, "check")
        checked = asyncio.wrap_future(self._pool.submit(self._check))
        if not (await asyncio.wait([checked], timeout=_ANSWER_SECONDS))[0]:
            checked.cancel()
            return f"the decoders did not decode a test image within {_ANSWER_SECONDS:g} s: they are busy, or hang"
        match checked.exception():
            case None:
                return None
            case DecoderError() | PredictorError() as error:
                return str(error)
            case error:
                return f"{type(error).__name__}: {error}"


async def _disconnected(request: Request) -> None:
    """Wait until the client closes the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _cancel(futures: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel those that are not done: the predictor drops what it has not started on. Errors of the others are read,
    or asyncio would log them."""
    for future in futures:
        if not future.cancel() and not future.cancelled():
            future.exception()


def _is_late(future: asyncio.Future[Any]) -> bool:
    return not future.cancelled() and isinstance(future.exception(), PredictorTimeout)


def _cancel_others(futures: Sequence[asyncio.Future[Any]], future: asyncio.Future[Any]) -> None:
    """Cancel all images of a request of which one was dropped: the request is refused."""
    if _is_late(future):
        _cancel(futures)


def _refuse_unknown(request: Request, known: set[str]) -> None:
    for name in request.query_params:
        if name not in known:
            hint = near_word(name, known)
            raise Refused(400, "bad_request", f"{request.url.path} has no parameter {name!r}{hint}")


# --- the page ---------------------------------------------------------------------------------------------------------


def _page() -> Any:
    """Return the route of the page, whose policy allows only its own script and style, and requests to this server."""
    text = resources.files("gpuflow.serve.http").joinpath("page.html").read_text(encoding="utf-8")
    script, style = (_hashes(text, tag) for tag in ("script", "style"))
    policy = (
        f"default-src 'none'; script-src {script}; style-src {style}; img-src 'self' blob: data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}
    answer = HTMLResponse(text, headers=headers)

    async def page(request: Request) -> Response:
        return answer

    return page


def _hashes(text: str, tag: str) -> str:
    """Return the hashes that allow the page's own scripts or styles in a Content-Security-Policy."""
    parts = re.findall(f"<{tag}>(.*?)</{tag}>", text, flags=re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in parts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


# --- for /openapi.json ------------------------------------------------------------------------------------------------

_BYTES = {"schema": {"type": "string", "format": "binary"}}
_FILES = {"schema": {"type": "object", "additionalProperties": {"type": "string", "format": "binary"}}}
_COUNT = {"type": "integer", "minimum": 1, "maximum": 999_999_999}
_REQUEST: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"image/*": _BYTES, "application/octet-stream": _BYTES, "multipart/form-data": _FILES},
    },
    "parameters": [
        {
            "name": TIMEOUT_HEADER,
            "in": "header",
            "description": "Milliseconds from the head of the request until its caller gives up.",
            "schema": _COUNT,
        }
    ],
}
_TOP_K = {"name": "top_k", "in": "query", "schema": _COUNT | {"default": _LABELS}}
_ONE: Mapping[str, Any] = {"predictions": [{"label": "tench", "index": 0, "probability": 0.93}]}
_PREDICTIONS: dict[str, Any] = {
    "description": "Predictions for one image, or for each file of a form.",
    "content": {
        "application/json": {
            "examples": {
                "image": {"value": _ONE},
                "form": {"value": {"results": [_ONE, error_content("bad_image", "empty: the file has no bytes")]}},
            }
        }
    },
}
_PICTURE: dict[str, Any] = {"description": "A PNG.", "content": {"image/png": _BYTES}}
_REFUSALS = {
    400: ("bad_request", "A malformed request, or an unknown parameter."),
    408: ("slow_body", "The head or the body did not arrive in time."),
    413: ("too_large", "A body, or a number of images or pixels, above the limits."),
    415: ("unsupported_type", "Another media type, or a compressed body."),
    422: ("bad_image", "Not an image; of a form, none of its files is one."),
    431: ("bad_request", "The head of the request is too large."),
    500: ("model", "The model failed."),
    501: ("no_picture", "The model's input cannot be shown."),
    503: ("overloaded", "Full, overloaded, loading or shutting down; see Retry-After."),
    504: ("timeout", "No answer in time."),
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["kind", "reason"],
            "properties": {name: {"type": "string"} for name in ("kind", "stage", "reason")},
        }
    },
}


def _documented(success: dict[str, Any], *more: int) -> dict[int | str, dict[str, Any]]:
    """Return the answers of a route for images: its own, every refusal, and that of 501 only if `more` names it."""
    found: dict[int | str, dict[str, Any]] = {200: success}
    for status, (kind, text) in _REFUSALS.items():
        if status != 501 or status in more:
            content = {"schema": _ERROR, "example": error_content(kind, "...")}
            found[status] = {"description": text, "content": {"application/json": content}}
    retry = {"description": "Seconds after which to try again.", "schema": {"type": "integer", "minimum": 1}}
    found[503]["headers"] = {"Retry-After": retry}
    return found
