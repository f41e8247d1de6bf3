"""A real browser and a real server for the tests of the page."""

import base64
import importlib.util
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

# Pixels of the images of the tests.
SIZE = (480, 360)
CHROMIUM = ("/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome")
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # A camera that shows a test pattern, and no question whether it may be used.
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
)
_START_S = 120.0
_WAIT_S = 90.0


def executable() -> str | None:
    """The installed Chromium."""
    return next((path for path in CHROMIUM if Path(path).exists()), None)


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


NEEDS = [
    pytest.mark.skipif(not _has("playwright"), reason="needs playwright: pip install playwright"),
    pytest.mark.skipif(executable() is None, reason="needs Chromium: apt-get install chromium"),
    pytest.mark.skipif(not _has("fastapi"), reason="needs the extra web: pip install dualrc[web]"),
]


@contextmanager
def chromium() -> Iterator[Any]:
    """A headless browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable(), args=list(ARGUMENTS))
        yield browser
        browser.close()


class Server:
    """`dualrc serve` in a process of its own."""

    def __init__(self, *arguments: str, port: int = 0) -> None:
        command = [sys.executable, "-m", "dualrc", "serve", "--port", str(port), *arguments]
        # A file, not a pipe: a log that nobody reads would stop the server.
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)
        start, text = time.monotonic(), ""
        while time.monotonic() < start + _START_S and self.process.poll() is None:
            self._log.seek(0)
            text = self._log.read()
            if found := re.search(r"http://[\d.]+:(\d+)/", text):
                self.url, self.port = found[0], int(found[1])
                return
            time.sleep(0.05)
        self.stop()
        raise AssertionError("dualrc serve did not start:\n" + text)

    def stop(self) -> None:
        """End the process; one that is still busy with examples is not waited for."""
        self.process.terminate()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()


class Tab:
    """A page of the browser, with what was said on its console."""

    def __init__(self, browser: Any, url: str, **context: Any) -> None:
        settings = {"viewport": {"width": 1280, "height": 860}, "reduced_motion": "reduce", **context}
        self.context = browser.new_context(**settings)
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: message.type == "error" and self.errors.append(message.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(f"{request.method} {request.url}"))
        self.page.goto(url)
        self.page.wait_for_selector("html[data-ready]", state="attached")

    def state(self) -> dict[str, Any]:
        """What the page shows."""
        return self.page.evaluate("dualrcState()")

    def until(self, condition: str, wait_s: float = _WAIT_S) -> None:
        """Wait until a JavaScript expression is true; the page's policy forbids Playwright's own way."""
        end = time.monotonic() + wait_s
        while not self.page.evaluate(condition):
            assert time.monotonic() < end, f"{condition} did not come true; the page shows {self.state()}"
            self.page.wait_for_timeout(20)

    def choose(self, *paths: Path) -> None:
        """Give both images by the file dialogs of their slots, and wait for the result and both warps."""
        for slot, path in enumerate(paths):
            self.page.set_input_files(f'.slot[data-slot="{slot}"] input[multiple]', path)
        self.ready()

    def ready(self) -> None:
        """Wait for matches and warps."""
        self.until("dualrcState().phase === 'ready' && dualrcState().warps['01'] && dualrcState().warps['10']")

    def drop(self, selector: str, *paths: Path) -> None:
        """Drop files on an element."""
        files = [{"name": path.name, "data": base64.b64encode(path.read_bytes()).decode()} for path in paths]
        self.page.evaluate(
            """([selector, files]) => {
                const transfer = new DataTransfer();
                for (const { name, data } of files) {
                    const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
                    transfer.items.add(new File([bytes], name, { type: "image/png" }));
                }
                const target = document.querySelector(selector);
                for (const type of ["dragover", "drop"]) {
                    const options = { dataTransfer: transfer, bubbles: true, cancelable: true };
                    target.dispatchEvent(new DragEvent(type, options));
                }
            }""",
            [selector, files],
        )

    def place(self, image: int, x: float, y: float) -> tuple[float, float]:
        """Where a pixel of an image is in the window."""
        view = self.state()["views"][image]
        box = self.page.locator(f'[data-pane="{image}"] canvas').bounding_box()
        return (x + 0.5) * view["scale"] + view["x"] + box["x"], (y + 0.5) * view["scale"] + view["y"] + box["y"]

    def hover(self, image: int, x: float, y: float) -> dict[str, Any]:
        """Point at a pixel; returns the page's `hover`."""
        self.page.mouse.move(*self.place(image, x, y))
        self.page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return self.state()["hover"]

    def touch(self, *paths: tuple[tuple[float, float], tuple[float, float]], steps: int = 8) -> None:
        """Put a finger on the start of each path in the window, move all to the ends, and lift them."""
        session = self.context.new_cdp_session(self.page)

        def send(kind: str, *points: tuple[float, float]) -> None:
            touches = [{"x": x, "y": y, "id": number} for number, (x, y) in enumerate(points)]
            session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": touches})

        starts = [start for start, _ in paths]
        # Fingers do not arrive at the same time.
        for number in range(len(paths)):
            send("touchStart", *starts[: number + 1])
        for step in range(1, steps + 1):
            part = step / steps
            send("touchMove", *[(a + part * (c - a), b + part * (d - b)) for (a, b), (c, d) in paths])
        send("touchEnd")
        session.detach()
        self.page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def names(self) -> list[tuple[str, str]]:
        """(role, name) of every control and image that assistive technology is told of."""
        session = self.context.new_cdp_session(self.page)
        nodes = session.send("Accessibility.getFullAXTree")["nodes"]
        session.detach()
        roles = {
            "button",
            "link",
            "checkbox",
            "radio",
            "slider",
            "combobox",
            "textbox",
            "image",
            "application",
            "dialog",
        }
        return [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node["ignored"] and node["role"]["value"] in roles
        ]

    def close(self) -> None:
        """Close the tab."""
        self.context.close()


# A function that lists what is wrong with the visible page.
AUDIT = (Path(__file__).parent / "page_audit.js").read_text()
