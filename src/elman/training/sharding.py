"""A model divided over the processes that train it, where one device does not hold it: FSDP2 of PyTorch.

Every process keeps a part of each parameter, cut along its first dimension, with the gradient and the optimiser's
memory of that part. Before a layer reads, its parameters are brought together, and freed after it; in the backward pass
again, where the gradients are added up and cut. Embedding, output and all else that is no layer are one group, which
stays together from the forward to the backward pass. Initial values, sums and updates are those of undivided training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from elman.models.contract import LanguageModel
from elman.training.distributed import Ranks
from elman.training.optimizers import Optimizer

_TIMEOUT = timedelta(seconds=25)
"""For the processes to meet within an update, which all begin together."""


class Shards:
    """The parts of a model that this process holds.

    Args:
        network: the model, whole and in the memory of the CPU; it is divided in place.
        ranks: the processes.
        device: where the parts live.
    """

    def __init__(self, network: LanguageModel, ranks: Ranks, device: torch.device) -> None:
        self._network, self._ranks = network, ranks
        # Rows of an initial state are equal; of a divided parameter it could not be told what to make one like.
        initial = network.initial_state(1).map(lambda tensor: tensor.to(device))
        self._mesh = DeviceMesh.from_group(dist.new_group(timeout=_TIMEOUT), device.type)
        for layers in [module for module in network.modules() if isinstance(module, nn.ModuleList)]:
            for layer in layers:
                fully_shard(layer, mesh=self._mesh)
        fully_shard(network, mesh=self._mesh)
        for module in self._modules():
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no mean
        self._root.set_reduce_scatter_unused_params(True)
        register_fsdp_forward_method(network, "features")
        # For this one network, whose parameters are no longer whole when it is asked.
        network.initial_state = lambda batch_size: initial.select([0] * batch_size)  # type: ignore[method-assign]
        self._names = [name for name, _ in network.named_parameters()]
        self._divided = [cast(DTensor, parameter) for parameter in network.parameters()]
        self.parameters = [nn.Parameter(divided.to_local().detach()) for divided in self._divided]
        """The parts as plain tensors, in the order of the model's parameters; what changes them changes the model."""

    @property
    def _root(self) -> FSDPModule:
        return cast(FSDPModule, self._network)

    def _modules(self) -> Iterator[FSDPModule]:
        return (module for module in self._network.modules() if isinstance(module, FSDPModule))

    def adds_up(self, is_last: bool) -> None:
        """Whether the next backward pass is the last of its update, after which gradients are added up."""
        self._root.set_requires_gradient_sync(is_last)

    def take_gradients(self) -> None:
        """Hand the gradients of the model on to :attr:`parameters`."""
        for part, divided in zip(self.parameters, self._divided, strict=True):
            part.grad = None if divided.grad is None else cast(DTensor, divided.grad).to_local()
            divided.grad = None

    def norm(self, of_parts: Tensor) -> Tensor:
        """The norm over all processes, from that over the parts at hand."""
        (square,) = self._ranks.sum(of_parts.double().item() ** 2)
        return of_parts.new_tensor(square**0.5)

    def weights(self) -> dict[str, Tensor]:
        """In the first process the whole parameters by name, in the memory of the CPU; in the others none."""
        return self._joined({name: (part, part) for name, part in zip(self._names, self.parameters, strict=True)})

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take the part of this process of whole parameters, by name."""
        for module in self._modules():
            module.reshard()  # what is still together would not see the change
        with torch.no_grad():
            for name, part in zip(self._names, self.parameters, strict=True):
                part.copy_(self._part_of(weights[name]))

    def memory(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """In the first process all that the optimisers of all remember, by name; in the others none."""
        return self._joined({name: (value, optimizer.owner(name)) for name, value in optimizer.tensors().items()})

    def load_memory(self, optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
        """Give an optimiser the part of this process of what :meth:`memory` gave."""
        parts = {name: self._part_of(value) if value.dim() else value for name, value in tensors.items()}
        optimizer.load_tensors(parts)

    def _joined(self, parts: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        """Parts brought together; each with the parameter that it goes with. What has no dimension is not divided."""
        divided = {id(part): whole for part, whole in zip(self.parameters, self._divided, strict=True)}
        joined: dict[str, Tensor] = {}
        for name, (part, parameter) in sorted(parts.items(), key=lambda item: item[0]):  # in one order everywhere
            whole = part.detach()
            if whole.dim():
                like = divided[id(parameter)]
                whole = DTensor.from_local(
                    whole, self._mesh, [Shard(0)], run_check=False, shape=like.shape, stride=like.stride()
                ).full_tensor()
            if self._ranks.rank == 0:
                joined[name] = whole.cpu().clone()
        return joined

    def _part_of(self, whole: Tensor) -> Tensor:
        part = distribute_tensor(whole.to(self.parameters[0].device), self._mesh, [Shard(0)], src_data_rank=None)
        return part.to_local()
