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
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from elman.engine.graph import Array
from elman.engine.lower import Part, Precision, Program, lower, pack
from elman.engine.trace import CannotLower, trace
from elman.errors import ElmanError, UserError
from elman.models.contract import LanguageModel
from elman.models.kinds import build_model
from elman.models.laws import small_configs
from elman.models.state import State
from elman.text.corpora import cache_folder

Logits: TypeAlias = NDArray[np.floating[Any]]
Carried = TypeVar("Carried")

_MIN_BYTES_PER_THREAD = 1 << 20
"""Two threads that meet several times in a step cost some microseconds, which smaller matrices do not pay for."""
_TOLERANCE = 1e-3


class Stepper(Protocol[Carried]):
    """Reads a token in each of several texts, and predicts the next."""

    def initial_state(self, num_rows: int) -> Carried:
        """The state before the first token."""

    def step(self, tokens_B: Array | Sequence[int], state: Carried) -> tuple[Logits, Carried]:
        """Logits (B, V) of the tokens that come next, and the new state; the one given stays as it is."""

    def take(self, state: State) -> Carried:
        """A state of the model in the stepper's own form."""

    def give(self, state: Carried) -> State:
        """The reverse of :meth:`take`."""


class TorchStepper:
    """PyTorch's form of a step, for every model on every device."""

    def __init__(self, network: LanguageModel, reason: str = "") -> None:
        self._network = network
        self.reason = reason
        """Why it is used, where another was asked for."""

    def initial_state(self, num_rows: int) -> State:
        """The model's own."""
        return self._network.initial_state(num_rows)

    def step(self, tokens_B: Array | Sequence[int], state: State) -> tuple[Logits, State]:
        """Read a token in each row."""
        with torch.no_grad():
            tokens_BT = torch.as_tensor(np.asarray(tokens_B)[:, None], device=self._network.device)
            features_BTF, state = self._network.features(tokens_BT, state)
            return self._network.head.logits(features_BTF)[:, 0].float().cpu().numpy(), state

    def take(self, state: State) -> State:
        """The state itself."""
        return state

    def give(self, state: State) -> State:
        """The state itself."""
        return state


@dataclass(frozen=True)
class EngineState:
    """The state of an engine as a value: a row for each text."""

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


class _Scratch(NamedTuple):
    """What the threads of one call write into."""

    work: Array
    shared: Array
    inputs: Array
    input_scales: Array
    other_logits: Array
    other_state: Array


class Engine:
    """The compiled step of a model, with a copy of its weights: what the model learns later is not in it.

    A row's numbers are the same to the last bit alone, in any batch, and with any number of threads. One engine may be
    used by several threads at once.

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
        if network.dtype != torch.float32:
            raise CannotLower(f"its parameters are {network.dtype}, the engine computes in torch.float32")
        if num_threads is not None and num_threads < 1:
            raise UserError(f"num_threads is {num_threads}; accepted: 1 or more")
        first = network.initial_state(1).tensors
        shapes = {name: tuple(tensor.shape[1:]) for name, tensor in first.items()}
        self._program = lower(trace(network), shapes, precision)
        self._numbers, self._codes = pack(
            self._program, {name: p.detach().cpu().numpy() for name, p in network.named_parameters()}
        )
        self.path, self._step = _load(self._program.source)
        self._vocab_size = self._program.logits_size
        large = max(1, self._program.weight_bytes // _MIN_BYTES_PER_THREAD)
        self.num_threads = num_threads or min(torch.get_num_threads(), large)
        self._crew = _Crew(self.num_threads)
        self._free: list[_Scratch] = []
        self._initial = self.take(State(first))
        self._compare(network, State(first))

    @property
    def program(self) -> Program:
        """The generated step and what it was generated from."""
        return self._program

    def initial_state(self, num_rows: int) -> EngineState:
        """The state before the first token."""
        return self._initial.select([0] * num_rows)

    def step(self, tokens_B: Array | Sequence[int], state: EngineState) -> tuple[NDArray[np.float32], EngineState]:
        """Read a token in each row: logits (B, V) of the next ones, and the new state.

        Raises:
            UserError: a token, or one in the state, is not in the vocabulary.
        """
        tokens = np.ascontiguousarray(tokens_B, dtype=np.int64)
        num_rows, program = len(tokens), self._program
        if tokens.shape != (len(state.numbers),):
            raise UserError(f"{tokens.shape} tokens for a state of {len(state.numbers)} rows: give one for each")
        logits = np.empty((num_rows, self._vocab_size), np.float32)
        new_state = np.empty((num_rows, program.state_size), np.float32)
        new_ints = np.empty((num_rows, program.ints_size), np.int64)
        scratch = self._scratch(num_rows)
        num_threads = self.num_threads
        arrivals = np.zeros(1, np.int64)

        def part(thread: int) -> int:
            mine = thread == 0
            return self._step(
                self._numbers, self._codes, tokens, state.ints.ravel(), state.numbers.ravel(), new_ints.ravel(),
                (new_state if mine else scratch.other_state[thread]).ravel(),
                (logits if mine or program.logits_are_shared else scratch.other_logits[thread]).ravel(),
                scratch.work[thread], scratch.shared, scratch.inputs[thread], scratch.input_scales[thread],
                arrivals, num_rows, thread, num_threads,
            )  # fmt: skip

        fault = part(0) if num_threads == 1 else self._crew.run(part)
        self._free.append(scratch)
        if fault:
            raise UserError(f"a token is outside the vocabulary; accepted: 0 to {self._vocab_size - 1}")
        return logits, EngineState(new_state, new_ints)

    def take(self, state: State) -> EngineState:
        """A state of the model in the engine's own form."""
        rows = {len(tensor) for tensor in state.tensors.values()}
        numbers = np.empty((max(rows, default=1), self._program.state_size), np.float32)
        ints = np.empty((len(numbers), self._program.ints_size), np.int64)
        for name, part in self._program.parts.items():
            of_part = state.tensors[name].detach().cpu().numpy().reshape(len(numbers), -1)
            (ints if part.is_integer else numbers)[:, part.span] = of_part
        return EngineState(numbers, ints)

    def give(self, state: EngineState) -> State:
        """The reverse of :meth:`take`, on the CPU."""

        def tensor(part: Part) -> torch.Tensor:
            rows = (state.ints if part.is_integer else state.numbers)[:, part.span]
            return torch.from_numpy(rows.reshape(len(rows), *part.shape).copy())

        return State({name: tensor(part) for name, part in self._program.parts.items()})

    def _scratch(self, num_rows: int) -> _Scratch:
        """Memory that an earlier call has left, where it is of this size."""
        with contextlib.suppress(IndexError):  # another thread may have taken the last
            scratch = self._free.pop()
            if scratch.input_scales.shape[1] == num_rows:
                return scratch
        program, threads = self._program, self.num_threads
        others = threads if threads > 1 else 0
        return _Scratch(
            np.zeros((threads, num_rows * program.work_size), np.float32),
            np.zeros(num_rows * program.shared_size, np.float32),
            np.zeros((threads, num_rows * program.inputs_size), np.int16),
            np.zeros((threads, num_rows), np.float32),
            np.zeros((0 if program.logits_are_shared else others, num_rows * self._vocab_size), np.float32),
            np.zeros((others, num_rows * program.state_size), np.float32),
        )

    def _compare(self, network: LanguageModel, state: State) -> None:
        """Hold the first tokens against the model itself: a step that went around PyTorch was not traced whole."""
        ours = self._initial
        for token in (network.boundary_id, self._vocab_size - 1):
            with torch.no_grad():
                features_BF, state = network.step(torch.tensor([token], device=network.device), state)
                expected = network.head.logits(features_BF.unsqueeze(1))[0, 0].cpu().numpy()
            found, ours = self.step([token], ours)
            size = np.abs(expected).max() if np.isfinite(expected).all() else np.inf
            if self._program.precision == "float32" and np.isfinite(size):
                if not np.abs(found[0] - expected).max() <= _TOLERANCE * max(1.0, float(size)):
                    raise CannotLower("its compiled step gives other numbers than PyTorch: it is not traced whole")


