"""The recurrent stack: embedding, dropout, layers of recurrent cells, output.

Shape letters: B rows, T time, E embedding, I layer input, K convolution, H hidden, F features, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn

from elman.cells import find_cell
from elman.cells.base import Cell, GatedCell, Step, check_declarations
from elman.cells.primitives import layer_norm, linear, rms_norm, short_convolution, silu
from elman.config import CellConfig, ModelConfig, StackConfig, UniformStackConfig
from elman.errors import ConfigError
from elman.models.contract import Component, LanguageModel, Moment
from elman.models.heads import OutputHead, draw_embedding, draw_uniform, embed, make_head
from elman.models.heads import predicted_num_parameters as predicted_num_parameters_of_head
from elman.models.noise import Noise
from elman.models.state import State
from elman.scan.linear import causal_convolution

Parts: TypeAlias = Mapping[str, Tensor]
"""The state of one layer by the names of its parts."""

_CARRIED_INPUTS = "inputs"
"""The part of a layer's state that belongs to its convolution, beside those of its cell."""


def _cells(config: StackConfig) -> list[Cell]:
    """The cell of each layer, from the first."""
    cells: list[Cell] = []
    for name in config.cell_names:
        input_size = cells[-1].output_size if cells else config.embedding_size
        # The settings of a stack are those of its cells too (elman.models.kinds puts them together).
        cell = find_cell(name)(cast(CellConfig, config), input_size)
        if config.residual and cell.output_size != input_size:
            before = "the embedding (model.embedding_size)" if not cells else f"layer {len(cells)}"
            raise ConfigError(
                f"model.residual needs equal widths, but {before} gives {input_size} and layer {len(cells) + 1} "
                f"{cell.output_size}: make them equal, or set model.residual false"
            )
        cells.append(cell)
    return cells


class Norm(nn.Module):
    """Layer normalisation (Ba et al. 2016, https://arxiv.org/abs/1607.06450), or by the root mean square alone (Zhang
    and Sennrich 2019, https://arxiv.org/abs/1910.07467). The scale starts at 1, the shift at 0."""

    def __init__(self, kind: str, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(width, dtype=dtype)) if kind == "layer" else None

    def reset_parameters(self) -> None:
        """Scale 1, shift 0."""
        self.weight.data.fill_(1.0)
        if self.bias is not None:
            self.bias.data.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return rms_norm(x, self.weight) if self.bias is None else layer_norm(x, self.weight, self.bias)

    @staticmethod
    def predicted_num_parameters(kind: str, width: int) -> int:
        """Number of trained numbers; none for the kind ``none``."""
        return {"none": 0, "rms": width, "layer": 2 * width}[kind]


