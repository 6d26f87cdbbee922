"""RunningGraph: names, batches, errors, closing. Tests that concern a whole process run in a separate process."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest
import torch
from torch.utils.dlpack import from_dlpack

from gpuflow.decode.preset import CANNOT_DECODE, Preset
from gpuflow.engines import Engine
from gpuflow.errors import BadSampleError, PredictorError
from gpuflow.torchpipe.adapter import Pipe
from gpuflow.torchpipe.graph import PREDICT, Graph, chain
from gpuflow.torchpipe.nodes import SESSIONS, CpuPreprocessor
from gpuflow.torchpipe.running_graph import RunningGraph, register
from tests.datasets import Entries, deadline, jpeg, program, write_config
from tests.forking import Forked, Interpreter, Python
from tests.hostile import BAD, HOSTILE
from tests.running import images, program_of, run
from tests.serve.fakes import Break, FakeEngine, Gate, Nap, mean_color

STAGES: Entries = ({"decode": {}}, {"resize": {"shorter": 20}}, {"center_crop": {"size": 16}}, {"normalize": {}})
DATA = [jpeg(i % 3, i) for i in range(6)]


def graph_of(*, threads: int = 2, instances: int = 1, batch: int = 4, timeout_ms: int = 20) -> Graph:
    """Preprocessing, then fake engines."""
    graph = chain(program(STAGES), None, origin="x.yaml", threads=threads, device="cpu")
    changes = {"instance_num": str(instances), "batch": str(batch), "batching_timeout": str(timeout_ms)}
    nodes = {**graph.nodes, "model": {**graph.nodes["model"], **changes}}
    return Graph(nodes=nodes, origin=graph.origin, preprocessing=graph.preprocessing)


def fused(graph: Graph, **changes: str) -> Graph:
    """The same as one node, as on a GPU."""
    first, last = graph.nodes.values()
    changes = {"backend": PREDICT, "patience": "20", **changes}
    return Graph(nodes={"serve": {**first, **last, **changes}}, origin=graph.origin, preprocessing=graph.preprocessing)


def start(engines: Sequence[Engine], **shape: int) -> RunningGraph:
    return RunningGraph(graph_of(instances=len(engines), **shape), engines)


def submit(running: RunningGraph, data: bytes, *, wants_image: bool = False) -> Future[torch.Tensor]:
    (future,) = running.submit([data], wrap=lambda value: value, wants_image=wants_image)
    return future


def test_graphs_of_the_same_configuration_run_in_one_process() -> None:
    engines = [FakeEngine(), FakeEngine()]
    graphs = [start([engine]) for engine in engines]
    answers = [submit(graph, DATA[0]).result(timeout=20) for graph in graphs]
    assert torch.equal(*answers)
    assert [engine.counts for engine in engines] == [[1], [1]]
    for graph in graphs:
        assert graph.close(20)


@pytest.mark.parametrize("two_nodes", [True, False])
def test_an_engine_is_bound_to_the_thread_that_runs_it(two_nodes: bool) -> None:
    engine = FakeEngine()
    running = RunningGraph(graph_of() if two_nodes else fused(graph_of()), [engine])
    assert engine.bound_thread, "before the first request"
    for future in [submit(running, data) for data in DATA]:
        future.result(timeout=20)
    assert engine.threads == {engine.bound_thread}
    assert running.close(20)


def test_registering_again_does_nothing() -> None:
    register()
    register()


def test_one_node_that_does_both_gives_the_same() -> None:
    gate = Gate()
    two, engine = start([FakeEngine()], timeout_ms=1), FakeEngine(before=gate)
    one = RunningGraph(fused(graph_of(timeout_ms=1)), [engine])
    first = submit(one, DATA[0])
    assert gate.reached.wait(timeout=20)
    rest = [submit(one, data) for data in [b"no image", *DATA[1:3]]] + [submit(one, DATA[3], wants_image=True)]
    dropped = submit(one, DATA[4])
    dropped.cancel()
    gate.open()
    assert isinstance(rest[0].exception(20), BadSampleError)
    for mine, data in zip([first, *rest[1:3]], DATA, strict=False):
        assert torch.equal(mine.result(20), submit(two, data).result(20))
    wanted = submit(two, DATA[3], wants_image=True)
    assert torch.equal(rest[3].result(20), wanted.result(20))
    assert (one.close(20), two.close(20), one.in_flight) == (True, True, 0)
    assert (engine.counts[0], sum(engine.counts)) == (1, 3)
    assert engine.closed


@pytest.mark.parametrize("two_nodes", [True, False])
def test_cancelled_requests_give_their_bytes_back_while_the_model_is_busy(two_nodes: bool) -> None:
    gate = Gate()
    graph = graph_of(threads=1, batch=1)
    running = RunningGraph(graph if two_nodes else fused(graph), [FakeEngine(before=gate)])
    first = submit(running, DATA[0])
    assert gate.reached.wait(timeout=20)
    waiting = [submit(running, bytes(1_000_000)) for _ in range(8)]
    for future in waiting:
        future.cancel()
    deadline = time.monotonic() + 60
    while running.held_bytes:  # two nodes: one may be decoded right now
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not first.done()
    if not two_nodes:
        assert running.in_flight == 1
    gate.open()
    first.result(timeout=20)
    assert running.close(20)
    assert running.in_flight == 0


def test_callers_with_an_answer_may_send_again_before_the_next_batch() -> None:
    """Each caller takes another time for its next request, so that without patience the fastest would go alone."""
    engine = FakeEngine(before=Nap(0.1))
    running = RunningGraph(fused(graph_of(batch=8), patience="2000"), [engine])

    def ask(number: int) -> None:
        for _ in range(12):
            submit(running, DATA[number]).result(timeout=20)
            time.sleep(0.02 * number)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(4)))
    assert sum(engine.counts) == 48
    assert len(engine.counts) <= 20, engine.counts
    assert running.close(20)


@pytest.mark.parametrize("instances", [1, 2])
def test_many_callers_of_one_node_get_their_own_answers(instances: int) -> None:
    engines = [FakeEngine(before=Nap(0.002)) for _ in range(instances)]
    running = RunningGraph(fused(graph_of(instances=instances), patience="2"), engines)
    expected = [submit(running, data).result(timeout=20) for data in DATA]

    def ask(number: int) -> None:
        rng = random.Random(number)
        for _ in range(60):
            several = [rng.choice([*range(6), "bad", "cancelled"]) for _ in range(rng.randint(1, 5))]
            futures = [
                submit(running, b"junk" if one == "bad" else DATA[0 if one == "cancelled" else one]) for one in several
            ]
            for one, future in zip(several, futures, strict=True):
                if one == "cancelled":
                    future.cancel()
            for one, future in zip(several, futures, strict=True):
                if one == "bad":
                    assert isinstance(future.exception(timeout=20), BadSampleError)
                elif one != "cancelled":
                    assert torch.equal(future.result(timeout=20), expected[one])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))
    assert running.close(20)
    assert running.in_flight == 0
    assert max(max(engine.counts) for engine in engines) == 4


def test_a_batch_does_not_wait_for_callers_that_send_nothing() -> None:
    engine = FakeEngine()
    running = RunningGraph(fused(graph_of(), patience="60000"), [engine])
    for data in DATA:
        submit(running, data).result(timeout=20)
    assert engine.counts == [1] * 6
    assert running.close(20)


def test_instances_of_one_node_share_the_requests() -> None:
    gates = [Gate(), Gate()]
    engines = [FakeEngine(before=gate) for gate in gates]
    running = RunningGraph(fused(graph_of(instances=2)), engines)
    futures = [submit(running, data) for data in DATA[:2]]
    assert all(gate.reached.wait(timeout=20) for gate in gates), "each has started on one request"
    futures += [submit(running, data) for data in DATA * 2]
    gates[0].open()
    wait(futures[2:], timeout=20)
    assert engines[0].counts == [1, 4, 4, 4]
    gates[1].open()
    assert [len(engine.counts) for engine in engines] == [4, 1]
    expected = mean_color(torch.cat([submit(running, data, wants_image=True).result(20)[None] for data in DATA]))
    answers = torch.stack([future.result(20) for future in futures])
    assert torch.allclose(answers, expected[[0, 1, *range(6), *range(6)]])
    assert running.close(20)


def test_requests_that_arrive_while_the_model_runs_become_a_batch() -> None:
    gate = Gate()
    engine = FakeEngine(before=gate)
    running = start([engine])
    first = submit(running, DATA[0])
    assert gate.reached.wait(timeout=20)
    rest = [submit(running, data) for data in DATA[1:5]]
    assert running.in_flight == 5
    time.sleep(0.2)  # for the preprocessing
    gate.open()
    wait([first, *rest], timeout=20)
    assert engine.counts == [1, 4]
    assert running.session.batches == {1: 1, 4: 1}
    assert running.close(20)


def test_every_instance_has_an_engine_and_a_thread() -> None:
    engines = [FakeEngine(before=Nap(0.03), batch=1) for _ in range(3)]
    running = start(engines, batch=1)
    futures = [submit(running, data) for data in DATA * 3]
    assert len(wait(futures, timeout=20).done) == 18
    assert all(engine.counts for engine in engines)
    threads = [engine.threads for engine in engines]
    assert all(len(each) == 1 for each in threads) and len(set.union(*threads)) == 3
    assert all(engine.torch_threads == 1 for engine in engines), "an engine that needs more sets it itself"
    assert running.close(20)


def test_submitting_does_not_wait_for_a_free_instance() -> None:
    gate = Gate()
    running = start([FakeEngine(before=gate)], threads=1)
    futures = [submit(running, data) for data in DATA * 20]
    assert sum(future.done() for future in futures) == 0
    gate.open()
    assert len(wait(futures, timeout=20).done) == 120
    assert running.close(20)


def test_images_that_wait_together_are_decoded_by_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, engine, calls = Gate(), FakeEngine(), list[int]()
    running = start([engine], threads=1)
    preprocess = cast(CpuPreprocessor, running.session.preprocessor).run

    def slow(files: Sequence[bytes]) -> list[torch.Tensor | BadSampleError]:
        calls.append(len(files))
        gate(len(files))
        return preprocess(files)

    monkeypatch.setattr(running.session.preprocessor, "run", slow)
    first = submit(running, DATA[0])
    assert gate.reached.wait(timeout=20)
    rest = [submit(running, data) for data in DATA[1:]]
    gate.open()
    wait([first, *rest], timeout=20)
    assert calls == [1, 5]
    whole = mean_color(images(program(STAGES), DATA))
    assert torch.allclose(torch.stack([future.result(0) for future in (first, *rest)]), whole)
    assert running.close(20)


@pytest.mark.parametrize("closes", [False, True])
def test_many_callers_with_files_of_all_kinds_get_their_own_answers(closes: bool) -> None:
    """Also those whose requests are in work, or wait, while the graph is closed."""
    files = [*HOSTILE.values(), *(data for data, _ in BAD.values())]
    alone = [run(program(STAGES), [data]) for data in files]
    running, begun = start([FakeEngine(before=Nap(0.001))]), threading.Barrier(9)

    def ask(caller: int) -> int:
        rng, answers = random.Random(caller), 0
        for turn in range(12):
            numbers = rng.sample(range(len(files)), rng.randint(1, 6))
            if turn == 3:
                begun.wait(60)
            futures = []
            with suppress(PredictorError) if closes else nullcontext():
                futures = [submit(running, files[number], wants_image=True) for number in numbers]
            if not futures:
                break
            for number, future in zip(numbers, futures, strict=True):
                pixels, (fault,) = alone[number]
                if fault is None:
                    assert torch.equal(future.result(60), pixels[0])
                else:
                    assert str(future.exception(60)) == str(fault)
                answers += 1
        return answers

    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(ask, caller) for caller in range(8)]
        begun.wait(60)
        if closes:
            assert running.close(60)
        answers = [each.result(120) for each in asking]
    assert all(answers)
    assert running.close(20) and running.in_flight == 0


def test_a_bad_image_among_good_ones() -> None:
    running = start([FakeEngine()])
    futures = [submit(running, data) for data in (DATA[0], b"", DATA[1], b"junk", DATA[2])]
    wait(futures, timeout=20)
    assert [type(future.exception()) for future in futures] == [
        type(None),
        BadSampleError,
        type(None),
        BadSampleError,
        type(None),
    ]
    assert str(futures[1].exception()) == "decode: empty: the file has no bytes"
    assert running.close(20)


def test_a_model_that_fails_serves_the_next_batch() -> None:
    broken = Break(RuntimeError("no memory"))
    engine = FakeEngine(before=broken)
    running = start([engine])
    assert isinstance(submit(running, DATA[0]).exception(timeout=20), PredictorError)
    broken.error = KeyboardInterrupt()
    assert isinstance(submit(running, DATA[0]).exception(timeout=20), PredictorError)
    engine._before = lambda count: None
    assert submit(running, DATA[0]).result(timeout=20).shape == (3,)
    assert running.close(20)


def test_a_request_cancelled_in_time_never_reaches_the_model() -> None:
    gate = Gate()
    engine = FakeEngine(before=gate)
    running = start([engine])
    first = submit(running, DATA[0])
    assert gate.reached.wait(timeout=20)
    rest = [submit(running, data) for data in DATA[1:4]]
    assert not first.cancel(), "it is running"
    assert all(future.cancel() for future in rest[:2])
    gate.open()
    assert rest[2].result(timeout=20).shape == (3,)
    with pytest.raises(CancelledError):
        rest[0].result(timeout=20)
    assert sum(engine.counts) == 2
    assert running.close(20)
    assert running.in_flight == 0


@pytest.mark.parametrize("two_nodes", [True, False])
def test_an_item_of_a_graph_file_gets_its_result_or_its_error(two_nodes: bool) -> None:
    register()
    graph = graph_of() if two_nodes else fused(graph_of())
    nodes = graph.as_dict(f"file{len(graph.nodes)}.")
    pipe, omniback = Pipe(nodes), importlib.import_module("omniback")
    items = [omniback.Dict({"data": data}) for data in (DATA[0], b"", DATA[1])]
    try:
        with ThreadPoolExecutor(3) as callers:
            list(callers.map(pipe._pipe, items))
    finally:
        for name in nodes:
            SESSIONS.pop(f"of node {name}").close()
    found = [from_dlpack(items[place]["result"]) for place in (0, 2)]
    assert torch.equal(torch.stack(found), images(program(STAGES), DATA[:2]))
    assert ["error" in item for item in items] == [False, True, False]
    assert items[1]["error"] == "decode: empty: the file has no bytes"


# --- closing --------------------------------------------------------------------------------------------------------


def test_closing_waits_for_accepted_requests() -> None:
    engine = FakeEngine(before=Nap(0.05))
    running = start([engine])
    futures = [submit(running, data) for data in DATA]
    assert running.close(20)
    assert all(future.done() and future.exception() is None for future in futures)
    assert engine.closed
    assert running.close(20), "closing again does nothing"
    with pytest.raises(PredictorError) as caught:
        submit(running, DATA[0])
    assert str(caught.value) == "the predictor is closed; load it again"


def test_closing_waits_for_a_model_that_hangs_no_longer_than_its_timeout() -> None:
    gate = Gate()
    engine = FakeEngine(before=gate)
    running = start([engine])
    future = submit(running, DATA[0])
    assert gate.reached.wait(timeout=20)
    with deadline(5):
        assert not running.close(0.1)
    assert not engine.closed
    gate.open()
    assert future.result(timeout=20).shape == (3,)
    assert running.close(20)
    assert engine.closed


def test_a_graph_without_references_releases_its_model() -> None:
    engine = FakeEngine()
    running = start([engine])
    future = submit(running, DATA[0])
    future.result(timeout=20)
    collected = weakref.ref(running)
    del running, future
    end = time.monotonic() + 10
    while not engine.closed and time.monotonic() < end:
        gc.collect()
        time.sleep(0.02)
    assert collected() is None
    assert engine.closed


# --- torchpipe's own operators ----------------------------------------------------------------------------------------


def native(backend: str) -> RunningGraph:
    """Preprocessing, then a node of torchpipe's own, which does not answer requests."""
    first = {**graph_of().nodes["preprocess"], "on_error": "raise"}
    nodes = {"preprocess": first, "model": {"backend": backend, "instance_num": "1"}}
    return RunningGraph(Graph(nodes=nodes, origin="x.yaml", preprocessing="0" * 16))


