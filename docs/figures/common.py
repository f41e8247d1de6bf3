"""What the figures share: where they go, how they look, and the images that they show."""

import hashlib
import os
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.cbook import get_sample_data
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo

import dualrc
from dualrc import scenes

DOCS = Path(__file__).resolve().parents[1]
# Tests write elsewhere.
IMAGES = Path(os.environ.get("FIGURES", DOCS / "images"))
INDIGO, ORANGE, GREEN, GRAY, RED = "#3f51b5", "#f57c00", "#2e7d32", "#757575", "#c62828"
# Bytes of a file.
_LARGEST = 200_000

matplotlib.rcParams.update(
    {
        # A figure of 10 inches is shown about 750 pixels wide: a point is a pixel.
        "font.size": 13,
        "axes.titlesize": 14,
        "legend.fontsize": 12,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "savefig.facecolor": "white",
        # Text as outlines looks the same on every machine; fixed names make the files reproducible.
        "svg.fonttype": "path",
        "svg.hashsalt": "dualrc",
    }
)


@cache
def matcher() -> dualrc.Matcher:
    """The bundled matcher on the CPU, in float32, so that the figures don't depend on the machine."""
    return dualrc.load(device="cpu", precision="float32")


@cache
def town(seed: int = 1, size: tuple[int, int] = (640, 480), **options: Any) -> scenes.ScenePair:
    """Two rendered images of a square, with exact ground truth."""
    return scenes.make_pair(seed, size=size, **options)


def pixels(rendering: scenes.Rendering) -> npt.NDArray[np.uint8]:
    """The image of a rendering."""
    return np.asarray(rendering.image.cpu().numpy())


@cache
def portrait() -> npt.NDArray[np.uint8]:
    """A real photograph: Grace Hopper, by the US Navy, public domain; matplotlib ships it."""
    with get_sample_data("grace_hopper.jpg") as file:
        return np.asarray(Image.open(file).convert("RGB"))


def errors_px(pair: scenes.ScenePair, points0: Any, points1: Any) -> npt.NDArray[np.float64]:
    """Distance of matched points from the truth, in pixels; infinite where the point is hidden in image 1."""
    truth = scenes.correspond(*pair, points0)
    distance = np.linalg.norm(truth.points1.cpu().numpy() - np.asarray(points1), axis=1)
    return np.where(truth.visible.cpu().numpy(), distance, np.inf)


def save_figure(figure: Figure, name: str) -> None:
    """Write a chart, as PNG or SVG."""
    path = IMAGES / name
    if path.suffix == ".svg":
        figure.savefig(path, metadata={"Date": None})
        text = path.read_text(encoding="utf-8")
        path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", encoding="utf-8")
    else:
        figure.savefig(path, dpi=110)
        image = Image.open(path).convert("RGB")
        # Tests compare it with the present data, so that an old chart is found.
        info = PngInfo()
        info.add_text("Data", _digest(figure))
        image.save(path, optimize=True, pnginfo=info)
        if path.stat().st_size > _LARGEST:
            image.quantize(256, method=Image.Quantize.FASTOCTREE).save(path, optimize=True, pnginfo=info)
    _check(path)


def _digest(figure: Figure) -> str:
    """A hash of the lines that a chart shows."""
    lines = [
        (str(line.get_label()), [f"{value:.6g}" for value in np.asarray(line.get_xydata(), float).ravel()])
        for axes in figure.axes
        for line in axes.lines
    ]
    return hashlib.sha256(repr(lines).encode()).hexdigest()[:16]


def save_image(image: npt.NDArray[np.uint8], name: str, width: int = 1400) -> None:
    """Write a photograph or drawing as JPEG, at most this wide; transparency becomes white."""
    found = Image.fromarray(np.asarray(image))
    if found.mode == "RGBA":
        white = Image.new("RGBA", found.size, "white")
        found = Image.alpha_composite(white, found).convert("RGB")
    if found.width > width:
        found = found.resize((width, round(found.height * width / found.width)), Image.Resampling.LANCZOS)
    path = IMAGES / name
    for quality in (88, 82, 76, 70, 60):
        found.save(path, quality=quality, optimize=True)
        if path.stat().st_size <= _LARGEST:
            break
    _check(path)


def _check(path: Path) -> None:
    size = path.stat().st_size
    if size > _LARGEST:
        raise SystemExit(f"{path} has {size:,} bytes; make it smaller.")
    print(f"{path.name}: {size / 1000:.0f} kB")
