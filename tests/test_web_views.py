"""The views of a folder and of a reconstruction in a real browser."""

import importlib.util
import math

import numpy as np
import pytest
from conftest import tiny_matcher
from PIL import Image
from web_data import pair_of, refused, scene, serving, upload, write_model

from dualrc.matcher.budget import enough_memory
from dualrc.web.reconstruction import Reconstruction

pytest.importorskip("playwright")
browser_data = pytest.importorskip("browser")
pytestmark = [
    pytest.mark.skipif(browser_data.executable() is None, reason="needs Chromium: apt-get install chromium"),
    pytest.mark.skipif(
        importlib.util.find_spec("fastapi") is None, reason="needs the extra web: pip install dualrc[web]"
    ),
]
# WebGL without a graphics card.
ARGUMENTS = ("--no-sandbox", "--use-gl=angle", "--use-angle=swiftshader", "--enable-unsafe-swiftshader")
VIEWER = "document.querySelector('#view-model').viewer"


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=browser_data.executable(), args=list(ARGUMENTS))
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def town(tmp_path_factory):
    folder = tmp_path_factory.mktemp("town")
    return folder, write_model(folder)


@pytest.fixture(scope="module")
def served(town):
    with serving(reconstruction=Reconstruction(town[0] / "out", town[0] / "photos"), max_client_jobs=64) as served:
        yield served


@pytest.fixture
def tab(browser, served):
    made = browser_data.Tab(browser, served.url, viewport={"width": 1000, "height": 700})
    yield made
    made.close()
    assert made.errors == []


def open_view(tab, name: str, condition: str) -> None:
    tab.page.evaluate(f"location.hash = '{name}'")
    tab.until(condition)


def test_a_reconstruction_is_turned_and_its_tracks_are_shown(tab, town):
    open_view(tab, "model", f"!!{VIEWER}")
    page, made = tab.page, town[1]
    tab.until(f"{VIEWER}.canvas.width > 300")
    frames = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
    page.evaluate(frames)
    canvas = page.locator("#view-model canvas").first
    box = canvas.bounding_box()
    places = np.array(page.evaluate(f"Array.from({{length: 20}}, (_, i) => {VIEWER}.cloud.place(i))"))
    assert ((places > 0) & (places < (box["width"], box["height"]))).all()
    # The whole scene is shown: points and cameras, up to the borders of the view.
    ends = "cloud.cameras.flatMap(({ center, corners }) => [center, ...corners].map((place) => cloud.spot(place)))"
    cameras = page.evaluate(f"(({{ cloud }}) => {ends})({VIEWER})")
    everything = np.concatenate([places, cameras])
    size = np.array([box["width"], box["height"]])
    assert ((everything > 0) & (everything < size)).all()
    assert ((everything.max(axis=0) - everything.min(axis=0)) / size).max() > 0.8
    # Every point is drawn where the view says, dark on light.
    script = f"""(places) => {{
        const source = {VIEWER}.canvas, copy = new OffscreenCanvas(source.width, source.height);
        const context = copy.getContext("2d"), ratio = source.width / source.clientWidth;
        context.drawImage(source, 0, 0);
        const color = (x, y) => [...context.getImageData(Math.floor(x * ratio), Math.floor(y * ratio), 1, 1).data];
        return places.map(([x, y]) => color(x, y));
    }}"""
    drawn = np.array(page.evaluate(script, places.tolist()))
    assert (drawn[:, 1] < 60).mean() > 0.8  # cameras may be in front of some
    # A click on one of them shows its three images.
    apart = np.linalg.norm(places[:, None] - places[None], axis=2) + 1e9 * np.eye(20)
    index = int(apart.min(axis=1).argmax())
    page.mouse.click(box["x"] + places[index][0], box["y"] + places[index][1])
    tab.until(
        f"document.querySelectorAll('.model-track canvas').length === 3 && {VIEWER}.cloud.selectedPoint === {index}"
    )
    words = page.locator(".model-detail").inner_text()
    x, y = made.pixels["b.png"][index]
    assert f"Point {index}" in words and "Seen by 3 images" in words and f"{x:.1f}, {y:.1f}" in words

    # Keyboard, wheel and mouse.
    def view():
        return page.evaluate(
            f"(({{yaw, pitch, distance, target}}) => [yaw, pitch, distance, ...target])({VIEWER}.cloud)"
        )

    canvas.focus()
    before = view()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("+")
    turned = view()
    assert turned[0] != before[0] and turned[2] == pytest.approx(before[2] * 0.85) and turned[3:] == before[3:]
    page.keyboard.press("Shift+ArrowUp")
    assert view()[3:] != turned[3:]
    page.keyboard.press("0")
    assert view() == pytest.approx(before)
    page.mouse.move(box["x"] + 200, box["y"] + 200)
    page.mouse.wheel(0, 300)
    tab.until(f"{VIEWER}.cloud.distance > {before[2] * 1.2}")
    page.mouse.down()
    page.mouse.move(box["x"] + 260, box["y"] + 210, steps=3)
    page.mouse.up()
    assert view()[0] != before[0]

    # From a camera's place, points are where its image shows them, but for the view's own field of view and roll.
    page.get_by_role("button", name="b.png").click()
    tab.until(f"{VIEWER}.cloud.selectedCamera === 1")
    seen = np.array(page.evaluate(f"Array.from({{length: 20}}, (_, i) => {VIEWER}.cloud.place(i))"))
    camera = made.cameras["b.png"]
    rays = (made.pixels["b.png"] - camera.K[:2, 2]) / camera.K[0, 0]
    scale = box["height"] / 2 / math.tan(0.45)
    assert np.allclose(seen - (box["width"] / 2, box["height"] / 2), rays * scale, atol=2)


