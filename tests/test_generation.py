"""Sampling: the distribution, the order of its cuts, prompts, stop strings, and text that appears as it is drawn."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import elman.generation
from elman.config import ModelConfig, SamplingConfig
from elman.errors import ElmanError, TextError, UserError
from elman.generation import Sampler, probabilities, read_prompt
from elman.models.contract import Head, LanguageModel
from elman.models.file import Bundle
from elman.models.kinds import build_model, model_config
from elman.models.state import State
from elman.text.tokenizers import ByteTokenizer, CharTokenizer, WordTokenizer

# The distribution.


def naively(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """Temperature, top-k, top-p in that order, one number at a time."""
    if temperature == 0:
        return [float(index == logits.index(max(logits))) for index in range(len(logits))]
    weights = [math.exp((logit - max(logits)) / temperature) for logit in logits]
    if top_k:
        smallest = sorted(weights, reverse=True)[:top_k][-1]
        weights = [weight if weight >= smallest else 0.0 for weight in weights]
    shares = [weight / sum(weights) for weight in weights]
    if top_p < 1:
        kept, reached = [0.0] * len(shares), 0.0
        for index in sorted(range(len(shares)), key=lambda i: -shares[i]):
            if reached >= top_p:
                break
            kept[index] = shares[index]
            reached += shares[index]
        shares = [share / sum(kept) for share in kept]
    return shares


def as_transformers_does(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """The warpers of Hugging Face's generate by their definition, which sorts from the least probable up."""
    scores = logits.double() / temperature
    if top_k:
        scores = scores.masked_fill(scores < scores.topk(min(top_k, len(scores))).values[-1], -math.inf)
    if top_p < 1:
        ordered, order = scores.sort()
        remove = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
        remove[-1] = False
        scores = scores.masked_fill(torch.zeros_like(remove).scatter(0, order, remove), -math.inf)
    return scores.softmax(-1)


SETTINGS = [
    (temperature, top_k, top_p)
    for temperature in (0.0, 0.05, 0.8, 1.0, 3.0)
    for top_k in (0, 1, 3, 50)
    for top_p in (1.0, 0.9, 0.35, 1e-6)
]


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SETTINGS)
def test_the_distribution_is_that_of_the_naive_form_and_of_transformers(temperature, top_k, top_p):
    settings = SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p)
    for seed in range(5):
        logits = 3 * torch.randn(20, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        found = probabilities(logits, settings)
        assert found.tolist() == pytest.approx(naively(logits.tolist(), temperature, top_k, top_p), abs=1e-12)
        if temperature:
            theirs = as_transformers_does(logits, temperature, top_k, top_p)
            torch.testing.assert_close(found, theirs, rtol=0, atol=1e-12)


@given(
    st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=12),
    st.sampled_from([0.0, 1e-300, 1e-3, 1.0, 1e6, 1e300]),
    st.integers(0, 14),
    st.floats(1e-9, 1.0),
)
def test_whatever_is_given_it_is_a_distribution(logits, temperature, top_k, top_p):
    settings = SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p)
    found = probabilities(torch.tensor(logits, dtype=torch.float32), settings)
    assert found.dtype == torch.float64
    assert (found >= 0).all()
    assert found.sum().item() == pytest.approx(1.0, abs=1e-12)
    # Equal up to rounding: a high temperature makes close logits the same.
    assert logits[found.argmax()] == pytest.approx(max(logits), rel=1e-6, abs=1e-6 * (1 + temperature))


def test_temperature_goes_to_both_ends():
    logits = torch.tensor([1.0, 2.0, 1.9])
    assert probabilities(logits, SamplingConfig(temperature=1e-9)).tolist() == [0.0, 1.0, 0.0]
    assert probabilities(logits, SamplingConfig(temperature=1e9)).tolist() == pytest.approx([1 / 3] * 3)
    assert probabilities(torch.tensor([2.0, 5.0, 5.0]), SamplingConfig(temperature=0)).tolist() == [0.0, 1.0, 0.0]


def test_logits_that_are_ruled_out_stay_out():
    logits = torch.tensor([-math.inf, 0.0, 0.0])
    for settings in (SamplingConfig(), SamplingConfig(temperature=0), SamplingConfig(top_p=0.9, top_k=2)):
        assert probabilities(logits, settings)[0] == 0


