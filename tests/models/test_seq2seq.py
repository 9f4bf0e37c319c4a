"""The encoder-decoder against a transcription of its equations, one example at a time; what passes the bottleneck."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch.nn import functional

from elman.cells import cell_names
from elman.data.pairs import Pairs
from elman.errors import ConfigError
from elman.models.file import Bundle, load_model, save_model
from elman.models.kinds import build_model, model_config
from elman.models.laws import check_config
from elman.models.seq2seq import Seq2Seq
from elman.text.tokenizers import CharTokenizer

SMALL = {"kind": "seq2seq", "hidden_size": 7, "embedding_size": 5, "num_layers": 2}
EXAMPLES = [([3, 4, 5], [6, 7]), ([8], [3, 3, 3, 4]), ([4, 4], [9]), ([5, 6, 7, 8, 9], [5])]
TOKENS = np.array([token for s, t in EXAMPLES for token in (0, *s, 0, *t)])


def small(**settings: object) -> Seq2Seq:
    network = build_model(model_config({**SMALL, **settings}), 10, seed=3, dtype=torch.float64)
    assert isinstance(network, Seq2Seq)
    return network


def lstm(layers: torch.nn.ModuleList, inputs: list[torch.Tensor], state: list[tuple[torch.Tensor, torch.Tensor]]):
    """Layers of LSTMs over single vectors, by the textbook: outputs of the last layer, and h and c of each."""
    state = list(state)
    outputs = []
    for x in inputs:
        for index, layer in enumerate(layers):
            h, c = state[index]
            i, f, g, o = (layer.weight_ih @ x + layer.weight_hh @ h + layer.bias).split(7)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            state[index], x = (h, c), h
        outputs.append(x)
    return outputs, state


def nats_of(network: Seq2Seq, source: list[int], target: list[int]) -> list[float]:
    """Encoder over boundary and source, decoder over boundary and target: -ln p of the target and the boundary."""
    of_source = network.embedding if network.source_embedding is None else network.source_embedding
    zero = torch.zeros(7, dtype=torch.float64)
    _, handed_over = lstm(network.encoder, [of_source[t] for t in (0, *source)], [(zero, zero)] * 2)
    outputs, _ = lstm(network.decoder, [network.embedding[t] for t in (0, *target)], handed_over)
    nats = []
    for output, asked in zip(outputs, (*target, 0), strict=True):
        logits = network.head.weight @ output + network.head.bias
        nats.append((torch.logsumexp(logits, 0) - logits[asked]).item())
    return nats


@pytest.mark.parametrize("share_embedding", [True, False])
@pytest.mark.parametrize("reverse", [True, False])
def test_losses_are_those_of_the_equations_one_example_at_a_time(share_embedding, reverse):
    network = small(share_embedding=share_embedding)
    expected = [nats_of(network, source[::-1] if reverse else source, target) for source, target in EXAMPLES]
    pairs = Pairs(TOKENS, 4, 0, reverse)
    (segment,) = pairs
    features, _ = network.features(segment.tokens_BT, network.initial_state(4))
    nats = network.head.nll(features, segment.targets_BT, segment.weight_BT.double())
    for row, example in enumerate(pairs.batches()[0]):
        found = nats[row][segment.weight_BT[row] == 1].tolist()
        assert found == pytest.approx(expected[example], rel=1e-10)
    # The same examples as one stream of text.
    tokens = torch.from_numpy(np.append(TOKENS, 0)).unsqueeze(0)
    features, _ = network.features(tokens[:, :-1], network.initial_state(1))
    log_probs = network.head.log_probs(features)[0]
    of_targets = [i + 1 for i in range(len(TOKENS)) if (TOKENS[: i + 1] == 0).sum() % 2 == 0]
    if not reverse:
        found = [-log_probs[i - 1, tokens[0, i]].item() for i in of_targets]
        assert found == pytest.approx([nat for nats in expected for nat in nats], rel=1e-10)


def test_gradients_reach_the_encoder_through_the_bottleneck_alone():
    network = small()
    (segment,) = Pairs(TOKENS, 4, 0)
    features, _ = network.features(segment.tokens_BT, network.initial_state(4))
    network.head.nll(features, segment.targets_BT, segment.weight_BT.double()).sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in network.encoder.parameters())
    initial, network = network.initial_state(1), small()
    # Features of a source are the encoder's: the decoder has no part in them.
    features, _ = network.features(torch.tensor([[0, 3, 4]]), initial)
    features.sum().backward()
    assert all(parameter.grad is None for parameter in network.decoder.parameters())


def test_a_new_source_begins_from_nothing_and_the_bottleneck_does_not_grow():
    network = small()
    read = network.features(torch.tensor([[0, 5, 5, 0, 7, 7, 0, 3]]), network.initial_state(1))[1]
    alone = network.features(torch.tensor([[0, 3]]), network.initial_state(1))[1]
    for name, tensor in alone.tensors.items():
        assert torch.equal(read.tensors[name], tensor), name
    assert read.num_bytes == 2 * 2 * 7 * 8 + 8  # h and c of each layer, and the phase
    assert read.tensors["phase"].tolist() == [1]


def test_dropout_is_drawn_once_for_the_whole_segment():
    # A piece between two boundaries must not repeat the masks of the one before it.
    from elman.models.noise import Noise

    network = small(dropout=0.5)
    network.decoder.load_state_dict(network.encoder.state_dict())
    tokens = torch.tensor([[0, 3, 3, 0, 3, 3, 0, 3, 3]] * 2)
    features, _ = network.features(tokens, network.initial_state(2), noise=Noise(1, 1, 2))
    masks = (features == 0).reshape(2, 3, 3, 7)
    assert not torch.equal(masks[:, 0], masks[:, 1])
    assert not torch.equal(masks[:, 0], masks[:, 2])


def test_a_state_that_grows_is_no_bottleneck():
    config = model_config({"kind": "seq2seq", "cell": "transformer", "hidden_size": 8, "embedding_size": 6})
    with pytest.raises(ConfigError, match=r"model\.cell 'transformer' has a state that grows with the text"):
        build_model(config, 9, seed=1, dtype=torch.float32)


@pytest.mark.parametrize("cell", [name for name in cell_names() if name not in ("lstm", "transformer")])
def test_every_cell_makes_an_encoder_decoder_that_keeps_the_laws(cell):
    config = model_config({"kind": "seq2seq", "cell": cell, "hidden_size": 8, "embedding_size": 6})
    assert [str(finding) for finding in check_config(config)] == []


def test_the_model_file_brings_it_back(tmp_path):
    network = small(share_embedding=False, cell="gru")
    save_model(tmp_path / "m.safetensors", Bundle(network, CharTokenizer("abcdefgh")))
    again = load_model(tmp_path / "m.safetensors").network
    assert again.config == network.config
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), network.parameters(), strict=True))


def test_components_hold_every_parameter_and_all_of_the_state():
    network = small(share_embedding=False)
    components = network.components()
    assert sum(p.numel() for c in components for p in c.parameters.values()) == network.num_parameters
    assert [name for c in components for name in c.state] == list(network.initial_state(1).tensors)
    # A token costs one stack and the output, whichever reads it.
    lstms = 2 * (28 * 5 + 28 * 7) + 2 * (28 * 7 + 28 * 7)
    assert sum(c.operations for c in components) == lstms + 2 * 10 * 7
    assert len(network.hidden_matrices()) == 8


def test_what_is_refused():
    with pytest.raises(ConfigError, match="unknown cell 'lstn'; did you mean 'lstm'"):
        small(cell="lstn")
    with pytest.raises(ValidationError, match=r"'./mine.py:Cell' is a path; accepted: the name of a cell"):
        model_config({**SMALL, "cell": "./mine.py:Cell"})


def test_the_transcription_sees_a_wrong_hand_over():
    """The oracle is no echo: without the encoder's state it gives other figures."""
    network = small()
    before = nats_of(network, [3, 4], [5])
    with torch.no_grad():
        network.encoder[0].weight_hh.zero_()
    after = nats_of(network, [3, 4], [5])
    assert functional.l1_loss(torch.tensor(before), torch.tensor(after)) > 1e-4
