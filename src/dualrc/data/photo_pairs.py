"""Pairs synthesized from single photos on the training device, with known motion, occlusion and light."""

import math
from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from dualrc.data.light import Draws, draw_numbers, light
from dualrc.data.pairs import PairBatch, left_out
from dualrc.data.photos import PhotoMotion, Photos
from dualrc.image import normal_rows, normalize_colors
from dualrc.pixels import FINE_STRIDE, cell_to_pixel, pixel_to_unit

# Number of samples per pixel of a tilted background.
_TAPS = 3


class _Drawn(NamedTuple):
    """The random choices of b pairs, for the background and l occluding layers."""

    # (b', 3, s, s) uint8 for each layer: all photos; for the background those that are not mosaics.
    canvases: tuple[Tensor, ...]
    # (b', 2) for each layer.
    sizes: tuple[Tensor, ...]
    # (9 (b - b'), 3, t, t) uint8: nine for each mosaic. Mosaics are the backgrounds of the first pairs.
    tiles: Tensor | None
    # (1 + l, b, ...): numbers of `Draws` for the motion of each layer.
    moves: tuple[Tensor, Tensor]
    # (2b, ...): numbers of `Draws` for the light of each image.
    lights: tuple[Tensor, Tensor]
    # (2b, 3, h, h), h: side of the images.
    noise: Tensor
    # (b, 2, n, 2): fine cells of both images.
    cells: Tensor


class _Layer(NamedTuple):
    """One photo as seen in both images, which are the second dimension of most tensors."""

    # (b, 3, s, 1.5 s), between 0 and 1: the photo; to its right the half, and below that the quarter size.
    levels: Tensor
    # (b, 1, 1, 2).
    sizes: Tensor
    # (b, 2, 3, 3).
    photo_from_image: Tensor
    # Outline with an angle-dependent radius; None for the background, which is unbounded.
    # (b, 1, 1, 2).
    center: Tensor | None = None
    # (b, 1, 1, 8): mean radius, amplitudes and phases of three harmonics, and presence.
    radii: Tensor | None = None
    # Deformation of the background: (b, 2, j, 6), amplitude (2), frequency (2), phases (2); None: rigid.
    waves: Tensor | None = None
    # Pattern over the background: (b, 2), its period in pixels of the photo and its opacity.
    pattern: Tensor | None = None

    def swapped(self) -> "_Layer":
        """Return the layer with the images exchanged."""
        waves = None if self.waves is None else self.waves.flip(1)
        return self._replace(photo_from_image=self.photo_from_image.flip(1), waves=waves)


