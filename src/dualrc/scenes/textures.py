"""Procedural textures that tile seamlessly."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

# Textures made of many similar pieces. Fields: rows; columns (0: irregular stones); shift of every other row;
# width of the joints; variation between pieces; streaks along u; stains; candidate colors; color of the joints.
_LAID: dict[str, tuple[int, int, float, float, float, float, float, str, str]] = {
    "bricks": (16, 8, 0.5, 0.09, 0.6, 0, 0.1, "a5583f 94664f b98a66", "b5aca0"),
    "cobbles": (14, 0, 0, 0.16, 0.5, 0, 0.1, "968f86 8b8f94 9c8f7c", "5d564c"),
    "leaves": (36, 0, 0, 0.3, 0.9, 0, 0.25, "6d8a42 7f9a47 9f8c3d 5a7b4d", "2b3a1c"),
    "marble": (3, 3, 0.4, 0.02, 0.12, 0, 0.1, "d5d0c8 b9b3ad 9aa39d", "8a8580"),
    "planks": (8, 2, 0.37, 0.03, 0.45, 0.13, 0.05, "a97c50 8f6a48 b08d62", "3d2c20"),
    "plaster": (2, 1, 0, 0, 0.02, 0, 0.12, "e0c79c d9a68f c9d0ba e4ddcf c2ccd2", "d8d0c0"),
    "roof": (20, 16, 0.5, 0.1, 0.5, 0, 0.15, "a4543c 8c4a3c 6f6a6c b0704a", "3a2420"),
    "stripes": (1, 16, 0, 0, 0.05, 0, 0.08, "b5413a+e9e2d2 3d6a8a+e9e2d2 4c7d55+e9e2d2 c98b2e+5a3b2c", "e9e2d2"),
    "tiles": (8, 8, 0, 0.03, 0.15, 0, 0.1, "d9cfc0+8d5a4b cfd4d6+4f6672 d8d2bd+6b6f52", "777068"),
}
_INKS = "e8dcc0 d9573f 2f5d7c e0a83c 2c2f36 5f8f74 c9b3a1 7a3f5d f4efe4"


class Painter:
    """Paints seamless textures (size, size, 4): linear RGB and glow."""

    def __init__(self, rng: np.random.Generator, size: int, device: torch.device) -> None:
        self.rng, self.size, self.device = rng, size, device
        self.fields: dict[tuple[float, float], Tensor] = {}
        axis = (torch.arange(size, device=device) + 0.5) / size
        self.v, self.u = torch.meshgrid(axis, axis, indexing="ij")

    def paint(self, name: str) -> Tensor:
        """Paint a texture by name; a suffix after a colon only makes it a different one of its kind."""
        name, glow = name.partition(":")[0], torch.zeros_like(self.u)
        if name == "facade":
            rgb, glow = self.facade()
        elif name == "posters":
            rgb = torch.cat([torch.cat([self.poster() for _ in range(4)], dim=1) for _ in range(4)])
        else:
            rgb = self.laid(name)
        rgb = rgb * (1 + 0.05 * self.fractal(1.2) + 0.04 * self.fractal(0.5))[..., None]
        return torch.cat([rgb.clamp(0.01, 1.0) ** 2.2, glow[..., None]], dim=-1)

    def random(self, *shape: int) -> Tensor:
        return torch.as_tensor(self.rng.random(shape, dtype=np.float32), device=self.device)

    def color(self, choices: str) -> Tensor:
        chosen = self.rng.choice(choices.split())
        base = [[int(text[i : i + 2], 16) / 255 for i in (0, 2, 4)] for text in chosen.split("+")]
        return (torch.tensor(base, device=self.device) + 0.05 * (self.random(3) - 0.5)).clamp(0.02, 0.98)

    def fractal(self, power: float = 1.5, stretch: float = 1.0) -> Tensor:
        """Return fractal noise with mean 0 and deviation 1; `stretch` elongates it along u."""
        if (power, stretch) not in self.fields:
            white = self.rng.standard_normal((self.size, self.size), dtype=np.float32)
            waves = torch.fft.fftfreq(self.size, 1 / self.size, device=self.device)
            k = torch.hypot(waves[:, None], stretch * waves[: self.size // 2 + 1].abs())
            gain = torch.where(k == 0, 0.0, k.clamp(min=1) ** -power)
            noise = torch.fft.irfft2(torch.fft.rfft2(torch.as_tensor(white, device=self.device)) * gain)
            self.fields[power, stretch] = noise / noise.std()
        # A shifted field looks like a new one and is much cheaper.
        return self.fields[power, stretch].roll(self.rng.integers(0, self.size, 2).tolist(), (0, 1))

    def stones(self, x: Tensor, y: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Compute Voronoi cells: the depth of each position inside its cell, in cells, and the index of the cell."""
        sites = 0.15 + 0.7 * self.random(count * count, 2)
        nearest, next_nearest = torch.full_like(x, 9.0), torch.full_like(x, 9.0)
        number = torch.zeros_like(x, dtype=torch.long)
        for dx, dy in np.ndindex(3, 3):
            column, row = x.floor() + (dx - 1), y.floor() + (dy - 1)
            cell = ((row % count) * count + column % count).long()
            distance = (x - column - sites[cell, 0]) ** 2 + (y - row - sites[cell, 1]) ** 2
            number = torch.where(distance < nearest, cell, number)
            next_nearest = torch.minimum(next_nearest, torch.maximum(nearest, distance))
            nearest = torch.minimum(nearest, distance)
        return (next_nearest.sqrt() - nearest.sqrt()) / 2, number

    def laid(self, name: str) -> Tensor:
        """Paint pieces of one or two colors, each slightly different, with joints between them (size, size, 3)."""
        rows, cols, shift, joint, spread, streaks, stains, colors, joints = _LAID[name]
        wobble = 0.02 if joint else 0.0
        x, y = self.u * (cols or rows) + wobble * self.fractal(1.8), self.v * rows + wobble * self.fractal(1.8)
        if cols:
            x = x + shift * (y.floor() % 2)
            number = ((y.floor() % rows) * cols + x.floor() % cols).long()
            inside = torch.minimum(_edge(x) * rows / cols, _edge(y))
        else:
            inside, number = self.stones(x, y, rows)
        color = self.color(colors)
        if len(color) > 1:
            color = color[(x.floor() + y.floor()).long() % 2]
        tone = 1 + spread * (self.random(rows * (cols or rows), 1) - 0.5) * (1 + 0.4 * (self.random(1, 3) - 0.5))
        shade = 1 - stains * self.fractal().abs() + streaks * self.fractal(1.0, stretch=14)
        rgb = color * tone[number] * (shade * (0.9 + 0.2 * ramp(inside, 0, 0.4)))[..., None]
        return torch.lerp(self.color(joints), rgb, ramp(inside, 0.3 * joint, joint)[..., None]) if joint else rgb

    def facade(self) -> tuple[Tensor, Tensor]:
        """Paint a wall with four by four windows; also return which panes glow at night."""
        rgb = self.laid("plaster")
        x, y = self.u * 4 % 1, self.v * 4 % 1
        number = (self.u * 4).long() + 4 * (self.v * 4).long()
        kind, across, sharp = self.random(16)[number], (x - 0.5).abs(), self.size / 8
        curtain = 0.08 + 0.06 * kind + 0.01 * torch.sin(y * 40 + 20 * kind)
        pane = torch.minimum(0.15 - across, 0.25 - (y - 0.47).abs())
        shutter = torch.minimum(0.075 - (across - 0.265).abs(), 0.28 - (y - 0.47).abs()) - (kind < 0.3).float()
        glass = torch.lerp(self.color("26323c"), self.color("8fa6b4"), ramp(y + 0.4 * x, 0.3, 1.1)[..., None])
        wood = self.color("3f6b5c 7a3b34 46597a 6b5a45") * (0.85 + 0.25 * torch.sin(y * 150))[..., None]
        # Depth of a position inside each layer, and the color of the layer.
        layers = (
            (torch.minimum(0.3 - across, 0.1 - (y - 0.84).abs()), rgb * ramp(y, 0.65, 0.95)[..., None]),
            (shutter, wood),
            (pane + 0.03, self.color("e8e2d6 cfc4b0 6b5a45")),
            (pane, glass),
            (torch.minimum(pane, across - curtain), self.color("d9d2c4 b5686a c9b98a")),
            (torch.minimum(pane, 0.01 - torch.minimum(across, (y - 0.38).abs())), self.color("e8e2d6")),
            (torch.minimum(0.22 - across, 0.02 - (y - 0.76).abs()), self.color("b0a89a")),
        )
        for inside, color in layers:
            rgb = torch.lerp(rgb, color.expand_as(rgb), (inside * sharp + 0.5).clamp(0, 1)[..., None])
        return rgb, (pane * sharp).clamp(0, 1) * (self.random(16)[number] > 0.5)

    def poster(self) -> Tensor:
        """Paint flat shapes over a gradient, and lines of synthetic text (size / 4, size / 4, 3)."""
        size = self.size // 4
        y, x = (t[:size, :size] * 8 - 1 for t in (self.v, self.u))
        rgb = torch.lerp(self.color(_INKS), self.color(_INKS), (0.5 + 0.5 * y)[..., None])
        for _ in range(8):
            cx, cy, radius, angle = self.rng.uniform((-0.8, -0.8, 0.1, 0), (0.8, 0.8, 0.6, 6.3))
            a, b = ((x - cx) * np.cos(t) + (y - cy) * np.sin(t) for t in (angle, angle + np.pi / 2))
            disc, bar = radius - torch.hypot(a, b), 0.1 - torch.maximum(b.abs(), a.abs() - radius)
            fan = radius / 2 - torch.maximum(b, a.abs() * 1.8 - b)
            inside = (disc, 0.1 - disc.abs(), bar, fan)[self.rng.integers(4)]
            rgb = torch.lerp(rgb, self.color(_INKS).expand_as(rgb), (inside * size / 2).clamp(0, 1)[..., None])
        # Letters of 5 x 4 dots with a margin.
        letters = functional.pad(self.random(30, 5, 4) > 0.45, (1, 1, 1, 1))
        # There is room for 7 lines of text, of which 3 are used.
        row, column = ((t + 1) * 21 for t in (y, x))
        row, column = row.long(), column.long()
        ink = letters[row // 7 % 3 * 7 + column // 6, row % 7, column % 6] & (row < 21)
        return torch.where(ink[..., None], self.color("f4efe4 22242a"), rgb)


def _edge(x: Tensor) -> Tensor:
    """Return the distance to the nearest integer."""
    return 0.5 - (x % 1 - 0.5).abs()


def ramp(x: Tensor, low: float, high: float) -> Tensor:
    """Return 0 below `low`, 1 above `high`, smooth between."""
    t = ((x - low) / (high - low)).clamp(0, 1)
    return t * t * (3 - 2 * t)
