"""A model on the CPU, a token at a time: its step compiled from its own definition, or PyTorch's where that cannot be.

Shape letters: B rows, V vocabulary.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from elman.engine import native
from elman.engine.graph import Array
from elman.engine.lower import Part, Precision, Program, lower
from elman.engine.native import DAMAGED, NOTHING_LEFT, STEP, Compiled
from elman.engine.packing import BLOCK, pack, round_up
from elman.engine.trace import CannotLower, trace
from elman.errors import ElmanError, UserError
from elman.models.contract import CountedModel, LanguageModel
from elman.models.kinds import build_model
from elman.models.state import State

Tokens: TypeAlias = NDArray[np.integer[Any]] | Sequence[int]
Logits: TypeAlias = NDArray[np.floating[Any]]
Carried = TypeVar("Carried")

_MIN_BYTES_IN_LOOP, _MIN_BYTES_OF_STEP = 1 << 20, 4 << 20
"""Of matrices for each thread. Threads that meet several times in a step cost some microseconds, which small matrices
do not pay for; to call them for one step alone costs more."""
_TOLERANCE = 1e-3


class Stepper(Protocol[Carried]):
    """Reads a token in each of several texts, and predicts the next."""

    def initial_state(self, num_rows: int) -> Carried:
        """The state before the first token."""

    def step(self, tokens_B: Tokens, state: Carried) -> tuple[Logits, Carried]:
        """Logits (B, V) of the tokens that come next, and the new state; the one given stays as it is."""

    def take(self, state: State) -> Carried:
        """A state of the model in the stepper's own form, which can ``select`` rows too."""

    def give(self, state: Carried) -> State:
        """The reverse of :meth:`take`."""


class TorchStepper:
    """PyTorch's form of a step, for every model on every device.

    Args:
        network: the model.
        reason: why it is not compiled.
    """

    def __init__(self, network: LanguageModel, reason: str = "") -> None:
        self._network = network
        self.reason = reason

    def initial_state(self, num_rows: int) -> State:
        """The state before the first token."""
        return self._network.initial_state(num_rows)

    def step(self, tokens_B: Tokens, state: State) -> tuple[Logits, State]:
        """Read a token in each row: logits (B, V) of the next ones, and the new state."""
        with torch.no_grad():
            tokens_BT = torch.as_tensor(np.asarray(tokens_B)[:, None], device=self._network.device)
            features_BTF, state = self._network.features(tokens_BT, state)
            logits_BV = self._network.head.logits(features_BTF)[:, 0].cpu()
        # NumPy has no bfloat16.
        return (logits_BV if logits_BV.dtype == torch.float64 else logits_BV.float()).numpy(), state

    def take(self, state: State) -> State:
        """The state itself."""
        return state

    def give(self, state: State) -> State:
        """The state itself."""
        return state


@dataclass(frozen=True)
class EngineState:
    """The state of an engine as a value: a row for each text, without gaps in memory."""

    numbers: NDArray[np.float32]
    """(B, all parts of numbers)."""
    ints: NDArray[np.int64]
    """(B, all parts of integers)."""

    def select(self, rows: Sequence[int]) -> EngineState:
        """The given rows, in the given order; a row may be taken more than once."""
        return EngineState(self.numbers[list(rows)], self.ints[list(rows)])

    @staticmethod
    def stack(states: Sequence[EngineState]) -> EngineState:
        """The rows of several states, one below the other."""
        return EngineState(np.concatenate([s.numbers for s in states]), np.concatenate([s.ints for s in states]))


@dataclass(frozen=True)
class Drawing:
    """How tokens are drawn from one row of logits alone; :mod:`elman.choosing` says what each setting does."""

    boundary_id: int
    """The token that ends a text; -1: none does."""
    never: tuple[int, ...] = ()
    """Tokens that are ruled out."""
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class Drawn(NamedTuple):
    """What came of drawing a text."""

    tokens: list[int]
    """The boundary is the last of them where it was drawn."""
    logits_V: NDArray[np.float32]
    """Of the token after these, the boundary not counted."""
    state: EngineState
    error: ElmanError | None
    """Why no token came after these, though more were asked for."""


def damaged() -> ElmanError:
    """The logits are no numbers."""
    return ElmanError("the model's logits hold NaN or infinity: its weights are damaged or training diverged")


