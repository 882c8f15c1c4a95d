"""The pages in real headless Chromium: drawn, quiet, self-contained, and readable in a wide and in a narrow window."""

import time

import pytest
from chromium import BROKEN_WORDS, CHROMIUM, Chromium
from study_tables import HOSTILE_TOKENS, LENGTH, write_study_folder, write_trace_folder
from training_folders import curved_loss, write_training_folder

from sinkscope.compare.page import write_comparison_page
from sinkscope.pages.text import token_text, visible
from sinkscope.results.saved import write_page_of_run
from sinkscope.studies.claims import CLAIMS
from sinkscope.studies.judging import Step

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium; .ci/run installs it")
PAGES = ("study", "bos", "without_sink", "trace", "compared", "trained")
HOSTILE_VARIANT = "norm</title><script>document.title='broken'</script>"
MEGABYTE = 2**20
WIDTH_NEEDED = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
BOTTOM = "document.querySelector({!r}).getBoundingClientRect().bottom"


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """One page of each kind; the model's name is hostile too."""
    root = tmp_path_factory.mktemp("pages")
    folders = {
        "study": write_study_folder(root / "study_run", model="planted</title><script>alert(1)</script>"),
        "bos": write_study_folder(root / "bos_run", seed=1, bos=True),
        "without_sink": write_study_folder(root / "without_sink_run", sink=False, tokens=None),
        "trace": write_trace_folder(root / "trace_run"),
    }
    paths = {name: root / f"{name}.html" for name in PAGES}
    for name, folder in folders.items():
        write_page_of_run(folder, paths[name])
    trained = [
        write_training_folder(root / f"{variant[:4]}-{seed}", variant=variant, seed=seed, loss=curved_loss(speed))
        for variant, speed in (("softmax", 1.0), (HOSTILE_VARIANT, 1.3))
        for seed in range(2)
    ]
    write_comparison_page([*folders.values(), *trained[:2]], paths["compared"])
    write_comparison_page(trained, paths["trained"])
    return paths


@pytest.fixture(scope="module")
def browser():
    browser = Chromium()
    yield browser
    browser.close()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_drawn_without_errors_requests_or_overflow(pages, browser, name):
    assert pages[name].stat().st_size < 8 * MEGABYTE
    browser.open(pages[name])
    figures = browser.evaluate("document.querySelectorAll('.plot').length")
    assert figures >= 3
    assert browser.evaluate("[...document.querySelectorAll('.plot')].every(plot => plot.querySelector('.xy'))")
    assert browser.evaluate(WIDTH_NEEDED) <= 0
    browser.resize(400)
    wait_for(browser, "[...document.querySelectorAll('.plot')].every(plot => plot._fullLayout.width < 400)")
    assert browser.evaluate(WIDTH_NEEDED) <= 0
    assert browser.errors == []
    assert [url for url in browser.requests if not url.startswith(("file:", "data:", "blob:"))] == []


def test_no_word_of_a_table_is_broken(pages, browser):
    browser.open(pages["study"], width=1000)
    browser.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert browser.evaluate(BROKEN_WORDS.format("table th")) == []
    browser.evaluate(
        "document.querySelectorAll('table').forEach(each => each.style = 'width:40px;overflow-wrap:anywhere')"
    )
    assert browser.evaluate(BROKEN_WORDS.format("table th")), "the control: a table that is too narrow"


def test_control_a_wide_element_is_seen_as_overflow(pages, browser):
    browser.open(pages["trace"], width=400)
    browser.evaluate("document.body.insertAdjacentHTML('beforeend', '<div style=\"width:900px\">wide</div>')")
    assert browser.evaluate(WIDTH_NEEDED) > 0


