"""Drawing texts: prompts, stop strings, text that appears as it is drawn, several texts at once."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elman.config import ModelConfig, SamplingConfig, TokenizerConfig
from elman.engine import Engine
from elman.errors import TextError, UserError
from elman.generation import Sampler, TextStream, generate_batch
from elman.model import Model
from elman.models.contract import Head, LanguageModel
from elman.models.file import Bundle
from elman.models.kinds import build_model, model_config
from elman.models.state import State
from elman.reading import Reading
from elman.text.bpe import BPETokenizer
from elman.text.sources import Piece
from elman.text.tokenizers import ByteTokenizer, CharTokenizer, WordTokenizer

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
        (["hello", "ell"], "h"),
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


def bpe(text: str, size: int = 300) -> BPETokenizer:
    return BPETokenizer.train(TokenizerConfig(level="bpe", max_size=size), [Piece(text, starts_document=True)])


MANY_SCRIPTS = "ab ba 猫は月を見た 👩\u200d👩\u200d👧 🙂🙂 e\u0301 Ä ß 한글 \U0010ffff\n"
OF_MANY_BYTES = (ByteTokenizer(), bpe(MANY_SCRIPTS * 9, 270), bpe(MANY_SCRIPTS * 9, 400))


def up_to_a_stop(text: str, stop: list[str]) -> str:
    """The text before the stop string that is complete first."""
    for end in range(len(text) + 1):
        if begins := [end - len(s) for s in stop if text[:end].endswith(s)]:
            return text[: min(begins)]
    return text


@pytest.mark.parametrize("tokenizer", OF_MANY_BYTES, ids=["bytes", "bpe", "longer bpe"])
@given(
    text=st.text(st.sampled_from(MANY_SCRIPTS) | st.characters(codec="utf-8"), max_size=12),
    stop=st.lists(st.text(st.sampled_from(MANY_SCRIPTS), min_size=1, max_size=3), max_size=2),
)
def test_pieces_hold_whole_characters_and_joined_are_the_text_up_to_a_stop_string(tokenizer, text, stop):
    stream = TextStream(tokenizer, stop=stop)
    pieces = []
    for token in tokenizer.encode(text).tolist():
        pieces.append(stream.feed(token))
        if stream.has_stopped:
            break
    else:
        pieces.append(stream.flush())
    assert "".join(pieces) == up_to_a_stop(text, stop)
    assert stream.has_stopped == any(string in text for string in stop)
    assert all("\ufffd" not in piece for piece in pieces if "\ufffd" not in text)


@pytest.mark.parametrize("tokenizer", OF_MANY_BYTES, ids=["bytes", "bpe", "longer bpe"])
@given(data=st.data())
def test_whatever_tokens_are_drawn_the_pieces_are_the_text(tokenizer, data):
    tokens = data.draw(st.lists(st.integers(0, tokenizer.size - 1), max_size=12))
    stream = TextStream(tokenizer)
    pieces = [stream.feed(token) for token in tokens]
    assert "".join(pieces) + stream.flush() == tokenizer.decode(tokens)


def test_a_stop_string_may_be_what_an_unfinished_character_is_shown_as():
    writer = sampler(saying("aß", ByteTokenizer()), max_new_tokens=2, stop=["\ufffd"])
    assert list(writer) == ["a"]
    assert writer.result.finish_reason == "stop"


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
    scores = Reading.start(bundle).read("fade").logits_V / 0.8
    scores[TOKENIZER.unknown_id] = -math.inf
    expected = torch.tensor(scores).softmax(0).tolist()
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


# Settings reach the draw.


def test_penalties_and_bans_reach_the_text(bundle):
    def text(**settings):
        return Sampler(bundle, "ab", settings=SamplingConfig(max_new_tokens=30, **settings), seed=3).run().text

    assert "e" in text()
    assert "e" not in text(bad_words=("e",))
    assert set(text(logit_bias={"e": 100})) == {"e"}
    grams = ["ab" + text(no_repeat_ngram_size=2, temperature=0.0)]
    pairs = [gram[i : i + 2] for gram in grams for i in range(len(gram) - 1)]
    assert len(pairs) == len(set(pairs))
    with torch.no_grad():
        bundle.network.head.bias[TOKENIZER.boundary_id] = 30.0
    assert len(text()) == 0
    assert len(text(min_new_tokens=7)) == 7
    assert len(text(suppress_tokens=(TOKENIZER.boundary_id,))) == 30


def test_beams_find_a_text_that_is_no_less_probable_than_the_greedy_one(bundle):
    def nats(tokens):
        row = torch.tensor([[TOKENIZER.boundary_id, *TOKENIZER.encode("ab"), *tokens]])
        with torch.no_grad():
            logits = bundle.network(row, bundle.network.initial_state(1)).logits_BTV[0]
        logits[:, TOKENIZER.unknown_id] = -math.inf
        log_probs = logits.log_softmax(-1)
        return -sum(float(log_probs[2 + i, token]) for i, token in enumerate(tokens))

    greedy = Sampler(bundle, "ab", settings=SamplingConfig(max_new_tokens=8, temperature=0)).run()
    writer = Sampler(bundle, "ab", settings=SamplingConfig(max_new_tokens=8, num_beams=8))
    assert "".join(writer) == writer.result.text
    assert writer.result.finish_reason == "length"
    assert nats(writer.result.tokens) <= nats(greedy.tokens)
    assert writer.end.text == "ab" + writer.result.text
    banned = writer.result.text[:2]
    settings = SamplingConfig(max_new_tokens=8, num_beams=8, bad_words=(banned,))
    assert banned not in Sampler(bundle, settings=settings).run().text


def test_beams_end_at_the_boundary_and_at_stop_strings():
    settings = SamplingConfig(num_beams=3)
    said = Sampler(saying("hello, world"), settings=settings).run()
    assert (said.text, said.finish_reason) == ("hello, world", "boundary")
    stopped = Sampler(saying("hello, world"), settings=settings, stop=["wor"]).run()
    assert (stopped.text, stopped.finish_reason) == ("hello, ", "stop")
    polled = iter([False, False, True])
    cut = Sampler(saying("hello, world"), settings=settings, should_stop=lambda: next(polled)).run()
    assert (cut.text, cut.finish_reason) == ("hel", "interrupted")
    empty = Sampler(saying("hello"), settings=SamplingConfig(num_beams=3, max_new_tokens=0)).run()
    assert (empty.text, empty.finish_reason) == ("", "length")


# Several texts at once.


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 1.5, "repetition_penalty": 1.3, "top_p": 0.9}, {"num_beams": 2}, {"max_new_tokens": 0}],
)
def test_texts_drawn_side_by_side_are_those_drawn_alone(bundle, settings):
    with torch.no_grad():
        bundle.network.head.bias[TOKENIZER.boundary_id] = 1.0  # so that they end at different lengths
    config = SamplingConfig(**({"max_new_tokens": 25} | settings))
    prompts, seeds = ["", "abc", "abc", "f" * 40, "", "bad"], [4, 4, 5, 6, 7, 8]
    together = generate_batch(bundle, prompts, seeds=seeds, settings=config, stop=["cab"])
    alone = [
        Sampler(bundle, prompt, seed=seed, settings=config, stop=["cab"]).run()
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    assert together == alone
    if not settings:
        assert len({len(generated.tokens) for generated in together}) > 2
    assert generate_batch(bundle, [], seeds=[]) == []


def test_a_model_draws_several_texts_for_several_prompts(bundle):
    model = Model(bundle.network, bundle.tokenizer)
    drawn = model.generate_batch(["a", "b"], num_samples=2, seed=5, max_new_tokens=9)
    assert drawn == [model.generate("aabb"[i], seed=5 + i, max_new_tokens=9) for i in range(4)]


# Going on.


@pytest.mark.parametrize("cut", [0, 1, 13])
@pytest.mark.parametrize(
    "settings", [{}, {"frequency_penalty": 1.0, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3}]
)
def test_going_on_from_a_place_gives_the_text_that_would_have_come(bundle, cut, settings):
    whole = Sampler(bundle, "abc", seed=2, settings=SamplingConfig(max_new_tokens=30, **settings)).run()
    first = Sampler(bundle, "abc", seed=2, settings=SamplingConfig(max_new_tokens=cut, **settings))
    drawn = first.run()
    rest = SamplingConfig(max_new_tokens=30 - cut, **settings)
    assert drawn.tokens + Sampler(bundle, start=first.end, seed=2, settings=rest).run().tokens == whole.tokens
    assert first.end.text == "abc" + drawn.text


def test_a_character_that_was_cut_is_completed():
    text = "aß猫🙂b"
    bundle = saying(text, ByteTokenizer())
    for cut in range(1, 11):
        first = sampler(bundle, max_new_tokens=cut)
        first.run()
        assert "".join(list(sampler(bundle, start=first.end))[1:]) in text
        assert sampler(bundle, start=first.end).run().text == text[len(text.encode()[:cut].decode(errors="ignore")) :]


def test_a_word_model_goes_on_with_a_space_where_none_stands():
    tokenizer = WordTokenizer(["the", "cat", "sat"])
    bundle = saying("the cat sat", tokenizer)
    first = sampler(bundle, max_new_tokens=2)
    assert first.run().text == "the cat"
    assert sampler(bundle, start=first.end).run().text == " sat"


# By compiled code.


class Stepwise:
    """An engine that gives every token back to Python."""

    def __init__(self, engine):
        self._engine = engine

    def initial_state(self, num_rows):
        return self._engine.initial_state(num_rows)

    def step(self, tokens_B, state):
        return self._engine.step(tokens_B, state)

    def take(self, state):
        return self._engine.take(state)

    def give(self, state):
        return self._engine.give(state)


@pytest.fixture(scope="module")
def compiled():
    config = model_config({"kind": "lstm", "embedding_size": 4, "hidden_size": 8, "num_layers": 2})
    network = build_model(config, TOKENIZER.size, seed=1, dtype=torch.float32)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(3.0)  # far from uniform
        network.head.bias[TOKENIZER.boundary_id] = -4.0
    return Bundle(network, TOKENIZER), Engine(network, num_threads=1)


def end_of(writer):
    writer.run()
    parts = writer.end.state.tensors
    return writer.result, writer.end.tokens, writer.end.logits_V.tolist(), {n: t.tolist() for n, t in parts.items()}


@pytest.mark.parametrize("stop", [(), ("cd",), ("a", "ff")])
@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0}, {"min_new_tokens": 90}, {"top_k": 3, "top_p": 0.9, "min_p": 0.01}]
)
def test_a_text_by_compiled_code_is_the_one_by_steps(compiled, settings, stop):
    bundle, engine = compiled
    sampling = SamplingConfig(**{"max_new_tokens": 90} | settings)
    for seed in range(4):
        options = {"settings": sampling, "seed": seed, "stop": stop}
        ahead = end_of(Sampler(bundle, "ab", stepper=engine, **options))
        assert ahead == end_of(Sampler(bundle, "ab", stepper=Stepwise(engine), **options))
        (beside, _) = generate_batch(bundle, ["ab", "b"], seeds=[seed, 9], settings=sampling, stop=stop, stepper=engine)
        assert beside == ahead[0]


def test_pieces_of_compiled_code_are_those_of_steps(compiled):
    bundle, engine = compiled
    writers = [sampler(bundle, max_new_tokens=60, stop=["cdc"], stepper=form) for form in (engine, Stepwise(engine))]
    assert list(writers[0]) == list(writers[1])


@pytest.mark.parametrize("after", [0, 1, 2, 3, 20])
def test_the_caller_can_end_a_text_of_compiled_code_after_any_token(compiled, after):
    bundle, engine = compiled
    ends = []
    for form in (engine, Stepwise(engine)):
        polled = iter([False] * after + [True])
        settings = SamplingConfig(max_new_tokens=50, min_new_tokens=50)
        ends.append(end_of(Sampler(bundle, settings=settings, stepper=form, should_stop=lambda it=polled: next(it))))
    assert ends[0] == ends[1]
    assert (len(ends[0][1]), ends[0][0].finish_reason) == (after, "interrupted")


def test_what_came_before_an_error_is_given_out_first(compiled):
    bundle, engine = compiled
    settings = SamplingConfig(max_new_tokens=5, min_new_tokens=2, suppress_tokens=tuple(range(1, TOKENIZER.size)))
    with pytest.raises(UserError, match="no token is left"):
        Sampler(bundle, settings=settings, stepper=engine).run()


def test_beams_use_the_form_that_is_given(compiled):
    bundle, engine = compiled
    settings = SamplingConfig(max_new_tokens=12, num_beams=4)
    small = Engine(bundle.network, precision="int8", num_threads=1)
    found = [Sampler(bundle, "ab", settings=settings, stepper=form).run() for form in (None, engine)]
    assert found[0] == found[1]
    used = []
    small_step = small.step
    small.step = lambda tokens, state: used.append(len(tokens)) or small_step(tokens, state)
    assert len(Sampler(bundle, "ab", settings=settings, stepper=small).run().tokens) == 12
    assert max(used) == 4
