"""What can a family of models remember? Tasks of known answer, learned at short lengths and asked at longer ones.

A task is questions with one right answer each. Every family reads the same questions in the same order, has the same
number of updates and about the same number of parameters; the loss is that of the answers alone. A trial is one family
on one task, and its model and its result lie in a folder of their own, so that what was done is not done again.

An answer is right if each of its tokens, and the boundary that ends it, is the most probable one given the question and
the tokens before: what the model would write by itself. What that is worth is seen against a guess: the answer that is
right most often for one who has kept no more of a question than its end, the last pair or the last term.

Shape letters: B rows, T time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

import elman
from elman.config import CountedConfig, DataConfig, TextConfig, TokenizerConfig, UniformStackConfig, WindowConfig
from elman.data.pairs import Pairs
from elman.data.prepare import Dataset, prepare
from elman.errors import ModelFileError, TrainingError, UserError, nearest
from elman.files import write_atomically
from elman.models.contract import CountedModel
from elman.models.file import MODEL_FILE, Bundle, save_model
from elman.models.kinds import build_model, kind_names, model_class, model_config, model_config_class
from elman.models.state import grows
from elman.settings import resolve
from elman.text.synthetic import Task as Generated
from elman.text.synthetic.tasks import (
    Adding,
    Agreement,
    AssociativeRecall,
    Copying,
    Dyck,
    ModularArithmetic,
    Parity,
    SelectiveCopying,
)
from elman.training.loop import Trainer

Example: TypeAlias = tuple[str, str]
"""A question and its answer."""
Draw: TypeAlias = Callable[[int, int, int], list[Example]]
"""From a length, a seed and a number to so many examples."""
Share: TypeAlias = Callable[[int], float]
"""From a length to a share of the answers."""

GROUPS: Mapping[str, tuple[str, ...]] = {
    "recurrent, the state goes through a nonlinear function": ("elman", "lstm", "gru", "slstm"),
    "recurrent, linear in the state": ("mingru", "mamba", "gated_deltanet"),
    "attention": ("transformer",),
    "the last few characters": ("window", "ngram"),
}
"""The families that are compared where none are named, by what carries their past."""
KINDS = tuple(kind for kinds in GROUPS.values() for kind in kinds)
UPDATES, PARAMETERS = 1000, 30_000
RATES = (0.01, 0.003)
"""Learning rates of AdamW, from which each family gets its own."""
TUNED_ON = "parity"
"""The task by which a family gets its rate."""

_RESULT = "probe.json"
_BATCH = 64
_ROWS_AT_ONCE = 64
_LEARNED_EXAMPLES, _JUDGED_CASES, _ASKED_CASES = 32_000, 200, 500
_JUDGED_SEED, _ASKED_SEED, _SHOWN_SEED = 1_000_001, 1_000_003, 1_000_007
_LONGEST = 1024
"""Tokens of the longest question at least: nothing of it is to fall out of what is attended to."""
_SIZES = range(4, 1025, 4)
_MASTERED, _SOLVED = 0.9, 0.99
"""Shares of answers that are right: what counts as mastered, and what ends the search for a rate."""


def _never(length: int) -> float:
    return 0.0


@dataclass(frozen=True)
class Task:
    """A task, the lengths that are learned, and those that are asked."""

    name: str
    draw: Draw
    unit: str
    """What a length counts."""
    learned: tuple[int, ...]
    asked: tuple[int, ...]
    guessed: str = ""
    """What one answers who has kept nothing but the end of the question; none: nothing that is right to speak of."""
    guess: Share = _never
    """Share of these answers that is right."""
    level: Literal["char", "word"] = "char"
    """The tokens."""

    def example(self) -> Example:
        """One of the shortest that are asked."""
        return self.draw(self.asked[0], _SHOWN_SEED, 1)[0]


def _drawn(generator: type[Generated], *lengths: str, **fixed: int) -> Draw:
    """The examples of a generator, some of whose parameters are the length."""

    def draw(length: int, seed: int, count: int) -> list[Example]:
        task = generator(examples=count, seed=seed, **dict.fromkeys(lengths, length), **fixed)
        return list(task.examples_in(task.text()))

    return draw


def _counted(length: int, seed: int, count: int) -> list[Example]:
    """A number of a's, and as many b's as are missing after the first: all numbers in the last quarter of a length."""
    numbers = range(length - max(1, length // 4) + 1, length + 1)
    return [("a" * number + "b", "b" * (number - 1)) for number in numbers for _ in range(count // len(numbers))]


def _unclosed(depth: int, seed: int, count: int) -> list[Example]:
    """Brackets of two kinds up to the last that is nested so deep, and what closes all that are open by then."""
    # A line has 2 * depth + 1 characters in the mean, and one of ``depth`` reaches the greatest depth.
    lines = Dyck(kinds=2, depth=depth, seed=seed, size=1000 + 2 * count * depth * (2 * depth + 1)).text().split("\n")
    examples = []
    for line in lines[:-1]:
        open_ones, question, answer = "", "", ""
        for place, character in enumerate(line, 1):
            open_ones = open_ones + character if character in "([" else open_ones[:-1]
            if character in "([" and len(open_ones) == depth:
                question = line[:place]
                answer = open_ones[::-1].translate({ord("("): ")", ord("["): "]"})
        if question:
            examples.append((question, answer))
    return examples[:count]


def _one_in(number: int) -> Share:
    return lambda length: 1 / number


def _last_digit(pairs: int) -> float:
    """The pair read last is the one that is asked for, or one of ten digits that happens to be the same."""
    return 1 / pairs + (1 - 1 / pairs) / 10


def _last_term(terms: int) -> float:
    """The last of two terms and more, reckoned from 0, the value that is most common before it.

    After a sum or a difference all five values are equally probable, a product is 0 if either factor is: n terms are 0
    with p(1) = 1/5 and p(n + 1) = 2/3 * 1/5 + 1/3 * (1/5 + 4/5 p(n)), so that p(n) = 3/11 - 4/55 * (4/15)^(n - 1). To
    reckon from 0 is right then, and whatever the value where the last term is ``*0``, one in fifteen.
    """
    zero_before = 3 / 11 - 4 / 55 * (4 / 15) ** (terms - 2)
    return 1 / 15 + 14 / 15 * zero_before


TASKS: Mapping[str, Task] = {
    task.name: task
    for task in (
        Task("copying", _drawn(Copying, "length"), "letters", tuple(range(1, 9)), (4, 8, 12, 16, 24)),
        Task(
            "selective-copying",
            _drawn(SelectiveCopying, "blanks", length=4),
            "dots between four letters",
            tuple(range(9)),
            (4, 8, 16, 32, 64),
        ),
        Task(
            "associative-recall",
            _drawn(AssociativeRecall, "pairs"),
            "pairs",
            tuple(range(1, 7)),
            (3, 6, 9, 12, 18),
            "the digit that was read last",
            _last_digit,
        ),
        Task("anbn", _counted, "a's", tuple(range(2, 13)), (6, 12, 16, 24, 48)),
        Task("dyck-2", _unclosed, "brackets open at once", (1, 2, 3, 4), (2, 4, 6, 8, 12)),
        Task(
            "parity",
            _drawn(Parity, "length"),
            "digits",
            tuple(range(1, 13)),
            (6, 12, 16, 24, 48),
            "always the same",
            _one_in(2),
        ),
        Task(
            "modular-arithmetic",
            _drawn(ModularArithmetic, "terms"),
            "terms",
            tuple(range(1, 6)),
            (3, 5, 8, 12, 20),
            "the last term, reckoned from 0",
            _last_term,
        ),
        Task(
            "adding",
            _drawn(Adding, "length"),
            "digits",
            tuple(range(2, 11)),
            (5, 10, 15, 20, 40),
            "9, the most common sum",
            _one_in(10),
        ),
        Task(
            "agreement",
            _drawn(Agreement, "fewest", "most"),
            "nouns between subject and verb",
            tuple(range(5)),
            (1, 4, 8, 16, 32),
            "always the same",
            _one_in(2),
            level="word",
        ),
    )
}
"""By name."""


@dataclass(frozen=True)
class AtLength:
    """The answers at one length."""

    length: int
    cases: int
    accuracy: float


@dataclass(frozen=True)
class Trial:
    """One family on one task."""

    task: str
    kind: str
    parameters: int
    state_size: int | None
    """Numbers that are carried from one token to the next; none: they grow with the text."""
    learning_rate: float | None
    """None: nothing was trained, only counted."""
    by_length: tuple[AtLength, ...]
    seconds: float
    """Of one core, for all trainings and questions of this trial."""


@dataclass(frozen=True)
class Probed:
    """All trials."""

    updates: int
    parameters: int
    """That every family was to have; those that have whole numbers of units come near."""
    rates: tuple[float, ...]
    learned: Mapping[str, int]
    """The greatest length learned of each task."""
    trials: tuple[Trial, ...]

    def of(self, task: str) -> tuple[Trial, ...]:
        """Those on one task."""
        return tuple(trial for trial in self.trials if trial.task == task)

    def lengths(self, task: str) -> tuple[int, ...]:
        """That were asked of one task."""
        return tuple(one.length for one in self.of(task)[0].by_length)

    def guess(self, task: str) -> tuple[float, ...]:
        """Share of the answers that a guess has right, at each of these lengths."""
        return tuple(map(TASKS[task].guess, self.lengths(task)))

    def reach(self) -> dict[str, dict[str, int | None]]:
        """By family and task: the greatest length up to which nine of ten answers are right, none where not one is."""
        found: dict[str, dict[str, int | None]] = {trial.kind: {} for trial in self.trials}
        for trial in self.trials:
            mastered = takewhile(lambda one: one.accuracy >= _MASTERED, trial.by_length)
            found[trial.kind][trial.task] = max((one.length for one in mastered), default=None)
        return found

    def to_dict(self) -> dict[str, Any]:
        """All of it by name, ready for JSON."""
        return asdict(self) | {"guess": {task: self.guess(task) for task in self.learned}, "reach": self.reach()}


def probe(
    out: str | Path,
    *,
    tasks: Sequence[str] = (),
    kinds: Sequence[str] = (),
    updates: int = UPDATES,
    parameters: int = PARAMETERS,
    rates: Sequence[float] = RATES,
    seed: int = 0,
    on_trial: Callable[[Trial], None] = lambda trial: None,
) -> Probed:
    """Train each family on each task, and ask it at all lengths.

    Args:
        out: the folder of the trials; one that was finished there with the same settings, by the same version, is not
            done again.
        tasks: names of :data:`TASKS`; none: all.
        kinds: families; none: :data:`KINDS`.
        updates: of each training, 64 questions each.
        parameters: of each model; its width is chosen to come near.
        rates: learning rates. Of several, each family is trained at one after the other on :data:`TUNED_ON`, until it
            answers 99 of 100 new questions of the learned lengths rightly; the rate with most right answers, the first
            of equals, is its rate for all tasks.
        seed: of questions and models.
        on_trial: called after each, those by which families get their rates included.

    Raises:
        UserError: there is no such task or family, one is given twice, a number is out of its range, or the folder
            holds trials of other settings or of another version.
        TrainingError: a family's training broke down, at every rate where there are several.
    """
    chosen = _known(tasks, tuple(TASKS), "task") or list(TASKS)
    families = _known(kinds, _askable(), "family") or list(KINDS)
    if updates < 1 or parameters < 1000:
        raise UserError(f"{updates} updates and {parameters} parameters; accepted: from 1, and from 1,000")
    if not str(out):
        raise UserError("the name of the folder is empty: name one for the trials")
    if not rates or not all(0 < rate < 1 for rate in rates):
        raise UserError(f"rates {', '.join(map(str, rates)) or 'none'}; accepted: one and more, between 0 and 1")

    told = set()

    def trial(name: str, kind: str, *rates: float) -> Trial:
        one = _trial(Path(out), TASKS[name], kind, updates, parameters, rates, seed)
        if (name, kind) not in told:
            told.add((name, kind))
            on_trial(one)
        return one

    trials = []
    for name in chosen:
        for kind in families:
            tried = tuple(rates)
            if name != TUNED_ON and len(tried) > 1:
                is_counted = issubclass(model_config_class(kind), CountedConfig)
                best = None if is_counted else trial(TUNED_ON, kind, *tried).learning_rate
                tried = () if best is None else (best,)
            trials.append(trial(name, kind, *tried))
    learned = {name: max(TASKS[name].learned) for name in chosen}
    return Probed(updates, parameters, tuple(rates), learned, tuple(trials))


def _known(names: Sequence[str], accepted: tuple[str, ...], what: str) -> list[str]:
    for name in names:
        if name not in accepted:
            raise UserError(f"no {what} {name!r}{nearest(name, accepted)}")
        if names.count(name) > 1:
            raise UserError(f"{what} {name!r} is given {names.count(name)} times: give each once")
    return list(names)


def _askable() -> tuple[str, ...]:
    return tuple(kind for kind in kind_names() if kind not in ("stack", "seq2seq"))


def _trial(
    out: Path, task: Task, kind: str, updates: int, parameters: int, rates: tuple[float, ...], seed: int
) -> Trial:
    data = DataConfig(
        corpus=(str(_write_corpus(out / f"{task.name}-{seed}.txt", task, seed)),),
        pairs=True,
        valid_fraction=0.0,
        test_fraction=0.0,
    )
    dataset = prepare(data, TextConfig(), TokenizerConfig(level=task.level))
    model = settings_of(kind, dataset.tokenizer.size, parameters)
    settings = {
        "model": model,
        "updates": updates,
        "rates": list(rates),
        "seed": seed,
        "text": dataset.sha256,
        "version": elman.__version__,
    }
    folder = out / f"{task.name}-{kind}"
    if (done := _finished(folder / _RESULT, settings)) is not None:
        return done
    started = time.process_time()
    if isinstance(model_config(model), CountedConfig):
        rate, bundle = None, _count(dataset, model, seed)
    else:
        rate, bundle = _best(task, dataset, data, model, updates, rates, seed)
    by_length = tuple(
        AtLength(length, len(examples), accuracy_of(bundle, examples))
        for length in task.asked
        for examples in (_different(task, length, _ASKED_SEED, _ASKED_CASES),)
    )
    parts = bundle.network.initial_state(1).tensors.values()
    state_size = None if any(map(grows, parts)) else sum(part.numel() for part in parts)
    seconds = round(time.process_time() - started, 2)
    trial = Trial(task.name, kind, bundle.network.num_parameters, state_size, rate, by_length, seconds)
    folder.mkdir(exist_ok=True)
    save_model(folder / MODEL_FILE, bundle)
    write_atomically(folder / _RESULT, json.dumps({"settings": settings, "trial": asdict(trial)}, indent=1).encode())
    return trial


def _count(dataset: Dataset, model: Mapping[str, Any], seed: int) -> Bundle:
    tokenizer = dataset.tokenizer
    network = build_model(model_config(model), tokenizer.size, seed=seed, dtype=torch.float32)
    if isinstance(network, CountedModel):
        network.count(dataset.train.tokens)
    return Bundle(network, tokenizer, {"pairs": {"reverse_source": False}})


def _best(
    task: Task,
    dataset: Dataset,
    data: DataConfig,
    model: Mapping[str, Any],
    updates: int,
    rates: tuple[float, ...],
    seed: int,
) -> tuple[float, Bundle]:
    """The model of the rate at which new questions of the learned lengths are answered best, the first of equals."""
    lengths = [length for length in task.asked if length <= max(task.learned)]
    judged = [example for length in lengths for example in _different(task, length, _JUDGED_SEED, _JUDGED_CASES)]
    found: list[tuple[float, float, Bundle]] = []
    for rate in rates:
        try:
            bundle = _train(dataset, data, task.level, model, updates, rate, seed)
        except TrainingError:  # at a rate that is too high for it
            if rate == rates[-1] and not found:
                raise
            continue
        found.append((accuracy_of(bundle, judged), rate, bundle))
        if found[-1][0] >= _SOLVED:
            break
    return max(found, key=itemgetter(0))[1:]


def _train(
    dataset: Dataset, data: DataConfig, level: str, model: Mapping[str, Any], updates: int, rate: float, seed: int
) -> Bundle:
    config = resolve(
        {
            "seed": seed,
            "device": "cpu",
            "data": data.model_dump(),
            "tokenizer": {"level": level},
            "model": model,
            "training": {
                "max_updates": updates,
                "batch_size": _BATCH,
                "learning_rate": rate,
                "spike_deviations": None,  # where a task is all but solved, a batch of longer lines looks like a fault
                "num_threads": 1,
            },
            "sampling": {"max_new_tokens": 1},
        }
    )
    trainer = Trainer(config, dataset)
    for _ in trainer.records():
        pass
    return trainer.bundle


def _different(task: Task, length: int, seed: int, count: int) -> list[Example]:
    """So many examples at most, none of them twice: where a length is short, there are few."""
    return list(dict.fromkeys(task.draw(length, seed, count)))


def _finished(path: Path, settings: Mapping[str, Any]) -> Trial | None:
    """What an earlier call has written; refused if it is not of these settings."""
    try:
        found = json.loads(path.read_bytes())
        if other := [name for name, value in settings.items() if found["settings"].get(name) != value]:
            raise UserError(
                f"{path} is of other settings ({', '.join(other)}): give another folder, or the same settings"
            )
        by_length = tuple(AtLength(**one) for one in found["trial"].pop("by_length"))
        if not all(0 <= one.accuracy <= 1 for one in by_length):
            raise ValueError("accuracy")
        return Trial(**found["trial"], by_length=by_length)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise ModelFileError(f"{path} is damaged: remove it to do this trial again") from None


def _write_corpus(path: Path, task: Task, seed: int) -> Path:
    """As many examples of each length that is learned; written once, and refused where others are there."""
    count = _LEARNED_EXAMPLES // len(task.learned)
    lines = [
        f"{question}\t{answer}\n" for length in task.learned for question, answer in task.draw(length, seed, count)
    ]
    order = np.random.default_rng(seed).permutation(len(lines))
    text = "".join(lines[index] for index in order.tolist()).encode()
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text)
        is_whole = path.read_bytes() == text
    except OSError as error:
        raise UserError(f"{str(path)!r} cannot be written ({error.strerror}): give another folder") from None
    if not is_whole:
        raise ModelFileError(f"{path} holds other examples than were written there: remove it, or give another folder")
    return path


def settings_of(kind: str, vocab_size: int, parameters: int) -> dict[str, Any]:
    """The settings of a model of a kind, two layers where it has layers, as near to a number of parameters as it can.

    Args:
        kind: of the model.
        vocab_size: V.
        parameters: the number wished for.

    Raises:
        UserError: no width that is tried comes near it.
    """
    section = model_config_class(kind)
    if issubclass(section, CountedConfig):
        return {"kind": kind}
    best: tuple[int, dict[str, Any]] | None = None
    most = 0
    for size in _SIZES:
        settings: dict[str, Any] = {"kind": kind, "hidden_size": size}
        if issubclass(section, UniformStackConfig):
            settings["num_layers"] = 2
            is_residual = section.model_fields["residual"].default
            settings["embedding_size"] = size if is_residual else 16
            if section.model_fields["feedforward_size"].default:
                settings["feedforward_size"] = 2 * size
            if "attention_window" in section.model_fields:
                settings["attention_window"] = _LONGEST
        elif issubclass(section, WindowConfig):
            settings["embedding_size"] = 16
        try:
            config = model_config(settings)
        except ValueError:
            continue  # a width that the heads do not divide
        most = max(most, number := model_class(config).predicted_num_parameters(config, vocab_size))
        away = abs(number - parameters)
        if best is None or away < best[0]:
            best = away, settings
    if best is None:
        raise UserError(f"model.kind {kind!r} has no width up to {_SIZES[-1]} that can be taken here")
    if parameters > 2 * most:
        raise UserError(
            f"{parameters:,} parameters; accepted for {kind}: up to {most:,}, which a width of {_SIZES[-1]} has"
        )
    return best[1]


def accuracy_of(bundle: Bundle, examples: Sequence[Example]) -> float:
    """The share of examples whose whole answer a model gives rightly."""
    network, tokenizer = bundle.network, bundle.tokenizer
    texts = (tokenizer.encode(text) for example in examples for text in example)
    tokens = np.concatenate([np.append(tokenizer.boundary_id, text) for text in texts])
    pairs = Pairs(tokens, _ROWS_AT_ONCE, tokenizer.boundary_id)
    num_right = 0
    for segment in pairs:
        with torch.no_grad():
            features_BTF, _ = network.features(segment.tokens_BT, network.initial_state(len(segment.tokens_BT)))
            best_BT = network.head.log_probs(features_BTF).argmax(-1)
        num_right += int(((best_BT == segment.targets_BT) | (segment.weight_BT == 0)).all(1).sum())
    return num_right / pairs.num_examples