def nothing_left() -> ElmanError:
    """There is no token to draw."""
    return UserError("no token is left: penalties, bans and min_new_tokens rule out all; loosen one of them")


class _OfThread:
    """What one thread writes into, and where it lies."""

    def __init__(self, program: Program, num_rows: int, thread: int) -> None:
        others = num_rows if thread else 0  # the first writes into what the call gives out
        self.state = np.zeros((2, num_rows, program.state_size), np.float32)
        self.ints = np.zeros((2, num_rows, program.ints_size), np.int64)
        self.done = np.zeros(1, np.int64)
        self._own = (
            np.zeros(num_rows * program.work_size, np.float32),
            np.zeros(num_rows * program.inputs_size, np.int16),
            np.zeros(num_rows, np.float32),
            np.zeros((0 if program.logits_are_shared else others, program.logits_size), np.float32),
            np.zeros(2, np.int64),
        )
        self.at_state, self.at_ints, self.at_done = _at(self.state), _at(self.ints), _at(self.done)
        self.at_work, self.at_inputs, self.at_scales, self.at_logits, self.at_result = (_at(own) for own in self._own)
        self.result = self._own[-1]


class _Scratch:
    """Memory of one call."""

    def __init__(self, program: Program, num_rows: int, num_threads: int) -> None:
        self.num_rows = num_rows
        self.arrivals = np.zeros(1, np.int64)
        self._shared = np.zeros(num_rows * program.shared_size, np.float32)
        self.of_thread = [_OfThread(program, num_rows, thread) for thread in range(num_threads)]
        self.at_arrivals, self.at_shared = _at(self.arrivals), _at(self._shared)


def _at(array: Array) -> int:
    address: int = array.ctypes.data
    return address


