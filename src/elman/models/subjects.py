"""What the laws are tried on: a cell or a model with parameters, inputs and a state that holds something.

Shape letters: B rows, T time, I cell input, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.func import functional_call

from elman.cells import find_cell
from elman.cells.base import Cell
from elman.config import CellConfig, StackConfig
from elman.models.contract import CountedModel, LanguageModel
from elman.models.stack import Layer
from elman.models.state import State

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4}
"""Largest difference that counts as none, relative to the largest number compared."""

# The sizes all differ, so that no two dimensions can change places unseen.
VOCAB_SIZE, NUM_ROWS, NUM_STEPS, NUM_EARLIER = 11, 3, 5, 4
MANY_ROWS, MANY_STEPS = 17, 40
NUM_COUNTED = 300
"""Tokens of the text that a counted model is filled from."""


@dataclass(frozen=True)
class Subject:
    """What the laws speak of: a map from parameters, inputs and a state to outputs and the next state."""

    name: str
    dtype: torch.dtype
    parameters: Mapping[str, Tensor]
    earlier: Tensor
    """Inputs that were read before, (B, some T, ...), so that the laws are tried on a state that holds something."""
    inputs: Tensor
    """(B, T, ...)."""
    initial: State
    """B rows."""
    run: Callable[[Mapping[str, Tensor], Tensor, State], tuple[Tensor, State]]
    output_size: int

    def filled_state(self) -> State:
        """A state that has read something; whoever changes what he is given changes copies here."""
        parameters = {name: parameter.clone() for name, parameter in self.parameters.items()}
        with torch.no_grad():
            return self.run(parameters, self.earlier.clone(), self.initial.map(Tensor.clone))[1].map(Tensor.clone)

    def read(self, inputs: Tensor, state: State) -> tuple[Tensor, State]:
        """Outputs and state, without a gradient."""
        with torch.no_grad():
            return self.run(self.parameters, inputs, state)

    def differ(self, one: Tensor, other: Tensor) -> str:
        """How far two tensors are apart, or nothing where they are equal for their dtype."""
        if one.shape != other.shape:
            return f"shapes {list(one.shape)} and {list(other.shape)}"
        if not one.is_floating_point():
            return "" if torch.equal(one, other) else "unequal numbers"
        if not one.numel():
            return ""
        size, gap = other.abs().max().item(), (one - other).abs().max().item()
        allowed = TOLERANCES[self.dtype] * (size + 1e-3)
        return "" if gap <= allowed else f"by {gap:.2g} where the numbers reach {size:.2g}"

    def differ_in(self, one: tuple[Tensor, State], other: tuple[Tensor, State]) -> str:
        """The first difference between two results."""
        for name in other[1].tensors:
            if gap := self.differ(one[1].tensors[name], other[1].tensors[name]):
                return f"the state {name!r} differs {gap}"
        gap = self.differ(one[0], other[0])
        return f"outputs differ {gap}" if gap else ""

    def differ_in_gradients(self, some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> str:
        """The first difference between the gradients of the same leaves."""
        gaps = ((name, self.differ(some[name], gradient)) for name, gradient in others.items())
        return next((f"the gradient of {name!r} differs {gap}" for name, gap in gaps if gap), "")


@dataclass(frozen=True)
class CellSubject(Subject):
    """One cell; ``run`` is its scan."""

    cell: Cell


@dataclass(frozen=True)
class ModelSubject(Subject):
    """A language model; ``run`` gives log-probabilities."""

    model: LanguageModel


def model_subject(build: Callable[[torch.dtype], LanguageModel], dtype: torch.dtype) -> ModelSubject:
    """The model that is built, with nudged parameters and texts to read."""
    generator = torch.Generator().manual_seed(1)
    model = build(dtype)
    for parameter in model.parameters():
        parameter.data.add_(_nudge(parameter, generator))
    if isinstance(model, CountedModel):
        model.count(torch.randint(model.vocab_size, (NUM_COUNTED,), generator=generator).numpy())
    tokens_BT = torch.randint(model.vocab_size, (NUM_ROWS, NUM_EARLIER + NUM_STEPS), generator=generator)
    # The first row is a source and a target, each begun by a boundary, so that a model of pairs has both to read.
    tokens_BT[0, tokens_BT[0] == model.boundary_id] += 1
    tokens_BT[0, [0, NUM_EARLIER + 2]] = model.boundary_id

    def run(parameters: Mapping[str, Tensor], tokens_BT: Tensor, state: State) -> tuple[Tensor, State]:
        logits_BTV, state = functional_call(model, dict(parameters), (tokens_BT, state))
        return logits_BTV.log_softmax(-1), state

    return ModelSubject(
        name="the model",
        dtype=dtype,
        parameters={name: parameter.detach() for name, parameter in model.named_parameters()},
        earlier=tokens_BT[:, :NUM_EARLIER],
        inputs=tokens_BT[:, NUM_EARLIER:],
        initial=model.initial_state(NUM_ROWS),
        run=run,
        output_size=model.vocab_size,
        model=model,
    )


def cell_subject(config: StackConfig, name: str, dtype: torch.dtype) -> CellSubject:
    """The cell of this name with these settings, its parameters as they are drawn, nudged, and inputs to read."""
    generator = torch.Generator().manual_seed(1)
    cell = find_cell(name)(cast(CellConfig, config), config.embedding_size)
    layer = Layer(cell, dtype)
    layer.reset_parameters(generator)
    x_BTI = torch.randn(NUM_ROWS, NUM_EARLIER + NUM_STEPS, cell.input_size, generator=generator, dtype=dtype)

    def run(parameters: Mapping[str, Tensor], x_BTI: Tensor, state: State) -> tuple[Tensor, State]:
        outputs_BTH, parts = cell.scan(parameters, x_BTI, state.tensors)
        return outputs_BTH, State(parts)

    return CellSubject(
        name="scan",
        dtype=dtype,
        parameters={name: p.detach() + _nudge(p, generator) for name, p in layer.cell_parameters.items()},
        earlier=x_BTI[:, :NUM_EARLIER],
        inputs=x_BTI[:, NUM_EARLIER:],
        initial=State(layer.initial_state(NUM_ROWS, like=x_BTI)),
        run=run,
        output_size=cell.output_size,
        cell=cell,
    )


def _nudge(like: Tensor, generator: torch.Generator) -> Tensor:
    """Small random numbers: a law that holds where biases are zero may not hold elsewhere."""
    return 0.1 * torch.randn(like.shape, generator=generator, dtype=like.dtype)


def with_gradients(
    s: Subject, inputs: Tensor, state: State, steps: int | list[int] = MANY_STEPS, rows: int = MANY_ROWS
) -> tuple[tuple[Tensor, State], dict[str, Tensor]]:
    """Read inputs, so many steps and rows at a time: the result, and the gradient of every parameter."""
    parameters = leaves_of(s.parameters)
    read_rows = []
    for some in torch.arange(len(inputs)).split(rows):
        outputs, carried = [], state.select(some)
        for piece in inputs[some].split(steps, dim=1):
            output, carried = s.run(parameters, piece, carried)
            outputs.append(output)
        read_rows.append((torch.cat(outputs, dim=1), carried))
    result = torch.cat([output for output, _ in read_rows]), State.stack([carried for _, carried in read_rows])
    return (result[0].detach(), result[1].detach()), gradients_of(loss_of(*result), parameters)


def leaves_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies that gradients can be taken for, but for integers, which have none."""
    return {name: t.detach().clone().requires_grad_(t.is_floating_point()) for name, t in tensors.items()}


def loss_of(outputs: Tensor, state: State) -> Tensor:
    """A number that depends on all of a result."""
    floating = [tensor for tensor in (outputs, *state.tensors.values()) if tensor.is_floating_point()]
    return torch.stack([tensor.square().sum() for tensor in floating]).sum() if floating else torch.zeros(())


def gradients_of(loss: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradient of every floating leaf, zeros where none arrives."""
    floating = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    if not floating or not loss.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in floating.items()}
    found = torch.autograd.grad(loss, list(floating.values()), allow_unused=True, retain_graph=True)
    return {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(floating.items(), found, strict=True)
    }
