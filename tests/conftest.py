"""Fixtures and settings that every test may use."""

from __future__ import annotations

import fcntl
import gc
import os
import pickle
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
import torch

from gpuflow.errors import GpuflowError
from gpuflow.sources import Source, open_source, source_spec
from tests import texts
from tests.fork_servers import forked_servers
from tests.forking import Interpreter, Python
from tests.images import jpeg, photo

if TYPE_CHECKING:
    import fsspec

    from tests.serve.models import Models

hypothesis.settings.register_profile(
    "stable", deadline=None, derandomize=True, database=None, max_examples=50, print_blob=False
)
hypothesis.settings.load_profile("stable")

SLOWEST = (
    "tests/serve/test_export.py",
    "tests/serve/http/test_server.py",
    "tests/training/test_trainer.py",
    "tests/parity/test_command.py",
    "tests/torchpipe/test_running_graph.py",
    "tests/parity/test_study.py",
    "tests/config/test_reader.py",
    "tests/loader/test_failures.py",
    "tests/engines/test_engines.py",
    "tests/test_cli.py",
    "tests/engines/test_tensorrt.py",
    "tests/execute/kernels/test_runner.py",
    "tests/laws/test_stage_laws.py",
    "tests/loader/test_views.py",
    "tests/laws/test_mixing_laws.py",
    "tests/tools/test_bench.py",
    "tests/laws/test_loader_laws.py",
    "tests/loader/test_lifecycle.py",
    "tests/decode/test_codecs.py",
    "tests/loader/test_process_ends.py",
    "tests/serve/http/test_app.py",
    "tests/chaos/test_loading.py",
    "tests/runtime/test_ranks.py",
    "tests/laws/test_credential_laws.py",
    "tests/loader/test_decode_workers.py",
    "tests/chaos/test_processes.py",
    "tests/config/test_yaml_file.py",
    "tests/laws/test_decoder_laws.py",
    "tests/torchpipe/test_cpu_preprocessor.py",
    "tests/execute/gpu/test_runner.py",
    "tests/decode/test_complete.py",
    "tests/execute/cpu/test_runner.py",
    "tests/serve/http/test_connections.py",
    "tests/decode/test_baseline.py",
    "tests/execute/kernels/test_resample.py",
    "tests/decode/test_chunk_headers.py",
    "tests/test_arrows.py",
    "tests/execute/kernels/test_launches.py",
    "tests/serve/test_predictor.py",
    "tests/plots/test_figures.py",
    "tests/sources/test_listing.py",
    "tests/experiments/test_ranks.py",
    "tests/experiments/test_real_data.py",
    "tests/experiments/test_service.py",
    "tests/execute/kernels/test_warp.py",
    "tests/stages/test_torchvision.py",
    "tests/test_existing_script.py",
    "tests/execute/kernels/test_color.py",
    "tests/experiments/test_mutants.py",
)
"""Files that take 4 s or more in `make test`, the slowest first; then those of slow tests and of experiments that take
10 s. Run last, one would leave the other cores idle."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--record-texts`, see tests/texts.py."""
    parser.addoption("--record-texts", action="store_true", help="write the texts of errors into errors.json")


def pytest_configure(config: pytest.Config) -> None:
    """Let pytest-xdist hand out the files in the order below; by itself it takes those with the most tests first.

    And let Ctrl-C reach the processes that tests start, where pytest was started with SIGINT ignored, as by nohup.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.pluginmanager.hasplugin("xdist"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slowest files first, each of them whole."""
    ranks = {name: rank for rank, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: ranks.get(item.nodeid.partition("::")[0], len(SLOWEST)))


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over all test modules, which live to the end: many tests call it, some often."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes gpuflow's cache of the user who runs the tests; nor do the processes that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        users = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        if "MPLCONFIGDIR" not in os.environ:  # matplotlib takes seconds to list the fonts
            patch.setenv("MPLCONFIGDIR", os.path.join(users, "matplotlib"))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def quick_fork_servers(own_cache: None) -> Iterator[None]:
    """In a run of many tests on several processes, worker pools start without importing torch anew."""
    with forked_servers() if "PYTEST_XDIST_WORKER" in os.environ else nullcontext():
        yield


@pytest.fixture(scope="module", autouse=True)
def pinned_texts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The texts that the tests of a module pin are those in errors.json."""
    record = request.config.getoption("record_texts")
    with texts.compared(request.path, tmp_path_factory.getbasetemp(), record=record):
        yield


@pytest.fixture(scope="session")
def python_with_torch(own_cache: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Python]:
    """Runs source text as `tests.datasets.python` does, but in a fork of one interpreter that has imported torch.

    A new interpreter takes 1.6 s of processor time for that.
    """
    with Interpreter(tmp_path_factory.mktemp("python"), imports="import numpy, torch\n") as interpreter:
        yield interpreter.run


@pytest.fixture(scope="session")
def interpreter(own_cache: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interpreter]:
    """Forks scripts from one interpreter that has imported torch and gpuflow's loader.

    For tests of what a process does once it has imported these; others take `python_with_torch`.
    """
    with Interpreter(tmp_path_factory.mktemp("interpreter")) as started:
        yield started


@pytest.fixture(scope="session")
def photo_bytes() -> bytes:
    """A photograph of 75x101 pixels (height x width), a JPEG with 4:2:0 chroma."""
    return jpeg(photo(75, 101))


@pytest.fixture
def source(folder: Path) -> Source:
    """The photographs of a test's own fixture `folder`."""
    return open_source(source_spec(folder=str(folder)))


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    """fsspec's file system in memory, empty."""
    import fsspec

    def clear() -> None:
        system.store.clear()
        system.pseudo_dirs[:] = [""]

    system = fsspec.filesystem("memory")
    clear()  # of what other files' tests left there
    yield system
    clear()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A tiny trained model in every file format, made once for all workers of pytest-xdist. Tests only read it."""
    from tests.serve.models import make_models

    own = tmp_path_factory.getbasetemp()
    root = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "models"
    root.mkdir(exist_ok=True)
    made = root / "made.pickle"
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            made.write_bytes(pickle.dumps(make_models(root)))
            torch.set_num_threads(threads)
    found: Models = pickle.loads(made.read_bytes())
    return found


@pytest.fixture
def operators() -> None:
    """Skip a test where torchpipe's operators are missing, and no error that the hook below sees says so."""
    from gpuflow.torchpipe.adapter import missing_operators

    if (missing := missing_operators("this test")) is not None:
        pytest.skip(str(missing))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    """Skip a test that fails for want of torchpipe's operators, which exist for some versions of torch."""
    try:
        return (yield)
    except GpuflowError as error:
        from gpuflow.torchpipe.adapter import missing_operators

        missing = missing_operators("")
        if missing is not None and str(missing) in str(error):
            pytest.skip(str(error))
        raise


def pytest_unconfigure() -> None:
    """Exit at once: torchpipe would wait 0.1 s for each thread of each graph that a test has made."""
    if "gpuflow.torchpipe.adapter" in sys.modules:
        sys.modules["gpuflow.torchpipe.adapter"].skip_cleanup()