def test_a_native_node_may_be_the_last() -> None:
    running = native("Identity")
    futures = [submit(running, data) for data in (DATA[0], b"", DATA[1])]
    wait(futures, timeout=20)
    assert futures[0].result().shape == (3 * 16 * 16,)
    assert str(futures[1].exception()) == "decode: empty: the file has no bytes"
    assert isinstance(futures[1].exception(), BadSampleError)
    assert futures[2].exception() is None
    assert running.in_flight == 0
    assert running.close(20)


def test_a_native_model_that_fails() -> None:
    running = native("DecodeMat")
    fault = submit(running, DATA[0]).exception(timeout=20)
    assert isinstance(fault, PredictorError)
    assert str(fault).startswith("torchpipe: ")
    assert running.close(20)


def preset(name: Literal["torchpipe_cpu", "torchpipe_gpu"] = "torchpipe_cpu") -> RunningGraph:
    """torchpipe's own preprocessing on the CPU, then the images. name: of the preset whose checks run first."""
    head = Preset(name="torchpipe_cpu", height=12, width=10)
    graph = chain(program_of(head, serving=True), None, origin="x.yaml", threads=2, device="cpu")
    return RunningGraph(dataclasses.replace(graph, preset=Preset(name=name, height=12, width=10)))


def test_a_damaged_or_huge_jpeg_does_not_reach_the_decoder_of_a_gpu() -> None:
    running = preset("torchpipe_gpu")
    huge, _ = BAD["huge"]
    futures = [submit(running, data) for data in (huge, DATA[0][:-40], DATA[0], b"junk")]
    wait(futures, timeout=20)
    reasons = [str(future.exception()) for future in (*futures[:2], futures[3])]
    assert "pixels are more than max_pixels = 1,073,741,824" in reasons[0]
    assert reasons[1].startswith("decode: truncated: ")
    assert reasons[2] == f"preset: {CANNOT_DECODE}"
    assert futures[2].result().shape == (3, 12, 10)
    assert running.close(20)


