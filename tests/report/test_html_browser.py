"""Tests of the HTML report in Chromium, driven by Playwright."""

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

# Lowest contrast of any text with its background.
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

# Elements beyond the right edge that are not in a scrolling box.
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
    """An open page; it must request nothing else and log no message."""

    def __init__(self, browser: Browser, address: str, *, width: int = 1280, **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        self.page: Page = self.context.new_page()
        self.messages: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("requestfailed", lambda request: self.messages.append(request.url))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.address = address

    def __enter__(self) -> Page:
        self.page.goto(self.address)
        return self.page

    def __exit__(self, error: object, *_: object) -> None:
        self.context.close()
        if error is None:
            assert self.messages == []
            assert [url for url in self.requests if not url.startswith("data:")] == [self.address]


def column(page: Page, k: int) -> list[str]:
    return page.locator(f"#digits tbody tr > :nth-child({k})").all_inner_texts()


def test_every_plot_is_visible(browser: Browser, address: str) -> None:
    with Visit(browser, address) as page:
        assert page.evaluate("document.styleSheets[0].cssRules.length") > 50
        page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        boxes = [figure.bounding_box() for figure in page.locator("figure.drawing svg").all()]
        assert len(boxes) == sum(len(section.plots) for section in sections())
        assert all(box is not None and min(box["width"], box["height"]) > 150 for box in boxes)
        assert all(mark.is_visible() for mark in page.locator(".checks .mark").all())


def test_column_header_sorts_by_number(browser: Browser, address: str) -> None:
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


def test_row_opens_its_plot_and_escape_closes_it(browser: Browser, address: str) -> None:
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


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("by_hand", [False, True])
def test_text_has_enough_contrast(browser: Browser, address: str, scheme: Any, by_hand: bool) -> None:
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


@pytest.mark.parametrize("width", [320, 360, 700, 1100])
def test_page_does_not_scroll_sideways(browser: Browser, address: str, width: int) -> None:
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


def test_page_works_without_javascript(browser: Browser, address: str) -> None:
    with Visit(browser, address, java_script_enabled=False) as page:
        shown = page.locator("main").inner_text()
        for section in sections():
            for part in (section.claim, section.about["command"], *(check.evidence for check in section.checks)):
                assert part in shown
        assert page.locator("tbody tr").count() == sum(len(t.rows) for c in sections() for t in c.tables)
        assert page.locator("button").count() == 0
        figure = page.locator("#digits--reliability-1-mc-dropout svg")
        assert not figure.is_visible()
        page.locator(f"{ROW} a").click()  # a link into what is folded unfolds it
        assert figure.is_visible()
        page.locator("#digits details.settings summary").click()
        assert page.locator("#digits dl").is_visible()
