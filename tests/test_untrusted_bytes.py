"""Bytes from outside reach a decoder, or a library that may run code, only where an allow-list stands in the call.

The tests read the source tree, so a new call without one fails here, whichever module it is in.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("gpuflow", "stages", "experiments", "plots")


def _has(name: str, *values: object) -> Callable[[ast.Call], bool]:
    """Return a test of a call: whether it has this keyword, with one of these values if there are any."""

    def test(call: ast.Call) -> bool:
        given = next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
        return given is not None and (not values or (isinstance(given, ast.Constant) and given.value in values))

    return test


RULES: dict[str, tuple[tuple[str, ...], Callable[[ast.Call], bool] | None, dict[str, str]]] = {
    "Pillow chooses a decoder by the content: name the formats": (
        ("Image.open", "PIL.Image.open", "ImageFile.Parser"),
        _has("formats"),
        {
            "experiments/consistency/images.py": "pictures that Python packages ship",
            "experiments/consistency/ways.py": "photographs that the experiment has made",
            "experiments/peers/arms.py": "photographs that the experiment has made",
            "experiments/peers/inputs.py": "photographs that the experiment has made",
            "experiments/resume/arms.py": "photographs that the experiment has made",
        },
    ),
    "OpenCV chooses a decoder by the content: gpuflow.decode.codecs.imdecode lets through what gpuflow knows": (
        tuple(
            f"cv2.{name}"
            for name in ("imdecode", "imdecodemulti", "imread", "imreadmulti", "VideoCapture", "FileStorage")
        ),
        None,
        {
            "gpuflow/decode/codecs.py": "the function imdecode, which checks the format first",
            "gpuflow/decode/libjpeg_turbo.py": "a JPEG that it has encoded itself",
            "experiments/consistency/ways.py": "photographs that the experiment has made",
            "experiments/augment/run.py": "photographs that the experiment has made",
            "experiments/migrate/two_parts_before.py": "a script of a user, as it is before gpuflow",
            "experiments/real_data/calls.py": "photographs that the experiment has made",
            "experiments/service/plain.py": "a service without gpuflow, for comparison",
            "experiments/worker_scaling/arms.py": "photographs that the experiment has made",
        },
    ),
    "torchvision chooses a decoder by the content": (
        ("decode_image", "read_image", "decode_gif", "decode_webp", "decode_avif", "decode_heic"),
        None,
        {
            "gpuflow/parity/others.py": "the way of torchcodec, on images to compare, as a user would write it",
            "gpuflow/tools/bench.py": "the arm of torchvision, on the user's own images, as a user would write it",
            "experiments/consistency/ways.py": "photographs that the experiment has made",
            "experiments/peers/arms.py": "photographs that the experiment has made",
            "experiments/epoch_time/arms.py": "photographs that the experiment has made",
            "experiments/worker_scaling/arms.py": "photographs that the experiment has made",
        },
    ),
    "numpy may unpickle: say allow_pickle=False": (("np.load", "numpy.load"), _has("allow_pickle", False), {}),
    "torch may unpickle: say weights_only=True": (
        ("torch.load",),
        _has("weights_only", True),
        {"experiments/resume/training.py": "states of other loaders, which the experiment has saved"},
    ),
    "these archives may run code": (
        ("torch.export.load", "export.load", "torch.jit.load", "jit.load", "load_state_dict_from_url"),
        None,
        {"gpuflow/engines/pytorch.py": "after program_file has checked the archive"},
    ),
    "ONNX reads other files that a model names: say load_external_data=False": (
        ("onnx.load", "onnx.load_model"),
        _has("load_external_data", False),
        {},
    ),
    "unpickling runs code": (
        tuple(
            f"{module}.{name}"
            for module in ("pickle", "marshal", "dill", "cloudpickle", "joblib", "shelve", "pandas", "pd")
            for name in ("load", "loads", "Unpickler", "open", "read_pickle")
        ),
        None,
        {
            "gpuflow/runtime/worker_pool.py": "a pipe of a process that this one has started",
            "gpuflow/execute/cpu/workers.py": "a pipe of the process that has started this one",
        },
    ),
    "YAML may make any object: use the loader of yaml_file": (
        ("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load"),
        None,
        {"gpuflow/config/yaml_file.py": "_Loader is a SafeLoader"},
    ),
    "text may be code": (
        ("eval", "exec", "compile"),
        lambda call: not isinstance(call.func, ast.Name),
        {},
    ),
    "XML may name other files": (("ElementTree.fromstring", "ElementTree.parse", "iterparse", "XMLParser"), None, {}),
    "Arrow checks no offsets by itself": (
        ("ipc.open_stream", "ipc.open_file", "ipc.read_record_batch", "feather.read_table", "dataset.dataset"),
        None,
        {"gpuflow/sources/hf_tables.py": "it validates each batch"},
    ),
    "Parquet files may have checksums: say page_checksum_verification=True": (
        ("ParquetFile", "read_table", "ParquetDataset"),
        _has("page_checksum_verification", True),
        {},
    ),
    "Hugging Face may run code of a repository": (
        ("from_pretrained", "load_dataset", "pipeline"),
        lambda call: not _has("trust_remote_code")(call) or _has("trust_remote_code", False)(call),
        {},
    ),
    "tar members may leave the folder": (("extractall", "unpack_archive"), _has("filter", "data"), {}),
}
"""A rule: the calls that it is about, what allows one, and the modules in which it needs nothing, with the reason."""


def faults(tree: ast.AST, place: str) -> Iterator[str]:
    """Yield a text for each call of a module that breaks a rule."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        for rule, (names, allows, reasons) in RULES.items():
            named = any(name == known or name.endswith(f".{known}") for known in names)
            if named and place not in reasons and not (allows is not None and allows(call)):
                yield f"{place}:{call.lineno}: {name}: {rule}"


