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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, get_args, get_origin

import torch
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from torch import Tensor
from torch.func import functional_call

from elman.cells import find_cell
from elman.cells.base import Cell, Step
from elman.config import CellConfig, ModelConfig, StackConfig
from elman.models.contract import LanguageModel
from elman.models.kinds import build_model, model_config, model_config_class
from elman.models.noise import Noise
from elman.models.state import State

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4}
"""Largest difference that counts as none, relative to the largest number compared."""

# The sizes all differ, so that no two dimensions can change places unseen.
_VOCAB_SIZE, _NUM_ROWS, _NUM_STEPS, _NUM_EARLIER = 11, 3, 5, 4
_SMALL = {"embedding_size": 6, "hidden_size": 8, "num_layers": 2, "dropout": 0.5}


@dataclass(frozen=True)
class Finding:
    """One broken law."""

    law: str
    text: str
    """What is wrong and what to do, in one line."""

    def __str__(self) -> str:
        return f"{self.law}: {self.text}"


@dataclass(frozen=True)
class Subject:
    """What the laws speak of: a map from parameters, inputs and a state to outputs and the next state."""

    name: str
    dtype: torch.dtype
    parameters: Mapping[str, Tensor]
    earlier: Tensor
    """Inputs that were read before, (B, some T, ...), so that the laws are tried on a state that holds something."""
    inputs: Tensor
    """(B, T, ...)."""
    initial: State
    """B rows."""
    run: Callable[[Mapping[str, Tensor], Tensor, State], tuple[Tensor, State]]
    output_size: int

    def filled_state(self) -> State:
        """A state that has read something."""
        with torch.no_grad():
            return self.run(self.parameters, self.earlier, self.initial)[1].map(Tensor.clone)

    def read(self, inputs: Tensor, state: State) -> tuple[Tensor, State]:
        """Outputs and state, without a gradient."""
        with torch.no_grad():
            return self.run(self.parameters, inputs, state)

    def differ(self, one: Tensor, other: Tensor) -> str:
        """How far two tensors are apart, or nothing where they are equal for their dtype."""
        if one.shape != other.shape:
            return f"shapes {list(one.shape)} and {list(other.shape)}"
        if not one.is_floating_point():
            return "" if torch.equal(one, other) else "unequal numbers"
        if not one.numel():
            return ""
        size, gap = other.abs().max().item(), (one - other).abs().max().item()
        allowed = TOLERANCES[self.dtype] * (size + 1e-3)
        return "" if gap <= allowed else f"by {gap:.2g} where the numbers reach {size:.2g}"

    def differ_in(self, one: tuple[Tensor, State], other: tuple[Tensor, State]) -> str:
        """The first difference between two results."""
        for name in other[1].tensors:
            if gap := self.differ(one[1].tensors[name], other[1].tensors[name]):
                return f"the state {name!r} differs {gap}"
        gap = self.differ(one[0], other[0])
        return f"outputs differ {gap}" if gap else ""


@dataclass(frozen=True)
class CellSubject(Subject):
    """One cell; ``run`` is its scan."""

    cell: Cell


@dataclass(frozen=True)
class ModelSubject(Subject):
    """A language model; ``run`` gives log-probabilities."""

    model: LanguageModel


Law: TypeAlias = Callable[[Any], Iterator[str]]


# What is declared.


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
    yield from _form_of_output("step", s, step.output, (_NUM_ROWS, s.output_size), "(batch, output_size)")
    yield from _form_of_state("step", s, step.state)
    for name, tensor in step.named.items():
        if not isinstance(tensor, Tensor) or tensor.shape[:1] != (_NUM_ROWS,):
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
    if outputs.shape == (_NUM_STEPS, _NUM_ROWS, s.output_size):
        yield f"{s.name} returns outputs with time and batch swapped: return (batch, time, output_size)"
        return
    yield from _form_of_output(s.name, s, outputs, (_NUM_ROWS, _NUM_STEPS, s.output_size), "(batch, time, output_size)")
    yield from _form_of_state(s.name, s, state.tensors)


