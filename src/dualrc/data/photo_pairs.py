"""Pairs synthesized from single photos on the training device, with known motion, occlusion and light."""

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

# Factors of the reduced versions of a photo, which are sampled where it is scaled down.
_SMALLER = (2, 4)
# Number of samples per pixel of a tilted background.
_TAPS = 3


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """One photo as seen in both images."""

    # (b, 3, s, s), between 0 and 1; then at half and at a quarter of the size.
    levels: tuple[Tensor, ...]
    # (b, 2).
    sizes: Tensor
    # (b, 3, 3) each.
    photo_from_image: tuple[Tensor, Tensor]
    # Outline with an angle-dependent radius; None for the background, which is unbounded.
    # (b, 2).
    center: Tensor | None
    # (b, 8): mean radius, amplitudes and phases of three harmonics, and presence.
    radii: Tensor | None
    # Deformation of the background of image 1: (b, j, 6), amplitude (2), frequency (2), phases (2); None: rigid.
    waves: Tensor | None
    # Pattern over the background: (b, 2), its period in pixels of the photo and its opacity.
    pattern: Tensor | None = None


class PhotoPairs:
    """Makes batches of pairs from photos; the same generator state makes the same batch."""

    def __init__(
        self,
        photos: Photos,
        *,
        size: int,
        points: int,
        motion: PhotoMotion,
        device: torch.device,
        sensors: float = 0.0,
        clean: bool = False,
    ) -> None:
        """`clean`: whether batches have the images before the change of light too."""
        self.photos, self.sensors, self.clean = photos, sensors, clean
        self.size = size
        self.points = points
        self.motion = motion
        self.device = device
        self.sizes = photos.sizes.to(device)
        self.canvases = _packed(photos.canvases).to(device)
        self.tiles = _packed(_middles(photos)).to(device) if motion.mosaic else None

    def make(self, count: int, random: Generator) -> PairBatch:
        """Make a batch of `count` pairs."""
        layers = [self._layer(count, random, background=True)]
        layers += [self._layer(count, random, background=False) for _ in range(self.motion.layers)]
        numbers = draw_numbers(2 * count, random, self.device)
        noise = torch.randn(2 * count, 3, self.size, self.size, generator=random, device=self.device)
        clean, lit = self.images(layers, *numbers, noise)
        half = self.points // 2
        # Half of the points are centers of fine cells of image 0, half of image 1.
        here = self._cell_centers(count, half, random)
        there, visible, absent = self._locate(layers, here, 0)
        back = self._cell_centers(count, self.points - half, random)
        origin, visible1, absent1 = self._locate(layers, back, 1)
        nothing0, nothing1 = torch.zeros_like(absent), torch.zeros_like(absent1)
        # The first pairs may be unrelated: their second image is that of other pairs.
        unrelated = min(round(self.motion.unrelated * count), count // 2)
        related = (torch.arange(count, device=self.device) >= unrelated)[:, None]
        first = torch.arange(count, device=self.device)
        second = count + torch.where(first < unrelated, first + unrelated, first)
        images0, images1 = (normalize_colors(lit[numbers]) for numbers in (first, second))
        return PairBatch(
            images0=images0,
            images1=images1,
            points0=torch.cat([here, origin], 1),
            points1=torch.cat([there, back], 1),
            valid=torch.cat([visible, visible1], 1) & related,
            absent0=torch.cat([absent, nothing1], 1) | ~related,
            absent1=torch.cat([nothing0, absent1], 1) | ~related,
            clean0=normalize_colors(clean[first]) if self.clean else None,
            clean1=normalize_colors(clean[second]) if self.clean else None,
        )

    def images(self, layers: list[_Layer], uniforms: Tensor, normals: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Render both images of all pairs, (2b 3 s s) between 0 and 1, before and after the change of light."""
        both = torch.cat([self._render(layers, number) for number in (0, 1)])
        # Half precision takes half the time on a GPU, and is finer than the 256 levels of an image.
        if not both.is_cuda:
            return both, light(both, uniforms, normals, noise, self.sensors)
        lit = light(both.half(), uniforms.half(), normals.half(), noise.half(), self.sensors)
        return both, lit.float()

    def compile(self) -> None:
        """Compile the rendering, which is most of the work; the first batch then takes a while."""
        self.images = torch.compile(self.images, dynamic=False)  # type: ignore[method-assign]

    def report(self) -> str:
        """Return one line about photos that are left out; empty if there are none."""
        return left_out(self.photos.broken, "Photos left out as unreadable or too small")

    def close(self) -> None:
        """Do nothing, because no batches are prepared."""

    def _cell_centers(self, count: int, points: int, random: Generator) -> Tensor:
        cells = torch.randint(self.size // FINE_STRIDE, (count, points, 2), generator=random, device=self.device)
        return cell_to_pixel(cells, FINE_STRIDE)

    def _layer(self, count: int, random: Generator, *, background: bool) -> _Layer:
        nine = round(self.motion.mosaic * count) if background else 0
        canvases, sizes = self._canvases(count, nine, random)
        canvases = canvases.float() / 255
        draw, motion = Draws(*draw_numbers(count, random, self.device)), self.motion
        # Photo pixels per image pixel; values below 1 enlarge. Both images share their mean scale.
        many = torch.arange(count, device=self.device) < nine
        mean_scale = torch.exp2(draw.uniform(-1.0, 0.2) + torch.where(many, 0.55, 0.0))
        still = (draw.uniform(0, 1) < motion.still) & background
        focus, views = self._views(draw, sizes, mean_scale, torch.where(many, 2.6, 1.7), still, background=background)
        transforms = [_photo_from_image(focus, *view, size=self.size) for view in views]
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
            photo_from_image=(transforms[0], transforms[1]),
            center=None if background else focus,
            radii=shape,
            waves=waves,
            pattern=pattern,
        )

    def _views(
        self, draw: Draws, sizes: Tensor, mean_scale: Tensor, widest: Tensor, still: Tensor, *, background: bool
    ) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
        """Return a position in each photo (b 2), and place, scale, angle, stretch and perspective in both images."""
        motion = self.motion
        apart = draw.normal(motion.octaves).clamp(-2.2, 2.2).where(~still, 0)
        turn = torch.where(
            draw.uniform(0, 1) < motion.any_rotation,
            draw.uniform(-math.pi, math.pi),
            draw.normal(math.radians(motion.rotation_deg)),
        ).where(~still, 0)
        focus = sizes * draw.uniform(0.25, 0.75, 2)
        # Position of an occluding layer in image 0.
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
                # Closer parts appear larger, the more the closer the camera is.
                perspective = perspective + toward[:, 1:] * (angle.tan() * toward[:, 0].abs()).clamp(max=0.5)[:, None]
                tilt = toward[:, 1:] * angle[:, None]
            views.append((place, scale, sign * turn + draw.normal(0.1), stretch, perspective, tilt))
        shifted = (views[0][0] + draw.normal(6.0, 2), *views[0][1:])
        views[1] = tuple(
            torch.where(still.view(-1, *[1] * (a.ndim - 1)), a, b) for a, b in zip(shifted, views[1], strict=True)
        )
        return focus, views

    def _tilts(self, draw: Draws) -> tuple[Tensor, Tensor]:
        """Return tilt angles (b) of one of the images, and (b 3): which image, by sign, and the direction."""
        angle = draw.uniform(0, math.radians(self.motion.tilt_deg)) * (draw.uniform(0, 1) < self.motion.tilted)
        axis = draw.uniform(0, 2 * math.pi)
        return angle, torch.stack([draw.uniform(-0.5, 0.5), axis.cos(), axis.sin()], 1)

    def _canvases(self, count: int, nine: int, random: Generator) -> tuple[Tensor, Tensor]:
        """Return photos (b 3 s s) and their sizes (b 2); the first `nine` are mosaics of the centers of nine photos."""
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
        """Map points of one image (b n 2) to the other, with flags for visible and for certainly absent points."""
        other = 1 - number
        top = _top_layer(layers, points, number)
        result, known = torch.zeros_like(points), torch.zeros_like(top, dtype=torch.bool)
        for rank, layer in enumerate(layers):
            photo = _to_photo(layer, points, number)
            mine = top == rank
            result = torch.where(mine[..., None], _to_image(layer, photo, other), result)
            # Beyond the borders the photo is mirrored, so positions there are ambiguous.
            inside = ((photo >= 0) & (photo <= layer.sizes[:, None] - 1)).all(2)
            known |= mine & inside
        framed = ((result >= 0) & (result <= self.size - 1)).all(2)
        visible = framed & (_top_layer(layers, result, other) == top)
        return result, visible & known, known & ~visible


def _packed(images: Tensor) -> Tensor:
    """Pack eight pixels of (n 3 h w) into one number; GPU training failed with more than 2^31 numbers in a tensor."""
    return images.contiguous().view(torch.int64)


def _middles(photos: Photos) -> Tensor:
    """Return squares from the centers of the photos, n 3 t t; of small photos the upper left corner of the canvas."""
    tile = photos.canvases.shape[3] // 64 * 40
    starts = ((photos.sizes - tile) // 2).clamp(min=0).tolist()
    return torch.stack(
        [canvas[:, y : y + tile, x : x + tile] for canvas, (x, y) in zip(photos.canvases, starts, strict=True)]
    )


def _photo_from_image(
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
    """Return homographies (b 3 3) that map `place` in the image to `focus` in the photo.

    `tilt` (b 2): viewing angle of the photo, in the direction in which it shrinks.
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
    """Return matrices (b 2 2) of determinant 1 that stretch the direction of `tilt` (b 2) as seen from that angle."""
    angle = tilt.norm(dim=1)
    x, y = (tilt / angle.clamp(min=1e-6)[:, None]).unbind(1)
    long = angle.cos().rsqrt()
    mean, half = (long + 1 / long) / 2, (long - 1 / long) / 2
    along, across = half * (x * x - y * y), half * 2 * x * y
    return torch.stack([torch.stack([mean + along, across], 1), torch.stack([across, mean - along], 1)], 1)


def _project(homography: Tensor, points: Tensor) -> Tensor:
    """Apply homographies: (b 3 3), (b n 2) -> (b n 2); points behind the horizon are moved far away."""
    # Not a matrix product: on a GPU that may round its factors to 11 bits, an error of a quarter of a pixel.
    # (b, 1, 3) each.
    columns = homography[:, None].unbind(3)
    mapped = points[..., :1] * columns[0] + points[..., 1:] * columns[1] + columns[2]
    depth = mapped[..., 2:]
    return torch.where(depth > 0.05, mapped[..., :2] / depth.clamp(min=0.05), -1e5)


def _inverse(matrix: Tensor) -> Tensor:
    """Invert (b 3 3) by cross products, which, unlike torch's inverse, never synchronizes with the GPU."""
    a, b, c = matrix.unbind(2)
    rows = torch.stack([torch.linalg.cross(b, c), torch.linalg.cross(c, a), torch.linalg.cross(a, b)], dim=1)
    return rows / (a * rows[:, 0]).sum(1)[:, None, None]


def _bend(waves: Tensor, points: Tensor) -> Tensor:
    # (b, 1, j, 2).
    amplitude, frequency, phase = waves[:, None].split(2, dim=3)
    # (b, n, j, 1).
    angle = (points[:, :, None] * frequency).sum(3, keepdim=True)
    return (amplitude * torch.sin(angle + phase)).sum(2)


def _to_photo(layer: _Layer, points: Tensor, number: int) -> Tensor:
    """Map points of image `number` to the photo of the layer."""
    places = _project(layer.photo_from_image[number], points)
    return places + _bend(layer.waves, places) if layer.waves is not None and number == 1 else places


def _to_image(layer: _Layer, places: Tensor, number: int) -> Tensor:
    """Map points of the layer's photo to image `number`."""
    if layer.waves is not None and number == 1:
        straight = places
        # The deformation is a contraction, so this iteration converges to its inverse.
        for _ in range(12):
            straight = places - _bend(layer.waves, straight)
        places = straight
    return _project(_inverse(layer.photo_from_image[number]), places)


def _covers(layer: _Layer, places: Tensor) -> Tensor:
    """Return whether the outline of the layer contains these points of its photo: (b n 2) -> (b n)."""
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
    """Sample colors of the photo at the positions of a square image's pixels: (b n 2) -> (b 3 n)."""
    side = math.isqrt(places.shape[1])
    middle = places.shape[1] // 2 + side // 2
    # Distance between the positions of neighboring pixels at the image center, in pixels of the photo.
    right, down = places[:, middle + 1] - places[:, middle], places[:, middle + side] - places[:, middle]
    # Occluding layers are not tilted.
    if layer.center is not None:
        return _read(layer, places, right.norm(dim=1))
    # Singular values, and the direction in which the photo shrinks most.
    across, along, both = right.square().sum(1), down.square().sum(1), (right * down).sum(1)
    mean, half = (across + along) / 2, (((across - along) / 2).square() + both.square()).sqrt()
    longest, shortest = (mean + half).sqrt(), (mean - half).clamp(min=0).sqrt()
    angle = torch.atan2(2 * both, across - along) / 2
    step = right * angle.cos()[:, None] + down * angle.sin()[:, None]
    # Several samples along that direction prevent aliasing and keep the other direction sharp.
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
    """Sample colors of the photo, mirrored at its borders, for a pixel spacing (b): (b n 2) -> (b 3 n)."""
    sizes = layer.sizes[:, None]
    period = 2 * (sizes - 1)
    mirrored = (sizes - 1) - ((places.clamp(-1e4, 1e4) % period) - (sizes - 1)).abs()
    full, *smaller = layer.levels
    unit = pixel_to_unit(mirrored, (full.shape[3], full.shape[2]))
    sharp = F.grid_sample(full, unit[:, None], mode="bilinear", align_corners=False)[:, :, 0]
    # Where the photo is scaled down, a version of half or quarter size is sampled to prevent aliasing.
    for small, factor in zip(smaller, _SMALLER, strict=True):
        soft = F.grid_sample(small, unit[:, None], mode="bilinear", padding_mode="border", align_corners=False)
        sharp = torch.where((spacing > factor / 1.6)[:, None, None], soft[:, :, 0], sharp)
    return sharp
