"""Views of a result in a real browser: points, lenses, models, zoom, comparisons, downloads."""

import json
import sqlite3
import statistics
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from browser import NEEDS, SIZE, Tab
from PIL import Image

from dualrc.matches import Matches
from dualrc.scenes import correspond

pytest_plugins = "page_data"
pytestmark = NEEDS


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
