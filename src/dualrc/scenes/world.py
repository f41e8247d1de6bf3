"""Solids and textures of a scene, and the construction of random scenes."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from dualrc.errors import ConfigError
from dualrc.scenes.textures import Painter

Array = npt.NDArray[np.float64]
Triple = tuple[float, float, float]
SceneKind = Literal["square", "courtyard", "plane"]

# A shape fills the cube [-1, 1]^3 of its own coordinates. Planes are (normal, offset); inside is normal x <= offset.
_CUBE = [[s * (i == k) for i in range(3)] + [1.0] for k in range(3) for s in (-1.0, 1.0)]
_GABLE = [*_CUBE[:2], [0, -1, 0.5, 0.5], [0, 1, 0.5, 0.5], _CUBE[4]]
_PLANES = {"box": _CUBE, "gable": _GABLE, "cylinder": _CUBE[4:], "sphere": _CUBE[4:]}
# Round sides: inside is where the weighted sum of squared coordinates is at most 1.
ROUND = {"cylinder": np.array([[1.0], [1.0], [0.0]]), "sphere": np.array([[1.0], [1.0], [1.0]])}
# Objects on a square: thing, shape, center, half sizes, textures of the sides and of level faces, and tile_m.
# With a negative tile_m, each face shows whole quarters of its texture of about that size.
_Part = tuple[str, str, Triple, Triple, str, str, float]
_PARTS: tuple[_Part, ...] = (
    ("house", "box", (0, 0, 1), (1, 1, 1), "facade", "", -1.9),
    ("house", "gable", (0, 0, 2.3), (1.04, 1.06, 0.3), "roof", "", 2.0),
    ("house", "box", (0.4, 0.3, 2.5), (0.1, 0.1, 0.2), "bricks", "", 1.5),
    ("tree", "box", (0, 0, 0.15), (0.6, 0.6, 0.15), "bricks", "leaves", 1.5),
    ("tree", "cylinder", (0, 0, 1.1), (0.13, 0.13, 1.0), "planks", "", 0.8),
    ("tree", "sphere", (0.1, 0, 2.3), (1.0, 1.0, 0.8), "leaves", "", 2.5),
    ("tree", "sphere", (-0.1, 0.1, 3.0), (0.75, 0.75, 0.6), "leaves", "", 2.5),
    ("fountain", "cylinder", (0, 0, 0.22), (1.2, 1.2, 0.22), "marble", "tiles", 2.0),
    ("fountain", "cylinder", (0, 0, 0.8), (0.25, 0.25, 0.6), "marble", "", 2.0),
    ("fountain", "cylinder", (0, 0, 1.4), (0.7, 0.7, 0.1), "bricks", "tiles", 1.5),
    ("fountain", "sphere", (0, 0, 1.8), (0.35, 0.35, 0.35), "stripes", "", 1.1),
    ("column", "cylinder", (0, 0, 1.3), (0.55, 0.55, 1.3), "posters", "", 3.4),
    ("column", "cylinder", (0, 0, 2.65), (0.7, 0.7, 0.08), "stripes", "bricks", 2.0),
    ("column", "sphere", (0, 0, 2.7), (0.5, 0.5, 0.4), "roof", "", 2.0),
    ("crates", "box", (0, 0, 0.45), (0.45, 0.45, 0.45), "planks", "", 1.5),
    ("crates", "box", (0.1, 0, 1.2), (0.4, 0.25, 0.3), "posters", "planks", -0.7),
    ("crates", "cylinder", (0.95, -0.3, 0.5), (0.36, 0.36, 0.5), "planks", "", 1.2),
    ("stall", "box", (0, 0, 0.5), (1.2, 0.7, 0.5), "posters", "tiles", -0.8),
    ("stall", "box", (0, 0, 1.5), (0.9, 0.15, 0.7), "plaster", "", 2.0),
    ("stall", "gable", (0, 0, 2.3), (1.4, 1.0, 0.4), "stripes", "", 2.0),
    ("balls", "sphere", (0, 0, 0.6), (0.6, 0.6, 0.6), "marble", "", 1.5),
    ("balls", "sphere", (1.0, 0.3, 0.4), (0.4, 0.4, 0.4), "tiles", "", 1.2),
    ("balls", "sphere", (0.2, -0.9, 0.3), (0.3, 0.3, 0.3), "bricks", "", 0.9),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Solid:
    """A convex body with textures."""

    shape: str
    # (3, 4)
    local_from_world: Array
    # (8, 3) Corners of the bounding box in the world.
    corners: Array
    # (m, 4) In the world, normals of length 1.
    planes: Array
    # (m, 2, 4) For each plane, maps a world point (x, y, z, 1) to texture coordinates.
    uv_axes: Array
    # Repeats of the texture on round sides, around and from bottom to top.
    wraps: tuple[float, float]
    # Side of the square that one repeat of the texture covers.
    tile_m: float
    # (3,)
    tint: Array
    # Textures of the sides and of level faces.
    textures: tuple[int, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Scene:
    """Solids, and their textures with all mip levels."""

    solids: tuple[Solid, ...]
    # (n, 4) Linear RGB and glow, ordered by level, texture and row.
    texels: Tensor
    texture_size: int
    texture_count: int
    # (1, 1, s, s) A gain over the whole world, so that no two positions look the same.
    dirt: Tensor


class Builder:
    """Collects solids and the names of their textures."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng, self.names = rng, list[str]()
        self.solids: list[Solid] = []

    def put(self, thing: str, place: Any, scale: Any = 1.0, turn_deg: float = 0.0) -> None:
        """Add all parts of a thing, scaled along its own axes, then rotated."""
        for part in _PARTS:
            if part[0] == thing:
                self.add(part, place, np.array(scale), turn_deg)

    def texture(self, name: str) -> int:
        if name in ("facade", "roof"):
            name = f"{name}:{self.rng.integers(2)}"
        self.names += [name] * (name not in self.names)
        return self.names.index(name)

    def add(self, part: _Part, place: Any, scale: Array, turn_deg: float) -> None:
        _, shape, middle, sizes, sides, top, tile_m = part
        half, turn = np.array(sizes) * scale, np.radians(turn_deg)
        rotation = np.array([[np.cos(turn), -np.sin(turn), 0], [np.sin(turn), np.cos(turn), 0], [0, 0, 1]])
        center, inverse = rotation @ (np.array(middle) * scale) + place, np.diag(1 / half) @ rotation.T
        local = np.array(_PLANES[shape], dtype=float)
        planes = np.c_[local[:, :3] @ inverse, local[:, 3] + local[:, :3] @ inverse @ center]
        planes /= np.linalg.norm(planes[:, :3], axis=1, keepdims=True)
        corners = (2.0 * np.array(list(np.ndindex(2, 2, 2))) - 1) * half @ rotation.T + center
        uv_axes = []
        for normal in planes[:, :3]:
            u = rotation[:, 0] if abs(normal[2]) > 0.95 else np.cross([0, 0, 1], normal)
            axes = np.stack([u / np.linalg.norm(u), np.cross(u, normal) / np.linalg.norm(u)])
            start, span = (corners @ axes.T).min(axis=0), np.ptp(corners @ axes.T, axis=0)
            repeats = np.maximum(np.round(span / abs(tile_m)), 1) / 4 if tile_m < 0 else span / tile_m
            offset = self.rng.integers(0, 4, 2) / 4 if tile_m < 0 else self.rng.random(2)
            uv_axes.append(np.c_[axes * (repeats / span)[:, None], offset - start * repeats / span])
        around = max(round(2 * np.pi * half[0] / abs(tile_m)), 1)
        self.solids.append(
            Solid(
                shape=shape,
                local_from_world=np.c_[inverse, -inverse @ center],
                corners=corners,
                planes=planes,
                uv_axes=np.array(uv_axes),
                wraps=(around, around * half[2] / (np.pi * half[0])),
                tile_m=tile_m if tile_m > 0 else -4 * tile_m,
                tint=self.rng.uniform(0.8, 1.1) * self.rng.uniform(0.9, 1.08, 3),
                textures=(self.texture(sides), self.texture(top or sides)),
            )
        )

    def square(self) -> None:
        """Build a town square: houses on three sides, and objects between them."""
        rng, here = self.rng, np.zeros(3)
        self.add(("ground", "box", (0, 0, -1), (60, 60, 1), "cobbles", "", 4.0), here, np.ones(3), 0.0)
        for side_deg, start, stop in ((0, -13.0, 11.0), (90, -4.0, 10.0), (-90, -12.0, 2.0)):
            cos, sin, x = np.cos(np.radians(side_deg)), np.sin(np.radians(side_deg)), start
            while x < stop:
                half = rng.uniform((1.8, 2.5, 2.6), (3.2, 3.5, 4.8 if side_deg == 0 else 3.4))
                middle, y = x + half[0], 12.5 + half[1] + rng.uniform(-0.5, 0.5)
                self.put("house", (middle * cos - y * sin, middle * sin + y * cos, 0), half, side_deg)
                x += 2 * half[0] + rng.choice([0.3, 0.3, 1.5])
        self.furnish((-8.5, -2.5, 0), (8.5, 9.5, 0))

    def courtyard(self) -> None:
        """Build a closed courtyard: the same five houses on each side, in another order, and objects between them."""
        self.add(("ground", "box", (0, 0, -1), (60, 60, 1), "cobbles", "", 4.0), np.zeros(3), np.ones(3), 0.0)
        rng, seed = self.rng, int(self.rng.integers(1 << 31))
        for side_deg in (0, 90, 180, 270):
            cos, sin, x = np.cos(np.radians(side_deg)), np.sin(np.radians(side_deg)), -12.5
            for house in rng.permutation(5):
                # Seeded by its number, so a house has the same size, textures and tint on each side.
                self.rng = np.random.default_rng([seed, house])
                half = self.rng.uniform((2.0, 2.5, 2.6), (2.8, 3.5, 4.4))
                middle, y = x + half[0], 12.5 + half[1]
                self.put("house", (middle * cos - y * sin, middle * sin + y * cos, 0), half, side_deg)
                x += 2 * half[0] + 0.3
        self.rng = rng
        self.furnish((-8.5, -8.5, 0), (8.5, 8.5, 0))

    def furnish(self, low: Triple, high: Triple) -> None:
        """Place twelve objects at random positions between two corners."""
        places: list[Array] = []
        while len(places) < 12:
            here = self.rng.uniform(low, high)
            if all(np.linalg.norm(here - place) > 2.8 for place in places):
                thing = ("tree", "fountain", "column", "crates", "stall", "balls")[len(places) % 6]
                self.put(thing, here, self.rng.uniform(0.8, 1.15), self.rng.uniform(-60, 60))
                places.append(here)


