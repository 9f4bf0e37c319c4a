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
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from elman.engine.graph import Array
from elman.engine.lower import Part, Precision, Program, lower
from elman.engine.packing import pack
from elman.engine.trace import CannotLower, trace
from elman.errors import ElmanError, UserError
from elman.models.contract import CountedModel, LanguageModel
from elman.models.kinds import build_model
from elman.models.state import State
from elman.text.corpora import cache_folder

Tokens: TypeAlias = NDArray[np.integer[Any]] | Sequence[int]
Logits: TypeAlias = NDArray[np.floating[Any]]
Carried = TypeVar("Carried")

_MIN_BYTES_PER_THREAD = 4 << 20
"""Threads that meet several times in a step cost some microseconds each time, which small matrices do not pay for."""
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


class _OfThread(NamedTuple):
    """What one thread writes into."""

    work: Array
    inputs: Array
    input_scales: Array
    state: Array
    ints: Array
    logits: Array


class _Scratch(NamedTuple):
    """Memory of one call."""

    num_rows: int
    shared: Array
    arrivals: Array
    of_thread: list[_OfThread]


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
        self.path, self._step = _load(program.source)
        pays = max(1, program.weight_bytes // _MIN_BYTES_PER_THREAD)
        self.num_threads = num_threads or min(torch.get_num_threads(), pays)
        self._crew = _Crew(self.num_threads)
        self._free: list[_Scratch] = []
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
        if self.num_threads == 1:
            fault = self._part(scratch, tokens, state, after, logits, 0)
        else:
            scratch.arrivals[0] = 0
            fault = self._crew.run(partial(self._part, scratch, tokens, state, after, logits))
        self._free.append(scratch)
        if fault:
            raise UserError(f"a token is outside the vocabulary; accepted: 0 to {program.logits_size - 1}")
        return logits, after

    def _part(
        self, scratch: _Scratch, tokens: Array, before: EngineState, after: EngineState, logits: Array, thread: int
    ) -> int:
        """What one thread does of a step; what all compute alike, all but the first leave in their scratch."""
        own = scratch.of_thread[thread]
        return self._step(
            self._numbers, self._codes, tokens, before.ints, before.numbers,
            own.ints if thread else after.ints,
            own.state if thread else after.numbers,
            own.logits if thread and not self.program.logits_are_shared else logits,
            own.work, scratch.shared, own.inputs, own.input_scales, scratch.arrivals,
            len(tokens), thread, self.num_threads,
        )  # fmt: skip

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
        program = self.program

        def of_thread(thread: int) -> _OfThread:
            others = num_rows if thread else 0
            return _OfThread(
                np.zeros(num_rows * program.work_size, np.float32),
                np.zeros(num_rows * program.inputs_size, np.int16),
                np.zeros(num_rows, np.float32),
                np.zeros((others, program.state_size), np.float32),
                np.zeros((others, program.ints_size), np.int64),
                np.zeros((0 if program.logits_are_shared else others, program.logits_size), np.float32),
            )

        shared = np.zeros(num_rows * program.shared_size, np.float32)
        return _Scratch(num_rows, shared, np.zeros(1, np.int64), [of_thread(t) for t in range(self.num_threads)])

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


class _Crew:
    """Threads that work on one step together; on one step at a time, because each waits for the others."""

    def __init__(self, num_threads: int) -> None:
        self._others = num_threads - 1
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0

    def run(self, part: Callable[[int], int]) -> int:
        """Call a function with the number of each thread, from 0; what it gave to the first."""
        with self._lock:
            if self._pool is None or self._process != os.getpid():  # a forked process has none of the threads
                self._pool, self._process = ThreadPoolExecutor(self._others), os.getpid()
            waiting = [self._pool.submit(part, thread) for thread in range(1, self._others + 1)]
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
def _load(source: str) -> tuple[Path, Callable[..., int]]:
    """Write a generated file where the user's caches are, and import it; Numba keeps what it compiles beside it."""
    made_of = Path(__file__).with_name("lanes.py").read_bytes() + source.encode()
    name = f"elman_step_{hashlib.sha256(made_of).hexdigest()[:24]}"
    try:
        path = _written(cache_folder() / "engine" / f"{name}.py", source)
    except OSError:  # the folder cannot be written: it is compiled anew in each process
        path = _written(Path(tempfile.mkdtemp(prefix="elman-engine-")) / f"{name}.py", source)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ElmanError(f"the generated file {str(path)!r} cannot be imported")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # Numba's cache looks it up there
    spec.loader.exec_module(module)
    return path, module.step


def _written(path: Path, source: str) -> Path:
    if not path.is_file() or path.read_text(encoding="utf-8") != source:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
            file.write(source)
        Path(file.name).replace(path)
    return path


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