def _reads_time_first(s: Subject) -> bool:
    try:
        outputs, _ = s.read(s.inputs.transpose(0, 1), s.initial)
    except Exception:  # then its fault is another one, which the caller reports
        return False
    return outputs.shape == (_NUM_STEPS, _NUM_ROWS, s.output_size)


def _form_of_output(where: str, s: Subject, output: Tensor, shape: tuple[int, ...], meaning: str) -> Iterator[str]:
    if output.shape != shape:
        yield f"{where} returns an output of shape {list(output.shape)}: it must be {list(shape)}, {meaning}"
    yield from _kept_dtype(f"the output of {where}", output, s.dtype)


def _form_of_state(where: str, s: Subject, state: Mapping[str, Tensor]) -> Iterator[str]:
    expected = s.initial.tensors
    if not isinstance(state, Mapping) or state.keys() != expected.keys():
        given = sorted(state) if isinstance(state, Mapping) else type(state).__name__
        yield f"{where} returns a state with the parts {given}: the parts declared are {sorted(expected)}"
        return
    for name, tensor in state.items():
        if tensor.shape != expected[name].shape:
            wanted = list(expected[name].shape)
            yield f"{where} returns the state {name!r} in the shape {list(tensor.shape)}: it must be {wanted}"
        yield from _kept_dtype(f"the state {name!r} of {where}", tensor, expected[name].dtype)


def _kept_dtype(what: str, tensor: Tensor, dtype: torch.dtype) -> Iterator[str]:
    if tensor.dtype != dtype:
        made = "make new tensors with the dtype of the inputs (new_zeros, zeros_like)"
        yield f"{what} is {_short(tensor.dtype)} where everything given is {_short(dtype)}: {made}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
        weight_BT = torch.arange(_NUM_ROWS * _NUM_STEPS, dtype=s.dtype).view_as(targets_BT) / 4
        if gap := s.differ(head.nll(features_BTF, targets_BT, weight_BT), expected_BT * weight_BT):
            yield f"head.nll with weights is not the loss times its weight: they differ {gap}"


# What it must not do.


def leaves_its_arguments_alone(s: Subject) -> Iterator[str]:
    """State, parameters and inputs of the caller are never changed."""
    yield from _changed(s.name, s, lambda state: s.run(s.parameters, s.inputs, State(state)))
    if isinstance(s, CellSubject):
        yield from _changed("step", s, lambda state: s.cell.step(s.parameters, s.inputs[:, 0], state))


def _changed(where: str, s: Subject, call: Callable[[dict[str, Tensor]], object]) -> Iterator[str]:
    state = dict(s.initial.map(Tensor.clone).tensors)
    given = {f"the caller's state {name!r}": tensor for name, tensor in state.items()}
    given |= {f"the parameter {name!r}": tensor for name, tensor in s.parameters.items()} | {"its input": s.inputs}
    before = {name: tensor.detach().clone() for name, tensor in given.items()}
    handed_in = dict(state)
    with torch.no_grad():
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
    for lengths in ((1,) * _NUM_STEPS, (2, 3), (4, 1)):
        whole, whole_gradients = _with_gradients(s, [_NUM_STEPS])
        pieces, gradients = _with_gradients(s, lengths)
        if gap := s.differ_in(pieces, whole):
            yield f"{s.name} in pieces and in one go: {gap}; start from the state given and return the last one"
            return
        for name, gradient in whole_gradients.items():
            if gap := s.differ(gradients[name], gradient):
                yield f"{s.name} in pieces and in one go: the gradient of {name!r} differs {gap}; detach nothing inside"
                return


