"""The laws of language models and of cells, as code that says in words which one is broken.

Shape letters: B rows, T time, I cell input, H hidden, V vocabulary.

Read from the top, this is the contract. A law is a function over a :class:`Subject` that yields a line for every way
in which the subject breaks it, and nothing where it is kept. ``MODEL_LAWS`` and ``CELL_LAWS`` are in stages: while a
law of one stage is broken, the later ones would only say the same again in other words. Every law is run in float64
(1e-10) and in float32 (1e-4, relative), because the kernels differ. ``elman check`` and the project's own tests run
the same functions.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args, get_origin

import torch
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from torch import Tensor

from elman.cells import find_cell
from elman.cells.base import Step
from elman.config import CellConfig, ModelConfig, StackConfig
from elman.errors import ConfigError, ElmanError
from elman.models.contract import LanguageModel
from elman.models.kinds import build_model, model_config, model_config_class
from elman.models.noise import Noise
from elman.models.state import State, grows
from elman.models.subjects import (
    MANY_ROWS,
    MANY_STEPS,
    NUM_ROWS,
    NUM_STEPS,
    TOLERANCES,
    VOCAB_SIZE,
    CellSubject,
    ModelSubject,
    Subject,
    cell_subject,
    gradients_of,
    leaves_of,
    loss_of,
    model_subject,
    with_gradients,
)

_SMALL = {"embedding_size": 6, "hidden_size": 8, "num_layers": 2, "num_heads": 2, "dropout": 0.5}
_SIZES = {
    "num_layers": (1, 2),
    "convolution_size": (0, 3),
    "feedforward_size": (0, 5),
    "num_heads": (1, 2),
    "attention_window": (3, 7),
    "mogrifier_rounds": (4, 5),
    "num_gate_blocks": (1, 2),
    "mogrifier_rank": (0, 2),
    "qrnn_window": (1, 3),
    "output_cutoffs": ((3, 7),),
    "num_mixtures": (2,),
}
"""Values of settings that are numbers, between which a model becomes another one."""
_GLOBAL_SEED = 9_263_847
"""What torch's global generator stands at while a law is tried; a cell that seeds it will have chosen another."""


@dataclass(frozen=True)
class Finding:
    """One broken law."""

    law: str
    text: str
    """What is wrong and what to do, in one line."""

    def __str__(self) -> str:
        return f"{self.law}: {self.text}"


Law: TypeAlias = Callable[[Any], Iterator[str]]
_Call: TypeAlias = Callable[[dict[str, Tensor]], object]


# What is declared.


def declarations(s: Subject) -> Iterator[str]:
    """What is declared can be made; the subject itself shows it."""
    yield from ()


def count(s: CellSubject | ModelSubject) -> Iterator[str]:
    """The number of parameters predicted from the settings is the number built."""
    if isinstance(s, CellSubject):
        built, predicted = sum(p.numel() for p in s.parameters.values()), s.cell.num_parameters()
    else:
        built = s.model.num_parameters
        predicted = s.model.predicted_num_parameters(s.model.config, s.model.vocab_size)
    if predicted != built:
        yield f"{predicted} parameters are predicted, but {built} are built: derive the number from the shapes declared"


def initial_state(s: Subject) -> Iterator[str]:
    """The initial state is finite and the same in every row."""
    for name, tensor in s.initial.tensors.items():
        if not tensor.isfinite().all():
            yield f"the initial state {name!r} is not finite: give a finite number"
        elif not torch.equal(tensor, tensor[:1].expand_as(tensor)):
            yield f"the rows of the initial state {name!r} differ: every text must start from the same state"


# What comes back.


def form_of_step(s: CellSubject) -> Iterator[str]:
    """A step gives an output (B, output size), a state like the one it was given, and named tensors with B rows."""
    with torch.no_grad():
        step = s.cell.step(s.parameters, s.inputs[:, 0], dict(s.initial.tensors))
    if not isinstance(step, Step):
        yield f"step returns {type(step).__name__}: return Step(output, state, named)"
        return
    yield from _form_of_output("step", s, step.output, (NUM_ROWS, s.output_size), "(batch, output_size)")
    yield from _form_of_state("step", s, step.state)
    for name, tensor in step.named.items():
        if not isinstance(tensor, Tensor) or tensor.shape[:1] != (NUM_ROWS,):
            yield f"the named intermediate {name!r} is no tensor with the batch first"


