"""A cell that a person brings, by file or by dotted path, trains, is saved and is loaded like one of Elman's."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch

from elman.cells import find_cell
from elman.data.streams import Streams
from elman.errors import ConfigError, ModelFileError
from elman.models.file import Bundle, load_model, save_model
from elman.models.kinds import build_model, model_config
from elman.models.laws import check_cell
from elman.text.tokenizers import CharTokenizer

SOURCE = Path(__file__).with_name("own_cell.py")
TEXT = "the cat sat on the mat and the dog sat on the log. " * 12
TOKENIZER = CharTokenizer(TEXT)


@pytest.fixture(params=["file", "dotted path"])
def kind(request, tmp_path, monkeypatch) -> str:
    """The way to one and the same cell; each test gets a module of its own name."""
    name = f"leaky_{abs(hash(request.node.nodeid))}"
    shutil.copy(SOURCE, tmp_path / f"{name}.py")
    if request.param == "file":
        return f"{tmp_path / name}.py:Leaky"
    monkeypatch.syspath_prepend(tmp_path)
    return f"{name}:Leaky"


def trained(kind: str, num_epochs: int = 6) -> tuple[Bundle, list[float]]:
    config = model_config({"kind": kind, "embedding_size": 12, "hidden_size": 24, "leak": 0.5})
    network = build_model(config, TOKENIZER.size, seed=1, dtype=torch.float32)
    optimizer = torch.optim.Adam(network.parameters(), 0.01)
    tokens = torch.cat([torch.tensor([0]), torch.from_numpy(TOKENIZER.encode(TEXT))]).numpy()
    losses = []
    for segment in (segment for _ in range(num_epochs) for segment in Streams(tokens, 4, 32)):
        if segment.starts_anew:
            state = network.initial_state(4)
        features, state = network.features(segment.tokens_BT, state.detach())
        loss = network.head.nll(features, segment.targets_BT, segment.weight_BT).sum() / segment.num_targets
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Bundle(network, TOKENIZER), losses


def test_it_keeps_the_laws_and_trains(kind):
    assert check_cell(kind) == []
    bundle, losses = trained(kind)
    assert abs(losses[0] - math.log(TOKENIZER.size)) < 0.5
    assert losses[-1] < 0.6 * losses[0]
    assert bundle.network.config.leak == 0.5
    assert torch.equal(bundle.network.initial_state(1).tensors["0.m"], torch.full((1, 24), 0.5))


def test_its_model_file_is_loaded_only_by_somebody_who_names_the_cell(kind, tmp_path):
    bundle, _ = trained(kind, num_epochs=1)
    path = tmp_path / "model.safetensors"
    save_model(path, bundle)
    with pytest.raises(ModelFileError, match=r"was trained with the cell .*Leaky': give it yourself, as in --cell"):
        load_model(path)
    with pytest.raises(ModelFileError, match="was trained with the cell"):
        load_model(path, cell="elsewhere:Other")
    loaded = load_model(path, cell=kind).network
    tokens = torch.tensor([[0, 5, 3, 4]])
    state = bundle.network.initial_state(1)
    assert torch.equal(loaded(tokens, state).logits_BTV, bundle.network(tokens, state).logits_BTV)


def test_a_model_of_elmans_own_cell_takes_no_other(tmp_path):
    config = model_config({"kind": "gru", "embedding_size": 3, "hidden_size": 4})
    save_model(tmp_path / "m", Bundle(build_model(config, TOKENIZER.size, seed=1, dtype=torch.float32), TOKENIZER))
    with pytest.raises(ModelFileError, match="was trained with the built-in 'gru': leave --cell out"):
        load_model(tmp_path / "m", cell=f"{SOURCE}:Leaky")


def test_two_files_of_one_name_are_two_cells(tmp_path):
    for folder, leak in (("a", "0.1"), ("b", "0.9")):
        (tmp_path / folder).mkdir()
        source = SOURCE.read_text("utf-8").replace("leak: float = 0.25", f"leak: float = {leak}")
        (tmp_path / folder / "cell.py").write_text(source, "utf-8")
    leaks = [model_config({"kind": f"{tmp_path / folder}/cell.py:Leaky"}).leak for folder in "ab"]
    assert leaks == [0.1, 0.9]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no_such_package.module:Cell", "module 'no_such_package.module' of the cell failed to import"),
        ("math:pi", "is not a cell"),
        ("elman.cells.lstm:LSTN", "has no class 'LSTN'; did you mean 'LSTM'"),
        ("elman.cells.base:Cell", "is not a cell"),
    ],
)
def test_a_path_that_leads_nowhere_is_an_error_of_one_line(kind, message):
    with pytest.raises(ConfigError, match=message) as error:
        find_cell(kind)
    assert "\n" not in str(error.value)
