"""The page in a real browser by keyboard and by touch, with names and contrast for all readers."""

import numpy as np
import pytest
from browser import AUDIT, NEEDS, SIZE, Tab

pytest_plugins = "page_data"
pytestmark = NEEDS


def test_everything_works_from_the_keyboard(opened):
    page = opened.page
    page.focus('[data-pane="0"] canvas')
    page.keyboard.press("ArrowRight")
    first = opened.state()["hover"]
    page.keyboard.press("Shift+ArrowRight")
    assert opened.state()["hover"]["x"] == first["x"] + 1
    for _ in range(40):
        if opened.state()["hover"]["other"]:
            break
        page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert len(opened.state()["kept"]) == 1
    assert "image 1" in page.locator("#live").inner_text() or "kept" in page.locator("#live").inner_text()
    page.keyboard.press("+")
    assert opened.state()["views"][0]["scale"] > opened.state()["views"][0]["size"][0] / SIZE[0]
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#help").is_visible()
    for key, mode in {"s": "swipe", "b": "blend", "d": "difference", "m": "matches"}.items():
        page.keyboard.press(key)
        assert opened.state()["mode"] == mode
    page.keyboard.press("l")
    assert opened.state()["show"]["lines"] is False
    # Tab reaches every control: none of them is outside the order.
    page.evaluate("document.activeElement.blur()")
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.dataset.format || ''"))
    assert {"theme", "quality", "min-score", "count", "kind", "npz", "png", "zoom-in"} <= reached


def test_the_focus_and_the_announcements_follow_the_keyboard(tab, paths):
    page, focused = tab.page, "(document.activeElement.ariaLabel ?? document.activeElement.id)"
    # Playwright intercepts dialogs while there is a listener. It does not wait until a new one is in effect.
    page.on("filechooser", lambda _: None)

    def tab_to(test: str) -> None:
        for _ in range(60):
            page.keyboard.press("Tab")
            if page.evaluate(f"document.activeElement.matches({test!r})"):
                return
        raise AssertionError(test)

    for image, path in enumerate(paths):
        tab_to(f'[aria-label="Choose image {image}"]')
        with page.expect_file_chooser() as dialog:
            page.keyboard.press("Enter")
        dialog.value.set_files(path)
        tab.until(f"dualrcState().images[{image}]?.id")
        # The buttons of the slot are replaced, but the next press of Tab goes on from there.
        assert page.evaluate(focused) == ("Replace image 0" if image == 0 else "main")
    tab.ready()
    live = page.locator("#live")
    tab_to("[data-pane] canvas")
    for _ in range(40):
        page.keyboard.press("ArrowDown")
        if tab.state()["hover"]["other"]:
            break
    assert "image 1" in live.inner_text()
    page.keyboard.press("Enter")
    assert live.inner_text() == "1 point kept"
    tab_to("#kind")
    page.keyboard.press("h")
    tab.until("dualrcState().estimate !== null")
    assert "inliers" in live.inner_text()
    tab_to("#kept-clear")
    page.keyboard.press("Enter")
    assert tab.state()["kept"] == []


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_controls_have_names_and_text_has_contrast(browser, server, link, theme, width):
    for url in (server.url, link):
        tab = Tab(browser, url, color_scheme=theme, viewport={"width": width, "height": 844})
        if url is link:
            tab.ready()
            tab.page.select_option("#kind", "fundamental")
            tab.until("dualrcState().estimate !== null")
        assert tab.page.evaluate(AUDIT) == []
        names = tab.names()
        assert len(names) > 8
        assert [entry for entry in names if not entry[1]] == []
        if width > 1000:
            tab.page.keyboard.press("?")
            assert tab.page.evaluate(AUDIT) == []
        assert tab.errors == []
        tab.close()


def _center(tab: Tab, pane: str) -> tuple[float, float]:
    box = tab.page.locator(f'[data-pane="{pane}"] canvas').bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def _pinch(tab: Tab, center: tuple[float, float], before: float, after: float) -> None:
    """Move two fingers on a horizontal line from `before` to `after` pixels from the center."""
    x, y = center
    tab.touch(*[((x + side * before, y), (x + side * after, y)) for side in (-1, 1)])


