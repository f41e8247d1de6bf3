"""Labeled image pairs and their matches, for `benchmarks/calibrate.py`.

Related pairs overlap. Unrelated pairs show different photos. Look-alikes resemble each other but show different parts
of one place: two halves of one photo, or opposite sides of a square. Some pairs of each kind have the same stamp,
caption, bars, frame or watermark in both images.
"""

import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageDraw, ImageFont

import dualrc
from dualrc import geometry, scenes
from dualrc.data.light import relight
from dualrc.data.photos import Photos, read_photos
from dualrc.types import ImageArray

Array = npt.NDArray[Any]
RELATED, UNRELATED, ALIKE = "related", "unrelated", "look-alike"
OVERLAYS = ("stamp", "bars", "caption", "watermark", "frame", "logo", "texture")
# Number of points of a pair with known geometry that are passed to `match_points`.
SAMPLE = 1500
# Minimum overlap of a related pair of a multi-view scene; unrelated pairs have none.
OVERLAP = 0.2
NO_OVERLAP = 0.02


@dataclass(kw_only=True)
class Pair:
    """Two images, their label, and their matches."""

    # "photos", "scenes", or the name of a scene.
    source: str
    # Related, unrelated or look-alike.
    kind: str
    name: str
    overlay: str = "none"
    size0: tuple[int, int] = (0, 0)
    size1: tuple[int, int] = (0, 0)
    points0: Array = field(default_factory=lambda: np.zeros((0, 2), np.float32))
    points1: Array = field(default_factory=lambda: np.zeros((0, 2), np.float32))
    # Not calibrated.
    scores: Array = field(default_factory=lambda: np.zeros(0, np.float32))
    network0: tuple[int, int] = (0, 0)
    network1: tuple[int, int] = (0, 0)
    # Distance from the ground truth in image 1, in pixels of the network input; empty without ground truth.
    errors_px: Array = field(default_factory=lambda: np.zeros(0, np.float32))
    # Scores and errors of random points that were passed to `match_points`.
    point_scores: Array = field(default_factory=lambda: np.zeros(0, np.float32))
    point_errors_px: Array = field(default_factory=lambda: np.zeros(0, np.float32))

    @property
    def matches(self) -> dualrc.Matches:
        """Return the stored matches."""
        return dualrc.Matches(
            points0=self.points0,
            points1=self.points1,
            scores=self.scores,
            size0=self.size0,
            size1=self.size1,
            info={"network_size0": self.network0, "network_size1": self.network1},
        )


Maker = Callable[[], Iterator[Pair]]
# Maps points (n, 2) of image 0 to image 1; NaN for points that are not visible there.
Truth = Callable[[Array], Array]


def find(
    matcher: dualrc.Matcher, pair: Pair, image0: Any, image1: Any, truth: Truth | None = None, seed: int = 0
) -> Pair:
    """Match the images and keep the values that calibration needs."""
    features = [p if isinstance(p, dualrc.ImageFeatures) else matcher.features(p) for p in (image0, image1)]
    found = matcher.match_features(*features)
    pair.points0, pair.points1, pair.scores = found.points0, found.points1, found.scores
    pair.size0, pair.size1 = found.size0, found.size1
    pair.network0, pair.network1 = found.info["network_size0"], found.info["network_size1"]
    if truth is not None:
        scale = np.array(pair.network1) / pair.size1
        pair.errors_px = _distance(truth(found.points0), found.points1, scale)
        asked = np.random.default_rng(seed).uniform(0, np.array(pair.size0) - 1, (SAMPLE, 2)).astype(np.float32)
        there = matcher.match_points(*features, asked)
        known = there.scores > 0
        pair.point_scores = there.scores[known]
        pair.point_errors_px = _distance(truth(asked[known]), there.points1[known], scale)
    return pair


def _distance(true: Array, found: Array, scale: Array) -> Array:
    far = np.linalg.norm((true - found) * scale, axis=1)
    return np.where(np.isfinite(far), far, 1e6).astype(np.float32)


# Pairs made from single photos.


