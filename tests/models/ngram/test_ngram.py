"""The n-gram model against its definition, closed forms and nltk.

Shape letters: B rows, T time, V vocabulary.
"""

from __future__ import annotations

import importlib.util
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elman.config import NgramConfig
from elman.errors import ConfigError, ElmanError
from elman.models.kinds import build_model, model_config
from elman.models.ngram import tables as tables_module
from elman.models.ngram.counting import build_tables
from elman.models.ngram.model import NgramModel
from elman.text.tokenizers import CharTokenizer

_spec = importlib.util.spec_from_file_location("naive", Path(__file__).with_name("naive.py"))
naive = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(naive)

DEFINITIONS = {"kneser_ney": naive.KneserNey, "add_k": naive.AddK, "stupid_backoff": naive.StupidBackoff}
V = 7


def counted(
    tokens: Any,
    order: int,
    *,
    resets: bool = False,
    vocab_size: int = V,
    dtype: torch.dtype = torch.float64,
    **chosen: Any,
) -> NgramModel:
    """A model that has counted a text; 0 is the boundary."""
    config = model_config({"kind": "ngram", "order": order, **chosen})
    model = build_model(config, vocab_size, seed=1, dtype=dtype)
    assert isinstance(model, NgramModel)
    model.count(np.asarray(tokens), reset_at_documents=resets)
    return model


def log_probs(model: NgramModel, tokens: list[int], resets: bool = False) -> list[float]:
    """Of every token but the first, as the contract gives them."""
    tokens_BT = torch.tensor([tokens])
    reset_BT = tokens_BT[:, :-1] == 0 if resets else None
    features_BTF, _ = model.features(tokens_BT[:, :-1], model.initial_state(1), reset_BT)
    return (-model.head.nll(features_BTF, tokens_BT[:, 1:]))[0].tolist()


def defined(definition: Any, tokens: list[int], order: int, resets: bool = False) -> list[float]:
    """The same by the definition; a state begins with boundaries."""
    found = []
    context = (0,) * (order - 1)
    for token, target in pairwise(tokens):
        if resets and token == 0:
            context = (0,) * (order - 1)
        context = (*context, token)[-(order - 1) :] if order > 1 else ()
        found.append(math.log(definition.probability(target, context)))
    return found


def random_text(seed: int, length: int, vocab_size: int = V) -> list[int]:
    """Tokens with documents, some of them empty, and with repetitions of every length."""
    rng = np.random.default_rng(seed)
    text = [0, *rng.integers(0, vocab_size, length).tolist()]
    for _ in range(length // 8):
        start = rng.integers(len(text))
        text += text[start : start + rng.integers(12)]
    return text


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("order", range(1, 7))
@pytest.mark.parametrize("smoothing", DEFINITIONS)
def test_every_probability_is_that_of_the_definition(smoothing, order, resets):
    text, other = random_text(1, 150), random_text(2, 60)
    model = counted(text, order, resets=resets, smoothing=smoothing)
    definition = DEFINITIONS[smoothing](text, order, V, reset_token=0 if resets else None)
    for tokens in (text, other, [0, 0, 0, 0, 0, 0, 0, 1], [0, 5]):
        np.testing.assert_allclose(
            log_probs(model, tokens, resets), defined(definition, tokens, order, resets), rtol=0, atol=1e-9
        )


@pytest.mark.parametrize("order", [1, 2, 4, 6])
def test_a_text_in_several_scripts_costs_what_the_definition_says(order, tiny_text):
    tokenizer = CharTokenizer(tiny_text + "Z")
    documents = [tokenizer.encode(part).tolist() for part in (tiny_text[:700], tiny_text[700:1300])]
    text = [0, *documents[0], 0, *documents[1]]
    held_out = [0, *tokenizer.encode(tiny_text[-200:] + "ZZ the catZ").tolist()]
    for resets in (False, True):
        model = counted(text, order, resets=resets, vocab_size=tokenizer.size)
        definition = naive.KneserNey(text, order, tokenizer.size, reset_token=0 if resets else None)
        np.testing.assert_allclose(
            log_probs(model, held_out, resets), defined(definition, held_out, order, resets), rtol=0, atol=1e-9
        )


@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    order=st.integers(1, 5),
    resets=st.booleans(),
    smoothing=st.sampled_from(sorted(DEFINITIONS)),
)
@settings(max_examples=60)
def test_any_text_agrees_with_the_definition_and_sums_to_one(text, order, resets, smoothing):
    text = [0, *text]
    model = counted(text, order, resets=resets, vocab_size=4, smoothing=smoothing)
    definition = DEFINITIONS[smoothing](text, order, 4, reset_token=0 if resets else None)
    np.testing.assert_allclose(log_probs(model, text, resets), defined(definition, text, order, resets), atol=1e-9)
    features_BTF, _ = model.features(torch.tensor([text]), model.initial_state(1))
    distributions_BTV = model.head.log_probs(features_BTF).exp()
    assert (distributions_BTV > 0).all()
    torch.testing.assert_close(distributions_BTV.sum(-1), torch.ones(1, len(text), dtype=torch.float64))