def test_a_tap_keeps_a_point_and_a_finger_shows_the_lens(phone):
    places = [(x, y) for x in range(60, 440, 40) for y in (120, 200, 280)]
    for place in places:
        phone.touch((phone.place(0, *place),) * 2)
        if phone.state()["kept"]:
            break
    kept = phone.state()["kept"][0]
    assert abs(kept["x0"] - place[0]) < 2 and abs(kept["y0"] - place[1]) < 2
    # The lens follows the finger. The page does not scroll, and a drag is not a tap.
    phone.page.evaluate("""() => {
        const seen = (window.seen = []), original = requestAnimationFrame;
        const step = () => { const { hover } = dualrcState(); if (hover) seen.push(hover); original(step); };
        step();
    }""")
    scroll = phone.page.evaluate("scrollY")
    start, end = phone.place(0, 100, 80), phone.place(0, 380, 300)
    phone.touch((start, end), steps=20)
    seen = phone.page.evaluate("seen")
    assert {point["how"] for point in seen} == {"touch"}
    assert seen[0]["x"] < 200 and seen[-1]["x"] > 300 and any(point["other"] for point in seen)
    assert phone.state()["hover"] is None and len(phone.state()["kept"]) == 1
    assert phone.page.evaluate("scrollY") == scroll


def test_two_fingers_zoom_and_move_both_images(phone):
    fitted = phone.state()["views"]
    x, y = _center(phone, "0")
    box = phone.page.locator('[data-pane="0"] canvas').bounding_box()
    point = [((value - box[axis] - fitted[0][axis]) / fitted[0]["scale"] - 0.5) for axis, value in (("x", x), ("y", y))]
    _pinch(phone, (x, y), 20, 80)
    zoomed = phone.state()["views"]
    assert zoomed[0]["scale"] == pytest.approx(4 * fitted[0]["scale"], rel=0.02)
    assert zoomed[1]["scale"] == pytest.approx(4 * fitted[1]["scale"], rel=0.02)
    # The point between the fingers stays between them.
    assert np.allclose(phone.place(0, *point), (x, y), atol=2)
    phone.touch(((x - 40, y), (x + 10, y + 20)), ((x + 40, y), (x + 90, y + 20)))
    moved = phone.state()["views"]
    assert moved[0]["scale"] == pytest.approx(zoomed[0]["scale"], rel=0.02)
    assert abs(moved[0]["x"] - zoomed[0]["x"] - 50) <= 3 and abs(moved[0]["y"] - zoomed[0]["y"] - 20) <= 3
    assert moved[1]["x"] != zoomed[1]["x"]
    _pinch(phone, (x, y), 90, 10)
    assert phone.state()["views"][0]["scale"] == pytest.approx(fitted[0]["scale"], rel=0.01)
    assert phone.state()["kept"] == [] and phone.state()["hover"] is None


def test_fingers_move_the_swipe_handle_and_the_aligned_images(phone):
    phone.page.check("input[value=swipe]", force=True)
    phone.until("dualrcState().times.compared")
    x, y = _center(phone, "compare")
    phone.touch(((x, y), (x + 60, y)))
    amount = phone.state()["amount"]
    assert amount > 60
    _pinch(phone, (x, y), 20, 60)
    zoomed = phone.state()["views"][2]
    assert zoomed["scale"] == pytest.approx(3 * min(zoomed["size"][0] / SIZE[0], zoomed["size"][1] / SIZE[1]), rel=0.05)
    assert phone.state()["amount"] == amount
    phone.page.check("input[value=blend]", force=True)
    phone.until("dualrcState().mode === 'blend'")
    phone.touch(((x, y), (x + 30, y + 10)))
    panned = phone.state()["views"][2]
    assert abs(panned["x"] - zoomed["x"] - 30) <= 5 and panned["scale"] == zoomed["scale"]


def test_the_theme_can_be_chosen(tab):
    color = "getComputedStyle(document.body).backgroundColor"
    light = tab.page.evaluate(color)
    tab.page.click("#theme")
    assert tab.page.evaluate(color) == light
    tab.page.click("#theme")
    assert tab.page.locator("#theme").get_attribute("aria-label") == "Theme: dark"
    dark = tab.page.evaluate(color)
    assert dark != light
    tab.page.reload()
    tab.page.wait_for_selector("html[data-ready]", state="attached")
    assert tab.page.locator("#theme").get_attribute("aria-label") == "Theme: dark"
    assert tab.page.evaluate(color) == dark