class Photographs:
    """Photos, and pairs made from them; the same seed makes the same pair."""

    def __init__(self, roots: list[Path], part: int) -> None:
        """Use the photos that training held out, every tenth; part 0 is one half of these, part 1 the other."""
        photos = read_photos(roots)
        numbers = list(range(9 + 10 * part, len(photos.sizes), 20))
        self.photos = Photos(canvases=photos.canvases[numbers], sizes=photos.sizes[numbers], broken=photos.broken)

    def __len__(self) -> int:
        return len(self.photos.sizes)

    def get(self, index: int, long_side: int) -> ImageArray:
        """Return a photo with this long side; both sides are multiples of 16."""
        width, height = self.photos.sizes[index % len(self)].tolist()
        pixels = self.photos.canvases[index % len(self), :, :height, :width].permute(1, 2, 0).numpy()
        scale = long_side / max(width, height)
        size = (max(round(width * scale / 16), 4) * 16, max(round(height * scale / 16), 4) * 16)
        return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC))


def lit(pixels: ImageArray, rng: np.random.Generator, strong: bool) -> ImageArray:
    """Change the exposure and, if `strong`, apply all photometric changes of training."""
    image = torch.from_numpy(pixels.astype(np.float32) / 255).permute(2, 0, 1)[None]
    if strong:
        image = relight(image, torch.Generator().manual_seed(int(rng.integers(1 << 31))))
    else:
        gain = torch.from_numpy(np.exp(rng.normal(0, 0.15, (1, 3, 1, 1)) + rng.normal(0, 0.25)).astype(np.float32))
        noise = torch.from_numpy(rng.normal(0, rng.uniform(0, 0.02), image.shape).astype(np.float32))
        image = (image ** float(np.exp(rng.normal(0, 0.2))) * gain + noise).clamp(0, 1)
    return (image[0].permute(1, 2, 0) * 255).round().to(torch.uint8).numpy()


def motion(rng: np.random.Generator, size: tuple[int, int]) -> Array:
    """Return a random homography between two images of the same size."""
    width, height = size
    middle = np.array([width / 2, height / 2])
    angle = rng.uniform(-math.pi, math.pi) if rng.uniform() < 0.1 else rng.normal(0, math.radians(12))
    scale = 2.0 ** rng.normal(0, 0.45)
    stretch = np.exp(rng.normal(0, 0.12))
    turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    linear = scale * turn @ np.diag([stretch, 1 / stretch])
    H = np.eye(3)
    H[:2, :2] = linear
    H[:2, 2] = middle + rng.normal(0, 0.18, 2) * size - linear @ middle
    tilt = np.eye(3)
    tilt[2, :2] = rng.normal(0, 0.25, 2) / size
    tilt[2, 2] = 1 - tilt[2, :2] @ middle
    return H @ tilt


def warped_pair(
    photos: Photographs, index: int, rng: np.random.Generator, long_side: int
) -> tuple[ImageArray, ImageArray, Truth]:
    """Return a photo and a view of it in front of another photo, which sometimes occludes a part of it."""
    image = photos.get(index, long_side)
    other = np.asarray(Image.fromarray(photos.get(index + 1 + int(rng.integers(50)), long_side)))
    size = (image.shape[1], image.shape[0])
    grid = np.stack(np.meshgrid(*(np.linspace(0, n - 1, 12) for n in size)), axis=-1).reshape(-1, 2)
    while True:
        H = motion(rng, size)
        there = geometry.apply_homography(H, grid)
        back = geometry.apply_homography(np.linalg.inv(H), grid)
        shared = [np.all((p >= 0) & (p <= np.array(size) - 1), axis=1).mean() for p in (there, back)]
        if min(shared) >= OVERLAP:
            break
    places = geometry.homography_grid(H, size, size)
    seen = geometry.sample_bilinear(image, places)
    inside = np.all((places >= 0) & (places <= np.array(size) - 1), axis=2)
    behind = np.asarray(Image.fromarray(other).resize(size))
    # Add an occluder.
    if rng.uniform() < 0.4:
        x, y = np.meshgrid(np.arange(size[0]), np.arange(size[1]))
        center, radius = rng.uniform(0, size), rng.uniform(0.1, 0.3) * max(size)
        inside &= (x - center[0]) ** 2 + ((y - center[1]) * rng.uniform(0.5, 2)) ** 2 > radius**2
    view = np.where(inside[:, :, None], seen, behind).round().astype(np.uint8)

    def truth(points: Array) -> Array:
        there = geometry.apply_homography(H, points.astype(np.float64))
        pixel = np.clip(np.round(np.nan_to_num(there, nan=-1)), -1, 1e6).astype(int)
        ok = np.all((pixel >= 0) & (pixel < size), axis=1)
        ok[ok] = inside[pixel[ok, 1], pixel[ok, 0]]
        return np.where(ok[:, None], there, np.nan)

    strong = rng.uniform() < 0.35
    return lit(image, rng, False), lit(view, rng, strong), truth


