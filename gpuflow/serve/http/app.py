"""A predictor behind HTTP.

    POST /predict?top_k=5   an image as the body: {"predictions": [{"label", "index", "probability"}, ...]}
                            a form with files: {"results": [one such object, or {"error": {...}}, for each file]}
    POST /seen              an image as the body: a PNG of what the model gets
    GET  /healthz, /readyz, /metrics, /openapi.json, and / for people

Whatever goes wrong is answered by {"error": {"kind", "reason"}}: 400 a request that cannot be read, 408 a body that
does not arrive, 413 too large, 415 of another type, 422 no image, 500 the model failed, 503 with Retry-After while the
service is full, loading or ending, 504 no answer in time. A form is a 422 only if none of its files is an image.

Nothing is ever read from a path or a URL that a client names.
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
from contextlib import contextmanager
from importlib import resources
from typing import Annotated, Any, TypeVar

from gpuflow.errors import BadSampleError, DecoderError, MissingExtra, PredictorError, did_you_mean

try:
    import prometheus_client  # noqa: F401
    import python_multipart  # noqa: F401
    from fastapi import FastAPI, Query, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import HTMLResponse, JSONResponse, Response
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect
except ModuleNotFoundError as error:
    raise MissingExtra("the service", str(error.name), "serve") from error

from gpuflow.runtime.threads import DaemonPool
from gpuflow.serve.http.body import Edge, Limits, Refused, check_headers, read_images
from gpuflow.serve.http.metrics import CONTENT_TYPE, Metrics
from gpuflow.serve.pictures import Pictures
from gpuflow.serve.predictor import Prediction, Predictor

__all__ = ["Health", "Limits", "Service", "create_app"]

_CHECK_SECONDS, _ANSWER_SECONDS = 5.0, 10.0
"""Between two looks at the decoders, and for one of them."""
_RETRY_SECONDS = {"queue_full": "1", "loading": "5", "draining": "5"}
_GONE = 499
"""What is counted, as nginx does, for a client that did not wait for its answer."""

T = TypeVar("T")


def create_app(predictor: Predictor | Future[Predictor], limits: Limits = Limits()) -> FastAPI:  # noqa: B008
    """The application; its `state.service` is the Service. Whoever made the predictor closes it.

    predictor: or one that is still being loaded; until then requests are refused.
    """
    if isinstance(predictor, Predictor):
        loaded: Future[Predictor] = Future()
        loaded.set_result(predictor)
        predictor = loaded
    service = Service(predictor, limits)
    app = FastAPI(title="gpuflow", docs_url=None, redoc_url=None)
    app.state.service = service
    app.add_middleware(Edge, metrics=service.metrics, limits=limits, closing=lambda: service.draining)
    app.add_exception_handler(HTTPException, service.refusal)
    app.add_exception_handler(RequestValidationError, service.refusal)
    app.add_exception_handler(ClientDisconnect, service.refusal)
    app.add_exception_handler(Exception, _internal)
    app.add_route("/", _page(), include_in_schema=False)
    app.add_route("/healthz", service.healthz, include_in_schema=False)
    app.add_route("/readyz", service.readyz, include_in_schema=False)
    app.add_route("/metrics", service.exposition, include_in_schema=False)
    app.post("/predict", openapi_extra=_BODY, responses=_ANSWERS)(service.predict)
    app.post("/seen", openapi_extra=_BODY, responses=_PICTURE)(service.seen)
    return app


class Service:
    """What stands between requests and a predictor: a bounded queue, and answers for all that can go wrong.

    draining: set it to refuse new requests. active: requests that were taken and are not answered yet.
    reserved: their places in the queue, as far as the predictor does not count them. held: bytes of their bodies.
    """

    def __init__(self, predictor: Future[Predictor], limits: Limits) -> None:
        self.limits, self.draining = limits, False
        self._health = Health(lambda: predictor.result().check())
        self.active = self.reserved = self.held = 0
        self._loading = predictor
        self.metrics = Metrics(
            queue=lambda: self.queue_length,
            ready=lambda: self._refusal() is None and self._health.fault is None,
            batches=lambda: predictor.result().batches if self.loaded else {},
        )

    @property
    def loaded(self) -> bool:
        return self._loading.done() and self._loading.exception() is None

    @property
    def queue_length(self) -> int:
        """Images under way, and places of requests whose bodies are being read."""
        return self.reserved + (self._loading.result().in_flight if self.loaded else 0)

    # --- routes -----------------------------------------------------------------------------------------------------

    async def predict(self, request: Request, top_k: Annotated[int, Query(ge=1)] = 5) -> Response:
        """The likeliest labels of one image, or of every file of a form."""
        begun = time.perf_counter()
        _refuse_unknown(request, {"top_k"})
        check_headers(request, self.limits)
        with self._admitted() as places:
            images, several = await read_images(request, self.limits, places.hold)
            places.extend(len(images))
            futures = self._submitted(images, places, self._loading.result().submit)
            answers = await self._answers(request, futures)
        found = [self._result(answer, top_k) for answer in answers]
        bad = sum("error" in result for result in found)
        self.metrics.images.inc(len(found) - bad)
        content: dict[str, Any] = {"results": found} if several else found[0]
        if several and bad == len(found):
            content |= _error("bad_image", f"none of {bad} files is an image") if bad > 1 else found[0]
        milliseconds = (time.perf_counter() - begun) * 1000
        return JSONResponse(
            content,
            status_code=422 if bad == len(found) else 200,
            headers={"Server-Timing": f"total;dur={milliseconds:.1f}"},
        )

    async def seen(self, request: Request) -> Response:
        """What the model gets of one image, as a PNG; see Pictures."""
        _refuse_unknown(request, set())
        check_headers(request, self.limits)
        with self._admitted() as places:
            images, _ = await read_images(request, self.limits, places.hold)
            if len(images) > 1:
                raise Refused(400, "bad_request", f"one image at a time is shown, got {len(images)}")
            predictor = self._loading.result()
            if not predictor.gives_images:
                raise Refused(501, "no_picture", "the model runs inside torchpipe, which shows nobody its images")
            (answer,) = await self._answers(request, self._submitted(images, places, predictor.submit_image))
        if isinstance(answer, BadSampleError):
            return JSONResponse(self._bad(answer), status_code=422)
        pictures = Pictures(predictor.image, predictor.pipeline)
        return Response(await asyncio.to_thread(pictures.png, answer), media_type="image/png")

    async def healthz(self, request: Request) -> Response:
        """200 while the process lives."""
        return JSONResponse({"status": "alive"})

    async def readyz(self, request: Request) -> Response:
        """200 while requests are taken and every decoder decodes a test image, otherwise 503."""
        refused = self._refusal()
        if refused is not None:
            return JSONResponse({"status": refused.kind}, status_code=503, headers=refused.headers)
        if (fault := await self._health.look()) is not None:
            return JSONResponse({"status": "failing", "reason": fault}, status_code=503)
        predictor = self._loading.result()
        described = {"image": str(predictor.image), "preprocessing": predictor.preprocessing}
        return JSONResponse({"status": "ready", **described})

    async def exposition(self, request: Request) -> Response:
        """The metrics."""
        return Response(self.metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})

    # --- the queue --------------------------------------------------------------------------------------------------

    def _refusal(self) -> Refused | None:
        """Why no request is taken now, apart from a full queue."""
        if self.draining:
            return _busy("draining", "the service is ending; ask another one, or later")
        if not self.loaded:
            return _busy("loading", "the model is still being loaded")
        return None

    @contextmanager
    def _admitted(self) -> Iterator[_Places]:
        """A request in the queue, with one place at first."""
        refused = self._refusal()
        if refused is not None:
            raise refused
        places = _Places(self)
        places.extend(1)
        self.active += 1
        try:
            yield places
        finally:
            self.active -= 1
            places.give_back()

    def _submitted(
        self, images: Sequence[bytes], places: _Places, submit: Callable[[bytes], Future[T]]
    ) -> list[asyncio.Future[T]]:
        futures = []
        try:
            for data in images:
                places.hand_over()
                futures.append(asyncio.wrap_future(submit(data)))
        except PredictorError as error:
            raise Refused(500, "model", str(error)) from error
        return futures

    async def _answers(self, request: Request, futures: Sequence[asyncio.Future[T]]) -> list[T | BadSampleError]:
        """What each came to. Raises Refused: the model failed, or not all came in time. Then the rest is dropped."""
        everything = asyncio.gather(*futures, return_exceptions=True)
        left = asyncio.ensure_future(_disconnected(request))
        try:
            either: set[asyncio.Future[Any]] = {everything, left}
            await asyncio.wait(either, timeout=self.limits.timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not everything.done():
                if left.done():
                    raise ClientDisconnect
                waited = f"no answer within {self.limits.timeout_s:g} s, with {self.queue_length} images under way"
                raise Refused(504, "timeout", waited)
        finally:
            left.cancel()
            everything.cancel()
        found: list[T | BadSampleError] = []
        for answer in everything.result():
            if isinstance(answer, PredictorError):
                raise Refused(500, "model", str(answer)) from answer
            if isinstance(answer, BaseException) and not isinstance(answer, BadSampleError):
                raise answer
            found.append(answer)
        return found

    # --- answers ----------------------------------------------------------------------------------------------------

    def _result(self, answer: Prediction | BadSampleError, top_k: int) -> dict[str, Any]:
        if isinstance(answer, BadSampleError):
            return self._bad(answer)
        ranked = answer.ranked(top_k)
        if not all(math.isfinite(probability) for *_, probability in ranked):
            raise Refused(500, "model", "the model gave logits that are no finite numbers")
        return {
            "predictions": [
                {"label": label, "index": index, "probability": probability} for index, label, probability in ranked
            ]
        }

    def _bad(self, error: BadSampleError) -> dict[str, Any]:
        self.metrics.error("bad_image")
        return _error("bad_image", error.reason, stage=error.stage)

    async def refusal(self, request: Request, error: Exception) -> Response:
        """The answer to a request that gets no predictions, counted by its kind."""
        if isinstance(error, Refused):
            refused = error
        elif isinstance(error, RequestValidationError):
            (*_, name), message, got = (error.errors()[0][key] for key in ("loc", "msg", "input"))
            refused = Refused(400, "bad_request", f"{name}: {message[:1].lower()}{message[1:]}, got {got!r}")
        elif isinstance(error, HTTPException):
            kind = "method" if error.status_code == 405 else "not_found" if error.status_code == 404 else "bad_request"
            reason = f"{request.method} {request.url.path}: {error.detail}"
            refused = Refused(error.status_code, kind, reason, dict(error.headers or {}))
        else:
            assert isinstance(error, ClientDisconnect)
            refused = Refused(_GONE, "disconnected", "the client did not wait")
        self.metrics.error(refused.kind)
        return JSONResponse(
            _error(refused.kind, refused.detail), status_code=refused.status_code, headers=refused.headers
        )


class Health:
    """Whether a service's decoders work, looked at from time to time by those who ask.

    check: raises DecoderError where one does not. fault: why not, when it was last looked at; None if all do.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self.fault: str | None = None
        self._check, self._checked = check, -math.inf
        self._looking = asyncio.Lock()
        self._pool: DaemonPool | None = None

    async def look(self) -> str | None:
        """The fault, looked at anew if that was some time ago."""
        async with self._looking:
            if time.monotonic() - self._checked >= _CHECK_SECONDS:
                self.fault = await self._looked()
                self._checked = time.monotonic()
        return self.fault

    async def _looked(self) -> str | None:
        if self._pool is None:
            self._pool = DaemonPool(1, "check")
        try:
            await asyncio.wait_for(asyncio.wrap_future(self._pool.submit(self._check)), _ANSWER_SECONDS)
        except TimeoutError:
            return f"the decoders did not decode a test image within {_ANSWER_SECONDS:g} s"
        except (DecoderError, PredictorError) as error:
            return str(error)
        return None


