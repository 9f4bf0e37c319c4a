"""How near the linear recurrence comes to the speed of memory: each form beside a copy, in one run.

    python benchmarks/scan.py --rows 32 --steps 512 --hidden 512

The copy is ``torch.clone`` of three arrays of the same size: three read, three written. Forward, the recurrence reads
two and writes one; forward and backward together it reads five and writes three. Bandwidth is bytes read and written,
divided by seconds. All of these take new memory, which the system has to clear first; "copy, no new memory" does not,
and is printed beside them. The figures are medians, the share is that of the first copy.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from elman.scan.linear import Backend, linear_recurrence


def seconds_of(forms: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The median time of each; they take turns, so that a machine whose speed drifts is fair to all."""
    found: dict[str, list[float]] = {name: [] for name in forms}
    for turn in range(repeats + 1):
        for name, form in forms.items():
            started = time.perf_counter()
            form()
            if turn:  # the first compiles
                found[name].append(time.perf_counter() - started)
    return {name: statistics.median(times) for name, times in found.items()}


def forward(backend: Backend, tensors: list[Tensor]) -> None:
    """States alone."""
    with torch.no_grad():
        linear_recurrence(*tensors, backend)


def forward_and_backward(backend: Backend, leaves: list[Tensor], of_h_BTH: Tensor) -> None:
    """States, and the gradients of all arguments."""
    h_BTH, _ = linear_recurrence(*leaves, backend)
    torch.autograd.grad(h_BTH, leaves, of_h_BTH)


def main() -> None:
    """Measure and print a line of JSON for each form."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    generator = torch.Generator().manual_seed(1)
    shape = (arguments.rows, arguments.steps, arguments.hidden)
    a, b, of_h = torch.rand(3, *shape, generator=generator).unbind()
    tensors = [a, b, torch.rand(shape[0], shape[2], generator=generator)]
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    backends: tuple[Backend, ...] = ("compiled", "parallel", "sequential")
    # Arrays read and written by each.
    moved = (
        {"copy": 6, "copy, no new memory": 6}
        | dict.fromkeys(backends, 3)
        | {f"{name}, with gradients": 8 for name in backends}
    )
    forms: dict[str, Callable[[], object]] = {"copy": lambda: [tensor.clone() for tensor in (a, b, of_h)]}
    kept = torch.empty(3, *shape)
    forms["copy, no new memory"] = lambda: [to.copy_(tensor) for to, tensor in zip(kept, (a, b, of_h), strict=True)]
    forms |= {name: partial(forward, name, tensors) for name in backends}
    forms |= {f"{name}, with gradients": partial(forward_and_backward, name, leaves, of_h) for name in backends}
    seconds = seconds_of(forms, arguments.repeats)
    bandwidth = {name: moved[name] * a.nbytes / seconds[name] for name in forms}
    where = {
        "shape": list(shape),
        "threads": arguments.threads,
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    for name in forms:
        figures = {
            "milliseconds": round(1000 * seconds[name], 2),
            "gigabytes_per_second": round(bandwidth[name] / 1e9, 2),
            "share_of_copy": round(bandwidth[name] / bandwidth["copy"], 3),
        }
        print(json.dumps({"form": name, **figures, **where}), flush=True)


if __name__ == "__main__":
    main()
