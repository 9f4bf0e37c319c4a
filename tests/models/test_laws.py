"""The laws see what they are for: each way of breaking a right cell, or a right model, is named and nothing else is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.func import functional_call

from elman.errors import ConfigError
from elman.models.contract import Output
from elman.models.heads import LinearHead
from elman.models.kinds import build_model, model_config
from elman.models.laws import check_cell, check_model, small_configs
from elman.models.stack import RecurrentStack
from elman.models.state import State

OWN_CELL = (Path(__file__).parents[1] / "cells" / "own_cell.py").read_text(encoding="utf-8")

IN_STEP, IN_SCAN = "        drive = linear(x,", "        h, m = state["
BROKEN = {
    "output too wide": (
        [("return Step(h, {", "return Step(torch.cat([h, h], 1), {")],
        {"form of step": "step returns an output of shape [3, 16]: it must be [3, 8], (batch, output_size)"},
    ),
    "state of the wrong shape": (
        [('{"h": h, "m": m}, {"drive"', '{"h": h, "m": m[:1]}, {"drive"')],
        {"form of step": "step returns the state 'm' in the shape [1, 8]: it must be [3, 8]"},
    ),
    "a part of the state forgotten": (
        [('{"h": h, "m": m}, {"drive"', '{"h": h}, {"drive"')],
        {"form of step": "step returns a state with the parts ['h']: the parts declared are ['h', 'm']"},
    ),
    "a tuple instead of a Step": (
        [("return Step(h,", "return (h,")],
        {"form of step": "step returns tuple: return Step(output, state, named)"},
    ),
    "float32 inside": (
        [("h = m.tanh()\n        return Step", "h = m.float().tanh()\n        return Step")],
        {"form of step": "is float32 where everything given is float64"},
    ),
    "scan gives time first": (
        [("torch.stack(outputs, dim=1)", "torch.stack(outputs, dim=0)")],
        {"form": "scan returns outputs with time and batch swapped"},
    ),
    "scan reads time first": (
        [(".unbind(1)", ".unbind(0)"), ("torch.stack(outputs, dim=1)", "torch.stack(outputs, dim=0)")],
        {"form": "scan has time and batch swapped: it must take (batch, time, ...)"},
    ),
    "state changed in place by scan": (
        [(IN_SCAN, '        state["m"].mul_(0.5)\n' + IN_SCAN)],
        {"leaves its arguments alone": "scan changes the caller's state 'm' in place"},
    ),
    "state changed in place by step": (
        [(IN_STEP, '        state["h"].add_(1.0)\n' + IN_STEP)],
        {"leaves its arguments alone": "step changes the caller's state 'h' in place"},
    ),
    "the caller's dict changed": (
        [("return torch.stack", 'state["h"] = h\n        return torch.stack')],
        {"leaves its arguments alone": "scan puts other tensors into the caller's state"},
    ),
    "parameters changed": (
        [(IN_SCAN, '        p["U"].mul_(0.999)\n' + IN_SCAN)],
        {"leaves its arguments alone": "scan changes the parameter 'U' in place"},
    ),
    "scan forgets the state given": (
        [(IN_SCAN + '"h"], state["m"]', '        h, m = torch.zeros_like(state["h"]), torch.zeros_like(state["m"])')],
        {
            "chunking": "scan in pieces and in one go: the state 'h' differs",
            "state operations": None,
            "rows": None,
        },
    ),
    "scan returns the state it was given": (
        [("dim=1), {", "dim=1), state or {")],
        {"chunking": "start from the state given and return the last one"},
    ),
    "a detach inside": (
        [("def scan(self, p, x, state):\n", "def scan(self, p, x, state):\n        x = x.detach()\n")],
        {"fast form": "scan and the step, once for each time: the gradient of 'x' differs"},
    ),
    "no gradient through the state": (
        [(IN_SCAN + '"h"], state["m"]', '        h, m = state["h"].detach(), state["m"].detach()')],
        {"chunking": "scan in pieces and in one go: the gradient of"},
    ),
    "rows leak by a mean over the batch": (
        [("h = m.tanh()\n        return", "h = m.tanh() - 0.1 * m.mean(0)\n        return"),
         ("h = m.tanh()\n            outputs", "h = m.tanh() - 0.1 * m.mean(0)\n            outputs")],
        {"rows": "a row read alone and in its batch"},
    ),
    "the order of rows matters": (
        [("outputs.append(h)", "outputs.append(h * torch.arange(1, len(h) + 1, dtype=h.dtype).unsqueeze(1))")],
        {"rows": "never mix rows"},
    ),
    "a graph kept on the cell": (
        [(IN_SCAN + '"h"], state["m"]',
          '        kept = getattr(self, "kept", None)\n'
          '        if kept is not None and kept[0].equal(state["h"]):\n'
          '            state = {"h": kept[0], "m": kept[1]}\n'
          '        h, m = state["h"], state["m"]'),
         ("return torch.stack", "self.kept = (h, m)\n        return torch.stack")],
        {"detach": "a gradient leaks past detach to the earlier"},
    ),
    "something kept between calls": (
        [("return torch.stack", "self.calls = getattr(self, 'calls', 0) + 1\n        h = h + self.calls\n"
                                "        return torch.stack")],
        {"repeats itself": "it draws at random, or keeps something between calls"},
    ),
    "noise of its own": (
        [("import torch\n", "import random\n\nimport torch\n"),
         (IN_SCAN, "        x = x + random.random()\n" + IN_SCAN)],
        {"repeats itself": "scan gave two results for one input and state"},
    ),
    "wrong count": (
        [("    def state(self)", "    def num_parameters(self):\n        return 7\n\n    def state(self)")],
        {"count": "7 parameters are predicted, but 120 are built"},
    ),
    "scan computes something else": (
        [("+ self.config.leak * (drive", "+ 1.001 * self.config.leak * (drive")],
        {"fast form": "scan and the step, once for each time: the state 'h' differs"},
    ),
    "scan drops a gradient": (
        [('linear(x, p["W"], p["b"]).unbind', 'linear(x, p["W"].detach(), p["b"]).unbind')],
        {"fast form": "the gradient of 'W' differs", "gradients": "the parameter 'W' gets no gradient"},
    ),
    "a parameter without a use": (
        [('"b": Parameter', '"extra": Parameter((3,), Initial("zeros")),\n            "b": Parameter')],
        {"gradients": "the parameter 'extra' gets no gradient: use it, or do not declare it"},
    ),
    "initial state not finite": (
        [("(self.hidden_size,), 0.5)", "(self.hidden_size,), float('-inf'))")],
        {"initial state": "the initial state 'm' is not finite"},
    ),
    "an exception": (
        [(IN_STEP, '        raise RuntimeError("two\\nlines")\n' + IN_STEP)],
        {"form of step": "my_cell.py line 32 raised RuntimeError: two lines"},
    ),
    "an unknown distribution": (
        [('Initial("zeros")', 'Initial("gauss")')],
        {"declarations": "the parameter 'b' of Leaky: unknown initial distribution 'gauss'"},
    ),
    "an orthogonal vector": (
        [('Initial("zeros")', 'Initial("orthogonal")')],
        {"declarations": "the parameter 'b' of Leaky: an orthogonal start needs two dimensions, its shape is [8]"},
    ),
    "parts that do not fit": (
        [('Initial("zeros")', 'Initial("zeros", 1.0, 3)')],
        {"declarations": "the parameter 'b' of Leaky: its shape [8] cannot be cut into 3 equal parts"},
    ),
    "a shape that is no tuple": (
        [("(self.hidden_size,), Initial", "self.hidden_size, Initial")],
        {"declarations": "the parameter 'b' of Leaky: its shape is 8; accepted: a tuple of whole numbers from 1"},
    ),
    "no Parameter": (
        [('Parameter((self.hidden_size,), Initial("zeros"))', "(self.hidden_size,)")],
        {"declarations": "the parameter 'b' of Leaky: it is declared by (8,); accepted: Parameter(shape, Initial"},
    ),
    "no StatePart": (
        [('"h": StatePart((self.hidden_size,))', '"h": (self.hidden_size,)')],
        {"declarations": "the part 'h' of the state of Leaky: it is declared by (8,); accepted: StatePart(shape)"},
    ),
    **{
        f"a parameter called {name!r}": (
            [('"b": Parameter', f'"{name}": Parameter'), ('p["b"]', f'p["{name}"]')],
            {"declarations": f"the parameter {name!r} of Leaky needs another name; accepted: a string without dots"},
        )
        for name in ("cell", "training", "forward", "a.b", "")
    },
    "an exception where it is built": (
        [("    def parameters(self):\n", "    def parameters(self):\n        raise OSError\n")],
        {"declarations": "my_cell.py line 22 raised OSError"},
    ),
    "an exit where it is built": (
        [("    def state", "    def __init__(self, config, input_size):\n        exit(0)\n\n    def state")],
        {"declarations": "my_cell.py line 29 raised SystemExit: 0"},
    ),
    "an exit in the step": (
        [(IN_STEP, "        raise SystemExit\n" + IN_STEP)],
        {"form of step": "my_cell.py line 32 raised SystemExit"},
    ),
    "an exit in scan": (
        [(IN_SCAN, "        raise SystemExit(0)\n" + IN_SCAN)],
        {"form": "my_cell.py line 38 raised SystemExit: 0"},
    ),
    "a state of zeros changed in place": (
        [(IN_STEP, '        state["h"].mul_(0.9)\n' + IN_STEP), (IN_SCAN, '        state["h"].mul_(0.9)\n' + IN_SCAN)],
        {"leaves its arguments alone": "scan changes the caller's state 'h' in place"},
    ),
    "a state changed in place where gradients are taken": (
        [(IN_SCAN, '        if torch.is_grad_enabled():\n            state["m"].mul_(0.9)\n' + IN_SCAN)],
        {"leaves its arguments alone": "scan changes the caller's state 'm' in place"},
    ),
    "a parameter put in its bounds": (
        [(IN_SCAN, '        p["U"].clamp_(-0.1, 0.1)\n' + IN_SCAN)],
        {"leaves its arguments alone": "scan changes the parameter 'U' in place"},
    ),
    "long texts are cut short": (
        [(IN_SCAN, "        x = torch.cat([x[:, :16], 0 * x[:, 16:]], 1)\n" + IN_SCAN)],
        {"sizes": "scan of 40 steps of 3 rows in one go and 5 of 3 at a time: the state 'h' differs"},
    ),
    "the gradient of long texts is cut": (
        [("            outputs", "            m = m.detach() if len(outputs) == 20 else m\n            outputs")],
        {"sizes": "scan of 40 steps of 3 rows in one go and 5 of 3 at a time: the gradient of"},
    ),
    "rows leak in wide batches": (
        [("h = m.tanh()\n        return", "h = m.tanh() - (len(m) > 8) * m.mean(0)\n        return"),
         ("h = m.tanh()\n            outputs", "h = m.tanh() - (len(m) > 8) * m.mean(0)\n            outputs")],
        {"sizes": "scan of 5 steps of 17 rows in one go and 5 of 3 at a time: the state 'h' differs"},
    ),
    "torch's global generator seeded": (
        [(IN_SCAN, "        torch.manual_seed(0)\n" + IN_SCAN)],
        {"repeats itself": "it draws from torch's global generator, or seeds it"},
    ),
    "noise of torch's global generator": (
        [(IN_STEP, "        x = x + torch.rand_like(x)\n" + IN_STEP)],
        {"repeats itself": "it draws from torch's global generator, or seeds it"},
    ),
    "torch's global generator seeded where it is built": (
        [("    def parameters(self):\n", "    def parameters(self):\n        torch.manual_seed(0)\n")],
        {"repeats itself": "it draws from torch's global generator, or seeds it"},
    ),
    "a setting without a default": (
        [("leak: float = 0.25", "leak: float")],
        {"settings": "leak: Field required; each setting needs a default that is accepted"},
    ),
    "settings of another make": (
        [("class LeakyConfig(CellConfig):", "class LeakyConfig:")],
        {"settings": "Config of the cell must be a class derived from elman.config.CellConfig"},
    ),
}  # fmt: skip


def written(source: str, path: Path) -> str:
    path.write_text(source, encoding="utf-8")
    return f"{path}:Leaky"


def test_the_right_cell_keeps_every_law(tmp_path):
    assert check_cell(written(OWN_CELL, tmp_path / "my_cell.py")) == []


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_cell_is_told_what_is_wrong_in_one_line(name, tmp_path):
    changes, expected = BROKEN[name]
    source = OWN_CELL
    for old, new in changes:
        assert old in source, old
        source = source.replace(old, new, 1)
    findings = {finding.law: finding.text for finding in check_cell(written(source, tmp_path / "my_cell.py"))}
    needed = {law for law, words in expected.items() if words is not None}
    assert needed <= findings.keys() <= expected.keys(), findings
    for law in needed:
        assert expected[law] in findings[law]
    assert not any("\n" in text for text in findings.values())


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import nothing_of_this_name", "failed to import: ModuleNotFoundError"),
        ("def broken(:", "failed to import: SyntaxError"),
        ("import sys; sys.exit()", "failed to import: SystemExit"),
        ("Leaky = 3", "is not a cell: it must be a class derived from elman.cells.base.Cell"),
        ("class Leeky: pass", "has no class 'Leaky'"),
    ],
)
def test_a_file_without_the_cell_is_an_error(source, message, tmp_path):
    with pytest.raises(ConfigError, match=message) as error:
        check_cell(written(source, tmp_path / "my_cell.py"))
    assert "\n" not in str(error.value)


UNUSUAL = {
    "no parameters": """
    def parameters(self):
        return {}

    def step(self, p, x, state):
        h = 0.5 * state["h"] + x.sum(1, keepdim=True).tanh()
        return Step(h, {"h": h}, {})
