"""Builds the wheel and the source distribution, and uses both outside of the repository: `make test-wheel`.

`--wheel FILE` tests a wheel that is built already; `--keep DIR` keeps the source distribution that has passed. Each
step prints its seconds. The first that fails ends the script, with its output and exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

__all__ = ["main"]

ROOT = Path(__file__).parents[2]
SERVES = platform.machine() == "x86_64"
"""torchpipe, which serves, has wheels for this machine alone."""
EXTRAS = "samples,serve,export" if SERVES else "samples"
SECONDS = 600
"""Limit of each command. A runner may have to download torch."""

SHAPES = ["pipelines.train.batch.size=16", "pipelines.val.batch.size=16"]
TRAIN = ["train.model=resnet18", "train.epochs=1", "train.out=runs/wheel", *SHAPES]
MODEL = ["serve.model.file=runs/wheel/last.pt", "serve.model.batch=2", "serve.model.instances=1"]
PHOTOS = """
import pathlib, numpy, PIL.Image
for number in range(16):
    path = pathlib.Path(f"data/core/{number % 2}/{number}.jpg")
    path.parent.mkdir(parents=True, exist_ok=True)
    PIL.Image.fromarray(numpy.random.default_rng(number).integers(0, 255, (80, 90, 3), numpy.uint8)).save(path)
"""
CORE = """
source: {folder: data/core, split: {train: 0.5, val: 0.5}}
pipelines:
  train: {stages: [decode: {color: rgb}, random_resized_crop: {size: 64}, normalize], batch: {size: 4}, shuffle: true}
  val: {stages: &eval [decode, resize: {height: 64, width: 64}, normalize], batch: {size: 4}}
serve: {stages: *eval, model: {file: runs/core/last.pt}}
train: {model: resnet18, epochs: 1, out: runs/core}
"""
EPOCH = """
import gpuflow
with gpuflow.load("core.yaml", "val") as loader:
    print(sum(len(images) for images, labels in loader))
"""
ABSENT = {
    "samples": ["samples data/more"],
    "serve": ["serve core.yaml", "parity core.yaml", "predict core.yaml serve.model.file=a.onnx --out more"],
    "export": ["export core.yaml --onnx a.onnx"],
    "hf": ["predict core.yaml --out more --format parquet", 'scan core.yaml source={"hf":"data"}'],
    "formats": [f"check core.yaml pipelines.train.stages.0.decode.formats=[{name}]" for name in ("heic", "tiff")],
    "metrics": ["train core.yaml --force --metrics-port 9400"],
}
"""Commands that need each extra, which is not installed."""

TESTS_OF_THE_SOURCES = ["tests/test_errors.py", "tests/config/test_overrides.py", "tests/stages/test_flip.py"]


class Place(NamedTuple):
    """An environment, and the empty folder where its commands run."""

    folder: Path
    environment: dict[str, str]

    def run(self, *command: str | Path, code: int = 0) -> str:
        return run(*command, cwd=self.folder, env=self.environment, code=code)


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None, code: int = 0) -> str:
    """Return what a command prints, after a line with its seconds. With another exit code, end the script."""
    begin = time.monotonic()
    try:
        done = subprocess.run(
            list(map(str, command)),
            cwd=cwd,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        sys.exit(f"{' '.join(error.cmd)}\ntakes more than {SECONDS} s")
    words = " ".join(" ".join(Path(word).name if os.sep in str(word) else str(word) for word in command).split())
    if done.returncode != code:
        sys.exit(f"{done.stdout}\n{words}\nends with exit code {done.returncode}")
    print(f"{time.monotonic() - begin:6.1f} s  {words[:100]}", flush=True)
    return done.stdout


def tracked_files() -> list[str]:
    """Return the files and links that git holds."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return [name for name in names.stdout.split("\0") if name and (ROOT / name).exists()]


