"""The page in a real browser, on a real `dualrc serve`."""

import base64
import importlib.util
import io
import json
import re
import shlex
import sqlite3
import statistics
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from browser import AUDIT, Server, Tab, chromium, executable
from PIL import Image

from dualrc.matches import Matches
from dualrc.scenes import ScenePair, correspond, make_pair


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


pytestmark = [
    pytest.mark.skipif(not _has("playwright"), reason="needs playwright: pip install playwright"),
    pytest.mark.skipif(executable() is None, reason="needs Chromium: apt-get install chromium"),
    pytest.mark.skipif(not _has("fastapi"), reason="needs the extra web: pip install dualrc[web]"),
]
SIZE = (480, 360)
EXPIRED = {"error": "This result is unknown or has expired; match the images again.", "code": "unknown_id"}
TOKEN = "a-token-of-the-tests"


@pytest.fixture(scope="module")
def pair() -> ScenePair:
    """Two views of a rendered scene."""
    return make_pair(1, size=SIZE, angle_deg=12, light_change=0.3)


@pytest.fixture(scope="module")
def paths(pair, tmp_path_factory) -> tuple[Path, Path]:
    """The two views as files."""
    folder = tmp_path_factory.mktemp("page")
    files = folder / "first view.png", folder / "second.png"
    for rendering, path in zip(pair, files, strict=True):
        Image.fromarray(rendering.image.numpy()).save(path)
    return files


@pytest.fixture(scope="module")
def server():
    made = Server()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield opened


@pytest.fixture
def tab(browser, server):
    """An empty page; nothing may be reported on its console."""
    made = Tab(browser, server.url)
    yield made
    made.close()
    assert made.errors == []


@pytest.fixture(scope="module")
def link(browser, server, paths) -> str:
    """The address of a finished result, made by choosing two files."""
    made = Tab(browser, server.url)
    made.choose(*paths)
    url = made.page.url
    made.close()
    return url


@pytest.fixture
def opened(browser, link):
    """A page that shows the finished result."""
    made = Tab(browser, link)
    made.ready()
    yield made
    made.close()
    assert made.errors == []


def test_files_chosen_in_dialogs_are_matched(tab, paths, capsys):
    tab.choose(*paths)
    state = tab.state()
    assert [image["name"] for image in state["images"]] == [path.name for path in paths]
    assert [(image["width"], image["height"]) for image in state["images"]] == [SIZE, SIZE]
    assert state["count"] > 500 and 0 < state["visible"] <= state["count"]
    assert tab.page.locator("#verdict").inner_text() == "The same place"
    facts = tab.page.locator("#facts").inner_text()
    assert "s on cpu" in facts or "s on cuda" in facts
    assert "first view.png" in tab.page.locator("#command-shell").inner_text()
    assert "match(" in tab.page.locator("#command-python").inner_text()
    with capsys.disabled():
        print(
            f"\n  {SIZE[0]}x{SIZE[1]}: {state['times']['drawn'] - state['times']['given']:.0f} ms from files to matches"
        )


def test_two_dropped_images_are_matched(tab, paths, tmp_path, capsys):
    large = [tmp_path / path.name for path in paths]
    for path, new in zip(paths, large, strict=True):
        Image.open(path).resize((1200, 900)).save(new)
    tab.drop("#intro", *large)
    tab.until("dualrcState().times.drawn")
    state = tab.state()
    assert state["count"] > 500
    with capsys.disabled():
        total = state["times"]["drawn"] - state["times"]["given"]
        print(
            f"\n  1200x900: {total:.0f} ms from drop to drawn matches, {1000 * state['seconds']:.0f} of them matching"
        )


def test_names_are_shown_and_quoted_as_they_are(tab, paths, tmp_path):
    names = 'it\'s "a" <i>view $HOME.png', "-\u5199\u771f \u00fc.png"
    files = [tmp_path / name for name in names]
    for path, new in zip(paths, files, strict=True):
        new.write_bytes(path.read_bytes())
    tab.drop("#intro", *files)
    tab.ready()
    assert [image["name"] for image in tab.state()["images"]] == list(names)
    assert tab.page.locator(".tag i").count() == 0 and names[0] in tab.page.locator(".tag span").first.inner_text()
    words = shlex.split(tab.page.locator("#command-shell").inner_text())
    assert words[:4] == ["dualrc", "match", names[0], "./" + names[1]]
    assert repr(names[0]) in tab.page.locator("#command-python").inner_text()
    compile(tab.page.locator("#command-python").inner_text(), "page", "exec")


