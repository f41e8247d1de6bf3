"""Context: self- and cross-attention over the coarse cells of both images before correlation.

Each coarse cell becomes a token that encodes its features and its position. In every layer a token attends to its own
image and to the other image. The result is added to the coarse features. Both images share the weights, so swapping
the images swaps the results. The backbone features of an image still do not depend on the other image.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dualrc.config import ContextConfig
from dualrc.errors import ConfigError

# Side of the squares that act as one key, in cells.
POOL = 2
# Octaves of the sinusoidal position encoding.
WAVES = 5
# Added to the mean square of features, which may be zero.
TINY = 1e-6


class ContextLayer(nn.Module):
    """Self-attention and cross-attention from tokens to pooled squares in parallel, followed by an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        # Queries to the token's own image, then to the other image.
        self.query = nn.Linear(width, 2 * width)
        # Keys and values for the square's own image, then for the other image.
        self.answer = nn.Linear(width, 4 * width)
        # A learned key and value to attend to when no square is relevant.
        self.nothing = nn.Parameter(torch.zeros(4 * width))
        self.merge = nn.Linear(2 * width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(approximate="tanh"), nn.Linear(2 * width, width))

    def read(self, tokens: Tensor, size: tuple[int, int], cells: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return queries (b 2 heads n d) of tokens (b n w), and keys and values (b 4 heads m+1 d) of their squares."""
        tokens = self.norm(tokens)
        squares = pool(tokens.transpose(1, 2).unflatten(2, size), cells).flatten(2).transpose(1, 2)
        answers = self.answer(squares)
        answers = torch.cat([answers, self.nothing.to(answers.dtype).expand(len(answers), 1, -1)], dim=1)
        queries, answers = (x.unflatten(2, (-1, self.heads, self._depth)) for x in (self.query(tokens), answers))
        return queries.permute(0, 2, 3, 1, 4), answers.permute(0, 2, 3, 1, 4)

    def update(self, tokens: Tensor, queries: Tensor, answers: list[Tensor], seen: list[Tensor | None]) -> Tensor:
        """Update tokens (b n w) by attention to their own image and to the other image, then by the MLP."""
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
    """Layers of attention over the coarse cells of both images; the identity at initialization."""

    def __init__(self, config: ContextConfig, channels: int) -> None:
        super().__init__()
        if config.width % config.heads:
            raise ConfigError(
                f"context.width = {config.width} must be a multiple of heads = {config.heads}; change one."
            )
        self.embed = nn.Linear(channels, config.width)
        self.place = nn.Linear(4 * WAVES, config.width, bias=False)
        self.layers = nn.ModuleList([ContextLayer(config.width, config.heads) for _ in range(config.layers)])
        self.norm = nn.LayerNorm(config.width)
        self.out = nn.Linear(config.width, channels)
        # Zero weights make the module an identity at initialization.
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(
        self, coarse0: Tensor, coarse1: Tensor, cells0: Tensor | None = None, cells1: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Update coarse maps (b c h0 w0), (b c h1 w1). Only `cells` (b h w) bool are attended to; None means all."""
        if coarse0.shape == coarse1.shape and cells0 is None and cells1 is None:
            first, second = self.attend([torch.cat([coarse0, coarse1])], [None])[0].split(len(coarse0))
        else:
            first, second = self.attend([coarse0, coarse1], [cells0, cells1])
        return first, second

    def attend(self, maps: list[Tensor], cells: list[Tensor | None]) -> list[Tensor]:
        """Process two maps, or one map that holds all first images and then all second images of the batch."""
        sizes = [(x.shape[2], x.shape[3]) for x in maps]
        # (b n c)
        values = [x.float().flatten(2).transpose(1, 2) for x in maps]
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
    """Average squares of POOL x POOL cells over valid cells: (b c h w), (b h w) -> (b c h/2 w/2), rounded up."""
    if cells is None:
        return F.avg_pool2d(maps, POOL, ceil_mode=True, count_include_pad=False)
    weight = cells[:, None].to(maps.dtype)
    sums = F.avg_pool2d(maps * weight, POOL, ceil_mode=True, count_include_pad=False)
    return sums / F.avg_pool2d(weight, POOL, ceil_mode=True, count_include_pad=False).clamp(min=0.1)


def waves(size: tuple[int, int], device: torch.device) -> Tensor:
    """Encode cell positions, scaled to -1..1 along the longer side, by sines and cosines: (h*w 4*WAVES)."""
    longest = max(size)
    y, x = (((2 * torch.arange(side, device=device) + 1 - side) / longest) for side in size)
    octaves = math.pi / 2 * 2.0 ** torch.arange(WAVES, device=device)
    # (h k) and (w k)
    along_y, along_x = (place[:, None] * octaves for place in (y, x))
    rows = torch.cat([along_y.sin(), along_y.cos()], dim=1)[:, None].expand(-1, size[1], -1)
    columns = torch.cat([along_x.sin(), along_x.cos()], dim=1)[None].expand(size[0], -1, -1)
    return torch.cat([rows, columns], dim=2).flatten(0, 1)


def _seen(cells: Tensor | None) -> Tensor | None:
    """Return the attention mask over squares, plus one entry for `nothing`: (b h w) -> (b 1 1 m+1)."""
    if cells is None:
        return None
    squares = F.max_pool2d(cells[:, None].float(), POOL, ceil_mode=True).flatten(2) > 0
    return F.pad(squares, (0, 1), value=True)[:, None]
