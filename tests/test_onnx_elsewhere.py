"""The exported models outside of Python: in a browser and from C++, on one small pair."""

import functools
import os
import shutil
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from conftest import ROOT, texture

onnx = pytest.importorskip("onnx", reason="needs pip install 'dualrc[onnx]'")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs pip install 'dualrc[onnx]'")

from dualrc.onnx import Matcher  # noqa: E402
from dualrc.onnx.export import ExportConfig, export  # noqa: E402

TOP = 100
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    export(folder, ExportConfig(top=TOP))
    return folder


@pytest.fixture(scope="module")
def images() -> tuple[np.ndarray, np.ndarray]:
    whole = texture(3, 128, 128)
    return whole[:80, :96].copy(), whole[6:102, 11:91].copy()


@pytest.fixture(scope="module")
def wanted(models, images):
    """What Python finds: points, points, scores and flags."""
    matcher = Matcher(models, ["CPUExecutionProvider"], threads=1)
    return matcher.match_raw(*(matcher.features(image) for image in images))


def assert_agrees(rows: np.ndarray, wanted, decimals: float) -> None:
    """Rows of x0 y0 x1 y1 score are those that Python finds, but for near-ties."""
    assert len(rows) == len(wanted.scores) == TOP
    own = np.hstack([wanted.points0, wanted.points1])
    apart = np.abs(own[:, None] - rows[None, :, :4]).max(2).min(1)
    assert np.mean(apart < decimals) > 0.99
    np.testing.assert_allclose(rows[:, 4], wanted.scores, atol=1e-4)


# The browser.

PAGE = """<!doctype html><script type="module">
import * as ort from "/ort/ort.wasm.min.mjs";
ort.env.wasm.wasmPaths = "/ort/";
ort.env.wasm.numThreads = 1;
window.match = async (sizes) => {
  const features = await ort.InferenceSession.create("/features.onnx");
  const pair = await ort.InferenceSession.create("/pair.onnx");
  const inputs = {};
  for (const [number, [width, height]] of sizes.entries()) {
    const pixels = new Float32Array(await (await fetch(`/image${number}.bin`)).arrayBuffer());
    const maps = await features.run({ image: new ort.Tensor("float32", pixels, [1, 3, height, width]) });
    for (const name of Object.keys(maps)) inputs[name + number] = maps[name];
  }
  const found = await pair.run(inputs);
  const column = (name) => Array.from(found[name].data, Number);
  return { count: Number(found.count.data[0]), points0: column("points0"), points1: column("points1"),
           scores: column("scores"), exact: column("exact") };
};
window.ready = true;
</script>"""


def runtime_for_browsers(folder: Path) -> Path:
    """The files of onnxruntime-web, from $ONNXRUNTIME_WEB or from npm; a test is skipped where there are none."""
    if given := os.environ.get("ONNXRUNTIME_WEB"):
        return Path(given)
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed, so that there is no onnxruntime-web")
    command = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline", "onnxruntime-web@1"]
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=100)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        pytest.skip("npm can't install onnxruntime-web here")
    return folder / "node_modules" / "onnxruntime-web" / "dist"


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves files and prints nothing."""

    extensions_map: ClassVar = {
        **SimpleHTTPRequestHandler.extensions_map,
        ".mjs": "text/javascript",
        ".wasm": "application/wasm",
    }

    def log_message(self, *_):
        pass


def test_a_browser_agrees(models, images, wanted, tmp_path):
    playwright = pytest.importorskip("playwright.sync_api", reason="needs pip install playwright")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium")
    (tmp_path / "npm").mkdir()
    (tmp_path / "ort").symlink_to(runtime_for_browsers(tmp_path / "npm"))
    (tmp_path / "index.html").write_text(PAGE)
    for name in ("features.onnx", "pair.onnx"):
        (tmp_path / name).symlink_to(models / name)
    for number, image in enumerate(images):
        image.transpose(2, 0, 1).astype("<f4").tofile(tmp_path / f"image{number}.bin")
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(QuietHandler, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with playwright.sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            page = browser.new_page()
            page.set_default_timeout(120_000)
            page.goto(f"http://127.0.0.1:{server.server_port}/")
            page.wait_for_function("window.ready")
            found = page.evaluate("sizes => match(sizes)", [[image.shape[1], image.shape[0]] for image in images])
            browser.close()
    finally:
        server.shutdown()
        server.server_close()
    assert found["count"] == TOP
    points = [np.array(found[name]).reshape(-1, 2) for name in ("points0", "points1")]
    assert_agrees(np.hstack([*points, np.array(found["scores"])[:, None]]), wanted, decimals=0.01)
    assert np.mean(np.array(found["exact"], bool) == wanted.exact) > 0.99


# C++.


def headers_and_library() -> tuple[Path, Path]:
    """Folders of ONNX Runtime's headers and of its library; a test is skipped where they are missing."""
    roots = [os.environ.get("ONNXRUNTIME_ROOT"), "/usr", "/usr/local", "/opt/onnxruntime"]
    folders = [Path(root) / "include" for root in roots if root]
    folders += [folder / "onnxruntime" for folder in folders]
    found = [folder for folder in folders if (folder / "onnxruntime_cxx_api.h").is_file()]
    if not found:
        pytest.skip("there are no headers of ONNX Runtime; unpack a release and set ONNXRUNTIME_ROOT to its folder")
    # The Python package has the library, without the links by which a linker finds it.
    libraries = list((Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so*"))
    if not libraries:
        pytest.skip("this build of onnxruntime has no shared library of its own")
    return found[0], libraries[0]


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None, reason="needs Linux and g++")
def test_the_cpp_example_agrees(models, images, wanted, tmp_path):
    headers, library = headers_and_library()
    for name in ("libonnxruntime.so", "libonnxruntime.so.1"):
        (tmp_path / name).symlink_to(library)
    source = ROOT / "examples" / "onnx" / "match.cpp"
    assert len(source.read_text(encoding="utf-8").splitlines()) <= 150
    command = ["g++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", f"-isystem{headers}", str(source)]
    command += [f"-L{tmp_path}", "-lonnxruntime", f"-Wl,-rpath,{tmp_path}", "-o", str(tmp_path / "match")]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    paths = []
    for number, image in enumerate(images):
        paths.append(str(tmp_path / f"image{number}.ppm"))
        header = f"P6\n# a comment\n{image.shape[1]} {image.shape[0]}\n255\n".encode()
        Path(paths[-1]).write_bytes(header + image.tobytes())

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(tmp_path / "match"), *arguments], capture_output=True, text=True, check=False, timeout=120
        )

    done = run(str(models), *paths)
    assert done.returncode == 0, done.stderr
    rows = np.array([line.split() for line in done.stdout.splitlines()], dtype=float)
    assert_agrees(rows, wanted, decimals=0.01)
    assert len(run(str(models), *paths, "7").stdout.splitlines()) == 7
    broken = run(str(models), paths[0], str(source))
    assert broken.returncode == 1 and "not a binary PPM" in broken.stderr