class _Crew:
    """Threads that work on one step together; a step at a time, because each waits for the others."""

    def __init__(self, num_threads: int) -> None:
        self._others = num_threads - 1
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0

    def run(self, part: Callable[[int], int]) -> int:
        """Call a function with the number of each thread, from 0; what the first gives."""
        with self._lock:
            if self._pool is None or self._process != os.getpid():  # a forked process has no threads
                self._pool, self._process = ThreadPoolExecutor(self._others), os.getpid()
            waiting = [self._pool.submit(part, thread) for thread in range(1, self._others + 1)]
            fault = part(0)
            for other in waiting:
                other.result()
        return fault


@cache
def _load(source: str) -> tuple[Path, Callable[..., int]]:
    """Write a generated file where the user's caches are, and import it; Numba keeps what it compiles beside it."""
    made_of = Path(__file__).with_name("lanes.py").read_bytes() + source.encode()
    name = f"step_{hashlib.sha256(made_of).hexdigest()[:24]}"
    path = _write(cache_folder() / "engine", f"{name}.py", source)
    spec = importlib.util.spec_from_file_location(f"elman_engine_{name}", path)
    if spec is None or spec.loader is None:
        raise ElmanError(f"the generated file {str(path)!r} cannot be imported")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # Numba's cache looks it up there
    spec.loader.exec_module(module)
    return path, module.step


def _write(folder: Path, name: str, source: str) -> Path:
    with contextlib.suppress(OSError):
        return _written(folder, name, source)
    return _written(Path(tempfile.mkdtemp(prefix="elman-engine-")), name, source)


def _written(folder: Path, name: str, source: str) -> Path:
    path = folder / name
    if not path.is_file() or path.read_text(encoding="utf-8") != source:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=folder, suffix=".py", delete=False) as file:
            file.write(source)
        Path(file.name).replace(path)
    return path


def stepper(
    network: LanguageModel, *, precision: Precision | None = None, num_threads: int | None = None
) -> Engine | TorchStepper:
    """The fastest form of a model's step: compiled on the CPU where it can be, else PyTorch's.

    Args:
        network: the model.
        precision: of the matrices; none: float32.
        num_threads: how many threads work on one step; none: as many as pay.

    Raises:
        CannotLower: a precision was asked for that only the compiled form has, and there is none.
    """
    try:
        if network.device.type != "cpu":
            raise CannotLower(f"it is on the device {network.device}, the engine runs on the CPU")
        return Engine(network, precision=precision or "float32", num_threads=num_threads)
    except CannotLower as error:
        if precision not in (None, "float32"):
            raise
        return TorchStepper(network, str(error))


class Capability(NamedTuple):
    """What an engine makes of a kind of model."""

    level: Literal["native", "fallback"]
    reason: str = ""
    """Why it is not native."""


def capability(kind: str) -> Capability:
    """Whether a kind has a compiled step, found by lowering small models of it in every option."""
    for config in small_configs(kind):
        network = build_model(config, 11, seed=1, dtype=torch.float32)
        try:
            lower(trace(network), {name: tuple(t.shape[1:]) for name, t in network.initial_state(1).tensors.items()})
        except CannotLower as error:
            return Capability("fallback", str(error))
    return Capability("native")


__all__ = ["Capability", "Engine", "EngineState", "Generic", "Stepper", "TorchStepper", "capability", "stepper"]