class _Places:
    """One request's share of a service's queue and memory."""

    def __init__(self, service: Service) -> None:
        self._service, self._images, self._bytes = service, 0, 0

    def extend(self, images: int) -> None:
        """Have places for so many images. Raises Refused."""
        service, limits = self._service, self._service.limits
        if service.queue_length + images - self._images > limits.max_queue:
            raise _busy("queue_full", f"the queue is full: {service.queue_length} of {limits.max_queue} places taken")
        service.reserved += images - self._images
        self._images = images

    def hold(self, size: int) -> None:
        """Keep so many more bytes of the body. Raises Refused."""
        service, limits = self._service, self._service.limits
        if service.held + size > limits.max_held_bytes and service.held > self._bytes:
            raise _busy("queue_full", f"requests hold {service.held:,} of {limits.max_held_bytes:,} bytes")
        service.held += size
        self._bytes += size

    def hand_over(self) -> None:
        """From here on the predictor counts one of the images."""
        self._service.reserved -= 1
        self._images -= 1

    def give_back(self) -> None:
        self._service.reserved -= self._images
        self._service.held -= self._bytes


async def _disconnected(request: Request) -> None:
    """Wait until the client is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _busy(kind: str, reason: str) -> Refused:
    return Refused(503, kind, reason, {"Retry-After": _RETRY_SECONDS[kind]})


def _error(kind: str, reason: str, **more: str) -> dict[str, Any]:
    return {"error": {"kind": kind, **more, "reason": reason}}


async def _internal(request: Request, error: Exception) -> Response:
    """Starlette passes the exception on to the server's log afterwards."""
    return JSONResponse(_error("internal", "an error inside the service, which its log shows"), status_code=500)


