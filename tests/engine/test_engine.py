"""The compiled step is the model's: every kind that has a graph is held against PyTorch."""

from __future__ import annotations

import threading
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from elman.config import ModelConfig
from elman.engine import CannotLower, Engine, EngineState, TorchStepper, capability, native, stepper
from elman.engine import engine as module
from elman.errors import UserError
from elman.models.contract import Head, LanguageModel
from elman.models.kinds import build_model, kind_names, model_config
from elman.models.state import State

from .conftest import COMPARING, VOCAB_SIZE, build, filled_state, network_of, random_tokens, traced_configs, widened

NATIVE = ("elman", "lstm", "gru", "mingru", "minlstm", "mamba", "window", "ngram")
TRACED = tuple(kind for kind in kind_names() if traced_configs(kind))
WIDE = {kind: widened(traced_configs(kind)[-1]) for kind in TRACED}
"""For each kind the settings with the shortest step: what its own cell does. Two have everything around it."""
WIDE |= {f"{kind}, everything": widened(traced_configs(kind)[0]) for kind in ("lstm", "stack")}
CASES = tuple(WIDE)
ALL = [config for kind in TRACED for config in traced_configs(kind)]


@cache
def pair(kind):
    """A model, and its engine with one thread."""
    network = build(WIDE[kind])
    return network, Engine(network, num_threads=1)


def teacher_forced(engine, tokens_BT, state):
    """Log-probabilities (B, T, V), and the state after the last token."""
    logits = []
    for token_B in tokens_BT.T:
        logits_BV, state = engine.step(token_B.numpy(), state)
        logits.append(logits_BV)
    return torch.from_numpy(np.stack(logits, 1)).log_softmax(-1), state


def assert_equals_pytorch(network, engine, num_steps):
    tokens_BT, half = random_tokens(3, num_steps), num_steps // 2
    with torch.no_grad():
        first, middle = network(tokens_BT[:, :half], network.initial_state(3))
        second, end = network(tokens_BT[:, half:], middle)
    expected = torch.cat([first, second], 1).log_softmax(-1)
    found, state = teacher_forced(engine, tokens_BT, engine.initial_state(3))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert_states_equal(engine.give(state), end)
    # From PyTorch's state in the middle of the text, and back to PyTorch.
    found, state = teacher_forced(engine, tokens_BT[:, half:], engine.take(middle))
    torch.testing.assert_close(found, expected[:, half:], rtol=0, atol=1e-4)
    assert_states_equal(engine.give(state), end)
    with torch.no_grad():
        onward = [network(tokens_BT[:, :5], after).logits_BTV.log_softmax(-1) for after in (engine.give(state), end)]
    torch.testing.assert_close(*onward, rtol=0, atol=1e-4)


