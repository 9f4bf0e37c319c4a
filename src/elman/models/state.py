"""The state of a language model: everything it carries from one token to the next, as a value.

A state is a named set of tensors, each with the batch (B rows) first; there may be none. Every operation gives a new
state and acts on every part of every layer alike; none changes the state it is called on.

A part may grow with the text along its second dimension, as a Transformer's keys do: it has size 0 there at first. The
newest entry is the last; a row that has fewer entries than others of its batch is filled up with zeros at the front.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from elman.errors import ModelFileError


@dataclass(frozen=True)
class State:
    """Named tensors, each (B, ...)."""

    tensors: Mapping[str, Tensor]

    @property
    def num_bytes(self) -> int:
        """Memory of all rows, in bytes."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    def map(self, function: Callable[[Tensor], Tensor]) -> State:
        """The state with a function applied to every tensor."""
        return State({name: function(tensor) for name, tensor in self.tensors.items()})

    def detach(self) -> State:
        """The same values, cut off from the graph that computed them."""
        return self.map(Tensor.detach)

    def select(self, rows: Tensor | Sequence[int]) -> State:
        """The given rows, in the given order; a row may be taken more than once."""
        index = torch.as_tensor(rows)
        index = index if index.dtype == torch.bool else index.long()  # a list of none comes without a type
        return self.map(lambda tensor: tensor[index.to(tensor.device)])

    def reset(self, rows_B: Tensor, initial: State) -> State:
        """This state where ``rows_B`` is false, ``initial`` where it is true."""
        return State({
            name: torch.where(
                rows_B.to(tensor.device).view(-1, *[1] * (tensor.dim() - 1)),
                _as_long(initial.tensors[name], tensor.shape[1:2]),
                tensor,
            )
            for name, tensor in self.tensors.items()
        })  # fmt: skip

    @staticmethod
    def stack(states: Sequence[State]) -> State:
        """The rows of several states of one model, one below the other."""
        parts = {name: [state.tensors[name] for state in states] for name in states[0].tensors}
        longest = {name: max(tensor.shape[1:2] for tensor in tensors) for name, tensors in parts.items()}
        return State({
            name: torch.cat([_as_long(tensor, longest[name]) for tensor in tensors]) for name, tensors in parts.items()
        })  # fmt: skip

    def to_bytes(self) -> bytes:
        """The state in the safetensors format."""
        # Copied: two parts may be one tensor, which the format does not take.
        copies = {name: t.detach().cpu().contiguous().clone() for name, t in self.tensors.items()}
        return tensors_to_bytes(copies)

    @staticmethod
    def from_bytes(data: bytes, like: State) -> State:
        """Read what :meth:`to_bytes` wrote.

        Args:
            data: the bytes, from any source.
            like: a state of the model that is to go on from it, such as ``model.initial_state(1)``.

        Raises:
            ModelFileError: the bytes are damaged, or are no state of that model, or hold a non-finite number.
        """
        try:
            tensors = tensors_from_bytes(data)
        except (SafetensorError, ValueError, KeyError) as error:
            raise ModelFileError(f"these bytes are not a state that Elman saved: {error}") from error
        if set(tensors) != set(like.tensors):
            raise ModelFileError(
                f"this state has the parts {sorted(tensors)}; the model carries {sorted(like.tensors)}"
            )
        rows = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors.values()}
        if len(rows) > 1 or rows == {0}:
            raise ModelFileError("the parts of this state differ in their number of rows, or have none")
        for name, expected in like.tensors.items():
            tensor = tensors[name]
            fixed = 1 + grows(expected)
            same_form = tensor.dim() == expected.dim() and tensor.shape[fixed:] == expected.shape[fixed:]
            if tensor.dtype != expected.dtype or not same_form:
                raise ModelFileError(
                    f"part {name!r} of this state is {tensor.dtype} {list(tensor.shape[1:])}; "
                    f"the model carries {expected.dtype} {list(expected.shape[1:])}"
                )
            if tensor.is_floating_point() and not tensor.isfinite().all():
                raise ModelFileError(f"part {name!r} of this state holds a number that is not finite")
        lengths = {(name.rpartition(".")[0], tensors[name].shape[1]) for name in tensors if grows(like.tensors[name])}
        if len(lengths) > len({layer for layer, _ in lengths}):
            raise ModelFileError("the parts of this state that grow with the text differ in length within a layer")
        # Fresh storage: memory that comes from a file has another alignment, which changes the order of sums.
        return State({name: tensors[name].clone().to(like.tensors[name].device) for name in like.tensors})


def grows(initial: Tensor) -> bool:
    """Whether a part of this initial value grows with the text."""
    return initial.shape[1:2] == (0,)


def _as_long(tensor: Tensor, length: tuple[int, ...]) -> Tensor:
    """A part that may be shorter than others of its batch, filled up with zeros at the front."""
    missing = length[0] - tensor.shape[1] if length else 0
    if missing <= 0:
        return tensor
    return torch.cat([tensor.new_zeros(tensor.shape[0], missing, *tensor.shape[2:]), tensor], dim=1)