def build(folder: Path) -> tuple[Path, Path]:
    """Return the wheel and the source distribution, built from a copy of the files that git holds.

    The repository itself may hold a list of files of an earlier build, from which setuptools would take names.
    """
    names = tracked_files()
    for name in names:
        (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / "tree" / name, follow_symlinks=False)
    uv = Path(sys.executable).with_name("uv")
    run(uv, "build", "--quiet", "--out-dir", folder / "dist", cwd=folder / "tree")  # the wheel from the sources
    [wheel], [sources] = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
    with tarfile.open(sources) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    missing = [name for name in names if not (ROOT / name).is_symlink() and name not in held]
    if missing:
        sys.exit(f"MANIFEST.in must name all files of the repository; it leaves out {len(missing)}: {missing[:9]}")
    return wheel, sources


def check_wheel(wheel: Path, folder: Path) -> None:
    """Check that a wheel fits every Python from 3.11 on and glibc 2.34, and holds the package alone."""
    if not re.fullmatch(r"gpuflow-[^-]+-cp311-abi3-(many)?linux_\w+\.whl", wheel.name):
        sys.exit(f"{wheel.name} must have the tag cp311-abi3, for all versions of Python from 3.11 on")
    with zipfile.ZipFile(wheel) as archive:
        top = {name.split("/")[0] for name in archive.namelist()}
        library = archive.extract("gpuflow/native/_library.abi3.so", folder / "unpacked")
    if [name for name in top if name != "gpuflow" and not name.endswith(".dist-info")]:
        sys.exit(f"{wheel.name} must hold gpuflow alone, and holds {', '.join(sorted(top))}")
    symbols = run("nm", "--dynamic", "--undefined-only", library, cwd=folder)
    if found := re.findall(r"\bU (_?Py\w+)", symbols):
        sys.exit(f"{wheel.name} must not depend on Python's ABI; its library needs {', '.join(found)}")
    uv = Path(sys.executable).with_name("uv")
    text = run(uv, "tool", "run", "--quiet", "auditwheel==6.8.2", "show", wheel, cwd=folder)
    level = re.search(r'platform\s+tag:\s+"manylinux_2_(\d+)_\w+"', text)
    if level is None or int(level[1]) > 34:
        sys.exit(f"{text}\n{wheel.name} must fit manylinux_2_34 or an earlier one")


