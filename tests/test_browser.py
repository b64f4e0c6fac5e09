"""The report in a real browser: phone and desktop, light and dark, on paper, by keyboard, without network.

One launch of Chromium serves all of them. `LILYBENCH_CHROMIUM` names the program where it lies elsewhere.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import report_rows as rows
import suite_rows

from reports.page import build

sync_api = pytest.importorskip("playwright.sync_api", reason="needs the test extra: playwright")

CHROMIUM = os.environ.get("LILYBENCH_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
HOSTILE = 'a "model", of\nmany, names'

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        # Containers run as root and with a small /dev/shm.
        flags = ["--no-sandbox", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A suite, a run of one contrast under a hostile name, and a run without any rows."""
    folder = tmp_path_factory.mktemp("pages")
    runs = [rows.run_row(model=rows.REAL | {"name": HOSTILE})]
    samples = [
        rows.sample(arm, p, f) for arm in ("full", "mlx_lm") for p in ("prefill", "decode") for f in (256, 131_072)
    ]
    contrasts = [rows.contrast("decode", f, "full") for f in (256, 131_072)]
    return {
        "suite": build([suite_rows.write(folder / "suite")]),
        "hostile": build([rows.write_run(folder / "hostile", runs, samples, contrasts)]),
        "empty": build([rows.write_run(folder / "empty", [], [], [])]),
    }


class Opened:
    """A page with what went wrong while it loaded: messages on the console, errors, requests beyond the file."""

    def __init__(self, browser: Any, file: Path, width: int = 1280, scheme: str = "light") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.troubles: list[str] = []
        self.page.on("console", lambda message: self.troubles.append(message.text))
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.on("request", lambda sent: self._request(sent.url))
        self.page.goto(file.as_uri())

    def _request(self, url: str) -> None:
        if not url.startswith(("file:", "data:")):
            self.troubles.append(f"asks for {url}")

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def ask(self, script: str) -> Any:
        return self.page.evaluate(script)


# What sticks out of the window although no scrolling region holds it.
WIDER = """() => [...document.querySelectorAll('body *')].filter(e => {
  const box = e.getBoundingClientRect();
  return box.width && box.right > innerWidth + 1 && !e.closest('.scroll') && !e.closest('svg') && !e.closest('.skip');
}).map(e => e.tagName + '.' + e.className)"""

# What Tab should stop at: not what a closed fold holds.
REACHABLE = "[...document.querySelectorAll('a[href], summary, [tabindex=\"0\"]')].filter(e => e.checkVisibility())"

# Contrast of the text of an element with the page, as WCAG counts it.
CONTRAST = """selector => {
  const channel = c => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = text => { const [r, g, b] = text.match(/[\\d.]+/g).map(Number);
    return 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b); };
  const ink = light(getComputedStyle(document.querySelector(selector)).color);
  const paper = light(getComputedStyle(document.body).backgroundColor);
  return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
}"""


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", ["suite", "hostile", "empty"])
def test_nothing_overflows_and_the_console_is_silent(
    browser: Any, pages: dict[str, Path], name: str, width: int
) -> None:
    with Opened(browser, pages[name], width) as opened:
        assert opened.ask("document.documentElement.scrollWidth") <= width
        assert opened.ask(WIDER) == []
        if name == "suite":
            assert opened.ask("(e => e.scrollWidth <= e.clientWidth)(document.querySelector('.verdicts').parentNode)")
        assert opened.troubles == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_both_schemes(browser: Any, pages: dict[str, Path], scheme: str) -> None:
    with Opened(browser, pages["suite"], 390, scheme) as opened:
        for selector in ("h1", ".muted", "caption", ".verdict", "a[href='#ladder']"):
            assert opened.page.evaluate(CONTRAST, selector) >= 4.5, (scheme, selector)
        dark = opened.ask("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
        assert dark == (scheme == "dark")


def test_the_first_screen_of_a_phone_holds_a_verdict(browser: Any, pages: dict[str, Path]) -> None:
    with Opened(browser, pages["suite"], 390) as opened:
        box = opened.page.locator("table.verdicts .verdict").first.bounding_box()
        assert box["y"] + box["height"] < 844
        # As a block of lines, the verdict still is a table to a screen reader.
        assert opened.page.get_by_role("table", name="Verdict of each contrast").count() == 1
        assert opened.page.get_by_role("rowheader").count() >= 6


def test_on_paper_nothing_is_cut_and_folded_parts_are_open(browser: Any, pages: dict[str, Path]) -> None:
    with Opened(browser, pages["suite"], 780, "dark") as opened:
        opened.page.emulate_media(media="print")
        assert opened.ask("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert opened.ask("document.documentElement.scrollWidth") <= 780
        folded = "[...document.querySelectorAll('details td, details pre')].filter(e => !e.checkVisibility()).length"
        assert opened.ask(folded) == 0
        assert opened.page.pdf(format="A4").startswith(b"%PDF")


def test_the_keyboard_reaches_everything_in_reading_order(browser: Any, pages: dict[str, Path]) -> None:
    with Opened(browser, pages["suite"]) as opened:
        stops = len(opened.ask(f"{REACHABLE}.map(e => 1)"))
        seen = []
        for _ in range(stops):
            opened.page.keyboard.press("Tab")
            seen.append(
                opened.ask(
                    "(e => [[...document.querySelectorAll('*')].indexOf(e), getComputedStyle(e).outlineStyle,"
                    " e.getAttribute('aria-label') || e.textContent.trim()])(document.activeElement)"
                )
            )
        places = [place for place, _, _ in seen]
        assert places == sorted(set(places)), "the order of Tab is that of the page, and nothing traps it"
        assert all(style != "none" and label for _, style, label in seen), "each stop is seen and has a name"
        assert seen[0][2] == "Skip to the plots"


def test_figures_and_landmarks_have_names(browser: Any, pages: dict[str, Path]) -> None:
    with Opened(browser, pages["hostile"]) as opened:
        unnamed = "[...document.querySelectorAll('svg[role=img]')].filter(e => !e.getAttribute('aria-labelledby')"
        unnamed += ".split(' ').every(id => document.getElementById(id)?.textContent.trim())).length"
        assert opened.ask("document.querySelectorAll('svg[role=img]').length") > 5 and opened.ask(unnamed) == 0
        assert opened.page.get_by_role("main").count() == 1 == opened.page.get_by_role("navigation").count()
        assert opened.ask("document.documentElement.lang") == "en"
        assert opened.ask("document.querySelectorAll('h1').length") == 1
        broken = (
            "[...document.querySelectorAll('a[href^=\"#\"]')].filter(a => !document.getElementById(a.hash.slice(1)))"
        )
        assert opened.ask(f"{broken}.length") == 0
        assert 'a "model", of many, names' in opened.page.inner_text("h1")
