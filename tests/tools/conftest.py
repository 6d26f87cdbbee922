"""A fixture of the serving tests."""

from tests.serve.conftest import _torch_threads  # noqa: F401