class PhotoPairs:
    """Makes batches of pairs from photos; the same generator state makes the same batch.

    All random numbers are drawn first. The rest is one function of them, which can be compiled.
    """

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
        # Half precision takes half the time on a GPU, and is finer than the 256 levels of an image.
        self.light_type = torch.float16 if device.type == "cuda" else torch.float32
        self.sizes = photos.sizes.to(device)
        self.canvases = _packed(photos.canvases).to(device)
        self.tiles = _packed(_middles(photos)).to(device) if motion.mosaic else None
        self._colors = normal_rows(device, size)
        self._compute = self._batch

    def make(self, count: int, random: Generator) -> PairBatch:
        """Make a batch of `count` pairs."""
        return PairBatch.of(self._compute(self._draw(count, random)))

    def compile(self) -> None:
        """Compile the work on a batch; the first one then takes a while."""
        self._compute = torch.compile(self._batch, dynamic=False)

    def _draw(self, count: int, random: Generator) -> _Drawn:
        layers, mosaics = 1 + self.motion.layers, round(self.motion.mosaic * count)
        picked = [self._photos(count - (0 if rank else mosaics), random) for rank in range(layers)]
        uniform, normal = draw_numbers(layers * count, random, self.device)
        # Half of the points are centers of fine cells of image 0, half of image 1.
        cells = (count, 2, self.points - self.points // 2, 2)
        shape = (2 * count, 3, self.size, self.size)
        return _Drawn(
            canvases=tuple(canvases for canvases, _ in picked),
            sizes=tuple(sizes for _, sizes in picked),
            tiles=None if self.tiles is None or not mosaics else self._pick(self.tiles, 9 * mosaics, random)[0],
            moves=(uniform.unflatten(0, (layers, count)), normal.unflatten(0, (layers, count))),
            lights=draw_numbers(2 * count, random, self.device),
            noise=torch.randn(shape, generator=random, device=self.device, dtype=self.light_type),
            cells=torch.randint(self.size // FINE_STRIDE, cells, generator=random, device=self.device),
        )

    def _photos(self, count: int, random: Generator) -> tuple[Tensor, Tensor]:
        """Pick photos (b 3 s s) and their sizes (b 2)."""
        canvases, index = self._pick(self.canvases, count, random)
        return canvases, self.sizes.index_select(0, index).float()

    def _pick(self, packed: Tensor, count: int, random: Generator) -> tuple[Tensor, Tensor]:
        """Return some of the images, unpacked, and their numbers."""
        index = torch.randint(len(packed), (count,), generator=random, device=self.device)
        return packed.index_select(0, index).view(torch.uint8), index

    def _batch(self, drawn: _Drawn) -> list[Tensor]:
        """Return the tensors of a batch."""
        count = len(drawn.cells)
        layers = [self._layer(drawn, rank) for rank in range(len(drawn.canvases))]
        clean = self._render(layers)
        uniforms, normals = (numbers.to(self.light_type) for numbers in drawn.lights)
        lit = light(clean.to(self.light_type), uniforms, normals, drawn.noise, self.sensors).float()
        own = cell_to_pixel(drawn.cells, FINE_STRIDE)
        other, visible, absent = self._locate(layers, own)
        # The first pairs may be unrelated: their second image is that of other pairs.
        unrelated = min(round(self.motion.unrelated * count), count // 2)
        first = torch.arange(count, device=self.device)
        second = count + torch.where(first < unrelated, first + unrelated, first)
        related = (first >= unrelated)[:, None]
        half = self.points // 2
        nothing = torch.zeros_like(absent[:, 0])
        images = [lit[first], lit[second], *((clean[first], clean[second]) if self.clean else ())]
        tensors = [
            torch.cat([own[:, 0, :half], other[:, 1]], 1),
            torch.cat([other[:, 0, :half], own[:, 1]], 1),
            torch.cat([visible[:, 0, :half], visible[:, 1]], 1) & related,
            torch.cat([absent[:, 0, :half], nothing], 1) | ~related,
            torch.cat([nothing[:, :half], absent[:, 1]], 1) | ~related,
        ]
        images = [normalize_colors(each, self._colors) for each in images]
        return [*images[:2], *tensors, *images[2:]]

    def report(self) -> str:
        """Return one line about photos that are left out; empty if there are none."""
        return left_out(self.photos.broken, "Photos left out as unreadable or too small")

    def close(self) -> None:
        """Do nothing, because no batches are prepared."""

    def _layer(self, drawn: _Drawn, rank: int) -> _Layer:
        """Place a photo in both images; the layer with rank 0 is the background."""
        canvases, sizes, background = drawn.canvases[rank], drawn.sizes[rank], rank == 0
        mosaics = 0
        if background and drawn.tiles is not None:
            mosaics = len(drawn.tiles) // 9
            canvases, sizes = _with_mosaics(drawn.tiles, canvases, sizes)
        draw, motion = Draws(drawn.moves[0][rank], drawn.moves[1][rank]), self.motion
        # Photo pixels per image pixel; values below 1 enlarge. Both images share their mean scale.
        many = torch.arange(len(sizes), device=self.device) < mosaics
        mean_scale = torch.exp2(draw.uniform(-1.0, 0.2) + torch.where(many, 0.55, 0.0))
        still = draw.chance(motion.still) & background
        widest = torch.where(many, 2.6, 1.7)
        focus, photo_from_image = self._views(draw, sizes, mean_scale, widest, still, background=background)
        levels, sizes = _with_smaller(canvases.float() / 255), sizes[:, None, None]
        if not background:
            radius = draw.uniform(0.06, 0.3) * self.size * mean_scale
            harmonics = draw.normal(0.15, 3).clamp(-0.25, 0.25), draw.uniform(0, 2 * math.pi, 3)
            radii = torch.cat([radius[:, None], *harmonics, draw.chance(0.6).float()[:, None]], 1)
            return _Layer(levels, sizes, photo_from_image, center=focus[:, None, None], radii=radii[:, None, None])
        frequency = draw.normal(1.0, 3, 2) * 2 * math.pi / 400
        amplitude = draw.normal(1.0, 3, 2) * 0.12 / frequency.norm(dim=2, keepdim=True).clamp(min=2e-3)
        amplitude = amplitude * (draw.chance(motion.bend) & ~still)[:, None, None]
        waves = torch.cat([amplitude.clamp(-25, 25), frequency, draw.uniform(0, 2 * math.pi, 3, 2)], 2)
        pattern = None
        if motion.repeated:
            hides = draw.uniform(0.3, 0.75) * draw.chance(motion.repeated)
            pattern = torch.stack([draw.uniform(24, 90), hides], 1)
        # Image 0 is not deformed.
        waves = torch.stack([waves * 0, waves], 1)
        return _Layer(levels, sizes, photo_from_image, waves=waves, pattern=pattern)

    def _views(
        self, draw: Draws, sizes: Tensor, mean_scale: Tensor, widest: Tensor, still: Tensor, *, background: bool
    ) -> tuple[Tensor, Tensor]:
        """Return a position in each photo (b 2), and homographies to the photos from both images (b 2 3 3)."""
        motion = self.motion
        apart = draw.normal(motion.octaves).clamp(-2.2, 2.2)
        turn = torch.where(
            draw.chance(motion.any_rotation),
            draw.uniform(-math.pi, math.pi),
            draw.normal(math.radians(motion.rotation_deg)),
        )
        focus = sizes * draw.uniform(0.25, 0.75, 2)
        # Position of an occluding layer in image 0.
        middle = draw.uniform(0.2, 0.8, 1, 2) * self.size
        sign = torch.arange(2, device=self.device) - 0.5
        scale = mean_scale[:, None] * torch.exp2(sign * torch.where(still, 0, apart)[:, None])
        scale = scale.clamp(min=0.2).minimum(widest[:, None])
        stand = self.size / 2 if background else middle
        place = stand + draw.normal(motion.shift * self.size / 2, 2, 2)
        angle = sign * torch.where(still, 0, turn)[:, None] + draw.normal(0.1, 2)
        stretch, perspective = draw.normal(motion.stretch, 2, 2), draw.normal(motion.perspective, 2, 2)
        tilt = torch.zeros_like(perspective)
        if background and motion.tilted:
            tilts, toward = self._tilts(draw)
            # (b, 2): zero in the image that is not tilted.
            tilts = tilts[:, None] * (toward[:, :1] * sign > 0)
            # Closer parts appear larger, the more the closer the camera is.
            near = (tilts.tan() * toward[:, :1].abs()).clamp(max=0.5)
            perspective = perspective + toward[:, None, 1:] * near[..., None]
            tilt = toward[:, None, 1:] * tilts[..., None]
        # In still pairs, the second view is the first one, shifted.
        same = (torch.arange(2, device=self.device) > 0) & still[:, None]
        place = torch.where(same[..., None], place[:, :1] + draw.normal(6.0, 1, 2), place)
        scale, angle = (torch.where(same, x[:, :1], x) for x in (scale, angle))
        stretch, perspective, tilt = (torch.where(same[..., None], x[:, :1], x) for x in (stretch, perspective, tilt))
        views = place, scale, angle, stretch, perspective, tilt
        return focus, _photo_from_image(focus[:, None], *views, size=self.size)

    def _tilts(self, draw: Draws) -> tuple[Tensor, Tensor]:
        """Return tilt angles (b) of one of the images, and (b 3): which image, by sign, and the direction."""
        angle = draw.uniform(0, math.radians(self.motion.tilt_deg)) * draw.chance(self.motion.tilted)
        axis = draw.uniform(0, 2 * math.pi)
        return angle, torch.stack([draw.uniform(-0.5, 0.5), axis.cos(), axis.sin()], 1)

    def _render(self, layers: list[_Layer]) -> Tensor:
        """Render all images 0, then all images 1: (2b 3 s s), between 0 and 1."""
        axis = torch.arange(self.size, device=self.device, dtype=torch.float32)
        grid = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1).view(1, 1, -1, 2)
        grid = grid.expand(len(layers[0].sizes), 2, -1, -1)
        background, *occluding = layers
        # (b, 3, 2, n).
        image = _sample(background, _to_photo(background, grid))
        for layer in occluding:
            places = _to_photo(layer, grid)
            # These layers are not tilted.
            colors = _read(layer, places, _steps(places)[0].norm(dim=2))
            image = torch.where(_covers(layer, places)[:, None], colors, image)
        return image.permute(2, 0, 1, 3).reshape(-1, 3, self.size, self.size)

    def _locate(self, layers: list[_Layer], points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map points of both images (b 2 n 2) to the other one, with flags for visible and for certainly absent."""
        others = [layer.swapped() for layer in layers]
        top = _top_layer(layers, points)
        result, known = torch.zeros_like(points), torch.zeros_like(top, dtype=torch.bool)
        for rank, (layer, other) in enumerate(zip(layers, others, strict=True)):
            photo = _to_photo(layer, points)
            mine = top == rank
            result = torch.where(mine[..., None], _to_image(other, photo), result)
            # Beyond the borders the photo is mirrored, so positions there are ambiguous.
            inside = ((photo >= 0) & (photo <= layer.sizes - 1)).all(3)
            known = known | (mine & inside)
        framed = ((result >= 0) & (result <= self.size - 1)).all(3)
        visible = framed & (_top_layer(others, result) == top)
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


def _with_mosaics(tiles: Tensor, canvases: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Put mosaics of nine tiles each before photos, on canvases of the size of a mosaic."""
    mosaics = tiles.unflatten(0, (-1, 3, 3)).permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)
    side = mosaics.shape[3]
    room = side - canvases.shape[3]
    sizes = torch.cat([sizes.new_full((len(mosaics), 2), side), sizes])
    return torch.cat([mosaics, F.pad(canvases, (0, room, 0, room))]), sizes


def _with_smaller(images: Tensor) -> Tensor:
    """Add versions of half and quarter size to the right: (b 3 s s) -> (b 3 s 1.5s)."""
    half, quarter = (F.avg_pool2d(images, factor) for factor in (2, 4))
    room = half.shape[3] - quarter.shape[3]
    return torch.cat([images, torch.cat([half, F.pad(quarter, (0, room, 0, room))], 2)], 3)


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
    """Return homographies (... 3 3) that map `place` in the image to `focus` in the photo.

    `tilt` (... 2): viewing angle of the photo, in the direction in which it shrinks.
    """
    cos, sin = torch.cos(turn), torch.sin(turn)
    x, y = stretch.unbind(-1)
    rotation, shear = _matrix(cos, -sin, sin, cos), _matrix(1 + x, y, y, 1 - x)
    matrix = scale[..., None, None] * _product(_product(rotation, shear), _foreshortening(tilt))
    bottom = perspective.clamp(-0.5, 0.5) / size
    bottom = torch.cat([bottom, 1 - (bottom * place).sum(-1, keepdim=True)], -1)[..., None, :]
    top = torch.cat([matrix, -_product(matrix, place[..., None])], -1) + focus[..., None] * bottom
    return torch.cat([top, bottom], -2)


def _matrix(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Return matrices (... 2 2) from their entries, row by row."""
    return torch.stack([a, b, c, d], -1).unflatten(-1, (2, 2))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply small matrices. On a GPU, torch's product may round its factors to 11 bits."""
    return (a[..., None] * b[..., None, :, :]).sum(-2)


def _foreshortening(tilt: Tensor) -> Tensor:
    """Return matrices (... 2 2) of determinant 1 that stretch the direction of `tilt` (... 2), seen from that angle."""
    angle = tilt.norm(dim=-1)
    x, y = (tilt / angle.clamp(min=1e-6)[..., None]).unbind(-1)
    long = angle.cos().rsqrt()
    mean, half = (long + 1 / long) / 2, (long - 1 / long) / 2
    along, across = half * (x * x - y * y), half * 2 * x * y
    return _matrix(mean + along, across, across, mean - along)


def _project(homography: Tensor, points: Tensor) -> Tensor:
    """Apply homographies: (... 3 3), (... n 2) -> (... n 2); points behind the horizon are moved far away."""
    # Not a matrix product: on a GPU that may round its factors to 11 bits, an error of a quarter of a pixel.
    # (..., 1, 3) each.
    columns = homography[..., None, :, :].unbind(-1)
    mapped = points[..., :1] * columns[0] + points[..., 1:] * columns[1] + columns[2]
    depth = mapped[..., 2:]
    return torch.where(depth > 0.05, mapped[..., :2] / depth.clamp(min=0.05), -1e5)


def _inverse(matrix: Tensor) -> Tensor:
    """Invert (... 3 3) by cross products, which, unlike torch's inverse, never synchronizes with the GPU."""
    a, b, c = matrix.unbind(-1)
    rows = torch.stack([torch.linalg.cross(b, c), torch.linalg.cross(c, a), torch.linalg.cross(a, b)], dim=-2)
    return rows / (a * rows[..., 0, :]).sum(-1)[..., None, None]


def _bend(waves: Tensor, points: Tensor) -> Tensor:
    # (..., 1, j, 2).
    amplitude, frequency, phase = waves[..., None, :, :].split(2, dim=-1)
    # (..., n, j, 1).
    angle = (points[..., None, :] * frequency).sum(-1, keepdim=True)
    return (amplitude * torch.sin(angle + phase)).sum(-2)


def _to_photo(layer: _Layer, points: Tensor) -> Tensor:
    """Map points of both images (b 2 n 2) to the photo of the layer."""
    places = _project(layer.photo_from_image, points)
    return places if layer.waves is None else places + _bend(layer.waves, places)


def _to_image(layer: _Layer, places: Tensor) -> Tensor:
    """Map points of the layer's photo to the images: (b 2 n 2)."""
    if layer.waves is not None:
        straight = places
        # The deformation is a contraction, so this iteration converges to its inverse.
        for _ in range(12):
            straight = places - _bend(layer.waves, straight)
        places = straight
    return _project(_inverse(layer.photo_from_image), places)


def _covers(layer: _Layer, places: Tensor) -> Tensor:
    """Return whether the outline of an occluding layer contains these points of its photo: (b 2 n 2) -> (b 2 n)."""
    assert layer.center is not None and layer.radii is not None
    offset = places - layer.center
    angle = torch.atan2(offset[..., 1], offset[..., 0])[..., None] * torch.arange(2, 5, device=places.device)
    radius, amplitude, phase, present = layer.radii.split((1, 3, 3, 1), dim=3)
    edge = radius[..., 0] * (1 + (amplitude * torch.cos(angle + phase)).sum(3))
    return (offset.norm(dim=3) < edge) & (present[..., 0] > 0)


def _top_layer(layers: list[_Layer], points: Tensor) -> Tensor:
    top = torch.zeros(points.shape[:3], dtype=torch.long, device=points.device)
    for rank, layer in enumerate(layers[1:], start=1):
        top = torch.where(_covers(layer, _to_photo(layer, points)), rank, top)
    return top


def _steps(places: Tensor) -> tuple[Tensor, Tensor]:
    """Return the steps (b 2 2) to the right and down at the center of the images, in pixels of the photo."""
    side = math.isqrt(places.shape[2])
    middle = places.shape[2] // 2 + side // 2
    here = places[:, :, middle]
    return places[:, :, middle + 1] - here, places[:, :, middle + side] - here


def _sample(layer: _Layer, places: Tensor) -> Tensor:
    """Sample colors of the background at the positions of the images' pixels: (b 2 n 2) -> (b 3 2 n)."""
    right, down = _steps(places)
    # Singular values, and the direction in which the photo shrinks most.
    across, along, both = right.square().sum(2), down.square().sum(2), (right * down).sum(2)
    mean, half = (across + along) / 2, (((across - along) / 2).square() + both.square()).sqrt()
    longest, shortest = (mean + half).sqrt(), (mean - half).clamp(min=0).sqrt()
    angle = torch.atan2(2 * both, across - along) / 2
    step = right * angle.cos()[..., None] + down * angle.sin()[..., None]
    # Several samples along that direction prevent aliasing and keep the other direction sharp.
    spacing = torch.maximum(shortest, longest / _TAPS)
    reach = ((1 - spacing / longest.clamp(min=1e-6)).clamp(min=0)[..., None] * step)[:, :, None]
    shares = [(2 * tap + 1 - _TAPS) / (2 * _TAPS - 2) for tap in range(_TAPS)]
    first, *rest = (_read(layer, places + reach * share, spacing) for share in shares)
    colors = sum(rest, start=first) / _TAPS
    if layer.pattern is not None:
        period, hides = layer.pattern[:, None, None].split(1, dim=3)
        middle = layer.sizes / 2
        wrapped = middle + (places - middle) % period - period / 2
        colors = torch.lerp(colors, _read(layer, wrapped, longest), hides)
    return colors


def _read(layer: _Layer, places: Tensor, spacing: Tensor) -> Tensor:
    """Sample colors of the photo, mirrored at its borders: (b 2 n 2), pixel spacing (b 2) -> (b 3 2 n)."""
    height, width = layer.levels.shape[2:]
    last = layer.sizes - 1
    mirrored = last - ((places.clamp(-1e4, 1e4) % (2 * last)) - last).abs()
    # Where the photo is scaled down, the version of half or quarter size is sampled to prevent aliasing.
    half, quarter = ((spacing > factor / 1.6)[..., None, None] for factor in (2, 4))
    factor = torch.where(quarter, 4.0, torch.where(half, 2.0, 1.0))
    inside = ((mirrored + 0.5) / factor - 0.5).clamp(min=0).minimum(height / factor - 1)
    corner = torch.cat([torch.where(half, height, 0), torch.where(quarter, height // 2, 0)], 3)
    unit = pixel_to_unit(inside + corner, (width, height))
    return F.grid_sample(layer.levels, unit, mode="bilinear", align_corners=False)