def _refuse_unknown(request: Request, known: set[str]) -> None:
    for name in request.query_params:
        if name not in known:
            hint = did_you_mean(name, known) if known else ""
            raise Refused(400, "bad_request", f"{request.url.path} has no parameter {name!r}{hint}")


# --- the page ---------------------------------------------------------------------------------------------------------


def _page() -> Any:
    """The route of the page. It may run the script and the style that it brings, and ask this server, nothing else."""
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
    """What a Content-Security-Policy says of the page's own scripts or styles."""
    parts = re.findall(f"<{tag}>(.*?)</{tag}>", text, flags=re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in parts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


# --- what /openapi.json says ------------------------------------------------------------------------------------------

_BYTES = {"schema": {"type": "string", "format": "binary"}}
_FILES = {"schema": {"type": "object", "additionalProperties": {"type": "string", "format": "binary"}}}
_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"image/*": _BYTES, "application/octet-stream": _BYTES, "multipart/form-data": _FILES},
    }
}
_ONE: Mapping[str, Any] = {"predictions": [{"label": "tench", "index": 0, "probability": 0.93}]}
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Of one image, or of each file of a form.",
        "content": {
            "application/json": {
                "examples": {
                    "image": {"value": _ONE},
                    "form": {"value": {"results": [_ONE, _error("bad_image", "empty: the file has no bytes")]}},
                }
            }
        },
    },
    422: {"description": "No image.", "content": {"application/json": {"example": _error("bad_image", "...")}}},
    503: {"description": "Full, loading or ending; see Retry-After."},
}
_PICTURE: dict[int | str, dict[str, Any]] = {200: {"description": "A PNG.", "content": {"image/png": _BYTES}}}
