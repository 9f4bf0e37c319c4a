"""From a model's own step to its graph: the step is run once on one text, and PyTorch's operations are written down.

What is recorded are the calls that reach PyTorch's dispatcher, whatever a cell wrote to make them. An operation that
has no place in the graph's closed list, or a look at a number's value, ends the trace with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from elman.engine.graph import Array, Builder, Graph, Shape
from elman.errors import ElmanError
from elman.models.contract import LanguageModel
from elman.models.state import grows

_MAX_UNROLLED = 8
"""A sum over an axis that is not the last is written as so many additions at most."""


class CannotLower(ElmanError):
    """The step of a model has no graph, or no compiled form; the message says why."""


def trace(network: LanguageModel) -> Graph:
    """The graph of one step of a model, from its own ``step`` and the logits of its head.

    Raises:
        CannotLower: the step holds something that a graph cannot.
    """
    state = network.initial_state(1)
    for name, tensor in state.tensors.items():
        if grows(tensor):
            raise CannotLower(f"the part {name!r} of its state grows with the text")
    token_B = torch.zeros(1, dtype=torch.int64, device=network.device)
    recorder = _Recorder(network, token_B, state.tensors)
    try:
        with torch.no_grad(), recorder:
            features_BF, after = network.step(token_B, state)
            logits_BTV = network.head.logits(features_BF.unsqueeze(1))
    except ElmanError:
        raise
    except Exception as error:  # an operation in a form that nobody thought of
        raise CannotLower(f"its step cannot be traced ({type(error).__name__}: {error})") from error
    graph = recorder.graph(logits_BTV, after.tensors)
    if graph.logits in graph.fixed:
        raise CannotLower("its logits do not come from the token by operations of PyTorch")
    return graph


class _Recorder(TorchDispatchMode):
    """Knows for every tensor of the step which node it is; any other tensor is a constant."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else PyTorch would import its compiler, which takes seconds

    def __init__(self, network: LanguageModel, token_B: Tensor, state: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.builder = Builder()
        self._nodes: dict[int, int] = {}
        self._kept: list[Tensor] = []  # so that no other tensor gets the same identity
        self._shared: set[int] = set()  # tensors that others are views of, or that are views
        self._constants: dict[str, Array] = {}
        self._dtype = network.dtype
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                self._source(parameter, "parameter", name)
            for name, tensor in state.items():
                self._source(tensor, "state", name)
            self._source(token_B, "token")

    def _source(self, tensor: Tensor, op: str, name: str | None = None) -> None:
        node = self.builder.source(op, short(tensor.shape), name, is_integer=not tensor.is_floating_point())
        self._keep(tensor, node)
        self._shared.add(id(tensor))

    def _keep(self, tensor: Tensor, node: int) -> None:
        self._nodes[id(tensor)] = node
        self._kept.append(tensor)

    def graph(self, logits: Tensor, state: Mapping[str, Tensor]) -> Graph:
        """The graph of what was recorded."""
        parts = {name: self.node(tensor) for name, tensor in state.items()}
        return self.builder.finish(self.node(logits), parts, self._constants)

    def knows(self, tensor: Tensor) -> bool:
        """Whether a tensor depends on anything that the step was given."""
        return id(tensor) in self._nodes

    def node(self, value: Tensor | float) -> int:
        """The node of a tensor or of a number."""
        if not isinstance(value, Tensor):
            return self.builder.source("number", (), float(value))
        if id(value) not in self._nodes:
            if value.is_floating_point() and value.dtype != self._dtype:
                raise CannotLower(f"its step holds a constant of {value.dtype} among numbers of {self._dtype}")
            if value.numel() == 1:
                self._keep(value, self.builder.source("number", (), float(value.detach().numpy().reshape(()))))
                return self._nodes[id(value)]
            name = f"constant {len(self._constants)}"
            is_integer = not value.is_floating_point() and value.dtype != torch.bool
            array = value.detach().to(value.dtype if is_integer else self._dtype).cpu().numpy().copy()
            self._constants[name] = array
            self._keep(value, self.builder.source("parameter", short(value.shape), name, is_integer=is_integer))
        return self._nodes[id(value)]

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        keywords = keywords or {}
        name = function.overloadpacket.__name__
        if torch.Tag.nondeterministic_seeded in function.tags:
            raise CannotLower(f"its step draws at random ({name})")
        given = [value for value in _flat((*arguments, *keywords.values())) if isinstance(value, Tensor)]
        if not any(map(self.knows, given)):
            return function(*arguments, **keywords)  # a constant, which is kept where it is used
        in_place = function._schema.is_mutable
        if in_place:
            if id(arguments[0]) in self._shared:
                raise CannotLower(f"its step changes a tensor in place ({name}) that something else may look at")
            name = name.removesuffix("_")
        if name not in _FORMS and not in_place and all(self.builder.fixed[self.node(value)] for value in given):
            return function(*arguments, **keywords)  # of parameters alone: a constant as well
        if name not in _FORMS:
            raise CannotLower(f"its step uses the operation {name!r} of PyTorch, which is not in the list")
        # The nodes of the arguments are found before the operation may change them.
        nodes = _FORMS[name](self, *arguments, **keywords)
        result = function(*arguments, **keywords)
        if not in_place and any(argument.alias_info is not None for argument in function._schema.arguments):
            self._shared.update(id(value) for value in (*given, *_flat((result,))))
        for tensor, node in zip(_flat((result,)), _flat((nodes,)), strict=False):  # some give more than is used
            if node is not None and short(tensor.shape) != self.builder.shape(node):
                raise CannotLower(f"the operation {name!r} gave the shape {list(tensor.shape)}, which was not foreseen")
            if node is not None:
                self._check(tensor, name, self.builder.nodes[node].is_integer)
                self._keep(tensor, node)
        return result

    def _check(self, tensor: Tensor, name: str, is_integer: bool) -> None:
        if tensor.is_floating_point() and tensor.dtype != self._dtype:
            raise CannotLower(f"its step computes in {tensor.dtype} ({name}) where its parameters are {self._dtype}")
        # Truths are of either sort: those of numbers are numbers.
        if tensor.dtype != torch.bool and tensor.is_floating_point() == is_integer:
            raise CannotLower(f"its step makes {tensor.dtype} of something else ({name})")


def _flat(values: Sequence[Any]) -> list[Any]:
    return [item for value in values for item in (_flat(value) if isinstance(value, list | tuple) else [value])]


def short(shape: Sequence[int]) -> Shape:
    """A shape without the ones at its front, the batch of one row among them."""
    first = next((axis for axis, size in enumerate(shape) if size != 1), len(shape))
    return tuple(shape[first:])


# How each operation of PyTorch is written in those of a graph. A form takes the operation's own arguments.

_Form: TypeAlias = Callable[..., Any]


def _same(r: _Recorder, x: Tensor, *others: Any, dtype: torch.dtype | None = None, **more: Any) -> int:
    if dtype is None or dtype == x.dtype:
        return r.node(x)
    if x.is_floating_point() or dtype == torch.bool:
        raise CannotLower(f"its step turns {x.dtype} into {dtype}")
    return r.builder.as_number(r.node(x)) if dtype.is_floating_point else r.node(x)


def _unary(op: str) -> _Form:
    return lambda r, x: r.builder.apply(op, r.node(x))


def _binary(op: str, *, swapped: bool = False) -> _Form:
    def form(r: _Recorder, x: Any, y: Any, *, alpha: float = 1) -> int:
        a, b = _of_one_sort(r, x, y)
        b = b if alpha == 1 else r.builder.apply("mul", b, r.node(alpha))
        return r.builder.apply(op, *((b, a) if swapped else (a, b)))

    return form


def _of_one_sort(r: _Recorder, *values: Tensor | float) -> list[int]:
    """The nodes of values; integers beside numbers are numbers too."""
    nodes = [r.node(value) for value in values]
    are_numbers = any(
        not r.builder.nodes[node].is_integer and (isinstance(value, float) or r.builder.nodes[node].op != "number")
        for value, node in zip(values, nodes, strict=True)
    )
    return [r.builder.as_number(node) for node in nodes] if are_numbers else nodes


def _division(r: _Recorder, x: Any, y: Any) -> int:
    return r.builder.apply("div", *(r.builder.as_number(node) for node in _of_one_sort(r, x, y)))


def _remainder(r: _Recorder, x: Any, y: Any) -> int:
    nodes = _of_one_sort(r, x, y)
    if not any(r.builder.nodes[node].is_integer for node in nodes):
        raise CannotLower("its step takes a remainder of numbers; accepted: of integers")
    return r.builder.apply("remainder", *nodes)


def _not(r: _Recorder, truth: int) -> int:
    return r.builder.apply("sub", r.node(1), truth)


def _differs(r: _Recorder, x: Any, y: Any) -> int:
    return _not(r, r.builder.apply("equal", *_of_one_sort(r, x, y)))


def _of_truths(op: str) -> _Form:
    """An operation on what is true or false, where PyTorch has the same name for one on the bits of integers."""

    def form(r: _Recorder, *values: Any) -> int:
        if any(isinstance(value, Tensor) and value.dtype != torch.bool for value in values):
            raise CannotLower("its step combines the bits of integers; accepted: what is true or false")
        nodes = _of_one_sort(r, *values)
        return _not(r, nodes[0]) if op == "not" else r.builder.apply(op, *nodes)

    return form


def _where(r: _Recorder, which: Tensor, x: Any, y: Any) -> int:
    a, b = _of_one_sort(r, x, y)
    are_integers = r.builder.nodes[a].is_integer or r.builder.nodes[b].is_integer
    return r.builder.apply("where", r.node(which) if are_integers else r.builder.as_number(r.node(which)), a, b)


def _reversed_sub(r: _Recorder, x: Tensor, y: Any, alpha: float = 1) -> int:
    a = r.node(x) if alpha == 1 else r.builder.apply("mul", r.node(x), r.node(alpha))
    return r.builder.apply("sub", r.node(y), a)


def _power(r: _Recorder, x: Tensor, exponent: Any) -> int:
    a = r.node(x)
    if exponent == 0.5:
        return r.builder.apply("sqrt", a)
    if exponent == -0.5:
        return _inverse(r, r.builder.apply("sqrt", a))
    if exponent in (2, 3):
        square = r.builder.apply("mul", a, a)
        return square if exponent == 2 else r.builder.apply("mul", square, a)
    raise CannotLower(f"its step raises to the power {exponent}; accepted: 2, 3, 0.5, -0.5")


def _inverse(r: _Recorder, x: int) -> int:
    return r.builder.apply("div", r.node(1.0), x)


def _clamp(r: _Recorder, x: Tensor, low: Any = None, high: Any = None) -> int:
    a = r.node(x)
    a = a if low is None else r.builder.apply("maximum", a, r.node(low))
    return a if high is None else r.builder.apply("minimum", a, r.node(high))


def _silu(r: _Recorder, x: Tensor) -> int:
    a = r.node(x)
    return r.builder.apply("mul", a, r.builder.apply("sigmoid", a))


def _softplus(r: _Recorder, x: Tensor, beta: float = 1, threshold: float = 20) -> int:
    if beta != 1:
        raise CannotLower(f"its step uses softplus with beta {beta}; accepted: 1")
    b = r.builder
    return b.apply("neg", b.apply("log_sigmoid", b.apply("neg", r.node(x))))


def _gelu(r: _Recorder, x: Tensor, *, approximate: str = "none") -> int:
    if approximate != "tanh":
        raise CannotLower("its step uses the exact gelu; accepted: the approximation by tanh")
    b, a = r.builder, r.node(x)
    cube = b.apply("mul", b.apply("mul", a, a), a)
    inner = b.apply("add", a, b.apply("mul", r.node(0.044715), cube))
    wave = b.apply("tanh", b.apply("mul", r.node(math.sqrt(2 / math.pi)), inner))
    return b.apply("mul", b.apply("mul", r.node(0.5), a), b.apply("add", r.node(1.0), wave))


def _addcmul(r: _Recorder, x: Tensor, y: Tensor, z: Tensor, *, value: float = 1) -> int:
    product = r.builder.apply("mul", r.node(y), r.node(z))
    product = product if value == 1 else r.builder.apply("mul", r.node(value), product)
    return r.builder.apply("add", r.node(x), product)


def _lerp(r: _Recorder, x: Tensor, y: Tensor, weight: Any) -> int:
    b, a = r.builder, r.node(x)
    return b.apply("add", a, b.apply("mul", r.node(weight), b.apply("sub", r.node(y), a)))


def _reshaped(r: _Recorder, x: Tensor, *shape: Any) -> int:
    """Any operation that keeps the elements in their order; the shape is that of what it gives."""
    return r.builder.reshape(r.node(x), short(torch.empty_like(x, device="meta").reshape(*shape).shape))


def _unsqueeze(r: _Recorder, x: Tensor, dim: int) -> int:
    shape = list(x.shape)
    shape.insert(dim if dim >= 0 else dim + x.dim() + 1, 1)
    return r.builder.reshape(r.node(x), short(shape))


def _squeeze(r: _Recorder, x: Tensor, dims: Any = None) -> int:
    chosen = range(x.dim()) if dims is None else [d % x.dim() for d in _flat((dims,))]
    return r.builder.reshape(r.node(x), short([s for d, s in enumerate(x.shape) if d not in chosen or s != 1]))


def _expand(r: _Recorder, x: Tensor, shape: Sequence[int], *, implicit: bool = False) -> int:
    padded = [1] * (len(shape) - x.dim()) + list(x.shape)
    wanted = [old if new == -1 else new for old, new in zip(padded, shape, strict=True)]
    return r.builder.broadcast(r.node(x), short(wanted))


def _full(r: _Recorder, x: Tensor) -> int:
    """The node in the very shape that the tensor has, its leading ones too."""
    return r.builder.reshape(r.node(x), tuple(x.shape))


def _permuted(r: _Recorder, x: Tensor, order: Sequence[int]) -> int:
    moved = r.builder.transpose(_full(r, x), tuple(axis % x.dim() for axis in order))
    return r.builder.reshape(moved, short(r.builder.shape(moved)))


def _transposed(r: _Recorder, x: Tensor, first: int = 0, second: int = 1) -> int:
    if x.dim() < 2:
        return r.node(x)
    order = list(range(x.dim()))
    order[first], order[second] = order[second], order[first]
    return _permuted(r, x, order)


def _sliced(r: _Recorder, x: Tensor, dim: int, start: int, stop: int) -> int:
    axis = dim - x.dim() if dim >= 0 else dim
    node = r.node(x)
    if -axis > len(r.builder.shape(node)):  # one of the ones at the front
        return node
    part = r.builder.slice(node, axis, start, stop)
    return r.builder.reshape(part, short(r.builder.shape(part)))


def _slice(
    r: _Recorder, x: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> int:
    if step != 1:
        raise CannotLower(f"its step takes every element {step} apart; accepted: those that stand side by side")
    start, end, _ = slice(start, end).indices(x.shape[dim])
    return _sliced(r, x, dim, start, end)


def _select(r: _Recorder, x: Tensor, dim: int, index: int) -> int:
    index = index % x.shape[dim]
    part = _sliced(r, x, dim, index, index + 1)
    shape = list(x.shape)
    del shape[dim]
    return r.builder.reshape(part, short(shape))


def _unbind(r: _Recorder, x: Tensor, dim: int = 0) -> list[int]:
    return [_select(r, x, dim, index) for index in range(x.shape[dim])]


def _split(r: _Recorder, x: Tensor, size: int, dim: int = 0) -> list[int]:
    whole = x.shape[dim]
    return _split_sizes(r, x, [min(size, whole - start) for start in range(0, whole, size)], dim)


def _split_sizes(r: _Recorder, x: Tensor, sizes: Sequence[int], dim: int = 0) -> list[int]:
    stops = np.cumsum(sizes).tolist()
    return [_sliced(r, x, dim, stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]


def _joined(r: _Recorder, parts: Sequence[tuple[int, Shape]], axis: int) -> int:
    """Nodes one after the other along an axis, each in the shape given, without the ones that all have at the front."""
    rank = max(-axis, *(len(short(shape)) for _, shape in parts))
    joined = r.builder.concat([r.builder.reshape(node, shape[-rank:]) for node, shape in parts], axis)
    return r.builder.reshape(joined, short(r.builder.shape(joined)))


def _cat(r: _Recorder, parts: Sequence[Tensor], dim: int = 0) -> int:
    axis = dim - parts[0].dim() if dim >= 0 else dim
    return _joined(r, [(r.node(part), tuple(part.shape)) for part in parts if part.numel()], axis)


def _stack(r: _Recorder, parts: Sequence[Tensor], dim: int = 0) -> int:
    axis = dim - parts[0].dim() - 1 if dim >= 0 else dim
    shape = list(parts[0].shape)
    shape.insert(axis + len(shape) + 1, 1)
    return _joined(r, [(r.node(part), tuple(shape)) for part in parts], axis)


def _index(r: _Recorder, table: Tensor, indices: Sequence[Tensor | None]) -> int:
    if len(indices) != 1 or indices[0] is None or indices[0].dtype != torch.int64:
        raise CannotLower("its step picks elements by several indices or a mask; accepted: rows of a parameter")
    return _embedding(r, table, indices[0])


def _embedding(r: _Recorder, table: Tensor, index: Tensor, *others: Any) -> int:
    if r.builder.nodes[r.node(table)].op != "parameter" or r.builder.fixed[r.node(index)]:
        raise CannotLower("its step looks something up that is no parameter, or at a place that is fixed")
    found = r.builder.row(r.node(table), r.node(index))
    return r.builder.reshape(found, short((*index.shape, *table.shape[1:])))


def _sum_over(r: _Recorder, x: int, axis: int) -> int:
    """The sum over one axis, which stays with size 1."""
    b, shape = r.builder, r.builder.shape(x)
    if -axis > len(shape):
        return x
    if axis != -1 and shape[axis] <= _MAX_UNROLLED:
        parts = [b.slice(x, axis, i, i + 1) for i in range(shape[axis])]
        found = parts[0]
        for part in parts[1:]:
            found = b.apply("add", found, part)
        return found
    kept = (*shape[:axis], 1, *shape[len(shape) + axis + 1 :])
    if axis == -1:
        return b.reshape(_sum_of_products(r, x), kept)
    order = [position for position in range(len(shape)) if position != len(shape) + axis]
    return b.reshape(_sum_of_products(r, b.transpose(x, (*order, len(shape) + axis))), kept)


def _sum_of_products(r: _Recorder, x: int) -> int:
    """The sum over the last axis; of a parameter times a vector it is a product of matrix and vector."""
    b, node = r.builder, r.builder.nodes[x]
    if node.op == "mul":
        for matrix, vector in (node.inputs, node.inputs[::-1]):
            of_matrix, of_vector = b.shape(matrix), b.shape(vector)
            rows = of_vector[-2] if len(of_vector) > 1 else 1
            whole = len(of_matrix) > 1 and of_matrix[-1] == of_vector[-1:][0] if of_vector else False
            if whole and rows == 1 and b.fixed[matrix] and not b.fixed[vector]:
                return b.matvec(matrix, b.reshape(vector, (*of_vector[:-2], of_vector[-1])))
    return b.sum(x)


def _sum(r: _Recorder, x: Tensor, dims: Sequence[int] | None = None, keepdim: bool = False, **more: Any) -> int:
    chosen = [dim % x.dim() for dim in dims] if dims else list(range(x.dim()))
    found = r.node(x)
    for dim in chosen:
        found = _sum_over(r, found, dim - x.dim())
    shape = [1 if d in chosen else s for d, s in enumerate(x.shape) if keepdim or d not in chosen]
    return r.builder.reshape(found, short(shape))


def _mean(r: _Recorder, x: Tensor, dims: Sequence[int] | None = None, keepdim: bool = False, **more: Any) -> int:
    count = math.prod(x.shape[dim] for dim in dims) if dims else x.numel()
    return r.builder.apply("mul", _sum(r, x, dims, keepdim), r.node(1 / count))


def _largest_over(r: _Recorder, x: int, axis: int) -> int:
    """The largest along one axis, which stays with size 1."""
    b, shape = r.builder, r.builder.shape(x)
    if -axis > len(shape):
        return x
    kept = (*shape[:axis], 1, *shape[len(shape) + axis + 1 :])
    last = x
    if axis != -1:
        order = [position for position in range(len(shape)) if position != len(shape) + axis]
        last = b.transpose(x, (*order, len(shape) + axis))
    return b.reshape(b.largest(last), kept)


def _above_log_sum(r: _Recorder, x: int, axis: int) -> tuple[int, int]:
    """What is subtracted from x along an axis, so that none is above 0, and the logarithm of the sum of e^ the rest."""
    b = r.builder
    highest = _largest_over(r, x, axis)
    return highest, b.apply("log", _sum_over(r, b.apply("exp", b.apply("sub", x, highest)), axis))


def _log_softmax(r: _Recorder, x: Tensor, dim: int, half_to_float: bool) -> int:
    a = r.node(x)
    highest, log_sum = _above_log_sum(r, a, dim if dim < 0 else dim - x.dim())
    return r.builder.apply("sub", r.builder.apply("sub", a, highest), log_sum)


def _log_sum_exp(r: _Recorder, x: Tensor, dims: Sequence[int], keepdim: bool = False) -> int:
    if len(dims) != 1:
        raise CannotLower("its step takes a logarithm of a sum over several axes at once; accepted: one")
    dim = dims[0] % x.dim()
    found = r.builder.apply("add", *_above_log_sum(r, r.node(x), dim - x.dim()))
    shape = [1 if d == dim else s for d, s in enumerate(x.shape) if keepdim or d != dim]
    return r.builder.reshape(found, short(shape))


def _scaled(r: _Recorder, x: int, weight: Tensor | None, bias: Tensor | None) -> int:
    x = x if weight is None else r.builder.apply("mul", x, r.node(weight))
    return x if bias is None else r.builder.apply("add", x, r.node(bias))


def _over_deviation(r: _Recorder, x: int, epsilon: float) -> int:
    """x over the root of its mean square, along the last axis."""
    b, size = r.builder, r.builder.shape(x)[-1]
    squares = b.reshape(b.sum(b.apply("mul", x, x)), (*b.shape(x)[:-1], 1))
    deviation = b.apply("sqrt", b.apply("add", b.apply("mul", squares, r.node(1 / size)), r.node(epsilon)))
    return b.apply("div", x, b.reshape(deviation, short(b.shape(deviation))))


def _layer_norm(
    r: _Recorder, x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, epsilon: float
) -> list[Any]:
    if len(shape) != 1:
        raise CannotLower("its step normalises several axes at once; accepted: the last")
    b, a = r.builder, r.node(x)
    mean = b.apply("mul", b.reshape(b.sum(a), short((*b.shape(a)[:-1], 1))), r.node(1 / shape[0]))
    return [_scaled(r, _over_deviation(r, b.apply("sub", a, mean), epsilon), weight, bias), None, None]


def _rms_norm(
    r: _Recorder, x: Tensor, shape: Sequence[int], weight: Tensor | None = None, epsilon: float | None = None
) -> list[Any]:
    if len(shape) != 1:
        raise CannotLower("its step normalises several axes at once; accepted: the last")
    epsilon = torch.finfo(x.dtype).eps if epsilon is None else epsilon
    return [_scaled(r, _over_deviation(r, r.node(x), epsilon), weight, None), None]


def _product(r: _Recorder, x: Tensor, y: Tensor, bias: Tensor | None = None) -> int:
    """``x y`` for (..., N, I) and (..., I, O), with a bias (O)."""
    b = r.builder
    a, c = _full(r, x), b.transpose(_full(r, y), (*range(y.dim() - 2), y.dim() - 1, y.dim() - 2))
    if b.fixed[c]:
        # Each of the N rows is a vector: the matrices get an axis of size 1 for them.
        of_c = b.shape(c)
        matrix = c if len(of_c) == 2 else b.reshape(c, (*of_c[:-2], 1, *of_c[-2:]))
        of_bias = None if bias is None or r.builder.shape(r.node(bias)) != of_c[-2:-1] else r.node(bias)
        found = b.matvec(matrix, b.reshape(a, short(b.shape(a)) or (1,)), of_bias)
    elif b.fixed[a]:
        of_a, of_c, of_bias = b.shape(a), b.shape(c), None
        matrix = a if len(of_a) == 2 else b.reshape(a, (*of_a[:-2], 1, *of_a[-2:]))
        turned = b.matvec(matrix, c)
        found = b.transpose(turned, (*range(len(of_c) - 2), len(of_c) - 1, len(of_c) - 2))
    else:
        of_a, of_c, of_bias = b.shape(a), b.shape(c), None
        left = b.reshape(a, (*of_a[:-1], 1, of_a[-1]))
        right = b.reshape(c, (*of_c[:-2], 1, *of_c[-2:]))
        found = b.sum(b.apply("mul", left, right))
    if bias is not None and of_bias is None:
        found = b.apply("add", found, r.node(bias))
    return b.reshape(found, short(b.shape(found)))


def _addmm(r: _Recorder, bias: Tensor, x: Tensor, y: Tensor, *, beta: float = 1, alpha: float = 1) -> int:
    if (beta, alpha) != (1, 1):
        raise CannotLower("its step uses addmm with factors; accepted: none")
    return _product(r, x, y, bias)


def _mv(r: _Recorder, matrix: Tensor, x: Tensor) -> int:
    b = r.builder
    product = b.apply("mul", r.node(matrix), r.node(x))
    return _sum_of_products(r, product)


_FORMS: dict[str, _Form] = {
    **dict.fromkeys(("lift_fresh", "detach", "clone", "alias", "_to_copy", "contiguous"), _same),
    **{name: _unary(name) for name in ("neg", "exp", "log", "sqrt", "abs", "relu", "tanh", "sigmoid")},
    **{name: _binary(name) for name in ("add", "sub", "mul", "maximum", "minimum")},
    "div": _division,
    "remainder": _remainder,
    "eq": _binary("equal"),
    "ne": _differs,
    "lt": _binary("less"),
    "le": _binary("at_most"),
    "gt": _binary("less", swapped=True),
    "ge": _binary("at_most", swapped=True),
    **dict.fromkeys(("bitwise_and", "logical_and"), _of_truths("mul")),
    **dict.fromkeys(("bitwise_or", "logical_or"), _of_truths("maximum")),
    **dict.fromkeys(("bitwise_not", "logical_not"), _of_truths("not")),
    "where": _where,
    "masked_fill": lambda r, x, which, value: _where(r, which, value, x),
    "rsub": _reversed_sub,
    "pow": _power,
    "square": lambda r, x: _power(r, x, 2),
    "rsqrt": lambda r, x: _inverse(r, r.builder.apply("sqrt", r.node(x))),
    "reciprocal": lambda r, x: _inverse(r, r.node(x)),
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": lambda r, x, high: _clamp(r, x, None, high),
    "silu": _silu,
    "softplus": _softplus,
    "gelu": _gelu,
    "log_sigmoid_forward": lambda r, x: [r.builder.apply("log_sigmoid", r.node(x)), None],
    "addcmul": _addcmul,
    "lerp": _lerp,
    "view": _reshaped,
    "_unsafe_view": _reshaped,
    "reshape": _reshaped,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "expand": _expand,
    "permute": _permuted,
    "transpose": _transposed,
    "t": _transposed,
    "slice": _slice,
    "select": _select,
    "unbind": _unbind,
    "split": _split,
    "split_with_sizes": _split_sizes,
    "cat": _cat,
    "stack": _stack,
    "index": _index,
    "embedding": _embedding,
    "sum": _sum,
    "mean": _mean,
    "_log_softmax": _log_softmax,
    "logsumexp": _log_sum_exp,
    "native_layer_norm": _layer_norm,
    "_fused_rms_norm": _rms_norm,
    "mm": _product,
    "bmm": _product,
    "addmm": _addmm,
    "mv": _mv,
}
