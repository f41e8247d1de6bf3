"""A training step: losses, gradients, optimizer and averaged weights; on a GPU captured in a CUDA graph."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dualrc.data import PairBatch
from dualrc.losses import (
    distillation_loss,
    keypoint_losses,
    matching_losses,
    weak_losses,
)
from dualrc.model.dualrc import DualRCNet
from dualrc.model.network import Features, Network
from dualrc.train.config import TrainConfig
from dualrc.train.teacher import Teacher

# Number of steps before the capture, in which kernels are chosen and compiled and the optimizer creates its state.
_PLAIN = 3

# The loss, and values to log.
Outcome = tuple[Tensor, dict[str, Tensor]]


class TrainingStep(nn.Module):
    """Network and loss as one module, for distributed training."""

    def __init__(self, network: Network, config: TrainConfig, teacher: Teacher | None = None) -> None:
        super().__init__()
        self.network = network
        self.config = config
        self.teacher = teacher
        self.extract, self.loss, self.teach = self._features, self._losses, self._distilled

    def compile_parts(self) -> None:
        """Compile backbone, losses and teacher separately; one graph assumes layouts that kernels may not keep."""
        self.extract = torch.compile(self._features, dynamic=False)
        self.loss = torch.compile(self._losses, dynamic=False)
        self.teach = torch.compile(self._distilled, dynamic=False)

    def forward(self, parts: int, *tensors: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss, and values to log, from the tensors of a PairBatch with this number of parts."""
        batch = PairBatch.of(tensors)
        features = self.extract(batch.images0, batch.images1)
        # The loss of a part is a mean over its own points, so it does not depend on the process.
        maps = *features.coarse.chunk(2), *features.fine.chunk(2)
        chunks = [t.chunk(parts) for t in (*maps, *tensors)]
        results = [self.loss(*chunk) for chunk in zip(*chunks, strict=True)]
        logged = {name: torch.stack([r[1][name] for r in results]).mean() for name in results[0][1]}
        loss = torch.stack([total for total, _ in results]).mean()
        if self.teacher is not None and self.config.teacher is not None:
            assert batch.clean0 is not None and batch.clean1 is not None
            distilled = self.teach(features.coarse, batch.clean0, batch.clean1)
            loss = loss + self.config.teacher.weight * distilled
            logged["teacher"] = distilled.detach()
        return loss, logged

    def _features(self, images0: Tensor, images1: Tensor) -> Features:
        images = torch.cat([images0, images1]).contiguous(memory_format=torch.channels_last)
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.config.precision == "bfloat16"):
            return self.network.extract(images)

    def _distilled(self, coarse: Tensor, clean0: Tensor, clean1: Tensor) -> Tensor:
        assert self.teacher is not None
        return distillation_loss(coarse, self.teacher(torch.cat([clean0, clean1])))

    def _losses(
        self, coarse0: Tensor, coarse1: Tensor, fine0: Tensor, fine1: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        batch = PairBatch.of(tensors)
        features = Features(coarse=coarse0, fine=fine0), Features(coarse=coarse1, fine=fine1)
        if self.config.loss == "matching":
            assert isinstance(self.network, DualRCNet)
            losses = matching_losses(self.network, *features, batch)
        elif self.config.loss == "weak":
            losses = weak_losses(self.network, *features, batch)
        else:
            losses = keypoint_losses(self.network, *features, batch, self.config.loss)
        return losses.total, {name: value.detach() for name, value in losses.logged.items()}


class Update:
    """A step of the optimizer and of the averaged weights."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: Any,
        average: Network,
        network: Network,
        config: TrainConfig,
        fabric: Any,
    ) -> None:
        self._module, self._optimizer, self._config, self._fabric = module, optimizer, config, fabric
        self._parameters = [p for p in network.parameters() if p.requires_grad]
        self._averaged = _floating(average), _floating(network)
        self.device = fabric.device
        # Number of skipped steps.
        self.skipped = torch.zeros((), device=self.device)
        self.rate, self._share = (torch.zeros((), device=self.device) for _ in range(2))

    def __call__(self, parts: int, tensors: Sequence[Tensor], *, rate: float, decay: float) -> Outcome:
        """Train on the tensors of a PairBatch with this number of parts."""
        self.set(rate, decay)
        return self.run(parts, tensors)

    def set(self, rate: float, decay: float) -> None:
        """Set the learning rate, and the decay of the averaged weights, for the next step."""
        self.rate.fill_(rate)
        self._share.fill_(1 - decay)
        for group in self._optimizer.param_groups:
            group["lr"] = self.rate if self.device.type == "cuda" else rate

    def run(self, parts: int, tensors: Sequence[Tensor]) -> Outcome:
        """Run the step; all launches depend only on shapes."""
        loss, logged = self._module(parts, *tensors)
        if self._fabric.world_size > 1:
            self._fabric.backward(loss)
        else:
            loss.backward()
        self._drop_if_not_finite()
        if self._config.clip:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._config.clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        average, own = self._averaged
        change = torch._foreach_sub(own, average)
        torch._foreach_mul_(change, self._share)
        torch._foreach_add_(average, change)
        return loss.detach(), logged

    def _drop_if_not_finite(self) -> None:
        """Skip the step if a gradient is not finite, without synchronization with the GPU."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        finite = torch.stack(torch._foreach_norm(gradients)).sum().isfinite()
        for gradient in gradients:
            gradient.masked_fill_(~finite, 0)
        self.skipped += ~finite


class CapturedUpdate:
    """Training steps on one GPU as a CUDA graph: one launch instead of thousands."""

    def __init__(self, update: Update) -> None:
        self._update, self._calls = update, 0
        self._stream = torch.cuda.Stream(update.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor] = []
        self._outcome: Outcome | None = None
        self._parts = 0

    def __call__(self, parts: int, tensors: Sequence[Tensor], *, rate: float, decay: float) -> Outcome:
        """Like `Update`; the first steps run without a graph, then one is captured."""
        self._update.set(rate, decay)
        if not self._calls:
            self._inputs, self._parts = [torch.empty_like(t) for t in tensors], parts
        assert parts == self._parts
        # All steps read the same memory, in one layout.
        for own, given in zip(self._inputs, tensors, strict=True):
            own.copy_(given)
        self._calls += 1
        if self._calls == _PLAIN + 1:
            self._capture(parts)
        if self._graph is None or self._outcome is None:
            return self._plain(parts)
        self._graph.replay()
        return self._outcome

    def _plain(self, parts: int) -> Outcome:
        # On the stream of the capture, because gradients and saved tensors belong to a stream.
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            outcome = self._update.run(parts, self._inputs)
        current.wait_stream(self._stream)
        return outcome

    def _capture(self, parts: int) -> None:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            # Other threads may prepare pairs in the meantime.
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                self._outcome = self._update.run(parts, self._inputs)
            self._graph = graph
        except RuntimeError as error:
            remedy = "training continues without it, more slowly"
            message = f"Could not capture a training step in a CUDA graph ({error}); {remedy}."
            warnings.warn(message, stacklevel=2)


def _floating(network: nn.Module) -> list[Tensor]:
    """Return parameters and statistics, without gradients."""
    return [tensor for tensor in network.state_dict().values() if tensor.is_floating_point()]