def test_a_unigram_model_by_hand():
    # a a b: one token once, one twice, so D = 1 / (1 + 2); two of the V = 4 tokens are never seen.
    model = counted([0, 1, 1, 2], 1, vocab_size=4)
    features_BTF, _ = model.features(torch.tensor([[0]]), model.initial_state(1))
    expected = [1 / 18, 11 / 18, 5 / 18, 1 / 18]
    torch.testing.assert_close(model.head.log_probs(features_BTF)[0, 0].exp(), torch.tensor(expected).double())


def test_the_discounts_of_chen_and_goodman_by_hand():
    # Ten tokens once, five twice, three three times and two four times.
    counts = [1] * 10 + [2] * 5 + [3] * 3 + [4] * 2
    text = [0, *(token for token, count in enumerate(counts, 1) for _ in range(count))]
    _, notices = build_tables(np.array(text), NgramConfig(kind="ngram", order=1), 30)
    assert notices == []
    model = counted(text, 1, vocab_size=30)
    y = 10 / 20
    d = [1 - 2 * y * 5 / 10, 2 - 3 * y * 3 / 5, 3 - 4 * y * 2 / 3]
    weight = (10 * d[0] + 5 * d[1] + 5 * d[2]) / 37
    for token, count in ((1, 1), (11, 2), (16, 3), (20, 4), (25, 0)):
        p = (count - d[min(count, 3) - 1] if count else 0) / 37 + weight / 30
        assert log_probs(model, [0, token]) == pytest.approx([math.log(p)])


def test_kneser_ney_counts_what_a_token_follows_and_not_how_often():
    # 'san francisco' three times; 'moon' after three different words.
    the, a, san, francisco, moon, full = range(1, 7)
    text = [0, *[san, francisco] * 3, the, moon, a, moon, full, moon]
    model = counted(text, 2)
    unseen_after = 0  # the boundary is not followed by either
    by_lower_order = [log_probs(model, [0, unseen_after, token])[-1] for token in (moon, francisco)]
    assert by_lower_order[0] > by_lower_order[1]
    lesson = counted(text, 2, smoothing="stupid_backoff")
    raw = [log_probs(lesson, [0, unseen_after, token])[-1] for token in (moon, francisco)]
    assert raw[0] == pytest.approx(raw[1])


def test_a_token_before_the_context_changes_nothing_bit_for_bit():
    text = random_text(3, 300)
    model = counted(text, 4)
    tokens = torch.tensor([[0, 1, 2, 3, 4], [0, 6, 2, 3, 4]])
    features_BTF, _ = model.features(tokens, model.initial_state(2))
    last = model.head.logits(features_BTF)[:, -1]
    assert torch.equal(last[0], last[1])
    assert not torch.equal(*model.head.logits(features_BTF)[:, 3])


def test_there_is_nothing_that_could_have_a_gradient():
    model = counted(random_text(4, 100), 3, dtype=torch.float32)
    assert list(model.parameters()) == []
    assert (model.num_parameters, NgramModel.predicted_num_parameters(model.config, V)) == (0, 0)
    assert model.hidden_matrices() == []
    features_BTF, state = model.features(torch.tensor([[0, 1]]), model.initial_state(1))
    assert not model.head.logits(features_BTF).requires_grad
    assert not any(tensor.requires_grad for tensor in (*model.tensors().values(), *state.tensors.values()))
    assert model.head.nll(features_BTF, torch.tensor([[1, 2]])).dtype == torch.float32
    assert model.head.nll(features_BTF, torch.tensor([[1, 2]]), dtype=torch.float64).dtype == torch.float64


@pytest.mark.parametrize("order", [1, 3])
def test_before_anything_is_counted_all_tokens_are_alike(order):
    model = build_model(model_config({"kind": "ngram", "order": order}), V, seed=1, dtype=torch.float64)
    assert log_probs(model, [0, 3, 0, 6]) == pytest.approx([-math.log(V)] * 3)
    model.count(np.array([0, 1, 1]))
    model.count(np.array([0]))  # a text of nothing but its boundary
    assert log_probs(model, [0, 3, 0, 6]) == pytest.approx([-math.log(V)] * 3)
    assert model.device == torch.device("cpu")
    assert model.initial_state(2).tensors["tokens"].shape == (2, order - 1)


def test_a_high_order_and_a_large_vocabulary_need_no_wide_integers():
    rng = np.random.default_rng(5)
    phrase = rng.integers(1, 300_000, 30)
    text = np.concatenate([[0], phrase, rng.integers(1, 300_000, 50), phrase])
    model = counted(text, 20, vocab_size=300_000)
    found = log_probs(model, [0, *phrase.tolist(), 7])
    # From the second token on the whole context has occurred twice, followed by this token alone.
    assert min(found[21:30]) > math.log(0.7)
    assert found[30] < math.log(1e-3)
    assert model.head.tables.num_ngrams(20) == len({tuple(text[i : i + 20]) for i in range(len(text) - 19)})


