"""The oracle of every other engine: the formulas of `formulas.py`, one entry or one match at a time.

It shares only input and output types with the other engines and with the definition in `model`.
"""

import itertools
import math

import torch
from torch import Tensor

from dualrc.config import FineConfig
from dualrc.model.cells import FineMap, FineMapPair, MaskPair, TensorPair
from dualrc.model.consensus import Consensus
from dualrc.model.context import Context
from dualrc.model.engine import Engine
from dualrc.model.refine import CellMatches, PointMatches
from dualrc.model.search import Correspondences, Found
from dualrc.model.subpixel import Offsets, Subpixel, WindowPairs
from dualrc.model.support import DirectedMatches, Support
from dualrc.ops import formulas


class ReferenceEngine(Engine):
    """Loops over all entries; suitable for images of a few cells."""

    name = "reference"

    def normalize(self, features: Tensor) -> Tensor:
        result = features.double().clone()
        for b, i, j in itertools.product(range(len(features)), *map(range, features.shape[2:])):
            vector = features[b, :, i, j].double()
            result[b, :, i, j] = vector / math.sqrt(float(vector @ vector) + 1e-6)
        return result

    def brightness(self, images: Tensor) -> Tensor:
        batch, _, height, width = images.shape
        result = torch.zeros(batch, height, width, dtype=torch.float64)
        for b, y, x in itertools.product(range(batch), range(height), range(width)):
            for dy, dx in itertools.product(range(-2, 3), repeat=2):
                row, column = min(max(y + dy, 0), height - 1), min(max(x + dx, 0), width - 1)
                weight = math.comb(4, dy + 2) * math.comb(4, dx + 2) / 256
                result[b, y, x] += weight * float(images[b, :, row, column].double().mean())
        return result

    def context(self, context: Context, coarse: TensorPair, valid: MaskPair) -> tuple[Tensor, Tensor]:
        weights = {name: tensor.detach().double() for name, tensor in context.state_dict().items()}
        heads = [int(layer.heads) for layer in context.layers]  # type: ignore[arg-type]
        pairs = []
        for number, pair in enumerate(zip(*coarse, strict=True)):
            masks = [None if mask is None else mask[number] for mask in valid]
            pairs.append(formulas.attended(weights, heads, [features.double() for features in pair], masks))
        first, second = (torch.stack(maps).to(coarse[0].dtype) for maps in zip(*pairs, strict=True))
        return first, second

    def coarse(self, coarse: TensorPair, consensus: Consensus, valid: MaskPair) -> Tensor:
        weights = [weight.detach().double() for weight in consensus.weights]
        biases = [bias.detach().double() for bias in consensus.biases]
        pairs = []
        for number, (features0, features1) in enumerate(zip(*coarse, strict=True)):
            masks = [None if mask is None else mask[number] for mask in valid]
            scores = formulas.mutual_filter(formulas.correlation(features0.double(), features1.double(), *masks))
            pairs.append(formulas.mutual_filter(formulas.convolved(scores, weights, biases)))
        return torch.stack(pairs).to(coarse[0].dtype)

    def search_cells(
        self, tensor: Tensor, fine: FineMapPair, cells0: Tensor, config: FineConfig, *, wanted: Tensor | None = None
    ) -> Found:
        fine0, fine1 = fine
        width, points = 4 * fine0.width, []
        for pair in cells0.tolist():
            rows = [
                (4 * (cell // fine0.width) + place // 4, 4 * (cell % fine0.width) + place % 4)
                for cell in pair
                for place in range(16)
            ]
            points.append([(float(column), float(row)) for row, column in rows])
        found = self._search(tensor, fine0, torch.tensor(points, dtype=torch.float64), fine1, config, width)
        best, score = (column.view(*cells0.shape, 16) for column in found)
        return Found(best, score, torch.full(cells0.shape, fine1.height * fine1.width))

    def search_points(self, tensor: Tensor, fine: FineMapPair, points0: Tensor, config: FineConfig) -> Found:
        fine0, fine1 = fine
        found = self._search(tensor, fine0, points0.double(), fine1, config, None)
        best, score = (column[..., None] for column in found)
        return Found(best, score, torch.full(points0.shape[:2], fine1.height * fine1.width))

    def _search(
        self, tensor: Tensor, fine0: FineMap, points: Tensor, fine1: FineMap, config: FineConfig, width: int | None
    ) -> tuple[Tensor, Tensor]:
        """Return the best fine cell for each point (b n 2); `width` is given if the points are fine cells."""
        index = torch.full(points.shape[:2], -1)
        score = torch.zeros(points.shape[:2])
        size0, size1 = (fine0.height, fine0.width), (fine1.height, fine1.width)
        for pair, number in itertools.product(*map(range, index.shape)):
            own = tensor[pair].double().view(*size0, *size1)
            x, y = points[pair, number].tolist()
            features = fine0.features[pair].double().view(4 * size0[0], 4 * size0[1], -1)
            feature = features[int(y), int(x)] if width else formulas.unit(formulas.bilinear(features, x, y))
            # The published implementation reads nothing for the query at (0, 0).
            skips = bool(width) and config.reading == "corner" and x == 0 and y == 0
            coarse = torch.zeros(size1).double() if skips else formulas.coarse_scores(own, x, y, config.reading)
            scores = formulas.score_map(coarse, feature, fine1.features[pair].double(), size1, config.temperature)
            if fine1.valid is not None:
                scores = scores * fine1.valid[pair].view(scores.shape)
            index[pair, number], score[pair, number] = formulas.best(scores)
        return index, score

    def search(self, tensor: Tensor, fine0: FineMap, fine1: FineMap, config: FineConfig) -> Correspondences:
        count0, cells = fine0.height * fine0.width, []
        for pair in tensor:
            ranked = torch.sort(pair.double().amax(1), descending=True, stable=True).indices.tolist()
            cells.append(sorted(ranked[: int(config.query_share * count0)]))
        cells0 = torch.tensor(cells)
        there = self.search_cells(tensor, (fine0, fine1), cells0, config)
        every = torch.arange(fine1.height * fine1.width).expand(len(tensor), -1)
        answers = self.search_cells(tensor.transpose(1, 2), (fine1, fine0), every, config)
        shape = len(tensor), cells0.shape[1] * 16
        index0, back = torch.empty(shape, dtype=torch.long), torch.full(shape, -1)
        index1, score1 = there.best.flatten(1).clone(), torch.zeros(shape)
        for pair, number in itertools.product(*map(range, shape)):
            cell, place = cells[pair][number // 16], number % 16
            row, column = 4 * (cell // fine0.width) + place // 4, 4 * (cell % fine0.width) + place % 4
            index0[pair, number] = row * 4 * fine0.width + column
            if fine0.valid is not None and not fine0.valid[pair, index0[pair, number]]:
                index1[pair, number] = -1
            if index1[pair, number] >= 0:
                row, column = divmod(int(index1[pair, number]), 4 * fine1.width)
                cell, place = row // 4 * fine1.width + column // 4, row % 4 * 4 + column % 4
                back[pair, number] = answers.best[pair, cell, place]
                score1[pair, number] = answers.score[pair, cell, place]
        visited = there.visited, answers.visited
        return Correspondences(index0, index1, back, there.score.flatten(1), score1, *visited)

    def refine(
        self, subpixel: Subpixel, fine: FineMapPair, light: TensorPair | None, matches: CellMatches
    ) -> PointMatches:
        windows = formulas.window_pairs(
            *formulas.cell_windows(fine[0], matches.pair, matches.index0),
            *formulas.cell_windows(fine[1], matches.pair, matches.index1),
        )
        widths = [4 * one.width for one in fine]
        indices, scores = (matches.index0, matches.index1), (matches.score0, matches.score1)
        offsets = [
            formulas.offsets(subpixel, windows, scores[0]),
            formulas.offsets(subpixel, formulas.swapped_windows(windows), scores[1]),
        ]
        # offsets[0] is an offset in image 1, offsets[1] an offset in image 0.
        cells = [
            torch.stack([indices[side] % widths[side], indices[side] // widths[side]], 1) + offsets[1 - side][0] / 2
            for side in (0, 1)
        ]
        confidence = (torch.sigmoid(offsets[0][1]) * torch.sigmoid(offsets[1][1])).sqrt()
        shapes = [(len(one.features), 4 * one.height, 4 * one.width) for one in fine]
        around = [
            formulas.supported(
                DirectedMatches(indices[side], cells[side], cells[1 - side], confidence, matches.pair, shapes[side])
            )
            for side in (0, 1)
        ]
        score = confidence * (around[0].share * around[1].share).sqrt()
        crowds = [formulas.crowd(indices[side], score, matches.pair, widths[side]) for side in (0, 1)]
        score = score / ((1 + crowds[0] / 8) * (1 + crowds[1] / 8)).sqrt()
        points = [(cells[side] + around[1 - side].shift / 2 + 0.5) * 4 - 0.5 for side in (0, 1)]
        if light is not None:
            move1 = self.align(*light, matches.pair, points[0], points[1], around[0].motion)
            move0 = self.align(light[1], light[0], matches.pair, points[1], points[0], around[1].motion)
            points = [points[0] + move0 / 2, points[1] + move1 / 2]
        return PointMatches(points[0].float(), points[1].float(), score.float())

    def refine_points(
        self, subpixel: Subpixel, fine: FineMapPair, pair: Tensor, points0: Tensor, index1: Tensor, score: Tensor
    ) -> Offsets:
        (fine0, fine1), windows, whole = fine, [], []
        height, width = 4 * fine0.height, 4 * fine0.width
        for number, (x, y) in zip(pair.tolist(), points0.double().tolist(), strict=True):
            features = fine0.features[number].double().view(height, width, -1)
            around = [(x + dx, y + dy) for dy in (-1, 0, 1) for dx in (-1, 0, 1)]
            windows.append(torch.stack([formulas.unit(formulas.bilinear(features, *place)) for place in around]))
            whole.append(all(0 <= a <= width - 1 and 0 <= b <= height - 1 for a, b in around))
        windows1, whole1 = formulas.cell_windows(fine1, pair, index1)
        seen = formulas.window_pairs(torch.stack(windows), torch.tensor(whole), windows1, whole1)
        offset, logit = formulas.offsets(subpixel, seen, score)
        return Offsets(offset.float(), logit.float())

    def windows(self, fine0: FineMap, fine1: FineMap, pair: Tensor, index0: Tensor, index1: Tensor) -> WindowPairs:
        found = formulas.window_pairs(
            *formulas.cell_windows(fine0, pair, index0), *formulas.cell_windows(fine1, pair, index1)
        )
        return WindowPairs(found.middle0.float(), found.middle1.float(), found.cosine.float(), *found[3:])

    def support(self, matches: DirectedMatches) -> Support:
        return Support(*(column.float() for column in formulas.supported(matches)))

    def align(
        self, light0: Tensor, light1: Tensor, pair: Tensor, points0: Tensor, points1: Tensor, motion: Tensor
    ) -> Tensor:
        lights = [light.double() for light in (light0, light1)]
        columns = (column.double().nan_to_num() for column in (points0, points1, motion))
        rows = zip(pair.tolist(), *columns, strict=True)
        moves = [
            formulas.aligned(lights[0][p], lights[1][p], point0, point1, affine) for p, point0, point1, affine in rows
        ]
        return torch.stack(moves).float() if moves else torch.zeros(0, 2)