def make_scene(seed: int, *, kind: SceneKind = "square", texture_size: int = 512, device: Any = "cpu") -> Scene:
    """Create a town square, a courtyard whose sides look alike, or a wall of posters ("plane"), from the seed only."""
    if kind not in get_args(SceneKind):
        raise ConfigError(f"There is no scene of kind {kind!r}; choose one of {', '.join(get_args(SceneKind))}.")
    if seed < 0:
        raise ConfigError(f"The seed is {seed}; give 0 or more.")
    if texture_size < 32 or texture_size & (texture_size - 1):
        raise ConfigError(f"texture_size is {texture_size}; choose a power of two from 32 on, such as 512.")
    builder = Builder(np.random.default_rng([seed, 0]))
    if kind == "square":
        builder.square()
    elif kind == "courtyard":
        builder.courtyard()
    else:
        builder.add(("wall", "box", (0, 6, 3), (10, 0.5, 8), "posters", "", -4.0), np.zeros(3), np.ones(3), 0.0)
    painter = Painter(np.random.default_rng([seed, 1]), texture_size, torch.device(device))
    # (t 4 s s)
    levels = [torch.stack([painter.paint(name) for name in builder.names]).movedim(-1, 1)]
    while levels[-1].shape[-1] > 1:
        levels.append(functional.avg_pool2d(levels[-1], 2))
    texels = torch.cat([level.movedim(1, -1).reshape(-1, 4) for level in levels])
    return Scene(
        solids=tuple(builder.solids),
        texels=texels,
        texture_size=texture_size,
        texture_count=len(builder.names),
        dirt=(1 + 0.22 * painter.fractal(1.3)).clamp(0.3, 1.5)[None, None],
    )