def test_components_report_the_ngrams_and_bytes_of_each_order():
    text = random_text(6, 200)
    model = counted(text, 3)
    reference = naive.Naive(text, 3, V)
    context, *orders = model.components()
    assert context.state == ("tokens",)
    assert [part.entries for part in orders] == [len(reference.raw[k]) for k in (1, 2, 3)]
    arrays = model.head.tables.arrays.values()
    assert 0 <= sum(a.nbytes for a in arrays) - sum(part.stored_bytes for part in orders) <= 8  # two closing borders


@pytest.mark.parametrize("text", ["abcdefghijklmnopqrstuvwxyz", "a\nb\nc\nd\n", "", "aaaaaaaa"])
@pytest.mark.parametrize("order", [1, 6])
def test_strange_texts_are_counted_and_say_what_was_taken_instead(text, order):
    tokenizer = CharTokenizer("abcdefghijklmnopqrstuvwxyz\n")
    tokens = np.array([0, *tokenizer.encode(text).tolist(), 0])
    tables, notices = build_tables(tokens, NgramConfig(kind="ngram", order=order), tokenizer.size)
    assert tables.fault(order) == ""
    (notice,) = notices
    assert notice.startswith("too few n-grams")
    assert notice.count(" in order ") == order
    total = np.exp(tables.distributions(np.zeros((1, order - 1), np.int64))).sum()
    assert total == pytest.approx(1)


def test_counting_can_be_stopped_and_leaves_the_model_as_it_was():
    model = counted([0, 1, 2, 3], 3)
    before = model.tensors()

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.count(np.array([0, 1]), poll=stop)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.tensors().items())


def test_too_many_ngrams_are_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(tables_module, "_MAX_ENTRIES", 100)
    with pytest.raises(ElmanError, match=r"take a lower model\.order"):
        counted(random_text(1, 200), 3)


def test_the_settings_of_another_kind_are_refused():
    config = model_config({"kind": "lstm"})
    with pytest.raises(ConfigError, match="not an n-gram model"):
        NgramModel(config, V, dtype=torch.float32)


# nltk takes one discount from all counts of all orders, and has no uniform distribution below the lowest. On a text for
# which ours are equal within an order, what it takes and gives can be compared order by order.


def nltk_ngrams(text: list[int], order: int) -> list[tuple[str, ...]]:
    """All n-grams that end in a predicted token, as nltk takes them."""
    words = [f"w{token}" for token in text]
    return [
        tuple(words[i + 1 - k : i + 1]) for i in range(1, len(words)) for k in range(1, order + 1) if i + 1 - k >= 0
    ]


def fitted(kind: str, text: list[int], order: int, *arguments: Any, **named: Any) -> Any:
    lm = pytest.importorskip("nltk.lm")
    model = getattr(lm, kind)(*arguments, order=order, **named)
    model.fit([nltk_ngrams(text, order)], [f"w{token}" for token in range(V - 1)])
    assert len(model.vocab) == V  # with its <UNK>
    return model


def test_additive_smoothing_is_that_of_nltk():
    text = random_text(7, 200, V - 1)
    theirs = fitted("Lidstone", text, 3, 0.1)
    ours = log_probs(counted(text, 3, smoothing="add_k"), text)
    expected = [
        theirs.logscore(f"w{c}", [f"w{a}", f"w{b}"]) * math.log(2)
        for a, b, c in zip(text, text[1:], text[2:], strict=False)
    ]
    np.testing.assert_allclose(ours[1:], expected, atol=1e-9)


def test_scores_of_stupid_backoff_are_those_of_nltk_up_to_their_sum():
    text = random_text(8, 120, V - 1)
    theirs = fitted("StupidBackoff", text, 3, 0.4)
    model = counted(text, 3, smoothing="stupid_backoff")
    for context in ([1, 2], [3, 3], [5, 1]):
        ours = [math.exp(log_probs(model, [0, *context, token])[-1]) for token in range(V - 1)]
        scores = [theirs.score(f"w{token}", [f"w{c}" for c in context]) for token in range(V - 1)]
        np.testing.assert_allclose(np.array(ours) / ours[0], np.array(scores) / scores[0], atol=1e-9)


def test_counts_and_discounts_of_kneser_ney_are_those_of_nltk():
    text = [0, *[1, 2, 3, 1, 3, 2, 2, 1, 1, 3, 3] * 6]
    model, definition = counted(text, 3), naive.KneserNey(text, 3, V)
    for context in ([1, 2], [3, 3], [2], [3]):
        _, *discounts = definition.discounts[len(context) + 1]
        assert len(set(discounts)) == 1
        theirs = fitted("KneserNeyInterpolated", text, 3, discount=discounts[0])
        for token in (1, 2, 3):
            alpha, gamma = theirs.estimator.alpha_gamma(f"w{token}", tuple(f"w{c}" for c in context))
            # After 5, which the text does not have, only the context itself is known.
            longer, shorter = (math.exp(log_probs(model, [0, 5, *c, token])[-1]) for c in (context, context[1:]))
            assert longer == pytest.approx(alpha + gamma * shorter, abs=1e-9)
