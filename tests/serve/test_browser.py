"""The page in a real headless Chromium: send, stop, regenerate, compare, and a server that dies."""

import shutil
import time

import pytest
from serving import CONFIG, serving

import outpace
from outpace.serve.app import AppConfig

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt install chromium)")
WAIT = 60_000  # ms


@pytest.fixture(scope="module")
def model():
    return outpace.load("default")


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        opened = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser, model):
    """On its own server; an error in the page's script fails the test."""
    with serving(model, CONFIG, default="ngram") as (server, address):
        page = browser.new_page()
        errors = []
        page.on("pageerror", lambda error: errors.append(error))
        page.goto(address)
        page.wait_for_function("document.getElementById('model').textContent === 'default'")
        page.server = server
        yield page
        page.close()
        assert errors == []


def ask(page, text, most=60):
    if page.is_hidden("#drawer"):
        page.click("#settings")
    page.fill("#most", str(most))
    page.fill("#text", text)
    page.press("#text", "Enter")


def answered(page, count=1):
    page.wait_for_function(
        "document.getElementById('chat').getAttribute('aria-busy') === 'false'", timeout=WAIT
    )
    assert page.locator(".notes", has_text="tokens/s").count() == count


def test_a_question_is_answered_with_its_reasoning_folded_and_its_tokens_coloured(page, model):
    question = "Add 4821 and 7364."
    ask(page, question)
    answered(page)
    wanted = outpace.generate(
        model, [{"role": "user", "content": question}], draft=False,
        sampling=outpace.SamplingParams(max_tokens=60, prefill_chunk=64),
    )  # fmt: skip
    assert page.locator("article:not(.user) > div.coloured").inner_text() == wanted.text
    thought = page.locator("details")
    assert thought.get_attribute("open") is None and "8+3=11" in thought.text_content()
    assert page.locator(".coloured .bonus").count() > 5
    notes = page.locator(".notes", has_text="tokens/s").inner_text()
    drafted = int(notes.split(" draft tokens")[0].split()[-3])
    shown = page.locator("details .drafted, article div .drafted").count()
    assert f"{len(wanted.tokens)} tokens" in notes and 0 < shown <= drafted
    plotted = page.evaluate(
        "(() => { const c = document.querySelector('canvas');"
        " return c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some((x) => x) })()"
    )
    assert plotted


def test_a_chat_goes_on_is_made_again_and_begins_anew(page):
    ask(page, "What is 12 + 7?")
    answered(page)
    ask(page, "Add 3 and 4.")
    answered(page, 2)
    assert "cached" in page.locator(".notes", has_text="tokens/s").nth(1).inner_text()
    before = page.locator("article:not(.user)").nth(1).inner_text()
    page.click("#again")
    answered(page, 2)
    text = [t.splitlines()[0] for t in (before, page.locator("article:not(.user)").nth(1).inner_text())]
    assert text[0] == text[1] and page.locator("article.user").count() == 2
    page.click("#fresh")
    assert page.locator("article").count() == 0


def test_two_answers_side_by_side_are_the_same(page):
    page.click("#settings")
    page.check("#compare")
    ask(page, "Add 441 and 88.")
    answered(page, 2)
    texts = page.locator(".pair .message > div.coloured").all_inner_texts()
    assert len(texts) == 2 and texts[0] == texts[1]
    notes = page.locator(".pair .notes").all_inner_texts()
    assert "0 of 0 draft tokens" in notes[1] and "0 of 0 draft tokens" not in notes[0]


def test_stop_ends_it_here_and_on_the_server(page):
    engine, step = page.server.engine, page.server.engine.step
    engine.step = lambda: (
        time.sleep(0.1),
        step(),
    )  # the answer of 60 tokens is not over before the key comes
    ask(page, "Add 4444444 and 4444444.", most=450)
    page.wait_for_selector("article:not(.user) span", timeout=WAIT, state="attached")
    page.keyboard.press("Escape")
    page.wait_for_selector("text=Stopped.", timeout=WAIT)
    page.wait_for_timeout(1500)
    assert not engine.running
    engine.step = step
    ask(page, "What is 2 + 2?")
    page.wait_for_selector("text=tokens/s", timeout=WAIT)


def test_what_the_server_refuses_is_shown(page):
    ask(page, "What is 2 + 2?", most=100_000)
    page.wait_for_selector("text=max_model_len is 600", timeout=WAIT)
    assert page.locator("[role=alert]").count() == 1


def test_a_server_that_dies_is_an_error_on_the_page(page):
    page.route("**/v1/chat/completions", lambda route: route.abort("connectionrefused"))
    ask(page, "What is 2 + 2?")
    page.wait_for_selector("[role=alert]", timeout=WAIT)
    assert page.is_visible("#send")


def test_a_key_is_asked_for_and_sent(browser, model):
    with serving(model, CONFIG, AppConfig(api_key="secret")) as (_, address):
        page = browser.new_page()
        page.goto(address)
        page.wait_for_selector("text=needs a key")
        page.click("#settings")
        page.fill("#key", "secret")
        page.press("#key", "Tab")
        page.wait_for_function("document.getElementById('model').textContent === 'default'")
        ask(page, "What is 2 + 2?", most=3)
        answered(page)
        page.close()


def test_the_keyboard_is_enough_and_everything_has_a_name(page):
    for name in ("Message", "Messages", "Settings"):
        assert page.get_by_label(name, exact=True).count() >= 1
    page.focus("#text")
    page.keyboard.type("What is 2 + 2?")
    page.keyboard.press("Shift+Enter")
    assert page.input_value("#text").endswith("\n") and page.locator("article").count() == 0
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector("article.user", timeout=WAIT)
    answered(page)
    for scheme in ("dark", "light"):
        page.emulate_media(color_scheme=scheme)
        colour = page.evaluate("getComputedStyle(document.body).color")
        assert (colour == "rgb(0, 0, 0)") == (scheme == "light"), colour
