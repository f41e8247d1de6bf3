"""Context: self- and cross-attention over the coarse cells of both images, before they are correlated.

Every cell becomes a token that knows its features and its place. In each layer it looks at its own image and at the
other one, which tells it how the two differ. What it has learnt is added to its features. The same weights serve both
images, so exchanging the images exchanges the results; the features of an image do not depend on the other.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dualrc.config import ContextConfig
from dualrc.errors import ConfigError

POOL = 2  # cells along each side of the squares that are attended to as one
WAVES = 5  # octaves of the sines and cosines that encode a place
TINY = 1e-6  # added to the mean square of features, which may be zero


class ContextLayer(nn.Module):
    """Tokens attend to the squares of their own image and to those of the other, side by side; then an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, 2 * width)  # asked of the own image, then of the other
        self.answer = nn.Linear(width, 4 * width)  # keys and values for the own image, then for the other
        self.nothing = nn.Parameter(torch.zeros(4 * width))  # the answer of no square, where none is of use
        self.merge = nn.Linear(2 * width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(approximate="tanh"), nn.Linear(2 * width, width))

    def read(self, tokens: Tensor, size: tuple[int, int], cells: Tensor | None) -> tuple[Tensor, Tensor]:
        """Queries (b 2 heads n d) of tokens (b n w), and answers (b 4 heads m+1 d) of the squares that they form."""
        tokens = self.norm(tokens)
        squares = pool(tokens.transpose(1, 2).unflatten(2, size), cells).flatten(2).transpose(1, 2)
        answers = self.answer(squares)
        answers = torch.cat([answers, self.nothing.to(answers.dtype).expand(len(answers), 1, -1)], dim=1)
        queries, answers = (x.unflatten(2, (-1, self.heads, self._depth)) for x in (self.query(tokens), answers))
        return queries.permute(0, 2, 3, 1, 4), answers.permute(0, 2, 3, 1, 4)

    def update(self, tokens: Tensor, queries: Tensor, answers: list[Tensor], seen: list[Tensor | None]) -> Tensor:
        """Tokens (b n w) with what they read in the answers of the own image and of the other."""
        found = []
        for side in (0, 1):
            keys, values = answers[side][:, 2 * side : 2 * side + 2].unbind(1)
            found.append(F.scaled_dot_product_attention(queries[:, side], keys, values, attn_mask=seen[side]))
        tokens = tokens + self.merge(torch.cat(found, dim=1).transpose(1, 2).flatten(2))
        return tokens + self.mlp(self.mlp_norm(tokens))

    @property
    def _depth(self) -> int:
        return self.norm.normalized_shape[0] // self.heads


class Context(nn.Module):
    """A few layers of attention over the coarse cells of both images; untrained, it changes nothing."""

    def __init__(self, config: ContextConfig, channels: int) -> None:
        super().__init__()
        if config.width % config.heads:
            raise ConfigError(f"context.width = {config.width} must be a multiple of heads = {config.heads}.")
        self.embed = nn.Linear(channels, config.width)
        self.place = nn.Linear(4 * WAVES, config.width, bias=False)
        self.layers = nn.ModuleList([ContextLayer(config.width, config.heads) for _ in range(config.layers)])
        self.norm = nn.LayerNorm(config.width)
        self.out = nn.Linear(config.width, channels)
        nn.init.zeros_(self.out.weight)  # starts as the identity
        nn.init.zeros_(self.out.bias)

    def forward(
        self, coarse0: Tensor, coarse1: Tensor, cells0: Tensor | None = None, cells1: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Coarse maps (b c h0 w0), (b c h1 w1) -> the same; only `cells` (b h w), bool, are attended to; None: all."""
        if coarse0.shape == coarse1.shape and cells0 is None and cells1 is None:
            first, second = self.attend([torch.cat([coarse0, coarse1])], [None])[0].split(len(coarse0))
        else:
            first, second = self.attend([coarse0, coarse1], [cells0, cells1])
        return first, second

    def attend(self, maps: list[Tensor], cells: list[Tensor | None]) -> list[Tensor]:
        """Two maps, or one that holds the first image's pairs and then the second's."""
        sizes = [(x.shape[2], x.shape[3]) for x in maps]
        values = [x.float().flatten(2).transpose(1, 2) for x in maps]  # b n c
        scales = [(x.square().mean(2, keepdim=True) + TINY).sqrt() for x in values]
        places = [self.place(waves(size, x.device)) for size, x in zip(sizes, maps, strict=True)]
        tokens = [self.embed(x / s) + place for x, s, place in zip(values, scales, places, strict=True)]
        seen = [_seen(some) for some in cells]
        for layer in self.layers:
            assert isinstance(layer, ContextLayer)
            read = [layer.read(*each) for each in zip(tokens, sizes, cells, strict=True)]
            answers = [answer for _, answer in read]
            others = [answers[0].roll(len(answers[0]) // 2, 0)] if len(maps) == 1 else answers[::-1]
            tokens = [
                layer.update(tokens[i], read[i][0], [answers[i], others[i]], [seen[i], seen[::-1][i]])
                for i in range(len(maps))
            ]
        changes = [self.out(self.norm(x)).float() * s for x, s in zip(tokens, scales, strict=True)]
        return [
            x + change.transpose(1, 2).unflatten(2, size).to(x.dtype)
            for x, change, size in zip(maps, changes, sizes, strict=True)
        ]


def pool(maps: Tensor, cells: Tensor | None) -> Tensor:
    """Means over squares of POOL x POOL cells, of those that count: (b c h w), (b h w) -> (b c h/2 w/2), rounded up."""
    if cells is None:
        return F.avg_pool2d(maps, POOL, ceil_mode=True, count_include_pad=False)
    weight = cells[:, None].to(maps.dtype)
    sums = F.avg_pool2d(maps * weight, POOL, ceil_mode=True, count_include_pad=False)
    return sums / F.avg_pool2d(weight, POOL, ceil_mode=True, count_include_pad=False).clamp(min=0.1)


def waves(size: tuple[int, int], device: torch.device) -> Tensor:
    """Sines and cosines of the places of cells, -1 to 1 along the longer side from the middle: (h*w 4*WAVES)."""
    longest = max(size)
    y, x = (((2 * torch.arange(side, device=device) + 1 - side) / longest) for side in size)
    octaves = math.pi / 2 * 2.0 ** torch.arange(WAVES, device=device)
    along_y, along_x = (place[:, None] * octaves for place in (y, x))  # h k, w k
    rows = torch.cat([along_y.sin(), along_y.cos()], dim=1)[:, None].expand(-1, size[1], -1)
    columns = torch.cat([along_x.sin(), along_x.cos()], dim=1)[None].expand(size[0], -1, -1)
    return torch.cat([rows, columns], dim=2).flatten(0, 1)


def _seen(cells: Tensor | None) -> Tensor | None:
    """Which squares are attended to, and after them nothing: (b h w) -> (b 1 1 m+1)."""
    if cells is None:
        return None
    squares = F.max_pool2d(cells[:, None].float(), POOL, ceil_mode=True).flatten(2) > 0
    return F.pad(squares, (0, 1), value=True)[:, None]
