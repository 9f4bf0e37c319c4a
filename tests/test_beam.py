"""Beam search: against all texts one by one, against Hugging Face's, and its edges."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

from elman.beam import Beam, beam_search
from elman.config import ModelConfig
from elman.engine import TorchStepper
from elman.errors import ElmanError
from elman.models.contract import Head, LanguageModel
from elman.models.kinds import build_model, model_config
from elman.models.state import State

BOUNDARY = 0


@pytest.fixture(scope="module", params=["lstm", "window"])
def network(request):
    config = model_config({"kind": request.param, "hidden_size": 6, "embedding_size": 5})
    network = build_model(config, 4, seed=3, dtype=torch.float64, boundary_id=BOUNDARY)
    for parameter in network.parameters():
        parameter.data.mul_(4)  # far from uniform
    return network


def start(network, prompt=()):
    tokens = torch.tensor([[BOUNDARY, *prompt]])
    with torch.no_grad():
        output = network(tokens, network.initial_state(1))
    return output.state, output.logits_BTV[0, -1]


def every_text(network, prompt, length, penalty):
    """All texts of at most so many tokens, the boundary counted, by falling score."""
    beams = []
    for tokens in itertools.product(range(4), repeat=length):
        ends = BOUNDARY in tokens
        kept = tokens[: tokens.index(BOUNDARY) + 1] if ends else tokens
        row = torch.tensor([[BOUNDARY, *prompt, *kept]])
        with torch.no_grad():
            log_probs = network(row, network.initial_state(1)).logits_BTV[0].log_softmax(-1)
        at = len(prompt)
        total = sum(float(log_probs[at + i, token]) for i, token in enumerate(kept))
        text = kept[:-1] if ends else kept
        beams.append(Beam(text, total, total / len(kept) ** penalty, ends))
    return sorted({beam.tokens + (-1,) * beam.finished: beam for beam in beams}.values(), key=lambda b: -b.score)


def search(network, prompt=(), **settings):
    state, logits = start(network, prompt)
    return beam_search(TorchStepper(network), state, logits, boundary_id=BOUNDARY, **settings)


def assert_same(found, expected):
    assert [(beam.tokens, beam.finished) for beam in found] == [(beam.tokens, beam.finished) for beam in expected]
    for attribute in ("log_prob", "score"):
        values = [[getattr(beam, attribute) for beam in beams] for beams in (found, expected)]
        np.testing.assert_allclose(*values, rtol=0, atol=1e-10)


@pytest.mark.parametrize("penalty", [0.0, 1.0, 1.7, -0.5])
@pytest.mark.parametrize("prompt", [(), (2, 3, 1)])
def test_with_room_for_all_texts_it_finds_the_best_of_all(network, penalty, prompt):
    found = search(network, prompt, num_beams=4**4, max_new_tokens=4, length_penalty=penalty)
    assert_same(found, every_text(network, prompt, 4, penalty))


def test_one_beam_takes_the_most_probable_token_each_time(network):
    (beam,) = search(network, (1,), num_beams=1, max_new_tokens=6)
    state, logits = start(network, (1,))
    tokens, total = [], 0.0
    for _ in range(6):
        total += float(logits.log_softmax(-1).max())
        if (token := int(logits.argmax())) == BOUNDARY:
            break
        tokens.append(token)
        with torch.no_grad():
            logits_BTV, state = network(torch.tensor([[token]]), state)
        logits = logits_BTV[0, 0]
    assert beam.tokens == tuple(tokens)
    assert beam.log_prob == pytest.approx(total, abs=1e-10)


class Features(Head):
    def logits(self, features_BTF):
        return features_BTF


class Theirs(LanguageModel):
    """A network of Hugging Face behind the contract: its state is the tokens so far."""

    def __init__(self, network, vocab_size):
        super().__init__(ModelConfig(), vocab_size, dtype=torch.float64, boundary_id=BOUNDARY)
        self.network, self.head = network, Features()

    def initial_state(self, batch_size):
        return State({"tokens": torch.zeros(batch_size, 0, dtype=torch.int64)})

    def features(self, tokens_BT, state, reset_BT=None, noise=None):
        tokens = torch.cat([state.tensors["tokens"], tokens_BT], dim=1)
        logits = self.network(input_ids=tokens).logits[:, -tokens_BT.shape[1] :]
        return logits, State({"tokens": tokens})

    def step(self, token_B, state):
        raise NotImplementedError

    def components(self):
        return []

    @staticmethod
    def predicted_num_parameters(config, vocab_size):
        return 0

    def reset_parameters(self, generator):
        raise NotImplementedError


@pytest.fixture(scope="module")
def theirs():
    from transformers import GPT2Config, GPT2LMHeadModel

    vocab_size = 11
    config = GPT2Config(vocab_size=vocab_size, n_positions=32, n_embd=8, n_layer=1, n_head=2, bos_token_id=BOUNDARY)
    with torch.random.fork_rng():
        network = GPT2LMHeadModel(config).eval()
    generator = torch.Generator().manual_seed(5)
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.7, generator=generator)
    return Theirs(network, vocab_size)


@pytest.mark.parametrize("num_beams", [2, 3, 5])
@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.0])
def test_it_is_the_search_of_transformers(theirs, num_beams, penalty):
    for prompt in ((1, 2), (3, 3, 7), (10,)):
        tokens = torch.tensor([[BOUNDARY, *prompt]])
        answer = theirs.network.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            num_beams=num_beams,
            num_return_sequences=num_beams,
            length_penalty=penalty,
            max_new_tokens=9,
            do_sample=False,
            eos_token_id=BOUNDARY,
            pad_token_id=BOUNDARY,
            return_dict_in_generate=True,
            output_scores=True,
        )
        expected = [row[tokens.shape[1] :].tolist() for row in answer.sequences]
        found = search(theirs, prompt, num_beams=num_beams, max_new_tokens=9, length_penalty=penalty)
        padded = [[*beam.tokens, *[BOUNDARY] * (max(map(len, expected)) - len(beam.tokens))] for beam in found]
        assert padded == expected
        scores = [beam.score for beam in found]
        np.testing.assert_allclose(scores, answer.sequences_scores.numpy(), rtol=0, atol=1e-4)


def test_bans_hold_for_every_beam(network):
    def ban(tokens, log_probs_KV):
        log_probs_KV[:, BOUNDARY] = -math.inf
        for row, drawn in enumerate(tokens):
            log_probs_KV[row, list(drawn)] = -math.inf

    found = search(network, num_beams=6, max_new_tokens=3, adjust=ban)
    assert sorted(beam.tokens for beam in found) == sorted(itertools.permutations([1, 2, 3]))
    with pytest.raises(ElmanError, match="no token is left"):
        search(network, num_beams=2, max_new_tokens=4, adjust=ban)


def test_no_tokens_are_asked_for(network):
    assert search(network, num_beams=3, max_new_tokens=0) == [Beam((), 0.0, 0.0, finished=False)]


def test_a_search_can_be_ended_from_outside(network):
    polled = iter([False, False, True])
    found = search(network, num_beams=2, max_new_tokens=50, should_stop=lambda: next(polled))
    assert max(len(beam.tokens) for beam in found) <= 3


@pytest.mark.parametrize("logits", [[0.0, math.nan, 0, 0], [0.0, math.inf, 0, 0]])
def test_damaged_logits_are_an_error(network, logits):
    state, _ = start(network)
    form = TorchStepper(network)
    with pytest.raises(ElmanError, match="logits hold NaN or infinity"):
        beam_search(form, state, np.array(logits), boundary_id=BOUNDARY, num_beams=2, max_new_tokens=2)
