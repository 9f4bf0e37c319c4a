"""The encoder-decoder with a bottleneck of fixed size: one stack reads the source, another writes the target.

Shape letters: B rows, T time, E embedding, I layer input, H hidden, F features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import cast

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from elman.cells import find_cell
from elman.cells.base import Cell
from elman.config import ModelConfig, Seq2SeqConfig
from elman.errors import ConfigError
from elman.models.contract import Component, LanguageModel
from elman.models.heads import OutputHead, draw_embedding, embed, make_head
from elman.models.heads import predicted_num_parameters as predicted_num_parameters_of_head
from elman.models.noise import Noise
from elman.models.stack import Layer
from elman.models.state import State


class Seq2Seq(LanguageModel):
    """An encoder and a decoder that take turns over a stream of boundary, source, boundary, target, boundary, ...

        phase_t = phase_{t-1} + [w_t is the boundary]   mod 2
        state   = initial                               where a boundary turns the phase to 1: a source begins
        state   = encoder(w_t, state)                   where phase_t is 1
        state   = decoder(w_t, state)                   where phase_t is 0
        p(w_{t+1} | ...) = softmax(U h_t + b)           h_t the output of the last layer of the one that read w_t

    Encoder and decoder have layers alike and weights of their own. The decoder begins with the state that the encoder
    ends with; nothing else passes between them. So at any time there is one state to carry, whoever reads.

    Dropout (with noise only) falls on the embedding's output and on the output of every layer.

    State: that of one stack, and the phase, (B,), int64, at first 0: text without a boundary before it is a target.
    Parameters: two stacks, one or two embeddings, the output.
    Initialisation: embeddings N(0, 1/E) or uniform within +-``embedding_range``; each layer as its cell declares.
    Papers: Sutskever, Vinyals and Le 2014, https://arxiv.org/abs/1409.3215; Cho et al. 2014,
    https://arxiv.org/abs/1406.1078, whose decoder sees the encoder's state at every step as well.
    """

    config: Seq2SeqConfig
    head: OutputHead

    def __init__(self, config: ModelConfig, vocab_size: int, *, dtype: torch.dtype, boundary_id: int = 0) -> None:
        super().__init__(_own(config), vocab_size, dtype=dtype, boundary_id=boundary_id)
        cells = _cells(self.config, self.config.num_layers)
        if any(part.shape[:1] == (0,) for cell in cells for part in cell.state().values()):
            raise ConfigError(
                f"model.cell {self.config.cell!r} has a state that grows with the text, which is no bottleneck; "
                "accepted: a cell whose state has a fixed size, such as lstm"
            )
        shape = (vocab_size, self.config.embedding_size)
        self.embedding = nn.Parameter(torch.zeros(shape, dtype=dtype))
        self.source_embedding = None if self.config.share_embedding else nn.Parameter(torch.zeros(shape, dtype=dtype))
        self.encoder = nn.ModuleList(Layer(cell, dtype) for cell in cells)
        self.decoder = nn.ModuleList(Layer(cell, dtype) for cell in cells)
        self.head = make_head(self.config, cells[-1].output_size, self.embedding)

    def _layers(self) -> Iterator[tuple[Layer, Layer]]:
        """Encoder and decoder, layer by layer."""
        return zip(cast(list[Layer], self.encoder), cast(list[Layer], self.decoder), strict=True)

    def reset_parameters(self, generator: torch.Generator) -> None:
        for embedding in (self.embedding, self.source_embedding):
            if embedding is not None:
                draw_embedding(embedding, self.config, generator)
        for layer in (layer for pair in self._layers() for layer in pair):
            layer.reset_parameters(generator)
        self.head.reset_parameters(generator)

    def initial_state(self, batch_size: int) -> State:
        parts = {
            f"{index}.{part}": tensor
            for index, (encoder, _) in enumerate(self._layers())
            for part, tensor in encoder.initial_state(batch_size, self.embedding).items()
        }
        return State({**parts, "phase": torch.zeros(batch_size, dtype=torch.int64, device=self.device)})

    def features(
        self, tokens_BT: Tensor, state: State, reset_BT: Tensor | None = None, noise: Noise | None = None
    ) -> tuple[Tensor, State]:
        phase_BT, starts_BT = self._phases(tokens_BT, state.tensors["phase"], reset_BT)
        # Between two columns where some row is reset or goes over to the other stack, each row has one reader.
        changes_T = ((tokens_BT == self.boundary_id) | starts_BT).any(0)
        borders = sorted({0, *changes_T.nonzero().flatten().tolist(), tokens_BT.shape[1]})
        x_BTI = embed(tokens_BT, self.embedding, self.config, noise)
        if self.source_embedding is not None:
            of_source_BTI = embed(tokens_BT, self.source_embedding, self.config, noise)
            x_BTI = torch.where((phase_BT == 1).unsqueeze(2), of_source_BTI, x_BTI)
        x_BTI = self._drop(x_BTI, noise, "embedding")
        tensors = {"phase": phase_BT[:, -1].clone()}
        for index, (encoder, decoder) in enumerate(self._layers()):
            parts: Mapping[str, Tensor] = _of_layer(index, encoder, state)
            initial = State(encoder.initial_state(len(tokens_BT), x_BTI))
            outputs = []
            for start, end in pairwise(borders):
                if starts_BT[:, start].any():
                    parts = State(parts).reset(starts_BT[:, start], initial).tensors
                output_BTH, parts = _read(encoder, decoder, phase_BT[:, start], x_BTI[:, start:end], parts)
                outputs.append(output_BTH)
            x_BTI = self._drop(torch.cat(outputs, dim=1), noise, f"layer {index}")
            tensors |= {f"{index}.{name}": tensor for name, tensor in parts.items()}
        return x_BTI, State({name: tensors[name] for name in state.tensors})

    def _phases(self, tokens_BT: Tensor, phase_B: Tensor, reset_BT: Tensor | None) -> tuple[Tensor, Tensor]:
        """The phase after each token, and where the state is initial before the token is read."""
        is_boundary_BT = tokens_BT == self.boundary_id
        passed_BT = is_boundary_BT.cumsum(1)
        if reset_BT is None:
            phase_BT = (phase_B.unsqueeze(1) + passed_BT) % 2
            return phase_BT, is_boundary_BT & (phase_BT == 1)
        # Boundaries before the last reset count no more, nor does the phase at the start.
        before_BT = torch.where(reset_BT, passed_BT - is_boundary_BT.long(), -1).cummax(dim=1).values
        phase_BT = torch.where(before_BT < 0, phase_B.unsqueeze(1) + passed_BT, passed_BT - before_BT) % 2
        return phase_BT, (is_boundary_BT & (phase_BT == 1)) | reset_BT

    def step(self, token_B: Tensor, state: State) -> tuple[Tensor, State]:
        is_boundary_B = token_B == self.boundary_id
        phase_B = (state.tensors["phase"] + is_boundary_B) % 2
        encodes_B = phase_B == 1
        state = state.reset(is_boundary_B & encodes_B, self.initial_state(len(token_B)))
        x_BI = self.embedding[token_B]
        if self.source_embedding is not None:
            x_BI = torch.where(encodes_B.unsqueeze(1), self.source_embedding[token_B], x_BI)
        tensors = {"phase": phase_B}
        for index, (encoder, decoder) in enumerate(self._layers()):
            parts = _of_layer(index, encoder, state)
            encoded, decoded = encoder.step(x_BI, parts), decoder.step(x_BI, parts)
            x_BI = torch.where(encodes_B.unsqueeze(1), encoded.output, decoded.output)
            chosen = State(decoded.state).reset(encodes_B, State(encoded.state))
            tensors |= {f"{index}.{name}": tensor for name, tensor in chosen.tensors.items()}
        return x_BI, State({name: tensors[name] for name in state.tensors})

    def _drop(self, x_BTI: Tensor, noise: Noise | None, place: str) -> Tensor:
        return x_BTI if noise is None else noise.dropout(x_BTI, self.config.dropout, place)

    def components(self) -> list[Component]:
        stacks: list[Component] = []
        # A token is read by one of the two, which cost the same: counted once, with the decoder.
        for name, layers, is_counted in (("encoder", self.encoder, False), ("decoder", self.decoder, True)):
            stacks += [
                Component(
                    name=f"{name} {index + 1}",
                    what=self.config.cell,
                    parameters=dict(layer.named_parameters()),
                    operations=layer.cell.operations_per_step() if is_counted else 0,
                )
                for index, layer in enumerate(cast(list[Layer], layers))
            ]
        bottleneck = Component("bottleneck", "handed over", {}, state=tuple(self.initial_state(1).tensors))
        embeddings = [Component("embedding", "look-up", {"weight": self.embedding})]
        if self.source_embedding is not None:
            embeddings.append(Component("source embedding", "look-up", {"weight": self.source_embedding}))
        middle = self.config.num_layers
        return [*embeddings, *stacks[:middle], bottleneck, *stacks[middle:], self.head.component()]

    def hidden_matrices(self) -> list[tuple[nn.Parameter, int]]:
        return [matrix for pair in self._layers() for layer in pair for matrix in layer.hidden_matrices()]

    @staticmethod
    def predicted_num_parameters(config: ModelConfig, vocab_size: int) -> int:
        config = _own(config)
        # From the second on all layers are alike, and a damaged file may claim any number of them.
        cells = _cells(config, min(config.num_layers, 2))
        layers = cells[0].num_parameters() + (config.num_layers - 1) * cells[-1].num_parameters()
        embeddings = (1 if config.share_embedding else 2) * vocab_size * config.embedding_size
        return embeddings + 2 * layers + predicted_num_parameters_of_head(config, cells[-1].output_size, vocab_size)


def _own(config: ModelConfig) -> Seq2SeqConfig:
    if not isinstance(config, Seq2SeqConfig):
        raise ConfigError(f"model.kind {config.kind!r} is not an encoder-decoder")
    return config


def _cells(config: Seq2SeqConfig, num_layers: int) -> list[Cell]:
    """The cell of each layer of either stack, from the first, with the cell's own defaults."""
    cell = find_cell(config.cell)
    cells: list[Cell] = []
    for _ in range(num_layers):
        input_size = cells[-1].output_size if cells else config.embedding_size
        try:
            of_cell = cell.Config(hidden_size=config.hidden_size)
        except ValidationError as error:
            fault = error.errors()[0]
            raise ConfigError(
                f"model.cell {config.cell!r}: {fault.get('ctx', {}).get('error', fault['msg'])}"
            ) from None
        cells.append(cell(of_cell, input_size))
    return cells


def _of_layer(index: int, layer: Layer, state: State) -> dict[str, Tensor]:
    """The parts of one layer's state, by their own names."""
    return {part: state.tensors[f"{index}.{part}"] for part in layer.cell.state()}


def _read(
    encoder: Layer, decoder: Layer, phase_B: Tensor, x_BTI: Tensor, parts: Mapping[str, Tensor]
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Read a piece in which no row changes its phase: those of phase 1 by the encoder, the others by the decoder."""
    rows = [(phase_B == phase).nonzero().flatten() for phase in (1, 0)]
    read = [
        layer(x_BTI[some], State(parts).select(some).tensors)
        for layer, some in zip((encoder, decoder), rows, strict=True)
        if len(some)
    ]
    back = torch.cat(rows).argsort()
    outputs_BTH = torch.cat([output for output, _ in read])[back]
    return outputs_BTH, State.stack([State(after) for _, after in read]).select(back).tensors
