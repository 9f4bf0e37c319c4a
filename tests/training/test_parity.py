"""The preset pytorch-word-lm against a straight-line implementation of PyTorch's word-level example."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elman.data.prepare import Dataset, prepare
from elman.settings import Config, resolve
from elman.text.synthetic import parse
from elman.training.loop import Trainer

UPDATES = 50


class Example(nn.Module):
    """Encoder, ``nn.LSTM`` or ``nn.RNN`` or ``nn.GRU``, decoder; written without anything of Elman."""

    def __init__(self, kind: str, vocab_size: int, tied: bool, width: int = 200, layers: int = 2) -> None:
        super().__init__()
        self.encoder = nn.Embedding(vocab_size, width)
        if kind in ("LSTM", "GRU"):
            self.rnn = getattr(nn, kind)(width, width, layers, batch_first=True)
        else:
            nonlinearity = {"RNN_TANH": "tanh", "RNN_RELU": "relu"}[kind]
            self.rnn = nn.RNN(width, width, layers, nonlinearity=nonlinearity, batch_first=True)
        self.decoder = nn.Linear(width, vocab_size)
        if tied:
            self.decoder.weight = self.encoder.weight

    def forward(self, tokens_BT: torch.Tensor, hidden: Any) -> tuple[torch.Tensor, Any]:
        output, hidden = self.rnn(self.encoder(tokens_BT), hidden)
        return self.decoder(output.flatten(0, 1)), hidden


def straight_line_losses(model: Example, tokens: torch.Tensor, *, batch: int = 20, bptt: int = 35) -> list[float]:
    """The example's training loop: plain SGD at rate 20, gradients clipped at norm 0.25.

    The example lays time first. Here rows come first, and the decoder takes them one below the other, which is the same
    mathematics: at rate 20 the vanilla networks are chaotic, and a sum taken in another order alone moves their losses
    by whole nats within 50 batches.
    """
    columns = len(tokens) // batch
    data_BT = tokens[: columns * batch].view(batch, columns)
    hidden, losses, start = None, [], 0
    while len(losses) < UPDATES:
        if start >= columns - 1:
            start, hidden = 0, None
        length = min(bptt, columns - 1 - start)
        inputs, targets = data_BT[:, start : start + length], data_BT[:, start + 1 : start + 1 + length].reshape(-1)
        model.zero_grad()
        if hidden is not None:
            hidden = tuple(h.detach() for h in hidden) if isinstance(hidden, tuple) else hidden.detach()
        output, hidden = model(inputs, hidden)
        loss = nn.functional.cross_entropy(output, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(parameter.grad, alpha=-20)
        losses.append(loss.item())
        start += bptt
    return losses


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Words with a natural rank-frequency curve, as a folder like the example's."""
    folder = tmp_path_factory.mktemp("words")
    lines = parse("zipf,words=20000,vocabulary=150").text().splitlines(keepends=True)
    for name, part in (("train", lines[:900]), ("valid", lines[900:950]), ("test", lines[950:])):
        (folder / f"{name}.txt").write_text("".join(part))
    config = resolve({"data": {"corpus": [str(folder)]}}, preset="pytorch-word-lm")
    return prepare(config.data, config.text, config.tokenizer)


def trainer_of(dataset: Dataset, dtype: str, **model: Any) -> Trainer:
    """The preset, without dropout, for 50 updates and no more."""
    settings = {"model": {"dropout": 0.0, **model}, "training": {"max_updates": UPDATES, "max_epochs": "none"}}
    quiet = {"evaluation": {"every_updates": 10**6}, "sampling": {"every_updates": 10**6, "max_new_tokens": 1}}
    config: Config = resolve({**settings, **quiet, "dtype": dtype, "seed": 1}, preset="pytorch-word-lm")
    return Trainer(config, dataset)


def copy_weights(trainer: Trainer, example: Example) -> None:
    """Give the example the weights that Elman drew."""
    network = trainer.network
    with torch.no_grad():
        example.encoder.weight.copy_(network.embedding)
        example.decoder.weight.copy_(network.head.weight)
        example.decoder.bias.copy_(network.head.bias)
        for index, layer in enumerate(network.layers):
            for name, parameter in layer.named_parameters():
                getattr(example.rnn, f"{name}_l{index}").copy_(parameter)


CASES = {
    "LSTM": {"kind": "lstm"},
    "GRU": {"kind": "gru"},
    "RNN_TANH": {"kind": "elman", "nonlinearity": "tanh"},
    "RNN_RELU": {"kind": "elman", "nonlinearity": "relu"},
}


@pytest.mark.global_rng
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_the_first_50_losses_are_those_of_the_example(name: str, tied: bool, dataset: Dataset) -> None:
    trainer = trainer_of(dataset, "float64", tie_weights=tied, **CASES[name])
    example = Example(name, dataset.tokenizer.size, tied).double()
    copy_weights(trainer, example)
    # The example has no boundary token before its text.
    tokens = torch.from_numpy(dataset.train.tokens[1:].astype("int64"))
    trainer.streams = type(trainer.streams)(tokens.numpy(), 20, 35, trim=True)
    ours = [record.values["nats"] for record in trainer.records() if record.kind == "update"]
    theirs = straight_line_losses(example, tokens)
    assert len(ours) == UPDATES
    assert ours[0] != ours[-1]
    assert ours == pytest.approx(theirs, abs=1e-8)


@pytest.mark.global_rng
def test_in_float32_rounding_grows_at_rate_20_so_that_only_the_start_agrees(dataset: Dataset) -> None:
    """A rate of 20 amplifies a rounding of 1e-7 to 1e-2 within about 7 updates: a property of the recipe."""
    trainer = trainer_of(dataset, "float32", kind="lstm")
    example = Example("LSTM", dataset.tokenizer.size, tied=False)
    copy_weights(trainer, example)
    tokens = torch.from_numpy(dataset.train.tokens[1:].astype("int64"))
    trainer.streams = type(trainer.streams)(tokens.numpy(), 20, 35, trim=True)
    ours = [record.values["nats"] for record in trainer.records() if record.kind == "update"]
    theirs = straight_line_losses(example, tokens)
    assert ours[:3] == pytest.approx(theirs[:3], abs=1e-4)


def test_the_preset_holds_the_settings_of_the_example() -> None:
    config = resolve(preset="pytorch-word-lm").to_dict()
    assert config["seed"] == 1111
    assert config["tokenizer"]["level"] == "word"
    model = {"embedding_size": 200, "hidden_size": 200, "num_layers": 2, "dropout": 0.2, "tie_weights": False}
    assert config["model"].items() >= model.items()
    training = {
        "batch_size": 20, "bptt": 35, "optimizer": "sgd", "learning_rate": 20.0, "max_grad_norm": 0.25,
        "max_epochs": 40, "schedule": "plateau", "plateau_divisor": 4.0, "trim": True, "momentum": 0.0,
        "weight_decay": 0.0, "warmup_updates": 0, "reset_probability": 0.0,
    }  # fmt: skip
    assert config["training"].items() >= training.items()