def test_fingers_turn_zoom_and_select_in_3d(browser, served):
    tab = browser_data.Tab(browser, served.url, viewport={"width": 390, "height": 800}, has_touch=True, is_mobile=True)
    open_view(tab, "model", f"!!{VIEWER} && {VIEWER}.canvas.width > 300")
    tab.page.locator("#view-model canvas").first.scroll_into_view_if_needed()
    box = tab.page.locator("#view-model canvas").first.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    view = f"(({{yaw, distance, target}}) => [yaw, distance, ...target])({VIEWER}.cloud)"
    before = tab.page.evaluate(view)
    tab.touch(((x, y), (x + 60, y)))
    turned = tab.page.evaluate(view)
    assert turned[0] != before[0] and turned[1:] == pytest.approx(before[1:])
    tab.touch(((x - 40, y), (x - 80, y)), ((x + 40, y), (x + 80, y)))
    assert tab.page.evaluate(view)[1] == pytest.approx(before[1] / 2, rel=0.05)
    # Drags do not select; a tap on a point does.
    assert tab.page.evaluate(f"{VIEWER}.cloud.selectedPoint") < 0
    tab.touch(((x - 80, y), (x - 40, y)), ((x + 80, y), (x + 40, y)))
    places = np.array(tab.page.evaluate(f"Array.from({{length: 20}}, (_, i) => {VIEWER}.cloud.place(i))"))
    apart = np.linalg.norm(places[:, None] - places[None], axis=2) + 1e9 * np.eye(20)
    index = int(apart.min(axis=1).argmax())
    tab.touch(((box["x"] + places[index][0], box["y"] + places[index][1]),) * 2)
    tab.until(f"{VIEWER}.cloud.selectedPoint === {index}")
    assert tab.errors == []
    tab.close()


def test_a_folder_shows_a_matrix_of_scores(tab, served, tmp_path):
    images = {"a.png": pair_of(1)[0], "b.png": pair_of(1)[1], "c.png": scene(5)}
    for name, pixels in images.items():
        Image.fromarray(pixels).save(tmp_path / name)
    (tmp_path / "broken.png").write_bytes(b"no image")
    open_view(tab, "folder", "!!document.querySelector('.folder-drop')")
    page = tab.page

    def uploads():
        # Examples are rendered in the background.
        return sum(not upload.shared for upload in served.service.images._uploads.values())

    kept = uploads()
    page.set_input_files(".folder-drop input >> nth=0", [tmp_path / name for name in (*images, "broken.png")])
    tab.until("document.querySelectorAll('.folder-matrix td a').length === 6")
    tab.until("document.querySelector('.folder-status').hidden")
    # The broken one is told, and the others go on.
    assert "broken.png is empty or not an image" in page.locator(".message.bad").inner_text()
    tab.errors = [words for words in tab.errors if "415" not in words]
    own = served.matcher.match(images["a.png"], images["c.png"], top=1000).pair_score
    label = page.locator("a[data-cell='0,2']").get_attribute("aria-label")
    assert label.startswith(f"a.png and c.png: score {own:.2f}, ")
    assert page.locator("a[data-cell='2,0']").get_attribute("href") == page.locator("a[data-cell='0,2']").get_attribute(
        "href"
    )
    # One stop for the Tab key; arrows move, over the diagonal too.
    assert page.locator(".folder-matrix a[tabindex='0']").count() == 1
    page.locator("a[data-cell='1,0']").focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.cell") == "1,2"
    target = page.locator("a[data-cell='1,2']").get_attribute("href")
    page.keyboard.press("Enter")
    tab.until(f"location.hash === '{target}' && document.querySelector('#workbench').hidden === false")
    open_view(tab, "folder", "document.querySelectorAll('.folder-matrix td a').length === 6")
    page.get_by_role("button", name="Clear").click()
    tab.until("!document.querySelector('.folder-matrix')")
    for _ in range(1000):
        if uploads() == kept:
            break
        page.wait_for_timeout(20)
    assert uploads() == kept


