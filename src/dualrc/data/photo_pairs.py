"""Pairs made from single photographs, on the training device: known motion, occlusion and light."""

import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from dualrc.data.light import Draws, draw_numbers, light
from dualrc.data.pairs import PairBatch, left_out
from dualrc.data.photos import PhotoMotion, Photos
from dualrc.image import normalize_colors
from dualrc.pixels import FINE_STRIDE, cell_to_pixel, pixel_to_unit

# How many times smaller the versions of a photograph are that are read where it is scaled down.
_SMALLER = (2, 4)
# Places that are read for a pixel of a background that is seen from the side.
_TAPS = 3


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """One photograph seen in both pictures."""

    # B 3 s s, 0 to 1; then at half and at a quarter of the size.
    levels: tuple[Tensor, ...]
    # B 2.
    sizes: Tensor
    # B 3 3 each.
    photo_from_picture: tuple[Tensor, Tensor]
    # The outline: where angle-dependent radius ends; None for the background, which has no end.
    # B 2.
    center: Tensor | None
    # B 8: mean radius, then amplitudes and phases of three harmonics, and presence.
    radii: Tensor | None
    # The bending of picture 1's background: b j 6, amplitude (2), frequency (2), phases (2); None: stiff.
    waves: Tensor | None
    # The pattern that covers the background: b 2, its period in pixels of the photograph and how much it hides.
    pattern: Tensor | None = None