def install(wheel: Path, folder: Path) -> Place:
    """Return an environment that holds the wheel and what it depends on, and nothing of this repository.

    It is used without extras before these are installed.
    """
    uv, empty = Path(sys.executable).with_name("uv"), folder / "empty"
    empty.mkdir()
    run(uv, "venv", "--quiet", "--python", sys.executable, folder / "venv", cwd=empty)
    constraint, python = f"--constraint={ROOT / 'requirements.txt'}", folder / "venv/bin/python"
    pip = partial(run, uv, "pip", "install", "--quiet", "--python", python, cwd=empty)
    names = ("LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "LANG")
    kept = {name: os.environ[name] for name in names if name in os.environ}
    own = {"PATH": f"{folder / 'venv/bin'}:{os.defpath}", "HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
    place = Place(empty, kept | own)
    pip(constraint, wheel)
    pip("pillow==10.4.0")  # the oldest; make test-oldest installs the extra formats, which needs a newer one
    use_without_extras(place)
    pip(constraint, f"{wheel}[{EXTRAS}]", "pytest", "hypothesis")
    return place


def use_without_extras(place: Place) -> None:
    """Check, load, train, show and predict, and find in errors which extra other jobs need."""
    gpuflow = partial(place.run, "gpuflow")
    (place.folder / "core.yaml").write_text(CORE)
    (place.folder / "a.onnx").touch()
    place.run("python", "-c", PHOTOS)
    gpuflow("check", "core.yaml")
    if (images := place.run("python", "-c", EPOCH).strip()) != "8":
        sys.exit(f"an epoch of val must have 8 images, and has {images}")
    gpuflow("train", "core.yaml", "--max-steps", "1")
    gpuflow("show", "core.yaml")
    gpuflow("predict", "core.yaml", "--out", "rows")
    for extra, commands in ABSENT.items():
        for command in commands:
            if f"pip install 'gpuflow[{extra}]'" not in (text := gpuflow(*command.split(), code=1)):
                sys.exit(f"{text}\ngpuflow {command}\nmust name the extra {extra}")


def use(place: Place) -> None:
    """Take the way of a new user: from photographs to a served model."""
    [config] = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    (place.folder / "photos.yaml").write_text(config)
    gpuflow = partial(place.run, "gpuflow")
    gpuflow("samples", "data/photos", "-n", "48")
    gpuflow("check", "photos.yaml")
    gpuflow("train", "photos.yaml", *TRAIN)
    gpuflow("show", "photos.yaml", *SHAPES)
    if not SERVES:
        return
    with ThreadPoolExecutor(1) as next_to_it:  # most of the time goes into importing torch, on one core
        compared = next_to_it.submit(gpuflow, "parity", "photos.yaml", *MODEL, "--images", "4")
        gpuflow("export", "photos.yaml", "train.out=runs/wheel", "--onnx", "resnet18.onnx")
        ask_the_service(place)
        if "PASS" not in compared.result():
            sys.exit(f"{compared.result()}\ngpuflow parity must print PASS")


def ask_the_service(place: Place) -> None:
    """Serve the exported model, send it a photograph, and end it with SIGTERM."""
    begin = time.monotonic()
    photograph = min(place.folder.glob("data/photos/*/*.jpg"))
    log = place.folder / "serve.log"
    command = ["gpuflow", "serve", "photos.yaml", "--port", "0", *MODEL, "serve.model.file=resnet18.onnx"]
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=place.folder, env=place.environment, stdout=file, stderr=file)
    try:
        address = address_once_ready(process, log)
        request = urllib.request.Request(
            f"{address}/predict?top_k=3", photograph.read_bytes(), {"Content-Type": "image/jpeg"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read().decode()
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=60)
    finally:
        process.kill()
        process.wait(timeout=60)
    if text.count('"probability"') != 3:
        sys.exit(f"the service must answer with the three best classes, and answers {text}")
    if code:
        sys.exit(f"gpuflow serve must end with exit code 0 after SIGTERM, and ends with {code}")
    print(f"{time.monotonic() - begin:6.1f} s  gpuflow serve, a request, SIGTERM", flush=True)


def address_once_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    """Return the address of a service that has loaded its model."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.1)
        if found := re.search(r"http://[\d.]+:\d+", log.read_text()):
            with contextlib.suppress(urllib.error.URLError):  # 503 while it loads
                urllib.request.urlopen(f"{found[0]}/readyz", timeout=60).close()
                return found[0]
    sys.exit(f"{log.read_text()}\ngpuflow serve is not ready within {SECONDS} s; its exit code is {process.returncode}")


def test_sources(sources: Path, folder: Path, place: Place) -> None:
    """Run tests of the unpacked source distribution, with the library of the wheel that was built from it."""
    with tarfile.open(sources) as archive:
        archive.extractall(folder / "sources", filter="data")
    [root] = (folder / "sources").iterdir()
    shutil.copy(folder / "unpacked/gpuflow/native/_library.abi3.so", root / "gpuflow/native")
    run("python", "-m", "pytest", "-p", "no:cacheprovider", *TESTS_OF_THE_SOURCES, cwd=root, env=place.environment)


def main() -> None:
    """Build and test, or test the wheel that is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="test this wheel, and build nothing")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="copy the source distribution there")
    options = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpuflow-wheel-") as name:
        folder = Path(name)
        wheel, sources = (options.wheel.resolve(), None) if options.wheel else build(folder)
        check_wheel(wheel, folder)
        place = install(wheel, folder)
        use(place)
        if sources is not None:
            test_sources(sources, folder, place)
            if options.keep:
                options.keep.mkdir(parents=True, exist_ok=True)
                shutil.copy(sources, options.keep)
    print(f"{time.monotonic() - begin:6.1f} s  in all")


if __name__ == "__main__":
    main()