def _with_gradients(s: Subject, lengths: Sequence[int]) -> tuple[tuple[Tensor, State], dict[str, Tensor]]:
    """Read the inputs in pieces: the result, and the gradient of every parameter."""
    parameters = _leaves(s.parameters)
    state = s.filled_state()
    outputs = []
    for piece in s.inputs.split(list(lengths), dim=1):
        output, state = s.run(parameters, piece, state)
        outputs.append(output)
    result = (torch.cat(outputs, dim=1), state)
    return (result[0].detach(), state.detach()), _gradients(_loss(*result), parameters)


def _leaves(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies that gradients can be taken for, but for integers, which have none."""
    return {name: t.detach().clone().requires_grad_(t.is_floating_point()) for name, t in tensors.items()}


def _loss(outputs: Tensor, state: State) -> Tensor:
    """A number that depends on all of a result."""
    floating = [tensor for tensor in (outputs, *state.tensors.values()) if tensor.is_floating_point()]
    return torch.stack([tensor.square().sum() for tensor in floating]).sum()


def _gradients(loss: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradient of every floating leaf, zeros where none arrives."""
    floating = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    if not floating or not loss.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in floating.items()}
    found = torch.autograd.grad(loss, list(floating.values()), allow_unused=True, retain_graph=True)
    return {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(floating.items(), found, strict=True)
    }


def rows(s: Subject) -> Iterator[str]:
    """Rows of a batch never influence each other, nor does their order or number."""
    state = s.filled_state()
    outputs, after = s.read(s.inputs, state)
    choices = {"alone": [[row] for row in range(_NUM_ROWS)], "in another order": [[2, 0, 1]], "twice": [[1, 1, 0, 2]]}
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
        parameters, state = _leaves(s.parameters), _leaves(s.filled_state().tensors)
        x = _leaves({"x": s.inputs})
        outputs, after = scan(parameters, x["x"], state)
        leaves = parameters | x | {f"state {name}": tensor for name, tensor in state.items()}
        found = _gradients(_loss(outputs, State(after)), leaves)
        results.append(((outputs.detach(), State(after).detach()), found))
    (fast, fast_gradients), (readable, readable_gradients) = results
    if gap := s.differ_in(fast, readable):
        yield f"scan and the step, once for each time: {gap}; the step is the definition"
        return
    for name, gradient in readable_gradients.items():
        if gap := s.differ(fast_gradients[name], gradient):
            yield f"scan and the step, once for each time: the gradient of {name!r} differs {gap}"


# What gradients do.


def detach(s: Subject) -> Iterator[str]:
    """A detached state lets no gradient through to what was read before."""
    parameters, x = _leaves(s.parameters), _leaves({"x": s.earlier})
    _, state = s.run(parameters, x["x"], s.initial)
    outputs, after = s.run(_leaves(s.parameters), s.inputs, state.detach())
    for name, gradient in _gradients(_loss(outputs, after), parameters | x).items():
        if gradient.any():
            yield f"a gradient leaks past detach to the earlier {name!r}: keep no tensor on the cell, carry it"
            return


def gradients(s: Subject) -> Iterator[str]:
    """Every parameter has a part in the result."""
    _, found = _with_gradients(s, [_NUM_STEPS])
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
    single = [state.select([row]) for row in range(_NUM_ROWS)]
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
    reset_BT = torch.zeros(_NUM_ROWS, _NUM_STEPS, dtype=torch.bool)
    reset_BT[0, 0] = reset_BT[1, 2] = reset_BT[2, 2] = reset_BT[2, 4] = True
    before = s.filled_state()
    with torch.no_grad():
        found = s.model.features(s.inputs, before, reset_BT)
        state, features = before, []
        for time in range(_NUM_STEPS):
            state = state.reset(reset_BT[:, time], s.initial)
            feature, state = s.model.features(s.inputs[:, time : time + 1], state)
            features.append(feature)
    if gap := s.differ_in(found, (torch.cat(features, dim=1), state)):
        yield f"resets inside a segment and one token at a time: {gap}"