def test_a_native_node_may_be_the_first() -> None:
    running = preset()
    futures = [submit(running, data) for data in (DATA[0], b"", b"junk", DATA[1])]
    wait(futures, timeout=20)
    assert futures[0].result().shape == (3, 12, 10)
    reasons = [str(future.exception()) for future in futures[1:3]]
    assert reasons == ["preset: empty: the file has no bytes", f"preset: {CANNOT_DECODE}"]
    assert futures[3].exception() is None
    assert running.close(20)


def test_torchpipes_operators_that_are_busy_work_while_they_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their test image would wait for all images before it."""
    now = 1000.0
    monkeypatch.setattr("gpuflow.torchpipe.running_graph.time", SimpleNamespace(monotonic=lambda: now))
    running, gate, checks = preset(), Gate(), []

    def busy(pipe: Pipe, item: dict[str, Any]) -> torch.Tensor:
        if "requests" not in item:
            checks.append(now)
        elif item["data"] == DATA[1]:
            gate(1)
        return torch.zeros(3)

    monkeypatch.setattr(Pipe, "run", busy)
    running.check()
    assert checks == [1000.0], "while nothing waits"
    submit(running, DATA[0]).result(timeout=20)
    waiting = submit(running, DATA[1])
    assert gate.reached.wait(20)
    now += 9
    running.check()
    assert checks == [1000.0]
    now += 2
    running.check()
    assert checks == [1000.0, 1011.0], "no image was decoded for 10 s"
    gate.open()
    waiting.result(timeout=20)
    assert running.close(20)


@pytest.mark.usefixtures("operators")
def test_a_graph_that_torchpipe_does_not_know() -> None:
    with pytest.raises(PredictorError) as caught:
        native("NoSuchBackend")
    assert str(caught.value).startswith("torchpipe does not take the graph of x.yaml: ")
    assert "NoSuchBackend" in str(caught.value)


# --- the process ------------------------------------------------------------------------------------------------------

PRELUDE = """
import os, sys, threading, time
from tests.serve.fakes import FakeEngine, Gate, Nap
from tests.torchpipe.test_running_graph import DATA, preset, start, submit
"""
Script = Callable[[str], Forked]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Script]:
    with Interpreter(tmp_path_factory.mktemp("scripts"), imports=PRELUDE) as interpreter:
        yield lambda body: interpreter.run(PRELUDE + body)


@pytest.mark.usefixtures("operators")
def test_stdout_stays_empty_and_the_process_exits(script: Script) -> None:
    """Neither making a graph, nor bad requests, nor closing it print a line."""
    done = script("""
