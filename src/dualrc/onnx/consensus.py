"""Exportable neighborhood consensus: the same 4D convolutions in a fixed number of slabs, without in-place updates."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dualrc.model.consensus import Consensus, swap_images

# Number of slabs that the rows of image 0 are split into; each slab needs a quarter of the intermediate memory.
SLABS = 4


class SlabConsensus(nn.Module):
    """Symmetric consensus N(C) + N(C^T)^T of one pair, for inference."""

    def __init__(self, consensus: Consensus) -> None:
        super().__init__()
        self.sizes = [weight.shape[2] for weight in consensus.weights]
        self.kernels, self.biases = nn.ParameterList(), nn.ParameterList()
        for number, (weight, bias) in enumerate(zip(consensus.weights, consensus.biases, strict=True)):
            # The two directions form two groups of the convolution.
            both = torch.cat([weight, swap_images(weight)]).detach()
            if number == 0:
                # Neighbors in image 0 become input channels: o (k k) k k.
                kernel = both.permute(0, 2, 3, 1, 4, 5).flatten(1, 3)
            else:
                # One group of outputs for each neighbor in image 0: (2 k k o) i k k.
                kernel = both.unflatten(0, (2, -1)).permute(0, 3, 4, 1, 2, 5, 6).flatten(0, 3)
            self.kernels.append(nn.Parameter(kernel.contiguous(), requires_grad=False))
            self.biases.append(nn.Parameter(bias.detach().repeat(2), requires_grad=False))

    def forward(self, scores: Tensor) -> Tensor:
        """Return the filtered scores: (h0 w0 h1 w1) -> (h0 w0 h1 w1)."""
        height = scores.shape[0]
        halo = sum(size // 2 for size in self.sizes)
        rows = (height + SLABS - 1) // SLABS
        padded = F.pad(scores, (0, 0, 0, 0, 0, 0, halo, halo + SLABS * rows - height))
        row = torch.arange(SLABS * rows + 2 * halo, device=scores.device) - halo
        inside = ((row >= 0) & (row < height)).to(scores.dtype)[:, None, None, None, None]
        slabs = []
        for number in range(SLABS):
            part = slice(number * rows, (number + 1) * rows + 2 * halo)
            slabs.append(self._slab(padded[part], inside[part]))
        return torch.cat(slabs)[:height]

    def _slab(self, scores: Tensor, inside: Tensor) -> Tensor:
        """Filter rows with a halo: (r+2H w0 h1 w1) -> (r w0 h1 w1); `inside` (r+2H 1 1 1 1) is 0 outside the image."""
        x = self._first(scores)
        for number in range(1, len(self.sizes)):
            # Zero padding: clear the values that the previous layer computed for rows outside the image.
            done = sum(size // 2 for size in self.sizes[:number])
            x = self._next(x * inside[done : inside.shape[0] - done], number)
        return x.sum(2)

    def _first(self, scores: Tensor) -> Tensor:
        """Apply the first layer: (r+2h w0 h1 w1) -> (r w0 o h1 w1)."""
        size, (height, width) = self.sizes[0], scores.shape[:2]
        halo, rows = size // 2, height - 2 * (size // 2)
        padded = F.pad(scores, (0, 0, 0, 0, halo, halo))
        shifts = [(y, x) for y in range(size) for x in range(size)]
        planes = torch.stack([padded[y : y + rows, x : x + width] for y, x in shifts], dim=2)
        made = F.conv2d(planes.flatten(0, 1), self.kernels[0], self.biases[0], padding=halo)
        return made.relu().unflatten(0, (rows, width))

    def _next(self, x: Tensor, number: int) -> Tensor:
        """Apply a further layer: (r+2h w0 i h1 w1) -> (r w0 o h1 w1)."""
        size, (height, width) = self.sizes[number], x.shape[:2]
        halo, rows = size // 2, height - 2 * (size // 2)
        parts = F.conv2d(x.flatten(0, 1), self.kernels[number], padding=halo, groups=2)
        outputs = len(self.biases[number]) // 2
        # Shape: (r+2h w0 2 kk o h1 w1).
        parts = parts.unflatten(1, (2, size**2, outputs)).unflatten(0, (height, width))
        padded = F.pad(parts, (0, 0, 0, 0, 0, 0, 0, 0, 0, 0, halo, halo))
        total = self.biases[number].view(2, outputs, 1, 1)
        for place in range(size**2):
            y, z = divmod(place, size)
            total = total + padded[y : y + rows, z : z + width, :, place]
        return total.relu().flatten(2, 3)
