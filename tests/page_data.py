"""Fixtures of the tests of the page: a rendered pair, a real server, a real browser, and pages in it."""

from pathlib import Path

import pytest
from browser import SIZE, Server, Tab, chromium
from PIL import Image

from dualrc.scenes import ScenePair, make_pair


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


@pytest.fixture
def phone(browser, link):
    """The finished result on a phone."""
    made = Tab(browser, link, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    made.ready()
    yield made
    made.close()
    assert made.errors == []