def form(s: Subject) -> Iterator[str]:
    """A segment gives outputs (B, T, output size) and a state with the parts, shapes and dtypes of the initial one."""
    try:
        outputs, state = s.read(s.inputs, s.initial)
    except Exception:
        if _reads_time_first(s):
            yield f"{s.name} has time and batch swapped: it must take (batch, time, ...) and return the same order"
            return
        raise
    if outputs.shape == (NUM_STEPS, NUM_ROWS, s.output_size):
        yield f"{s.name} returns outputs with time and batch swapped: return (batch, time, output_size)"
        return
    yield from _form_of_output(s.name, s, outputs, (NUM_ROWS, NUM_STEPS, s.output_size), "(batch, time, output_size)")
    yield from _form_of_state(s.name, s, state.tensors)


def _reads_time_first(s: Subject) -> bool:
    try:
        outputs, _ = s.read(s.inputs.transpose(0, 1), s.initial)
    except (Exception, SystemExit):  # then its fault is another one, which the caller reports
        return False
    return outputs.shape == (NUM_STEPS, NUM_ROWS, s.output_size)


def _form_of_output(
    where: str, s: Subject, output: Tensor, shape: tuple[int, ...], meaning: str, dtype: torch.dtype | None = None
) -> Iterator[str]:
    if output.shape != shape:
        yield f"{where} returns an output of shape {list(output.shape)}: it must be {list(shape)}, {meaning}"
    yield from _kept_dtype(f"the output of {where}", output, dtype or s.dtype)


def _form_of_state(where: str, s: Subject, state: Mapping[str, Tensor]) -> Iterator[str]:
    expected = s.initial.tensors
    if not isinstance(state, Mapping) or state.keys() != expected.keys():
        given = sorted(state) if isinstance(state, Mapping) else type(state).__name__
        yield f"{where} returns a state with the parts {given}: the parts declared are {sorted(expected)}"
        return
    for name, tensor in state.items():
        wanted, found = list(expected[name].shape), list(tensor.shape)
        if grows(expected[name]):
            del wanted[1], found[1:2]
        if found != wanted:
            yield f"{where} returns the state {name!r} in the shape {found}: it must be {wanted}"
        yield from _kept_dtype(f"the state {name!r} of {where}", tensor, expected[name].dtype)


def _kept_dtype(what: str, tensor: Tensor, dtype: torch.dtype) -> Iterator[str]:
    if tensor.dtype != dtype:
        made = "make new tensors with the dtype of the inputs (new_zeros, zeros_like)"
        yield f"{what} is {_short(tensor.dtype)} where everything given is {_short(dtype)}: {made}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def form_of_model_step(s: ModelSubject) -> Iterator[str]:
    """A step gives features (B, F) and a state like the one it was given."""
    with torch.no_grad():
        features_BTF, _ = s.model.features(s.inputs, s.initial)
        features_BF, state = s.model.step(s.inputs[:, 0], s.initial)
    shape = (NUM_ROWS, features_BTF.shape[2])
    yield from _form_of_output("step", s, features_BF, shape, "(batch, features)", features_BTF.dtype)
    yield from _form_of_state("step", s, state.tensors)


def probabilities(s: ModelSubject) -> Iterator[str]:
    """Probabilities sum to one, and logits, log-probabilities and losses of the head are three views of the same."""
    head = s.model.head
    with torch.no_grad():
        features_BTF, _ = s.model.features(s.inputs, s.filled_state())
        log_probs_BTV = head.log_probs(features_BTF)
        sums_BT = log_probs_BTV.exp().sum(-1)
        if gap := s.differ(sums_BT, torch.ones_like(sums_BT)):
            yield f"the probabilities of the next token do not sum to one: they differ from it {gap}"
        if gap := s.differ(head.logits(features_BTF).log_softmax(-1), log_probs_BTV):
            yield f"head.logits and head.log_probs differ {gap}"
        targets_BT = s.inputs.flip(1)
        expected_BT = -log_probs_BTV.gather(-1, targets_BT.unsqueeze(-1)).squeeze(-1)
        if gap := s.differ(head.nll(features_BTF, targets_BT), expected_BT):
            yield f"head.nll is not minus head.log_probs of the target: they differ {gap}"
        weight_BT = torch.arange(NUM_ROWS * NUM_STEPS, dtype=s.dtype).view_as(targets_BT) / 4
        if gap := s.differ(head.nll(features_BTF, targets_BT, weight_BT), expected_BT * weight_BT):
            yield f"head.nll with weights is not the loss times its weight: they differ {gap}"


