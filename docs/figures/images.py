"""Matches, warps, a panorama and a reconstruction of images that we may show."""

import tempfile
from pathlib import Path

import numpy as np
from common import matcher, pixels, portrait, save_image, town
from PIL import Image, ImageDraw, ImageFont

import dualrc
from dualrc import demo, draw, geometry, scenes
from dualrc.image import read

_GREEN, _RED = (110, 220, 110), (240, 80, 70)
# Width and height of the small views of the page's examples.
_THUMBNAIL = (320, 243)


def hero() -> None:
    """Random matches between two photographs: green near the epipolar line of a pose from another method."""
    image0, image1 = (read(demo.PHOTOS / name) for name in demo.PHOTO_NAMES)
    matches = matcher().match(image0, image1, min_score=0.5)
    right = demo.photo_distance_px(matches) <= 3
    print(f"hero: {right.sum()} of {len(matches)} matches are within 3 px of the epipolar line")
    shown = np.random.default_rng(0).permutation(len(matches))[:110]
    save_image(np.asarray(_lines(image0, image1, matches[shown], right[shown])), "hero.jpg")


def _warped_portrait() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The portrait, the same turned, tilted and darkened, and the homography between them."""
    image = portrait()
    height, width = image.shape[:2]
    angle = np.radians(14)
    center = np.array([[1, 0, -width / 2], [0, 1, -height / 2], [0, 0, 1]])
    turn = np.array([[np.cos(angle), -np.sin(angle), 0], [np.sin(angle), np.cos(angle), 0], [2e-4, -4e-4, 1]])
    back = np.array([[0.86, 0, width / 2], [0, 0.86, height / 2], [0, 0, 1]])
    H = back @ turn @ center
    warped = np.asarray(dualrc.warp_image(image, H, (width, height)))
    alpha = warped[..., 3:] / 255.0
    shade = np.array([0.62, 0.66, 0.8])
    flat = warped[..., :3] * shade * alpha + 40 * (1 - alpha)
    return image, np.clip(flat, 0, 255).astype(np.uint8), H / H[2, 2]


def _lines(image0: np.ndarray, image1: np.ndarray, matches: dualrc.Matches, right: np.ndarray) -> Image.Image:
    """Both images side by side with lines between some matches: green where they are right, red where not."""
    gap = 6
    width0 = image0.shape[1]
    canvas = Image.new("RGB", (width0 + image1.shape[1] + gap, image0.shape[0]), "white")
    canvas.paste(Image.fromarray(image0), (0, 0))
    canvas.paste(Image.fromarray(image1), (width0 + gap, 0))
    lines = canvas.copy()
    pen = ImageDraw.Draw(lines)
    # The best match in each cell of a grid, so that the lines cover the image.
    chosen: dict[tuple[int, int], int] = {}
    step = image0.shape[0] / 13
    for number, (x, y) in enumerate(matches.points0):
        chosen.setdefault((int(x // step), int(y // step)), number)
    for number in chosen.values():
        (x0, y0), (x1, y1) = matches.points0[number], matches.points1[number]
        color = _GREEN if right[number] else _RED
        pen.line((x0, y0, x1 + width0 + gap, y1), fill=color, width=2)
        for x, y in ((x0, y0), (x1 + width0 + gap, y1)):
            pen.ellipse((x - 4, y - 4, x + 4, y + 4), fill=color)
    return Image.blend(canvas, lines, 0.8)


def warps() -> None:
    """What a dense warp is: image 1 in the frame of image 0, its displacement, and how certain it is."""
    pair = town(5, size=(640, 480), angle_deg=7.0, light_change=0.3)
    image0, image1 = pixels(pair[0]), pixels(pair[1])
    warp = matcher().warp(image0, image1)
    pulled = dualrc.warp_image(image1, warp, min_certainty=0.3)
    certain = np.repeat((warp.certainty * 255).astype(np.uint8)[..., None], 3, axis=2)
    panels = [
        ("image 0", image0),
        ("image 1", image1),
        ("image 1 in the frame of image 0", np.asarray(pulled)),
        ("certainty", certain),
    ]
    save_image(_grid(panels, columns=2), "warp.jpg", width=1100)


def homography() -> None:
    """A photograph, a warped copy, and the copy brought back by the estimated homography."""
    image0, image1, _ = _warped_portrait()
    matches = matcher().match(image0, image1, top=2000)
    model = geometry.estimate(matches, "homography")
    size = (image0.shape[1], image0.shape[0])
    back = dualrc.warp_image(image1, np.linalg.inv(model.matrix), size)
    inliers = _lines(image0, image1, matches, model.inliers)
    panels = [("inliers of the homography", np.asarray(inliers)), ("image 1 warped back", np.asarray(back))]
    save_image(_grid(panels, columns=2), "homography.jpg", width=1200)


def panorama() -> None:
    """Three views from one place and the panorama that joins them."""
    scene = scenes.make_scene(7)
    light = scenes.Light()
    views = [
        scenes.look_at((0, -9, 2.2), (x, 2.5, 2.0), size=(420, 320), fov_deg=52.0, roll_deg=roll)
        for x, roll in ((-5.0, 2.0), (0.0, -1.0), (5.0, 1.0))
    ]
    images = [pixels(scenes.render(scene, view, light)) for view in views]
    joined = dualrc.panorama(images, matcher=matcher())
    top = _grid([(f"image {number}", image) for number, image in enumerate(images)], columns=3)
    strip = _flat(Image.fromarray(np.asarray(joined)))
    strip = strip.resize((top.shape[1], round(strip.height * top.shape[1] / strip.width)))
    save_image(np.concatenate([top, np.asarray(strip)]), "panorama.jpg", width=1260)


def reconstruction() -> None:
    """A rendered square reconstructed from twelve images: cameras and points."""
    scene = scenes.make_scene(11)
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "images"
        folder.mkdir()
        for number, angle in enumerate(np.radians(np.linspace(-128, -52, 12))):
            eye = np.array([12 * np.cos(angle), 2.5 + 12 * np.sin(angle), 2.6 + 0.8 * np.sin(3 * angle)])
            view = scenes.look_at(eye, (0, 2.5, 1.8), size=(640, 480), fov_deg=60.0)
            draw.save(pixels(scenes.render(scene, view, scenes.Light())), folder / f"{number:02}.png")
        config = dualrc.ReconstructConfig(collection=dualrc.CollectionConfig(device="cpu"))
        summary = dualrc.reconstruct(folder, Path(work) / "town", config, quiet=True)
        print(f"reconstruction: {summary.registered} images, {summary.points} points")
        model = Image.open(Path(work) / "town" / "model.png").convert("RGB")
        shown = [(f"image {number}", read(folder / f"{number:02}.png")) for number in (0, 5, 11)]
    top = _grid(shown, columns=3)
    model = model.resize((top.shape[1], round(model.height * top.shape[1] / model.width)), Image.Resampling.LANCZOS)
    save_image(np.concatenate([top, np.asarray(model)]), "reconstruction.jpg", width=1260)


def _flat(image: Image.Image) -> Image.Image:
    if image.mode != "RGBA":
        return image.convert("RGB")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def _grid(panels: list[tuple[str, np.ndarray]], columns: int) -> np.ndarray:
    """Images with captions, in rows of the same width."""
    rows = [_row(panels[first : first + columns]) for first in range(0, len(panels), columns)]
    return np.concatenate(rows)


def _row(panels: list[tuple[str, np.ndarray]], height: int = 320) -> np.ndarray:
    shown = []
    for _, array in panels:
        image = _flat(Image.fromarray(array))
        shown.append(image.resize((round(image.width * height / image.height), height)))
    gap = 8
    width = sum(image.width + gap for image in shown) - gap
    # Captions of 14 pixels where the figure is shown, about 750 pixels wide.
    size = round(width * 14 / 750)
    font, caption = ImageFont.load_default(size), round(1.6 * size)
    canvas = Image.new("RGB", (width, height + caption), "white")
    pen = ImageDraw.Draw(canvas)
    x = 0
    for (title, _), image in zip(panels, shown, strict=True):
        canvas.paste(image, (x, caption))
        pen.text((x, size // 5), title, fill="black", font=font)
        x += image.width + gap
    return np.asarray(canvas)


def examples() -> None:
    """The small views of the example pairs on the page of `dualrc serve`."""
    from dualrc.web.app import STATIC
    from dualrc.web.examples import EXAMPLES, render

    for example in EXAMPLES:
        if not example.truth:
            continue
        for path, image in zip(example.describe()["thumbnails"], render(example.name), strict=True):
            small = Image.fromarray(image).resize(_THUMBNAIL, Image.Resampling.LANCZOS)
            small.save(STATIC / path, quality=82, optimize=True)


FIGURES = (hero, warps, homography, panorama, reconstruction, examples)