def test_the_logits_given_are_not_changed():
    logits = torch.randn(9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    before = logits.clone()
    probabilities(logits, SamplingConfig(temperature=0.5, top_k=3, top_p=0.5))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("logits", [[0.0, math.nan], [0.0, math.inf], [-math.inf, -math.inf]])
def test_damaged_logits_are_an_error(logits):
    for temperature in (0.0, 1.0):
        with pytest.raises(ElmanError, match="logits hold NaN or infinity"):
            probabilities(torch.tensor(logits), SamplingConfig(temperature=temperature))


# A model that says what it is told to.


class Identity(Head):
    def logits(self, features_BTF):
        return features_BTF


class Scripted(LanguageModel):
    """Gives each next token of a script all the probability; after it, the boundary."""

    def __init__(self, script: list[int], vocab_size: int, boundary_id: int) -> None:
        super().__init__(ModelConfig(), vocab_size, dtype=torch.float32)
        self.script, self.boundary_id = script, boundary_id
        self.head = Identity()
        self.unused = nn.Parameter(torch.zeros(1))

    def initial_state(self, batch_size):
        return State({"position": torch.zeros(batch_size, dtype=torch.int64)})

    def features(self, tokens_BT, state, reset_BT=None, noise=None):
        script = [*self.script, *[self.boundary_id] * 1000]
        positions = state.tensors["position"].unsqueeze(1) + torch.arange(tokens_BT.shape[1])
        features = torch.zeros(*tokens_BT.shape, self.vocab_size)
        features.scatter_(2, torch.tensor(script)[positions].unsqueeze(2), 100.0)
        return features, State({"position": positions[:, -1] + 1})

    def step(self, token_B, state):
        features, state = self.features(token_B.unsqueeze(1), state)
        return features.squeeze(1), state

    def components(self):
        return []

    @staticmethod
    def predicted_num_parameters(config, vocab_size):
        return 1

    def reset_parameters(self, generator):
        pass


def saying(text: str, tokenizer=None) -> Bundle:
    tokenizer = tokenizer or CharTokenizer(text)
    return Bundle(Scripted(tokenizer.encode(text).tolist(), tokenizer.size, tokenizer.boundary_id), tokenizer)


def sampler(bundle: Bundle, prompt: str = "", *, max_new_tokens: int = 50, **options):
    return Sampler(bundle, prompt, settings=SamplingConfig(max_new_tokens=max_new_tokens), **options)


def test_a_text_ends_at_the_boundary():
    generated = sampler(saying("hello, world")).run()
    assert generated.text == "hello, world"
    assert generated.finish_reason == "boundary"
    assert len(generated.tokens) == 12


@pytest.mark.parametrize("length", [0, 1, 5])
def test_a_text_ends_at_its_length(length):
    generated = sampler(saying("hello, world"), max_new_tokens=length).run()
    assert generated.text == "hello, world"[:length]
    assert generated.finish_reason == "length"
    assert len(generated.tokens) == length


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (["world"], "hello, "),
        (["lo, w"], "hel"),
        (["h"], ""),
        (["d"], "hello, worl"),
        (["xyz"], "hello, world"),
        (["world!"], "hello, world"),
        (["world", "lo"], "hel"),
        (["l", "llo"], "he"),
        (["llo", "l"], "he"),
        (["o, wo", "o, x"], "hell"),
    ],
)
def test_a_stop_string_ends_the_text_and_is_left_out(stop, text):
    writer = sampler(saying("hello, world"), stop=stop)
    pieces = list(writer)
    assert "".join(pieces) == writer.result.text == text
    assert all(pieces)
    assert writer.result.finish_reason == ("boundary" if text == "hello, world" else "stop")


def test_the_first_stop_string_to_be_complete_counts():
    assert sampler(saying("abcdef"), stop=["bcde", "cd"]).run().text == "ab"
    # Complete at the same token: the one that begins first.
    assert sampler(saying("xyab"), stop=["xyabq", "ab", "b"]).run().text == "xy"


def test_text_that_may_become_a_stop_string_is_held_back_and_no_other():
    pieces = list(sampler(saying("aXXbXYc"), stop=["XY"]))
    assert "".join(pieces) == "aXXb"
    assert pieces == ["a", "X", "Xb"]
    assert list(sampler(saying("abX"), stop=["XY"])) == ["a", "b", "X"]
    assert list(sampler(saying("abX"), stop=["XY"], max_new_tokens=3)) == ["a", "b", "X"]


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_streaming_gives_the_text_up_to_the_first_stop_string(text, stop):
    found = {}
    for end in range(len(text) + 1):  # the first place at which some stop string is complete
        if begins := [text[:end].find(s) for s in stop if s in text[:end]]:
            found = {"text": text[: min(begins)], "reason": "stop"}
            break
    writer = sampler(saying(text, CharTokenizer("ab")), stop=stop)
    assert "".join(writer) == found.get("text", text)
    assert writer.result.finish_reason == found.get("reason", "boundary")


def test_a_piece_never_ends_inside_a_character():
    text = "aß猫🙂b"
    pieces = list(sampler(saying(text, ByteTokenizer())))
    assert pieces == list(text)
    cut = sampler(saying(text, ByteTokenizer()), max_new_tokens=4).run()
    assert cut.text == "aß�"
    assert list(sampler(saying(text, ByteTokenizer()), stop=["猫"])) == ["a", "ß"]


def test_an_empty_stop_string_is_refused():
    with pytest.raises(UserError, match="an empty stop string would end every text at once"):
        sampler(saying("a"), stop=["a", ""])


def test_the_caller_can_end_a_text():
    polled = iter([False, False, True])
    generated = sampler(saying("hello"), should_stop=lambda: next(polled)).run()
    assert generated.text == "he"
    assert generated.finish_reason == "interrupted"


