"""The graph of a step is that step: in NumPy, in float64, for every kind and every option that has one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from elman.engine.graph import BINARY, CHOICES, MOVES, SOURCES, SUMS, UNARY, evaluate
from elman.engine.trace import CannotLower, trace
from elman.models.kinds import build_model, kind_names, model_config

from .conftest import COMPARING, VOCAB_SIZE, build, filled_state, network_of, traced_configs, widened


@pytest.mark.parametrize("kind", kind_names())
def test_the_graph_gives_what_the_step_gives(kind):
    for config in traced_configs(kind):
        network = build(config, torch.float64)
        graph = trace(network)
        state = filled_state(network, 1)
        parameters = {name: p.detach().numpy() for name, p in network.named_parameters()}
        parts = {name: tensor[0].numpy() for name, tensor in state.tensors.items()}
        for token in (7, network.boundary_id, 7, network.boundary_id, 7):  # an encoder-decoder changes over at it
            logits_V, parts = evaluate(graph, token, parts, parameters)
            with torch.no_grad():
                features_BF, state = network.step(torch.tensor([token]), state)
                expected_V = network.head.logits(features_BF.unsqueeze(1))[0, 0]
            np.testing.assert_allclose(logits_V, expected_V, rtol=1e-10, atol=1e-10)
            assert parts.keys() == state.tensors.keys()
            for name, part in parts.items():
                np.testing.assert_allclose(part, state.tensors[name][0], rtol=1e-10, atol=1e-10)


def test_every_node_is_of_the_closed_list():
    known = {*SOURCES, *MOVES, *UNARY, *BINARY, *CHOICES, *SUMS}
    seen = {node.op for kind in kind_names() for config in traced_configs(kind) for node in trace(build(config)).nodes}
    assert seen <= known
    assert {"token", "state", "parameter", "number", "row", "slice", "concat", "sum", "matvec", "exp"} <= seen


def test_models_that_differ_in_their_weights_alone_have_one_graph():
    config = traced_configs("lstm")[0]
    one, other = (build_model(config, VOCAB_SIZE, seed=seed, dtype=torch.float32) for seed in (1, 2))
    assert trace(one).key == trace(other).key
    assert trace(one).key != trace(build(widened(config))).key


def test_a_graph_can_be_read():
    lines = str(trace(network_of(lambda a, h, p: a + h))).splitlines()
    assert lines == [
        "%0 [77, 6] = parameter('embedding')",
        "%1 [8, 6] = parameter('layers.0.W')",
        "%2 [77, 8] = parameter('head.weight')",
        "%3 [77] = parameter('head.bias')",
        "%4 [8] = state('0.h')",
        "%5 [] = token()",
        "%6 [6] = row(%0, %5)",
        "%7 [8] = matvec(%1, %6)",
        "%8 [8] = add(%7, %4)",
        "%9 [77] = matvec(%2, %8, %3)",
        "logits %9; state: 0.h %8",
    ]


# A person's cell may be written in plain PyTorch; what a graph cannot hold is said.


FORMS = {
    "a product with @": lambda a, h, p: a + h @ p["U"].T,
    "a parameter on the left": lambda a, h, p: (a + (p["U"] @ h.T).T).tanh(),
    "einsum over heads": lambda a, h, p: (
        a + torch.einsum("bni,noi->bno", h.unflatten(-1, (2, -1)), p["heads"]).flatten(1)
    ).sigmoid(),
    "two states multiplied": lambda a, h, p: torch.bmm(a.unsqueeze(2), h.unsqueeze(1)).sum(2) / 100,
    "stacked and averaged": lambda a, h, p: torch.stack([a, h, a * h], dim=1).mean(1),
    "a constant of its own": lambda a, h, p: a + torch.arange(a.shape[1], dtype=a.dtype) / 10,
    "functions of torch": lambda a, h, p: torch.nn.functional.silu(a) + torch.nn.functional.softplus(h).clamp(0.1, 3),
    "powers": lambda a, h, p: (a**2 + h.square() + 1e-3).rsqrt() + (a**3).reciprocal().clamp(max=1.0),
    "in place on its own": lambda a, h, p: (a * 2).add_(h).mul_(0.5),
    "lerp and addcmul": lambda a, h, p: torch.lerp(a, h, 0.25).addcmul(a, h, value=0.5),
    "a weight of parameters": lambda a, h, p: a * p["U"].diagonal().exp() + h * p["U"][0].softmax(0),
    "a softmax's logarithm": lambda a, h, p: (a + h).log_softmax(-1) + (a - h).log_softmax(1).exp(),
    "a logarithm of a sum": lambda a, h, p: a - torch.stack([a, h, a * h], 1).logsumexp(1) + h.logsumexp(-1, True),
    "normalised": lambda a, h, p: torch.nn.functional.layer_norm(a + h, a.shape[-1:]),
    "gelu": lambda a, h, p: torch.nn.functional.gelu(a + h, approximate="tanh"),
    "moved about": lambda a, h, p: torch.cat([h[:, 3:], a[:, :3]], 1).unflatten(1, (2, -1)).transpose(1, 2).flatten(1),
    **COMPARING,
}
REFUSED = {
    "sort": (lambda a, h, p: a.sort(1).values, "the operation 'sort'"),
    "a look at a number": (lambda a, h, p: a if a.sum() > 0 else h, "_local_scalar_dense"),
    "a count of truths": (lambda a, h, p: a * (h > 0).long().sum(), "makes torch.int64"),
    "a remainder": (lambda a, h, p: a % 0.3 + h, "remainder of numbers"),
    "item": (lambda a, h, p: a * h.sum().item(), "_local_scalar_dense"),
    "chance": (lambda a, h, p: a + torch.randn_like(h), "at random"),
    "in place on a view": (lambda a, h, p: a[:, :4].add_(1.0) + h[:, :1], "in place"),
    "another precision": (lambda a, h, p: a.half().float() + h, "torch.float16"),
    "another power": (lambda a, h, p: a.abs() ** 1.5 + h, "power 1.5"),
    "every second": (lambda a, h, p: torch.cat([a[:, ::2], h[:, ::2]], 1), "2 apart"),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_cell_in_plain_pytorch_has_a_graph(form):
    network = network_of(form)
    state = filled_state(network, 1)
    parameters = {name: p.detach().numpy() for name, p in network.named_parameters()}
    graph = trace(network)
    logits_V, after = evaluate(graph, 3, {"0.h": state.tensors["0.h"][0].numpy()}, parameters)
    with torch.no_grad():
        features_BF, expected = network.step(torch.tensor([3]), state)
        np.testing.assert_allclose(logits_V, network.head.logits(features_BF.unsqueeze(1))[0, 0], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(after["0.h"], expected.tensors["0.h"][0], rtol=1e-9, atol=1e-9)


@pytest.mark.global_rng
@pytest.mark.parametrize(("form", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_graph_is_refused_with_the_reason(form, reason):
    with pytest.raises(CannotLower, match=reason):
        trace(network_of(form))


def test_a_state_that_grows_has_no_graph():
    with pytest.raises(CannotLower, match="grows with the text"):
        trace(build(model_config({"kind": "transformer", "embedding_size": 8, "hidden_size": 8, "num_layers": 1})))


def test_matrices_of_parameters_are_products_and_what_is_fixed_is_known():
    graph = trace(network_of(FORMS["einsum over heads"]))
    assert sum(node.op == "matvec" for node in graph.nodes) == 3  # W x, the heads, the output
    assert all(graph.nodes[i].op != "token" for i in graph.fixed)
    assert not graph.fixed & {graph.logits, *graph.state.values()}


def test_values_are_frozen():
    node = trace(build(traced_configs("elman")[0])).nodes[0]
    with pytest.raises(dataclasses.FrozenInstanceError):
        node.op = "other"
