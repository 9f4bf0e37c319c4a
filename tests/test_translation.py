"""Writing targets: against a plain loop, against the best of all texts there are, and figures counted one by one."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from elman.beam import beam_search
from elman.data.pairs import Pairs
from elman.data.prepare import Split
from elman.engine import Engine, TorchStepper, stepper
from elman.errors import TextError, UserError
from elman.evaluation import Interrupted, evaluate_pairs
from elman.models.file import Bundle
from elman.models.kinds import build_model, model_config
from elman.text.tokenizers import CharTokenizer, WordTokenizer
from elman.translation import judge_pairs, translate, write_targets

TOKENIZER = CharTokenizer("abc")
SOURCES = ["a", "bca", "cc", "abcabcabc", "b"]
KINDS = ["lstm", "seq2seq", "window"]


def bundle(
    kind: str,
    tokenizer: CharTokenizer | WordTokenizer = TOKENIZER,
    *,
    reverse: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Bundle:
    """A model with weights large enough for opinions of its own."""
    settings = {"kind": kind, "hidden_size": 9, "embedding_size": 6}
    network = build_model(model_config(settings), tokenizer.size, seed=5, dtype=dtype)
    generator = torch.Generator().manual_seed(2)
    for parameter in network.parameters():
        parameter.data += 0.7 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return Bundle(network, tokenizer, {"pairs": {"reverse_source": reverse}})


def log_probs_after(model: Bundle, source: str, written: tuple[int, ...]) -> torch.Tensor:
    """ln p of every next token, with all before it read in one go."""
    read = [0, *model.tokenizer.encode(source).tolist(), 0, *written]
    with torch.no_grad():
        logits, _ = model.network(torch.tensor([read]), model.network.initial_state(1))
    return logits[0, -1].log_softmax(-1)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_in_a_batch_of_ragged_sources_is_greedy_alone_by_reading_all_anew(kind):
    model = bundle(kind)
    for source, found in zip(SOURCES, translate(model, SOURCES, max_new_tokens=12), strict=True):
        tokens: list[int] = []
        log_prob, finished = 0.0, False
        while len(tokens) < 12 and not finished:
            log_probs = log_probs_after(model, source, tuple(tokens))
            best = max((i for i in range(5) if i != 1), key=lambda i: log_probs[i].item())  # never <unk>
            log_prob += log_probs[best].item()
            finished = best == 0
            tokens += [] if finished else [best]
        assert found.tokens == tuple(tokens)
        assert found.finished == finished
        assert found.text == TOKENIZER.decode(tokens)
        assert found.nats == pytest.approx(-log_prob, rel=1e-9)


def test_some_texts_end_by_themselves_and_others_by_the_length():
    """What the tests here rely on."""
    assert {t.finished for kind in KINDS for t in translate(bundle(kind), SOURCES, max_new_tokens=12)} == {True, False}


@pytest.mark.parametrize("kind", KINDS)
def test_one_beam_is_greedy(kind):
    model = bundle(kind)
    for source, greedy in zip(SOURCES, translate(model, SOURCES, max_new_tokens=8), strict=True):
        read = torch.tensor([[0, *TOKENIZER.encode(source).tolist(), 0]])
        with torch.no_grad():
            logits, state = model.network(read, model.network.initial_state(1))

        def never_unknown(_: object, log_probs: np.ndarray) -> None:
            log_probs[:, 1] = -math.inf

        (beam,) = beam_search(
            TorchStepper(model.network),
            state,
            logits[0, -1],
            boundary_id=0,
            num_beams=1,
            max_new_tokens=8,
            adjust=never_unknown,
        )
        assert beam.tokens == greedy.tokens
        assert -beam.log_prob == pytest.approx(greedy.nats, rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_as_many_beams_as_there_are_texts_find_the_best_of_all(kind):
    model = bundle(kind)
    for source in SOURCES[:3]:
        scored = {}
        for length in range(4):
            for tokens in itertools.product((2, 3, 4), repeat=length):
                steps = [*tokens, 0] if length < 3 else list(tokens)  # the third is the last: no room for an end
                scored[tokens] = sum(
                    log_probs_after(model, source, tokens[:i])[step].item() for i, step in enumerate(steps)
                )
        best = max(scored, key=lambda tokens: scored[tokens])
        (found,) = translate(model, [source], num_beams=5**3, max_new_tokens=3, length_penalty=0.0)
        assert found.tokens == best
        assert found.nats == pytest.approx(-scored[best], rel=1e-9)


def test_a_model_of_reversed_sources_reads_them_reversed():
    forward, backward = bundle("seq2seq"), bundle("seq2seq", reverse=True)
    mirrored = [source[::-1] for source in SOURCES]
    assert translate(forward, mirrored, max_new_tokens=9) == translate(backward, SOURCES, max_new_tokens=9)
    assert translate(forward, ["abcca"], max_new_tokens=9) != translate(backward, ["abcca"], max_new_tokens=9)
    beams = [translate(m, s, num_beams=3, max_new_tokens=5) for m, s in ((forward, mirrored), (backward, SOURCES))]
    assert beams[0] == beams[1]


@pytest.mark.parametrize("kind", ["lstm", "seq2seq"])
@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_compiled_step_writes_what_pytorch_writes(kind, num_beams):
    model = bundle(kind, dtype=torch.float32)
    assert isinstance(stepper(model.network), Engine)
    encoded = [TOKENIZER.encode(source) for source in SOURCES]
    how = {"num_beams": num_beams, "max_new_tokens": 8}
    expected = write_targets(model.network, TOKENIZER, encoded, reverse_source=False, **how)
    found = translate(model, SOURCES, **how)
    assert [t.tokens for t in found] == [t.tokens for t in expected]
    assert [t.nats for t in found] == pytest.approx([t.nats for t in expected], rel=1e-5)


def test_words_that_the_vocabulary_lacks():
    model = bundle("lstm", WordTokenizer(["red", "house"]))
    with pytest.raises(TextError, match="source 2 holds 1 character or word that the model never saw: 'green'"):
        translate(model, ["red", "green house"])
    with pytest.raises(TextError, match="source 1 is empty"):
        translate(model, ["green"], unknown="skip")
    skipped, as_unknown, house = (
        translate(model, [text], unknown=how, max_new_tokens=4)[0].nats
        for text, how in (("green house", "skip"), ("green house", "token"), ("house", "error"))
    )
    assert skipped == house != as_unknown
    assert all(1 not in t.tokens for t in translate(model, ["red"] * 3, num_beams=2, max_new_tokens=6))


def test_what_is_refused():
    model = bundle("lstm")
    for given, says in (
        ({"num_beams": 0}, "num_beams is 0; accepted: 1"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    ):
        with pytest.raises(UserError, match=says):
            translate(model, ["a"], **given)
    with pytest.raises(TextError, match="source 2 is empty"):
        translate(model, ["a", ""])
    with pytest.raises(UserError, match=r"not trained on pairs of source and target: train one with data.pairs true"):
        translate(Bundle(model.network, TOKENIZER), ["a"])
    with pytest.raises(Interrupted):
        translate(model, ["a"], should_stop=lambda: True)
    assert translate(model, []) == []


# Figures.

EXAMPLES = [("a", "b"), ("bca", "acb"), ("cc", "cc"), ("abc", "c"), ("b", "abcab"), ("ca", "ac")]


def split() -> Split:
    texts = [text for example in EXAMPLES for text in example]
    tokens = np.concatenate([[0, *TOKENIZER.encode(text)] for text in texts])
    return Split(tokens, sum(map(len, texts)), sum(map(len, texts)), len(texts), 0)


@pytest.mark.parametrize("reverse", [True, False])
@pytest.mark.parametrize("num_beams", [1, 3])
def test_the_report_is_what_counting_example_by_example_finds(num_beams, reverse):
    model = bundle("seq2seq", reverse=reverse)
    # Two targets as the model writes them, so that some are right.
    for index in (0, 3):
        written = translate(model, [EXAMPLES[index][0]], num_beams=num_beams, max_new_tokens=4)[0]
        EXAMPLES[index] = (EXAMPLES[index][0], written.text or "a")
    counted = []
    for source, target in EXAMPLES:
        given = (*TOKENIZER.encode(target).tolist(), 0)
        read = source[::-1] if reverse else source
        log_probs = [log_probs_after(model, read, given[:i]) for i in range(len(given))]
        (written,) = translate(model, [source], num_beams=num_beams, max_new_tokens=6)
        ended = (*written.tokens, 0)[: len(written.tokens) + written.finished]
        counted.append((
            len(target),
            ended == given,
            sum(lp.argmax().item() == token for lp, token in zip(log_probs, given, strict=True)),
            sum(a == b for a, b in zip(ended, given, strict=False)),
            -sum(lp[token].item() for lp, token in zip(log_probs, given, strict=True)),
        ))  # fmt: skip
    table = np.array(counted, float)
    pairs = Pairs(split().tokens, 4, 0, reverse)
    report = judge_pairs(model.network, TOKENIZER, pairs, num_beams=num_beams).to_dict()

    def expected(rows: np.ndarray) -> dict[str, float]:
        targets = (rows[:, 0] + 1).sum()
        return {
            "examples": len(rows),
            "exact_match": rows[:, 1].mean(),
            "token_accuracy": rows[:, 2].sum() / targets,
            "written_token_accuracy": rows[:, 3].sum() / targets,
            "nats_per_token": rows[:, 4].sum() / targets,
        }

    groups = report.pop("by_target_length")
    assert report == pytest.approx({"num_beams": num_beams, **expected(table)})
    assert [group["shortest"] for group in groups] == sorted({int(length) for length in table[:, 0]})
    for group in groups:
        assert group.pop("longest") == (length := group.pop("shortest"))
        assert group == pytest.approx(expected(table[table[:, 0] == length]))
    evaluation = evaluate_pairs(model.network, split(), TOKENIZER, reverse_source=reverse, num_rows=2)
    assert evaluation.score.nats_total == pytest.approx(table[:, 4].sum(), rel=1e-9)
    assert evaluation.score.tokens == table[:, 0].sum() + len(table)
    assert evaluation.score.chars == evaluation.score.bytes == table[:, 0].sum()
    assert evaluation.to_dict()["state_policy"] == "pairs"
    first = evaluate_pairs(model.network, split(), TOKENIZER, reverse_source=reverse, max_targets=int(table[0, 0]) + 1)
    assert first.score.nats_total == pytest.approx(table[0, 4], rel=1e-9)


def test_long_targets_are_grouped_in_ten():
    tokens = np.concatenate([[0, 2, 0, *[3] * length] for length in (1, 3, 47, 95)])
    report = judge_pairs(bundle("window").network, TOKENIZER, Pairs(tokens, 4, 0))
    assert [(first, last, a.examples) for first, last, a in report.by_target_length] == [
        (1, 10, 2),
        (41, 50, 1),
        (91, 95, 1),
    ]