# A model that draws.

TOKENIZER = CharTokenizer("abcdef")


@pytest.fixture
def bundle() -> Bundle:
    config = model_config({"kind": "lstm", "embedding_size": 4, "hidden_size": 8, "num_layers": 2})
    network = build_model(config, TOKENIZER.size, seed=1, dtype=torch.float64)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(3.0)  # far from uniform
        network.head.bias[TOKENIZER.boundary_id] = -30.0
    return Bundle(network, TOKENIZER)


def test_the_seed_decides_the_text(bundle):
    texts = [sampler(bundle, seed=seed).run() for seed in (1, 1, 2)]
    assert texts[0] == texts[1]
    assert texts[0].text != texts[2].text
    assert len(texts[0].tokens) == 50


def test_temperature_zero_takes_the_most_probable_token_whatever_the_seed(bundle):
    settings = SamplingConfig(max_new_tokens=20, temperature=0)
    texts = {Sampler(bundle, "ab", settings=settings, seed=seed).run().tokens for seed in range(3)}
    tokens = [TOKENIZER.boundary_id, *TOKENIZER.encode("ab")]
    with torch.no_grad():
        for _ in range(20):  # the whole text anew for each token: no state is carried
            logits, _ = bundle.network(torch.tensor([tokens]), bundle.network.initial_state(1))
            logits[..., TOKENIZER.unknown_id] = -math.inf
            tokens.append(logits[0, -1].argmax().item())
    assert texts == {tuple(tokens[3:])}


def test_tokens_come_as_often_as_their_probability_says(bundle):
    logits, _ = read_prompt(bundle, "fade")
    logits = logits.detach().clone()
    logits[TOKENIZER.unknown_id] = -math.inf
    expected = probabilities(logits, SamplingConfig(temperature=0.8)).tolist()
    settings = SamplingConfig(max_new_tokens=1, temperature=0.8)
    count = 800
    drawn = Counter(Sampler(bundle, "fade", settings=settings, seed=seed).run().tokens[:1] for seed in range(count))
    chi_square = 0.0
    for token, share in enumerate(expected):
        if share * count > 5:
            chi_square += (drawn[(token,)] - share * count) ** 2 / (share * count)
    assert 0 < chi_square < 24.3  # 0.1% of draws from 7 degrees of freedom lie above


def test_what_stands_for_no_text_is_never_drawn(bundle):
    with torch.no_grad():
        bundle.network.head.bias[TOKENIZER.unknown_id] = 50.0
    for temperature in (0.0, 1.0):
        settings = SamplingConfig(max_new_tokens=30, temperature=temperature)
        assert TOKENIZER.unknown_id not in Sampler(bundle, settings=settings).run().tokens


def test_a_prompt_is_read_from_the_boundary_on_in_pieces_of_any_length(bundle, monkeypatch):
    prompt = "abcdef" * 5
    tokens = torch.tensor([[TOKENIZER.boundary_id, *TOKENIZER.encode(prompt)]])
    expected = bundle.network(tokens, bundle.network.initial_state(1))
    for length in (1, 7, 31, 1024):
        monkeypatch.setattr(elman.generation, "_PROMPT_PIECE", length)
        logits, state = read_prompt(bundle, prompt)
        torch.testing.assert_close(logits, expected.logits_BTV[0, -1], rtol=0, atol=1e-12)
        for name, tensor in expected.state.tensors.items():
            torch.testing.assert_close(state.tensors[name], tensor, rtol=0, atol=1e-12)


def test_an_empty_prompt_is_the_boundary_alone(bundle):
    logits, _ = read_prompt(bundle, "")
    expected = bundle.network(torch.tensor([[TOKENIZER.boundary_id]]), bundle.network.initial_state(1))
    assert torch.equal(logits, expected.logits_BTV[0, 0])


def test_characters_that_the_model_never_saw_are_listed_or_skipped(bundle):
    with pytest.raises(TextError, match=r"holds 2 characters .* never saw: 'X' 'Ä'; .* --unknown skip"):
        sampler(bundle, "aXbÄX").run()
    assert sampler(bundle, "aXbÄX", unknown="skip").run() == sampler(bundle, "ab").run()


def test_drawing_changes_neither_the_model_nor_a_generator(bundle):
    before = {name: p.detach().clone() for name, p in bundle.network.named_parameters()}
    global_generator = torch.get_rng_state()
    sampler(bundle).run()
    assert torch.equal(torch.get_rng_state(), global_generator)
    for name, parameter in bundle.network.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None


@pytest.mark.parametrize("prompt", ["the", "the ", "the\n", "", "the cat"])
def test_a_word_that_follows_a_prompt_is_parted_from_it_once(prompt):
    tokenizer = WordTokenizer(["the", "cat", "sat"])
    drawn = sampler(saying(f"{prompt} cat sat", tokenizer), prompt).run().text
    assert (prompt + drawn).split() == [*prompt.split(), "cat", "sat"]
    assert "  " not in prompt + drawn
