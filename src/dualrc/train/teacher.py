"""A frozen ResNet-50 as a teacher of coarse features."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from dualrc.errors import WeightsError
from dualrc.files import replacing
from dualrc.model.backbone import ResNet, fold_batch_norm
from dualrc.model.checkpoint import load_imagenet_trunk, read_tensors
from dualrc.pixels import STRIDE
from dualrc.train.config import TeacherConfig


class Teacher(nn.Module):
    """Unit features of coarse cells: principal components of conv4 of a ResNet-50."""

    def __init__(self, config: TeacherConfig, device: torch.device | str = "cpu") -> None:
        """Load the file; on a GPU the trunk has weights in bfloat16."""
        super().__init__()
        self.trunk = ResNet("resnet50", stride_on=config.stride_on)
        load_imagenet_trunk(self.trunk, config.file)
        tensors = read_tensors(Path(config.file))
        if not {"mean", "projection"} <= tensors.keys():
            raise WeightsError(f"{config.file} has no projection; make it with scripts/make-teacher.")
        # (1024) and (k 1024)
        self.mean: Tensor
        self.projection: Tensor
        self.register_buffer("mean", tensors["mean"].float())
        self.register_buffer("projection", tensors["projection"].float())
        fold_batch_norm(self.trunk)
        self.to(device)
        half = torch.device(device).type == "cuda"
        dtype = torch.bfloat16 if half else torch.float32
        self.trunk.to(dtype=dtype, memory_format=torch.channels_last)  # type: ignore[call-overload]

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """(b 3 h w) normalized, sides multiples of 16 -> (b k h/16 w/16), unit vectors."""
        with torch.autocast(images.device.type, torch.bfloat16, enabled=images.is_cuda):
            features = centered_conv4(self.trunk, images).float()
        features = F.conv2d(features - self.mean[:, None, None], self.projection[:, :, None, None])
        # Smoothed features of ImageNet networks match slightly better, and are easier to predict.
        features = F.avg_pool2d(features, 3, 1, 1, count_include_pad=False)
        return F.normalize(features, dim=1)


def centered_conv4(trunk: ResNet, images: Tensor) -> Tensor:
    """Return conv4 (b 1024 h/16 w/16) at the centers of coarse cells.

    A ResNet's cell i is centered at pixel 16 i, so the image is moved by half a cell.
    """
    half = STRIDE // 2
    moved = F.pad(images[:, :, half:, half:], (0, half, 0, half), mode="replicate")
    conv4: Tensor = trunk(moved.contiguous(memory_format=torch.channels_last))[2]
    return conv4


@torch.no_grad()
def make_teacher(
    trunk: ResNet, batches: list[Tensor], path: Path, channels: int = 128, *, whitening: float = 0.5
) -> float:
    """Fit the projection to images (b 3 h w), write the file of a teacher, and return the explained variance.

    `whitening`: 1 gives all components the same variance, 0 their own.
    """
    cells = torch.cat([centered_conv4(trunk, images).flatten(2).transpose(1, 2).flatten(0, 1) for images in batches])
    covariance, mean = torch.cov(cells.double().T), cells.double().mean(0)
    values, vectors = torch.linalg.eigh(covariance)
    # Eigenvalues ascend. Without whitening, the first components dominate.
    values, vectors = values[-channels:].clamp(min=1e-12), vectors[:, -channels:]
    projection = (vectors * (values / values.max()) ** (-whitening / 2)).T
    tensors = {name: tensor.half() if tensor.ndim == 4 else tensor for name, tensor in trunk.state_dict().items()}
    with replacing(path) as temporary:
        save_file({**tensors, "mean": mean.float(), "projection": projection.float().contiguous()}, temporary)
    return float(values.sum() / covariance.trace())