# What it must not do.


def leaves_its_arguments_alone(s: Subject) -> Iterator[str]:
    """State, parameters and inputs of the caller are never changed."""
    calls: dict[str, _Call] = {s.name: lambda state: s.run(s.parameters, s.inputs, State(state))}
    if isinstance(s, CellSubject):
        calls["step"] = lambda state: s.cell.step(s.parameters, s.inputs[:, 0], state)
    # A filled state shows what zeros hide; a cell may go another way where gradients are taken.
    tries = product(calls.items(), (False, True), (s.filled_state(), s.initial))
    yield from dict.fromkeys(line for call, grad, state in tries for line in _changed(*call, s, state, grad))


def _changed(where: str, call: _Call, s: Subject, before_call: State, grad: bool) -> Iterator[str]:
    state = dict(before_call.map(Tensor.clone).tensors)
    given = {f"the caller's state {name!r}": tensor for name, tensor in state.items()}
    given |= {f"the parameter {name!r}": tensor for name, tensor in s.parameters.items()} | {"its input": s.inputs}
    before = {name: tensor.detach().clone() for name, tensor in given.items()}
    handed_in = dict(state)
    with torch.set_grad_enabled(grad):
        call(handed_in)
    for name, tensor in given.items():
        if not torch.equal(tensor, before[name]):
            yield f"{where} changes {name} in place: compute a new tensor (x = x + y, not x += y)"
    if handed_in.keys() != state.keys() or any(handed_in[name] is not state[name] for name in state):
        yield f"{where} puts other tensors into the caller's state: return a new dict"


def repeats_itself(s: Subject) -> Iterator[str]:
    """The same inputs and state give the same numbers, bit for bit."""
    state = s.filled_state()
    first, second = (s.read(s.inputs, state) for _ in range(2))
    same = torch.equal(first[0], second[0])
    if not same or any(not torch.equal(first[1].tensors[name], second[1].tensors[name]) for name in state.tensors):
        yield f"{s.name} gave two results for one input and state: it draws at random, or keeps something between calls"


# What must come to the same.


def chunking(s: Subject) -> Iterator[str]:
    """Any chunking of a text gives the outputs, the final state and the gradient of one pass."""
    state = s.filled_state()
    whole, whole_gradients = with_gradients(s, s.inputs, state)
    for lengths in ([1] * NUM_STEPS, [2, 3], [4, 1]):
        pieces, gradients = with_gradients(s, s.inputs, state, lengths)
        if gap := s.differ_in(pieces, whole):
            yield f"{s.name} in pieces and in one go: {gap}; start from the state given and return the last one"
            return
        if gap := s.differ_in_gradients(gradients, whole_gradients):
            yield f"{s.name} in pieces and in one go: {gap}; detach nothing inside"
            return


def sizes(s: Subject) -> Iterator[str]:
    """A long text and a wide batch give what few steps of few rows at a time give."""
    seen = s.inputs.flatten(0, 1)
    for num_rows, num_steps in ((NUM_ROWS, MANY_STEPS), (MANY_ROWS, NUM_STEPS)):
        inputs = seen[torch.randint(len(seen), (num_rows, num_steps), generator=torch.Generator().manual_seed(1))]
        state = s.filled_state().select([row % NUM_ROWS for row in range(num_rows)])
        whole, whole_gradients = with_gradients(s, inputs, state)
        pieces, gradients = with_gradients(s, inputs, state, NUM_STEPS, NUM_ROWS)
        if gap := s.differ_in(whole, pieces) or s.differ_in_gradients(whole_gradients, gradients):
            what = f"{num_steps} steps of {num_rows} rows in one go and {NUM_STEPS} of {NUM_ROWS} at a time"
            yield f"{s.name} of {what}: {gap}; no length and no number of rows may be a special case"


def rows(s: Subject) -> Iterator[str]:
    """Rows of a batch never influence each other, nor does their order or number."""
    state = s.filled_state()
    outputs, after = s.read(s.inputs, state)
    choices = {"alone": [[row] for row in range(NUM_ROWS)], "in another order": [[2, 0, 1]], "twice": [[1, 1, 0, 2]]}
    for how, selections in choices.items():
        for selection in selections:
            found = s.read(s.inputs[selection], state.select(selection))
            if gap := s.differ_in(found, (outputs[selection], after.select(selection))):
                yield f"a row read {how} and in its batch: {gap}; never mix rows (a mean over the batch, a fixed row)"
                return