class FeedForward(nn.Module):
    """A gated feed-forward network: ``W_o (silu(W_g x) * (W_u x))``.

    Initialisation: uniform within +-sqrt(3/width of the input), W_o so many times smaller as keeps a sum of
    ``num_branches`` of them at a variance of about one.
    Paper: Shazeer 2020, https://arxiv.org/abs/2002.05202 (SwiGLU).
    """

    def __init__(self, width: int, hidden_size: int, num_branches: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._num_branches = num_branches
        self.gate = nn.Parameter(torch.zeros(hidden_size, width, dtype=dtype))
        self.up = nn.Parameter(torch.zeros(hidden_size, width, dtype=dtype))
        self.down = nn.Parameter(torch.zeros(width, hidden_size, dtype=dtype))

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw all three anew."""
        for matrix, shrink in ((self.gate, 1), (self.up, 1), (self.down, self._num_branches)):
            draw_uniform(matrix, math.sqrt(3 / matrix.shape[1] / shrink), generator)

    def forward(self, x: Tensor) -> Tensor:
        """Map the last dimension to itself."""
        return linear(silu(linear(x, self.gate)) * linear(x, self.up), self.down)


class InnerNoise(NamedTuple):
    """The noise that acts inside a cell."""

    noise: Noise
    place: str

    def held(self, shape: tuple[int, ...], part: str, share: float, like: Tensor) -> Tensor:
        """1 where a unit of a part of the state keeps its old value, else 0; (B, T, H)."""
        return self.noise.chosen(shape, share, f"{self.place} zoneout {part}", like.device).to(like.dtype)


Held: TypeAlias = Mapping[str, Any]
"""For each part of a cell's state, the share of the old value that is held: one number, or one for each place."""


class Inside(NamedTuple):
    """What a cell is handed for a segment."""

    p: Parts
    held: Held
    """Where it is noise, (B, T, H)."""

    def between(self, start: int, end: int) -> Inside:
        """For some times of the segment."""
        held = {name: one if isinstance(one, float) else one[:, start:end] for name, one in self.held.items()}
        return Inside(self.p, held)

    def at(self, time: int) -> Held:
        """What is held at one time."""
        return {name: one if isinstance(one, float) else one[:, time] for name, one in self.held.items()}


class Layer(nn.Module):
    """One cell, the parameters that it declares, and what the settings of a stack put around it.

        u_t = norm(x_t)                                     norm, or x_t
        v_t = sum over k of w_k * u_{t-K+1+k} + b           convolution_size, or u_t
        y_t = cell(v_t)
        x_t <- x_t + y_t                                    residual, or y_t
        x_t <- x_t + feedforward(norm(x_t))                 feedforward_size

    The convolution is causal and carries its last K - 1 inputs in the state. It starts as a uniform draw within
    +-sqrt(3/K), which keeps the variance.

    Two kinds of noise act inside a gated cell (``elman.cells.base.GatedConfig``). With weight dropout the recurrent
    matrix has the mask of the update. With zoneout each unit of each part s of the state keeps its old value with
    probability z in training; without noise it takes the mean of that, and the cell is another one than without:

        s_t = z * s_{t-1} + (1 - z) * cell(v_t, s_{t-1})

    Papers: Merity et al. 2018, https://arxiv.org/abs/1708.02182; Krueger et al. 2017, https://arxiv.org/abs/1606.01305
    (which has a z for each part).
    """

    def __init__(self, cell: Cell, dtype: torch.dtype, around: StackConfig | None = None) -> None:
        super().__init__()
        self.cell = cell
        check_declarations(cell)
        self._of_cell = tuple(cell.parameters())
        self._gated = cell.config if isinstance(cell, GatedCell) else None
        zoneout = 0.0 if self._gated is None else self._gated.zoneout
        self._zoneout: Held = dict.fromkeys(cell.state(), zoneout) if zoneout else {}
        self.residual = around is not None and around.residual
        width, norm = cell.input_size, "none" if around is None else around.norm
        self.norm = None if norm == "none" else Norm(norm, width, dtype)
        self.convolution_weight: nn.Parameter | None = None
        self.convolution_bias: nn.Parameter | None = None
        if around is not None and around.convolution_size:
            self.convolution_weight = nn.Parameter(torch.zeros(width, around.convolution_size, dtype=dtype))
            self.convolution_bias = nn.Parameter(torch.zeros(width, dtype=dtype))
        self.feedforward_norm: Norm | None = None
        self.feedforward: FeedForward | None = None
        if around is not None and around.feedforward_size:
            self.feedforward_norm = None if norm == "none" else Norm(norm, width, dtype)
            self.feedforward = FeedForward(width, around.feedforward_size, 2 * len(around.cell_names), dtype)
        self._carried_inputs = () if self.convolution_weight is None else (_CARRIED_INPUTS,)
        for name, declared in cell.parameters().items():
            try:
                self.register_parameter(name, nn.Parameter(torch.zeros(declared.shape, dtype=dtype)))
            except (KeyError, TypeError) as error:
                raise ConfigError(
                    f"the parameter {name!r} of {type(cell).__name__} needs another name; accepted: a string without "
                    "dots that is no attribute of a PyTorch module, such as W"
                ) from error
        if self.convolution_weight is not None and _CARRIED_INPUTS in cell.state():
            raise ConfigError(
                f"the part {_CARRIED_INPUTS!r} of the state of {type(cell).__name__} needs another name, which the "
                "convolution of a stack has taken"
            )

    @property
    def cell_parameters(self) -> dict[str, Tensor]:
        """What the cell is handed, by its own names."""
        return {name: tensor for name, tensor in self.named_parameters(recurse=False) if name in self._of_cell}

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw each parameter from the distribution that the cell declares, and all around it."""
        for name, declared in self.cell.parameters().items():
            parameter = self.get_parameter(name)
            parameter.data.copy_(declared.initial.draw(declared.shape, generator, parameter.dtype))
        for norm in (self.norm, self.feedforward_norm):
            if norm is not None:
                norm.reset_parameters()
        if self.convolution_weight is not None and self.convolution_bias is not None:
            draw_uniform(self.convolution_weight, math.sqrt(3 / self.convolution_weight.shape[1]), generator)
            self.convolution_bias.data.zero_()
        if self.feedforward is not None:
            self.feedforward.reset_parameters(generator)

    def initial_state(self, batch_size: int, like: Tensor) -> Parts:
        """The parts of this layer's state before the first token, with dtype and device of ``like``."""
        parts = {
            name: like.new_full((batch_size, *part.shape), part.initial) for name, part in self.cell.state().items()
        }
        if self.convolution_weight is not None:
            width, size = self.convolution_weight.shape
            parts[_CARRIED_INPUTS] = like.new_zeros(batch_size, size - 1, width)
        return parts

    def forward(
        self,
        x_BTI: Tensor,
        state: Parts,
        reset_BT: Tensor | None = None,
        drop: Callable[..., Tensor] = lambda branch, *places: branch,
        inner: InnerNoise | None = None,
    ) -> tuple[Tensor, Parts]:
        """Read a segment: what the next layer reads (B, T, H), and the state after it.

        Args:
            x_BTI: what the layer before gives.
            state: the parts of this layer's state.
            reset_BT: where the state is initial before the input is read.
            drop: dropout, applied to each branch before it is added; takes the branch, and the name of a second one.
            inner: the noise that acts inside the cell; none outside training.
        """
        u_BTI = x_BTI if self.norm is None else self.norm(x_BTI)
        y_BTH, state = self._scan_with_resets(u_BTI, state, reset_BT, self._inside(inner, u_BTI))
        x_BTH = x_BTI + drop(y_BTH) if self.residual else drop(y_BTH)
        if self.feedforward is not None:
            x_BTH = x_BTH + drop(self._feed_forward(x_BTH), "feedforward")
        return x_BTH, state

    def step(self, x_BI: Tensor, state: Parts) -> Step:
        """Read one input by the equations; :meth:`forward` for one time, with the cell's intermediates."""
        u_BI = x_BI if self.norm is None else self.norm(x_BI)
        carried: dict[str, Tensor] = {}
        if self.convolution_weight is not None:
            u_BI, carried[_CARRIED_INPUTS] = short_convolution(
                u_BI, state[_CARRIED_INPUTS], self.convolution_weight, self.convolution_bias
            )
        y_BH, after, named = self._cell_step(self.cell_parameters, u_BI, self._parts_of_cell(state), self._zoneout)
        x_BH = x_BI + y_BH if self.residual else y_BH
        if self.feedforward is not None:
            x_BH = x_BH + self._feed_forward(x_BH)
        return Step(x_BH, {**after, **carried}, named)

    def _feed_forward(self, x: Tensor) -> Tensor:
        return cast(FeedForward, self.feedforward)(x if self.feedforward_norm is None else self.feedforward_norm(x))

    def _parts_of_cell(self, state: Parts) -> Parts:
        return {name: tensor for name, tensor in state.items() if name not in self._carried_inputs}

    def _inside(self, noise: InnerNoise | None, u_BTI: Tensor) -> Inside:
        """What is handed to the cell, with the noise of a segment on it."""
        p = self.cell_parameters
        if noise is None or self._gated is None:
            return Inside(p, self._zoneout)
        recurrent = noise.noise.drop_weights(p["weight_hh"], self._gated.weight_dropout, f"{noise.place} weight_hh")
        shape = (*u_BTI.shape[:2], self.cell.hidden_size)
        masks = {part: noise.held(shape, part, share, u_BTI) for part, share in self._zoneout.items()}
        return Inside({**p, "weight_hh": recurrent}, masks)

    def _cell_step(self, p: Parts, x_BI: Tensor, state: Parts, held: Held) -> Step:
        """A step of the cell, and what zoneout makes of it."""
        step = self.cell.step(p, x_BI, state)
        if not held:
            return step
        after = {name: held[name] * state[name] + (1 - held[name]) * tensor for name, tensor in step.state.items()}
        return Step(after["h"], after, step.named)  # the output of a gated cell is its h

    def _cell_scan(self, x_BTI: Tensor, state: Parts, inside: Inside) -> tuple[Tensor, Parts]:
        """All steps of the cell; with zoneout one after the other, which no fused kernel has."""
        if not inside.held:
            return self.cell.scan(inside.p, x_BTI, state)
        outputs = []
        for time, x_BI in enumerate(x_BTI.unbind(1)):
            output, state, _ = self._cell_step(inside.p, x_BI, state, inside.at(time))
            outputs.append(output)
        return torch.stack(outputs, dim=1), state

    def _scan(self, u_BTI: Tensor, state: Parts, inside: Inside) -> tuple[Tensor, Parts]:
        """Convolution and cell over a segment without resets."""
        carried: dict[str, Tensor] = {}
        if self.convolution_weight is not None:
            u_BTI, carried[_CARRIED_INPUTS] = causal_convolution(
                u_BTI, state[_CARRIED_INPUTS], self.convolution_weight, self.convolution_bias
            )
        y_BTH, after = self._cell_scan(u_BTI, self._parts_of_cell(state), inside)
        return y_BTH, {**after, **carried}

    def _scan_with_resets(
        self, u_BTI: Tensor, state: Parts, reset_BT: Tensor | None, inside: Inside
    ) -> tuple[Tensor, Parts]:
        """Scan a segment in the pieces between the times at which some row is reset."""
        if reset_BT is None or not reset_BT.any():
            return self._scan(u_BTI, state, inside)
        num_steps = u_BTI.shape[1]
        resets = reset_BT.any(0).nonzero().flatten().tolist()
        initial = State(self.initial_state(u_BTI.shape[0], u_BTI))
        outputs = []
        for start, end in pairwise(sorted({0, *resets, num_steps})):
            if start in resets:
                state = State(state).reset(reset_BT[:, start], initial).tensors
            output_BTH, state = self._scan(u_BTI[:, start:end], state, inside.between(start, end))
            outputs.append(output_BTH)
        return torch.cat(outputs, dim=1), state

    def component(self, index: int, what: str) -> Component:
        """The layer as a part of its model."""
        matrices = [] if self.feedforward is None else list(self.feedforward.parameters())
        if self.convolution_weight is not None:
            matrices.append(self.convolution_weight)
        return Component(
            name=f"layer {index + 1}",
            what=what,
            parameters=dict(self.named_parameters()),
            operations=self.cell.operations_per_step() + sum(2 * matrix.numel() for matrix in matrices),
            state=tuple(f"{index}.{part}" for part in (*self.cell.state(), *self._carried_inputs)),
        )

    def hidden_matrices(self) -> list[tuple[nn.Parameter, int]]:
        """The linear maps, each with the number of its blocks: W_hh is cut gate by gate, as it is drawn."""
        of_cell = [
            (self.get_parameter(name), declared.initial.parts if len(declared.shape) == 2 else declared.shape[0])
            for name, declared in self.cell.parameters().items()
            if len(declared.shape) in (2, 3) and not declared.elementwise
        ]
        return of_cell + ([] if self.feedforward is None else [(matrix, 1) for matrix in self.feedforward.parameters()])

    @staticmethod
    def predicted_num_parameters(cell: Cell, around: StackConfig) -> int:
        """Number of trained numbers, from the settings alone."""
        width, num_norms = cell.input_size, 1 + bool(around.feedforward_size)
        convolution = width * (around.convolution_size + 1) if around.convolution_size else 0
        norms = num_norms * Norm.predicted_num_parameters(around.norm, width)
        return cell.num_parameters() + norms + convolution + 3 * width * around.feedforward_size


class RecurrentStack(LanguageModel):
    """Embedding, dropout, layers of recurrent cells, normalisation (with ``norm``), output.

    Dropout (with noise only) falls on the embedding's output, between the layers and on the last layer's output, as
    in Zaremba et al. 2014 (https://arxiv.org/abs/1409.2329): never on the recurrent path. With ``residual`` it falls on
    each branch before it is added, and on the embedding. The embedding and the last layer may have shares of their own,
    and whole words may be dropped (Merity et al. 2018, https://arxiv.org/abs/1708.02182).

    Initialisation: embedding N(0, 1/E) or uniform within +-``embedding_range``; each layer as its cell declares.
    """

    config: StackConfig
    head: OutputHead

    def __init__(self, config: ModelConfig, vocab_size: int, *, dtype: torch.dtype, boundary_id: int = 0) -> None:
        super().__init__(_own(config), vocab_size, dtype=dtype, boundary_id=boundary_id)
        cells = _cells(self.config)
        self.embedding = nn.Parameter(torch.zeros(vocab_size, self.config.embedding_size, dtype=dtype))
        self.layers = nn.ModuleList(Layer(cell, dtype, self.config) for cell in cells)
        width, norm = cells[-1].output_size, self.config.norm
        self.norm = None if norm == "none" else Norm(norm, width, dtype)
        self.head = make_head(self.config, width, self.embedding)

    def _layers(self) -> Iterator[Layer]:
        return (cast(Layer, layer) for layer in self.layers)

    def reset_parameters(self, generator: torch.Generator) -> None:
        draw_embedding(self.embedding, self.config, generator)
        for layer in self._layers():
            layer.reset_parameters(generator)
        if self.norm is not None:
            self.norm.reset_parameters()
        self.head.reset_parameters(generator)

    def initial_state(self, batch_size: int) -> State:
        return State({
            f"{index}.{part}": tensor
            for index, layer in enumerate(self._layers())
            for part, tensor in layer.initial_state(batch_size, self.embedding).items()
        })  # fmt: skip

    def features(
        self, tokens_BT: Tensor, state: State, reset_BT: Tensor | None = None, noise: Noise | None = None
    ) -> tuple[Tensor, State]:
        config = self.config
        x_BTI = embed(tokens_BT, self.embedding, config, noise)
        if noise is not None:
            x_BTI = noise.drop_words(x_BTI, tokens_BT, self.vocab_size, config.word_dropout)
        x_BTI = self._drop(x_BTI, config.embedding_dropout, noise, "embedding")
        tensors: dict[str, Tensor] = {}
        for index, layer in enumerate(self._layers()):

            def drop(branch_BTH: Tensor, *places: str, index: int = index) -> Tensor:
                share = config.output_dropout if index == len(self.layers) - 1 else config.dropout
                return self._drop(branch_BTH, share, noise, f"layer {index}", *places)

            inner = None if noise is None else InnerNoise(noise, f"layer {index}")
            x_BTI, parts = layer(x_BTI, _of_layer(index, state), reset_BT, drop, inner)
            tensors |= {f"{index}.{name}": tensor for name, tensor in parts.items()}
        return self._normed(x_BTI), State(tensors)

    def step(self, token_B: Tensor, state: State) -> tuple[Tensor, State]:
        features_BF, state, _, _ = self.named_step(token_B, state)
        return features_BF, state

    def named_step(self, token_B: Tensor, state: State) -> Moment:
        x_BI = self.embedding[token_B]
        tensors: dict[str, Tensor] = {}
        named: dict[str, Tensor] = {}
        outputs: dict[str, Tensor] = {}
        for index, layer in enumerate(self._layers()):
            x_BI, parts, of_cell = layer.step(x_BI, _of_layer(index, state))
            tensors |= {f"{index}.{name}": tensor for name, tensor in parts.items()}
            named |= {f"{index}.{name}": tensor for name, tensor in of_cell.items()}
            outputs[f"{index}.output"] = x_BI
        return Moment(self._normed(x_BI), State(tensors), named, outputs)

    def _normed(self, x: Tensor) -> Tensor:
        return x if self.norm is None else self.norm(x)

    def components(self) -> list[Component]:
        named = zip(self._layers(), self.config.cell_names, strict=True)
        layers = [layer.component(index, name) for index, (layer, name) in enumerate(named)]
        norm = [] if self.norm is None else [Component("norm", self.config.norm, dict(self.norm.named_parameters()))]
        return [Component("embedding", "look-up", {"weight": self.embedding}), *layers, *norm, self.head.component()]

    def hidden_matrices(self) -> list[tuple[nn.Parameter, int]]:
        return [matrix for layer in self._layers() for matrix in layer.hidden_matrices()]

    def _drop(self, x_BTI: Tensor, share: float | None, noise: Noise | None, *places: str) -> Tensor:
        if noise is None:
            return x_BTI
        share = self.config.dropout if share is None else share
        return noise.dropout(x_BTI, share, " ".join(places), locked=self.config.locked_dropout)

    @staticmethod
    def predicted_num_parameters(config: ModelConfig, vocab_size: int) -> int:
        config = _own(config)
        num_more = 0
        if isinstance(config, UniformStackConfig) and config.num_layers > 2:
            # From the second on all layers are alike, and a damaged file may claim any number of them.
            num_more = config.num_layers - 2
            config = config.model_copy(update={"num_layers": 2})
        cells = _cells(config)
        sizes = [Layer.predicted_num_parameters(cell, config) for cell in cells]
        width = cells[-1].output_size
        norm = Norm.predicted_num_parameters(config.norm, width)
        output = predicted_num_parameters_of_head(config, width, vocab_size)
        return vocab_size * config.embedding_size + sum(sizes) + num_more * sizes[-1] + norm + output


def _own(config: ModelConfig) -> StackConfig:
    if not isinstance(config, StackConfig):
        raise ConfigError(f"model.kind {config.kind!r} is not a recurrent stack")
    return config


def _of_layer(index: int, state: State) -> dict[str, Tensor]:
    """The parts of one layer's state, by their own names."""
    prefix = f"{index}."
    return {name[len(prefix) :]: tensor for name, tensor in state.tensors.items() if name.startswith(prefix)}
