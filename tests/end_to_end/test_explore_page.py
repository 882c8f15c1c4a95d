"""The live page in real headless Chromium: typed into, clicked, slid, undone, by keyboard alone, narrow and dark."""

import threading
import time

import pytest
import uvicorn
from chromium import BROKEN_WORDS, CHROMIUM, Chromium
from study_tables import HOSTILE_TOKENS

import sinkscope
from sinkscope.explore.server import THIS_MACHINE, application, listening, private_redirect
from sinkscope.explore.sources import FinishedTrace, LiveModel
from sinkscope.pages.text import token_text, visible

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium; .ci/run installs it")
PROMPT = "The cat sat on the mat, and the dog lay on the rug, until it was dark."
TRACED = "Both of them went home."
HOSTILE = "<img src=x onerror=document.title='broken'>"
WIDTH_NEEDED = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
IDLE = "[...document.querySelectorAll('.pane')].every(pane => pane.dataset.answered && !pane.hasAttribute('aria-busy'))"
INTERVENTIONS = "[...document.querySelectorAll('.interventions li')].map(each => each.firstChild.textContent.trim())"
FOCUS = "document.activeElement"


class HostileModel(LiveModel):
    """A model whose tokens, name and story are markup."""

    def view(self, asked):
        view = super().view(asked)
        hostile = 5 * [visible(token_text(each)) for each in (HOSTILE, *HOSTILE_TOKENS)]
        return {**view, "tokens": hostile[: len(view["tokens"])], "opened_text": HOSTILE, "story": HOSTILE}


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Where the page is served: a model, one whose tokens are hostile, and a finished trace."""
    loaded = sinkscope.load("reference:softmax")
    hostile = HostileModel(loaded, HOSTILE)
    hostile.name = HOSTILE
    run = tmp_path_factory.mktemp("explore") / "run"
    sinkscope.trace(loaded, TRACED).save(run)
    with listening(THIS_MACHINE, 0) as at:
        port = at.getsockname()[1]
        sources = [LiveModel(loaded, "model"), hostile, FinishedTrace(run)]
        app = application(sources, prompts=[PROMPT], token="secret", port=port)
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", ws="none"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [at]})
        thread.start()
        yield f"http://127.0.0.1:{port}/secret/"
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def browser():
    browser = Chromium()
    yield browser
    browser.close()


@pytest.fixture
def page(address, browser):
    """The page with one pane; nothing may be said on the console, nor asked elsewhere."""
    opened(browser, address)
    yield browser
    assert browser.errors == []
    assert [url for url in browser.requests if not url.startswith(address)] == []


def opened(browser, address, **look):
    browser.open(address, **look)
    wait_for(browser, IDLE)
    browser.evaluate("document.getElementById('compare').click()")  # two sources open side by side
    wait_for(browser, "document.querySelectorAll('.pane').length === 1")


def wait_for(browser, condition):
    deadline = time.monotonic() + 30
    while not browser.evaluate(condition):
        assert time.monotonic() < deadline, f"never became true: {condition}; {browser.errors}"
        time.sleep(0.02)


def act(browser, script):
    """Does something and waits for the answer."""
    before = browser.evaluate("document.querySelector('.pane').dataset.answered")
    browser.evaluate(script)
    wait_for(browser, f"document.querySelector('.pane').dataset.answered !== {before!r} && {IDLE}")


def text(browser, selector):
    return browser.evaluate(f"document.querySelector({selector!r}).textContent")


def click(browser, selector):
    act(browser, f"document.querySelector({selector!r}).click()")


def test_a_browser_comes_to_the_page_by_the_private_file(browser, address):
    """It sends no referrer. Control: the file itself is no page."""
    with private_redirect(address) as path:
        browser.open(path)
        assert browser.evaluate("[location.href, document.referrer]") == [address, ""]
        assert path.as_uri() in browser.requests
        assert "data-drawn" not in path.read_text()


def test_type_click_slide_and_undo(page):
    assert "".join(browser_tokens(page)) == PROMPT.replace(" ", "\u2423")
    baseline = text(page, ".answer")
    click(page, ".tokens [data-position='7']")
    assert text(page, "legend").startswith("Token 7 ")
    click(page, "[data-kind=mask_to_self]")
    assert page.evaluate(INTERVENTIONS) == ["mask to self 7"]
    assert text(page, ".before") == f"Baseline: {baseline}"
    assert "'mask_to_self': ['7']" in text(page, ".python")
    shown = "[...document.querySelectorAll('.tokens .number')].map(each => each.textContent.split(' ').length)"
    assert 2 in page.evaluate(shown), "the change is shown beside the value"
    for factor in ("3", "5.5"):  # a slide passes many values
        slider = "document.querySelector('.amplify')"
        act(page, f"{slider}.value = {factor}; {slider}.dispatchEvent(new Event('input'))")
    assert page.evaluate(INTERVENTIONS) == ["mask to self 7", "amplify 7:5.5"]
    click(page, ".undo")
    assert page.evaluate(INTERVENTIONS) == ["mask to self 7"]
    click(page, ".undo")
    assert page.evaluate(INTERVENTIONS) == []
    assert text(page, ".answer") == baseline
    assert page.evaluate("document.querySelector('.undo').disabled")
    act(
        page, "document.querySelector('.prompt').value = 'A king and a queen.'; document.querySelector('.read').click()"
    )
    assert "".join(browser_tokens(page)) == "A\u2423king\u2423and\u2423a\u2423queen."


def test_a_masked_token_is_brought_back_to_its_variance_and_opened(page):
    """Each stands in the Python line, and the numbers of the token follow."""
    click(page, ".tokens [data-position='7']")
    received = "document.querySelector(\".tokens [data-position='7'] .number\").textContent"
    click(page, "[data-kind=mask_to_self]")
    masked = page.evaluate(received)
    click(page, "[data-kind=match_variance]")
    assert page.evaluate(INTERVENTIONS) == ["mask to self 7", "match variance 7"]
    assert "'match_variance': ['7']" in text(page, ".python")
    assert page.evaluate(received) != masked
    click(page, ".clear")
    last = page.evaluate("document.querySelectorAll('.tokens button').length") - 1
    mixing = "document.querySelector('.chain').textContent + document.querySelector('.positions canvas').toDataURL()"
    baseline = page.evaluate(mixing)
    click(page, "[data-kind=allow]")
    assert page.evaluate(INTERVENTIONS) == [f"allow 7:0-{last}"]
    assert page.evaluate(mixing) != baseline


def browser_tokens(browser):
    return browser.evaluate("[...document.querySelectorAll('.tokens bdi')].map(each => each.textContent)")


def test_neurons_and_dimensions_are_taken_out_and_transplanted(page):
    click(page, ".tokens [data-position='9']")
    for number, kind in ((1, "ablate"), (2, "transplant")):
        click(page, f".parts tr:first-child button:nth-child({number})")
        assert page.evaluate(INTERVENTIONS)[-1].startswith(kind)
        click(page, ".clear")
    rows = "[...document.querySelectorAll('.parts tr')].filter(row => row.textContent.startsWith('dimension'))[0]"
    for number, kind in ((0, "zero dimension"), (1, "transplant dimension")):
        act(page, f"{rows}.querySelectorAll('button')[{number}].click()")
        assert page.evaluate(INTERVENTIONS)[-1].startswith(kind)
        click(page, ".clear")


def test_what_is_refused_is_told_and_taken_back(page):
    act(page, "document.querySelector('.prompt').value = 'a'; document.querySelector('.read').click()")
    assert "at least 2 tokens" in text(page, ".message")
    click(page, "[data-kind=mask_to_self]")
    assert text(page, ".message") == ""
    assert "The cat sat" in text(page, ".python")
    page.errors.clear()  # Chromium logs each answer of 400


def test_a_finished_trace_has_its_own_tokens_and_no_prompt_box(page):
    boxes = "['.prompt', '.read'].map(name => document.querySelector(name).checkVisibility())"
    choice = "Object.assign(document.querySelector('.source'), {value: '%s'}).dispatchEvent(new Event('change'))"
    act(page, choice % 2)
    assert page.evaluate(boxes) == [False, False]
    assert "".join(browser_tokens(page)) == TRACED.replace(" ", "\u2423")
    act(page, choice % 0)
    assert page.evaluate(boxes) == [True, True]
    assert "".join(browser_tokens(page)) == PROMPT.replace(" ", "\u2423")


def test_maps_tell_their_cells_and_open_a_token(page):
    click(page, "[data-kind=mask_to_self]")
    page.evaluate("document.querySelector('.positions canvas').focus()")
    page.press("ArrowRight")
    assert text(page, ".positions .cell").startswith("layer 0, 1 ")
    assert ", baseline " in text(page, ".positions .cell")
    page.evaluate(
        "(canvas => { const box = canvas.getBoundingClientRect(); canvas.dispatchEvent(new PointerEvent('pointermove', "
        "{clientX: box.left + 1, clientY: box.top + 1})); })(document.querySelector('.positions canvas'))"
    )
    last = text(page, ".positions .axis span")
    assert last != "layer 0"
    assert text(page, ".positions .cell").startswith(f"{last}, 0 ")
    page.evaluate("document.querySelector('.positions canvas').focus()")
    page.press("ArrowUp")
    page.press("ArrowRight")
    assert text(page, ".positions .cell").startswith("layer 0, 1 ")
    page.press("Enter")
    wait_for(page, "document.querySelector('legend').textContent.startsWith('Token 1 ')")
    page.evaluate("document.querySelector('.heads summary').click()")
    wait_for(page, "document.querySelectorAll('.heads tbody tr').length > 3")
    colours = "document.querySelector('.positions canvas').toDataURL()"
    before = page.evaluate(colours)
    page.evaluate("document.querySelector('.change').click()")
    assert page.evaluate(colours) != before


def test_keyboard_alone(page):
    def tab_to(condition):
        for _ in range(60):
            if page.evaluate(condition):
                return
            page.press("Tab")
        raise AssertionError(f"never reached: {condition}")

    tab_to(f"{FOCUS}.matches('.prompt')")
    page.evaluate(f"{FOCUS}.select()")
    page.call("Input.insertText", text="The sun and the moon and the stars and the sea and the wind went by.")
    page.press("Tab")
    page.press("Enter")
    wait_for(page, f"document.querySelector('.python').textContent.includes('moon') && {IDLE}")
    tab_to(f"{FOCUS}.matches('.tokens button')")
    for _ in range(3):
        page.press("ArrowRight")
    page.press("Enter")
    wait_for(page, f"document.querySelector('legend').textContent.startsWith('Token 3 ') && {IDLE}")
    assert page.evaluate(f"{FOCUS}.dataset.position") == "3", "a redraw keeps the focus"
    tab_to(f"{FOCUS}.matches('[data-kind=mask_to_self]')")
    page.press("Enter")
    wait_for(page, f"document.querySelectorAll('.interventions li').length === 1 && {IDLE}")
    tab_to(f"{FOCUS}.matches('.amplify')")
    page.press("ArrowRight")
    wait_for(page, f"document.querySelectorAll('.interventions li').length === 2 && {IDLE}")
    assert page.evaluate(INTERVENTIONS) == ["mask to self 3", "amplify 3:1.5"]
    outline = f"getComputedStyle({FOCUS}).outlineStyle"
    assert page.evaluate(outline) != "none", "the focus is seen"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_light_and_dark(address, browser, scheme):
    opened(browser, address, width=400, scheme=scheme)
    click(browser, "[data-kind=mask_to_self]")
    assert browser.evaluate(WIDTH_NEEDED) <= 0
    shade = browser.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]")
    assert (int(shade) < 80) == (scheme == "dark")
    small = (
        "[...document.querySelectorAll('button')].filter(each => each.offsetHeight && each.offsetHeight < 20).length"
    )
    assert browser.evaluate(small) == 0, "buttons can be hit"
    assert browser.evaluate(BROKEN_WORDS.format(".parts td")) == []
    assert browser.errors == []


def test_hostile_text_is_shown_as_text(address, browser):
    browser.open(address)
    wait_for(browser, IDLE)
    assert browser.evaluate("document.querySelectorAll('.pane').length") == 2
    pane = "document.querySelectorAll('.pane')[1]"
    assert browser.evaluate(f"{pane}.querySelector('.tokens bdi').textContent") == visible(token_text(HOSTILE))
    assert browser.evaluate(f"{pane}.querySelector('.answer').textContent") == HOSTILE
    assert browser.evaluate("document.title") == "sinkscope explore"
    assert browser.evaluate("document.querySelectorAll('img, main script').length") == 0
    assert browser.errors == []
    browser.evaluate(f"{pane}.querySelector('.answer').innerHTML = {HOSTILE!r}")
    time.sleep(0.1)
    assert browser.evaluate("document.title") == "sinkscope explore"
    assert any("Content Security Policy" in error for error in browser.errors), "control: as markup it is blocked"


def test_a_second_origin_is_refused(address, browser, tmp_path):
    elsewhere = tmp_path / "elsewhere.html"
    elsewhere.write_text("<html data-drawn=yes><body>another page</body></html>")
    browser.open(elsewhere)
    body = "{method: 'POST', mode: 'no-cors', body: '{}'}"
    sent = browser.evaluate(f"fetch({address + 'view'!r}, {body}).then(a => a.type + a.status, e => 'failed')")
    assert sent in ("failed", "opaque0"), "nothing can be read"
    frame = f"Object.assign(document.createElement('iframe'), {{src: {address!r}, onload: done}})"
    browser.evaluate(f"new Promise(done => document.body.append({frame})).then(() => 1)")
    assert any("frame-ancestors" in error or "refused" in error.lower() for error in browser.errors)