def fast_form(s: CellSubject) -> Iterator[str]:
    """``scan`` and the step, once for each time, agree in outputs, final state and all gradients."""
    results = []
    for scan in (s.cell.scan, s.cell.readable_scan):
        parameters, state = leaves_of(s.parameters), leaves_of(s.filled_state().tensors)
        x = leaves_of({"x": s.inputs})
        outputs, after = scan(parameters, x["x"], state)
        leaves = parameters | x | {f"state {name}": tensor for name, tensor in state.items()}
        results.append((outputs, State(after), leaves))
    yield from _fast_and_readable("scan", s, *results)


def fast_form_of_model(s: ModelSubject) -> Iterator[str]:
    """``features`` and the step, once for each token, agree in outputs, final state and all gradients."""
    parameters = dict(s.model.named_parameters())
    results = []
    for read in (s.model.features, partial(_token_by_token, s.model)):
        state = leaves_of(s.filled_state().tensors)
        features_BTF, after = read(s.inputs, State(state))
        leaves = parameters | {f"state {name}": tensor for name, tensor in state.items()}
        results.append((features_BTF, after, leaves))
    yield from _fast_and_readable("features", s, *results)


def _token_by_token(model: LanguageModel, tokens_BT: Tensor, state: State) -> tuple[Tensor, State]:
    features = []
    for token_B in tokens_BT.unbind(1):
        features_BF, state = model.step(token_B, state)
        features.append(features_BF)
    return torch.stack(features, dim=1), state


def _fast_and_readable(
    name: str,
    s: Subject,
    fast: tuple[Tensor, State, Mapping[str, Tensor]],
    readable: tuple[Tensor, State, Mapping[str, Tensor]],
) -> Iterator[str]:
    """Hold two results against each other, each with the leaves that it has gradients for."""
    what = f"{name} and the step, once for each time"
    (fast_values, fast_gradients), (values, gradients) = (
        ((outputs.detach(), state.detach()), gradients_of(loss_of(outputs, state), leaves))
        for outputs, state, leaves in (fast, readable)
    )
    if gap := s.differ_in(fast_values, values):
        yield f"{what}: {gap}; the step is the definition"
        return
    if gap := s.differ_in_gradients(fast_gradients, gradients):
        yield f"{what}: {gap}"


# What gradients do.


def detach(s: Subject) -> Iterator[str]:
    """A detached state lets no gradient through to what was read before."""
    parameters, x = leaves_of(s.parameters), leaves_of({"x": s.earlier})
    _, state = s.run(parameters, x["x"], s.initial)
    outputs, after = s.run(leaves_of(s.parameters), s.inputs, state.detach())
    for name, gradient in gradients_of(loss_of(outputs, after), parameters | x).items():
        if gradient.any():
            yield f"a gradient leaks past detach to the earlier {name!r}: keep no tensor on the cell, carry it"
            return


def gradients(s: Subject) -> Iterator[str]:
    """Every parameter has a part in the result."""
    _, found = with_gradients(s, s.inputs, s.filled_state())
    for name, gradient in found.items():
        if not gradient.isfinite().all():
            yield f"the gradient of {name!r} is not finite"
        elif not gradient.any():
            yield f"the parameter {name!r} gets no gradient: use it, or do not declare it"


# What states do.


def state_operations(s: Subject) -> Iterator[str]:
    """Selected, stacked, saved and reset states go on as their rows did; no part is left out."""
    state = s.filled_state()
    whole = s.read(s.inputs, state)
    single = [state.select([row]) for row in range(NUM_ROWS)]
    if gap := s.differ_in(s.read(s.inputs, State.stack(single)), whole):
        yield f"going on from a stacked state: {gap}; everything carried must be a declared part of the state"
    if gap := s.differ_in(s.read(s.inputs, State.from_bytes(state.to_bytes(), like=s.initial)), whole):
        yield f"going on from a saved state: {gap}; everything carried must be a declared part of the state"
    resets_B = torch.tensor([True, False, True])
    expected = State.stack([s.initial.select([0]), single[1], s.initial.select([2])])
    if gap := s.differ_in(s.read(s.inputs, state.reset(resets_B, s.initial)), s.read(s.inputs, expected)):
        yield f"going on from a reset state: {gap}; a reset row must equal a row of the initial state"