def noise(s: ModelSubject) -> Iterator[str]:
    """The masks of an update are its key's: equal in every repetition, and the same for rows computed apart."""
    state = s.filled_state()

    def features(first: int, last: int) -> Tensor:
        key = Noise(seed=1, update=7, num_rows=_NUM_ROWS, first_row=first)
        with torch.no_grad():
            return s.model.features(s.inputs[first:last], state.select(range(first, last)), noise=key)[0]

    if gap := s.differ(torch.cat([features(0, 1), features(1, _NUM_ROWS)]), features(0, _NUM_ROWS)):
        yield f"dropout of a batch in pieces and in one go differs {gap}: draw masks from the noise handed in alone"


MODEL_LAWS: tuple[tuple[Law, ...], ...] = (
    (count, initial_state),
    (form,),
    (leaves_its_arguments_alone, repeats_itself),
    (probabilities, chunking, rows, detach, gradients, state_operations, resets_inside_a_segment, noise),
)
CELL_LAWS: tuple[tuple[Law, ...], ...] = (
    (count, initial_state),
    (form_of_step,),
    (form,),
    (leaves_its_arguments_alone,),
    (repeats_itself,),
    (chunking, rows, detach, state_operations),
    (fast_form, gradients),
)


def check_model(build: Callable[[torch.dtype], LanguageModel]) -> list[Finding]:
    """Hold a language model against the laws.

    Args:
        build: gives a new model of a dtype, the same one at every call.

    Returns:
        What is broken; nothing where every law is kept.
    """

    def subject(dtype: torch.dtype) -> ModelSubject:
        generator = torch.Generator().manual_seed(1)
        model = build(dtype)
        for parameter in model.parameters():
            parameter.data.add_(_nudge(parameter, generator))
        tokens_BT = torch.randint(model.vocab_size, (_NUM_ROWS, _NUM_EARLIER + _NUM_STEPS), generator=generator)

        def run(parameters: Mapping[str, Tensor], tokens_BT: Tensor, state: State) -> tuple[Tensor, State]:
            logits_BTV, state = functional_call(model, dict(parameters), (tokens_BT, state))
            return logits_BTV.log_softmax(-1), state

        return ModelSubject(
            name="the model",
            dtype=dtype,
            parameters={name: parameter.detach() for name, parameter in model.named_parameters()},
            earlier=tokens_BT[:, :_NUM_EARLIER],
            inputs=tokens_BT[:, _NUM_EARLIER:],
            initial=model.initial_state(_NUM_ROWS),
            run=run,
            output_size=model.vocab_size,
            model=model,
        )

    return _check(MODEL_LAWS, subject)


def check_cell(kind: str) -> list[Finding]:
    """Hold a cell against the laws, alone and in a model, in every option that its settings offer.

    Args:
        kind: a name, or a person's own ``./file.py:Class`` or ``package.module:Class``.

    Returns:
        What is broken, each law once; nothing where every law is kept.

    Raises:
        ConfigError: there is no such cell.
    """
    if not issubclass(find_cell(kind).Config, CellConfig):
        return [Finding("settings", "Config of the cell must be a class derived from elman.config.CellConfig")]
    try:
        configs = small_configs(kind)
    except ValidationError as error:
        fault = error.errors()[0]
        setting = ".".join(map(str, fault["loc"])) or "the settings"
        return [Finding("settings", f"{setting}: {fault['msg']}; each setting needs a default that is accepted")]
    findings: dict[str, Finding] = {}
    for config in configs:
        for finding in check_config(config):
            findings.setdefault(finding.law, finding)
    return list(findings.values())


def check_config(config: ModelConfig) -> list[Finding]:
    """Hold the model of these settings against the laws, and before it the cell that it is made of."""
    of_cell = _check(CELL_LAWS, partial(_cell_subject, config)) if isinstance(config, StackConfig) else []
    return of_cell or check_model(lambda dtype: build_model(config, _VOCAB_SIZE, seed=1, dtype=dtype))