running, other = start([FakeEngine()]), preset()
submit(running, DATA[0]).result(20), submit(running, b"x").exception(20), submit(other, b"x").exception(20)
print("done")
""")
    assert (done.returncode, done.stdout) == (0, "done\n")


WITHOUT_ASSERTS = f"""
import sys
from importlib.machinery import SourceFileLoader
get_code = SourceFileLoader.get_code

def get_code_without_asserts(loader, name):
    if not name.startswith(("gpuflow", "tests", "torchpipe", "omniback")):
        return get_code(loader, name)
    path = loader.get_filename(name)
    return compile(loader.get_data(path), path, "exec", dont_inherit=True, optimize=1)

SourceFileLoader.get_code = get_code_without_asserts
{PRELUDE}
import dis
from gpuflow.torchpipe.running_graph import PresetRunner
assert "ASSERTION" not in dis.Bytecode(PresetRunner.prepare).dis().upper()
submit(start([FakeEngine()]), DATA[0]).result(20)
"""


def test_a_process_without_asserts_exits(python_with_torch: Python) -> None:
    """As `python -O` runs it; there each module of torch, too, would be compiled anew."""
    done = python_with_torch(WITHOUT_ASSERTS)
    assert done.returncode == 0, done.stderr


def test_exit_cancels_waiting_requests_and_finishes_running_ones(script: Script) -> None:
    done = script("""
