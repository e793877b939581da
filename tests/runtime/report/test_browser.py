"""The page in a real browser, opened as a file: it loads nothing else, logs no errors, and its controls work."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.runtime.report.page import schedule_html
from penstock.runtime.report.write import write_report

from .runs import Made

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@dataclass
class Opened:
    """A page with its requests and console messages."""

    page: "Page"
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


def opened(browser: "Browser", path: Path, **context: Any) -> Opened:
    page = browser.new_page(viewport={"width": 1200, "height": 900}, **context)
    page.set_default_timeout(120_000)
    found = Opened(page)
    page.on("request", lambda request: found.requests.append(request.url))
    page.on("console", lambda message: found.complaints.append(message.text))
    page.on("pageerror", lambda error: found.complaints.append(str(error)))
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready]")
    return found


@pytest.fixture(scope="module")
def file(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_report(made.folder, path, limit_s=60.0)  # enough for the whole table on any machine
    return path


@pytest.fixture(scope="module")
def shown(browser: "Browser", file: Path) -> Iterator[Opened]:
    found = opened(browser, file)
    yield found
    found.page.close()


@pytest.fixture
def page(shown: Opened) -> "Page":
    """The shared page, reset between tests."""
    shown.page.keyboard.press("Escape")
    shown.page.mouse.move(0, 0)
    shown.page.click("button[data-do=train]")
    return shown.page


VIEW = "document.querySelector('.schedule').view"


def seen(page: "Page") -> tuple[float, float]:
    """The time range that the schedule shows, in microseconds."""
    begin, end = page.evaluate(f"[{VIEW}.from, {VIEW}.to]")
    return begin, end


def span(page: "Page") -> float:
    return seen(page)[1] - seen(page)[0]


def bar_of(page: "Page", lane: str, node: str, side: str = "real") -> Any:
    """Return a bar of a node in a lane, to hover over."""
    return page.evaluate_handle(
        """([lane, node, side]) => {
            const view = document.querySelector('.schedule').view;
            const number = view.strips.findIndex(s => s.row.name === lane && s.side === side);
            const all = view.strips[number].main;
            return [...document.querySelectorAll(`[data-bar^="${number}.m."]`)].find(bar => {
                const b = +bar.dataset.bar.split('.')[2];
                return view.data.names[all.n[b]][0] === node && bar.getBoundingClientRect().width > 3;
            });
        }""",
        [lane, node, side],
    ).as_element()


def test_it_loads_nothing_but_itself_and_complains_of_nothing(shown: Opened, file: Path) -> None:
    assert shown.requests == [file.as_uri()]
    assert shown.complaints == []


def test_the_verdict_is_the_first_thing_said(page: "Page") -> None:
    assert all(part in page.inner_text("#verdict") for part in ("bounds this run", "prediction error"))


def test_the_sums_of_each_rank_add_up_to_the_wall_time(page: "Page") -> None:
    rows = page.eval_on_selector_all(
        "table.idle tr[data-wall]",
        """rows => rows.map(row =>
            [row.dataset.wall, [...row.querySelectorAll('td[data-ns]')].map(td => td.dataset.ns)])""",
    )
    assert len(rows) == 12  # six ranks, while training and in total
    assert all(int(wall) == sum(int(ns) for ns in parts) and int(wall) > 0 for wall, parts in rows)


def test_nodes_are_told_apart_by_hatchings_where_colours_are_used_up(browser: "Browser", file: Path) -> None:
    page = opened(browser, file).page
    looks = page.evaluate(
        f"""() => {{
            const view = {VIEW};
            const more = Array.from({{length: 24}}, (_, i) => [`more_${{i}}`, "group"]);
            view.take({{...view.data, names: [...view.data.names, ...more]}});
            return [...view.root.querySelectorAll(".legend li")]
                .filter(item => item.textContent.startsWith("more_"))
                .map(item => getComputedStyle(item.firstChild))
                .map(style => style.backgroundColor + style.backgroundImage + style.backgroundSize);
        }}"""
    )
    page.close()
    assert len(looks) == len(set(looks)) == 24


def test_there_is_a_lane_for_every_rank_real_and_predicted(page: "Page") -> None:
    names = page.eval_on_selector_all(".chart text.lane", "texts => texts.map(text => text.textContent)")
    assert names == ["generator/0 rank 0", "generator/0 rank 1", "generator/1 rank 0", "generator/1 rank 1",
                     "scorer/0", "trainer/0"]  # fmt: skip
    assert page.locator(".chart text.side").count() == 6
    page.uncheck("input[data-do=predicted]")
    assert page.locator(".chart text.side").count() == 0
    page.check("input[data-do=predicted]")


def test_the_lanes_of_a_pool_are_as_high_as_the_firings_it_may_have_in_work(page: "Page") -> None:
    """This holds for all ranks, real and predicted, whatever the run used."""
    heights = page.evaluate(f"() => {VIEW}.strips.map(s => [s.row.pool, s.row.room, s.height])")
    # 256 slots by default; a group has four samples, and two more groups wait for slots.
    assert {tuple(row) for row in heights if row[0] == "generator"} == {("generator", 256 // 4 + 2, 84)}
    assert {row[1] for row in heights if row[0] != "generator"} == {1}


def test_buttons_wheel_and_keys_zoom(page: "Page") -> None:
    whole, width = seen(page), span(page)
    page.click("button[data-do=in]")
    assert span(page) == pytest.approx(width / 2)
    page.click("button[data-do=out]")
    assert seen(page) == pytest.approx(whole)
    page.hover(".chart", position={"x": 700, "y": 60})
    page.mouse.wheel(0, -300)
    page.wait_for_function(f"span => {VIEW}.to - {VIEW}.from < span", arg=0.9 * width)
    wheeled = span(page)
    page.focus(".chart")
    page.keyboard.press("+")
    assert span(page) == pytest.approx(wheeled / 2)
    page.keyboard.press("-")
    page.keyboard.press("0")
    assert seen(page)[0] == 0


def test_dragging_and_keys_pan(page: "Page") -> None:
    page.click("button[data-do=in]")
    begin, width = seen(page)[0], span(page)
    box = page.locator(".chart").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 600, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + 500, box["y"] + 20, steps=4)
    page.mouse.up()
    moved = seen(page)[0]
    assert moved > begin
    assert span(page) == pytest.approx(width)
    page.focus(".chart")
    page.keyboard.press("PageUp")
    assert seen(page)[0] < moved


def test_a_bar_says_its_node_group_version_and_cause_on_hover(page: "Page") -> None:
    bar_of(page, "generator/0 rank 0", "fake_generate").hover()
    said = page.inner_text(".tip")
    parts = ("fake_generate[", "generator/0 rank 0", "group ", "weights of version ", "started when ", "predicted: ")
    assert [part for part in parts if part not in said] == []
    page.mouse.move(0, 0)
    assert page.locator(".tip").is_hidden()


def test_a_bar_says_the_same_on_keyboard_focus(page: "Page") -> None:
    page.focus(".chart")
    page.keyboard.press("ArrowRight")
    first = page.inner_text(".selected")
    assert all(part in first for part in ("fake_generate[", "weights of version", "started when"))
    page.keyboard.press("ArrowRight")
    assert page.inner_text(".selected") != first
    for _ in range(30):
        page.keyboard.press("ArrowDown")
    assert "trainer/0" in page.inner_text(".selected")
    assert page.locator(".chart .ring").count() == 1


def test_keys_zoom_about_the_chosen_bar_and_say_nothing_of_one_out_of_sight(page: "Page") -> None:
    page.focus(".chart")
    page.keyboard.press("ArrowRight")
    inside = f"() => {{ const v = {VIEW}, {{all, b}} = v.selected; return all.e[b] > v.from && all.s[b] < v.to; }}"
    for key, times, sees in (("+", 6, True), ("PageDown", 8, False)):
        for _ in range(times):
            page.keyboard.press(key)
        assert page.evaluate(inside) == page.locator(".tip").is_visible() == sees


def test_rollouts_are_striped_where_newer_weights_went_live(page: "Page") -> None:
    pieces = page.evaluate(
        """view => view.strips.filter(s => s.side === 'real' && s.swaps.length).flatMap(s => s.main.s.map((start, b) =>
            [view.stripes(s, b, 1, view.x(start), view.x(s.main.e[b]) - view.x(start)),
             s.swaps.filter(([t]) => t > start && t < s.main.e[b]).length]))""",
        page.evaluate_handle(VIEW),
    )
    assert all(len(stripes) == 1 + swaps for stripes, swaps in pieces)
    assert any(swaps for _, swaps in pieces)


def test_syncs_are_split_into_pause_wire_and_apply(page: "Page") -> None:
    for kind in ("publish", "send", "swap"):
        assert page.locator(f".chart rect.{kind}").count() > 0
    legend = page.inner_text(".legend")
    assert all(word in legend for word in ("pause", "wire", "apply"))


def test_the_sliders_answer_from_the_table(page: "Page") -> None:
    before = page.inner_text("output.answer")
    assert "the lag and replicas of the run" in before
    page.focus("input[name=lag]")
    page.keyboard.press("Home")
    after, cell = page.inner_text("output.answer").split(), page.inner_text("td.chosen").split()
    assert after != before.split()
    assert page.get_attribute("td.chosen", "data-case") == "0.2"
    assert float(after[0]) == float(cell[0])
    assert after[1] == cell[1]


def test_charts_can_be_read_off_with_the_keys_and_have_tables(page: "Page") -> None:
    page.focus("#learning figure svg >> nth=1")
    page.keyboard.press("End")
    assert "update 7: " in page.inner_text("#learning figure:nth-of-type(2) .reading")
    for figure in page.locator("figure").all():
        assert figure.locator("details table").count() == 1
        assert figure.locator("svg").get_attribute("aria-label")


def test_everything_that_can_be_used_has_a_name(page: "Page") -> None:
    for element in page.locator("button, input, [role=application], svg[role=img], .stack").all():
        named = element.evaluate(
            """e => e.getAttribute('aria-label') || e.textContent.trim() ||
                (e.labels && e.labels.length && e.labels[0].textContent)"""
        )
        assert named
    headings = page.eval_on_selector_all("h1,h2,h3", "hs => hs.map(h => +h.tagName[1])")
    assert headings[0] == 1
    assert all(later - earlier <= 1 for earlier, later in pairwise(headings))


def contrast(page: "Page", selector: str) -> float:
    """WCAG's contrast of a text with the nearest background behind it."""
    return float(
        page.eval_on_selector(
            selector,
            """e => {
                const parse = c => c.match(/[\\d.]+/g).map(Number);
                const light = c => { const [r, g, b] = parse(c).map(v => { v /= 255; return v <= 0.03928 ? v / 12.92 :
                    ((v + 0.055) / 1.055) ** 2.4; }); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
                let under = e;
                while (parse(getComputedStyle(under).backgroundColor)[3] === 0) under = under.parentElement;
                const [a, b] = [light(getComputedStyle(e).color), light(getComputedStyle(under).backgroundColor)];
                return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
            }""",
        )
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_themes_are_drawn_and_their_text_can_be_read(browser: "Browser", file: Path, scheme: str) -> None:
    found = opened(browser, file, color_scheme=scheme)
    page = found.page
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(int(v) for v in background[4:-1].split(",")) > 380) == (scheme == "light")
    for selector in ("#verdict", ".soft", "td", "thead th", ".reading", "summary", "footer p", "td.zero"):
        assert contrast(page, selector) >= 4.5, selector
    assert found.complaints == []
    page.close()