@cache
def modules() -> tuple[tuple[str, ast.AST], ...]:
    """Return the path and the syntax tree of each module of the source tree."""
    files = sorted({file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py") if not file.is_symlink()})
    return tuple((str(file.relative_to(ROOT)), ast.parse(file.read_text())) for file in files)


def test_every_call_has_an_allow_list() -> None:
    assert [fault for place, tree in modules() for fault in faults(tree, place)] == []


def test_nothing_is_renamed_on_import() -> None:
    """The test above knows functions by their names, some of them with their module's."""
    known = {tuple(name.split(".")) for names, _, _ in RULES.values() for name in names}
    pairs = {(module, name) for *others, name in known for module in others[-1:]}
    for place, tree in modules():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            for alias in node.names:
                last = alias.name.rpartition(".")[2]
                renamed = alias.asname not in (None, last) and any(last in name for name in known)
                module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
                assert not renamed or (last, alias.asname) in _USUAL, f"{place}:{node.lineno}"
                assert (module.rpartition(".")[2], last) not in pairs, f"{place}:{node.lineno}"


_USUAL = {("numpy", "np"), ("pyarrow", "pa")}


def test_every_exception_is_needed() -> None:
    trees = dict(modules())
    for names, _, reasons in RULES.values():
        for place in reasons:
            calls = [ast.unparse(node.func) for node in ast.walk(trees[place]) if isinstance(node, ast.Call)]
            assert any(call.rpartition(".")[2] == name.rpartition(".")[2] for call in calls for name in names), place


@pytest.mark.parametrize(
    "code",
    [
        "Image.open(file)",
        "with PIL.Image.open(io.BytesIO(data)) as image: pass",
        "cv2.imdecode(data, 1)",
        "x = torchvision.io.decode_image(data)",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=ALLOWED)",
        "torch.load(path, map_location='cpu')",
        "torch.load(path, weights_only=False)",
        "torch.export.load(path)",
        "onnx.load(path)",
        "pickle.loads(data)",
        "pickle.Unpickler(file).load()",
        "yaml.load(text, Loader)",
        "eval(text)",
        "ElementTree.fromstring(text)",
        "pq.ParquetFile(path)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "tar.extractall(folder)",
    ],
)
def test_a_call_without_an_allow_list_is_found(code: str) -> None:
    assert list(faults(ast.parse(code), "gpuflow/new.py"))


def test_a_call_with_one_is_not_found() -> None:
    sound = [
        "Image.open(file, formats=FORMATS)",
        "np.load(path, allow_pickle=False)",
        "torch.load(path, weights_only=True)",
        "json.loads(text)",
        "model.eval()",
        "np.fromstring(text, float, sep=' ')",
    ]
    assert [fault for code in sound for fault in faults(ast.parse(code), "gpuflow/new.py")] == []
