"""The page in a real browser, on a real `dualrc serve`: how images get there, and what can go wrong."""

import base64
import io
import re
import shlex

import numpy as np
from browser import AUDIT, NEEDS, SIZE, Server, Tab
from PIL import Image

pytest_plugins = "page_data"
pytestmark = NEEDS
EXPIRED = {"error": "This result is unknown or has expired; match the images again.", "code": "unknown_id"}
TOKEN = "a-token-of-the-tests"


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