@pytest.mark.parametrize("name", ["study", "bos", "without_sink"])
def test_answer_and_verdicts_are_on_the_first_screen(pages, browser, name):
    browser.open(pages[name])
    assert browser.evaluate(BOTTOM.format(".answer")) < 200
    assert browser.evaluate(BOTTOM.format("#verdicts")) <= 800
    rows = browser.evaluate("document.querySelectorAll('#verdicts tbody tr:not(.group)').length")
    assert rows == len(CLAIMS)
    words = browser.evaluate("[...document.querySelectorAll('#verdicts .verdict')].map(e => e.textContent)")
    expected = {
        "study": "\u2717 does not hold",
        "bos": "\u2013 not applicable",
        "without_sink": "\u2013 not applicable",
    }
    assert expected[name] in words


def test_a_verdict_leads_to_its_figure(pages, browser):
    browser.open(pages["study"])
    rows = "[...document.querySelectorAll('#verdicts tbody tr:not(.group)')]"
    targets = browser.evaluate(f"{rows}.map(e => e.querySelector('a')?.getAttribute('href') ?? '')")
    assert len(targets) == len(CLAIMS)
    assert all(browser.evaluate(f"document.querySelector({target!r}) !== null") for target in targets if target)
    unled = [claim for claim, target in zip(CLAIMS, targets, strict=True) if not target]
    assert unled == [], "a claim without evidence on the page"
    browser.open(pages["compared"])
    names = browser.evaluate("[...document.querySelectorAll('#verdicts thead a')].map(e => e.getAttribute('href'))")
    assert names == ["#run-A", "#run-B", "#run-C"]


def test_a_trace_has_no_verdicts_and_says_why(pages, browser):
    browser.open(pages["trace"])
    assert browser.evaluate("document.querySelector('#verdicts')") is None
    assert "gives no verdicts on causes" in browser.evaluate("document.body.innerText")
    assert browser.evaluate("document.querySelectorAll('.arrow').length") == 0


def test_the_chain_runs_from_left_to_right_with_evidence(pages, browser):
    browser.open(pages["study"])
    lefts = browser.evaluate("[...document.querySelectorAll('.panel')].map(e => e.getBoundingClientRect().left)")
    assert len(lefts) == 5
    assert lefts == sorted(set(lefts))
    evidence = browser.evaluate(
        "[...document.querySelectorAll('.panel')].map(e => e.querySelector('.evidence')?.innerText ?? '')"
    )
    assert "4.60 (4.28 to 4.92); control 0.230 (the largest of any other position)" in evidence[3]
    assert browser.evaluate("document.querySelectorAll('.arrow').length") == len(Step)
    browser.resize(400)
    tops = browser.evaluate("[...document.querySelectorAll('.panel')].map(e => e.getBoundingClientRect().top)")
    assert tops == sorted(set(tops))


def test_hostile_text_is_shown_as_text(pages, browser):
    browser.open(pages["study"])
    assert browser.evaluate("document.title") == "Attention sink of planted</title><script>alert(1)</script>"
    assert browser.evaluate("document.querySelector('h1').textContent").endswith("<script>alert(1)</script>")
    shown = browser.evaluate("[...document.querySelectorAll('.tokens bdi')].map(e => e.textContent)")
    expected = [visible(token_text(HOSTILE_TOKENS[index % len(HOSTILE_TOKENS)])) for index in range(LENGTH)]
    assert shown == expected
    assert browser.evaluate("document.querySelectorAll('img, main script').length") == 0
    isolated = "getComputedStyle(document.querySelector('.tokens bdi')).unicodeBidi"
    assert browser.evaluate(isolated) == "isolate"
    browser.open(pages["compared"])
    assert browser.evaluate("document.title") == "Comparison of 3 studies and 1 trace and 2 training runs"
    legend = browser.evaluate("document.querySelector('#rates .legendtext').textContent")
    assert "A planted</title><script>alert(1)</script>" in legend


