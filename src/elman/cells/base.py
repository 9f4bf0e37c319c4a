"""What a recurrent cell is: a definition of parameters, state and one time step, from which all else follows.

Shape letters: B rows, T time, I cell input, H hidden, G gates stacked (G = number of gates x H).

A cell holds no tensors. It says which parameters it needs (:meth:`Cell.parameters`), which state it carries
(:meth:`Cell.state`) and how one step maps parameters, input and state to output and next state (:meth:`Cell.step`).
The recurrent stack owns the parameters and hands them in, so that dropped, shared, sharded or traced weights are
ordinary arguments. Importing a cell imports no torch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeAlias

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from elman.cells.primitives import linear, split
from elman.config import CellConfig, Fraction
from elman.errors import ConfigError, nearest

if TYPE_CHECKING:
    import torch
    from torch import Tensor

CellState = Mapping[str, "Tensor"]
"""The named parts of one layer's state, each (B, ...)."""


class Step(NamedTuple):
    """What one time step gives."""

    output: Tensor
    """(B, output size): what the next layer reads."""
    state: CellState
    """The state after the step, with the parts and shapes of the state before it."""
    named: Mapping[str, Tensor]
    """Intermediates worth looking at, by name: gates, candidate, ..."""


Draw: TypeAlias = "Callable[[tuple[int, ...], torch.Generator, torch.dtype], Tensor]"
"""Draws a tensor of a shape and dtype on the CPU."""

_DISTRIBUTIONS = ("zeros", "ones", "uniform", "normal", "orthogonal", "own")