class PhotoPairs:
    """Makes batches of pairs from photographs; the same generator state makes the same batch."""

    def __init__(
        self,
        photos: Photos,
        *,
        size: int,
        points: int,
        motion: PhotoMotion,
        device: torch.device,
        sensors: float = 0.0,
    ) -> None:
        self.photos, self.sensors = photos, sensors
        self.size = size
        self.points = points
        self.motion = motion
        self.device = device
        self.sizes = photos.sizes.to(device)
        self.canvases = _packed(photos.canvases).to(device)
        self.tiles = _packed(_middles(photos)).to(device) if motion.mosaic else None

    def make(self, count: int, random: Generator) -> PairBatch:
        """A batch of `count` pairs."""
        layers = [self._layer(count, random, background=True)]
        layers += [self._layer(count, random, background=False) for _ in range(self.motion.layers)]
        numbers = draw_numbers(2 * count, random, self.device)
        noise = torch.randn(2 * count, 3, self.size, self.size, generator=random, device=self.device)
        images0, images1 = normalize_colors(self.pictures(layers, *numbers, noise)).split(count)
        half = self.points // 2
        # Half of the places are centres of fine cells of picture 0, half of picture 1.
        here = self._cell_centers(count, half, random)
        there, visible, absent = self._locate(layers, here, 0)
        back = self._cell_centers(count, self.points - half, random)
        origin, visible1, absent1 = self._locate(layers, back, 1)
        nothing0, nothing1 = torch.zeros_like(absent), torch.zeros_like(absent1)
        # The first pairs may show different things: their second picture is that of other pairs.
        strangers = min(round(self.motion.unrelated * count), count // 2)
        related = (torch.arange(count, device=self.device) >= strangers)[:, None]
        return PairBatch(
            images0=images0,
            images1=torch.cat([images1[strangers : 2 * strangers], images1[strangers:]]),
            points0=torch.cat([here, origin], 1),
            points1=torch.cat([there, back], 1),
            valid=torch.cat([visible, visible1], 1) & related,
            absent0=torch.cat([absent, nothing1], 1) | ~related,
            absent1=torch.cat([nothing0, absent1], 1) | ~related,
        )

    def pictures(self, layers: list[_Layer], uniforms: Tensor, normals: Tensor, noise: Tensor) -> Tensor:
        """Both pictures of all pairs, (2b 3 s s) in 0 to 1; the last three are the random numbers of their light."""
        both = torch.cat([self._render(layers, number) for number in (0, 1)])
        # Half precision takes half of the time on a GPU, and is finer than the 256 levels of a picture.
        if not both.is_cuda:
            return light(both, uniforms, normals, noise, self.sensors)
        return light(both.half(), uniforms.half(), normals.half(), noise.half(), self.sensors).float()

    def compile(self) -> None:
        """Compile the making of pictures, which is most of the work; takes a while when the first batch is made."""
        self.pictures = torch.compile(self.pictures, dynamic=False)  # type: ignore[method-assign]

    def report(self) -> str:
        """One line about photographs that are left out; empty if none is."""
        return left_out(self.photos.broken, "Photographs left out as unreadable or too small")

    def close(self) -> None:
        """Nothing is being prepared."""

    def _cell_centers(self, count: int, points: int, random: Generator) -> Tensor:
        cells = torch.randint(self.size // FINE_STRIDE, (count, points, 2), generator=random, device=self.device)
        return cell_to_pixel(cells, FINE_STRIDE)

    def _layer(self, count: int, random: Generator, *, background: bool) -> _Layer:
        nine = round(self.motion.mosaic * count) if background else 0
        canvases, sizes = self._canvases(count, nine, random)
        canvases = canvases.float() / 255
        draw, motion = Draws.of(count, random, self.device), self.motion
        # Photo pixels per picture pixel: below 1 enlarges. The two pictures share their mean scale.
        many = torch.arange(count, device=self.device) < nine
        mean_scale = torch.exp2(draw.uniform(-1.0, 0.2) + torch.where(many, 0.55, 0.0))
        still = (draw.uniform(0, 1) < motion.still) & background
        focus, views = self._views(draw, sizes, mean_scale, torch.where(many, 2.6, 1.7), still, background=background)
        transforms = [_photo_from_picture(focus, *view, size=self.size) for view in views]
        waves = shape = pattern = None
        if background and motion.repeated:
            hides = draw.uniform(0.3, 0.75) * (draw.uniform(0, 1) < motion.repeated)
            pattern = torch.stack([draw.uniform(24, 90), hides], 1)
        if background:
            frequency = draw.normal(1.0, 3, 2) * 2 * math.pi / 400
            amplitude = draw.normal(1.0, 3, 2) * 0.12 / frequency.norm(dim=2, keepdim=True).clamp(min=2e-3)
            amplitude = amplitude * ((draw.uniform(0, 1) < motion.bend) & ~still)[:, None, None]
            waves = torch.cat([amplitude.clamp(-25, 25), frequency, draw.uniform(0, 2 * math.pi, 3, 2)], 2)
        else:
            radius = draw.uniform(0.06, 0.3) * self.size * mean_scale
            harmonics = draw.normal(0.15, 3).clamp(-0.25, 0.25), draw.uniform(0, 2 * math.pi, 3)
            shape = torch.cat([radius[:, None], *harmonics, (draw.uniform(0, 1) < 0.6).float()[:, None]], 1)
        return _Layer(
            levels=(canvases, *(F.avg_pool2d(canvases, factor) for factor in _SMALLER)),
            sizes=sizes,
            photo_from_picture=(transforms[0], transforms[1]),
            center=None if background else focus,
            radii=shape,
            waves=waves,
            pattern=pattern,
        )

    def _views(
        self, draw: Draws, sizes: Tensor, mean_scale: Tensor, widest: Tensor, still: Tensor, *, background: bool
    ) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
        """A place of each photograph (b 2), and how both pictures see it: place, scale, angle, stretch, perspective."""
        motion = self.motion
        apart = draw.normal(motion.octaves).clamp(-2.2, 2.2).where(~still, 0)
        turn = torch.where(
            draw.uniform(0, 1) < motion.any_rotation,
            draw.uniform(-math.pi, math.pi),
            draw.normal(math.radians(motion.rotation_deg)),
        ).where(~still, 0)
        focus = sizes * draw.uniform(0.25, 0.75, 2)
        # Where an occluding layer stands in picture 0.
        middle = draw.uniform(0.2, 0.8, 2) * self.size
        tilts, toward = self._tilts(draw) if background and motion.tilted else (None, None)
        views: list[tuple[Tensor, ...]] = []
        for sign in (-0.5, 0.5):
            scale = (mean_scale * torch.exp2(sign * apart)).clamp(min=0.2).minimum(widest)
            stand = self.size / 2 if background else middle
            place = stand + draw.normal(motion.shift * self.size / 2, 2)
            stretch, perspective = draw.normal(motion.stretch, 2), draw.normal(motion.perspective, 2)
            tilt = torch.zeros_like(perspective)
            if tilts is not None and toward is not None:
                angle = tilts * (toward[:, 0] * sign > 0)
                # Near things look larger, the more the nearer the camera is.
                perspective = perspective + toward[:, 1:] * (angle.tan() * toward[:, 0].abs()).clamp(max=0.5)[:, None]
                tilt = toward[:, 1:] * angle[:, None]
            views.append((place, scale, sign * turn + draw.normal(0.1), stretch, perspective, tilt))
        shifted = (views[0][0] + draw.normal(6.0, 2), *views[0][1:])
        views[1] = tuple(
            torch.where(still.view(-1, *[1] * (a.ndim - 1)), a, b) for a, b in zip(shifted, views[1], strict=True)
        )
        return focus, views

    def _tilts(self, draw: Draws) -> tuple[Tensor, Tensor]:
        """Angles (b) that one of the pictures is tilted by, and (b 3): which, by its sign, and the direction."""
        angle = draw.uniform(0, math.radians(self.motion.tilt_deg)) * (draw.uniform(0, 1) < self.motion.tilted)
        axis = draw.uniform(0, 2 * math.pi)
        return angle, torch.stack([draw.uniform(-0.5, 0.5), axis.cos(), axis.sin()], 1)

    def _canvases(self, count: int, nine: int, random: Generator) -> tuple[Tensor, Tensor]:
        """Photographs (b 3 s s) and their sizes (b 2), the first `nine` of them joined from the middles of nine."""
        index = torch.randint(len(self.canvases), (count,), generator=random, device=self.device)
        canvases = self.canvases.index_select(0, index).view(torch.uint8)
        sizes = self.sizes.index_select(0, index).float()
        if nine == 0 or self.tiles is None:
            return canvases, sizes
        index = torch.randint(len(self.tiles), (nine * 9,), generator=random, device=self.device)
        tiles, tile = self.tiles.index_select(0, index).view(torch.uint8), self.tiles.shape[2]
        mosaics = tiles.unflatten(0, (nine, 3, 3)).permute(0, 3, 1, 4, 2, 5).reshape(nine, 3, 3 * tile, 3 * tile)
        room = 3 * tile - canvases.shape[3]
        canvases = torch.cat([mosaics, F.pad(canvases[nine:], (0, room, 0, room))])
        return canvases, torch.cat([torch.full_like(sizes[:nine], 3 * tile), sizes[nine:]])

    def _render(self, layers: list[_Layer], number: int) -> Tensor:
        count = len(layers[0].sizes)
        axis = torch.arange(self.size, device=self.device, dtype=torch.float32)
        grid = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1).view(1, -1, 2).expand(count, -1, -1)
        image = torch.zeros(count, 3, self.size, self.size, device=self.device)
        for layer in layers:
            places = _to_photo(layer, grid, number)
            cover = _covers(layer, places).view(count, 1, self.size, self.size)
            image = torch.where(cover, _sample(layer, places).view_as(image), image)
        return image

    def _locate(self, layers: list[_Layer], points: Tensor, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Where places of one picture (b n 2) are in the other; whether visible there; whether surely not."""
        other = 1 - number
        top = _top_layer(layers, points, number)
        result, known = torch.zeros_like(points), torch.zeros_like(top, dtype=torch.bool)
        for rank, layer in enumerate(layers):
            photo = _to_photo(layer, points, number)
            mine = top == rank
            result = torch.where(mine[..., None], _to_picture(layer, photo, other), result)
            # The rest is mirrored: ambiguous.
            inside = ((photo >= 0) & (photo <= layer.sizes[:, None] - 1)).all(2)
            known |= mine & inside
        framed = ((result >= 0) & (result <= self.size - 1)).all(2)
        visible = framed & (_top_layer(layers, result, other) == top)
        return result, visible & known, known & ~visible


def _packed(pictures: Tensor) -> Tensor:
    """Eight pixels of (n 3 h w) as one number: training went wrong on a GPU with more than 2^31 numbers in a tensor."""
    return pictures.contiguous().view(torch.int64)


def _middles(photos: Photos) -> Tensor:
    """Squares from the middles of the photographs, n 3 t t; of small ones the upper left corner of the canvas."""
    tile = photos.canvases.shape[3] // 64 * 40
    starts = ((photos.sizes - tile) // 2).clamp(min=0).tolist()
    return torch.stack(
        [canvas[:, y : y + tile, x : x + tile] for canvas, (x, y) in zip(photos.canvases, starts, strict=True)]
    )


def _photo_from_picture(
    focus: Tensor,
    place: Tensor,
    scale: Tensor,
    turn: Tensor,
    stretch: Tensor,
    perspective: Tensor,
    tilt: Tensor,
    *,
    size: int,
) -> Tensor:
    """Homographies (b 3 3) that take `place` in the picture to `focus` in the photograph.

    `tilt` (b 2) is the angle from which the photograph is seen, in the direction in which it shrinks.
    """
    cos, sin = torch.cos(turn), torch.sin(turn)
    rotation = torch.stack([torch.stack([cos, -sin], 1), torch.stack([sin, cos], 1)], 1)
    shear = torch.eye(2, device=focus.device) + torch.stack(
        [stretch, torch.stack([stretch[:, 1], -stretch[:, 0]], 1)], 1
    )
    matrix = torch.zeros(len(focus), 3, 3, device=focus.device)
    matrix[:, :2, :2] = scale[:, None, None] * rotation @ shear @ _foreshortening(tilt)
    matrix[:, 2, :2] = perspective.clamp(-0.5, 0.5) / size
    matrix[:, 2, 2] = 1
    before, after = torch.eye(3, device=focus.device).repeat(2, len(focus), 1, 1)
    before[:, :2, 2] = -place
    after[:, :2, 2] = focus
    return after @ matrix @ before


def _foreshortening(tilt: Tensor) -> Tensor:
    """Matrices (b 2 2) of determinant 1 that stretch the direction of `tilt` (b 2) as seen from that angle."""
    angle = tilt.norm(dim=1)
    x, y = (tilt / angle.clamp(min=1e-6)[:, None]).unbind(1)
    long = angle.cos().rsqrt()
    mean, half = (long + 1 / long) / 2, (long - 1 / long) / 2
    along, across = half * (x * x - y * y), half * 2 * x * y
    return torch.stack([torch.stack([mean + along, across], 1), torch.stack([across, mean - along], 1)], 1)


def _project(homography: Tensor, points: Tensor) -> Tensor:
    """(b 3 3), (b n 2) -> (b n 2); places behind the horizon go far away."""
    # Not as a product of matrices: on a GPU that may round its factors to 11 bits, which is a quarter of a pixel.
    # B 1 3 each.
    columns = homography[:, None].unbind(3)
    mapped = points[..., :1] * columns[0] + points[..., 1:] * columns[1] + columns[2]
    depth = mapped[..., 2:]
    return torch.where(depth > 0.05, mapped[..., :2] / depth.clamp(min=0.05), -1e5)


def _inverse(matrix: Tensor) -> Tensor:
    """(b 3 3) by cross products: unlike the library's, it never waits for the GPU."""
    a, b, c = matrix.unbind(2)
    rows = torch.stack([torch.linalg.cross(b, c), torch.linalg.cross(c, a), torch.linalg.cross(a, b)], dim=1)
    return rows / (a * rows[:, 0]).sum(1)[:, None, None]


def _bend(waves: Tensor, points: Tensor) -> Tensor:
    # B 1 j 2.
    amplitude, frequency, phase = waves[:, None].split(2, dim=3)
    # B n j 1.
    angle = (points[:, :, None] * frequency).sum(3, keepdim=True)
    return (amplitude * torch.sin(angle + phase)).sum(2)


def _to_photo(layer: _Layer, points: Tensor, number: int) -> Tensor:
    """Places in picture `number` to the layer's photograph."""
    places = _project(layer.photo_from_picture[number], points)
    return places + _bend(layer.waves, places) if layer.waves is not None and number == 1 else places


def _to_picture(layer: _Layer, places: Tensor, number: int) -> Tensor:
    """Places in the layer's photograph to picture `number`."""
    if layer.waves is not None and number == 1:
        straight = places
        # The bending is a contraction, so this converges on its inverse.
        for _ in range(12):
            straight = places - _bend(layer.waves, straight)
        places = straight
    return _project(_inverse(layer.photo_from_picture[number]), places)


def _covers(layer: _Layer, places: Tensor) -> Tensor:
    """Whether the layer's outline holds these places of its photograph: (b n 2) -> (b n)."""
    if layer.center is None or layer.radii is None:
        return torch.ones_like(places[..., 0], dtype=torch.bool)
    offset = places - layer.center[:, None]
    angle = torch.atan2(offset[..., 1], offset[..., 0])[..., None] * torch.arange(2, 5, device=places.device)
    radius, amplitude, phase, present = layer.radii[:, None].split((1, 3, 3, 1), dim=2)
    edge = radius[..., 0] * (1 + (amplitude * torch.cos(angle + phase)).sum(2))
    return (offset.norm(dim=2) < edge) & (present[..., 0] > 0)


def _top_layer(layers: list[_Layer], points: Tensor, number: int) -> Tensor:
    top = torch.zeros(points.shape[:2], dtype=torch.long, device=points.device)
    for rank, layer in enumerate(layers[1:], start=1):
        top = torch.where(_covers(layer, _to_photo(layer, points, number)), rank, top)
    return top


def _sample(layer: _Layer, places: Tensor) -> Tensor:
    """Colours of the photograph at the places of a square picture's pixels: (b n 2) -> (b 3 n)."""
    side = math.isqrt(places.shape[1])
    middle = places.shape[1] // 2 + side // 2
    # How far apart the places of neighbouring pixels are, in pixels of the photograph, in the middle of the picture.
    right, down = places[:, middle + 1] - places[:, middle], places[:, middle + side] - places[:, middle]
    # Occluding layers are not tilted.
    if layer.center is not None:
        return _read(layer, places, right.norm(dim=1))
    # Singular values and the direction in which the photograph shrinks most.
    across, along, both = right.square().sum(1), down.square().sum(1), (right * down).sum(1)
    mean, half = (across + along) / 2, (((across - along) / 2).square() + both.square()).sqrt()
    longest, shortest = (mean + half).sqrt(), (mean - half).clamp(min=0).sqrt()
    angle = torch.atan2(2 * both, across - along) / 2
    step = right * angle.cos()[:, None] + down * angle.sin()[:, None]
    # Several places along that direction, so that nothing aliases and the other direction stays sharp.
    spacing = torch.maximum(shortest, longest / _TAPS)
    reach = (1 - spacing / longest.clamp(min=1e-6)).clamp(min=0)[:, None] * step
    shares = [(2 * tap + 1 - _TAPS) / (2 * _TAPS - 2) for tap in range(_TAPS)]
    colors = sum(
        (_read(layer, places + (reach * s)[:, None], spacing) for s in shares), start=places[:, None, :, 0] * 0
    )
    colors = colors / _TAPS
    if layer.pattern is not None:
        period, hides = layer.pattern[:, None, :1], layer.pattern[:, 1:, None]
        middle_of = layer.sizes[:, None] / 2
        wrapped = middle_of + (places - middle_of) % period - period / 2
        colors = torch.lerp(colors, _read(layer, wrapped, longest), hides)
    return colors


def _read(layer: _Layer, places: Tensor, spacing: Tensor) -> Tensor:
    """Colours of the photograph, mirrored beyond its borders, for pixels so far apart (b): (b n 2) -> (b 3 n)."""
    sizes = layer.sizes[:, None]
    period = 2 * (sizes - 1)
    mirrored = (sizes - 1) - ((places.clamp(-1e4, 1e4) % period) - (sizes - 1)).abs()
    full, *smaller = layer.levels
    unit = pixel_to_unit(mirrored, (full.shape[3], full.shape[2]))
    sharp = F.grid_sample(full, unit[:, None], mode="bilinear", align_corners=False)[:, :, 0]
    # Where the photograph is scaled down, its half-size or quarter-size version is read, so that nothing aliases.
    for small, factor in zip(smaller, _SMALLER, strict=True):
        soft = F.grid_sample(small, unit[:, None], mode="bilinear", padding_mode="border", align_corners=False)
        sharp = torch.where((spacing > factor / 1.6)[:, None, None], soft[:, :, 0], sharp)
    return sharp
