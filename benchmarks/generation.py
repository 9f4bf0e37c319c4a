"""How fast text comes: the compiled step beside PyTorch's loops and ONNX Runtime, in one run of some minutes.

    python benchmarks/generation.py --save

Two-layer LSTMs with random weights take the most probable token again and again. Every form takes turns with the
others, so that a machine whose speed drifts is fair to all; a figure is the median of its turns, at the number of
threads where that is largest. "Elman" draws by `Engine.draw`, as `elman sample` does; "Elman, by step" gives every
token back to Python, as penalties and bans need it. ONNX Runtime (`pip install onnx onnxruntime`) runs the same step as
a graph of matrix products, in float32 and with its dynamic quantisation to eight bits; `torch.compile` needs a C++
compiler. Where one of them is missing, it is left out, and the last line says so. The loss in eight bits is the
difference in mean negative log-likelihood of a random text. What the machine allows is the speed at which as many
bytes as a step reads of matrices are multiplied by a vector, row by row from front to back, in as many threads, which
take turns with the rest: the best of its turns, since it is a limit. Then come 64 streams at once, beside one matrix
product of the size of each of the model's matrices; and how long a first token takes in a process of its own, all being
compiled before.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor, nn

from elman.config import SamplingConfig
from elman.engine import Drawing, Engine
from elman.generation import Sampler
from elman.models.contract import LanguageModel
from elman.models.file import Bundle, save_model
from elman.models.kinds import build_model, model_config
from elman.text.tokenizers import CharTokenizer

Step = Callable[[int], int]
"""Reads a token and gives the most probable next one; what it carries, it keeps."""
Stream = Callable[[int], None]
"""Draws so many tokens more."""
SIZES = ((128, 65), (512, 65), (200, 10_000), (650, 33_278))
NUM_STREAMS = 64


class Form(NamedTuple):
    """A way to generate."""

    name: str
    precision: str
    threads: int
    make: Callable[[], Stream]


def stream_of(step: Step) -> Stream:
    """Token after token by a step."""
    token = 1

    def stream(count: int) -> None:
        nonlocal token
        for _ in range(count):
            token = step(token)

    return stream


def model_of(hidden_size: int, vocab_size: int) -> LanguageModel:
    """A two-layer LSTM with random weights."""
    sizes = {"hidden_size": hidden_size, "embedding_size": hidden_size, "num_layers": 2}
    return build_model(model_config({"kind": "lstm", **sizes}), vocab_size, seed=1, dtype=torch.float32)


def weights_of(network: LanguageModel) -> dict[str, Tensor]:
    """The parameters by name, without gradients."""
    return {name: parameter.detach() for name, parameter in network.named_parameters()}


def torch_lstm(network: LanguageModel) -> Step:
    """The usual loop: ``nn.Embedding``, ``nn.LSTM`` over one token, ``nn.Linear``."""
    p = weights_of(network)
    vocab_size, size = p["embedding"].shape
    embedding, lstm, linear = nn.Embedding(vocab_size, size), nn.LSTM(size, size, 2), nn.Linear(size, vocab_size)
    with torch.no_grad():
        embedding.weight.copy_(p["embedding"])
        linear.weight.copy_(p["head.weight"])
        for k in range(2):
            for ours, theirs in (("weight_ih", "weight_ih"), ("weight_hh", "weight_hh"), ("bias", "bias_ih")):
                lstm.get_parameter(f"{theirs}_l{k}").copy_(p[f"layers.{k}.{ours}"])
            lstm.get_parameter(f"bias_hh_l{k}").zero_()
    carried: Any = None

    @torch.no_grad()
    def step(token: int) -> int:
        nonlocal carried
        output, carried = lstm(embedding(torch.tensor([[token]])), carried)
        return int(linear(output[0, 0]).argmax())

    return step


def torch_cells(network: LanguageModel) -> Step:
    """``torch.lstm_cell`` on prepared weights."""
    p = weights_of(network)
    layers = [(p[f"layers.{k}.weight_ih"], p[f"layers.{k}.weight_hh"], p[f"layers.{k}.bias"]) for k in range(2)]
    zeros = torch.zeros(1, layers[0][1].shape[1])
    states = [(zeros, zeros), (zeros, zeros)]
    none = torch.zeros_like(layers[0][2])

    @torch.inference_mode()
    def step(token: int) -> int:
        x = p["embedding"][token : token + 1]
        for k, (of_input, of_state, bias) in enumerate(layers):
            states[k] = torch.lstm_cell(x, states[k], of_input, of_state, bias, none)
            x = states[k][0]
        return int(torch.addmm(p["head.bias"], x, p["head.weight"].t()).argmax())

    return step


def torch_joined(network: LanguageModel) -> Step:
    """One product of matrix and vector for each layer, into memory of its own."""
    p = weights_of(network)
    matrices = [torch.cat([p[f"layers.{k}.weight_ih"], p[f"layers.{k}.weight_hh"]], 1) for k in range(2)]
    biases = [p[f"layers.{k}.bias"] for k in range(2)]
    size = matrices[0].shape[0] // 4
    inputs = [torch.zeros(2 * size) for _ in range(2)]
    cells = [torch.zeros(size) for _ in range(2)]
    gates, logits = torch.zeros(4 * size), torch.zeros(len(p["head.bias"]))
    i, f, g, o = gates.split(size)

    @torch.inference_mode()
    def step(token: int) -> int:
        x = p["embedding"][token]
        for k in range(2):
            inputs[k][:size] = x
            torch.addmv(biases[k], matrices[k], inputs[k], out=gates)
            torch.sigmoid_(gates[: 2 * size])
            torch.sigmoid_(o)
            torch.tanh_(g)
            cells[k].mul_(f).addcmul_(i, g)
            x = o * cells[k].tanh()
            inputs[k][size:] = x
        return int(torch.addmv(p["head.bias"], p["head.weight"], x, out=logits).argmax())

    return step


def torch_compiled(network: LanguageModel) -> Step:
    """The same as :func:`torch_joined`, a whole step by ``torch.compile``."""
    p = weights_of(network)
    matrices = [torch.cat([p[f"layers.{k}.weight_ih"], p[f"layers.{k}.weight_hh"]], 1) for k in range(2)]
    biases = [p[f"layers.{k}.bias"] for k in range(2)]
    size = matrices[0].shape[0] // 4

    def whole(token: Tensor, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        x, after = nn.functional.embedding(token, p["embedding"])[0], []
        for k in range(2):
            i, f, g, o = torch.addmv(biases[k], matrices[k], torch.cat([x, states[2 * k]])).split(size)
            c = f.sigmoid() * states[2 * k + 1] + i.sigmoid() * g.tanh()
            x = o.sigmoid() * c.tanh()
            after += [x, c]
        return torch.addmv(p["head.bias"], p["head.weight"], x).argmax(), after

    torch.compiler.reset()
    compiled = torch.compile(whole, fullgraph=True, dynamic=False)
    states = [torch.zeros(size) for _ in range(4)]

    @torch.inference_mode()
    def step(token: int) -> int:
        nonlocal states
        best, states = compiled(torch.tensor([token]), states)
        return int(best)

    return step


def engine(network: LanguageModel, precision: Any, threads: int) -> Stream:
    """Elman's compiled loop."""
    compiled = Engine(network, precision=precision, num_threads=threads)
    how = Drawing(-1, temperature=0.0)  # no boundary: it goes on and on
    logits_BV, state = compiled.step((1,), compiled.initial_state(1))
    logits_V = logits_BV[0]

    def stream(count: int) -> None:
        nonlocal logits_V, state
        drawn = compiled.draw(logits_V, state, how, np.zeros(count))
        logits_V, state = drawn.logits_V, drawn.state

    return stream


