"""`gpuflow.serve.load`: logits and labels of images and lists, errors, timeouts, models, closing."""

from __future__ import annotations

import asyncio
import copy
import errno
import io
import json
import math
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import gpuflow
import gpuflow.serve
from gpuflow.config import read_config
from gpuflow.decode.nvjpeg import NvjpegError
from gpuflow.decode.preset import CANNOT_DECODE
from gpuflow.errors import BadSampleError, ConfigError, MissingExtra, PredictorError, PredictorTimeout, SystemFault
from gpuflow.execute.gpu import backend as gpu_backend
from gpuflow.serve.predictor import NOT_FINITE, Prediction, Predictor, chain_here
from gpuflow.stages import STAGES
from gpuflow.torchpipe.graph import chain
from tests.datasets import VAL, Entries, deadline, make_photos, no_more_files, program, python, write_config
from tests.forking import Python
from tests.hostile import BAD
from tests.images import jpeg, photo
from tests.serve.fakes import CLASSES, FakeEngine, Gate, Nap, mean_color
from tests.serve.models import SIDE, Models, noise, save_program
from tests.serve.services import predictor_of as service_of
from tests.serve.services import wait

TEXT, REASON = BAD["text"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration whose block `serve` names no model."""
    root = tmp_path_factory.mktemp("predictor")
    make_photos(root / "photos", classes=3, each=4)
    return write_config(root / "x.yaml", root / "photos", serve={"stages": list(VAL)})


@pytest.fixture(scope="module")
def files(config: Path) -> list[Path]:
    return sorted((config.parent / "photos").rglob("*.jpg"))


@pytest.fixture(scope="module")
def predictor(config: Path) -> Iterator[Predictor]:
    """The mean colour of what the model gets."""
    with gpuflow.serve.load(config, model=mean_color) as made:
        yield made


def predictor_of(engine: FakeEngine, *, seconds: float = 20.0) -> Predictor:
    folded = program(VAL)
    graph = chain(folded, None, origin="x.yaml", threads=1, device="cpu")
    return Predictor(graph, [engine], image=folded.result, classes=CLASSES, timeout_seconds=seconds)


# --- asking -----------------------------------------------------------------------------------------------------------


def test_bytes_a_path_or_several_of_them(predictor: Predictor, files: list[Path]) -> None:
    one = predictor(files[0])
    assert (one.shape, one.dtype) == ((3,), torch.float32)
    data = files[0].read_bytes()
    for same in (data, bytearray(data), memoryview(data), str(files[0])):
        assert torch.equal(predictor(same), one)
    several = predictor([files[1], data, str(files[2])])
    assert several.shape == (3, 3)
    assert torch.equal(several[1], one)
    assert predictor(iter(files)).shape == (12, 3)
    assert predictor([]).shape == (0, 0)


def test_logits_are_the_models_on_validations_images(config: Path, files: list[Path]) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 24 * 24, 5), nn.Dropout(0.9))
    with gpuflow.serve.load(config, model=model) as predictor, gpuflow.load(config, "val") as validation:
        assert not model.training
        assert predictor.preprocessing == validation.preprocessing
        for batch in validation:
            images, _ = batch
            with torch.no_grad():
                expected = model(images)
            torch.testing.assert_close(predictor([files[index] for index in batch.indices]), expected)


def test_labels_by_probability() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0])
    named = Prediction(logits=logits, classes=CLASSES).top(2)
    assert [label for label, _ in named] == ["green", "blue"]
    assert [probability for _, probability in named] == pytest.approx(logits.softmax(dim=0)[[1, 2]].tolist())
    assert [label for label, _ in Prediction(logits=logits).top(9)] == ["1", "2", "0"]


def test_a_negative_number_of_labels_is_refused() -> None:
    with pytest.raises(ValueError, match="k must be >= 0, got -1"):
        Prediction(logits=torch.zeros(3)).top(-1)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.frombuffer(b"abc", np.uint8), "an image must be a path or the bytes of its file, got uint8"),
        ([5], "an image must be a path or the bytes of its file, got int"),
        (5, "an image must be a path or the bytes of its file, got int"),
        (Image.new("RGB", (2, 2)), "an image must be a path or the bytes of its file, got Image"),
        (io.BytesIO(b"a\nb"), "an image must be a path or the bytes of its file, got an open file"),
    ],
)
def test_what_is_no_image_is_refused(images: Any, message: str) -> None:
    with predictor_of(FakeEngine()) as predictor, pytest.raises(TypeError, match=message):
        predictor(images)


def test_an_open_temporary_file_is_refused(files: list[Path]) -> None:
    with predictor_of(FakeEngine()) as predictor, NamedTemporaryFile() as file:
        file.write(files[0].read_bytes())
        file.seek(0)
        with pytest.raises(TypeError, match="got an open file"):
            predictor(file)


def test_labels_instead_of_logits(files: list[Path]) -> None:
    with predictor_of(FakeEngine()) as predictor:
        one, several = predictor(files[0], top_k=2), predictor(files[:3], top_k=1)
        assert len(one) == 2 and one[0][1] >= one[1][1]
        assert {label for label, _ in one} <= set(CLASSES)
        assert several[0] == one[:1] and len(several) == 3
        assert predictor([], top_k=1) == []
        assert predictor([]).shape == (0, 3)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [0, 2])
def test_what_a_stage_raises_for_an_image_is_a_fault_of_it_in_serving_and_in_training(
    tmp_path: Path, processes: int
) -> None:
    stages = [VAL[0], {"torchvision": {"name": "Pad", "padding": 40, "padding_mode": "reflect"}}, *VAL[1:]]
    for number in range(12):
        (tmp_path / "photos" / "a").mkdir(parents=True, exist_ok=True)
        side = 20 if number == 7 else 50 + number
        (tmp_path / "photos" / "a" / f"{number:02d}.jpg").write_bytes(jpeg(photo(side, side)))
    files = sorted((tmp_path / "photos").rglob("*.jpg"))
    path = write_config(tmp_path / "x.yaml", tmp_path / "photos", val=stages, serve={"stages": stages})
    overrides = [f"run.processes={processes}", f"run.bad_file={tmp_path / 'bad.jsonl'}"]
    with gpuflow.serve.load(path, model=mean_color, device="cpu", overrides=overrides) as predictor:
        answers = predictor.predict(files)
    fault = answers.pop(7)
    assert isinstance(fault, BadSampleError) and fault.stage == "torchvision"
    assert fault.reason.startswith("RuntimeError: ") and "Padding size" in fault.reason
    overrides.append("run.on_error=skip")
    with (
        gpuflow.load(path, "val", device="cpu", overrides=overrides) as loader,
        pytest.warns(UserWarning, match="1 of 12 samples are bad"),
    ):
        images = torch.cat([images for images, _ in loader])
    logits = [answer.logits for answer in answers if isinstance(answer, Prediction)]
    assert torch.equal(torch.stack(logits), mean_color(images))
    (row,) = map(json.loads, (tmp_path / "bad.jsonl").read_text().splitlines())
    assert (row["index"], row["stage"], row["reason"]) == (7, fault.stage, fault.reason)


def test_images_that_cannot_be_read_or_decoded_are_located(
    predictor: Predictor, files: list[Path], tmp_path: Path
) -> None:
    absent = tmp_path / "absent.jpg"
    found = predictor.predict([files[0], TEXT, absent, tmp_path, files[1]])
    assert [str(answer) for answer in found[1:4]] == [
        f"bytes (sample 1): {REASON}",
        f"{absent} (sample 2): read: No such file or directory",
        f"{tmp_path} (sample 3): read: Is a directory",
    ]
    for answer, file in ((found[0], files[0]), (found[4], files[1])):
        assert isinstance(answer, Prediction)
        assert torch.equal(answer.logits, predictor(file))
    with pytest.raises(BadSampleError) as caught:
        predictor([files[0], TEXT, absent])
    assert (caught.value.index, caught.value.stage) == (1, "decode")
    with pytest.raises(BadSampleError, match="No such file"):
        predictor(absent, top_k=1)
    with pytest.raises(BadSampleError):
        predictor.preprocess([TEXT])


def test_without_file_descriptors_a_path_raises(predictor: Predictor, files: list[Path]) -> None:
    predictor(files[:2])
    with no_more_files(), pytest.raises(SystemFault) as caught:
        predictor.predict(files[:2])
    assert (caught.value.errno, caught.value.filename) == (errno.EMFILE, str(files[0]))
    assert len(predictor.predict(files[:2])) == 2


def test_the_models_input(predictor: Predictor, files: list[Path]) -> None:
    images = predictor.preprocess(files)
    assert (images.shape, images.dtype) == ((12, 3, 24, 24), torch.float32)
    assert torch.equal(predictor.preprocess(files[3]), images[3])
    assert predictor.preprocess([]).shape == (0, 3, 24, 24)
    assert torch.equal(mean_color(images[:1])[0], predictor(files[0]))


def test_answers_may_be_modified(predictor: Predictor, files: list[Path]) -> None:
    image, logits = predictor.preprocess(files[0]), predictor(files[0])
    image += 1
    logits += 1
    assert torch.equal(predictor.preprocess(files[0]) + 1, image)
    assert torch.equal(predictor(files[0]) + 1, logits)


# --- many at a time ---------------------------------------------------------------------------------------------------


def test_threads_share_batches(files: list[Path]) -> None:
    engine = FakeEngine(before=Nap(0.02), batch=16)
    data = [file.read_bytes() for file in files]
    with predictor_of(engine) as predictor:
        alone = [predictor(each) for each in data]
        with ThreadPoolExecutor(12) as pool:
            for _ in range(3):
                together = list(pool.map(predictor, data))
                assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
        assert max(engine.counts) > 2
        assert sum(count * times for count, times in predictor.batches.items()) == len(alone) + 36
        assert predictor.in_flight == 0


both_graphs = pytest.mark.parametrize("one_node", [False, True], ids=["two nodes", "one node"])


@both_graphs
@pytest.mark.parametrize(
    ("images", "batches"), [(1, [1]), (4, [4]), (16, [16]), (20, [16, 4]), (40, [16, 16, 8])], ids=str
)
def test_a_list_is_one_batch(images: int, batches: list[int], one_node: bool, files: list[Path]) -> None:
    """Or as few as the largest batch allows. Nothing waits for a timeout of a minute: no other request will come."""
    engine = FakeEngine(batch=16)
    data = [files[i % len(files)].read_bytes() for i in range(images)]
    with deadline(30), service_of(engine, one_node=one_node, threads=3, timeout_ms=60_000) as predictor:
        found = predictor(data)
        assert sorted(engine.counts) == sorted(batches), "the parts of a long list may be decoded in any order"
        assert predictor.batches == {count: batches.count(count) for count in batches}
        assert torch.equal(found, mean_color(predictor.preprocess(data)))


@both_graphs
def test_a_list_is_one_batch_among_other_requests(one_node: bool, files: list[Path]) -> None:
    """A list that does not fit into the batch of what waits before it gets its own batch; one that fits joins it."""
    gate = Gate()
    engine = FakeEngine(before=gate, batch=4)
    data = [file.read_bytes() for file in files]
    with service_of(engine, one_node=one_node, threads=3) as predictor:
        queue = predictor._running.session.queue
        assert queue is not None
        futures = [predictor.submit(data[0])]
        assert gate.reached.wait(timeout=20)
        for number, (begin, end) in enumerate(((1, 2), (2, 6), (6, 9), (9, 10)), start=2):
            futures += predictor.submit_all(data[begin:end])
            wait(lambda number=number: queue.arrived == number)  # type: ignore[misc]
        gate.open()
        found = [future.result(20).logits for future in futures]
        assert engine.counts == [1, 1, 4, 4]
        assert torch.equal(torch.stack(found), mean_color(predictor.preprocess(data[:10])))


@both_graphs
def test_bad_images_of_a_list_leave_the_others_in_one_batch(one_node: bool, files: list[Path], tmp_path: Path) -> None:
    engine = FakeEngine(batch=16)
    images: list[bytes | Path] = [files[0], TEXT, files[1], tmp_path / "absent.jpg", b"", files[2]]
    with service_of(engine, one_node=one_node, threads=3) as predictor:
        found = predictor.predict(images)
        assert engine.counts == [3]
        assert [isinstance(answer, BadSampleError) for answer in found] == [False, True, False, True, True, False]
        good = torch.stack([answer.logits for answer in found if isinstance(answer, Prediction)])
        assert torch.equal(good, mean_color(predictor.preprocess(files[:3])))
        assert [type(answer) for answer in predictor.predict([TEXT, b""])] == [BadSampleError] * 2
        assert (engine.counts, predictor.in_flight) == ([3], 0)


@both_graphs
def test_images_of_a_list_that_are_cancelled_leave_the_others_in_one_batch(one_node: bool, files: list[Path]) -> None:
    gate = Gate()
    engine = FakeEngine(before=gate, batch=16)
    data = [file.read_bytes() for file in files[:6]]
    with service_of(engine, one_node=one_node, threads=3) as predictor:
        first = predictor.submit(data[0])
        assert gate.reached.wait(timeout=20)
        futures = predictor.submit_all(data)
        assert futures[1].cancel() and futures[5].cancel()
        gate.open()
        assert first.result(20).logits.shape == (3,)
        found = [future.result(20).logits for future in futures if not future.cancelled()]
        assert engine.counts == [1, 4]
        assert torch.equal(torch.stack(found), mean_color(predictor.preprocess([data[0], *data[2:5]])))
    assert predictor.in_flight == 0


@both_graphs
def test_lists_of_many_callers(one_node: bool, files: list[Path]) -> None:
    engine = FakeEngine(before=Nap(0.001), batch=8)
    data = [file.read_bytes() for file in files]
    with service_of(engine, one_node=one_node, threads=3) as predictor:
        expected = predictor(data)

        def ask(number: int) -> None:
            for turn in range(20):
                rows = [(number + i * 5) % len(data) for i in range(1 + (number + turn) % 11)]
                *found, bad = predictor.predict([data[row] for row in rows] + [TEXT])
                assert isinstance(bad, BadSampleError) and bad.index == len(rows)
                logits = [answer.logits for answer in found if isinstance(answer, Prediction)]
                assert torch.equal(torch.stack(logits), expected[rows])

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(ask, range(6), timeout=60))
        assert predictor.in_flight == 0


def test_only_part_of_a_long_list_is_in_flight(files: list[Path]) -> None:
    gate = Gate()
    begun = 0

    def images() -> Iterator[bytes]:
        nonlocal begun
        for begun in range(1, 1001):  # noqa: B007
            yield data

    data = files[0].read_bytes()
    with predictor_of(FakeEngine(before=gate, batch=16)) as predictor, ThreadPoolExecutor(1) as pool:
        future = pool.submit(predictor, images())
        assert gate.reached.wait(timeout=20)
        assert begun < 200
        gate.open()
        assert future.result(timeout=60).shape == (1000, 3)


def test_submit_is_for_services(predictor: Predictor, files: list[Path]) -> None:
    data = files[0].read_bytes()

    async def ask() -> list[Prediction | BaseException]:
        futures = [asyncio.wrap_future(predictor.submit(each)) for each in (data, TEXT, data)]
        return await asyncio.gather(*futures, return_exceptions=True)

    first, fault, second = asyncio.run(ask())
    assert isinstance(first, Prediction) and isinstance(second, Prediction)
    assert torch.equal(first.logits, second.logits)
    assert str(fault) == REASON
    with pytest.raises(TypeError) as caught:
        predictor.submit(str(files[0]))  # type: ignore[arg-type]
    assert str(caught.value) == "submit takes the bytes of one encoded image, got str"
    with pytest.raises(TypeError, match="submit_all takes the bytes of one encoded image, got int"):
        predictor.submit_all([data, 5])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="submit_image takes the bytes of one encoded image, got int"):
        predictor.submit_image(5)  # type: ignore[arg-type]


@pytest.mark.parametrize("values", [(math.nan, 0.0, 1.0), (math.inf, 0.0, 1.0), (-math.inf, -math.inf, -math.inf)])
def test_logits_without_probabilities(files: list[Path], values: tuple[float, ...]) -> None:
    """As over HTTP, they are an error of the model."""
    with predictor_of(FakeEngine(lambda images: torch.tensor([values] * len(images)))) as predictor:
        photo = files[0].read_bytes()
        asks: list[Callable[[], object]] = [
            lambda: predictor(photo),
            lambda: predictor([photo], top_k=2),
            lambda: predictor.predict([photo, b"no image"]),
            lambda: predictor.submit(photo).result(20).top(1),
        ]
        for ask in asks:
            with pytest.raises(PredictorError, match=f"^{NOT_FINITE}$"):
                ask()


def test_one_logit_of_minus_infinity_is_a_probability_of_zero(files: list[Path]) -> None:
    with predictor_of(FakeEngine(lambda images: torch.tensor([[-math.inf, 0.0, 1.0]] * len(images)))) as predictor:
        labels = predictor(files[0], top_k=3)
    assert labels[-1] == ("red", 0.0)


def test_an_answer_that_does_not_arrive_in_time(files: list[Path]) -> None:
    gate = Gate()
    engine = FakeEngine(before=gate)
    predictor = predictor_of(engine, seconds=0.3)
    first = predictor.submit(files[0].read_bytes())
    assert gate.reached.wait(timeout=20)
    with deadline(10), pytest.raises(PredictorTimeout) as caught:
        predictor(files[1:4])
    assert str(caught.value) == (
        "no answer within 0.3 s, with 4 images in flight; raise run.timeout_s or send fewer images at a time"
    )
    with deadline(10), pytest.raises(PredictorTimeout) as caught:
        predictor.close()
    assert str(caught.value).endswith("images are still in flight after 0.3 s; the model is not released")
    gate.open()
    predictor.close()
    assert engine.closed
    assert first.done()
    assert engine.counts == [1], "the others were cancelled"


def test_a_model_that_fails(files: list[Path]) -> None:
    def model(images: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no memory")

    with predictor_of(FakeEngine(model)) as predictor:
        with pytest.raises(PredictorError) as caught:
            predictor(files[0])
        assert str(caught.value) == "the model failed on a batch of 1: RuntimeError('no memory')"
        with pytest.raises(PredictorError):
            predictor.predict(files)


# --- the model --------------------------------------------------------------------------------------------------------


def test_the_model_of_the_file(models: Models) -> None:
    files = sorted(models.photos.rglob("*.jpg"))[:3]
    for overrides in [], ["serve.model.instances=2", "serve.model.batch=2"], [f"serve.model.file={models.onnx}"]:
        with gpuflow.serve.load(models.config, overrides=overrides) as predictor:
            images = predictor.preprocess(files)
            with torch.no_grad():
                expected = models.module()(images)
            torch.testing.assert_close(predictor(files), expected, atol=1e-4, rtol=1e-4)
            assert predictor.classes == ("class_0", "class_1", "class_2")
            assert predictor(files[0], top_k=1)[0][0] in predictor.classes
            described = predictor.describe()
            assert len(described["engines"]) == (2 if overrides[:1] == ["serve.model.instances=2"] else 1)
            assert described["preprocessing"] == predictor.preprocessing
            assert described["image"] == "float32 32x32x3 nchw"


def test_a_foreign_file_is_refused_unless_it_is_trusted(models: Models, files: list[Path], tmp_path: Path) -> None:
    module = models.module().to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    foreign = save_program(tmp_path / "foreign.pt2", module, noise(2))
    file = f"serve.model.file={foreign}"
    with pytest.raises(ConfigError, match="does not record what preprocessing it was trained with"):
        gpuflow.serve.load(models.config, overrides=[file])
    with gpuflow.serve.load(models.config, overrides=[file], preprocess_only=True) as images:
        assert images.preprocess(files[0]).shape == (3, SIDE, SIDE)
    with gpuflow.serve.load(models.config, overrides=[file], model=module) as own:
        expected = own(files[0])
    trusted = [file, "serve.model.preprocessing=trust", "serve.model.classes=[a, b, c]"]
    with gpuflow.serve.load(models.config, overrides=trusted) as predict:
        torch.testing.assert_close(predict(files[0]), expected, rtol=0, atol=1e-4)
        assert {label for label, _ in predict(files[0], top_k=3)} == {"a", "b", "c"}


def test_a_model_that_was_trained_on_other_images_is_refused(models: Models) -> None:
    with pytest.raises(ConfigError) as caught:
        gpuflow.serve.load(models.config, overrides=["serve.stages.resize.shorter=40"])
    assert "was trained with preprocessing" in str(caught.value)
    assert "shorter=40" in str(caught.value)
    overrides = ["serve.stages.resize.shorter=40", "serve.model.force=true"]
    gpuflow.serve.load(models.config, overrides=overrides).close()


def test_only_the_images(config: Path, files: list[Path]) -> None:
    with gpuflow.serve.load(config, preprocess_only=True) as predictor:
        assert predictor.preprocess(files[:2]).shape == (2, 3, 24, 24)
        for ask in predictor, predictor.submit:
            with pytest.raises(PredictorError) as caught:
                ask(files[0].read_bytes())
            assert str(caught.value) == f"{config}: was loaded without a model; only preprocess works"


def test_a_users_own_model_has_torchs_threads(config: Path, files: list[Path]) -> None:
    threads: list[int] = []

    def model(images: torch.Tensor) -> torch.Tensor:
        threads.append(torch.get_num_threads())
        return mean_color(images)

    with gpuflow.serve.load(config, model=model) as predictor:
        predictor(files)
    assert set(threads) == {torch.get_num_threads()}


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda images: (images,), "fails on an image of float32 3x24x24: its output must be one tensor, logits"),
        (lambda images: {"out": images}, "fails on an image of float32 3x24x24: its output must be one tensor, logits"),
        (lambda images: mean_color(images)[0], "fails on an image of float32 3x24x24: its output must have a row"),
        (lambda images: images, "must give logits [N, classes], gives 4 axes: [1, 3, 24, 24]"),
    ],
    ids=["a tuple", "a mapping", "one image's", "maps"],
)
def test_a_model_that_gives_no_logits_is_refused_when_it_is_loaded(config: Path, model: Any, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        gpuflow.serve.load(config, model=model)
    assert str(caught.value).startswith(f"model=function: {reason}")


@pytest.mark.parametrize("send", [pickle.dumps, copy.copy, copy.deepcopy])
def test_one_that_is_sent_to_another_process_says_what_to_do(
    send: Callable[[object], object], predictor: Predictor
) -> None:
    with pytest.raises(TypeError) as caught:
        send(predictor)
    assert str(caught.value) == (
        "a predictor cannot be pickled or copied: it has threads; load it in the process that calls it"
    )


def test_predict_takes_no_single_image(predictor: Predictor, files: list[Path]) -> None:
    for image in (str(files[0]), files[0], files[0].read_bytes()):
        given: Any = image
        with pytest.raises(TypeError, match="predict takes several images, got one; put it in a list"):
            predictor.predict(given)


def test_a_name_that_no_file_can_have_is_a_bad_image(predictor: Predictor, files: list[Path]) -> None:
    answers = predictor.predict([files[0], "a\0b"])
    assert isinstance(answers[0], Prediction) and str(answers[1]).endswith("read: embedded null byte")


def test_torchpipes_own_operators(tmp_path: Path, files: list[Path]) -> None:
    """As in an older deployment: OpenCV's decoder and its bilinear resize without antialiasing."""
    import cv2
    import numpy as np

    serve = {"preset": "torchpipe_cpu", "height": 20, "width": 30}
    config = write_config(tmp_path / "x.yaml", "photos", serve=serve)
    image: Any = cv2.imread(str(files[0]))
    pixels = cv2.cvtColor(cv2.resize(image, (30, 20)), cv2.COLOR_BGR2RGB)
    expected = torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))
    with gpuflow.serve.load(config, model=mean_color) as predictor:
        assert torch.equal(predictor.preprocess(files[0]), expected)
        torch.testing.assert_close(predictor(files[0]), mean_color(expected[None])[0])
        found = predictor.predict([files[0], TEXT, files[1]])
        assert [type(answer) for answer in found] == [Prediction, BadSampleError, Prediction]
        assert str(found[1]) == f"bytes (sample 1): preset: {CANNOT_DECODE}"


