"""The chat page in a real Chromium: what a person does, over a scripted engine."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.stub_server import StubEngine, StubServer, make_codec
from tests.waiting import wait_until

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
sync_api = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="needs Chromium (Debian: apt install chromium)"
)

WAIT_MS = 15_000


@pytest.fixture(scope="module")
def codec(tiny_qwen, tmp_path_factory):
    return make_codec(tiny_qwen, tmp_path_factory.mktemp("codec"))


@pytest.fixture
def engine(codec):
    return StubEngine(codec, "Hello <b>there</b>.")


@pytest.fixture
def server(engine):
    with StubServer(engine) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, server):
    """Return a function that opens the page in a window of its own; nothing may go wrong in its console."""
    contexts, wrong = [], []

    def open_window(url: str = "", ready: bool = True, **settings: Any) -> Any:
        context = browser.new_context(**settings)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("requestfailed", lambda r: wrong.append(r.url) if "/page/" in r.url else None)
        page.on("request", lambda r: None if r.url.startswith(server.url) else wrong.append(r.url))
        page.goto(url or server.url)
        if ready:
            page.wait_for_selector("#model option", state="attached")
        return page

    yield open_window
    for context in contexts:
        context.close()
    assert wrong == []


def send(page: Any, text: str) -> None:
    page.fill("#input", text)
    page.click("#send")


def answers(page: Any) -> list[str]:
    return page.locator(".assistant > .text").all_inner_texts()


def until(page: Any, condition: str) -> None:
    """Wait for a condition of the page; its policy lets no text be run as a script inside it."""
    wait_until(lambda: page.evaluate(condition))


def wait_answered(page: Any, count: int = 1) -> None:
    until(page, f"document.querySelectorAll('.assistant .note').length >= {count}")


def test_a_conversation(open_page, server):
    page = open_page()
    assert page.locator("#model option").all_inner_texts() == ["stub", "stub-thinking"]
    send(page, "Hi <i>you</i>")
    wait_answered(page)
    # text is text: neither the person's nor the model's is read as HTML
    assert page.locator(".user .text").inner_text() == "Hi <i>you</i>"
    assert answers(page) == ["Hello <b>there</b>."]
    assert page.locator("#messages b, #messages i").count() == 0
    note = page.locator(".note").inner_text()
    assert re.search(
        r"\d+ tokens · [\d.]+ tok/s · first after .+ · prompt \d+ tokens, 0 cached", note
    )
    send(page, "And again")
    wait_answered(page, 2)
    cached = re.search(r"(\d+) cached", page.locator(".note").last.inner_text())
    assert cached is not None
    assert int(cached[1]) > 0
    # the picture: shares of 3 in RAM to 1 from the drive, as the engine counted
    assert page.locator("#tier-ram").inner_text() == "75.0 %"
    assert page.locator("#tier-drive").inner_text() == "25.0 %"
    assert "tok/s" in page.locator("#speed").inner_text()
    painted = "c => new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer).some(Boolean)"
    assert page.eval_on_selector("#times", painted)
    page.click("#new")
    assert page.locator("#messages li").count() == 0
    send(page, "Hi")
    wait_answered(page)
    assert len(answers(page)) == 1


def test_it_streams_and_stops_and_retries(open_page, server, engine, codec):
    engine.script, engine.token_s = codec.encode("word " * 300), 0.03
    page = open_page()
    send(page, "Hi")
    until(page, "document.querySelector('.assistant > .text').innerText.length > 20")
    assert page.locator("#stop").is_visible()
    assert not page.locator("#send").is_visible()
    page.click("#stop")
    wait_answered(page)
    assert "stopped" in page.locator(".note").inner_text()
    assert 20 < len(answers(page)[0]) < 1200
    wait_until(lambda: server.get("/status").json()["queue"]["running"] is None)
    engine.script, engine.token_s = codec.encode("Short."), 0.0
    page.click(".note button")
    until(page, "document.querySelector('.assistant > .text')?.innerText === 'Short.'")
    assert len(answers(page)) == 1


def test_reasoning_is_folded(open_page, engine, codec):
    engine.script = codec.encode("a deep thought\n</think>\n\nBecause.")
    page = open_page()
    page.select_option("#model", "stub-thinking")
    send(page, "Why?")
    wait_answered(page)
    assert answers(page) == ["Because."]
    thought = page.locator(".reasoning .text")
    assert not thought.is_visible()
    page.click(".reasoning summary")
    assert thought.is_visible()
    assert thought.inner_text() == "a deep thought"


def test_an_error_is_shown_and_can_be_retried(open_page, engine):
    engine.fail_at = 1
    page = open_page()
    send(page, "Hi")
    page.wait_for_selector("#error:not([hidden])")
    assert "failed inside the server" in page.locator("#error").inner_text()
    engine.fail_at = None
    # what had come stays, marked as broken off; a retry replaces it
    page.locator("button", has_text="Retry").last.click()
    until(
        page,
        "[...document.querySelectorAll('.assistant > .text')].at(-1)?.innerText === 'Hello <b>there</b>.'",
    )
    assert not page.locator("#error").is_visible()
    page.fill("#input", "x " * 5000)
    page.click("#send")
    page.wait_for_selector("#error:not([hidden])")
    assert "maximum context length is 4096 tokens" in page.locator("#error").inner_text()


def test_a_long_prompt_shows_how_far_it_is(open_page, engine):
    engine.prefill_s = 1.5
    page = open_page()
    send(page, "Hi")
    until(page, "document.getElementById('progress-text').innerText.includes('reading the prompt')")
    wait_answered(page)
    assert not page.locator("#progress").is_visible()


def test_without_a_mouse(open_page):
    page = open_page()
    until(page, "document.activeElement.id === 'input'")
    page.keyboard.type("Hi")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("you")
    page.keyboard.press("Enter")
    wait_answered(page)
    assert page.locator(".user .text").inner_text() == "Hi\nyou"
    until(page, "document.activeElement.id === 'input'")
    seen = set()
    for _ in range(12):
        page.keyboard.press("Shift+Tab")
        seen.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert {"new", "model", "SUMMARY"} <= seen


@pytest.mark.parametrize("width", [320, 390, 900])
def test_on_a_narrow_screen_nothing_is_cut(open_page, engine, codec, width):
    engine.script = codec.encode("x" * 200)
    page = open_page(viewport={"width": width, "height": 640})
    send(page, "y" * 200)
    wait_answered(page)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.evaluate("document.querySelector('#chat').scrollWidth <= window.innerWidth")
    box = page.locator("#send").bounding_box()
    assert box["x"] + box["width"] <= width
    assert box["y"] + box["height"] <= 640


def test_dark_and_light(open_page):
    colours = {}
    for scheme in ("light", "dark"):
        page = open_page(color_scheme=scheme)
        colours[scheme] = page.evaluate(
            "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
        )
    light, dark = ([sum(map(int, re.findall(r"\d+", c)[:3])) for c in colours[s]] for s in colours)
    assert light[0] > 700 > 200 > light[1]
    assert dark[0] < 150 < 600 < dark[1]


def test_a_key_is_entered_on_the_page(browser, engine):
    with StubServer(engine, key="s3cret") as server:
        context = browser.new_context()
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.goto(server.url)
        until(page, "document.getElementById('state').innerText.includes('wants a key')")
        page.click("#settings summary")
        page.fill("#key", "s3cret")
        page.keyboard.press("Tab")
        page.wait_for_selector("#model option", state="attached")
        send(page, "Hi")
        wait_answered(page)
        assert answers(page) == ["Hello <b>there</b>."]
        context.close()