def engine_by_step(network: LanguageModel, precision: Any, threads: int) -> Step:
    """Elman's compiled step."""
    compiled = Engine(network, precision=precision, num_threads=threads)
    state = compiled.initial_state(1)

    def step(token: int) -> int:
        nonlocal state
        logits_BV, state = compiled.step((token,), state)
        return int(logits_BV[0].argmax())

    return step


def onnx_graph(network: LanguageModel, path: Path) -> None:
    """Write the step of a two-layer LSTM: look-up, a product for each layer, gates, output."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    p = {name: tensor.numpy() for name, tensor in weights_of(network).items()}
    vocab_size, size = p["embedding"].shape
    constants = {"embedding": p["embedding"], "output": p["head.weight"].T.copy(), "output_bias": p["head.bias"]}
    nodes = [helper.make_node("Gather", ["embedding", "token"], ["x0"])]
    for k in range(2):
        constants[f"w{k}"] = np.concatenate([p[f"layers.{k}.weight_ih"], p[f"layers.{k}.weight_hh"]], 1).T.copy()
        constants[f"b{k}"] = p[f"layers.{k}.bias"]
        nodes += [
            helper.make_node("Concat", [f"x{k}", f"h{k}"], [f"xh{k}"], axis=1),
            helper.make_node("MatMul", [f"xh{k}", f"w{k}"], [f"m{k}"]),
            helper.make_node("Add", [f"m{k}", f"b{k}"], [f"s{k}"]),
            helper.make_node("Split", [f"s{k}"], [f"i{k}", f"f{k}", f"g{k}", f"o{k}"], axis=1, num_outputs=4),
            *(helper.make_node("Sigmoid", [f"{gate}{k}"], [f"{gate}s{k}"]) for gate in "ifo"),
            helper.make_node("Tanh", [f"g{k}"], [f"gs{k}"]),
            helper.make_node("Mul", [f"fs{k}", f"c{k}"], [f"kept{k}"]),
            helper.make_node("Mul", [f"is{k}", f"gs{k}"], [f"new{k}"]),
            helper.make_node("Add", [f"kept{k}", f"new{k}"], [f"c{k}_next"]),
            helper.make_node("Tanh", [f"c{k}_next"], [f"ct{k}"]),
            helper.make_node("Mul", [f"os{k}", f"ct{k}"], [f"h{k}_next"]),
        ]
        if k == 0:
            nodes.append(helper.make_node("Identity", ["h0_next"], ["x1"]))
    nodes += [
        helper.make_node("MatMul", ["h1_next", "output"], ["product"]),
        helper.make_node("Add", ["product", "output_bias"], ["logits"]),
    ]
    parts = [f"{part}{k}" for k in range(2) for part in "hc"]
    inputs = [helper.make_tensor_value_info("token", TensorProto.INT64, [1])]
    inputs += [helper.make_tensor_value_info(part, TensorProto.FLOAT, [1, size]) for part in parts]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, vocab_size])]
    outputs += [helper.make_tensor_value_info(f"{part}_next", TensorProto.FLOAT, [1, size]) for part in parts]
    initial = [numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "step", inputs, outputs, initial)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model)
    onnx.save(model, str(path))


def onnx_step(path: Path, size: int, threads: int) -> Step:
    """ONNX Runtime on a step graph."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    parts = ("h0", "c0", "h1", "c1")
    carried = dict.fromkeys(parts, np.zeros((1, size), np.float32))
    names = ["logits", *(f"{part}_next" for part in parts)]

    def step(token: int) -> int:
        nonlocal carried
        logits, *after = session.run(names, {"token": np.array([token]), **carried})
        carried = dict(zip(parts, after, strict=True))
        return int(logits.argmax())

    return step