""",
    "no state": """
    def parameters(self):
        return {"W": Parameter((self.hidden_size, self.input_size), Initial("uniform", 0.5))}

    def state(self):
        return {}

    def step(self, p, x, state):
        return Step(linear(x, p["W"]).tanh(), {}, {})
""",
    "neither": """
    @property
    def output_size(self):
        return self.input_size

    def parameters(self):
        return {}

    def state(self):
        return {}

    def step(self, p, x, state):
        return Step(x.tanh(), {}, {})
""",
    "a wide output": """
    @property
    def output_size(self):
        return 2 * self.hidden_size

    def parameters(self):
        return {"W": Parameter((self.hidden_size, self.input_size), Initial("uniform", 0.5))}

    def step(self, p, x, state):
        h = 0.5 * state["h"] + linear(x, p["W"]).tanh()
        return Step(torch.cat([h, h.tanh()], 1), {"h": h}, {})
""",
    "single numbers": """
    def parameters(self):
        return {"scale": Parameter((), Initial("uniform", 0.5)), "shift": Parameter((), Initial("zeros"))}

    def state(self):
        return {"level": StatePart(())}

    def step(self, p, x, state):
        level = 0.5 * state["level"] + (p["scale"] * x + p["shift"]).tanh().sum(1)
        return Step(level.unsqueeze(1).expand(-1, self.hidden_size), {"level": level}, {})