def resets_inside_a_segment(s: ModelSubject) -> Iterator[str]:
    """Where ``reset_BT`` is true the row's state is initial before the token is read, and only there."""
    reset_BT = torch.zeros(NUM_ROWS, NUM_STEPS, dtype=torch.bool)
    reset_BT[0, 0] = reset_BT[1, 2] = reset_BT[2, 2] = reset_BT[2, 4] = True
    before = s.filled_state()
    with torch.no_grad():
        found = s.model.features(s.inputs, before, reset_BT)
        state, features = before, []
        for time in range(NUM_STEPS):
            state = state.reset(reset_BT[:, time], s.initial)
            feature, state = s.model.features(s.inputs[:, time : time + 1], state)
            features.append(feature)
    if gap := s.differ_in(found, (torch.cat(features, dim=1), state)):
        yield f"resets inside a segment and one token at a time: {gap}"


def noise(s: ModelSubject) -> Iterator[str]:
    """The masks of an update are its key's: equal in every repetition, and the same for rows computed apart."""
    state = s.filled_state()

    def features(first: int, last: int) -> Tensor:
        key = Noise(seed=1, update=7, num_rows=NUM_ROWS, first_row=first)
        with torch.no_grad():
            return s.model.features(s.inputs[first:last], state.select(range(first, last)), noise=key)[0]

    if gap := s.differ(torch.cat([features(0, 1), features(1, NUM_ROWS)]), features(0, NUM_ROWS)):
        yield f"dropout of a batch in pieces and in one go differs {gap}: draw masks from the noise handed in alone"


MODEL_LAWS: tuple[tuple[Law, ...], ...] = (
    (declarations,),
    (count, initial_state),
    (form, form_of_model_step),
    (leaves_its_arguments_alone, repeats_itself),
    (probabilities, chunking, rows, detach, gradients, state_operations, resets_inside_a_segment, noise),
    (fast_form_of_model, sizes),
)
CELL_LAWS: tuple[tuple[Law, ...], ...] = (
    (declarations,),
    (count, initial_state),
    (form_of_step,),
    (form,),
    (leaves_its_arguments_alone,),
    (repeats_itself,),
    (chunking, rows, detach, state_operations),
    (fast_form, gradients, sizes),
)


def check_model(build: Callable[[torch.dtype], LanguageModel]) -> list[Finding]:
    """Hold a language model against the laws.

    Args:
        build: gives a new model of a dtype, the same one at every call.

    Returns:
        What is broken; nothing where every law is kept.
    """

    return _check(MODEL_LAWS, partial(model_subject, build))


def check_cell(kind: str) -> list[Finding]:
    """Hold a cell against the laws, alone and in a model, in every option that its settings offer.

    Args:
        kind: a name, or a person's own ``./file.py:Class`` or ``package.module:Class``.

    Returns:
        What is broken, each law once; nothing where every law is kept.

    Raises:
        ConfigError: there is no such cell.
    """
    settings = find_cell(kind).Config
    if not isinstance(settings, type) or not issubclass(settings, CellConfig):
        return [Finding("settings", "Config of the cell must be a class derived from elman.config.CellConfig")]
    try:
        configs = small_configs(kind, but=StackConfig.__annotations__)  # what a stack puts around the cell
    except ValidationError as error:
        fault = error.errors()[0]
        setting = ".".join(map(str, fault["loc"])) or "the settings"
        return [Finding("settings", f"{setting}: {fault['msg']}; each setting needs a default that is accepted")]
    except (Exception, SystemExit) as error:
        return [Finding("declarations", _in_one_line(error))]
    findings: dict[str, Finding] = {}
    for config in configs:
        for finding in check_config(config):
            findings.setdefault(finding.law, finding)
    return list(findings.values())


def check_config(config: ModelConfig) -> list[Finding]:
    """Hold the model of these settings against the laws, and before it the cell that it is made of."""
    if isinstance(config, StackConfig):
        for name in dict.fromkeys(config.cell_names):
            if findings := _check(CELL_LAWS, partial(cell_subject, config, name)):
                return findings
    return check_model(lambda dtype: build_model(config, VOCAB_SIZE, seed=1, dtype=dtype))