def onnx_forms(network: LanguageModel, size: int, threads: list[int], folder: Path) -> list[Form]:
    """Both precisions of ONNX Runtime, where it is installed."""
    if not find_spec("onnxruntime") or not find_spec("onnx"):
        return []
    import logging

    from onnxruntime.quantization import QuantType, quantize_dynamic

    whole, small = folder / "step.onnx", folder / "step8.onnx"
    onnx_graph(network, whole)
    logging.getLogger().setLevel(logging.ERROR)  # it recommends a pass over the graph that changes nothing here
    quantize_dynamic(whole, small, weight_type=QuantType.QInt8, op_types_to_quantize=["MatMul"])
    return [
        Form("ONNX Runtime", precision, count, lambda path=path, count=count: stream_of(onnx_step(path, size, count)))
        for precision, path in (("float32", whole), ("int8", small))
        for count in threads
    ]


def run(stream: Stream, threads: int, seconds: float) -> float:
    """Tokens per second of a form for a while."""
    torch.set_num_threads(threads)
    size, count = 4, 0
    stream(size)
    started = now = time.perf_counter()
    while now - started < seconds:
        stream(size)
        count, before, now = count + size, now, time.perf_counter()
        if now - before < 0.005:
            size = min(2 * size, 256)  # as the loop of `elman sample` does
    return count / (now - started)


