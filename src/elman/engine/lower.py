"""From a graph to a Python file that Numba compiles: one function, which does a step for any number of rows.

The nodes are put into units that are done one after the other: a product with a matrix, a sum, a look-up, a copy, or a
loop over elements, into which all operations of one shape go that can. Weights are arguments: models that differ in
them alone share the file. Where each lies in memory is fixed here; :mod:`elman.engine.packing` puts it there.

Everything that a step computes lies in rows of float32 numbers, one row for each text: ``work`` for what one thread
needs, ``shared`` for what the products give, of which each thread computes a part.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from elman.engine.graph import ELEMENTWISE, VIEWS, Graph, Node, Shape, size_of
from elman.engine.native import STEP
from elman.engine.packing import BLOCK, LANES, MAX_CODE, Form, Packed, packed_size, round_up
from elman.engine.trace import CannotLower

Precision: TypeAlias = Literal["float32", "int8"]

_MAX_INPUT = 32767
"""Of the 16 bits that inputs have where matrices have eight; less where a sum of so many could overflow 32 bits."""


class Place(NamedTuple):
    """Where the elements of a value lie: in which array, from where in each row, how far apart along each axis."""

    array: str
    row: int
    """The length of a row of the array; 0 where all rows share the value."""
    offset: int
    strides: tuple[int, ...]


class Part(NamedTuple):
    """A part of the state in an engine's own form."""

    shape: Shape
    offset: int
    is_integer: bool

    @property
    def span(self) -> slice:
        """Its place in a row."""
        return slice(self.offset, self.offset + size_of(self.shape))


@dataclass
class Program:
    """A generated step, and the layout of what it works on."""

    graph: Graph
    precision: Precision
    parts: dict[str, Part]
    source: str = ""
    packed: list[Packed] = field(default_factory=list)
    num_numbers: int = 0
    num_codes: int = 0
    state_size: int = 0
    ints_size: int = 0
    work_size: int = 0
    shared_size: int = 0
    inputs_size: int = 0
    logits_size: int = 0
    logits_are_shared: bool = False
    """Whether each thread writes its own part of the logits, and not all of them."""
    weight_bytes: int = 0
    """What is read of matrices in a step."""
    num_meetings: int = 0
    """How often threads wait for each other in a step."""


def lower(graph: Graph, shapes: Mapping[str, Shape], precision: Precision = "float32") -> Program:
    """Generate the step of a graph.

    Args:
        graph: what :func:`elman.engine.trace.trace` gives.
        shapes: of the parts of the state, without the batch.
        precision: of the matrices.

    Raises:
        CannotLower: the graph asks for something that has no compiled form.
    """
    integers = {name: graph.nodes[index].is_integer for name, index in graph.state.items()}
    sizes = {False: 0, True: 0}
    parts = {}
    for name in graph.state:
        parts[name] = Part(shapes[name], sizes[integers[name]], integers[name])
        sizes[integers[name]] += size_of(shapes[name])
    program = Program(graph, precision, parts, state_size=sizes[False], ints_size=sizes[True])
    _Writer(program).write()
    return program


def _dense(shape: Shape) -> tuple[int, ...]:
    return tuple(size_of(shape[axis + 1 :]) for axis in range(len(shape)))


class _Unit(NamedTuple):
    """Nodes that are done together."""

    kind: str
    """``loop``, or the operation of its only node."""
    nodes: list[int]
    shape: Shape