def assert_states_equal(found, expected):
    assert found.tensors.keys() == expected.tensors.keys()
    for name, part in found.tensors.items():
        assert part.dtype == expected.tensors[name].dtype
        torch.testing.assert_close(part, expected.tensors[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", CASES)
def test_log_probabilities_and_states_are_those_of_pytorch(kind):
    assert_equals_pytorch(*pair(kind), num_steps=160)


@pytest.mark.slow
@pytest.mark.parametrize("config", ALL, ids=lambda config: config.kind)
def test_every_option_equals_pytorch(config):
    network = build(config)
    engine = Engine(network, num_threads=1)
    assert_equals_pytorch(network, engine, num_steps=80)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
def test_ten_thousand_tokens_equal_pytorch(kind):
    network, engine = pair(kind)
    assert_equals_pytorch(network, engine, num_steps=10_000)


@pytest.mark.parametrize("kind", CASES)
def test_a_row_has_the_same_bits_alone_in_any_batch_and_with_any_number_of_threads(kind):
    network, engine = pair(kind)
    tokens_BT = random_tokens(71, 4)
    expected, after = run(engine, tokens_BT)
    for rows in ([0], [70], [5, 5], list(range(7)), list(range(60, 71))):
        found, state = run(engine, tokens_BT[rows])
        np.testing.assert_array_equal(found, expected[rows])
        np.testing.assert_array_equal(state.numbers, after.numbers[rows])
        np.testing.assert_array_equal(state.ints, after.ints[rows])
    for num_threads in (2, 3):
        found, state = run(Engine(network, num_threads=num_threads), tokens_BT)
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(state.numbers, after.numbers)


def run(engine, tokens_BT):
    logits, state = [], engine.initial_state(len(tokens_BT))
    for token_B in tokens_BT.T:
        logits_BV, state = engine.step(token_B.numpy(), state)
        logits.append(logits_BV)
    return np.stack(logits, 1), state


@pytest.mark.parametrize("kind", CASES)
def test_a_step_has_the_same_bits_from_whichever_end_it_reads_its_matrices(kind):
    network, engine = pair(kind)
    state = engine.take(filled_state(network, 3))
    (first, after), (second, again) = (engine.step([3, 4, 5], state) for _ in range(2))  # steps take turns
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(after.numbers, again.numbers)


def test_what_needs_nothing_of_a_step_but_the_state_comes_first_in_every_second_one():
    network = build(model_config({"kind": "lstm", "embedding_size": 8, "hidden_size": 8, "num_layers": 3}))
    lines = Engine(network, num_threads=1).path.read_text(encoding="utf-8").splitlines()
    early, late = ([lines[i + 1] for i, line in enumerate(lines) if line == f"    if {when}:"] for when in TURNS)
    assert len(early) == 2  # h of the second and the third layer
    assert early == late[::-1]
    assert all("state" in line for line in early)


TURNS = ("backwards", "not backwards")


@pytest.mark.parametrize("kind", CASES)
def test_greedy_texts_part_only_where_the_two_best_lie_close(kind):
    network, engine = pair(kind)
    token, state, ours = 1, network.initial_state(1), engine.initial_state(1)
    for _ in range(60):
        with torch.no_grad():
            logits_BTV, state = network(torch.tensor([[token]]), state)
        logits_BV, ours = engine.step([token], ours)
        token = int(logits_BTV.argmax())
        if token != int(logits_BV.argmax()):
            best = logits_BTV.flatten().topk(2).values
            assert best[0] - best[1] <= 1e-3
            break


def test_the_callers_state_and_tokens_stay_as_they_are():
    network, engine = pair("lstm")
    state = engine.take(filled_state(network, 2))
    before, tokens = state.numbers.copy(), np.array([3, 4])
    tokens.flags.writeable = False
    first, _ = engine.step(tokens, state)
    second, _ = engine.step(tokens, state)
    np.testing.assert_array_equal(state.numbers, before)
    np.testing.assert_array_equal(first, second)


def test_states_are_selected_and_stacked():
    network, engine = pair("window")
    state = engine.take(filled_state(network, 3))
    again = EngineState.stack([state.select([2]), state.select([0, 0])])
    assert_states_equal(engine.give(again), filled_state(network, 3).select([2, 0, 0]))


def test_what_the_model_learns_later_is_not_in_its_engine():
    network = build(WIDE["elman"])
    engine = Engine(network, num_threads=1)
    before, _ = engine.step([1], engine.initial_state(1))
    with torch.no_grad():
        network.head.bias.add_(1.0)
    after, _ = engine.step([1], engine.initial_state(1))
    np.testing.assert_array_equal(before, after)


def test_models_of_one_architecture_share_the_generated_file():
    _, engine = pair("gru")
    other = Engine(build_model(WIDE["gru"], VOCAB_SIZE, seed=2, dtype=torch.float32), num_threads=1)
    assert other.path == engine.path
    text = engine.path.read_text(encoding="utf-8")
    assert text == engine.program.source
    assert "= matvec(" in text
    assert list(engine.path.parent.glob(f"{engine.path.stem}.*.code"))


SEVEN = f"def step({', '.join(native.STEP)}):\n    return 7\n"


def answer(address):
    """What a step that looks at nothing gives."""
    result = np.zeros(2, np.int64)
    nothing = [0] * len(native.STEP)
    native.function(address, tuple(native.STEP.values()))(result.ctypes.data, result.ctypes.data + 8, *nothing)
    return result[0]


def test_a_file_that_somebody_changed_is_written_anew(monkeypatch, tmp_path):
    monkeypatch.setenv("ELMAN_CACHE", str(tmp_path))
    path, address = module._load.__wrapped__(SEVEN)
    assert answer(address) == 7
    path.write_text(SEVEN.replace("7", "8"), encoding="utf-8")
    assert answer(module._load.__wrapped__(SEVEN)[1]) == 7
    assert path.read_text(encoding="utf-8") == SEVEN


def test_without_a_folder_to_write_to_it_still_runs(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ELMAN_CACHE", str(tmp_path / "file"))
    path, address = module._load.__wrapped__(SEVEN)
    assert answer(address) == 7
    assert not path.is_relative_to(tmp_path / "file")


def test_several_threads_may_use_one_engine():
    network, _ = pair("lstm")
    tokens_BT = random_tokens(4, 30)
    for num_threads in (1, 2):
        engine = Engine(network, num_threads=num_threads)
        expected, _ = run(engine, tokens_BT)
        found = [None] * 4

        def work(row, engine=engine, found=found):
            found[row] = run(engine, tokens_BT[row : row + 1])[0]

        threads = [threading.Thread(target=work, args=(row,)) for row in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        np.testing.assert_array_equal(np.concatenate(found), expected)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [([VOCAB_SIZE], "accepted: 0 to 76"), ([-1], "accepted: 0 to 76"), ([1, 2], "2.*1 texts"), ([[1]], "give one")],
)
def test_wrong_tokens_are_refused(tokens, message):
    _, engine = pair("lstm")
    with pytest.raises(UserError, match=message):
        engine.step(tokens, engine.initial_state(1))
    assert engine.step([1], engine.initial_state(1))[0].shape == (1, VOCAB_SIZE)


def test_a_wrong_token_in_a_state_is_refused():
    network, engine = pair("window")
    state = State({name: tensor + 1000 for name, tensor in network.initial_state(1).tensors.items()})
    with pytest.raises(UserError, match="outside the vocabulary"):
        engine.step([1], engine.take(state))


def test_no_threads_are_refused():
    with pytest.raises(UserError, match="accepted: 1 or more"):
        Engine(build(WIDE["elman"]), num_threads=0)


# Eight bits.


@cache
def trained():
    """A small model that has learnt something, and a text of its kind."""
    config = model_config({"kind": "lstm", "embedding_size": 32, "hidden_size": 48, "num_layers": 2})
    network = build_model(config, 32, seed=1, dtype=torch.float32)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    favourites = torch.randint(32, (32, 3), generator=generator)  # a chain: three likely next tokens for each

    def text(num_rows, num_steps):
        tokens = [torch.randint(32, (num_rows,), generator=generator)]
        for _ in range(num_steps - 1):
            tokens.append(favourites[tokens[-1], torch.randint(3, (num_rows,), generator=generator)])
        return torch.stack(tokens, 1)

    for _ in range(60):
        tokens_BT = text(16, 20)
        features_BTF, _ = network.features(tokens_BT[:, :-1], network.initial_state(16))
        loss = network.head.nll(features_BTF, tokens_BT[:, 1:]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network, text(8, 100), loss.item()


def nats(engine, tokens_BT):
    log_probs_BTV, _ = teacher_forced(engine, tokens_BT[:, :-1], engine.initial_state(len(tokens_BT)))
    return -log_probs_BTV.gather(-1, tokens_BT[:, 1:, None]).mean().item()


def test_eight_bits_cost_less_than_five_thousandths_of_a_nat():
    network, tokens_BT, loss = trained()
    assert loss < 2.0  # of log 32 = 3.47
    whole, small = (Engine(network, precision=p, num_threads=1) for p in ("float32", "int8"))
    assert small.program.weight_bytes * 4 == whole.program.weight_bytes
    assert abs(nats(small, tokens_BT) - nats(whole, tokens_BT)) <= 0.005


@pytest.mark.parametrize("kind", ["gru", "slstm"])  # the latter with a matrix for each head
def test_in_eight_bits_rows_have_the_same_bits_everywhere_and_stay_near(kind):
    network, whole = pair(kind)
    engine = Engine(network, precision="int8", num_threads=1)
    tokens_BT = random_tokens(9, 20)
    expected, _ = run(engine, tokens_BT)
    np.testing.assert_array_equal(run(engine, tokens_BT[4:5])[0], expected[4:5])
    np.testing.assert_array_equal(run(Engine(network, precision="int8", num_threads=2), tokens_BT)[0], expected)
    exact, _ = run(whole, tokens_BT)
    assert 0 < np.abs(expected - exact).max() < 0.1


# Which form is chosen.


def test_a_stepper_is_compiled_where_it_can_be():
    compiled = stepper(build(WIDE["lstm"]))
    assert isinstance(compiled, Engine)
    for network, reason in (
        (build(WIDE["lstm"], torch.float64), "torch.float64"),
        (build(model_config({"kind": "transformer", "embedding_size": 8, "hidden_size": 8})), "grows with the text"),
    ):
        form = stepper(network)
        assert isinstance(form, TorchStepper)
        assert reason in form.reason
        state = form.take(filled_state(network, 2))
        logits_BV, after = form.step([1, 2], state)
        with torch.no_grad():
            expected, end = network(torch.tensor([[1], [2]]), state)
        np.testing.assert_array_equal(logits_BV, expected[:, 0])
        assert_states_equal(form.give(after), end)
        with pytest.raises(CannotLower, match=reason):
            stepper(network, precision="int8")


@pytest.mark.parametrize("kind", ["lstm", "window"])
def test_widths_of_one_are_compiled(kind):
    network = build(model_config({"kind": kind, "embedding_size": 1, "hidden_size": 1}))
    assert_equals_pytorch(network, Engine(network, num_threads=1), num_steps=20)


def test_a_persons_own_cell_is_compiled():
    path = Path(__file__).parents[1] / "cells" / "own_cell.py"
    network = build(model_config({"kind": f"{path}:Leaky", "embedding_size": 24, "hidden_size": 20, "num_layers": 2}))
    assert_equals_pytorch(network, Engine(network, num_threads=1), num_steps=40)


@pytest.mark.parametrize("form", COMPARING.values(), ids=COMPARING)
def test_a_cell_that_compares_numbers_is_compiled(form):
    network = network_of(form, torch.float32)
    assert_equals_pytorch(network, Engine(network, num_threads=1), num_steps=20)


class _Logits(Head):
    """Features that are logits already."""

    def logits(self, features_BTF):
        return features_BTF


class _Counting(LanguageModel):
    """Carries an integer, and says what arithmetic makes of it and of the token."""

    def __init__(self):
        super().__init__(ModelConfig(kind="counting"), 8, dtype=torch.float32)
        self.bias, self.head = torch.nn.Parameter(torch.linspace(-1, 1, 8)), _Logits()

    def initial_state(self, batch_size):
        return State({"n": torch.full((batch_size,), 3)})

    def step(self, token_B, state):
        n = state.tensors["n"]
        after = torch.where(token_B == 3, 2 - n, torch.minimum(n + 2 * token_B, torch.tensor(9)) - 4) % 7
        is_small, is_odd = n < token_B, token_B % 2 == 1
        named = (after, n > 2, token_B >= n, n <= 5, is_small & ~is_odd, is_small | is_odd, torch.maximum(n, token_B))
        numbers_BV = torch.stack([value.to(torch.float32) for value in (*named, n != token_B)], dim=1)
        return numbers_BV + self.bias, State({"n": after})

    def features(self, tokens_BT, state, reset_BT=None, noise=None):
        features = []
        for token_B in tokens_BT.unbind(1):
            features_BF, state = self.step(token_B, state)
            features.append(features_BF)
        return torch.stack(features, dim=1), state

    def components(self):
        return []

    @staticmethod
    def predicted_num_parameters(config, vocab_size):
        return vocab_size

    def reset_parameters(self, generator):
        pass


def test_arithmetic_with_integers_is_compiled():
    network = _Counting()
    engine = Engine(network, num_threads=1)
    tokens_BT = torch.randint(8, (5, 60), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, end = network(tokens_BT, network.initial_state(5))
    logits, state = run(engine, tokens_BT)
    np.testing.assert_array_equal(logits, expected)
    assert len(set(expected[..., 0].flatten().tolist())) == 7  # every remainder came about
    assert_states_equal(engine.give(state), end)


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (lambda table, n, token: (table[token], torch.where(table[0, :1] > 0, n, token)), "integers of numbers"),
        (lambda table, n, token: (table[token], table[token][:, 0].long()), "into torch.int64"),
        (lambda table, n, token: (table[token], n + (table[token][:, 0] > 0)), "makes torch.int64"),
        (lambda table, n, token: (table[token], n & token), "bits of integers"),
        (lambda table, n, token: (table[(n + token) % 8], n), "a number that it computes"),
    ],
    ids=["chosen by a number", "of a number", "a truth of numbers", "bits", "a row"],
)
def test_integers_that_have_no_compiled_form_are_refused(form, reason):
    class Other(_Counting):
        def step(self, token_B, state):
            features_BF, n = form(self.table, state.tensors["n"], token_B)
            return features_BF, State({"n": n})

    network = Other()
    network.table = torch.nn.Parameter(torch.linspace(-1, 1, 64).view(8, 8))
    step = stepper(network)
    assert isinstance(step, TorchStepper)
    assert reason in step.reason


def test_a_step_that_goes_around_pytorch_is_not_compiled(monkeypatch):
    network = build(WIDE["elman"])
    cell = network.layers[0].cell
    original = cell.step

    def step(p, x, state):
        made = original(p, torch.from_numpy(x.numpy().copy()), state)
        return made

    monkeypatch.setattr(cell, "step", step)
    form = stepper(network)
    assert isinstance(form, TorchStepper)
    assert "not all of it was traced" in form.reason


def test_the_kinds_that_have_to_be_native_are_and_the_others_say_why():
    found = {kind: capability(kind) for kind in kind_names()}
    assert {kind: found[kind].level for kind in NATIVE} == dict.fromkeys(NATIVE, "native")
    assert all(made.level == "native" or made.reason for made in found.values())
    assert found["transformer"].level == "fallback"
    page = (Path(__file__).parents[2] / "docs" / "engine.md").read_text(encoding="utf-8")
    rows = "".join(f"| {kind} | {level} | {reason} |\n" for kind, (level, reason) in found.items())
    assert f"\n|---|---|---|\n{rows}\n" in page


@pytest.mark.slow
def test_a_token_costs_the_same_after_a_million():
    from statistics import median
    from time import perf_counter

    config = model_config({"kind": "lstm", "embedding_size": 16, "hidden_size": 16, "num_layers": 1})
    engine = Engine(build(config), num_threads=1)
    state, seconds = engine.initial_state(1), {}
    for position in range(1, 1_010_001):
        started = perf_counter()
        _, state = engine.step((position % VOCAB_SIZE,), state)
        if position % 1_000_000 < 10_000 and position > 1000:
            seconds.setdefault(position >= 1_000_000, []).append(perf_counter() - started)
    assert median(seconds[True]) <= 1.2 * median(seconds[False])  # on a machine that has other work
    assert state.numbers.shape == engine.initial_state(1).numbers.shape