# The same stamp, caption or frame over both images.


def overlay(kind: str, images: tuple[ImageArray, ImageArray], rng: np.random.Generator) -> list[ImageArray]:
    """Draw the same overlay at the same place of both images, as cameras, agencies and films do."""
    draws = rng.integers(1 << 31)
    # Each image gets its own compression, as in separate JPEG files.
    return [_overlaid(kind, Image.fromarray(p), np.random.default_rng(draws)) for p in images]


def _overlaid(kind: str, image: Image.Image, rng: np.random.Generator) -> ImageArray:
    width, height = image.size
    words = ["Harbour", "view", "north", "gate", "market", "1997", "photo", "by", "Agency", "No.", "Lake", "tour", "HD"]
    text = " ".join(rng.choice(words, rng.integers(2, 6)))
    day, month, year, hour, minute = (
        int(rng.integers(low, high)) for low, high in ((1, 29), (1, 13), (10, 30), (0, 24), (0, 60))
    )
    date = f"{day:02}.{month:02}.20{year} {hour:02}:{minute:02}"
    side, bright = max(width, height), tuple(int(v) for v in rng.integers(180, 256, 3))
    dark = tuple(int(v) for v in rng.integers(0, 70, 3))
    small = max(10, round(side * rng.uniform(0.022, 0.045)))
    font = ImageFont.load_default(small)
    draw = ImageDraw.Draw(image, "RGBA")
    if kind == "stamp":
        x = width - small * 0.6 * len(date) if rng.uniform() < 0.7 else small / 2
        y = height - 1.8 * small if rng.uniform() < 0.8 else small / 2
        draw.text((x, y), date, (255, 170, 40) if rng.choice([0, 1]) else bright, font)
    elif kind in ("bars", "caption"):
        bar = round(height * rng.uniform(0.07, 0.16))
        fill = (0, 0, 0) if rng.uniform() < 0.7 else bright
        ink = (255, 255, 255) if fill == (0, 0, 0) else dark
        if kind == "bars":
            draw.rectangle((0, 0, width, bar), fill=fill)
        draw.rectangle((0, height - bar, width, height), fill=fill)
        if kind == "caption" or rng.uniform() < 0.5:
            draw.text((width * rng.uniform(0.02, 0.4), height - bar / 2), text, ink, font, anchor="lm")
    elif kind == "watermark":
        font = ImageFont.load_default(2 * small)
        place = (width * rng.uniform(0.35, 0.65), height * rng.uniform(0.3, 0.7))
        draw.text(place, text[:14], (255, 255, 255, int(rng.integers(90, 200))), font, anchor="mm")
    elif kind == "frame":
        edge = round(side * rng.uniform(0.015, 0.06))
        draw.rectangle((0, 0, width - 1, height - 1), outline=bright if rng.uniform() < 0.5 else dark, width=edge)
        line = edge + max(1, edge // 6)
        draw.rectangle((line, line, width - line, height - line), outline=dark, width=max(1, edge // 8))
    elif kind == "logo":
        radius = side * rng.uniform(0.04, 0.08)
        x, y = (radius * 1.4 if rng.uniform() < 0.5 else size - radius * 1.4 for size in (width, height))
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=bright, outline=dark, width=3)
        draw.polygon(
            [(x, y - radius * 0.7), (x + radius * 0.6, y + radius * 0.4), (x - radius * 0.6, y + radius * 0.4)], dark
        )
        draw.text((x, y + radius * 1.1), text[:6], bright, font, anchor="mm")
    # A patterned border that is the same on every image.
    elif kind == "texture":
        edge = round(side * rng.uniform(0.03, 0.07))
        pattern = Image.fromarray(rng.integers(0, 256, (height // 6 + 1, width // 6 + 1, 3), dtype=np.uint8))
        pattern = pattern.resize((width, height), Image.Resampling.BICUBIC)
        pattern.paste(image.crop((edge, edge, width - edge, height - edge)), (edge, edge))
        image = pattern
    return np.asarray(image)


def photo_pairs(matcher: dualrc.Matcher, photos: Photographs, counts: dict[str, int], seed: int) -> Iterator[Pair]:
    """Yield related, unrelated and look-alike pairs of photos; a third of them with an overlay."""
    for number in range(counts[RELATED]):
        rng = np.random.default_rng([seed, 0, number])
        index, long_side = int(rng.integers(len(photos))), int(rng.choice([512, 512, 640]))
        image0, image1, truth = warped_pair(photos, index, rng, long_side)
        laid = OVERLAYS[number % len(OVERLAYS)] if number % 3 == 0 else "none"
        pair = Pair(source="photos", kind=RELATED, name=f"{index}-{number}", overlay=laid)
        if laid == "none":
            yield find(matcher, pair, image0, image1, truth, number)
        else:
            yield find(matcher, pair, *overlay(laid, (image0, image1), rng))
    for number in range(counts[UNRELATED]):
        rng = np.random.default_rng([seed, 1, number])
        one, other = (int(i) for i in rng.choice(len(photos), 2, replace=False))
        long_side = int(rng.choice([512, 512, 640]))
        laid = OVERLAYS[number % len(OVERLAYS)] if number % 2 == 0 else "none"
        images = photos.get(one, long_side), photos.get(other, long_side)
        # Equal shapes keep the overlay at the same place.
        if laid != "none":
            size = (images[0].shape[1], images[0].shape[0])
            images = images[0], np.asarray(Image.fromarray(images[1]).resize(size))
            images = tuple(overlay(laid, images, rng))
        pair = Pair(source="photos", kind=UNRELATED, name=f"{one}-{other}", overlay=laid)
        yield find(matcher, pair, lit(images[0], rng, False), images[1])
    for number in range(counts[ALIKE]):
        rng = np.random.default_rng([seed, 2, number])
        index = int(rng.integers(len(photos)))
        image = photos.get(index, 1024)
        height, width = image.shape[:2]
        cut = round(0.48 * max(width, height) / 16) * 16
        halves = (image[:, :cut], image[:, -cut:]) if width >= height else (image[:cut], image[-cut:])
        laid = OVERLAYS[number % len(OVERLAYS)] if number % 4 == 0 else "none"
        halves = halves if laid == "none" else tuple(overlay(laid, halves, rng))
        pair = Pair(source="photos", kind=ALIKE, name=str(index), overlay=laid)
        yield find(matcher, pair, lit(halves[0], rng, False), halves[1])


# Rendered scenes.


def scene_pairs(matcher: dualrc.Matcher, count: int, first_seed: int) -> Iterator[Pair]:
    """Yield related views of squares and walls, and look-alikes: other sides of one square, and other squares."""
    for number in range(count):
        seed = first_seed + number
        kind = "square" if number % 4 else "plane"
        angle, zoom = (8.0, 15.0, 25.0, 35.0)[number % 4], (1.1, 1.3, 1.6)[number % 3]
        made = scenes.make_pair(seed, kind=kind, angle_deg=angle, zoom=zoom, min_overlap=0.3, supersample=1)

        def truth(points: Array, made: Any = made) -> Array:
            there = scenes.correspond(made.rendering0, made.rendering1, points)
            return np.where(there.visible.numpy()[:, None], there.points1.numpy(), np.nan)

        first, second = made.rendering0.image.numpy(), made.rendering1.image.numpy()
        yield find(matcher, Pair(source="scenes", kind=RELATED, name=str(seed)), first, second, truth, number)
        if kind == "square":
            scene = made.rendering0.scene
            rng = np.random.default_rng([seed, 9])
            sides = []
            for azimuth in rng.choice([0.0, 90.0, 180.0], 2, replace=False) + rng.uniform(-5, 5, 2):
                toward = np.array([np.cos(np.radians(azimuth)), np.sin(np.radians(azimuth)), 0.0])
                eye = np.array([0, 3.0, 1.7]) + rng.uniform(-1, 1, 3) * (1, 1, 0.3)
                view = scenes.look_at(eye, eye + toward + (0, 0, 0.15), size=(640, 480), fov_deg=60)
                sides.append(scenes.render(scene, view, scenes.Light(), supersample=1).image.numpy())
            yield find(matcher, Pair(source="scenes", kind=ALIKE, name=f"{seed} sides"), *sides)
            other = scenes.make_pair(seed + 5000, kind=kind, angle_deg=angle, min_overlap=0.1, supersample=1)
            pair = Pair(source="scenes", kind=ALIKE, name=f"{seed} {seed + 5000}")
            yield find(matcher, pair, first, other.rendering0.image.numpy())


# Multi-view scenes with known cameras.


def view_pairs(matcher: dualrc.Matcher, root: Path) -> Iterator[Pair]:
    """Yield all pairs of a folder with images/ and cameras.json, labeled by their overlap."""
    cameras = json.loads((root / "cameras.json").read_text(encoding="utf-8"))
    names = sorted(cameras)
    K = {name: np.array(cameras[name]["K"]) for name in names}
    P = {name: np.array(cameras[name]["cam_from_world"]) for name in names}
    features = {name: matcher.features(root / "images" / name) for name in names}
    found: dict[tuple[str, str], Pair] = {}
    for one, other in itertools.combinations(names, 2):
        pair = Pair(source=root.name, kind="", name=f"{one}-{other}")
        found[one, other] = find(matcher, pair, features[one], features[other])
    for pair, shared in zip(found.values(), view_overlap(names, K, P, found).values(), strict=True):
        # Pairs in between are neither related nor unrelated.
        pair.kind = RELATED if shared >= OVERLAP else ALIKE if shared <= NO_OVERLAP else "between"
        pair.name += f" overlap {shared:.2f}"
        yield pair


def view_overlap(
    names: list[str], K: dict[str, Array], P: dict[str, Array], found: dict[tuple[str, str], Pair]
) -> dict[tuple[str, str], float]:
    """Return the overlap: the smaller share of either image's surface points inside the frame of the other.

    Surface points come from matches that agree with the known cameras and have a triangulation angle of at least one
    degree.
    """
    points: dict[str, list[Array]] = {n: [] for n in names}
    for (one, other), pair in found.items():
        R, center = P[other][:, :3] @ P[one][:, :3].T, {n: -P[n][:, :3].T @ P[n][:, 3] for n in (one, other)}
        axes = P[one][2, :3] @ P[other][2, :3]
        # Only cameras with similar viewing directions.
        if axes < math.cos(math.radians(40)):
            continue
        pose = np.c_[R, P[other][:, 3] - R @ P[one][:, 3]]
        F = np.linalg.inv(K[other]).T @ geometry.essential_from_pose(pose) @ np.linalg.inv(K[one])
        best = np.argsort(-pair.scores)[:1500]
        p0, p1 = pair.points0[best].astype(float), pair.points1[best].astype(float)
        good = geometry.sampson_distance_px(F, p0, p1) < 1.5
        if good.mean() < 0.5:
            continue
        xyz = _triangulate(K[one] @ P[one], K[other] @ P[other], p0[good], p1[good])
        rays = [(xyz - c) / np.linalg.norm(xyz - c, axis=1, keepdims=True) for c in center.values()]
        wide = (rays[0] * rays[1]).sum(1) < math.cos(math.radians(1))
        front = [(xyz @ P[n][2, :3] + P[n][2, 3]) > 0 for n in (one, other)]
        kept = xyz[wide & front[0] & front[1]]
        points[one].append(kept)
        points[other].append(kept)
    cloud = {n: np.concatenate([np.zeros((0, 3)), *points[n]]) for n in names}
    # Counted by cells, so that regions with many matches do not dominate.
    shared: dict[tuple[str, str], float] = {}
    for (one, other), pair in found.items():
        shares = []
        for here, there in ((one, other), (other, one)):
            own, _ = _project(K[here], P[here], cloud[here])
            seen, depth = _project(K[there], P[there], cloud[here])
            size = np.array(pair.size0)
            inside = np.all((seen >= 0) & (seen < size), axis=1) & (depth > 0)
            cell = np.clip(own // (size / 12), 0, 11).astype(int) @ [1, 12]
            total, part = np.bincount(cell, minlength=144), np.bincount(cell, inside, minlength=144)
            shares.append(float(((part / np.maximum(total, 1)) > 0.5)[total > 0].mean()) if total.any() else 0.0)
        shared[one, other] = min(shares)
    return shared


def _project(K: Array, P: Array, xyz: Array) -> tuple[Array, Array]:
    cam = xyz @ P[:, :3].T + P[:, 3]
    pixels = cam @ K.T
    return pixels[:, :2] / np.where(pixels[:, 2:] == 0, 1e-9, pixels[:, 2:]), cam[:, 2]


def _triangulate(M0: Array, M1: Array, p0: Array, p1: Array) -> Array:
    rows = np.stack(
        [p0[:, :1] * M0[2] - M0[0], p0[:, 1:] * M0[2] - M0[1], p1[:, :1] * M1[2] - M1[0], p1[:, 1:] * M1[2] - M1[1]], 1
    )
    xyzw = np.linalg.svd(rows)[2][:, -1]
    return xyzw[:, :3] / np.where(np.abs(xyzw[:, 3:]) < 1e-12, 1e-12, xyzw[:, 3:])


# Sequences with homographies (HPatches, Oxford-affine), and hard pairs.


def sequence_pairs(matcher: dualrc.Matcher, roots: list[Path]) -> Iterator[Pair]:
    """Yield the pairs 1-2 to 1-6 of each sequence, and four pairs of images from every two sequences."""
    folders = [path for root in roots for path in sorted(root.iterdir()) if path.is_dir()]
    features: dict[tuple[Path, int], Any] = {}
    for folder in folders:
        for number in range(1, 7):
            path = next(p for p in sorted(folder.iterdir()) if p.stem == str(number))
            features[folder, number] = matcher.features(path)
    for folder in folders:
        for number in range(2, 7):
            H = np.loadtxt(folder / f"H_1_{number}")

            def truth(points: Array, H: Array = H) -> Array:
                return np.asarray(geometry.apply_homography(H, points.astype(np.float64)))

            pair = Pair(source="sequences", kind=RELATED, name=f"{folder.name} 1-{number}")
            yield find(matcher, pair, features[folder, 1], features[folder, number], truth)
    for i, one in enumerate(folders):
        for other in folders[i + 1 :]:
            for a, b in ((1, 2), (1, 6), (3, 4), (5, 1)):
                pair = Pair(source="sequences", kind=UNRELATED, name=f"{one.name} {a}, {other.name} {b}")
                yield find(matcher, pair, features[one, a], features[other, b])


def hard_pairs(matcher: dualrc.Matcher, root: Path) -> Iterator[Pair]:
    """Yield the pairs of EVD and WxBS, and pairs of images from successive pairs."""
    for kind in ("evd", "wxbs"):
        folders = sorted((root / kind).iterdir())
        for folder, other in zip(folders, [*folders[1:], folders[0]], strict=True):
            pair = Pair(source=kind, kind=RELATED, name=folder.name)
            yield find(matcher, pair, folder / "1.jpg", folder / "2.jpg")
            pair = Pair(source=kind, kind=UNRELATED, name=f"{folder.name} {other.name}")
            yield find(matcher, pair, folder / "1.jpg", other / "2.jpg")


# Storage.


def save(pairs: list[Pair], path: Path) -> None:
    """Write pairs to an .npz file."""
    arrays: dict[str, Any] = {}
    header = []
    for number, pair in enumerate(pairs):
        entry = {}
        for name, value in vars(pair).items():
            if isinstance(value, np.ndarray):
                arrays[f"{number}.{name}"] = value.astype(np.float32)
            else:
                entry[name] = value
        header.append(entry)
    np.savez(path, header=np.array(json.dumps(header)), **arrays)


def load(path: Path) -> list[Pair]:
    """Read pairs that `save` wrote."""
    with np.load(path) as arrays:
        entries = json.loads(str(arrays["header"]))
        pairs = [Pair(**{k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()}) for entry in entries]
        for name in arrays.files:
            number, _, key = name.partition(".")
            if key:
                setattr(pairs[int(number)], key, arrays[name])
    return pairs


def load_all(folder: Path, use: str) -> list[Pair]:
    """Read all pairs in a folder for the fit, or for the test."""
    return [pair for path in sorted(folder.glob(f"{use}-*.npz")) for pair in load(path)]