def test_files_can_be_dropped_anywhere_on_the_folder_view(tab, tmp_path):
    paths = [tmp_path / f"{name}.png" for name in "abc"]
    for path, pixels in zip(paths, (*pair_of(1), scene(5)), strict=True):
        Image.fromarray(pixels).save(path)
    open_view(tab, "folder", "!!document.querySelector('.folder-drop')")
    (tmp_path / "d.txt").write_text("no image")
    tab.page.set_input_files(".folder-drop input >> nth=0", [*paths[:2], tmp_path / "d.txt"])
    tab.until("/1 of 3 files are not images/.test(document.getElementById('messages').textContent)")
    tab.until("document.querySelectorAll('.folder-matrix td a').length === 2")
    # Others are added.
    tab.drop(".folder-matrix", paths[2])
    tab.until("document.querySelectorAll('.folder-matrix td a').length === 6")
    assert tab.page.evaluate("location.hash") == "#folder"
    # Two images dropped on the model are a pair.
    open_view(tab, "model", f"!!{VIEWER}")
    tab.drop("html", *paths[:2])
    tab.until("location.hash.startsWith('#pair/') && !document.querySelector('#workbench').hidden")


def test_a_message_goes_with_its_view(tab, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"no image")
    open_view(tab, "folder", "!!document.querySelector('.folder-drop')")
    tab.page.set_input_files(".folder-drop input >> nth=0", tmp_path / "broken.png")
    tab.until("document.querySelectorAll('.message.bad').length > 0")
    open_view(tab, "model", f"!!{VIEWER}")
    assert tab.page.locator(".message").count() == 0
    tab.errors = [words for words in tab.errors if "415" not in words]


def test_the_views_have_names_and_contrast_and_fit_a_phone(browser, served):
    for scheme in ("light", "dark"):
        made = browser_data.Tab(browser, served.url, viewport={"width": 390, "height": 800}, color_scheme=scheme)
        for name, condition in (("folder", "!!document.querySelector('.folder-drop')"), ("model", f"!!{VIEWER}")):
            open_view(made, name, condition)
            assert made.page.evaluate("document.documentElement.scrollWidth") <= 390
            # An empty folder has few words to check.
            found = made.page.evaluate(browser_data.AUDIT)
            assert [words for words in found if "texts were checked" not in words] == []
            assert all(words for _, words in made.names())
        made.close()
        assert made.errors == []


class FullMatcher:
    """A matcher on a machine without memory."""

    def __init__(self) -> None:
        self._inner = tiny_matcher()

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def features(self, *_, **__):
        with enough_memory():
            raise MemoryError


def test_missing_memory_is_explained(browser, tmp_path):
    paths = [tmp_path / "a.png", tmp_path / "b.png"]
    for path, pixels in zip(paths, pair_of(0), strict=True):
        Image.fromarray(pixels).save(path)
    with serving(FullMatcher()) as full:
        with full.http() as http:
            ids = [upload(http, path.read_bytes()) for path in paths]
            answer = http.post("/v1/match", json={"image0": ids[0], "image1": ids[1]})
            assert "smaller size" in refused(answer, 503, "no_memory") and answer.headers["Retry-After"]
        tab = browser_data.Tab(browser, full.url)
        for slot, path in enumerate(paths):
            tab.page.set_input_files(f'.slot[data-slot="{slot}"] input[multiple]', path)
        message = tab.page.locator(".message.bad")
        message.wait_for()
        assert message.locator("p").inner_text() == "Not enough memory for images of this size; give a smaller size."
        assert tab.state()["phase"] == "failed" and not tab.page.locator("#busy").is_visible()
        tab.close()
