"""The page in a real browser: Debian's Chromium without a window, driven by Playwright."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _reports import ERRORS, INTRODUCTION, TITLE, sections

from neuboots.report.html import render_html

pytest.importorskip("playwright", reason="Playwright is not installed; get it with: pip install 'neuboots[dev]'")
from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed; on Debian: apt-get install chromium"),
]

ROW = "#digits tbody tr:nth-child(2)"

# What a reader sees: the least contrast of any letter with what lies behind it, and whose it is.
CONTRAST = """() => {
  const brush = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgb = (color, under) => {
    brush.fillStyle = `rgb(${under})`; brush.fillRect(0, 0, 1, 1);
    brush.fillStyle = color; brush.fillRect(0, 0, 1, 1);
    return [...brush.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const ground = (element) => {
    const under = element.parentElement ? ground(element.parentElement) : [255, 255, 255];
    return element.namespaceURI.endsWith("svg") ? under : rgb(getComputedStyle(element).backgroundColor, under);
  };
  const light = (color) => {
    const [r, g, b] = color.map((c) => (c / 255 <= 0.04045 ? c / 3294.6 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  document.querySelectorAll("details").forEach((each) => { each.open = true; });
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = { html: [99, ""], svg: [99, ""], letters: 0 };
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, text = walker.currentNode.textContent.trim();
    if (!text || !element.checkVisibility() || element.closest(".unseen, style, script")) continue;
    const inside = element.namespaceURI.endsWith("svg"), style = getComputedStyle(element), behind = ground(element);
    const pair = [light(rgb(inside ? style.fill : style.color, behind)), light(behind)].sort((a, b) => a - b);
    const ratio = (pair[1] + 0.05) / (pair[0] + 0.05), kind = inside ? "svg" : "html";
    if (ratio < found[kind][0]) found[kind] = [ratio, text];
    found.letters += text.length;
  }
  return found;
}"""

# Whatever reaches past the right edge and is not in a box that scrolls.
SPILLED = """() => [...document.querySelectorAll("body *")]
  .filter((element) => !element.closest(".scroll, nav ol, .shapes, .unseen, .skip"))
  .filter((element) => element.getBoundingClientRect().right > innerWidth + 0.5)
  .map((element) => element.outerHTML.slice(0, 80))"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    file: Path = tmp_path_factory.mktemp("page") / "report.html"
    file.write_text(render_html(sections(), title=TITLE, introduction=INTRODUCTION), encoding="utf-8")
    return file.as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        root = os.name == "posix" and os.geteuid() == 0  # Chromium has no sandbox for root
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"] if root else [])
        yield chromium
        chromium.close()


class Visit:
    """A page as it is opened: nothing may be fetched but the page, and nothing may be complained of."""

    def __init__(self, browser: Browser, address: str, *, width: int = 1280, **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        self.page: Page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("requestfailed", lambda request: self.complaints.append(request.url))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.address = address

    def __enter__(self) -> Page:
        self.page.goto(self.address)
        return self.page

    def __exit__(self, fault: object, *_: object) -> None:
        self.context.close()
        if fault is None:
            assert self.complaints == []
            assert [url for url in self.requests if not url.startswith("data:")] == [self.address]


def column(page: Page, k: int) -> list[str]:
    return page.locator(f"#digits tbody tr > :nth-child({k})").all_inner_texts()


def test_every_figure_is_visible(browser: Browser, address: str) -> None:
    with Visit(browser, address) as page:
        assert page.evaluate("document.styleSheets[0].cssRules.length") > 50
        page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        boxes = [figure.bounding_box() for figure in page.locator("figure.drawing svg").all()]
        assert len(boxes) == sum(len(chapter.plots) for chapter in sections())
        assert all(box is not None and min(box["width"], box["height"]) > 150 for box in boxes)
        assert all(mark.is_visible() for mark in page.locator(".verdicts .mark").all())


def test_a_head_sorts_by_number_then_back(browser: Browser, address: str) -> None:
    with Visit(browser, address) as page:
        first = column(page, 2)
        head = page.locator("#digits thead th").nth(2)
        head.get_by_role("button").click()
        assert head.get_attribute("aria-sort") == "ascending"
        assert column(page, 2) == [*["neuboots"] * 2, *["plain", "gp"] * 2, *["mc-dropout"] * 2, *["deep-ensemble"] * 2]
        values = [float(text.split(" ±")[0]) for text in column(page, 3) if text != "–"]
        assert values == sorted(values)  # as words, 100.21 would come before 9.53
        head.get_by_role("button").press("Enter")
        assert head.get_attribute("aria-sort") == "descending"
        assert column(page, 2) == [*["mc-dropout"] * 2, *["plain", "gp"] * 2, *["neuboots"] * 2, *["deep-ensemble"] * 2]
        head.get_by_role("button").press("Space")
        assert head.get_attribute("aria-sort") is None
        assert column(page, 2) == first == [*ERRORS] * 2


def test_words_are_sorted_and_one_head_at_a_time(browser: Browser, address: str) -> None:
    with Visit(browser, address) as page:
        heads = page.locator("#digits thead th")
        heads.nth(0).get_by_role("button").click(click_count=2)
        assert column(page, 1) == [*["25"] * 5, *["1"] * 5]
        heads.nth(1).get_by_role("button").click()
        assert [head.get_attribute("aria-sort") for head in heads.all()] == [None, "ascending", *[None] * 3]
        assert column(page, 2) == sorted([*ERRORS] * 2)
        assert column(page, 1) == ["1", "25"] * 5  # equals stay in the order that they had at first


def test_a_row_opens_its_diagram_and_escape_closes_it(browser: Browser, address: str) -> None:
    with Visit(browser, address) as page:
        dialog, figure = page.locator("dialog"), page.locator("#digits--reliability-1-mc-dropout svg")
        assert not figure.is_visible()
        page.locator(f"{ROW} td").first.click()
        assert dialog.is_visible()
        assert dialog.locator("figcaption").inner_text() == "Reliability: B = 1, mc-dropout"
        assert (figure.bounding_box() or {})["width"] > 300
        page.keyboard.press("Escape")
        assert not dialog.is_visible()
        assert not figure.is_visible()
        assert figure.evaluate("figure => figure.closest('details') !== null")  # at its place again


def test_rows_and_dialogs_obey_keys(browser: Browser, address: str) -> None:
    with Visit(browser, address) as page:
        caption = page.locator("dialog figcaption")
        page.locator(ROW).focus()
        page.keyboard.press("Enter")
        assert caption.inner_text() == "Reliability: B = 1, mc-dropout"
        page.keyboard.press("ArrowRight")
        assert caption.inner_text() == "Reliability: B = 1, deep-ensemble"
        for _ in range(3):
            page.keyboard.press("ArrowLeft")
        assert caption.inner_text() == "Reliability: B = 25, neuboots"  # round the table; its last row has no diagram
        assert page.locator("dialog figure").count() == 1
        page.get_by_role("button", name="Back").click()
        assert page.evaluate("document.activeElement.dataset.figure") == "digits--reliability-25-neuboots"
        assert page.locator("#digits details.diagrams figure").count() == 9
        assert page.locator("#digits tbody tr[tabindex]").count() == 9


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("by_hand", [False, True])
def test_letters_stand_out(browser: Browser, address: str, scheme: Any, by_hand: bool) -> None:
    other = {"light": "dark", "dark": "light"}[scheme]
    with Visit(browser, address, color_scheme=other if by_hand else scheme) as page:
        if by_hand:
            page.get_by_role("button", name="Change between light and dark").click()
        found = page.evaluate(CONTRAST)
        assert found["letters"] > 2000
        assert found["html"][0] >= 4.5, found["html"]
        assert found["svg"][0] >= 4.5, found["svg"]
        dark = page.evaluate("getComputedStyle(document.documentElement).backgroundColor") != "rgb(255, 255, 255)"
        assert dark == (scheme == "dark")


def test_the_choice_of_light_and_dark_needs_no_storage(browser: Browser, address: str) -> None:
    visit = Visit(browser, address, color_scheme="dark")
    visit.page.add_init_script(
        "Object.defineProperty(window, 'localStorage', { get() { throw new DOMException('no', 'SecurityError'); } })"
    )
    with visit as page:
        page.get_by_role("button", name="Change between light and dark").click()
        assert page.evaluate("document.documentElement.dataset.theme") == "light"
        assert page.locator("thead button").count() > 10  # the rest of the script has run


@pytest.mark.parametrize("width", [320, 360, 700, 1100])
def test_the_page_never_scrolls_sideways(browser: Browser, address: str, width: int) -> None:
    with Visit(browser, address, width=width, has_touch=True) as page:
        page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        assert page.evaluate(SPILLED) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        boxes = page.locator("#curves figure.table .scroll").evaluate("box => [box.scrollWidth, box.clientWidth]")
        assert boxes[0] > boxes[1]  # the widest table scrolls within its box
        small = page.locator("#digits--reliability-1-plain .scroll").evaluate(
            "box => [box.scrollWidth, box.clientWidth]"
        )
        assert small[0] <= small[1]  # and a small figure shrinks
        page.locator(ROW).click()
        box = page.locator("dialog").bounding_box() or {}
        assert 0 <= box["x"] < box["x"] + box["width"] <= width


def test_without_javascript_everything_is_there(browser: Browser, address: str) -> None:
    with Visit(browser, address, java_script_enabled=False) as page:
        shown = page.locator("main").inner_text()
        for chapter in sections():
            for part in (chapter.claim, chapter.about["command"], *(verdict.evidence for verdict in chapter.checks)):
                assert part in shown
        assert page.locator("tbody tr").count() == sum(len(t.rows) for c in sections() for t in c.tables)
        assert page.locator("button").count() == 0
        figure = page.locator("#digits--reliability-1-mc-dropout svg")
        assert not figure.is_visible()
        page.locator(f"{ROW} a").click()  # a link into what is folded unfolds it
        assert figure.is_visible()
        page.locator("#digits details.settings summary").click()
        assert page.locator("#digits dl").is_visible()


def test_the_command_can_be_copied(browser: Browser, address: str) -> None:
    with Visit(browser, address) as page:
        button = page.locator("#digits .copy")
        button.click()
        button.get_by_text("Copied").wait_for()
        assert page.evaluate("String(getSelection())") == sections()[0].about["command"]


def test_the_navigation_follows_the_reader(browser: Browser, address: str) -> None:
    with Visit(browser, address, reduced_motion="reduce") as page:
        page.get_by_role("navigation").get_by_role("link", name="curves").click()
        page.locator("nav a[href='#curves'][aria-current]").wait_for()
        assert page.locator("nav a[aria-current]").count() == 1
        assert 0 <= (page.locator("#curves h2").bounding_box() or {})["y"] < 300


def test_on_paper_there_are_no_buttons(browser: Browser, address: str) -> None:
    with Visit(browser, address, color_scheme="dark") as page:
        page.emulate_media(media="print")
        assert not any(button.is_visible() for button in page.locator("nav, .theme, .copy").all())
        assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(255, 255, 255)"
        assert page.locator("#curves figure.drawing svg").first.is_visible()
        assert page.locator("#digits thead th").first.is_visible()
