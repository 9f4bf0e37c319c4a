"""The Transformer against banded attention in NumPy, against Mistral and Llama of `transformers`, and its window."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from elman.models.kinds import build_model, model_class, model_config
from elman.models.state import State

EXACT = {"rtol": 0, "atol": 1e-12}
V, H, F, W = 11, 12, 20, 4


def build(dtype: torch.dtype = torch.float64, **settings):
    """A model that no parameter of is as it was drawn, so that no scale is 1 and no bias 0."""
    given = {"kind": "transformer", "embedding_size": H, "hidden_size": H, "feedforward_size": F, "num_heads": 2}
    network = build_model(model_config({**given, "attention_window": W, **settings}), V, seed=1, dtype=dtype)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=dtype))
    return network


def texts(num_rows: int, num_tokens: int) -> torch.Tensor:
    return torch.randint(V, (num_rows, num_tokens), generator=torch.Generator().manual_seed(3))


def read(network, tokens_BT):
    with torch.no_grad():
        return network(tokens_BT, network.initial_state(len(tokens_BT)))


# What it computes.


def banded_attention(p: dict[str, np.ndarray], x_TI: np.ndarray, num_heads: int, window: int) -> np.ndarray:
    """One text, by the formulas of the papers: pairs are complex numbers, turned by their place in the whole text."""
    W_q, W_k, W_v = np.split(p["weight_qkv"], 3)
    num_steps, size = len(x_TI), len(W_q)
    width = size // num_heads
    half = width // 2
    turns = np.exp(1j * np.outer(np.arange(num_steps), 10000.0 ** (-2 * np.arange(half) / width)))
    outputs = np.zeros((num_steps, size))
    for head in range(num_heads):
        rows = slice(head * width, (head + 1) * width)
        q, k, v = (x_TI @ matrix[rows].T for matrix in (W_q, W_k, W_v))
        q, k = ((a[:, :half] + 1j * a[:, half:]) * turns for a in (q, k))
        for t in range(num_steps):
            past = range(max(0, t - window + 1), t + 1)
            scores = np.array([(q[t] * k[s].conj()).sum().real for s in past]) / math.sqrt(width)
            weights = np.exp(scores) / np.exp(scores).sum()
            outputs[t, rows] = sum(weight * v[s] for weight, s in zip(weights, past, strict=True))
    return outputs @ p["weight_out"].T


@pytest.mark.parametrize(("num_heads", "window"), [(1, 3), (2, 7), (2, 131)])
def test_it_is_banded_attention_with_rotary_positions_over_the_whole_text(draw, num_heads, window):
    settings = {"num_heads": num_heads, "attention_window": window, "residual": False, "feedforward_size": 0}
    cell, p, _, state = draw("transformer", 5, 8, **settings)
    # Longer than one block of a scan.
    x_BTI = torch.randn(2, 140, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    arrays = {name: tensor.numpy() for name, tensor in p.items()}
    expected = np.stack([banded_attention(arrays, x_TI, num_heads, window) for x_TI in x_BTI.numpy()])
    for scan in (cell.scan, cell.readable_scan):
        outputs, after = scan(p, x_BTI, state)
        np.testing.assert_allclose(outputs.numpy(), expected, **EXACT)
        last = window - 1
        _, keys, values = (x_BTI[:, -last:] @ p["weight_qkv"].T).chunk(3, -1)
        torch.testing.assert_close(after["keys"], keys, **EXACT)
        torch.testing.assert_close(after["values"], values, **EXACT)
        assert torch.equal(after["seen"], torch.ones(2, last, dtype=torch.float64))


def test_the_attention_of_a_step_is_named_and_sums_to_one(draw):
    cell, p, x_BTI, _ = draw("transformer", 8, 8, num_heads=2, attention_window=4, embedding_size=8)
    _, state = cell.scan(p, x_BTI, draw("transformer", 8, 8, num_heads=2).state)
    state = State(state).reset(torch.tensor([False, True]), State({n: t[:, :0] for n, t in state.items()})).tensors
    named = cell.step(p, x_BTI[:, 0], state).named
    assert set(named) == {"query", "key", "value", "attention"}
    assert named["attention"].shape == (2, 2, 4)
    torch.testing.assert_close(named["attention"].sum(-1), torch.ones(2, 2, dtype=torch.float64), **EXACT)
    assert (named["attention"][0] > 0).all()
    # The second row was reset: it sees the token at hand alone.
    assert named["attention"][1].tolist() == [[0.0, 0.0, 0.0, 1.0]] * 2


def test_the_gradient_of_scan_is_that_of_finite_differences(draw):
    cell, p, x_BTI, state = draw("transformer", 4, 4, num_heads=1, attention_window=3, embedding_size=4)
    _, state = cell.scan(p, x_BTI, state)

    def flat(x_BTI, weight_qkv, weight_out, keys, values):
        given = {"weight_qkv": weight_qkv, "weight_out": weight_out}
        outputs, after = cell.scan(given, x_BTI, {"keys": keys, "values": values, "seen": state["seen"]})
        return outputs, after["keys"], after["values"]

    leaves = [t.clone().requires_grad_() for t in (x_BTI, *p.values(), state["keys"], state["values"])]
    assert torch.autograd.gradcheck(flat, leaves, eps=1e-6, atol=1e-7)


def in_the_names_of_llama(network) -> dict[str, torch.Tensor]:
    """The weights under the names that Llama and Mistral have for them in the library `transformers`."""
    named = {
        "model.embed_tokens.weight": network.embedding,
        "model.norm.weight": network.norm.weight,
        "lm_head.weight": network.head.weight,
    }
    for index, layer in enumerate(network.layers):
        query, key, value = layer.weight_qkv.chunk(3)
        of_layer = {
            "input_layernorm": layer.norm.weight,
            "self_attn.q_proj": query,
            "self_attn.k_proj": key,
            "self_attn.v_proj": value,
            "self_attn.o_proj": layer.weight_out,
            "post_attention_layernorm": layer.feedforward_norm.weight,
            "mlp.gate_proj": layer.feedforward.gate,
            "mlp.up_proj": layer.feedforward.up,
            "mlp.down_proj": layer.feedforward.down,
        }
        named |= {f"model.layers.{index}.{name}.weight": tensor for name, tensor in of_layer.items()}
    return {name: tensor.detach() for name, tensor in named.items()}


@pytest.mark.global_rng
@pytest.mark.parametrize(("family", "num_tokens"), [("mistral", 30), ("llama", W)])
def test_it_is_llama_within_the_window_and_mistral_beyond_it(family, num_tokens):
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    network = build(num_layers=3)
    sizes = {
        "vocab_size": V,
        "hidden_size": H,
        "intermediate_size": F,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "attn_implementation": "eager",
    }
    theirs = (
        LlamaForCausalLM(LlamaConfig(**sizes))
        if family == "llama"
        else MistralForCausalLM(MistralConfig(**sizes, sliding_window=W))
    ).double()
    theirs.load_state_dict(in_the_names_of_llama(network))
    tokens_BT = texts(2, num_tokens)
    with torch.no_grad():
        expected = theirs(tokens_BT, use_cache=False).logits + network.head.bias
    # That library normalises and takes angles in float32.
    torch.testing.assert_close(read(network, tokens_BT).logits_BTV, expected, rtol=0, atol=1e-5)


def test_numbers_of_parameters_and_operations_are_those_of_the_docstring(draw):
    cell = draw("transformer", 6, 8, num_heads=2, attention_window=5, residual=False, feedforward_size=0).cell
    assert cell.num_parameters() == 3 * 8 * 6 + 8 * 8
    assert cell.operations_per_step() == 2 * (3 * 8 * 6 + 8 * 8) + 2 * 5 * 8 + 2 * 5 * 8
    network = build(num_layers=3)
    of_layer = 4 * H * H + 3 * H * F + 2 * H
    assert network.num_parameters == V * H + 3 * of_layer + H + V * H + V
    assert model_class(network.config).predicted_num_parameters(network.config, V) == network.num_parameters


# What it sees.


@pytest.mark.parametrize("place", [0, 3, 140, 299])
def test_a_later_token_changes_nothing_before_it_bit_for_bit(place):
    network, tokens_BT = build(num_layers=2), texts(1, 300)
    other_BT = tokens_BT.clone()
    other_BT[:, place] = (other_BT[:, place] + 1) % V
    before, after = (read(network, text).logits_BTV for text in (tokens_BT, other_BT))
    assert torch.equal(before[:, :place], after[:, :place])
    assert not torch.equal(before[:, place], after[:, place])


def test_a_token_w_back_changes_nothing_in_one_layer_and_reaches_further_through_each_more():
    for num_layers in (1, 2, 3):
        network, tokens_BT = build(num_layers=num_layers), texts(1, 20)
        other_BT = tokens_BT.clone()
        other_BT[:, 5] = (other_BT[:, 5] + 1) % V
        before, after = (read(network, text).logits_BTV for text in (tokens_BT, other_BT))
        changed = (before != after).any(-1)[0].nonzero().flatten().tolist()
        assert changed == list(range(5, 5 + num_layers * (W - 1) + 1))


def test_the_distance_from_the_beginning_changes_nothing_bit_for_bit():
    network, tokens_BT = build(torch.float32), texts(1, 9)
    _, state = read(network, tokens_BT)
    seen = []
    for _ in range(50):
        logits_BTV, state = network(tokens_BT, state.detach())
        seen.append(logits_BTV)
    assert all(torch.equal(logits_BTV, seen[0]) for logits_BTV in seen)


# What it carries.


@pytest.mark.parametrize("num_tokens", [1, 3, W, 10 * W])
def test_the_state_grows_up_to_the_window_and_no_further(num_tokens):
    network = build(num_layers=2)
    state = read(network, texts(3, num_tokens)).state
    entries = min(num_tokens, W - 1)
    assert state.num_bytes == 2 * 3 * entries * (2 * H + 1) * 8
    assert network.initial_state(3).num_bytes == 0


@pytest.mark.parametrize("by", ["scan", "step"])
def test_a_cache_that_is_too_long_is_cut(draw, by):
    short, long = (draw("transformer", 8, 8, attention_window=w, embedding_size=8) for w in (4, 6))
    _, carried = long.cell.scan(long.p, long.x_BTI, long.state)
    assert carried["keys"].shape[1] == 5
    x_BI = long.x_BTI[:, 0]
    expected = short.cell.step(short.p, x_BI, {name: part[:, -3:] for name, part in carried.items()})
    if by == "scan":
        output, after = short.cell.scan(short.p, x_BI.unsqueeze(1), carried)
        output = output[:, 0]
    else:
        output, after, _ = short.cell.step(short.p, x_BI, carried)
    torch.testing.assert_close(output, expected.output, **EXACT)
    for name, part in expected.state.items():
        torch.testing.assert_close(after[name], part, **EXACT)


def test_what_fills_up_a_shorter_row_is_never_looked_at():
    network, tokens_BT = build(num_layers=2), texts(2, 6)
    states = [read(network, tokens_BT[row : row + 1, :length]).state for row, length in enumerate((1, 3))]
    both = State.stack(states)
    spoiled = State(dict(both.tensors))
    for name in ("0.keys", "0.values", "1.keys", "1.values"):
        missing_BS = both.tensors[f"{name[0]}.seen"] == 0
        spoiled.tensors[name] = torch.where(missing_BS.unsqueeze(-1), 9.0, both.tensors[name])
    assert not torch.equal(spoiled.tensors["0.keys"], both.tensors["0.keys"])
    found = network(tokens_BT, spoiled).logits_BTV
    for row, state in enumerate(states):
        alone = network(tokens_BT[row : row + 1], state).logits_BTV
        torch.testing.assert_close(found[row : row + 1], alone, **EXACT)


@pytest.mark.parametrize(("num_layers", "also_beyond"), [(1, True), (2, False)])
def test_reading_the_last_w_tokens_again_equals_the_cache_up_to_w(num_layers, also_beyond):
    network, tokens_BT = build(num_layers=num_layers), texts(1, 3 * W)
    state = network.initial_state(1)
    for time in range(3 * W):
        cached, state = read_on(network, tokens_BT[:, time : time + 1], state)
        whole = read(network, tokens_BT[:, : time + 1]).logits_BTV[:, -1]
        torch.testing.assert_close(cached, whole, **EXACT)
        again = read(network, tokens_BT[:, max(0, time + 1 - W) : time + 1]).logits_BTV[:, -1]
        # Of two layers the first has read, for the cache of the second, what lies before the window.
        assert torch.allclose(cached, again, **EXACT) == (time < W or also_beyond)


def read_on(network, tokens_BT, state):
    with torch.no_grad():
        logits_BTV, state = network(tokens_BT, state)
    return logits_BTV[:, -1], state


# How it starts, and what it refuses.


def test_matrices_are_drawn_as_documented(draw):
    p = draw("transformer", 48, 64, residual=False, feedforward_size=0).p
    for name, bound in (("weight_qkv", math.sqrt(3 / 48)), ("weight_out", 0.1 * math.sqrt(3 / 64))):
        assert 0.99 * bound < p[name].abs().max() <= bound
        assert p[name].var().item() == pytest.approx(bound**2 / 3, rel=0.05)


def test_muon_takes_queries_keys_and_values_apart():
    network = build(num_layers=1)
    blocks = {tuple(matrix.shape): num_blocks for matrix, num_blocks in network.hidden_matrices()}
    assert blocks[3 * H, H] == 3
    assert blocks[H, H] == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"num_heads": 3, "hidden_size": 256},
            "num_heads 3 cuts hidden_size 256 into no heads of even width: take a hidden_size divisible by 6, such as "
            "258",
        ),
        ({"num_heads": 4, "hidden_size": 4}, "take a hidden_size divisible by 8, such as 8"),
        ({"attention_window": 1}, "greater than or equal to 2"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(settings, message):
    with pytest.raises(ValidationError) as error:
        model_config({"kind": "transformer", **settings})
    assert message in str(error.value)


def test_it_stands_beside_other_cells_in_a_mixed_stack():
    settings = {"kind": "stack", "layers": "lstm,transformer", "hidden_size": 8, "embedding_size": 8, "num_heads": 2}
    network = build_model(model_config(settings), V, seed=1, dtype=torch.float64)
    assert network.config.residual
    assert network.config.norm == "rms"
    state = read(network, texts(2, 5)).state
    assert set(state.tensors) == {"0.h", "0.c", "1.keys", "1.values", "1.seen"}
