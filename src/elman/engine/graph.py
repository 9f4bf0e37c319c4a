"""A model's step as a value: a graph of few kinds of nodes, which every compiled form is written from.

A graph describes one text. Shapes are those of one row, without the batch and without leading ones; arithmetic
broadcasts from the last axis back, and axes are counted from the end (-1 is the last). The list of operations is
closed, and :func:`evaluate` says in NumPy what each means.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
Shape: TypeAlias = tuple[int, ...]

SOURCES = {
    "token": "the token that is read; an integer",
    "state": "a part of the state before the step, by name; numbers, or integers",
    "parameter": "a parameter of the model or a constant of its step, by name",
    "number": "a number",
}
MOVES = {
    "reshape": "the same elements in another shape",
    "broadcast": "repeated along axes of size 1",
    "transpose": "axes in another order",
    "slice": "along an axis, the elements from a start to a stop",
    "concat": "along an axis, one after the other",
    "row": "the rows of a table (a parameter) that integers name",
    "as_number": "integers as numbers",
}
UNARY: dict[str, Callable[[Array], Array]] = {
    "neg": np.negative,
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "abs": np.abs,
    "relu": lambda x: np.maximum(x, 0),
    "tanh": np.tanh,
    "sigmoid": lambda x: np.exp(-np.logaddexp(0, -x)),
    "log_sigmoid": lambda x: -np.logaddexp(0, -x),
}
BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "remainder": np.remainder,  # of integers alone; it has the sign of the divisor
    "equal": lambda x, y: np.multiply(np.equal(x, y), 1),
    "less": lambda x, y: np.multiply(np.less(x, y), 1),
    "at_most": lambda x, y: np.multiply(np.less_equal(x, y), 1),
}
"""Of numbers, or of integers. Comparisons give 1 or 0 of the same sort."""
CHOICES: dict[str, Callable[[Array, Array, Array], Array]] = {
    "where": lambda which, x, y: np.where(np.not_equal(which, 0), x, y),
}
SUMS = {
    "sum": "over the last axis, which goes",
    "largest": "the largest along the last axis, which goes",
    "matvec": "A x, or A x + b: A from parameters (..., O, I), x (..., I), b (O)",
}
ELEMENTWISE = frozenset({*UNARY, *BINARY, *CHOICES})
VIEWS = frozenset({"reshape", "broadcast", "transpose", "slice"})


@dataclass(frozen=True)
class Node:
    """One value of a step."""

    op: str
    """A name of the closed list."""
    inputs: tuple[int, ...]
    """The positions of its arguments among the nodes."""
    shape: Shape
    detail: Any = None
    """What the operation needs beside them: a name, a number, an axis, (axis, start, stop), an order of axes."""
    is_integer: bool = False


@dataclass(frozen=True)
class Graph:
    """The step of a model: from a token and a state to logits and the next state."""

    nodes: tuple[Node, ...]
    """Each after its arguments."""
    logits: int
    state: Mapping[str, int]
    """The parts of the next state, by name."""
    constants: Mapping[str, Array] = field(default_factory=dict, compare=False, repr=False)
    """Tensors that the step brings itself, by the name that their ``parameter`` nodes have."""

    @cached_property
    def fixed(self) -> frozenset[int]:
        """The nodes that depend on parameters and numbers alone: the same at every step."""
        found: set[int] = set()
        for index, node in enumerate(self.nodes):
            if node.op in ("parameter", "number") or (node.inputs and found.issuperset(node.inputs)):
                found.add(index)
        return frozenset(found)

    @property
    def parts(self) -> dict[str, Node]:
        """The ``state`` nodes by name; a part that the step does not look at has none."""
        return {node.detail: node for node in self.nodes if node.op == "state"}

    def __str__(self) -> str:
        """A line for each node, and one for what comes out."""
        lines = []
        for index, node in enumerate(self.nodes):
            arguments = [f"%{position}" for position in node.inputs]
            arguments += [] if node.detail is None else [repr(node.detail)]
            lines.append(f"%{index} {list(node.shape)} = {node.op}({', '.join(arguments)})")
        out = ", ".join(f"{name} %{index}" for name, index in self.state.items())
        return "\n".join([*lines, f"logits %{self.logits}; state: {out or 'none'}"])

    @property
    def key(self) -> str:
        """A digest of the architecture: equal for models that differ in their weights alone."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:16]


