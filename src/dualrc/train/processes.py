"""State that several processes share: batch statistics, and requests to stop."""

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

import torch
from torch import Tensor, distributed, nn
from torch.distributed.nn import functional as across

from dualrc.machine import keep_signals


class SharedBatchNorm(nn.BatchNorm2d):
    """Batch normalization over the pairs of all processes; torch's own version runs on GPUs only."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize (b c h w)."""
        if not self.training:
            return super().forward(x)
        values = x.float()
        count = values.new_tensor([values.numel() / values.shape[1]])
        sums = torch.cat([values.sum((0, 2, 3)), values.square().sum((0, 2, 3)), count])
        sums = across.all_reduce(sums)
        total = sums[-1]
        mean, square = (sums[:-1] / total).chunk(2)
        variance = (square - mean.square()).clamp(min=0)
        with torch.no_grad():
            assert self.running_mean is not None and self.running_var is not None and self.momentum is not None
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * total / (total - 1), self.momentum)
        scale = self.weight * torch.rsqrt(variance + self.eps)
        shift = self.bias - mean * scale
        return (values * scale[:, None, None] + shift[:, None, None]).to(x.dtype)


def share_batch_norm(module: nn.Module) -> None:
    """Replace batch normalization in a module by `SharedBatchNorm`, in place."""
    for child in module.modules():
        if type(child) is nn.BatchNorm2d:
            child.__class__ = SharedBatchNorm


class StopRequest:
    """Whether Ctrl-C or SIGTERM requested the end of training."""

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None

    def agreed(self, late: bool, device: torch.device) -> bool:
        """Return whether any process has to stop, by request or because it is late; the answer is the same for all."""
        wish = self.asked is not None or late
        if distributed.is_available() and distributed.is_initialized():
            votes = torch.tensor([float(wish)], device=device)
            distributed.all_reduce(votes)
            return bool(votes.item())
        return wish


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """In the block, the first Ctrl-C or SIGTERM requests a stop; the second one has its usual effect."""
    request = StopRequest()
    with ExitStack() as handlers:
        handlers.enter_context(keep_signals())

        def ask(number: int, frame: FrameType | None) -> None:
            request.asked = signal.Signals(number)
            handlers.close()

        # Signals can be handled in the main thread only.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, ask)
            signal.signal(signal.SIGTERM, ask)
        yield request