def _cell_subject(config: StackConfig, dtype: torch.dtype) -> CellSubject:
    generator = torch.Generator().manual_seed(1)
    cell = find_cell(config.kind)(cast(CellConfig, config), config.embedding_size)
    parameters = {}
    for name, declared in cell.parameters().items():
        drawn = declared.initial.draw(declared.shape, generator, dtype)
        parameters[name] = drawn + _nudge(drawn, generator)
    x_BTI = torch.randn(_NUM_ROWS, _NUM_EARLIER + _NUM_STEPS, cell.input_size, generator=generator, dtype=dtype)
    declared_state = cell.state().items()

    def run(parameters: Mapping[str, Tensor], x_BTI: Tensor, state: State) -> tuple[Tensor, State]:
        outputs_BTH, parts = cell.scan(parameters, x_BTI, state.tensors)
        return outputs_BTH, State(parts)

    return CellSubject(
        name="scan",
        dtype=dtype,
        parameters=parameters,
        earlier=x_BTI[:, :_NUM_EARLIER],
        inputs=x_BTI[:, _NUM_EARLIER:],
        initial=State({n: torch.full((_NUM_ROWS, *p.shape), p.initial, dtype=dtype) for n, p in declared_state}),
        run=run,
        output_size=cell.output_size,
        cell=cell,
    )


def _nudge(like: Tensor, generator: torch.Generator) -> Tensor:
    """Small random numbers: a law that holds where biases are zero may not hold elsewhere."""
    return 0.1 * torch.randn(like.shape, generator=generator, dtype=like.dtype)


def small_configs(kind: str) -> list[ModelConfig]:
    """Small settings of a kind in which each option occurs alone and together with each other option."""
    fields = model_config_class(kind).model_fields
    base = {"kind": kind} | {name: value for name, value in _SMALL.items() if name in fields}
    options = [(name, value) for name, field in fields.items() for value in _other_values(field)]
    pairs = [(one, other) for one, other in combinations(options, 2) if one[0] != other[0]]
    chosen = [{}, {"num_layers": 1}, *({name: value} for name, value in options), *map(dict, pairs)]
    configs = []
    for settings in ({**base, **choice} for choice in chosen if choice.keys() <= fields.keys()):
        if settings.get("tie_weights") and not settings.get("output_projection"):
            settings["embedding_size"] = settings["hidden_size"]
        configs.append(model_config(settings))
    return configs


def _other_values(field: FieldInfo) -> list[Any]:
    """The values that a setting can be given beside its default, where they can be counted."""
    annotation = field.annotation
    if get_origin(annotation) is Literal:
        return [value for value in get_args(annotation) if value != field.default]
    if annotation is bool:
        return [not field.default]
    may_be_none = type(None) in get_args(annotation) and field.default is not None
    return [None] if may_be_none else []


def _check(stages: Sequence[Sequence[Law]], make: Callable[[torch.dtype], Subject]) -> list[Finding]:
    """The findings of the first stage that has any; each law gets a subject of its own."""
    for dtype in TOLERANCES:
        for stage in stages:
            findings = [finding for law in stage for finding in _broken(law, make, dtype)]
            if findings:
                return findings
    return []


def _broken(law: Law, make: Callable[[torch.dtype], Subject], dtype: torch.dtype) -> list[Finding]:
    name = law.__name__.replace("_", " ")
    try:
        return [Finding(name, text) for text in law(make(dtype))]
    except Exception as error:
        return [Finding(name, _in_one_line(error))]


def _in_one_line(error: Exception) -> str:
    """What was raised, and the last line of the cell's author that led to it."""
    ours = [Path(torch.__file__).parent, Path(__file__).parents[1]]
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not any(Path(f.filename).is_relative_to(folder) for folder in ours)]
    where = f"{Path(theirs[-1].filename).name} line {theirs[-1].lineno} raised " if theirs else ""
    return f"{where}{type(error).__name__}: {' '.join(str(error).split())[:300]}"