def loss_in_bytes(network: LanguageModel, num_tokens: int = 300) -> float:
    """Nats per token that eight bits cost, on a random text."""
    tokens = np.random.default_rng(1).integers(0, network.vocab_size, num_tokens + 1)
    nats = []
    for precision in ("float32", "int8"):
        compiled = Engine(network, precision=precision, num_threads=1)
        state, total = compiled.initial_state(1), 0.0
        for token, target in pairwise(tokens):
            logits_BV, state = compiled.step((token,), state)
            x_V = logits_BV[0].astype(np.float64)
            total += float(np.logaddexp.reduce(x_V) - x_V[target])
        nats.append(total / num_tokens)
    return nats[1] - nats[0]


@njit(fastmath=True, nogil=True)
def read_rows(matrix_OI: NDArray[np.float32], x_I: NDArray[np.float32], y_O: NDArray[np.float32], times: int) -> None:
    """A matrix times a vector, again and again."""
    for _ in range(times):
        for row in range(matrix_OI.shape[0]):
            total = np.float32(0)
            for column in range(matrix_OI.shape[1]):
                total += matrix_OI[row, column] * x_I[column]
            y_O[row] = total


def reading(num_bytes: int, threads: int) -> Callable[[float], float]:
    """How often a second so many bytes can be read and multiplied by a vector, each thread having rows of its own."""
    columns = 512
    rows = max(threads, num_bytes // (4 * columns))
    matrix_OI, x_I = np.ones((rows, columns), np.float32), np.ones(columns, np.float32)
    cuts = [rows * thread // threads for thread in range(threads + 1)]
    parts = [(matrix_OI[start:end], x_I, np.zeros(end - start, np.float32)) for start, end in pairwise(cuts)]
    others = ThreadPoolExecutor(max(1, threads - 1))
    read_rows(*parts[0], 1)
    times = max(4, int(1e9 / num_bytes))  # some hundredths of a second, beside which to start threads is nothing

    def measured(seconds: float) -> float:
        best, started = 0.0, time.perf_counter()
        while (now := time.perf_counter()) - started < seconds:
            waiting = [others.submit(read_rows, *part, times) for part in parts[1:]]
            read_rows(*parts[0], times)
            for other in waiting:
                other.result()
            best = max(best, times / (time.perf_counter() - now))
        return best * matrix_OI.nbytes / num_bytes

    return measured


def many_streams(network: LanguageModel, seconds: float) -> tuple[float, float]:
    """Seconds of a step of 64 streams, and of one product of 64 vectors with each matrix; one thread."""
    torch.set_num_threads(1)
    compiled = Engine(network, num_threads=1)
    state, tokens = compiled.initial_state(NUM_STREAMS), np.arange(NUM_STREAMS)
    matrices = [m for name, m in weights_of(network).items() if m.dim() == 2 and name != "embedding"]
    vectors = [torch.randn(NUM_STREAMS, m.shape[1], generator=torch.Generator().manual_seed(1)) for m in matrices]

    def products() -> None:
        for matrix, x in zip(matrices, vectors, strict=True):
            torch.mm(x, matrix.t())

    found: dict[str, list[float]] = {"ours": [], "products": []}
    ended = time.perf_counter() + seconds
    while time.perf_counter() < ended or len(found["ours"]) < 3:
        for name, form in (("ours", lambda: compiled.step(tokens, state)), ("products", products)):
            started = time.perf_counter()
            form()
            found[name].append(time.perf_counter() - started)
    return statistics.median(found["ours"]), statistics.median(found["products"])


def forms_of(network: LanguageModel, size: int, threads: list[int], folder: Path) -> list[Form]:
    """Every form at every number of threads."""
    loops: list[tuple[str, Callable[[LanguageModel], Step]]] = [
        ("torch.nn.LSTM", torch_lstm),
        ("torch.lstm_cell", torch_cells),
        ("torch, joined", torch_joined),
    ]
    if shutil.which("g++") or shutil.which("clang++"):
        loops.append(("torch.compile", torch_compiled))
    forms = [
        Form(name, "float32", n, lambda make=make: stream_of(make(network))) for name, make in loops for n in threads
    ]
    forms += onnx_forms(network, size, threads, folder)
    for precision in ("float32", "int8"):
        for n in threads:
            forms.append(Form("Elman", precision, n, lambda p=precision, n=n: engine(network, p, n)))
            by_step = lambda p=precision, n=n: stream_of(engine_by_step(network, p, n))  # noqa: E731
            forms.append(Form("Elman, by step", precision, n, by_step))
    return forms


def measure(size: int, vocab_size: int, seconds: float, turns: int, threads: list[int]) -> dict[str, Any]:
    """Every form on one model."""
    network = model_of(size, vocab_size)
    speeds: dict[tuple[str, str, int], list[float]] = {}
    bytes_of = {p: Engine(network, precision=p, num_threads=1).program.weight_bytes for p in ("float32", "int8")}
    readings = {(p, n): reading(num_bytes, n) for p, num_bytes in bytes_of.items() for n in threads}
    allowed = dict.fromkeys(readings, 0.0)
    with tempfile.TemporaryDirectory() as folder:
        forms = forms_of(network, size, threads, Path(folder))
        streams = []
        for form in forms:
            torch.set_num_threads(form.threads)
            streams.append(form.make())
            streams[-1](4)
        for _ in range(turns):
            for form, stream in zip(forms, streams, strict=True):
                speed = run(stream, form.threads, seconds / turns)
                speeds.setdefault(form[:3], []).append(speed)
            for key, measured in readings.items():
                allowed[key] = max(allowed[key], measured(seconds / turns))
    median = {key: statistics.median(values) for key, values in speeds.items()}
    best: dict[str, dict[str, Any]] = {}
    for (name, precision, count), speed in median.items():
        label = f"{name} {precision}"
        if label not in best or speed > best[label]["tokens_per_second"]:
            best[label] = {"tokens_per_second": round(speed, 1), "threads": count}
    for precision, num_bytes in bytes_of.items():
        figures = best[f"Elman {precision}"]
        speed, at_most = figures["tokens_per_second"], allowed[precision, figures["threads"]]
        figures["gigabytes_per_second"] = round(num_bytes * speed / 1e9, 2)
        figures["share_of_bandwidth"] = round(speed / at_most, 3)
    rivals = {
        f"{precision} to {rival}": (precision, rival)
        for precision in bytes_of
        for rival in best
        if not rival.startswith("Elman") and (rival.endswith(precision) or rival.startswith("torch"))
    }
    at_best = {p: max(speed for (precision, _), speed in allowed.items() if precision == p) for p in bytes_of}
    ours, products = many_streams(network, seconds)
    return {
        "model": f"2x{size}/{vocab_size}",
        "weight_bytes": bytes_of,
        "forms": best,
        "all": {f"{n} {p} {c} threads": round(v, 1) for (n, p, c), v in median.items()},
        "ratios": {
            name: round(best[f"Elman {precision}"]["tokens_per_second"] / best[rival]["tokens_per_second"], 2)
            for name, (precision, rival) in rivals.items()
        },
        "ratios_that_bandwidth_allows": {
            name: round(at_best[precision] / best[rival]["tokens_per_second"], 2)
            for name, (precision, rival) in rivals.items()
        },
        "loss_in_bytes_nats_per_token": round(loss_in_bytes(network), 6),
        "reading_alone": {
            f"{p} {n} threads": {
                "tokens_per_second": round(speed, 1),
                "gigabytes_per_second": round(bytes_of[p] * speed / 1e9, 2),
            }
            for (p, n), speed in allowed.items()
        },
        "streams_64": {
            "tokens_per_second": round(NUM_STREAMS / ours, 1),
            "share_of_matrix_products": round(products / ours, 3),
        },
    }


FIRST_TOKEN = """
import sys, time
from elman.engine import stepper
from elman.generation import Sampler
from elman.models.file import load_model
bundle = load_model(sys.argv[1])
loaded = time.perf_counter()
next(iter(Sampler(bundle, stepper=stepper(bundle.network))))
print(time.perf_counter() - loaded)
"""


def beginnings(turns: int) -> dict[str, float]:
    """Seconds to a first token, and tokens per second of whole texts, for 2x128/65; the best of some turns."""
    tokenizer = CharTokenizer([chr(33 + i) for i in range(63)])
    bundle = Bundle(model_of(128, tokenizer.size), tokenizer)
    texts = []
    for seed in range(turns):
        settings = SamplingConfig(max_new_tokens=5000, min_new_tokens=5000, temperature=0.8)
        sampler = Sampler(bundle, settings=settings, seed=seed, stepper=Engine(bundle.network, num_threads=1))
        started = time.perf_counter()
        sampler.run()
        texts.append(5000 / (time.perf_counter() - started))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.safetensors")
        save_model(path, bundle)
        first, command = [], []
        words = [sys.executable, "-m", "elman", "sample", str(path), "--max-new-tokens", "1"]
        for _ in range(turns):
            told = subprocess.run([sys.executable, "-c", FIRST_TOKEN, str(path)], capture_output=True, check=True)
            first.append(float(told.stdout))
            started = time.perf_counter()
            subprocess.run(words, capture_output=True, check=True)
            command.append(time.perf_counter() - started)
    return {
        "first_token_after_loading_seconds": round(min(first), 3),
        "whole_command_for_one_token_seconds": round(min(command), 3),
        "tokens_per_second_of_texts_at_temperature_0.8": round(max(texts), 1),
    }


def main() -> None:
    """Measure, and print a line of JSON for each model and one for beginnings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each form")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2] if (os.cpu_count() or 1) > 1 else [1])
    parser.add_argument("--only", help="one model, such as 2x512/65")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/generation.json")
    arguments = parser.parse_args()
    libraries = ("torch", "numba", "numpy", "onnxruntime")
    where = {"machine": platform.machine(), "cpus": os.cpu_count()}
    where |= {name: version(name) for name in libraries if find_spec(name)}
    results = []
    for size, vocab_size in SIZES:
        if arguments.only in (None, f"2x{size}/{vocab_size}"):
            found = measure(size, vocab_size, arguments.seconds, arguments.turns, arguments.threads)
            results.append(found)
            print(json.dumps(found | where), flush=True)
    missing = [name for name in ("onnxruntime", "onnx") if not find_spec(name)]
    missing += [] if shutil.which("g++") or shutil.which("clang++") else ["a C++ compiler, for torch.compile"]
    start = beginnings(arguments.turns)
    print(json.dumps(start | {"missing": missing}), flush=True)
    if arguments.save:
        path = Path(__file__).parent / "results" / "generation.json"
        path.parent.mkdir(exist_ok=True)
        found = {"where": where, "models": results, "start": start}
        path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