def test_a_hostile_variant_is_shown_as_text(pages, browser):
    browser.open(pages["trained"])
    assert browser.evaluate("document.title") == "Comparison of 4 training runs"
    names = browser.evaluate("[...document.querySelectorAll('#variants tbody th bdi')].map(e => e.textContent)")
    assert names == ["softmax", HOSTILE_VARIANT]
    assert HOSTILE_VARIANT in browser.evaluate("document.querySelector('#sink-rate .legend').textContent")
    assert HOSTILE_VARIANT in browser.evaluate("document.querySelector('#ratios .yaxislayer-above').textContent")
    assert browser.evaluate("document.querySelectorAll('img, main script').length") == 0


def test_a_training_comparison_answers_on_the_first_screen(pages, browser):
    browser.open(pages["trained"])
    assert browser.evaluate(BOTTOM.format(".answer")) < 200
    assert browser.evaluate(BOTTOM.format("#variants")) < 400
    # A loss that falls 1.3 times as fast is where the other ends after 1 / 1.3 of its tokens: 76.9 %.
    assert "77 % of its tokens" in browser.evaluate("document.querySelector('.answer').innerText")
    sources = browser.evaluate("[...document.querySelectorAll('.source')].map(e => e.textContent)")
    assert len(sources) == 9
    assert all((pages["trained"].parent / source).is_file() for source in sources)


def test_control_a_token_that_is_not_escaped_is_blocked_and_noticed(pages, browser, tmp_path):
    page = pages["study"].read_text(encoding="utf-8")
    broken = page.replace("&lt;script&gt;document.title=&#x27;broken&#x27;&lt;/script&gt;", HOSTILE_TOKENS[0])
    assert broken != page
    (tmp_path / "broken.html").write_text(broken, encoding="utf-8")
    browser.open(tmp_path / "broken.html")
    assert any("Content Security Policy" in error for error in browser.errors)
    assert browser.evaluate("document.title") != "broken"


def test_control_a_request_is_blocked_and_noticed(pages, browser, tmp_path):
    page = pages["trace"].read_text(encoding="utf-8").replace("<main", '<img src="http://127.0.0.1:9/x.png"><main', 1)
    (tmp_path / "asking.html").write_text(page, encoding="utf-8")
    browser.open(tmp_path / "asking.html")
    assert browser.errors != []


def test_themes(pages, browser):
    colours = {}
    for scheme in ("light", "dark"):
        browser.open(pages["study"], scheme=scheme)
        colours[scheme] = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        line = "getComputedStyle(document.querySelector('#variance .js-line')).stroke"
        colours[f"{scheme} line"] = browser.evaluate(line)
    assert len(set(colours.values())) == 4
    browser.evaluate("document.getElementById('theme').click()")
    wait_for(browser, f"{line} === {colours['light line']!r}")
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == colours["light"]
    assert browser.evaluate("document.getElementById('theme').textContent") == "Dark theme"


def test_keyboard(pages, browser):
    browser.open(pages["study"])
    browser.press("Tab")
    assert browser.evaluate("document.activeElement.className") == "skip"
    range_of = "JSON.stringify(document.querySelector('#dose-10 .plot')._fullLayout.yaxis.range)"
    before = browser.evaluate(range_of)
    browser.evaluate("document.querySelector('#dose-10 .plot').focus()")
    browser.press("+")
    wait_for(browser, f"{range_of} !== {before!r}")
    browser.press("0")
    wait_for(browser, f"{range_of} === {before!r}")
    unreachable = "[...document.querySelectorAll('button, .plot, summary, a')].filter(e => e.tabIndex < 0).length"
    assert browser.evaluate(unreachable) == 0