class Initial(NamedTuple):
    """How a parameter, or a stack of equal parameters along the first dimension, is first drawn.

    ``parts`` cuts the first dimension into equal blocks (the gates) that are drawn one after the other;
    ``constants`` overrides single blocks by a number.
    """

    kind: str
    """``zeros``, ``ones``, ``uniform`` (within +-``scale``), ``normal`` (standard deviation ``scale``), ``orthogonal``
    (rows or columns orthonormal, times ``scale``) or ``own`` (by the function ``draw_own``)."""
    scale: float = 1.0
    parts: int = 1
    constants: Mapping[int, float] = {}
    draw_own: Draw | None = None

    def fault(self, shape: tuple[int, ...]) -> str:
        """Why no tensor of this shape can be drawn, or nothing where one can."""
        if self.kind not in _DISTRIBUTIONS:
            return f"unknown initial distribution {self.kind!r}{nearest(str(self.kind), _DISTRIBUTIONS)}"
        if (self.kind == "own") != (self.draw_own is not None):
            return "draw_own belongs to the distribution 'own' and to no other"
        if self.kind == "orthogonal" and len(shape) < 2:
            return f"an orthogonal start needs two dimensions, its shape is {list(shape)}: take zeros or uniform"
        if self.parts != 1 and (not shape or self.parts < 1 or shape[0] % self.parts):
            return f"its shape {list(shape)} cannot be cut into {self.parts} equal parts along the first dimension"
        return ""

    def draw(self, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        """Draw a tensor of this shape on the CPU.

        Blocks are orthogonal in the sense of Saxe et al. 2014 (https://arxiv.org/abs/1312.6120): the Q of the QR
        decomposition of a Gaussian matrix, signs fixed by the diagonal of R so that Q is uniform.

        Raises:
            ConfigError: there is no such distribution, or not for this shape.
        """
        import torch

        if fault := self.fault(shape):
            raise ConfigError(fault)
        if not shape:
            return self.draw((1,), generator, dtype).reshape(())
        blocks = []
        block_shape = (shape[0] // self.parts, *shape[1:])
        for index in range(self.parts):
            if index in self.constants:
                block = torch.full(block_shape, self.constants[index], dtype=dtype)
            elif self.kind in ("zeros", "ones"):
                block = torch.full(block_shape, float(self.kind == "ones"), dtype=dtype)
            elif self.kind == "normal":
                block = torch.randn(block_shape, generator=generator, dtype=dtype) * self.scale
            elif self.draw_own is not None:
                block = self.draw_own(block_shape, generator, dtype)
            elif self.kind == "uniform":
                block = (torch.rand(block_shape, generator=generator, dtype=dtype) * 2 - 1) * self.scale
            else:
                block = torch.nn.init.orthogonal_(
                    torch.zeros(block_shape, dtype=dtype), gain=self.scale, generator=generator
                )
            blocks.append(block)
        return torch.cat(blocks)


class Parameter(NamedTuple):
    """The declaration of one parameter of a cell."""

    shape: tuple[int, ...]
    """Two dimensions: a matrix, of ``initial.parts`` blocks. Three: matrices, one beside the other."""
    initial: Initial
    elementwise: bool = False
    """Multiplies element by element: no linear map, whatever its shape, so that Muon leaves it alone."""


class StatePart(NamedTuple):
    """The declaration of one part of a cell's state."""

    shape: tuple[int, ...]
    """Without the batch dimension. A first size of 0 says that the part is empty at first and grows with the text; the
    newest entry is the last, and rows that have fewer than others are filled up with zeros at the front. All parts of a
    cell that grow have one length."""
    initial: float = 0.0
    """The finite value that every element has before the first token."""


class Cell(ABC):
    """Base of all recurrent cells. A subclass declares parameters and state, and defines the step.

    Args:
        config: the cell's settings, an instance of ``Config``.
        input_size: width I of the input at each step.
    """

    Config: ClassVar[type[CellConfig]] = CellConfig
    """The settings of this cell; a subclass of :class:`elman.config.CellConfig`."""
    paper: ClassVar[str] = ""
    """Where the equations come from."""
    through_tanh: ClassVar[tuple[str, ...]] = ()
    """Parts of the state that are read through a tanh alone, which lets no gradient pass where it is saturated."""

    def __init__(self, config: CellConfig, input_size: int) -> None:
        self.config = config
        self.input_size = input_size
        self.hidden_size = config.hidden_size

    @property
    def output_size(self) -> int:
        """Width of the output."""
        return self.hidden_size

    @abstractmethod
    def parameters(self) -> Mapping[str, Parameter]:
        """Name, shape and initial distribution of every parameter; there may be none."""

    def state(self) -> Mapping[str, StatePart]:
        """Name and shape of every part of the state; ``h`` alone unless a cell says otherwise. There may be none."""
        return {"h": StatePart((self.hidden_size,))}

    @abstractmethod
    def step(self, p: Mapping[str, Tensor], x_BI: Tensor, state: CellState) -> Step:
        """One time step, by the paper's equations; a pure function that changes nothing it is given."""

    def scan(self, p: Mapping[str, Tensor], x_BTI: Tensor, state: CellState) -> tuple[Tensor, CellState]:
        """All steps of a segment: outputs (B, T, H) and the state after the last. Override for speed alone."""
        return self.readable_scan(p, x_BTI, state)

    def readable_scan(self, p: Mapping[str, Tensor], x_BTI: Tensor, state: CellState) -> tuple[Tensor, CellState]:
        """The specification of :meth:`scan`: the step, once for each time."""
        import torch

        outputs = []
        for x_BI in x_BTI.unbind(1):
            output, state, _ = self.step(p, x_BI, state)
            outputs.append(output)
        return torch.stack(outputs, dim=1), state

    def num_parameters(self) -> int:
        """Number of trained numbers in one layer, from the shapes alone."""
        return sum(math.prod(parameter.shape) for parameter in self.parameters().values())

    def operations_per_step(self) -> int:
        """Floating-point operations of one step of one row: two for each element of each matrix."""
        return sum(2 * math.prod(p.shape) for p in self.parameters().values() if len(p.shape) > 1)


def check_declarations(cell: Cell) -> None:
    """Refuse what no model can hold.

    Raises:
        ConfigError: a parameter or a part of the state is declared wrongly; the line names it.
    """
    for name, parameter in cell.parameters().items():
        form = "Parameter(shape, Initial(...))"
        if fault := _fault(parameter, Parameter, form) or parameter.initial.fault(parameter.shape):
            raise ConfigError(f"the parameter {name!r} of {type(cell).__name__}: {fault}")
    for name, part in cell.state().items():
        if fault := _fault(part, StatePart, "StatePart(shape)"):
            raise ConfigError(f"the part {name!r} of the state of {type(cell).__name__}: {fault}")


def _fault(declared: Parameter | StatePart, kind: type, form: str) -> str:
    wrong_start = isinstance(declared, Parameter) and not isinstance(declared.initial, Initial)
    if not isinstance(declared, kind) or wrong_start:
        return f"it is declared by {declared!r}; accepted: {form}"
    shape = declared.shape
    fixed = shape[1:] if isinstance(declared, StatePart) and isinstance(shape, tuple) and shape[:1] == (0,) else shape
    if not isinstance(fixed, tuple) or any(not isinstance(size, int) or size < 1 for size in fixed):
        return f"its shape is {shape!r}; accepted: a tuple of whole numbers from 1, such as (self.hidden_size,)"
    return ""


class ResidualConfig(CellConfig):
    """Settings of the cells that are made for a residual stack with norms."""

    embedding_size: PositiveInt = 256
    """Width E of the token embedding; residual needs it equal to hidden_size."""
    residual: bool = True
    """Add each layer's input to its output; needs equal widths."""
    norm: Literal["none", "layer", "rms"] = "rms"
    """Normalise what each cell and feed-forward network reads, and the last output: layer or root mean square."""


class FeedForwardConfig(ResidualConfig):
    """Settings of the cells that want a feed-forward network after them as well."""

    feedforward_size: NonNegativeInt = 688
    """Width of a gated feed-forward network (SwiGLU) after each cell, commonly 8/3 of hidden_size; 0: none."""


class ConvolvedConfig(FeedForwardConfig):
    """Settings of the cells that want a short convolution before them, too."""

    convolution_size: NonNegativeInt = 4
    """Each cell reads a weighted sum, unit by unit, of its last so many inputs; 0: the input as it is."""


class HeadsConfig(ConvolvedConfig):
    """Settings of the cells that are cut into heads."""

    num_heads: PositiveInt = 4
    """Number N of heads, each of width hidden_size / N."""

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.hidden_size % self.num_heads or self.hidden_size == self.num_heads:
            nearest_size = max(2, self.hidden_size // self.num_heads) * self.num_heads
            raise ValueError(
                f"num_heads {self.num_heads} does not cut hidden_size {self.hidden_size} into equal heads of width 2 "
                f"or more; accepted: a hidden_size that is 2, 3, ... times num_heads, such as {nearest_size}"
            )
        return self


class BlockConfig(ResidualConfig):
    """Settings of the cells that are the whole mixing block of a residual stack, with a short convolution inside."""

    inner_convolution_size: Annotated[int, Field(ge=2)] = 4
    """Inside the block each unit reads a weighted sum of its last so many values."""


class GatedConfig(CellConfig):
    """Settings of the cells whose parameters are one input matrix, one recurrent matrix and biases."""

    biases: Literal["single", "double"] = "single"
    """One bias vector per gate, or two that are added, as `torch.nn` has."""
    recurrent_init: Literal["orthogonal", "uniform"] = "orthogonal"
    """Each gate's recurrent matrix orthogonal, or uniform within +-1/sqrt(H) as in `torch.nn`."""
    bias_init: Literal["zeros", "uniform"] = "zeros"
    """Biases zero, or uniform within +-1/sqrt(H) as in `torch.nn`."""
    weight_dropout: Fraction = 0.0
    """Share of the recurrent matrix's elements dropped, anew for every update, in training only."""
    zoneout: Fraction = 0.0
    """Share of units that keep their old state at each step; outside training each keeps this share of it."""


class GatedCell(Cell):
    """Base of the cells with W_ih, W_hh and b, each gate's block stacked along the first dimension.

    The names and the order of the blocks are those of ``torch.nn``, so that weights can be carried over.
    """

    Config = GatedConfig
    config: GatedConfig
    num_gates: ClassVar[int]

    def gate_biases(self) -> Mapping[int, float]:
        """Gates (by position) whose bias starts at a number of its own."""
        return {}

    def parameters(self) -> Mapping[str, Parameter]:
        H, G, config = self.hidden_size, self.num_gates, self.config
        bound = 1 / math.sqrt(H)
        recurrent_scale = 1.0 if config.recurrent_init == "orthogonal" else bound
        bias = Initial(config.bias_init, bound, G, self.gate_biases())
        parameters = {
            "weight_ih": Parameter((G * H, self.input_size), Initial("uniform", bound)),
            "weight_hh": Parameter((G * H, H), Initial(config.recurrent_init, recurrent_scale, G)),
        }
        if config.biases == "single":
            return parameters | {"bias": Parameter((G * H,), bias)}
        # The two are added: the second leaves a gate that starts at a given number to the first.
        second = bias._replace(constants=dict.fromkeys(bias.constants, 0.0))
        return parameters | {"bias_ih": Parameter((G * H,), bias), "bias_hh": Parameter((G * H,), second)}

    def input_and_recurrent(
        self, p: Mapping[str, Tensor], x_BI: Tensor, h_BH: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """W_ih x + b and W_hh h, gate by gate (a second bias belongs to the latter)."""
        of_input = linear(x_BI, p["weight_ih"], p["bias"] if "bias" in p else p["bias_ih"])
        of_state = linear(h_BH, p["weight_hh"], p.get("bias_hh"))
        return split(of_input, self.num_gates), split(of_state, self.num_gates)

    def with_one_bias(self, p: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parameters, with the sum of two bias vectors in their place."""
        others = {name: tensor for name, tensor in p.items() if not name.startswith("bias")}
        return {**others, "bias": p["bias"] if "bias" in p else p["bias_ih"] + p["bias_hh"]}

    def _fused_weights(self, p: Mapping[str, Tensor]) -> list[Tensor]:
        """The parameters as PyTorch's fused kernels take them: two matrices, two biases."""
        import torch

        if "bias" in p:
            return [p["weight_ih"], p["weight_hh"], p["bias"], torch.zeros_like(p["bias"])]
        return [p["weight_ih"], p["weight_hh"], p["bias_ih"], p["bias_hh"]]

    def is_looped(self, x_BTI: Tensor) -> bool:
        """Whether a loop with a gradient by hand (``elman.scan.loops``) takes the place of PyTorch's fused kernel.

        On a CPU some of those multiply once for each step to get the gradient of a matrix. They are kept where there is
        no gradient, for half the bits, which the loops do not have, where PyTorch's compiler reads along, and in
        float64, where what counts is to follow ``torch.nn`` to the last bits.
        """
        import torch

        device = x_BTI.device.type
        fused = torch.is_autocast_enabled(device) or torch.compiler.is_compiling()
        is_single = x_BTI.dtype == torch.float32
        return device == "cpu" and is_single and x_BTI.shape[1] > 1 and torch.is_grad_enabled() and not fused

    def fused_scan(
        self, kernel: Callable[..., tuple[Tensor, ...]], p: Mapping[str, Tensor], x_BTI: Tensor, carried: Any
    ) -> tuple[Tensor, ...]:
        """Call one of PyTorch's fused recurrent kernels (``torch.lstm`` and its like) for this one layer."""
        import torch

        # Has biases, layers, dropout, training (cuDNN keeps what backward needs), bidirectional, batch first.
        options = (True, 1, 0.0, torch.is_grad_enabled(), False, True)
        # For float16 the CPU has no such kernels.
        device = x_BTI.device.type
        half = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        with torch.autocast(device, enabled=half is not None and (device, half) != ("cpu", torch.float16)):
            results = kernel(x_BTI, carried, self._fused_weights(p), *options)
        return tuple(result.to(x_BTI.dtype) for result in results)
