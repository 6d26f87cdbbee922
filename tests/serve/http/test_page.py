"""The web page, in headless Chromium: ways to choose an image, what the page shows, and its error messages."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import cv2
import numpy as np
import pytest

from gpuflow.serve.http.app import RequestLimits
from gpuflow.serve.predictor import Predictor
from tests.datasets import jpeg
from tests.hostile import HOSTILE
from tests.serve.fakes import FakeEngine, Gate
from tests.serve.http.browser import CHROMIUM, Browser
from tests.serve.services import Live, predictor_of, served, wait

PHOTO = jpeg(0, 0)
SHOWN = "!document.querySelector('#classes').hidden && document.querySelector('#output').ariaBusy == 'false'"
SEEN = "document.querySelector('#seen').complete && document.querySelector('#seen').naturalWidth > 0"
FAILED = "!document.querySelector('#error').hidden"


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with served(FakeEngine(), RequestLimits(max_body_bytes=20_000)) as service:
        yield service


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed (apt install chromium)")
    made = Browser(tmp_path_factory.mktemp("browser"))
    yield made
    made.close()


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    (tmp_path / "photo.jpg").write_bytes(PHOTO)
    return tmp_path / "photo.jpg"


@pytest.fixture
def page(browser: Browser, live: Live) -> Browser:
    browser.set_screen()
    browser.open(live.url)
    browser.wait("document.querySelector('#state').textContent == 'ready'")
    return browser


def rows(predictions: list[dict[str, object]]) -> list[str]:
    """The lines that the page should show."""
    return [f"{entry['label']} {100 * float(str(entry['probability'])):.1f} %" for entry in predictions]


def shown(page: Browser) -> list[str]:
    return list(page.run("[...document.querySelectorAll('#classes li')].map(li => li.innerText.replace(/\\s+/g, ' '))"))


# --- without a browser ------------------------------------------------------------------------------------------------


def test_the_page_loads_nothing_from_elsewhere(live: Live) -> None:
    answer = live.get("/")
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert re.findall(r"https?://[^\s'\"]+", answer.text) == ["http://www.w3.org/2000/svg"], (
        "the name of a format, not an address"
    )
    assert re.findall(r"<(?:script|link|img)\b[^>]*?(?:src|href)=.(\w+)", answer.text) == ["data"]


# --- an image ---------------------------------------------------------------------------------------------------------


def put(page: Browser, how: str, data: bytes, name: str) -> None:
    """Drop or paste a file, as a person would."""
    encoded = base64.b64encode(data).decode()
    event = {
        "drop": "new DragEvent('drop', {dataTransfer: files, bubbles: true, cancelable: true})",
        "paste": "new ClipboardEvent('paste', {clipboardData: files, bubbles: true})",
    }[how]
    went_on = page.run(
        f"{{const files = new DataTransfer();"
        f"files.items.add(new File([Uint8Array.from(atob('{encoded}'), c => c.charCodeAt(0))], '{name}'));"
        f"document.body.dispatchEvent({event})}}"
    )
    assert went_on == (how == "paste"), "unless the page prevents it, a browser opens a dropped file"


@pytest.mark.parametrize("how", ["choose", "drop", "paste"])
def test_an_image_that_is_chosen_dropped_or_pasted(page: Browser, live: Live, photo: Path, how: str) -> None:
    if how == "choose":
        page.choose("#file", photo)
    else:
        put(page, how, PHOTO, "photo.jpg")
    page.wait(SHOWN)
    assert shown(page) == rows(live.ask(PHOTO).json()["predictions"])
    page.wait(SEEN)
    assert page.run("[seen.naturalWidth, seen.naturalHeight]") == [24, 24]
    text = page.text()
    assert live.predictor is not None
    assert f"float32 24x24x3 nchw · preprocessing {live.predictor.preprocessing}" in text
    assert f"photo.jpg · {len(PHOTO)} bytes" in text
    assert re.search(r"[\d.]+ ms, [\d.]+ ms in the service", text)
    bars = page.run("[...document.querySelectorAll('#classes i')].map(bar => bar.style.getPropertyValue('--share'))")
    probabilities = [entry["probability"] for entry in live.ask(PHOTO).json()["predictions"]]
    assert [float(bar.rstrip("%")) for bar in bars] == pytest.approx([100 * p for p in probabilities])
    assert page.messages == []


def test_an_answer_without_the_time_in_the_service(page: Browser, live: Live, photo: Path) -> None:
    """Behind a proxy that drops the header Server-Timing."""
    page.run(
        "{const real = window.fetch; window.fetch = async (...given) => {"
        "const answer = await real(...given); return new Response(answer.body, {status: answer.status})}}"
    )
    page.choose("#file", photo)
    page.wait(SHOWN)
    page.wait(SEEN)
    assert shown(page) == rows(live.ask(PHOTO).json()["predictions"])
    assert re.fullmatch(r"[\d.]+ ms", page.run("document.querySelector('#time').textContent"))
    assert page.run("document.querySelector('#error').hidden") and page.messages == []


def test_the_picture_is_what_the_model_saw(page: Browser, live: Live, photo: Path) -> None:
    page.choose("#file", photo)
    page.wait(SEEN)
    pixels = page.run(
        "{const canvas = document.createElement('canvas'), pen = canvas.getContext('2d');"
        "pen.drawImage(seen, 0, 0); Array.from(pen.getImageData(0, 0, 24, 24).data)}"
    )
    png = np.frombuffer(live.ask(PHOTO, "/seen").content, np.uint8)
    expected = cv2.imdecode(png, cv2.IMREAD_COLOR_RGB)
    assert expected is not None
    assert np.array_equal(np.array(pixels, np.uint8).reshape(24, 24, 4)[..., :3], expected)


def test_a_file_that_the_browser_cannot_display(page: Browser) -> None:
    put(page, "drop", b"hello", "x.jpg")
    page.wait(FAILED)
    page.wait("!document.querySelector('#unshown').hidden")
    assert "the browser cannot display this file" in page.text()


# --- errors -----------------------------------------------------------------------------------------------------------


def test_a_file_that_is_not_an_image(page: Browser, photo: Path, tmp_path: Path) -> None:
    page.choose("#file", photo)
    page.wait(SHOWN)
    (tmp_path / "notes.txt").write_text("hello")
    page.choose("#file", tmp_path / "notes.txt")
    page.wait(FAILED)
    assert "This file cannot be used\nnot an image: begins with 68 65 6c 6c" in page.text()
    assert page.run("document.querySelector('#classes').hidden"), "the earlier prediction is hidden"
    assert page.run("document.querySelector('#error').role") == "alert"
    page.choose("#file", photo)
    page.wait(SHOWN)
    assert page.run("document.querySelector('#error').hidden")


def test_a_file_that_is_too_large(page: Browser) -> None:
    put(page, "drop", bytes(300_000), "large.jpg")
    page.wait(FAILED)
    assert (
        "This file is too large\nthe body must have at most 20,000 bytes; send a smaller file or fewer files"
        in page.text()
    )


def test_a_service_that_loads_its_model(browser: Browser, photo: Path) -> None:
    loading: Future[Predictor] = Future()
    with served(loading) as live:
        browser.open(live.url)
        browser.wait("document.querySelector('#state').textContent == 'loading'")
        browser.choose("#file", photo)
        browser.wait(FAILED)
        assert "Not available now\nthe model is still being loaded; try again in 5 s" in browser.text()
        with predictor_of(FakeEngine()) as predictor:
            loading.set_result(predictor)
            browser.wait("document.querySelector('#state').textContent == 'ready'")
            browser.choose("#file", photo)
            browser.wait(SHOWN)


def test_a_service_that_has_stopped(browser: Browser, photo: Path) -> None:
    with served(FakeEngine()) as live:
        browser.open(live.url)
        browser.wait("document.querySelector('#state').textContent == 'ready'")
    browser.choose("#file", photo)
    browser.wait(FAILED)
    assert "No answer\nThe service cannot be reached. Is it still running?" in browser.text()


def test_the_last_image_is_shown(browser: Browser) -> None:
    """A late answer does not replace a newer one."""
    gate = Gate()
    with served(FakeEngine(before=gate, batch=1)) as live:
        browser.open(live.url)
        put(browser, "drop", jpeg(0, 0), "first.jpg")
        assert gate.reached.wait(timeout=20)
        put(browser, "drop", jpeg(2, 1), "second.jpg")
        wait(lambda: live.queue_length == 2)
        cancelled = 'gpuflow_errors_total{kind="disconnected"} 1.0'
        wait(lambda: cancelled in live.get("/metrics").text)
        gate.open()
        browser.wait(SHOWN)
        expected = rows(live.ask(jpeg(2, 1)).json()["predictions"])
        assert shown(browser) == expected != rows(live.ask(jpeg(0, 0)).json()["predictions"])
        assert "second.jpg" in browser.text()


# --- how it looks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [340, 1100])
def test_it_fits_the_screen_and_follows_the_scheme(page: Browser, width: int, dark: bool) -> None:
    page.set_screen(width=width, dark=dark)
    put(page, "drop", HOSTILE["jpeg 700x3"], f"{'a_very_long_name' * 8}.jpg")
    page.wait(SHOWN)
    page.wait(SEEN)
    assert page.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    ground = page.run("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (max(ground) < 64) == dark
    assert page.screenshot().startswith(b"\x89PNG")


def test_the_keyboard_reaches_the_file_chooser(page: Browser) -> None:
    page.send("Input.dispatchKeyEvent", type="keyDown", key="Tab", code="Tab", windowsVirtualKeyCode=9)
    page.send("Input.dispatchKeyEvent", type="keyUp", key="Tab", code="Tab", windowsVirtualKeyCode=9)
    assert page.run("document.activeElement.id") == "file"
    assert page.run("document.activeElement.labels[0].innerText").startswith("Drop an image here")
    assert page.run("getComputedStyle(document.querySelector('.drop')).outlineStyle") == "solid"