def test_nothing_is_wider_than_a_narrow_window(browser: "Browser", file: Path) -> None:
    found = opened(browser, file)
    found.page.set_viewport_size({"width": 390, "height": 800})
    found.page.wait_for_function("document.querySelector('.chart svg').viewBox.baseVal.width < 400")
    assert found.page.evaluate("document.documentElement.scrollWidth") <= 390
    found.page.close()


def test_it_prints_with_its_pictures_and_without_its_buttons(browser: "Browser", file: Path, tmp_path: Path) -> None:
    found = opened(browser, file, color_scheme="dark")
    page = found.page
    page.emulate_media(media="print")
    ground = page.evaluate("getComputedStyle(document.querySelector('section')).backgroundColor")
    assert ground == "rgb(255, 255, 255)"
    assert page.locator(".toolbar button").first.is_hidden()
    assert page.locator(".chart > svg").is_visible()
    page.set_viewport_size({"width": 688, "height": 1000})  # A4 minus margins
    assert page.evaluate("document.documentElement.scrollWidth") <= 688
    page.pdf(path=tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").stat().st_size > 20_000
    assert found.complaints == []
    page.close()


def test_a_schedule_alone_is_a_page_of_the_same_kind(browser: "Browser", made: Made, tmp_path: Path) -> None:
    path = tmp_path / "schedule.html"
    path.write_text(schedule_html(made.simulation.bars, "toy <b> & more"))
    found = opened(browser, path)
    assert (found.requests, found.complaints) == ([path.as_uri()], [])
    assert found.page.inner_text("h1") == "toy <b> & more"
    assert found.page.locator(".chart text.lane").count() == 4
    bar_of(found.page, "generator/0", "fake_generate").hover()
    assert "fake_generate[" in found.page.inner_text(".tip")
    found.page.close()
