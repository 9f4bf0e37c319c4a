"""Machine code: Numba compiles a function once on a machine; from then on it is loaded and called without Numba.

To import Numba takes most of the time that a first token may take; LLVM's loader, which it stands on, takes little. A
file of code is a safetensors file: for each function its object file, and in the metadata the symbol that it has there
and a digest. The name of the file holds a digest of what it was made from, and one of the processor.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from elman.files import write_atomically
from elman.text.corpora import cache_folder

Kinds: TypeAlias = tuple[str, ...]
"""Of arguments: ``float32*`` and the like for pointers, ``int64``, ``float32`` and ``float64`` for numbers."""

STEP = {
    "numbers": "float32*",
    "codes": "int8*",
    "tokens": "int64*",
    "ints": "int64*",
    "state": "float32*",
    "new_ints": "int64*",
    "new_state": "float32*",
    "logits": "float32*",
    "work": "float32*",
    "shared": "float32*",
    "inputs": "int16*",
    "input_scales": "float32*",
    "arrivals": "int64*",
    "met": "int64",
    "rows": "int64",
    "thread": "int64",
    "threads": "int64",
    "backwards": "int64",
}
"""What a generated step takes, in this order; it gives 0, or 1 where a token is outside the vocabulary.

With ``backwards`` it reads its matrices from the end, as far as it can, which changes no number. Steps take turns in
it, because what was read last is still in the cache.
"""

BELOW_ONE = 1.0 - 2.0**-53
"""The largest number below 1."""
DAMAGED, NOTHING_LEFT = -1, -2
"""In place of a token: the logits are no numbers; every token is ruled out."""

_DRAWING = (
    *("float32*", "float64*", "int64*"),  # memory: scores, weights, an order of tokens
    *("int64*", "int64"),  # tokens that are never drawn, and how many
    *("int64", "float64", "int64", "float64", "float64"),  # the boundary; temperature, top_k, top_p, min_p
)
_PRODUCT = (
    *("int64", "int64", "int64"),  # where the matrix starts, its rows and its columns
    *("float32*", "int64", "int64"),  # numbers: biases and scales
)
_ROWS = (
    *("int64", "int64", "float32*"),  # where the vectors start, how far apart they are, their scales
    *("float32*", "int64", "int64"),  # the results
    *("int64", "int64", "int64"),  # how many vectors; the first block, and the one after the last
    "int64",  # whether the last block is read first
)
KERNELS: dict[str, Kinds] = {
    "product": ("float32*", *_PRODUCT, "float32*", *_ROWS),
    "product_of_bytes": ("int8*", *_PRODUCT, "int16*", *_ROWS),
    "quantise": ("float32*", *("int64",) * 3, "float32", "int16*", "int64", "float32*", "int64"),
    "meet": ("int64*", "int64", "int64"),
    "draw": ("float32*", "int64", *_DRAWING, "int64", "float64", "int64*", "int64"),
    "choose": ("float32*", "int64", "int64", *_DRAWING, "int64*", "float64*", "int64*"),
    "generate": (
        *("int64", "int64"),  # the step's address, and how often threads meet in it
        *("float32*", "int8*", "int64*"),  # numbers, codes, tokens
        *("int64*", "int64", "float32*", "int64"),  # two states in turns: integers and their number, numbers too
        *("float32*", "int64"),  # logits, and how many
        *("float32*", "float32*", "int16*", "float32*", "int64*"),  # work, shared, inputs, input_scales, arrivals
        *_DRAWING,
        *("float64*", "int64"),  # what decides each token; how many come before the boundary may
        *("int64", "int64"),  # how many tokens are given; how many there are to be
        *("int64", "int64", "int64*"),  # thread, threads; how many were read
    ),
}
"""What the kernels take; each may call those before it by name."""

_OF_CTYPES = {"int64": ctypes.c_int64, "float32": ctypes.c_float, "float64": ctypes.c_double}
_SYMBOL, _DIGEST = "symbol", "sha256"


class Compiled(NamedTuple):
    """A function as the compiler left it."""

    symbol: str
    code: bytes


def compiled(function: Callable[..., Any], kinds: Kinds, gives: str = "void") -> Compiled:
    """Compile a function of pointers and numbers, by Numba."""
    from numba import njit as numba_njit
    from numba import types

    from elman.engine.kernels import types_of

    signature = getattr(types, gives)(*types_of(kinds))
    njit: Any = numba_njit  # its types do not know the first two options
    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "error_model": "numpy"}
    (result,) = njit(signature, **options)(function).overloads.values()
    symbol = result.fndesc.llvm_func_name
    result.library.get_pointer_to_function(symbol)  # which makes the object file
    _, _, (code, _) = result.library.serialize_using_object_code()
    return Compiled(symbol, bytes(code))


def kept(path: Path, make: Callable[[], Mapping[str, Compiled]]) -> Mapping[str, Compiled]:
    """Functions by name, from a file of code; where there is none that is whole, they are made and kept there."""
    found: Mapping[str, Compiled] | None = _read(path)
    if found is None:
        found = make()
        with suppress(OSError):  # the folder cannot be written: they are compiled anew in each process
            write(path, _to_bytes(found))
    return found


def _to_bytes(functions: Mapping[str, Compiled]) -> bytes:
    metadata = {f"{name}.{_SYMBOL}": made.symbol for name, made in functions.items()}
    metadata |= {f"{name}.{_DIGEST}": hashlib.sha256(made.code).hexdigest() for name, made in functions.items()}
    return save({name: np.frombuffer(made.code, np.uint8) for name, made in functions.items()}, metadata)


def _read(path: Path) -> dict[str, Compiled] | None:
    try:
        with safe_open(path, framework="np") as file:
            about = file.metadata() or {}
            names = [key.removesuffix(f".{_SYMBOL}") for key in about if key.endswith(f".{_SYMBOL}")]
            found = {name: Compiled(about[f"{name}.{_SYMBOL}"], file.get_tensor(name).tobytes()) for name in names}
        digests = {name: hashlib.sha256(made.code).hexdigest() for name, made in found.items()}
        intact = all(digest == about[f"{name}.{_DIGEST}"] for name, digest in digests.items())
    except (OSError, SafetensorError, KeyError):
        return None
    return found if intact and found else None


def write(path: Path, data: bytes) -> None:
    """Write a file of the cache whole or not at all; several processes may write it at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, data)