class Engine:
    """The compiled step of a model, with a copy of its weights: what the model learns later is not in it.

    A row's numbers are the same to the last bit alone, in any batch, and with any number of threads. One engine may be
    used by several threads at once. :attr:`path` is the generated file.

    Args:
        network: a model with float32 parameters.
        precision: of its matrices; int8 keeps a scale for each row, and what they are multiplied by in 16 bits.
        num_threads: how many work on one step; none: as many as PyTorch uses, where the model is large enough.

    Raises:
        CannotLower: the step has no compiled form; the message says why.
    """

    def __init__(
        self, network: LanguageModel, *, precision: Precision = "float32", num_threads: int | None = None
    ) -> None:
        if num_threads is not None and num_threads < 1:
            raise UserError(f"num_threads is {num_threads}; accepted: 1 or more")
        self.program = _program(network, precision)
        parameters = {name: parameter.detach().numpy() for name, parameter in network.named_parameters()}
        program = self.program
        self._numbers, self._codes = pack(
            program.graph, program.packed, program.num_numbers, program.num_codes, parameters
        )
        self._at_numbers, self._at_codes = _at(self._numbers), _at(self._codes)
        self.path, self._at_step = _load(program.source)
        self._step = native.function(self._at_step, tuple(STEP.values()))
        self._kernels = native.kernels()
        pays = [max(1, program.weight_bytes // least) for least in (_MIN_BYTES_IN_LOOP, _MIN_BYTES_OF_STEP)]
        self.num_threads, self._threads_of_step = (num_threads or min(torch.get_num_threads(), most) for most in pays)
        self._crew = _Crew(self.num_threads)
        self._free: list[_Scratch] = []
        self._backwards = 0  # 1 where the last step read its matrices from the end
        self._initial = self.take(network.initial_state(1))
        if precision == "float32":
            self._compare(network)
        else:  # rounded numbers cannot be held against the model's; those of the same step in float32 can
            Engine(network, num_threads=1)

    def initial_state(self, num_rows: int) -> EngineState:
        """The state before the first token."""
        return self._initial.select([0] * num_rows)

    def step(self, tokens_B: Tokens, state: EngineState) -> tuple[NDArray[np.float32], EngineState]:
        """Read a token in each row: logits (B, V) of the next ones, and the new state.

        Raises:
            UserError: a token, or one in the state, is not in the vocabulary.
        """
        tokens, num_rows, program = np.array(tokens_B, dtype=np.int64), len(state.numbers), self.program
        if tokens.shape != (num_rows,):
            raise UserError(f"tokens of the shape {list(tokens.shape)} for {num_rows} texts: give one for each")
        logits = np.empty((num_rows, program.logits_size), np.float32)
        after = EngineState(
            np.empty((num_rows, program.state_size), np.float32), np.empty((num_rows, program.ints_size), np.int64)
        )
        scratch = self._scratch(num_rows)
        given = (_at(tokens), _at(state.ints), _at(state.numbers))
        at_ints, at_numbers, at_logits = _at(after.ints), _at(after.numbers), _at(logits)
        backwards = self._backwards = 1 - self._backwards

        def part(thread: int) -> int:
            own = scratch.of_thread[thread]
            self._step(
                own.at_result, own.at_result + 8, self._at_numbers, self._at_codes, *given,
                own.at_ints if thread else at_ints, own.at_state if thread else at_numbers,
                own.at_logits if thread and not program.logits_are_shared else at_logits,
                own.at_work, scratch.at_shared, own.at_inputs, own.at_scales, scratch.at_arrivals,
                0, num_rows, thread, self._threads_of_step, backwards,
            )  # fmt: skip
            return int(own.result[0])

        fault = self._crew.run(part, scratch, self._threads_of_step)
        self._free.append(scratch)
        if fault:
            raise self._outside()
        return logits, after

    def read(self, tokens: Sequence[int], state: EngineState) -> tuple[NDArray[np.float32], EngineState]:
        """Read several tokens of one text: logits (V,) of the next one, and the new state.

        Raises:
            UserError: a token, or one in the state, is not in the vocabulary; there is no token.
        """
        if not tokens:
            raise UserError("there is no token to read: give one or more")
        nothing = np.zeros(self.program.logits_size, np.float32)
        drawn = self._go_on(nothing, state, Drawing(-1), np.zeros(len(tokens)), np.array(tokens, np.int64), 0)
        return drawn.logits_V, drawn.state

    def draw(
        self,
        logits_V: Logits,
        state: EngineState,
        how: Drawing,
        uniforms_T: NDArray[np.float64],
        *,
        num_before_end: int = 0,
    ) -> Drawn:
        """Go on with a text by so many tokens as there are numbers that decide them, or to the boundary.

        Args:
            logits_V: of the first of them.
            state: what was read before, one row.
            how: the settings.
            uniforms_T: in [0, 1); a token is the first whose cumulative probability exceeds its number.
            num_before_end: the boundary is ruled out for so many tokens.

        Raises:
            UserError: a token in the state is not in the vocabulary.
        """
        return self._go_on(logits_V, state, how, uniforms_T, np.empty(0, np.int64), num_before_end)

    def _go_on(
        self,
        logits_V: Logits,
        state: EngineState,
        how: Drawing,
        uniforms_T: NDArray[np.float64],
        given: NDArray[np.int64],
        num_before_end: int,
    ) -> Drawn:
        """Read the given tokens, or draw as many as there are numbers that decide them."""
        program = self.program
        if len(state.numbers) != 1 or np.shape(logits_V) != (program.logits_size,):
            raise UserError(
                f"logits of the shape {list(np.shape(logits_V))} and a state of {len(state.numbers)} texts: "
                "give those of one"
            )
        count = len(uniforms_T)
        tokens = np.empty(count, np.int64)
        tokens[: len(given)] = given
        logits = np.array(logits_V, np.float32)
        uniforms = np.ascontiguousarray(uniforms_T, np.float64)
        memory, settings = _drawing(how, program.logits_size)
        scratch = self._scratch(1)
        for own in scratch.of_thread:
            own.state[0], own.ints[0] = state.numbers, state.ints
        at_tokens, at_logits, at_memory, at_uniforms = _at(tokens), _at(logits), list(map(_at, memory)), _at(uniforms)

        def part(thread: int) -> int:
            own = scratch.of_thread[thread]
            self._kernels["generate"](
                own.at_result, own.at_result + 8, self._at_step, program.num_meetings, self._at_numbers, self._at_codes,
                at_tokens, own.at_ints, program.ints_size, own.at_state, program.state_size,
                own.at_logits if thread and not program.logits_are_shared else at_logits, program.logits_size,
                own.at_work, scratch.at_shared, own.at_inputs, own.at_scales, scratch.at_arrivals,
                *at_memory, *settings, at_uniforms, num_before_end, len(given), count, thread, self.num_threads,
                own.at_done,
            )  # fmt: skip
            return int(own.done[0])

        num_read = self._crew.run(part, scratch, self.num_threads)
        first = scratch.of_thread[0]
        after = EngineState(first.state[num_read % 2].copy(), first.ints[num_read % 2].copy())
        self._free.append(scratch)
        if num_read < 0:
            raise self._outside()
        drawn = tokens[: num_read + 1].tolist()
        error = _ERRORS[drawn.pop()]() if drawn[-1:] and drawn[-1] < 0 else None
        return Drawn(drawn, logits, after, error)

    def _outside(self) -> UserError:
        return UserError(f"a token is outside the vocabulary; accepted: 0 to {self.program.logits_size - 1}")

    def take(self, state: State) -> EngineState:
        """A state of the model in the engine's own form."""
        num_rows = max((len(tensor) for tensor in state.tensors.values()), default=1)
        numbers = np.empty((num_rows, self.program.state_size), np.float32)
        ints = np.empty((num_rows, self.program.ints_size), np.int64)
        for name, part in self.program.parts.items():
            of_part = state.tensors[name].detach().cpu().numpy().reshape(num_rows, -1)
            (ints if part.is_integer else numbers)[:, part.span] = of_part
        return EngineState(numbers, ints)

    def give(self, state: EngineState) -> State:
        """The reverse of :meth:`take`."""

        def tensor(part: Part) -> torch.Tensor:
            of_part = (state.ints if part.is_integer else state.numbers)[:, part.span]
            return torch.from_numpy(of_part.reshape(len(of_part), *part.shape).copy())

        return State({name: tensor(part) for name, part in self.program.parts.items()})

    def _scratch(self, num_rows: int) -> _Scratch:
        """Memory that an earlier call has left, where it is of this size."""
        with contextlib.suppress(IndexError):  # another thread may have taken the last
            scratch = self._free.pop()
            if scratch.num_rows == num_rows:
                return scratch
        return _Scratch(self.program, num_rows, self.num_threads)

    def _compare(self, network: LanguageModel) -> None:
        """Hold the first tokens against the model itself: a step that goes around PyTorch was not traced whole."""
        state, ours = network.initial_state(1), self._initial
        for token in (network.boundary_id, network.vocab_size - 1):
            with torch.no_grad():
                features_BF, state = network.step(torch.tensor([token]), state)
                expected_V = network.head.logits(features_BF.unsqueeze(1))[0, 0].numpy()
            logits_BV, ours = self.step([token], ours)
            if np.isfinite(expected_V).all():
                gap = np.abs(logits_BV[0] - expected_V).max()
                if not gap <= _TOLERANCE * max(1.0, float(np.abs(expected_V).max())):
                    raise CannotLower("its compiled step gives other numbers than PyTorch's: not all of it was traced")


_ERRORS = {DAMAGED: damaged, NOTHING_LEFT: nothing_left}


def _drawing(how: Drawing, size: int) -> tuple[list[Array], tuple[float, ...]]:
    """Memory for the kernels that draw, and what else they take."""
    if not (-1 <= how.boundary_id < size and all(0 <= token < size for token in how.never)):
        raise UserError(f"a boundary or a token that is ruled out is outside the vocabulary; accepted: 0 to {size - 1}")
    scores = np.full(round_up(size, BLOCK), -np.inf, np.float32)
    never = np.array(how.never, np.int64)
    memory: list[Array] = [scores, np.empty(size), np.empty(size, np.int64), never]
    return memory, (len(never), how.boundary_id, how.temperature, how.top_k, how.top_p, how.min_p)


def draw_rows(logits_BV: Logits, how: Drawing, uniforms_B: NDArray[np.float64], may_end_B: Sequence[bool]) -> list[int]:
    """The next token of each row, as :meth:`Engine.draw` draws it.

    Raises:
        ElmanError: the logits of a row hold NaN or infinity, or all its tokens are ruled out.
    """
    num_rows, size = logits_BV.shape
    logits = np.ascontiguousarray(logits_BV, np.float32)
    uniforms, may_end = np.ascontiguousarray(uniforms_B, np.float64), np.array(may_end_B, np.int64)
    tokens, result = np.empty(num_rows, np.int64), np.zeros(2, np.int64)
    memory, settings = _drawing(how, size)
    native.kernels()["choose"](
        _at(result), _at(result) + 8, _at(logits), size, num_rows, *map(_at, memory), *settings, _at(may_end),
        _at(uniforms), _at(tokens),
    )  # fmt: skip
    for token in (DAMAGED, NOTHING_LEFT):
        if token in tokens:
            raise _ERRORS[token]()
    chosen: list[int] = tokens.tolist()
    return chosen


class _Crew:
    """Threads that work on one step together; on one step at a time, because each waits for the others."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0

    def run(self, part: Callable[[int], int], scratch: _Scratch, num_threads: int) -> int:
        """Call a function with the number of each thread, from 0; what it gave to the first."""
        if num_threads == 1:
            return part(0)
        scratch.arrivals[0] = 0
        with self._lock:
            if self._pool is None or self._process != os.getpid():  # a forked process has none of the threads
                self._pool, self._process = ThreadPoolExecutor(self._most - 1), os.getpid()
            waiting = [self._pool.submit(part, thread) for thread in range(1, num_threads)]
            fault = part(0)
            for other in waiting:
                other.result()
        return fault


def _program(network: LanguageModel, precision: Precision = "float32") -> Program:
    if isinstance(network, CountedModel):
        raise CannotLower("its tables are read by compiled code of their own")
    if network.device.type != "cpu":
        raise CannotLower(f"it is on the device {network.device}, and compiled steps run on the CPU")
    if network.dtype != torch.float32:
        raise CannotLower(f"its parameters are {network.dtype}, and compiled steps compute in torch.float32")
    shapes = {name: tuple(tensor.shape[1:]) for name, tensor in network.initial_state(1).tensors.items()}
    return lower(trace(network), shapes, precision)


@cache
def _load(source: str) -> tuple[Path, int]:
    """Write a generated file where the user's caches are; the file, and the address of its compiled step."""
    name = f"elman_step_{hashlib.sha256(native.sources().encode() + source.encode()).hexdigest()[:24]}"
    native.kernels()  # which the step calls
    path = native.folder() / f"{name}.py"
    try:
        _write(path, source)
    except OSError:  # the folder cannot be written: it is compiled anew in each process
        path = Path(tempfile.mkdtemp(prefix="elman-engine-")) / f"{name}.py"
        _write(path, source)

    def compiled() -> dict[str, Compiled]:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ElmanError(f"the generated file {str(path)!r} cannot be imported")
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return {"step": native.compiled(module.step, tuple(STEP.values()), "int64")}

    found = native.kept(path.with_name(f"{name}.{native.machine()}.code"), compiled)
    return path, native.link(found["step"])


def _write(path: Path, source: str) -> None:
    if not path.is_file() or path.read_text(encoding="utf-8") != source:
        native.write(path, source.encode())


AnyStepper: TypeAlias = Engine | TorchStepper
"""What :func:`stepper` gives."""


def stepper(
    network: LanguageModel, *, precision: Precision | None = None, num_threads: int | None = None
) -> AnyStepper:
    """The fastest form of a model's step: compiled where it can be, else PyTorch's.

    Args:
        network: the model.
        precision: of the matrices; none: the model's own.
        num_threads: how many threads work on one compiled step; none: as many as pay.

    Raises:
        CannotLower: a precision was asked for that only a compiled step has, and there is none.
    """
    try:
        return Engine(network, precision=precision or "float32", num_threads=num_threads)
    except CannotLower as error:
        if precision == "int8":
            raise CannotLower(f"int8 is for compiled steps, and this model has none ({error})") from error
        return TorchStepper(network, str(error))


class Capability(NamedTuple):
    """What becomes of the step of a kind of model."""

    level: Literal["native", "fallback"]
    """Compiled, or PyTorch's."""
    reason: str = ""
    """Why it is PyTorch's, or whose compiled code it is."""


def capability(kind: str) -> Capability:
    """Whether a kind has a compiled step, found by generating those of small models with every option."""
    from elman.models.laws import small_configs  # here, because it brings in more than a step needs

    for config in small_configs(kind):
        network = build_model(config, 11, seed=1, dtype=torch.float32)
        try:
            _program(network)
        except CannotLower as error:
            return Capability("native" if isinstance(network, CountedModel) else "fallback", str(error))
    return Capability("native")