def test_a_page_that_is_left_cancels_its_match(tab, server, paths, tmp_path):
    def cancelled() -> int:
        text = tab.page.request.get(server.url + "metrics").text()
        return int(re.search(r'jobs_total{outcome="cancelled"} (\d+)', text)[1])

    before = cancelled()
    # The search goes on for long if nothing matches.
    noise = np.random.default_rng(0).integers(0, 256, (360, 480, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")
    tab.page.evaluate("document.getElementById('quality').value = 'search'")
    tab.drop("#intro", paths[0], tmp_path / "noise.png")
    tab.until("/step \\d+/.test(document.getElementById('busy-text').textContent)")
    assert tab.page.locator("#busy-progress").get_attribute("value") is None
    assert all(button.is_disabled() for button in tab.page.locator("[data-format], [data-copy]").all())
    assert not tab.page.locator("#match-count").is_visible()
    tab.page.reload()
    tab.page.wait_for_selector("html[data-ready]", state="attached")
    for _ in range(500):
        if cancelled() > before:
            break
        tab.page.wait_for_timeout(20)
    assert cancelled() == before + 1 and tab.state()["phase"] == "empty"


def test_a_pasted_image_takes_the_first_free_place(tab, paths):
    data = base64.b64encode(paths[0].read_bytes()).decode()
    tab.page.evaluate(
        """(data) => {
            const clipboardData = new DataTransfer();
            const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
            clipboardData.items.add(new File([bytes], "pasted.png", { type: "image/png" }));
            dispatchEvent(new ClipboardEvent("paste", { clipboardData, bubbles: true, cancelable: true }));
        }""",
        data,
    )
    tab.until("dualrcState().images[0]?.id")
    assert tab.state()["images"][0]["name"] == "pasted.png" and tab.state()["images"][1] is None


def test_a_photograph_of_the_camera_is_an_image(tab):
    page = tab.page
    page.get_by_role("button", name="Photograph image 1").click()
    page.get_by_role("button", name="Take").click()
    tab.until("dualrcState().images[1]?.id")
    image = tab.state()["images"][1]
    assert image["name"] == "photograph-1.jpg" and image["width"] >= 320 and tab.state()["images"][0] is None
    # The camera is switched off, also when nothing is taken.
    page.get_by_role("button", name="Photograph image 0").click()
    page.wait_for_selector("#camera[open]")
    page.evaluate("window.tracks = document.querySelector('#camera video').srcObject.getTracks()")
    page.keyboard.press("Escape")
    tab.until("window.tracks.length > 0 && window.tracks.every((track) => track.readyState === 'ended')")
    assert tab.state()["images"][0] is None
    refuse = "async () => { throw new DOMException('', 'NotAllowedError'); }"
    page.evaluate(f"void (navigator.mediaDevices.getUserMedia = {refuse})")
    page.get_by_role("button", name="Photograph image 0").click()
    assert "allow it for this page" in page.locator(".message.bad").inner_text()


def test_one_dropped_image_goes_where_it_was_dropped(tab, paths):
    tab.drop('.slot[data-slot="1"]', paths[1])
    tab.until("dualrcState().images[1]?.id")
    assert tab.state()["images"][0] is None
    tab.drop('.slot[data-slot="0"]', paths[0])
    tab.until("dualrcState().phase === 'ready'")


@pytest.mark.parametrize("image", [0, 1])
def test_the_magnified_place_is_where_the_point_truly_is(opened, pair, image):
    renderings = pair if image == 0 else pair[::-1]
    grid = np.stack(np.meshgrid(np.linspace(40, 440, 8), np.linspace(60, 320, 6)), axis=-1).reshape(-1, 2).round()
    errors = []
    for point in grid:
        hover = opened.hover(image, *point)
        if hover is None or hover["other"] is None or hover["other"]["certainty"] < 0.9:
            continue
        asked = np.array([hover["x"], hover["y"]])
        assert np.abs(asked - point).max() < 1.5  # a screen pixel is more than an image pixel here
        truth = correspond(*renderings, asked).points1.numpy()
        lens = next(lens for lens in opened.state()["marks"]["lenses"] if lens["image"] != image)
        errors.append(float(np.linalg.norm(truth - [lens["x"], lens["y"]])))
    assert len(errors) >= 5
    assert statistics.median(errors) < 1
    assert np.mean(np.array(errors) <= 2) >= 0.9, errors


def test_the_lens_shows_the_pixels_of_its_place(opened, paths):
    image, differences = np.asarray(Image.open(paths[0]), dtype=int), []
    script = """([x, y]) => {
        const canvas = document.querySelector(".marks"), box = canvas.getBoundingClientRect();
        const stage = document.getElementById("stage"), { left, top } = stage.getBoundingClientRect();
        const place = [x + left + stage.clientLeft - box.left, y + top + stage.clientTop - box.top];
        return [...canvas.getContext("2d").getImageData(...place, 1, 1).data];
    }"""
    for point in [(240, 180), (100, 220), (300, 90), (400, 300), (60, 310), (200, 140)]:
        opened.hover(0, *point)
        lens = opened.state()["marks"]["lenses"][0]
        box = lens["box"]
        drawn = opened.page.evaluate(script, [box["x"] + box["size"] / 2, box["y"] + box["size"] / 2])
        differences.append(np.abs(np.array(drawn[:3]) - image[round(lens["y"]), round(lens["x"])]).max())
        assert lens["scale"] >= 8
    # The page shows a JPEG of a stored image.
    assert np.median(differences) <= 10, differences


@pytest.mark.parametrize(("width", "height", "words"), [(1280, 860, True), (390, 844, False)])
def test_the_label_of_a_lens_fits_and_nothing_is_certain(browser, link, width, height, words):
    tab = Tab(browser, link, viewport={"width": width, "height": height})
    tab.ready()
    measure = "(text) => { const c = new OffscreenCanvas(1, 1).getContext('2d'); c.font = '600 12px system-ui';"
    labels = []
    for point in [(240, 180), (100, 220), (300, 90), (400, 300), (60, 310), (200, 140)]:
        tab.hover(0, *point)
        for lens in tab.state()["marks"]["lenses"]:
            assert (
                tab.page.evaluate(measure + " return c.measureText(text).width; }", lens["text"])
                < lens["box"]["size"] - 16
            )
            labels += [lens["text"]] if lens["image"] == 1 else []
    assert len(labels) >= 3 and all(label.endswith("% certain" if words else "%") for label in labels)
    assert not any(label.startswith("100") for label in labels)
    tab.close()


# Fires an event of the mouse in each of 120 frames, and returns the times between the frames.
_FRAMES = """(act) => new Promise((done) => {
    const canvas = document.querySelector('[data-pane="0"] canvas'), box = canvas.getBoundingClientRect(), times = [];
    const pointer = (type, x, y, buttons) => canvas.dispatchEvent(new PointerEvent(type, {
        pointerId: 1, pointerType: "mouse", buttons, clientX: box.x + x * box.width, clientY: box.y + y * box.height,
    }));
    const acts = {
        hover: (n) => pointer("pointermove", 0.2 + 0.005 * n, 0.5, 0),
        pan: (n) => pointer("pointermove", 0.5 + 0.3 * Math.sin(n / 15), 0.5 + 0.3 * Math.cos(n / 11), 1),
        zoom: (n) => canvas.dispatchEvent(new WheelEvent("wheel", {
            deltaY: n < 60 ? -40 : 40, cancelable: true,
            clientX: box.x + 0.4 * box.width, clientY: box.y + 0.5 * box.height,
        })),
    };
    canvas.setPointerCapture = () => {};
    if (act === "pan") pointer("pointerdown", 0.5, 0.8, 1);
    let last = performance.now(), n = 0;
    const step = (now) => {
        times.push(now - last);
        last = now;
        acts[act](n);
        if (n++ < 120) return requestAnimationFrame(step);
        if (act === "pan") pointer("pointerup", 0.5, 0.8, 0);
        done(times.slice(2));
    };
    requestAnimationFrame(step);
})"""


def _rates(frames: np.ndarray) -> str:
    return f"{1000 / frames.mean():.0f} frames/s, 95 % within {np.percentile(frames, 95):.1f} ms"


def test_hovering_is_fast(opened, capsys):
    frames = np.array(opened.page.evaluate(_FRAMES, "hover"))
    drawing = np.array(opened.state()["frames"][-100:])
    assert len(drawing) == 100
    with capsys.disabled():
        print(
            f"\n  hover: {_rates(frames)};"
            f" drawing {np.median(drawing):.2f} ms, 95 % within {np.percentile(drawing, 95):.2f} ms"
        )


# Notes for each drawing of an image how wide its bitmap is, and how many pixels are read and covered.
_WATCH_DRAWING = """() => {
    const draw = CanvasRenderingContext2D.prototype.drawImage;
    window.drawn = [];
    CanvasRenderingContext2D.prototype.drawImage = function (source, ...box) {
        if (source instanceof ImageBitmap && box.length === 8)
            window.drawn.push({ width: source.width, read: box[2] * box[3], covered: box[6] * box[7] });
        return draw.call(this, source, ...box);
    };
}"""


def test_images_of_24_megapixels_are_drawn_from_smaller_copies(tab, paths, tmp_path, capsys):
    large = [tmp_path / f"{number}.jpg" for number in (0, 1)]
    for path, new in zip(paths, large, strict=True):
        Image.open(path).resize((6000, 4000)).save(new)
    tab.choose(*large)
    assert [view["scale"] < 0.2 for view in tab.state()["views"][:2]] == [True, True]
    tab.page.evaluate(_WATCH_DRAWING)
    # The smaller copies of the images are made in the background.
    tab.until("(dispatchEvent(new Event('resize')), window.drawn.filter(({ width }) => width === 750).length > 20)")
    tab.page.evaluate("window.drawn.length = 0")
    rates = {act: np.array(tab.page.evaluate(_FRAMES, act)) for act in ("hover", "zoom")}
    tab.page.focus('[data-pane="0"] canvas')
    for _ in range(3):
        tab.page.keyboard.press("+")
    before = tab.state()["views"][0]
    rates["pan"] = np.array(tab.page.evaluate(_FRAMES, "pan"))
    assert before["scale"] > 0.2 and tab.state()["views"][0]["x"] != before["x"]
    drawn = tab.page.evaluate("window.drawn")
    # A coarser copy would do if more than four pixels were read for a pixel of the screen.
    assert len(drawn) >= 100 and max(draw["read"] / draw["covered"] for draw in drawn) < 5
    assert {draw["width"] for draw in drawn} == {750, 1500, 3000, 6000}
    with capsys.disabled():
        print("\n  24 megapixels: " + "; ".join(f"{act} {_rates(frames)}" for act, frames in rates.items()))


def test_late_frames_are_drawn_with_fewer_pixels_until_the_image_rests(browser, link):
    tab = Tab(browser, link, device_scale_factor=2)
    tab.ready()
    widths = "[...document.querySelectorAll('[data-pane] canvas')].slice(0, 2).map((canvas) => canvas.width)"
    fine = tab.page.evaluate(widths)
    assert fine[0] == 2 * round(tab.state()["views"][0]["size"][0])
    tab.page.evaluate(_FRAMES, "hover")
    assert tab.page.evaluate(widths) == fine
    tab.page.evaluate("""() => {
        window.requestAnimationFrame = (run) => setTimeout(() => run(performance.now()), 40);
        window.cancelAnimationFrame = clearTimeout;
    }""")
    moved = tab.page.evaluate(_FRAMES.replace("120", "12").replace("done(times", f"done({widths}, times"), "zoom")
    # The other image moves with the first one.
    assert moved == [width / 2 for width in fine]
    tab.until(f"String({widths}) === '{fine[0]},{fine[1]}'")
    tab.close()


def test_sliders_refilter_without_a_request(opened):
    before, requests = opened.state(), len(opened.requests)
    opened.page.focus("#min-score")
    opened.page.keyboard.press("End")
    strict = opened.state()
    assert strict["visible"] < before["visible"] and strict["minVisibleScore"] >= strict["filter"]["minScore"] > 0.9
    opened.page.keyboard.press("Home")
    opened.page.focus("#count")
    opened.page.keyboard.press("End")
    everything = opened.state()
    assert everything["visible"] == everything["count"]
    opened.page.keyboard.press("Home")
    assert opened.state()["visible"] == 10
    assert opened.page.locator("#shown-count").inner_text() == "10 shown"
    assert len(opened.requests) == requests


def test_a_homography_is_fitted_once_and_filtered_here(opened):
    requests = len(opened.requests)
    with opened.page.expect_response("**/estimate") as answer:
        opened.page.select_option("#kind", "homography")
    told = answer.value.json()
    opened.until("dualrcState().estimate !== null")
    state = opened.state()
    assert np.allclose(state["estimate"]["matrix"], told["matrix"])
    # The page counts inliers by itself, at the threshold that the service used.
    assert abs(state["inliers"] - told["inlier_count"]) <= 0.02 * state["count"] + 2
    assert state["show"]["color"] == "inlier"
    opened.page.focus("#threshold")
    opened.page.keyboard.press("Home")
    assert opened.state()["inliers"] < state["inliers"]
    opened.page.check("#inliers-only")
    assert opened.state()["visible"] <= opened.state()["inliers"]
    assert len(opened.requests) == requests + 1
    opened.page.click("#re-estimate")
    opened.until("!document.getElementById('re-estimate').disabled")
    assert len(opened.requests) == requests + 2


@pytest.mark.parametrize("kind", ["fundamental", "essential"])
def test_the_epipolar_line_runs_through_the_true_place(opened, pair, kind):
    opened.page.select_option("#kind", kind)
    opened.until("dualrcState().estimate !== null")
    distances = []
    for point in [(100, 200), (240, 120), (300, 300), (380, 180)]:
        hover = opened.hover(0, *point)
        place = correspond(*pair, [hover["x"], hover["y"]])
        line = opened.state()["marks"]["line"]
        if bool(place.visible) and line is not None:
            (ax, ay), (bx, by) = line
            x, y = place.points1.tolist()
            distances.append(abs((bx - ax) * (y - ay) - (by - ay) * (x - ax)) / np.hypot(bx - ax, by - ay))
    assert len(distances) >= 2
    # An essential matrix has a guessed focal length here.
    assert statistics.median(distances) < (3 if kind == "fundamental" else 15), distances


def test_both_images_zoom_together_to_single_pixels(opened):
    # Whole pixels of the screen: a wheel event has no fractions.
    position = tuple(round(value) for value in opened.place(0, 240, 200))
    opened.page.mouse.move(*position)
    hover = opened.state()["hover"]
    for _ in range(14):
        opened.page.mouse.wheel(0, -240)
    opened.page.wait_for_timeout(100)
    views = opened.state()["views"]
    assert views[0]["scale"] >= 40 and views[1]["scale"] >= 40
    # The point stayed under the pointer, and the other image shows its counterpart.
    assert np.allclose(opened.place(0, hover["x"], hover["y"]), position, atol=1)
    shown = opened.state()["hover"]["other"]
    x, y = ((shown[axis] + 0.5) * views[1]["scale"] + views[1][axis] for axis in "xy")
    assert 0 <= x <= views[1]["size"][0] and 0 <= y <= views[1]["size"][1]
    opened.page.mouse.down()
    opened.page.mouse.move(position[0] + 50, position[1] + 30, steps=4)
    opened.page.mouse.up()
    moved = opened.state()["views"]
    assert abs(moved[0]["x"] - views[0]["x"] - 50) <= 5 and moved[1]["x"] != views[1]["x"]
    opened.page.click("#zoom-fit")
    assert opened.state()["views"][0]["scale"] < 3


def test_swipe_shows_one_image_beside_the_other(opened, paths):
    opened.page.check("input[value=swipe]", force=True)
    opened.until("dualrcState().times.compared")
    pane = opened.page.locator('[data-pane="compare"] canvas')
    box = pane.bounding_box()
    opened.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 50)
    opened.page.mouse.down()
    opened.page.mouse.move(box["x"] + box["width"] / 2 + 120, box["y"] + 60, steps=5)
    opened.page.mouse.up()
    amount = opened.state()["amount"]
    view = opened.state()["views"][2]
    assert abs(amount / 100 * SIZE[0] * view["scale"] + view["x"] - box["width"] / 2 - 120) <= 2
    opened.page.focus("#amount")
    opened.page.keyboard.press("ArrowRight")
    assert opened.state()["amount"] > amount
    # Left of the handle, the page shows image 0.
    x, y = 100, 200
    canvas = "document.querySelector('[data-pane=compare] canvas')"
    script = f"([x, y]) => [...{canvas}.getContext('2d').getImageData(x, y, 1, 1).data]"
    opened.page.wait_for_timeout(60)
    drawn = opened.page.evaluate(script, [(x + 0.5) * view["scale"] + view["x"], (y + 0.5) * view["scale"] + view["y"]])
    near = np.asarray(Image.open(paths[0]), dtype=int)[y - 1 : y + 2, x - 1 : x + 2].reshape(-1, 3)
    assert np.all(np.array(drawn[:3]) >= near.min(0) - 4) and np.all(np.array(drawn[:3]) <= near.max(0) + 4)


@pytest.mark.parametrize("mode", ["flicker", "blend", "difference", "panorama"])
def test_every_comparison_draws_something(opened, mode):
    opened.page.select_option("#kind", "homography")
    opened.until("dualrcState().estimate !== null")
    opened.page.check(f"input[value={mode}]", force=True)
    opened.until("dualrcState().times.compared")
    opened.page.wait_for_timeout(60)
    spread = opened.page.evaluate("""() => {
        const canvas = document.querySelector("[data-pane=compare] canvas");
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        return new Set(data.filter((_, i) => i % 404 === 0)).size;
    }""")
    assert spread > 20


def test_flicker_plays_pauses_and_switches(browser, link):
    tab = Tab(browser, link, reduced_motion="no-preference")
    tab.ready()
    page = tab.page
    page.check("input[value=flicker]", force=True)
    tab.until("dualrcState().times.compared")
    shown = "document.getElementById('compare-note').textContent.slice(0, 7)"
    for number in (0, 1, 0):
        tab.until(f"{shown} === 'Image {number}'")
    play, switch = page.locator("#flicker-toggle"), page.locator("#flicker-switch")
    assert play.inner_text() == "Pause"
    switch.click()
    assert play.inner_text() == "Play"

    def drawn() -> np.ndarray:
        page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        pixels = page.evaluate("""() => {
            const canvas = document.querySelector("[data-pane=compare] canvas");
            return [...canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data];
        }""")
        return np.array(pixels, dtype=int).reshape(-1, 4)

    pictures = {}
    for _ in range(2):
        pictures[page.evaluate(shown)] = drawn()
        switch.click()
    first, second = pictures["Image 0"], pictures["Image 1"]
    changed = (first != second).any(axis=1)
    assert 0.1 < changed.mean() < 0.98
    # Where image 1 has no pixels, image 0 stays.
    assert np.array_equal(first[:, 3] > 0, second[:, 3] > 0)
    play.click()
    now = page.evaluate(shown)
    tab.until(f"{shown} !== '{now}'")
    tab.close()
    # With reduced motion, nothing moves by itself.
    still = Tab(browser, link)
    still.ready()
    still.page.check("input[value=flicker]", force=True)
    still.until("dualrcState().times.compared")
    assert still.page.locator("#flicker-toggle").inner_text() == "Play"
    still.close()


def test_a_difference_can_be_made_brighter(opened):
    opened.page.check("input[value=difference]", force=True)
    opened.until("dualrcState().times.compared")

    def drawn(key: str) -> np.ndarray:
        opened.page.focus("#gain")
        opened.page.keyboard.press(key)
        opened.page.wait_for_timeout(100)
        pixels = opened.page.evaluate("""() => {
            const canvas = document.querySelector("[data-pane=compare] canvas");
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            return [...data.filter((_, i) => i % 4 === 1)];
        }""")
        return np.array(pixels)

    plain, bright = drawn("Home"), drawn("ArrowRight")
    assert opened.page.locator("#gain-value").inner_text() == "× 2"
    # Pixels without a match are gray in both; those at the border are mixed with it.
    known = (plain > 0) & (plain != 0x72)
    assert known.mean() > 0.3 and (bright[known] == np.minimum(2 * plain[known], 255)).mean() > 0.8
    assert (bright[plain == 0x72] == 0x72).mean() > 0.9
    # What belongs to the two images side by side is not offered here.
    assert not opened.page.locator("#show-card").is_visible() and not opened.page.locator("#zoom-link").is_visible()
    opened.page.check("input[value=matches]", force=True)
    assert opened.page.locator("#show-card").is_visible()


def test_colors_are_explained(opened):
    legend = opened.page.locator("#legend")
    assert not legend.is_visible()
    opened.page.check("#show-certainty")
    assert legend.inner_text().split() == ["Certainty", "0", "1"]
    opened.page.select_option("#color-by", "score")
    assert legend.inner_text().split() == ["Score", "0", "1", "Certainty", "0", "1"]
    opened.page.uncheck("#show-certainty")
    opened.page.select_option("#kind", "homography")
    opened.until("dualrcState().estimate !== null && dualrcState().show.color === 'inlier'")
    assert legend.inner_text().split() == ["inlier", "outlier"]
    # Without lines and dots, no colors are shown.
    opened.page.uncheck("#show-lines")
    opened.page.uncheck("#show-dots")
    assert not legend.is_visible()


def test_downloads_hold_what_the_service_found(opened, tmp_path):
    count = opened.state()["count"]

    def download(form: str) -> Path:
        with opened.page.expect_download() as waited:
            opened.page.click(f"[data-format={form}]")
        assert waited.value.suggested_filename.startswith("first_view-second.")
        path = tmp_path / waited.value.suggested_filename
        waited.value.save_as(path)
        return path

    for form in ("npz", "csv"):
        matches = Matches.load(download(form))
        assert len(matches) == count
        assert np.all(matches.scores <= 1) and np.all(matches.points0 <= SIZE)
    told = json.loads(download("json").read_text())
    assert told["count"] == len(told["points0"]) == len(told["scores"]) == count
    with closing(sqlite3.connect(download("colmap"))) as database:
        assert database.execute("select count(*) from images").fetchone() == (2,)
    image = np.asarray(Image.open(download("png")))
    assert image.shape[1] > 700 and image.std() > 20


def test_files_and_commands_have_the_model_of_the_page(opened, tmp_path):
    page = opened.page
    page.select_option("#kind", "homography")
    opened.until("dualrcState().estimate !== null")
    page.focus("#min-score")
    page.keyboard.press("End")
    page.keyboard.press("Home")
    for _ in range(30):
        page.keyboard.press("ArrowRight")
    page.click("#re-estimate")
    opened.until("/above/.test(document.getElementById('command-python').textContent)")
    shell = page.locator("#command-shell").inner_text()
    assert "--min-score 0.3 --estimate homography --threshold 3 " in shell
    with page.expect_download() as waited:
        page.click("[data-format=npz]")
    waited.value.save_as(tmp_path / "matches.npz")
    matches = Matches.load(tmp_path / "matches.npz")
    assert len(matches) == opened.state()["count"]
    assert np.allclose(matches.estimate.matrix, opened.state()["estimate"]["matrix"])
    assert matches.scores[matches.estimate.inliers].min() >= 0.3 > matches.scores.min()
    page.select_option("#kind", "")
    opened.until("dualrcState().estimate === null")
    assert "--estimate" not in page.locator("#command-shell").inner_text()


def test_the_images_stay_in_view_while_settings_are_changed(opened):
    page = opened.page
    page.set_viewport_size({"width": 1280, "height": 700})
    page.select_option("#kind", "fundamental")
    opened.until("dualrcState().estimate !== null")
    page.locator("#re-estimate").scroll_into_view_if_needed()
    stage, button = page.locator("#stage").bounding_box(), page.locator("#re-estimate").bounding_box()
    assert stage["y"] > 0 and button["y"] + button["height"] < 701
    page.evaluate("scrollTo(0, 300)")
    assert page.locator("#result-title").evaluate("(title) => title.closest('aside').getBoundingClientRect().y") > 50


def test_points_are_kept_listed_and_copied(opened):
    opened.context.grant_permissions(["clipboard-read", "clipboard-write"])
    places = [(x, y) for x in range(60, 440, 40) for y in (120, 200, 280)]
    good = [place for place in places if (opened.hover(0, *place)["other"] or {"certainty": 0})["certainty"] > 0.5][:2]
    assert len(good) == 2
    for place in good:
        opened.page.mouse.click(*opened.place(0, *place))
    assert opened.page.locator("#kept li").count() == 2
    opened.page.click("#kept-copy")
    lines = opened.page.evaluate("navigator.clipboard.readText()").splitlines()
    assert lines[0] == "x0,y0,x1,y1,certainty" and len(lines) == 3
    kept = opened.state()["kept"][0]
    assert np.allclose(
        [float(value) for value in lines[1].split(",")[:4]], [kept[k] for k in ("x0", "y0", "x1", "y1")], atol=0.006
    )
    opened.page.click("#kept li >> nth=0 >> button")
    assert opened.page.locator("#kept li").count() == 1


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


@pytest.fixture
def phone(browser, link):
    """The finished result on a phone."""
    made = Tab(browser, link, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    made.ready()
    yield made
    made.close()
    assert made.errors == []


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


def test_images_without_anything_in_common(tab, paths, tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (128, 160, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")
    tab.choose(paths[0], tmp_path / "noise.png")
    assert tab.page.locator("#verdict").get_attribute("class") == "verdict different"
    assert "Probably not" in tab.page.locator("#verdict").inner_text()
    tab.page.keyboard.press("p")
    # Chance may still fit a homography; if not, the page says so.
    tab.until("dualrcState().times.compared || /homography/.test(document.getElementById('compare-note').textContent)")


def test_an_example_opens_with_one_click(tab, server):
    shown = tab.page.locator("[data-example=wall] img")
    tab.until("[...document.querySelectorAll('.example img')].every((image) => image.naturalWidth > 100)")
    small = [tab.page.request.get(server.url + image.get_attribute("src")).body() for image in shown.all()]
    # Views of examples are files of the page: nothing is rendered to show it.
    assert not any("/v1/examples" in request for request in tab.requests)
    tab.page.click("[data-example=wall]")
    tab.ready()
    for content, image in zip(small, tab.state()["images"], strict=True):
        view = tab.page.request.get(f"{server.url}v1/images/{image['id']}/view?max_side=320").body()
        stored, rendered = (
            np.asarray(Image.open(io.BytesIO(one)).resize((80, 60)), dtype=int) for one in (content, view)
        )
        assert np.abs(stored - rendered).mean() < 4, "make them again: scripts/figures examples"
    assert tab.state()["count"] > 500
    assert tab.page.locator("#verdict").get_attribute("class") == "verdict same"


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


def test_matching_can_be_cancelled(tab, paths):
    tab.page.evaluate("""() => new MutationObserver(() => {
        if (dualrcState().phase === "matching") document.getElementById("cancel").click();
    }).observe(document.getElementById("busy-text"), { childList: true })""")
    for slot, path in enumerate(paths):
        tab.page.set_input_files(f'.slot[data-slot="{slot}"] input[multiple]', path)
    tab.until("dualrcState().phase === 'failed'")
    assert tab.state()["count"] == 0
    assert not tab.page.locator("#busy").is_visible()


def test_a_broken_file_is_explained(browser, server, tmp_path):
    tab = Tab(browser, server.url)
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"this is no image")
    tab.page.set_input_files('.slot[data-slot="0"] input[multiple]', broken)
    message = tab.page.locator(".message.bad")
    message.wait_for()
    assert "broken.jpg" in message.inner_text()
    assert message.get_attribute("role") == "alert"
    assert tab.page.evaluate(AUDIT) == []
    # The answer itself is on the console; nothing else is.
    assert len(tab.errors) == 1 and "415" in tab.errors[0]
    tab.page.click("[aria-label='Dismiss the message']")
    assert message.count() == 0
    tab.close()


def test_expired_images_are_uploaded_again(browser, server, paths):
    tab = Tab(browser, server.url)
    tab.choose(*paths)
    before = tab.state()
    for image in before["images"]:
        tab.page.request.delete(f"{server.url}v1/images/{image['id']}")
    tab.page.click("#again")
    tab.until(f"dualrcState().phase === 'ready' && dualrcState().pair !== '{before['pair']}'")
    after = tab.state()
    assert after["count"] == before["count"] and after["images"][0]["id"] != before["images"][0]["id"]
    assert tab.page.locator(".message.bad").count() == 0
    # A result that has expired can only be matched again.
    tab.page.route("**/v1/pairs/*?format=csv", lambda route: route.fulfill(status=404, json=EXPIRED))
    tab.page.click("[data-format=csv]")
    message = tab.page.locator(".message.bad")
    message.get_by_role("button", name="Match again").click()
    tab.until(f"dualrcState().phase === 'ready' && dualrcState().pair !== '{after['pair']}'")
    assert message.count() == 0 and all("404" in error for error in tab.errors)
    tab.close()


def test_a_result_that_is_gone_is_explained(browser, server):
    tab = Tab(browser, server.url + "#pair/unknown")
    message = tab.page.locator(".message.bad")
    message.wait_for()
    assert "expired" in message.inner_text()
    assert tab.page.locator("#intro").is_visible()
    tab.close()


def test_a_server_that_ends_in_a_match_or_is_started_again(browser, tmp_path):
    server = Server()
    try:
        tab = Tab(browser, server.url)
        tab.page.click("[data-example=town]")
        tab.ready()
        count, message = tab.state()["count"], tab.page.locator(".message.bad")
        server.stop()
        server = Server(port=server.port)
        # The new server does not know the images of the example by their ids.
        tab.page.click("#again")
        tab.until("dualrcState().phase === 'ready' || document.querySelector('.message.bad') !== null")
        assert tab.state()["count"] == count and message.count() == 0
        noise = np.random.default_rng(0).integers(0, 256, (360, 480, 3), dtype=np.uint8)
        Image.fromarray(noise).save(tmp_path / "noise.png")
        tab.page.evaluate("document.getElementById('quality').value = 'search'")
        tab.page.set_input_files(".pane[data-pane='1'] .tag input", tmp_path / "noise.png")
        tab.until("/step \\d+/.test(document.getElementById('busy-text').textContent)")
        assert "gone" not in tab.page.locator("#server").get_attribute("class")
        server.process.kill()
        message.wait_for()
        assert "does not answer" in message.inner_text()
        assert "gone" in tab.page.locator("#server").get_attribute("class")
        tab.close()
    finally:
        server.stop()


def test_a_server_that_is_gone_and_comes_back_with_a_token(browser, server, paths):
    """Runs last: it ends the server of the other tests."""
    tab = Tab(browser, server.url)
    server.stop()
    tab.page.set_input_files('.slot[data-slot="0"] input[multiple]', paths[0])
    message = tab.page.locator(".message.bad")
    message.wait_for()
    assert "does not answer" in message.inner_text() and "dualrc serve" in message.inner_text()
    again = Server("--token", TOKEN, port=server.port)
    try:
        message.get_by_role("button", name="Try again").click()
        wrong = tab.page.locator("#token-wrong")
        tab.page.locator("#token-value").fill("wrong")
        assert not wrong.is_visible()
        tab.page.keyboard.press("Enter")
        wrong.wait_for()
        tab.page.locator("#token-value").fill(TOKEN)
        tab.page.keyboard.press("Enter")
        tab.until("dualrcState().images[0]?.id")
        by_link = Tab(browser, f"{again.url}#token={TOKEN}")
        assert TOKEN not in by_link.page.url
        assert by_link.page.locator("#server").inner_text() != ""
        assert by_link.errors == []
        # Requests at the same time ask only once.
        by_link.page.evaluate(
            """() => {
            sessionStorage.setItem("dualrc-token", "100%");
            import("./api.js").then(({ Api }) => {
                const api = new Api(async () => { window.asked = (window.asked ?? 0) + 1; return "TOKEN"; });
                const all = ["v1/info", "metrics"].map((path) => api.fetch("GET", path));
                Promise.all(all).then(() => { window.got = true; });
            });
        }""".replace("TOKEN", TOKEN)
        )
        by_link.until("window.got")
        assert by_link.page.evaluate("window.asked") == 1
        by_link.close()
    finally:
        again.stop()
    tab.close()