class _Writer:
    """Writes one program."""

    def __init__(self, program: Program) -> None:
        self.program, self.graph = program, program.graph
        self.nodes = self.graph.nodes
        self.places: dict[int, Place] = {}
        self.lines: list[str] = []
        self._early: list[str] = []
        self._loops: dict[str, str] = {}
        """The text of each loop from its arguments on, and its name."""
        self._packed: dict[tuple[int, str], Packed] = {}
        self._checked: dict[tuple[str, int], None] = {}
        self._zeros = 0
        self._quantised = ""
        self._waiting = False
        self._units: list[_Unit] = []
        self._unit_of: dict[int, int] = {}
        self._outputs = {self.graph.logits, *self.graph.state.values()}
        self._consumers: dict[int, list[int]] = defaultdict(list)
        for index, node in enumerate(self.nodes):
            for argument in node.inputs:
                self._consumers[argument].append(index)
        self._inlined = self._inlined_nodes()

    # What is done together.

    def _dynamic(self) -> Iterator[tuple[int, Node]]:
        return ((i, n) for i, n in enumerate(self.nodes) if i not in self.graph.fixed and not n.is_integer)

    def _inlined_nodes(self) -> dict[int, int]:
        """Elements that only a sum looks at, which computes them itself; each with its sum."""
        found: dict[int, int] = {}
        for total, node in self._dynamic():
            if node.op not in _TOTALS:
                continue
            shape = self.nodes[node.inputs[0]].shape
            allowed = {total}
            for index in range(node.inputs[0], -1, -1):
                candidate = self.nodes[index]
                users = self._consumers[index]
                if (
                    candidate.op in ELEMENTWISE
                    and candidate.shape == shape
                    and users
                    and allowed.issuperset(users)
                    and index not in self._outputs
                    and index not in self.graph.fixed
                ):
                    found[index] = total
                    allowed.add(index)
        return found

    def _plan(self) -> None:
        for index, node in self._dynamic():
            if node.op == "state" or node.op in VIEWS or index in self._inlined:
                if node.op == "reshape" and self._strides(index) is None:
                    self._append("reshape", index)
                continue
            if node.op not in ELEMENTWISE:
                self._append(node.op, index)
                continue
            earliest = 0
            for argument in node.inputs:
                unit = self._unit_of.get(self._base(argument))
                if unit is not None:
                    together = argument in self._unit_of and self._units[unit].kind == "loop"
                    earliest = max(earliest, unit + (not together or self._units[unit].shape != node.shape))
            for unit in range(earliest, len(self._units)):
                if self._units[unit].kind == "loop" and self._units[unit].shape == node.shape:
                    self._units[unit].nodes.append(index)
                    self._unit_of[index] = unit
                    break
            else:
                self._append("loop", index)

    def _append(self, kind: str, index: int) -> None:
        self._unit_of[index] = len(self._units)
        self._units.append(_Unit(kind, [index], self.nodes[index].shape))

    def _base(self, index: int) -> int:
        """The node whose elements a view shows."""
        while self.nodes[index].op in VIEWS and index not in self._unit_of and index not in self.graph.fixed:
            index = self.nodes[index].inputs[0]
        return index

    def _strides(self, index: int) -> tuple[int, ...] | None:
        """How far apart the elements of a node lie in those of its base; none: a view cannot show them so."""
        node = self.nodes[index]
        if node.op not in VIEWS or index in self._unit_of or index in self.graph.fixed:
            return _dense(node.shape)
        return _strides_of_view(node, self.nodes[node.inputs[0]].shape, self._strides(node.inputs[0]))

    # Where things lie.

    def _place(self, index: int) -> Place:
        if index not in self.places:
            node = self.nodes[index]
            if index in self.graph.fixed:
                self.places[index] = Place("numbers", 0, self._keep(index, "plain").at, _dense(node.shape))
            elif node.op == "state":
                part = self.program.parts[node.detail]
                self.places[index] = Place("state", self.program.state_size, part.offset, _dense(node.shape))
            else:  # a view
                source = self._place(node.inputs[0])
                strides = _strides_of_view(node, self.nodes[node.inputs[0]].shape, source.strides)
                if strides is None:
                    raise CannotLower(f"a value is looked at in the shape {list(node.shape)}, which needs a copy")
                offset = source.offset
                if node.op == "slice":
                    axis, start, _ = node.detail
                    offset += start * source.strides[axis]
                self.places[index] = source._replace(offset=offset, strides=strides)
        return self.places[index]

    def _allocate(self, index: int) -> Place:
        """Memory for what a unit gives: in the next state or the logits where it belongs there, else its own."""
        node, program = self.nodes[index], self.program
        strides = _dense(node.shape)
        if index == self.graph.logits:
            program.logits_are_shared = node.op == "matvec"
            place = Place("logits", program.logits_size, 0, strides)
        elif node.op == "matvec":
            place = Place("shared", -1, program.shared_size, strides)
            program.shared_size += round_up(size_of(node.shape))
        elif names := [name for name, after in self.graph.state.items() if after == index]:
            place = Place("new_state", program.state_size, program.parts[names[0]].offset, strides)
        else:
            place = Place("work", -1, program.work_size, strides)
            program.work_size += round_up(size_of(node.shape))
        self.places[index] = place
        return place

    def _keep(self, index: int, form: Form) -> Packed:
        """Room for a fixed node among the weights."""
        if (index, form) not in self._packed:
            shape, program = self.nodes[index].shape, self.program
            at, scales = program.num_numbers, 0
            if form == "plain":
                program.num_numbers += round_up(size_of(shape))
            elif form == "padded":
                program.num_numbers += round_up(shape[-1], BLOCK)
            elif form == "matrix":
                program.num_numbers += packed_size(shape)
                program.weight_bytes += 4 * packed_size(shape)
            else:
                scales, at = at, program.num_codes
                program.num_numbers += size_of(shape[:-2]) * round_up(shape[-2], BLOCK)
                program.num_codes += packed_size(shape, in_pairs=True)
                program.weight_bytes += packed_size(shape, in_pairs=True)
            self._packed[index, form] = Packed(index, form, at, scales)
        return self._packed[index, form]

    # What is written.

    def write(self) -> None:
        """Fill in the program."""
        program = self.program
        program.logits_size = size_of(self.nodes[self.graph.logits].shape)
        self._plan()
        for unit in self._units:
            self._write(unit)
        for name, index in self.graph.state.items():
            part, nowhere = program.parts[name], Place("", 0, 0, ())
            if part.is_integer:
                self._write_integers(index, part)
            elif self.places.get(index, nowhere)[::2] != ("new_state", part.offset):
                self._meet_for([index])
                target = Place("new_state", program.state_size, part.offset, _dense(self.nodes[index].shape))
                self._loop(self.nodes[index].shape, [], [(index, target)])
        if self.places.get(self.graph.logits, Place("", 0, 0, ())).array != "logits":
            self._meet_for([self.graph.logits])
            shape = self.nodes[self.graph.logits].shape
            self._loop(shape, [], [(self.graph.logits, Place("logits", program.logits_size, 0, _dense(shape)))])
        # Rows of equal distance from each other would meet in the same places of the processor's cache.
        program.work_size = _odd(program.work_size)
        program.shared_size = _odd(program.shared_size)
        program.inputs_size = _odd(program.inputs_size)
        program.packed = list(self._packed.values())
        zeros = program.num_numbers
        program.num_numbers += self._zeros
        sizes = {"WORK": program.work_size, "SHARED": program.shared_size, "INPUTS": program.inputs_size}
        lengths = {**sizes, "ZEROS": zeros}
        # Not @njit, for which Numba would compile a loop for every offset that it is called with.
        loops = [f"@register_jitable\ndef {name}{text}\n\n\n" for text, name in self._loops.items()]
        program.source = _source(program, lengths, loops, [*self._checks(), *self._early, *self.lines])

    def _checks(self) -> list[str]:
        """Every integer is checked before anything is looked up with it."""
        lines = ["    for row in range(rows):"] if self._checked else []
        for name, size in self._checked:
            lines += [f"        if {name} < 0 or {name} >= {size}:", "            return 1"]
        return lines

    def _write(self, unit: _Unit) -> None:
        inputs = [i for index in unit.nodes for i in self._leaves(index)]
        self._meet_for(inputs)
        index = unit.nodes[0]
        if unit.kind == "loop":
            stores = [(i, self._allocate(i)) for i in unit.nodes if self._is_stored(i)]
            self._loop(unit.shape, unit.nodes, stores)
        elif unit.kind in _TOTALS:
            inside = sorted(i for i, total in self._inlined.items() if total == index)
            self._loop(self.nodes[self.nodes[index].inputs[0]].shape, inside, [], (index, self._allocate(index)))
        elif unit.kind == "matvec":
            self._matvec(index)
        elif unit.kind == "row":
            self._row(index)
        elif unit.kind == "as_number":
            self._as_number(index)
        elif unit.kind == "concat":
            self._concat(index)
        elif unit.kind == "reshape":
            source = self.nodes[index].inputs[0]
            target = self._allocate(index)
            shape = self.nodes[source].shape
            self._loop(shape, [], [(source, target._replace(strides=_dense(shape)))])
        else:
            raise CannotLower(f"the operation {unit.kind!r} has no compiled form where it stands")

    def _leaves(self, index: int) -> list[int]:
        """The arguments of a node, and those of what is computed inside it."""
        found = []
        for argument in self.nodes[index].inputs:
            found += self._leaves(argument) if argument in self._inlined else [argument]
        return found

    def _is_stored(self, index: int) -> bool:
        unit = self._unit_of[index]
        return index in self._outputs or any(self._unit_of.get(i) != unit for i in self._consumers[index])

    def _meet_for(self, inputs: Sequence[int]) -> None:
        """All threads wait for each other where a product is read that they computed together."""
        if self._waiting and any(self.nodes[self._base(i)].op == "matvec" for i in inputs):
            self.program.num_meetings += 1
            self._waiting = False
            self.lines.append(f"    meet(arrivals, met + {self.program.num_meetings}, threads)")

    def _loop(
        self,
        shape: Shape,
        nodes: Sequence[int],
        stores: Sequence[tuple[int, Place]],
        total: tuple[int, Place] | None = None,
    ) -> None:
        """A loop over elements: compute nodes, store some; or add all of the last axis up, or find the largest."""
        inside = set(nodes)
        read = [i for index in nodes for i in self.nodes[index].inputs] + [i for i, _ in stores]
        summed = -1 if total is None else self.nodes[total[0]].inputs[0]
        read += [] if total is None else [summed]
        leaves = [i for i in dict.fromkeys(read) if i not in inside and self.nodes[i].op != "number"]
        # First where everything lies: what is read, what is written, and the sum.
        places = [_spread(self._place(i), self.nodes[i].shape, shape) for i in leaves]
        places += [_spread(place, shape, shape) for _, place in stores]
        places += [] if total is None else [total[1]._replace(strides=(*total[1].strides, 0))]
        places = [p._replace(strides=p.strides or (0,)) for p in places]
        shape, places = _merged(shape or (1,), places, keep_last=total is not None)
        targets = places[len(leaves) :]
        if any(place.strides[-1] != 1 and shape[-1] != 1 for place in targets[: len(stores)]):
            raise CannotLower("a value is stored with gaps between its elements")
        # Then the text, in names that are the same wherever the same is done: such a loop is written once.
        names = {i: f"x{k}" for k, i in enumerate(leaves)} | {i: f"v{k}" for k, i in enumerate(nodes)}

        def name(index: int) -> str:
            node = self.nodes[index]
            if node.op == "number" and not math.isfinite(node.detail):
                raise CannotLower(f"its step holds the number {node.detail}")
            return f"splat({node.detail!r})" if node.op == "number" else names[index]

        out = ["    for row in range(rows):"]
        for axis, size in enumerate(shape[:-1]):
            out.append(f"{'    ' * (axis + 2)}for i{axis} in range({size}):")
        pad = "    " * (len(shape) + 1)
        for k, place in enumerate(places):
            steps = [f" + i{axis} * {stride}" for axis, stride in enumerate(place.strides[:-1]) if stride]
            row = f"row * {_length(place)} + " if place.row else ""
            out.append(f"{pad}at{k} = {row}o{k}{''.join(steps)}")
        for k, place in enumerate(places[: len(leaves)]):
            if place.strides[-1] == 0:
                out.append(f"{pad}x{k} = spread({place.array}, at{k})")
        begin, join, fill, finish = _TOTALS["sum" if total is None else self.nodes[total[0]].op]
        if total is not None:
            out.append(f"{pad}so_far = splat({begin})")
        whole = shape[-1] // LANES * LANES

        def body(pad: str, count: int) -> None:
            first, more = ("_first", f", {count}") if count < LANES else ("", "")
            for k, place in enumerate(places[: len(leaves)]):
                step = place.strides[-1]
                if step == 1:
                    out.append(f"{pad}x{k} = load{first}({place.array}, at{k} + i{more})")
                elif step:
                    out.append(f"{pad}x{k} = gather({place.array}, at{k} + i * {step}, {step}, {count})")
            for index in nodes:
                node = self.nodes[index]
                out.append(f"{pad}{names[index]} = {_NAMES.get(node.op, node.op)}({', '.join(map(name, node.inputs))})")
            for k, (i, place) in enumerate(stores, len(leaves)):
                out.append(f"{pad}store{first}({place.array}, at{k} + i, {name(i)}{more})")
            if total is not None:
                value = f"keep_first({name(summed)}, {fill}{more})" if more else name(summed)
                out.append(f"{pad}so_far = {join}(so_far, {value})")

        if whole:
            out.append(f"{pad}for i in range(0, {whole}, {LANES}):")
            body(pad + "    ", LANES)
        if shape[-1] > whole:
            out.append(f"{pad}i = {whole}")
            body(pad, shape[-1] - whole)
        if total is not None:
            out.append(f"{pad}store_first({targets[-1].array}, at{len(places) - 1}, splat({finish}(so_far)), 1)")
        self._call([place.array for place in places], out, [place.offset for place in places])

    def _call(self, names: Sequence[str], body: Sequence[str], offsets: Sequence[int]) -> None:
        """Call a function of some arrays and the offsets o0, o1, ...; one with the same body is written once."""
        arrays = list(dict.fromkeys(names))
        parameters = [*arrays, "rows", *(f"o{k}" for k in range(len(offsets)))]
        text = "\n".join([f"({', '.join(parameters)}):", *body])
        name = self._loops.setdefault(text, f"loop_{len(self._loops)}")
        self.lines.append(f"    {name}({', '.join([*arrays, 'rows', *map(str, offsets)])})")

    def _concat(self, index: int) -> None:
        node, target = self.nodes[index], self._allocate(index)
        offset = target.offset
        for part in node.inputs:
            shape = self.nodes[part].shape
            self._loop(shape, [], [(part, target._replace(offset=offset))])
            offset += shape[node.detail] * target.strides[node.detail]

    def _row(self, index: int) -> None:
        table, which = self.nodes[index].inputs
        target, width = self._allocate(index), size_of(self.nodes[table].shape[1:])
        at = self._keep(table, "plain").at
        for position, name in enumerate(self._elements(which)):
            if not name.endswith("]"):
                raise CannotLower(f"its step looks a row up by a number that it computes, {name}")
            self._checked[name, self.nodes[table].shape[0]] = None
            out = [
                "    for row in range(rows):",
                f"        at0 = o0 + {name} * {width}",
                f"        at1 = row * {_length(target)} + o1",
                f"        for i in range(0, {width // LANES * LANES}, {LANES}):",
                f"            store({target.array}, at1 + i, load(numbers, at0 + i))",
            ]
            if left := width % LANES:
                where = f"at1 + {width - left}, load_first(numbers, at0 + {width - left}, {left})"
                out.append(f"        store_first({target.array}, {where}, {left})")
            arrays = ["numbers", name.partition("[")[0], target.array]
            self._call(arrays, out, [at, target.offset + position * width])

    def _as_number(self, index: int) -> None:
        target = self._allocate(index)
        self.lines.append("    for row in range(rows):")
        for position, text in enumerate(self._elements(self.nodes[index].inputs[0])):
            at = f"row * {_length(target)} + {target.offset + position}"
            self.lines.append(f"        {target.array}[{at}] = {text}")

    def _elements(self, index: int) -> list[str]:
        """The integers that a node holds, each as it is read or computed."""
        node = self.nodes[index]
        if node.op == "number" and node.detail.is_integer():
            return [str(int(node.detail))]
        if not node.is_integer:
            raise CannotLower(f"its step makes integers of numbers ({node.op})")
        if node.op == "token":
            return ["tokens[row]"]
        if node.op == "state":
            part = self.program.parts[node.detail]
            return [f"ints[row * {self.program.ints_size} + {part.offset + i}]" for i in range(size_of(node.shape))]
        if node.op == "concat" and len(node.shape) == 1:
            return [name for i in node.inputs for name in self._elements(i)]
        if node.op == "slice" and len(node.shape) == 1:
            return self._elements(node.inputs[0])[node.detail[1] : node.detail[2]]
        if node.op == "reshape":
            return self._elements(node.inputs[0])
        if node.op in _OF_INTEGERS:
            given = [np.reshape(self._elements(i), self.nodes[i].shape) for i in node.inputs]
            columns = (np.broadcast_to(texts, node.shape).ravel().tolist() for texts in given)
            return [_OF_INTEGERS[node.op].format(*texts) for texts in zip(*columns, strict=True)]
        raise CannotLower(f"its step does more with integers than a compiled one can ({node.op})")

    def _write_integers(self, index: int, part: Part) -> None:
        self.lines.append("    for row in range(rows):")
        for position, name in enumerate(self._elements(index)):
            self.lines.append(f"        new_ints[row * {self.program.ints_size} + {part.offset + position}] = {name}")

    def _matvec(self, index: int) -> None:
        node = self.nodes[index]
        matrix, x = node.inputs[:2]
        of_matrix, of_x = self.nodes[matrix].shape, self.nodes[x].shape
        outputs, columns = of_matrix[-2:]
        lead = node.shape[:-1]
        target, source = self._allocate(index), self._place(x)
        if source.strides[-1] not in (1, 0) or (source.strides[-1] == 0 and columns > 1):
            raise CannotLower("a matrix is multiplied by a vector with gaps between its elements")
        in_bytes = self.program.precision == "int8"
        packed = self._keep(matrix, "bytes" if in_bytes else "matrix")
        per_matrix = packed_size(of_matrix[-2:], in_bytes)
        bias = self._bias(node, outputs)
        steps_x = _spread(source._replace(strides=source.strides[:-1]), of_x[:-1], lead).strides
        steps_w = _spread(Place("", 0, 0, _dense(of_matrix[:-2])), of_matrix[:-2], lead).strides
        pad, terms = "    ", {"x": "", "w": "", "s": "", "y": ""}
        for axis, size in enumerate(lead):
            self.lines.append(f"{pad}for i{axis} in range({size}):")
            pad += "    "
            terms["x"] += f" + i{axis} * {steps_x[axis]}"
            terms["w"] += f" + i{axis} * {steps_w[axis] * per_matrix}"
            terms["s"] += f" + i{axis} * {steps_w[axis] * round_up(outputs, BLOCK)}"
            terms["y"] += f" + i{axis} * {target.strides[axis]}"
        at_x, stride_x = f"{source.offset}{terms['x']}", _length(source)
        where_y = f"{target.array}, {target.offset}{terms['y']}, {_length(target)}"
        blocks = -(-outputs // BLOCK)
        share = f"{blocks} * thread // threads, {blocks} * (thread + 1) // threads, backwards"
        if in_bytes:
            self.program.inputs_size = max(self.program.inputs_size, round_up(columns) + LANES)
            what = f"{source.array}, {at_x}, {stride_x}, {columns}"
            if lead or what != self._quantised:
                limit = min(_MAX_INPUT, (2**31 - 1) // (MAX_CODE * columns))
                self.lines.append(f"{pad}quantise({what}, {float(limit)}, inputs, INPUTS, input_scales, rows)")
            self._quantised = "" if lead else what
            self.lines.append(
                f"{pad}product_of_bytes(codes, {packed.at}{terms['w']}, {outputs}, {-(-columns // 2)}, numbers, "
                f"{bias}, {packed.scales}{terms['s']}, inputs, 0, INPUTS, input_scales, {where_y}, rows, {share})"
            )
        else:
            line = (
                f"product(numbers, {packed.at}{terms['w']}, {outputs}, {columns}, numbers, {bias}, 0, "
                f"{source.array}, {at_x}, {stride_x}, numbers, {where_y}, rows, {share})"
            )
            if source.array == "state" and not lead and self.program.num_meetings:
                # It waits for nothing in the step. First in one and late in the next, it finds its matrix in the cache.
                self._early[:0] = ["    if backwards:", f"        {line}"]
                self.lines += ["    if not backwards:", f"        {line}"]
            else:
                self.lines.append(f"{pad}{line}")
        self._waiting = True

    def _bias(self, node: Node, outputs: int) -> str:
        if len(node.inputs) > 2:
            return str(self._keep(node.inputs[2], "padded").at)
        self._zeros = max(self._zeros, round_up(outputs, BLOCK))
        return "ZEROS"


_LOWEST = -3.4028234663852886e38
_TOTALS = {
    "sum": (0.0, "add", "splat(0.0)", "total"),
    "largest": (_LOWEST, "maximum", f"splat({_LOWEST})", "largest"),
}
"""Along an axis: what it begins with, how numbers are taken in, what stands for none, what is done at the end."""
_OF_INTEGERS = {
    "add": "({} + {})",
    "sub": "({} - {})",
    "mul": "({} * {})",
    "maximum": "max({}, {})",
    "minimum": "min({}, {})",
    "remainder": "({} % {})",
    "equal": "(1 if {} == {} else 0)",
    "less": "(1 if {} < {} else 0)",
    "at_most": "(1 if {} <= {} else 0)",
    "where": "({1} if {0} != 0 else {2})",
}
"""Operations on integers, of which a step has few: they are written where they are used."""
_NAMES = {"abs": "absolute"}
_LENGTHS = {"work": "WORK", "shared": "SHARED"}
"""Lengths of rows that are known when all is written."""


def _length(place: Place) -> str:
    return _LENGTHS.get(place.array, str(place.row))


def _odd(size: int) -> int:
    """A length of rows that is an odd multiple of sixteen."""
    return max(size, LANES) + (LANES if size and size // LANES % 2 == 0 else 0)


def _strides_of_view(node: Node, of: Shape, strides: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The strides of a view of something of a shape with strides; none: there are none."""
    if strides is None:
        return None
    if node.op == "slice":
        return strides
    if node.op == "transpose":
        return tuple(strides[axis] for axis in node.detail)
    if node.op == "broadcast":
        return _spread(Place("", 0, 0, strides), of, node.shape).strides
    return _reshaped_strides(of, strides, node.shape)


def _reshaped_strides(of: Shape, strides: tuple[int, ...], shape: Shape) -> tuple[int, ...] | None:
    """Axes are matched from the first: those that make up one another must lie in memory as one."""
    old = [(size, stride) for size, stride in zip(of, strides, strict=True) if size != 1]
    found: list[int] = []
    size, stride = 1, 0  # what is left of the old axis, and how far apart its elements lie
    for new in shape:
        if new == 1:
            found.append(0)
            continue
        if size == 1:
            if not old:
                return None
            size, stride = old.pop(0)
        while size < new:  # take further axes in
            if not old or stride != old[0][0] * old[0][1]:
                return None
            size, stride = size * old[0][0], old[0][1]
            old.pop(0)
        if size % new:
            return None
        found.append(stride * (size // new))
        size //= new
    return tuple(found)


def _spread(place: Place, shape: Shape, onto: Shape) -> Place:
    """The place of something that is broadcast onto a larger shape."""
    strides = [0 if size == 1 else stride for size, stride in zip(shape, place.strides, strict=True)]
    return place._replace(strides=(*[0] * (len(onto) - len(shape)), *strides))


def _merged(shape: Shape, places: list[Place], keep_last: bool) -> tuple[Shape, list[Place]]:
    """Neighbouring axes made one where everything lies in memory as along one."""
    axis = len(shape) - (3 if keep_last else 2)
    while axis >= 0:
        outer, inner = shape[axis : axis + 2]
        if 1 in (outer, inner) or all(p.strides[axis] == inner * p.strides[axis + 1] for p in places):
            shape = (*shape[:axis], outer * inner, *shape[axis + 2 :])
            kept = axis if inner == 1 else axis + 1
            places = [p._replace(strides=(*p.strides[:axis], p.strides[kept], *p.strides[axis + 2 :])) for p in places]
        axis -= 1
    return shape, places


def _source(program: Program, lengths: Mapping[str, int], loops: Sequence[str], lines: Sequence[str]) -> str:
    """The whole file."""
    graph = "\n".join(f"# {line}" for line in str(program.graph).splitlines())
    constants = "\n".join(f"{name} = {value}" for name, value in lengths.items())
    return (
        f'"""One step of a model, written by Elman from the graph below; matrices in {program.precision}."""\n\n'
        "from numba.extending import register_jitable\n\n"
        "from elman.engine.kernels import meet, product, product_of_bytes, quantise\n"
        "from elman.engine.lanes import *\n\n"
        f"{graph}\n\n{constants}\n\n\n"
        f"{''.join(loops)}"
        f"def step({', '.join(STEP)}):\n" + "\n".join(lines) + "\n    return 0\n"
    )