def small_configs(kind: str, *, but: Collection[str] = ()) -> list[ModelConfig]:
    """Small settings of a kind in which every two values of different options meet, as far as they may.

    Args:
        kind: a name, or the path of a person's own cell.
        but: settings to leave at their defaults.
    """
    fields = model_config_class(kind).model_fields
    base = {"kind": kind} | {name: value for name, value in _SMALL.items() if name in fields}
    options = {name: values for name, field in fields.items() if name not in but and (values := _values(name, field))}
    configs = [model_config(_with_equal_widths(base))]
    missing = {frozenset([one]) for one in _choices(options)}
    missing |= {frozenset(pair) for pair in combinations(_choices(options), 2) if pair[0][0] != pair[1][0]}
    while missing:
        # Start from what no settings have met yet, and take in as much of the rest as is accepted with it.
        chosen = dict(min(missing, key=_in_order))
        config = _accepted({**base, **chosen})
        for name, value in sorted(_choices(options), key=lambda c: (-sum(c in pair for pair in missing), str(c))):
            if config is not None and name not in chosen and (more := _accepted({**base, **chosen, name: value})):
                chosen, config = {**chosen, name: value}, more
        met = set(chosen.items())
        missing = {pair for pair in missing if not pair <= met}
        if config is not None:
            configs.append(config)
    return configs


_Choice: TypeAlias = tuple[str, Any]


def _choices(options: Mapping[str, Sequence[Any]]) -> list[_Choice]:
    return [(name, value) for name, values in options.items() for value in values]


def _in_order(choices: Iterable[_Choice]) -> tuple[int, list[str]]:
    names = sorted(map(str, choices))
    return -len(names), names


def _accepted(settings: dict[str, Any]) -> ModelConfig | None:
    """The settings as a model can have them; none where the choices exclude each other."""
    try:
        config = model_config(_with_equal_widths(settings))
        with torch.random.fork_rng(devices=[]):  # a cell that seeds it is told so by a law
            build_model(config, VOCAB_SIZE, seed=None, dtype=torch.float32)
    except (ValidationError, ConfigError):
        return None
    return config


def _with_equal_widths(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings, with widths made equal where they have to be."""
    fields = model_config_class(settings["kind"]).model_fields

    def chosen(name: str) -> Any:
        return name in fields and settings.get(name, fields[name].default)

    if chosen("residual") or (chosen("tie_weights") and not chosen("output_projection")):
        return {**settings, "embedding_size": settings["hidden_size"]}
    return settings


def _values(name: str, field: FieldInfo) -> list[Any]:
    """The values that a setting can be given, where they can be counted or stand in ``_SIZES``."""
    annotation = field.annotation
    if name in _SIZES:
        return list(_SIZES[name])
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    if annotation is bool or bool in get_args(annotation):
        return [False, True]
    may_be_none = type(None) in get_args(annotation) and field.default is not None
    return [field.default, None] if may_be_none else []


def _check(stages: Sequence[Sequence[Law]], make: Callable[[torch.dtype], Subject]) -> list[Finding]:
    """The findings of the first stage that has any; each law gets a subject of its own."""
    for dtype in TOLERANCES:
        for stage in stages:
            if findings := [finding for law in stage for finding in _broken(law, make, dtype)]:
                return list(dict.fromkeys(findings))
    return []


def _broken(law: Law, make: Callable[[torch.dtype], Subject], dtype: torch.dtype) -> list[Finding]:
    name = law.__name__.replace("_", " ")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(_GLOBAL_SEED)
        before = torch.get_rng_state()
        try:
            findings = [Finding(name, text) for text in law(make(dtype))]
        except (Exception, SystemExit) as error:
            findings = [Finding(name, _in_one_line(error))]
        if not torch.equal(before, torch.get_rng_state()):
            findings.append(Finding("repeats itself", "it draws from torch's global generator, or seeds it: never do"))
    return findings


def _in_one_line(error: BaseException) -> str:
    """What was raised, and the last line of the cell's author that led to it."""
    if isinstance(error, ElmanError):
        return str(error)
    ours = [Path(torch.__file__).parent, Path(__file__).parents[1]]
    frames = traceback.extract_tb(error.__traceback__)
    files = [f for f in frames if not f.filename.startswith("<")]  # "<frozen ...>" is Python itself
    theirs = [f for f in files if not any(Path(f.filename).is_relative_to(folder) for folder in ours)]
    where = f"{Path(theirs[-1].filename).name} line {theirs[-1].lineno} raised " if theirs else ""
    what = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return where + what.removesuffix(": ")