# --- the graph --------------------------------------------------------------------------------------------------------


PAD = {"torchvision": {"name": "Pad", "padding": 2}}


@pytest.mark.parametrize(
    ("backend", "engines", "first", "decodes"),
    [
        ("auto", True, [], True),
        ("gpu", True, [], True),
        ("gpu", False, [], True),
        ("cpu", True, [], False),
        ("auto", False, [], False),
        ("auto", None, [], False),
        ("auto", True, [PAD], False),
    ],
    ids=["auto", "gpu", "kernels", "cpu", "no engines", "no libnvjpeg", "before the images have one size"],
)
def test_a_node_with_all_threads_preprocesses_if_the_gpu_cannot(
    backend: str, engines: bool | None, first: Entries, decodes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_nvjpeg() -> object:
        if engines is not None:
            return object()
        raise MissingExtra("decoding on the GPU", "libnvjpeg", "gpu")

    def decoder(library: object, color: str, wanted: str) -> None:
        if not engines:
            raise NvjpegError("nvjpegCreateEx", 7)

    monkeypatch.setattr(gpu_backend, "find_nvjpeg", find_nvjpeg)
    monkeypatch.setattr(gpu_backend, "BatchedDecoder", decoder)
    stages = [{"decode": {"backend": backend}}, *first, *VAL[1:]]
    path = write_config(tmp_path / "x.yaml", "photos", serve={"stages": stages}, run={"threads": 3, "processes": 0})
    config = read_config(path, STAGES)
    graph = chain_here(config, config.programs["serve"], None, device="cuda:1")
    found = [(node["device"], node["instance_num"]) for node in graph.as_dict().values()]
    assert found == ([("cuda:1", "1")] if decodes else [("cpu", "3"), ("cuda:1", "1")])
    assert chain_here(config, config.programs["serve"], None, device="cpu") == gpuflow.serve.lower(path)


def test_a_graph_for_another_machine_does_not_look_at_this_one(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_nvjpeg() -> object:
        raise AssertionError("must not look for libnvjpeg")

    monkeypatch.setattr(gpu_backend, "find_nvjpeg", find_nvjpeg)
    assert len(gpuflow.serve.lower(config, device="cuda").nodes) == 1


# --- errors of the configuration --------------------------------------------------------------------------------------


def test_a_file_without_the_block_or_without_a_model(config: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        gpuflow.serve.load(config)
    assert str(caught.value) == (
        f"{config}: serve has no model; add model: {{file: ...}}, or load it with model= or preprocess_only=True"
    )
    bare = write_config(tmp_path / "bare.yaml", "photos")
    with pytest.raises(ConfigError) as caught:
        gpuflow.serve.load(bare)
    assert str(caught.value) == f"{bare}: has no block serve; add serve: {{stages: ..., model: ...}}"


def test_a_scheduler_that_is_not_installed(config: Path, python_with_torch: Python) -> None:
    code = """
import sys
import gpuflow, gpuflow.serve

sys.modules["omniback"] = None
try:
    gpuflow.serve.load(sys.argv[1], preprocess_only=True)
except gpuflow.MissingExtra as error:
    print(error)
"""
    done = python_with_torch(code, str(config))
    assert done.stdout == "serving needs omniback, which is not installed; pip install 'gpuflow[serve]'\n", done.stderr


# --- the public surface -----------------------------------------------------------------------------------------------


def test_lazy_names_are_the_real_ones() -> None:
    from gpuflow.torchpipe import graph as lowering
    from gpuflow.torchpipe import running_graph as runtime

    assert gpuflow.serve.Predictor is Predictor
    assert gpuflow.serve.Prediction is Prediction
    assert gpuflow.serve.Graph is lowering.Graph
    assert gpuflow.serve.to_toml is lowering.to_toml
    assert gpuflow.serve.register is runtime.register
    with pytest.raises(AttributeError) as caught:
        getattr(gpuflow.serve, "laod")  # noqa: B009
    assert str(caught.value) == "module 'gpuflow.serve' has no attribute 'laod'"


def test_importing_is_cheap() -> None:
    code = """
import sys
import gpuflow.serve
heavy = {"torch", "torchpipe", "omniback", "fastapi", "yaml"} & set(sys.modules)
assert not heavy, heavy
"""
    done = python(code)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_the_header_of_an_exported_graph_says_how_to_run_it(
    models: Models, tmp_path: Path, python_with_torch: Python
) -> None:
    """Its lines, in another directory and process, print the predictor's logits."""
    photo = next(models.photos.rglob("*.jpg"))
    (tmp_path / "photo.jpg").write_bytes(photo.read_bytes())
    done = python_with_torch(
        "import sys; from gpuflow.cli import main; main()",
        *("export", str(models.config), "--toml", "graph.toml", f"serve.model.file={models.onnx}"),
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    graph = gpuflow.serve.lower(models.config)
    assert done.stdout == f"wrote graph.toml: preprocessing {graph.preprocessing}; its header says how to run it\n"
    header = (tmp_path / "graph.toml").read_text().partition("\n\n")[0].splitlines()
    lines = [line.removeprefix("#     ") for line in header if line.startswith("#     ")]
    done = python_with_torch("\n".join(lines), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with gpuflow.serve.load(models.config, overrides=[f"serve.model.file={models.onnx}"]) as predictor:
        assert done.stdout == f"{predictor(photo)}\n"
    done = python_with_torch("\n".join(lines).replace("photo.jpg", "graph.toml"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("decode: not an image: begins with 23 20 41 20")