engine = FakeEngine(before=Nap(0.5), batch=1)
running = start([engine], batch=1)
futures = [submit(running, DATA[0]) for _ in range(200)]
time.sleep(0.2)
sys.exit(3)
""")
    assert (done.returncode, done.stdout) == (3, "")
    assert "Traceback" not in done.stderr


def test_exit_does_not_wait_for_a_model_that_hangs(script: Script) -> None:
    done = script("""
import gpuflow.torchpipe.running_graph as runtime
runtime._EXIT_SECONDS = 0.5
gate = Gate()
running = start([FakeEngine(before=gate)])
submit(running, DATA[0])
gate.reached.wait(20)
sys.exit(3)
""")
    assert done.returncode == 3


def test_ctrl_c_while_waiting_ends_the_process(script: Script) -> None:
    done = script("""
import signal
running = start([FakeEngine(before=Nap(0.5))])
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
[submit(running, data) for data in DATA * 4][-1].result(20)
""")
    assert done.returncode == -2 or done.returncode == 130
    assert "\nKeyboardInterrupt\n" in done.stderr, done.stderr  # Triton may list its own leaks after it


def test_a_forked_child_gets_an_error_and_can_exit(script: Script) -> None:
    done = script("""
from gpuflow.errors import PredictorError
running = start([FakeEngine()])
submit(running, DATA[0]).result(20)
parent, child = os.getpid(), os.fork()
if child == 0:
    try:
        submit(running, DATA[0])
    except PredictorError as error:
        print(str(error).replace(str(parent), "P").replace(str(os.getpid()), "C"), running.close(1), flush=True)
    sys.exit(5)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
