"""Makes docs/page.png: the page of `dualrc serve` with the example pair, as docs/service.md shows it.

Run from the repository's root: python docs/figures/page.py. Needs Chromium, playwright and the extra `web`.
"""

import io
import sys
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from browser import Server, Tab, chromium  # noqa: E402

OUT = ROOT / "docs" / "page.png"
SIZE = (1440, 830)
# Places of image 0, as shares of its width and height: the one that is pointed at, and those that are kept.
PLACE = (0.14, 0.7)
KEPT = ((0.86, 0.7), (0.56, 0.9))
MOST_BYTES = 400_000
COLORS = 256


def main() -> None:
    """Take the screenshot and write it with few colors."""
    server = Server()
    try:
        with chromium() as browser:
            tab = Tab(browser, server.url, viewport={"width": SIZE[0], "height": SIZE[1]}, color_scheme="light")
            tab.page.click("[data-example=town]")
            tab.ready()
            width, height = tab.state()["images"][0]["width"], tab.state()["images"][0]["height"]
            for x, y in KEPT:
                tab.page.mouse.click(*tab.place(0, x * width, y * height))
            tab.hover(0, PLACE[0] * width, PLACE[1] * height)
            tab.page.wait_for_timeout(400)
            shot = Image.open(io.BytesIO(tab.page.screenshot()))
            tab.close()
    finally:
        server.stop()
    shot.convert("RGB").quantize(COLORS, kmeans=2).save(OUT, optimize=True)
    assert OUT.stat().st_size <= MOST_BYTES, f"{OUT} has {OUT.stat().st_size} bytes; make SIZE or COLORS smaller."


if __name__ == "__main__":
    main()