class Builder:
    """Collects nodes: each once, and the simple ones simplified."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.fixed: list[bool] = []
        """Whether each depends on parameters and numbers alone."""
        self._known: dict[Node, int] = {}

    def shape(self, index: int) -> Shape:
        """The shape of a node."""
        return self.nodes[index].shape

    def _add(
        self, op: str, inputs: Sequence[int], shape: Shape, detail: Any = None, *, is_integer: bool | None = None
    ) -> int:
        integer = any(self.nodes[i].is_integer for i in inputs) if is_integer is None else is_integer
        node = Node(op, tuple(inputs), shape, detail, integer)
        if node not in self._known:
            self._known[node] = len(self.nodes)
            self.nodes.append(node)
            self.fixed.append(all(self.fixed[i] for i in inputs) if inputs else op in ("parameter", "number"))
        return self._known[node]

    def source(self, op: str, shape: Shape = (), detail: Any = None, *, is_integer: bool = False) -> int:
        """A ``token``, ``state``, ``parameter`` or ``number``."""
        return self._add(op, (), shape, detail, is_integer=is_integer)

    def apply(self, op: str, *inputs: int) -> int:
        """An operation on each element, with broadcasting."""
        return self._add(op, inputs, np.broadcast_shapes(*(self.shape(i) for i in inputs)))

    def as_number(self, x: int) -> int:
        """Integers as numbers; numbers stay as they are."""
        return self._add("as_number", (x,), self.shape(x), is_integer=False) if self.nodes[x].is_integer else x

    def reshape(self, x: int, shape: Shape) -> int:
        """The same elements in another shape."""
        node = self.nodes[x]
        if node.shape == shape:
            return x
        return self.reshape(node.inputs[0], shape) if node.op == "reshape" else self._add("reshape", (x,), shape)

    def broadcast(self, x: int, shape: Shape) -> int:
        """Repeat along axes of size 1."""
        return x if self.shape(x) == shape else self._add("broadcast", (x,), shape)

    def transpose(self, x: int, order: tuple[int, ...]) -> int:
        """Put the axes into another order; they are counted from the first here."""
        node = self.nodes[x]
        shape = tuple(node.shape[axis] for axis in order)
        if [axis for axis in order if node.shape[axis] != 1] == [a for a, size in enumerate(node.shape) if size != 1]:
            return self.reshape(x, shape)
        if node.op == "transpose":
            return self.transpose(node.inputs[0], tuple(node.detail[axis] for axis in order))
        return self._add("transpose", (x,), shape, order)

    def slice(self, x: int, axis: int, start: int, stop: int) -> int:
        """A part along an axis; of the parts themselves where x is put together or computed element by element."""
        node = self.nodes[x]
        if (start, stop) == (0, node.shape[axis]):
            return x
        if node.op in ELEMENTWISE:
            return self.apply(node.op, *(self._slice_of_argument(i, node, axis, start, stop) for i in node.inputs))
        if node.op == "slice" and node.detail[0] == axis:
            return self.slice(node.inputs[0], axis, node.detail[1] + start, node.detail[1] + stop)
        if node.op == "concat" and node.detail == axis:
            parts, at = [], 0
            for part in node.inputs:
                size = self.shape(part)[axis]
                if max(start, at) < min(stop, at + size):
                    parts.append(self.slice(part, axis, max(start - at, 0), min(stop - at, size)))
                at += size
            return self.concat(parts, axis)
        shape = list(node.shape)
        shape[axis] = stop - start
        return self._add("slice", (x,), tuple(shape), (axis, start, stop))

    def _slice_of_argument(self, x: int, node: Node, axis: int, start: int, stop: int) -> int:
        shape = self.shape(x)
        return x if -axis > len(shape) or shape[axis] != node.shape[axis] else self.slice(x, axis, start, stop)

    def concat(self, parts: Sequence[int], axis: int) -> int:
        """Put parts of the same number of axes one after the other."""
        if len(parts) == 1:
            return parts[0]
        shape = list(self.shape(parts[0]))
        shape[axis] = sum(self.shape(part)[axis] for part in parts)
        return self._add("concat", parts, tuple(shape), axis)

    def row(self, table: int, index: int) -> int:
        """The rows of a table that integers name."""
        return self._add("row", (table, index), self.shape(index) + self.shape(table)[1:], is_integer=False)

    def sum(self, x: int) -> int:
        """The sum over the last axis."""
        return self._add("sum", (x,), self.shape(x)[:-1])

    def largest(self, x: int) -> int:
        """The largest along the last axis."""
        return self._add("largest", (x,), self.shape(x)[:-1])

    def matvec(self, matrix: int, x: int, bias: int | None = None) -> int:
        """``A x + b``."""
        of_matrix, of_x = self.shape(matrix), self.shape(x)
        shape = (*np.broadcast_shapes(of_matrix[:-2], of_x[:-1]), of_matrix[-2])
        return self._add("matvec", (matrix, x) if bias is None else (matrix, x, bias), shape)

    def finish(self, logits: int, state: Mapping[str, int], constants: Mapping[str, Array]) -> Graph:
        """The graph of these results, without the nodes that they do not need."""
        needed = {logits, *state.values()}
        for index in range(len(self.nodes) - 1, -1, -1):
            if index in needed:
                needed.update(self.nodes[index].inputs)
        position = {old: new for new, old in enumerate(sorted(needed))}
        kept = (self.nodes[old] for old in sorted(needed))
        nodes = tuple(replace(node, inputs=tuple(position[i] for i in node.inputs)) for node in kept)
        used = {node.detail for node in nodes if node.op == "parameter"}
        return Graph(
            nodes,
            position[logits],
            {name: position[index] for name, index in state.items()},
            {name: array for name, array in constants.items() if name in used},
        )


def values_of(
    graph: Graph, parameters: Mapping[str, Array], known: Mapping[int, Array], wanted: Sequence[int]
) -> list[Array]:
    """Compute some nodes in NumPy: the meaning of every operation.

    Args:
        graph: the step.
        parameters: by name; the graph's own constants are known.
        known: values of nodes, such as the token and the parts of the state.
        wanted: the nodes whose values are asked for.
    """
    arrays = {**graph.constants, **parameters}
    found = dict(known)
    needed = {*wanted}
    for index in range(max(needed, default=-1), -1, -1):
        if index in needed and index not in found:
            needed.update(graph.nodes[index].inputs)
    for index in sorted(needed.difference(found)):
        node = graph.nodes[index]
        found[index] = _value(node, [found[i] for i in node.inputs], arrays)
    return [found[index] for index in wanted]


def _value(node: Node, x: list[Array], arrays: Mapping[str, Array]) -> Array:
    if node.op in UNARY:
        return UNARY[node.op](x[0])
    if node.op in BINARY:
        return BINARY[node.op](x[0], x[1])
    if node.op in CHOICES:
        return CHOICES[node.op](x[0], x[1], x[2])
    if node.op == "parameter":
        return arrays[node.detail].reshape(node.shape)
    if node.op == "number":
        return node.detail  # a plain number takes the precision of what it meets
    if node.op == "reshape":
        return np.reshape(x[0], node.shape)
    if node.op == "broadcast":
        return np.broadcast_to(x[0], node.shape)
    if node.op == "transpose":
        return x[0].transpose(node.detail)
    if node.op == "slice":
        axis, start, stop = node.detail
        where: tuple[Any, ...] = (..., slice(start, stop), *[slice(None)] * (-axis - 1))
        return x[0][where]
    if node.op == "concat":
        return np.concatenate(x, axis=node.detail)
    if node.op == "row":
        return x[0][x[1]]
    if node.op == "as_number":
        return np.multiply(x[0], 1.0)
    if node.op == "sum":
        return x[0].sum(-1)
    if node.op == "largest":
        return x[0].max(-1)
    if node.op == "matvec":
        return (x[0] @ x[1][..., None])[..., 0] + (x[2] if len(x) > 2 else 0)
    raise KeyError(node.op)


def evaluate(
    graph: Graph, token: int, state: Mapping[str, Array], parameters: Mapping[str, Array]
) -> tuple[Array, dict[str, Array]]:
    """One step of one text in NumPy, in the precision of what is given: logits (V,), and the next state.

    Args:
        graph: the step.
        token: what is read.
        state: the parts by name, without the batch.
        parameters: by name.
    """
    known = {
        index: np.asarray(token) if node.op == "token" else state[node.detail].reshape(node.shape)
        for index, node in enumerate(graph.nodes)
        if node.op in ("token", "state")
    }
    logits, *parts = values_of(graph, parameters, known, [graph.logits, *graph.state.values()])
    return logits, {name: part.reshape(state[name].shape) for name, part in zip(graph.state, parts, strict=True)}


def size_of(shape: Shape) -> int:
    """The number of elements."""
    return math.prod(shape)