submit(running, DATA[0]).result(20)
""")
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "the predictor was made in process P and does not work in its forked child C; "
        "fork before the first one is loaded, or start processes by spawn True\n5\n"
    )


def test_a_child_forked_before_the_first_predictor_loads_one_and_a_later_child_gets_an_error(
    script: Script, tmp_path: Path
) -> None:
    config = write_config(tmp_path / "x.yaml", "photos", serve={"stages": list(STAGES)})
    done = script(f"""
import gpuflow.serve
from gpuflow.errors import PredictorError
from tests.serve.fakes import mean_color

def load_in_child():
    parent, child = os.getpid(), os.fork()
    if child == 0:
        try:
            with gpuflow.serve.load({str(config)!r}, model=mean_color) as predict:
                print(tuple(predict(DATA[0]).shape), flush=True)
        except PredictorError as error:
            print(str(error).replace(str(parent), "P").replace(str(os.getpid()), "C"), flush=True)
        sys.exit(5)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)

load_in_child()
for _ in range(2):
    with gpuflow.serve.load({str(config)!r}, model=mean_color) as predict:
        predict(DATA[0])
load_in_child()
""")
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "(3,)\n5\n"
        "process C cannot load a predictor: process P, which it was forked from, has loaded one; "
        "fork before the first one is loaded, or start processes by spawn\n5\n"
    )


@pytest.mark.slow
def test_memory_of_requests_is_freed() -> None:
    from tests.datasets import resident_kib

    running = start([FakeEngine(mean_color)])
    big = DATA[0] + bytes(1 << 20)  # libjpeg ignores bytes after the end of the image

    def work() -> int:
        wait([submit(running, big) for _ in range(50)], timeout=60)
        time.sleep(0.2)
        return resident_kib()

    work()
    before = work()
    assert work() - before < 50 * 1024 / 2
    assert running.close(20)