""",
}
HEAD_OF_UNUSUAL = """
import torch

from elman.cells.base import Cell, Initial, Parameter, StatePart, Step
from elman.cells.primitives import linear


class Leaky(Cell):"""


@pytest.mark.parametrize("name", UNUSUAL)
def test_a_right_cell_of_an_unusual_form_keeps_every_law_and_trains(name, tmp_path):
    kind = written(HEAD_OF_UNUSUAL + UNUSUAL[name], tmp_path / "my_cell.py")
    assert [str(finding) for finding in check_cell(kind)] == []
    network = build_model(model_config({"kind": kind, "num_layers": 2}), 11, seed=1, dtype=torch.float32)
    reset_BT = torch.tensor([[False, True, False], [False, False, True]])
    features_BTF, _ = network.features(torch.tensor([[1, 2, 3], [4, 5, 6]]), network.initial_state(2), reset_BT)
    network.head.nll(features_BTF, torch.ones(2, 3, dtype=torch.int64)).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in network.parameters())


def test_the_output_is_tied_where_its_width_allows_it(tmp_path):
    tied = {
        name: [c for c in small_configs(written(HEAD_OF_UNUSUAL + UNUSUAL[name], tmp_path / f"{number}.py"))
               if c.tie_weights and c.output == "linear" and not c.output_projection]
        for number, name in enumerate(UNUSUAL)
    }  # fmt: skip
    assert not tied["a wide output"]
    assert tied["neither"]
    assert tied["single numbers"]


def test_a_check_leaves_the_global_generator_as_it_was(tmp_path):
    source = OWN_CELL.replace(IN_SCAN, "        torch.manual_seed(0)\n" + IN_SCAN)
    before = torch.get_rng_state()
    assert check_cell(written(source, tmp_path / "my_cell.py"))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_parameter_that_no_model_can_hold_is_told_before_training(tmp_path):
    source = OWN_CELL.replace('"b": Parameter', '"cell": Parameter')
    config = model_config({"kind": written(source, tmp_path / "my_cell.py")})
    with pytest.raises(ConfigError, match=r"^the parameter 'cell' of Leaky needs another name; accepted: a string"):
        build_model(config, 11, seed=1, dtype=torch.float32)


def test_ctrl_c_is_nobodys_fault(tmp_path):
    source = OWN_CELL.replace(IN_STEP, "        raise KeyboardInterrupt\n" + IN_STEP)
    with pytest.raises(KeyboardInterrupt):
        check_cell(written(source, tmp_path / "my_cell.py"))


def test_a_cell_that_is_not_there_is_an_error():
    with pytest.raises(ConfigError, match=r"no file 'absent.py' for the cell"):
        check_cell("./absent.py:Cell")


# Models that are broken outside their cells.


class ShiftedHead(LinearHead):
    def log_probs(self, features_BTF):
        return super().log_probs(features_BTF) - 0.01


class LossWithoutWeights(LinearHead):
    def nll(self, features_BTF, targets_BT, weight_BT=None):
        return super().nll(features_BTF, targets_BT)


class CountsItsBiasTwice(RecurrentStack):
    @staticmethod
    def predicted_num_parameters(config, vocab_size):
        return RecurrentStack.predicted_num_parameters(config, vocab_size) + vocab_size


class ResetsTheLastLayerOnly(RecurrentStack):
    def features(self, tokens_BT, state, reset_BT=None, noise=None):
        if reset_BT is None:
            return super().features(tokens_BT, state, noise=noise)
        fresh, features = self.initial_state(len(tokens_BT)).tensors, []
        for time in range(tokens_BT.shape[1]):
            reset = state.reset(reset_BT[:, time], State(fresh))
            state = State({n: reset.tensors[n] if n.startswith("1.") else t for n, t in state.tensors.items()})
            feature, state = super().features(tokens_BT[:, time : time + 1], state)
            features.append(feature)
        return torch.cat(features, 1), state


class ForgetsC(RecurrentStack):
    def features(self, tokens_BT, state, reset_BT=None, noise=None):
        features, after = super().features(tokens_BT, state, reset_BT, noise)
        kept = {n: after.tensors[n] if n.endswith("h") else state.tensors[n] for n in after.tensors}
        return features, State(kept)


class DrawsMasksByPosition(RecurrentStack):
    def _drop(self, x_BTI, share, noise, *places):
        return super()._drop(x_BTI, share, noise and replace(noise, first_row=0), *places)


class GivesLogitsForTheLastTokenOnly(RecurrentStack):
    def forward(self, tokens_BT, state, reset_BT=None):
        logits_BTV, state = super().forward(tokens_BT, state, reset_BT)
        return Output(logits_BTV[:, -1:], state)


class CutsTheGradientAtEveryCall(RecurrentStack):
    def features(self, tokens_BT, state, reset_BT=None, noise=None):
        return super().features(tokens_BT, state.detach(), reset_BT, noise)


class StepsWithoutTheEmbeddingsGradient(RecurrentStack):
    def step(self, token_B, state):
        return functional_call(self, {"embedding": self.embedding.detach()}, (token_B, state), {"step": True})

    def forward(self, tokens_BT, state, reset_BT=None, step=False):
        return super().step(tokens_BT, state) if step else super().forward(tokens_BT, state, reset_BT)


class StepsFromTheInitialState(RecurrentStack):
    def step(self, token_B, state):
        return super().step(token_B, self.initial_state(len(token_B)))


class StepsWithATimeDimension(RecurrentStack):
    def step(self, token_B, state):
        return self.features(token_B.unsqueeze(1), state)


@pytest.mark.parametrize(
    ("model", "head", "law", "words"),
    [
        (RecurrentStack, ShiftedHead, "probabilities", "do not sum to one"),
        (RecurrentStack, LossWithoutWeights, "probabilities", "head.nll with weights is not the loss times its weight"),
        (CountsItsBiasTwice, LinearHead, "count", "parameters are predicted, but"),
        (ResetsTheLastLayerOnly, LinearHead, "resets inside a segment", "the state '0.h' differs"),
        (ForgetsC, LinearHead, "chunking", "the state '0.h' differs"),
        (DrawsMasksByPosition, LinearHead, "noise", "draw masks from the noise handed in alone"),
        (GivesLogitsForTheLastTokenOnly, LinearHead, "form", "returns an output of shape [3, 1, 11]"),
        (CutsTheGradientAtEveryCall, LinearHead, "chunking", "the gradient of 'embedding' differs"),
        (StepsWithoutTheEmbeddingsGradient, LinearHead, "fast form of model", "the gradient of 'embedding' differs"),
        (StepsFromTheInitialState, LinearHead, "fast form of model", "the step is the definition"),
        (StepsWithATimeDimension, LinearHead, "form of model step", "step returns an output of shape [3, 1, 8]"),
    ],
)
def test_a_broken_model_is_told_what_is_wrong(model, head, law, words):
    config = model_config({"kind": "lstm", "embedding_size": 6, "hidden_size": 8, "num_layers": 2, "dropout": 0.5})

    def build(dtype):
        network = model(config, 11, dtype=dtype)
        network.head.__class__ = head
        network.reset_parameters(torch.Generator().manual_seed(1))
        return network

    findings = check_model(build)
    assert any(finding.law == law and words in finding.text for finding in findings), findings


def test_a_fault_that_only_one_dtype_shows_is_found():
    config = model_config({"kind": "gru", "embedding_size": 6, "hidden_size": 8})

    def build(dtype):
        network = build_model(config, 11, seed=1, dtype=dtype)
        if dtype == torch.float32:
            network.head.__class__ = ShiftedHead
        return network

    assert {finding.law for finding in check_model(build)} == {"probabilities"}
