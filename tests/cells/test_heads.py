"""What the cells that are cut into heads share: their settings, and a scan that is the step for any length."""

from __future__ import annotations

import re

import pytest
import torch

from elman.cells import find_cell
from elman.errors import ConfigError
from elman.models.kinds import build_model, model_config
from elman.settings import resolve

KINDS = ("slstm", "mlstm", "gated_deltanet")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_steps", [1, 2, 3, 513])
@pytest.mark.parametrize("from_start", [True, False])
def test_the_scan_is_the_step_from_any_state_that_can_be_reached(draw_reachable, kind, num_steps, from_start):
    cell, p, _, state = draw_reachable(kind, hidden_size=4, num_heads=2)
    if from_start:
        state = {
            name: torch.full((2, *part.shape), part.initial, dtype=torch.float64) for name, part in cell.state().items()
        }
    x_BTI = torch.randn(2, num_steps, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    results = []
    for scan in (cell.scan, cell.readable_scan):
        leaves = {name: t.clone().requires_grad_() for name, t in {**p, **state, "x": x_BTI}.items()}
        outputs, after = scan(leaves, leaves["x"], {name: leaves[name] for name in state})
        loss = outputs.tanh().sum() + sum(part.tanh().sum() for part in after.values())
        results.append((outputs, *after.values(), *torch.autograd.grad(loss, leaves.values())))
    for fast, readable in zip(*results, strict=True):
        torch.testing.assert_close(fast, readable, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_of_scan_is_that_of_finite_differences(draw_reachable, kind):
    cell, p, x_BTI, state = draw_reachable(kind, input_size=2, hidden_size=4, num_heads=2)
    names, parts = list(p), list(state)

    def flat(x, *tensors):
        given = dict(zip(names, tensors[: len(names)], strict=True))
        outputs, after = cell.scan(given, x, dict(zip(parts, tensors[len(names) :], strict=True)))
        return outputs, *after.values()

    leaves = [t.clone().requires_grad_() for t in (x_BTI[:, :3], *p.values(), *state.values())]
    assert torch.autograd.gradcheck(flat, leaves, eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("hidden_size", "num_heads", "such_as"), [(10, 4, 8), (4, 4, 8), (3, 4, 8), (130, 64, 128)])
def test_heads_that_do_not_fit_are_one_line_that_says_what_does(kind, hidden_size, num_heads, such_as):
    line = (
        f"num_heads {num_heads} does not cut hidden_size {hidden_size} into equal heads of width 2 or more; accepted: "
        f"a hidden_size that is 2, 3, ... times num_heads, such as {such_as}"
    )
    with pytest.raises(ConfigError, match=re.escape(line)):
        resolve({"model": {"kind": kind, "hidden_size": hidden_size, "num_heads": num_heads}})


def test_they_mix_with_each_other_and_with_plain_cells_in_one_stack():
    settings = {"layers": "slstm,mlstm,lstm,gated_deltanet", "hidden_size": 8, "embedding_size": 8, "num_heads": 2}
    config = model_config(settings)
    assert (config.residual, config.norm, config.convolution_size) == (True, "rms", 4)
    network = build_model(config, 5, seed=1, dtype=torch.float32)
    assert [type(layer.cell) for layer in network.layers] == [find_cell(name) for name in config.layers]
    logits, _ = network(torch.zeros(2, 3, dtype=torch.int64), network.initial_state(2))
    assert logits.isfinite().all()


def test_muon_takes_each_recurrent_block_of_the_slstm_by_itself():
    config = model_config({"kind": "slstm", "hidden_size": 8, "embedding_size": 8, "num_heads": 2})
    (layer,) = build_model(config, 5, seed=1, dtype=torch.float32).layers
    blocks = {tuple(matrix.shape): count for matrix, count in layer.hidden_matrices()}
    assert blocks[8, 4, 4] == 8
    assert blocks[32, 8] == 4
