"""The service answers requests that schemathesis makes of /openapi.json as that file says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")

from tests.datasets import jpeg  # noqa: E402
from tests.serve.fakes import FakeEngine  # noqa: E402
from tests.serve.services import Live, served  # noqa: E402

_CHECKS = (
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with served(FakeEngine()) as service:
        yield service


@pytest.mark.parametrize("path", ["/predict", "/seen"])
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_answers_are_those_of_the_description(live: Live, path: str, mode: str) -> None:
    bodies = st.one_of(st.binary(max_size=200), st.integers(0, 2).map(lambda shade: jpeg(shade, 0)))
    schemathesis.openapi.media_type("image/*", bodies)
    schema = schemathesis.openapi.from_url(f"{live.url}/openapi.json")
    operation = schema[path]["POST"]
    schemathesis.checks.load_all_checks()
    checks = schemathesis.checks.CHECKS.get_by_names(list(_CHECKS))
    seen = set()

    @settings(max_examples=60, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
    def ask(case: Any) -> None:
        answer = case.call_and_validate(base_url=live.url, checks=checks)
        seen.add(answer.status_code)

    ask()
    assert seen & {200, 400, 415, 422}