_engines: list[Any] = []
"""LLVM frees what it has loaded when these go."""


def link(made: Compiled) -> int:
    """Bring a function into memory; its address. What it calls by name has to be there."""
    binding = _loader()
    target = binding.Target.from_default_triple().create_target_machine(jit=True)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), target)
    engine.add_object_file(binding.ObjectFileRef.from_data(made.code))
    engine.finalize_object()
    _engines.append(engine)
    address: int = engine.get_function_address(made.symbol)
    return address


@cache
def _loader() -> Any:
    from llvmlite import binding  # type: ignore[import-untyped]  # ships no types

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding


@cache
def machine() -> str:
    """A digest of what machine code depends on beside its source: the compiler and the processor."""
    import llvmlite

    binding = _loader()
    features = sorted(name for name, has in binding.get_host_cpu_features().items() if has)
    what = [llvmlite.__version__, binding.get_process_triple(), binding.get_host_cpu_name(), *features]
    return hashlib.sha256(" ".join(what).encode()).hexdigest()[:12]


@cache
def sources() -> str:
    """A digest of the modules that compiled code is made from."""
    digest = hashlib.sha256()
    for name in ("drawing", "emit", "kernels", "lanes", "native", "packing"):
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return digest.hexdigest()


def folder() -> Path:
    """Where generated files and machine code are kept."""
    return cache_folder() / "engine"


@cache
def kernels() -> dict[str, Callable[..., int]]:
    """The kernels, ready to be called; generated code may call them by name from now on."""
    found = kept(folder() / f"kernels_{sources()[:24]}.{machine()}.code", _compiled_kernels)
    return {name: function(_announced(name, found[name]), kinds) for name, kinds in KERNELS.items()}


def _compiled_kernels() -> dict[str, Compiled]:
    from elman.engine import drawing, kernels

    functions = kernels.FUNCTIONS | drawing.FUNCTIONS
    found = {}
    for name, kinds in KERNELS.items():
        found[name] = compiled(functions[name], kinds)
        _announced(name, found[name])
    return found


def _announced(name: str, made: Compiled) -> int:
    """Link a kernel, so that those after it and generated steps may call it by name."""
    address = link(made)
    _loader().add_symbol(f"elman_{name}", address)
    return address


def function(address: int, kinds: Kinds) -> Callable[..., int]:
    """Compiled code as a function of addresses and numbers.

    It takes two addresses more, at the front: of the result, and of what Numba would say of an error. It holds no lock
    of Python.
    """
    takes: list[type[Any]] = [ctypes.c_void_p if kind.endswith("*") else _OF_CTYPES[kind] for kind in kinds]
    return ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, *takes)(address)