def test_hover_names_the_place_and_the_value(pages, browser):
    browser.open(pages["study"])
    browser.evaluate("document.documentElement.style.scrollBehavior = 'auto'")
    browser.evaluate("document.querySelector('#map-dom-ratio').scrollIntoView()")
    box = browser.evaluate(
        "JSON.parse(JSON.stringify(document.querySelector('#map-dom-ratio .nsewdrag').getBoundingClientRect()))"
    )
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    for shift in (0, 3):
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + shift, y=y)
    hover = "document.querySelector('#map-dom-ratio .hoverlayer').textContent"
    wait_for(browser, f"{hover}.includes('domratio')")
    assert "position 2" in browser.evaluate(hover)
    # A click leads to the cell's row, which is added where only the largest are listed; a second one goes back to it.
    listed = "document.querySelectorAll('#map-dom-ratio tbody tr').length"
    before = browser.evaluate(listed)
    for _ in range(2):
        for kind in ("mousePressed", "mouseReleased"):
            browser.call("Input.dispatchMouseEvent", type=kind, x=x + 3, y=y, button="left", clickCount=1)
        wait_for(browser, "document.querySelector('#map-dom-ratio tr.chosen') !== null")
        time.sleep(0.5)  # two clicks at once are a double click, which resets the zoom
    assert browser.evaluate("document.querySelector('#map-dom-ratio details').open")
    row = browser.evaluate("[...document.querySelector('#map-dom-ratio tr.chosen').cells].map(e => e.textContent)")
    value = browser.evaluate(hover) or ""
    assert row[1].startswith("2")
    assert len(row) == 3
    assert value == "" or row[1] in value
    assert browser.evaluate(listed) - before <= 1


def test_figures_are_saved_as_png(pages, browser, tmp_path):
    browser.open(pages["study"])
    browser.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    browser.evaluate("document.querySelector('[data-action=chain-png]').click()")
    browser.evaluate("document.querySelector('#map-dom-ratio [data-action=png]').click()")
    deadline = time.monotonic() + 30
    while len(found := sorted(tmp_path.glob("*.png"))) < 2:
        assert time.monotonic() < deadline
        browser.evaluate("1")
        time.sleep(0.1)
    assert [path.name.split("-")[-1] for path in found] == ["chain.png", "ratio.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in found)
    assert browser.errors == []


def test_printing_is_light_and_leaves_the_page_as_it_was(pages, browser):
    browser.open(pages["study"], scheme="dark")
    browser.evaluate(
        "addEventListener('beforeprint', () => { window.printed = document.documentElement.dataset.theme })"
    )
    assert len(browser.call("Page.printToPDF")["data"]) > 50_000
    assert browser.evaluate("window.printed") == "light"
    assert browser.evaluate("document.documentElement.dataset.theme") == "dark"
    assert browser.errors == []


def test_every_figure_names_files_that_are_there(pages, browser):
    browser.open(pages["study"])
    sources = browser.evaluate("[...document.querySelectorAll('.source')].map(e => e.textContent)")
    assert len(sources) == browser.evaluate("document.querySelectorAll('.plot').length")
    for source in sources:
        for name in source.split(", "):
            assert (pages["study"].parent / "study_run" / name).is_file()


def test_compare_command(pages, sinkscope, tmp_path):
    root = pages["study"].parent
    command = ("compare", root / "bos_run", root / "trace_run")
    result = sinkscope(*command)
    assert result.code == 0, result.err
    assert "comparison.html" in result.out
    written = (tmp_path / "comparison.html").stat().st_size
    again = sinkscope(*command)
    assert again.code == 2
    assert "--overwrite" in again.err
    assert "Traceback" not in again.err
    refused = sinkscope(*command, "./nowhere", "--out", "other.html")
    assert refused.code == 2
    assert "nowhere" in refused.err  # neither a run nor a model
    assert "Traceback" not in refused.err
    assert not (tmp_path / "other.html").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["comparison.html"]
    assert (tmp_path / "comparison.html").stat().st_size == written


def wait_for(browser, condition):
    deadline = time.monotonic() + 20
    while not browser.evaluate(condition):
        assert time.monotonic() < deadline, f"never true: {condition}"
        time.sleep(0.05)
