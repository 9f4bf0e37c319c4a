"""The training loop: truncated back-propagation through time, told as a sequence of records.

Shape letters: B rows (streams), T time.

The loop owns the model, the streams, the carried state and the optimiser, and yields a :class:`Record` for whatever
happens. It opens no file and prints nothing: logs, displays, model files and checkpoints are made by whoever reads
the records (``elman.training.run``). Evaluating, sampling and saving leave no trace in the training itself.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from elman.config import BUDGETS
from elman.data.pairs import Pairs
from elman.data.prepare import Dataset, Split
from elman.data.streams import Segment, Streams, check_targets, fit_layout
from elman.errors import ConfigError, ModelFileError, TextError, TrainingError
from elman.evaluation import Evaluation, Interrupted, evaluate_pairs, evaluate_split
from elman.generation import Sampler
from elman.models.contract import CountedModel, LanguageModel
from elman.models.file import Bundle
from elman.models.kinds import build_model
from elman.models.noise import Noise, derived_seed
from elman.models.state import State
from elman.settings import Config
from elman.training.checkpoint import Checkpoint
from elman.training.guard import MAX_IN_A_ROW, MAX_RETURNS, Guard
from elman.training.optimizers import Optimizer, learning_rate_share
from elman.translation import write_targets

RecordKind = Literal["notice", "update", "skipped", "returned", "evaluation", "sample", "checkpoint", "stopped", "end"]

_DEFAULT_EPOCHS = 10.0
_SOURCES_SHOWN = 3


@dataclass(frozen=True)
class Record:
    """One thing that happened."""

    kind: RecordKind
    values: Mapping[str, Any]
    """What the seed and the settings determine, equal in every repetition."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """What the clock and the machine determine."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, a number that is not finite as none."""
        finite = {key: None if _not_finite(value) else value for key, value in self.values.items()}
        return {"kind": self.kind} | finite | ({"measured": dict(self.measured)} if self.measured else {})


def _not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


class Callback(Protocol):
    """Watches a training, and may take part in it. Derive from it and override what is needed."""

    def on_record(self, record: Record) -> Mapping[str, float] | None:
        """See a record. What is returned for an update is added to its values."""
        return None

    def loss(self, features_BTF: Tensor, segment: Segment) -> Tensor | None:
        """A term to add to the loss of an update, in nats per token."""
        return None


class Trainer:
    """The state of one training.

    Args:
        config: all settings.
        dataset: tokens and tokenizer.
        callbacks: each sees every record.
        should_stop: polled between and within updates, evaluations and samples; once true, the training says
            ``checkpoint`` and ``stopped`` and ends.
        last_saved: gives the state to return to when one batch after the other goes wrong; none: then it stops.
    """

    def __init__(
        self,
        config: Config,
        dataset: Dataset,
        *,
        callbacks: Sequence[Callback] = (),
        should_stop: Callable[[], bool] = lambda: False,
        last_saved: Callable[[], Checkpoint] | None = None,
    ) -> None:
        self.config, self.dataset = config, dataset
        self._callbacks, self._should_stop, self._last_saved = callbacks, should_stop, last_saved
        self.device = choose_device(config.device)
        dtype = getattr(torch, config.dtype)
        self.network: LanguageModel = build_model(
            config.model,
            dataset.tokenizer.size,
            seed=config.seed,
            dtype=dtype,
            device=self.device,
            boundary_id=dataset.tokenizer.boundary_id,
        )
        self._optimizer = Optimizer(self.network, config.training)
        training = config.training
        self.notices = list(dataset.notices)
        self._notes: list[str] = []
        self.streams = self._pairs() if config.data.pairs else self._streams()
        if not training.has_budget and not isinstance(self.network, CountedModel):
            self.notices.append(f"no budget is given: training for {_DEFAULT_EPOCHS:g} epochs")
        if training.schedule == "plateau" and dataset.valid is None:
            raise ConfigError("training.schedule 'plateau' needs a validation part: set data.valid_fraction above 0")
        for prompt in config.sampling.prompts:
            if missing := dataset.tokenizer.unknown_characters(prompt):
                raise TextError(
                    f"sampling.prompts holds {prompt!r}, but the training text never has {missing}: give another"
                )
        self.update = 0
        self.tokens = 0
        self.segments_read = 0
        self.guard = Guard(config.training.spike_deviations)
        self.elapsed_seconds = 0.0
        self.plateau_factor = 1.0
        self.best_nats = math.inf
        self.best_update: int | None = None
        self.last_evaluation: dict[str, Any] | None = None
        self._evaluated_at = self._sampled_at = self._saved_at = 0
        self._saved_seconds = time.monotonic()
        self.state: State = self.network.initial_state(self.streams.batch_size)

    def _streams(self) -> Streams:
        """The training text side by side, in as many streams as it is long enough for."""
        training, dataset = self.config.training, self.dataset
        num_targets = len(dataset.train.tokens) - 1
        if isinstance(self.network, CountedModel):
            return Streams(dataset.train.tokens, 1, num_targets)  # one segment, the whole text
        batch_size, bptt = fit_layout(num_targets, training.batch_size, training.bptt)
        if (batch_size, bptt) != (training.batch_size, training.bptt):
            self.notices.append(
                f"the training text has only {num_targets} tokens: training.batch_size {training.batch_size} becomes "
                f"{batch_size}, training.bptt {training.bptt} becomes {bptt}"
            )
        reset_token = dataset.tokenizer.boundary_id if self.config.data.reset_at_documents else None
        return Streams(dataset.train.tokens, batch_size, bptt, trim=training.trim, reset_token=reset_token)

    def _pairs(self) -> Pairs:
        """The examples of a corpus of pairs, in batches that are shuffled for every epoch."""
        config, train = self.config, self.dataset.train
        batch_size = min(config.training.batch_size, train.num_documents // 2)
        if batch_size < config.training.batch_size:
            self.notices.append(
                f"there are only {batch_size} pairs to train on: training.batch_size {config.training.batch_size} "
                f"becomes {batch_size}"
            )
        boundary_id = self.dataset.tokenizer.boundary_id
        return Pairs(train.tokens, batch_size, boundary_id, config.data.reverse_source, seed=config.seed)

    @property
    def segment_index(self) -> int:
        """The segment of the epoch that is read next."""
        return self.segments_read % self.streams.num_segments

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self.tokens // self.streams.num_targets

    @property
    def progress(self) -> float:
        """The part of the budget that is used up, 0 to 1."""
        budget = self.config.training
        default_epochs = 1.0 if isinstance(self.network, CountedModel) else _DEFAULT_EPOCHS
        max_epochs = budget.max_epochs if budget.has_budget else default_epochs
        used: list[tuple[float, float | None]] = [
            (self.update, budget.max_updates),
            (self.tokens, budget.max_tokens),
            (self.tokens / self.streams.num_targets, max_epochs),
            (self.elapsed_seconds, budget.max_seconds),
        ]
        return min(1.0, max(amount / limit for amount, limit in used if limit is not None))

    @property
    def bundle(self) -> Bundle:
        """The model as it stands, with where it comes from."""
        provenance = {
            "corpus": Path(self.dataset.corpus_name).name,  # the model goes to other machines
            "corpus_sha256": self.dataset.sha256,
            "seed": self.config.seed,
            "updates": self.update,
            "tokens": self.tokens,
            "valid": self.last_evaluation if self._evaluated_at == self.update else None,
        }
        if self.config.data.pairs:
            provenance["pairs"] = {"reverse_source": self.config.data.reverse_source}
        return Bundle(self.network, self.dataset.tokenizer, provenance)

    def records(self) -> Iterator[Record]:
        """Train until the budget is used up or the caller stops it."""
        with num_threads(self.config.training.num_threads):
            for record in self._records():
                yield from self._told(record)
                while self._notes:
                    yield from self._told(Record("notice", {"text": self._notes.pop(0)}))

    def note(self, text: str) -> None:
        """Have something said with the next record, by whoever reads the records."""
        self._notes.append(text)

    def _told(self, record: Record) -> Iterator[Record]:
        """The record, with what callbacks add to it."""
        try:
            added = self._added_by_callbacks(record)
        except BaseException:
            yield record  # it happened, whatever a callback makes of it
            raise
        yield Record(record.kind, {**record.values, **added}, record.measured) if added else record

    def _added_by_callbacks(self, record: Record) -> dict[str, float]:
        added: dict[str, float] = {}
        for callback in self._callbacks:
            for name, value in (callback.on_record(record) or {}).items():
                if name in {"kind", "measured", *record.values, *added}:
                    raise ConfigError(f"a callback adds {name!r}, which the record already has: give it another name")
                added[name] = float(value)
        return added

    def _records(self) -> Iterator[Record]:
        try:
            for notice in self.notices:
                yield Record("notice", {"text": notice})
            if self.update == 0:
                yield self._checkpoint_record()  # so that even a run killed at once can be resumed
            yield from self._observe()  # what was due when an earlier run was stopped
            while self.progress < 1.0:
                self._poll()
                if isinstance(self.network, CountedModel):
                    yield from self._count(self.network)
                else:
                    yield self._train_segment()
                    if self.guard.is_lost:
                        yield self._return()
                yield from self._observe()
        except Interrupted:
            yield self._checkpoint_record()
            yield Record("stopped", {"update": self.update, "tokens": self.tokens})
            return
        yield self._checkpoint_record()
        end: dict[str, Any] = {
            "update": self.update,
            "tokens": self.tokens,
            "epoch": self.epoch,
            "seed": self.config.seed,
        }
        if self.best_update is not None:
            end |= {"best_update": self.best_update, "best_nats_per_token": self.best_nats}
        yield Record("end", end, {"seconds": self.elapsed_seconds})

    def _poll(self) -> None:
        if self._should_stop():
            raise Interrupted

    def _count(self, network: CountedModel) -> Iterator[Record]:
        """The one update of a counted model: all of the training text."""
        started = time.perf_counter()
        train = self.dataset.train
        notices = network.count(train.tokens, reset_at_documents=self.config.data.reset_at_documents, poll=self._poll)
        seconds = time.perf_counter() - started
        nats = self._judge(train).score.nats_per_token
        self.update, self.tokens = 1, self.streams.num_targets
        self.elapsed_seconds += seconds
        values = {"update": self.update, "epoch": self.epoch, "tokens": self.tokens, "nats": nats}
        measured = {
            "seconds": seconds,
            "elapsed_seconds": self.elapsed_seconds,
            "tokens_per_second": self.tokens / seconds,
            "progress": self.progress,
        }
        yield Record("update", values, measured)
        self.notices += notices
        yield from (Record("notice", {"text": notice}) for notice in notices)

    def _train_segment(self) -> Record:
        """One update: one segment of every stream; or none, where its numbers are not to be trusted."""
        started = time.perf_counter()
        segment = self.streams.segment(self.segments_read)
        if segment.starts_anew:
            check_targets(segment)
            self.state = self.network.initial_state(len(segment.tokens_BT))
        before = self.state
        noise = Noise(self.config.seed, self.update, self.streams.batch_size)
        if self.config.training.reset_probability:
            drawn_B = noise.uniform((self.streams.batch_size,), "reset", self.device)
            initial = self.network.initial_state(self.streams.batch_size)
            before = before.reset(drawn_B < self.config.training.reset_probability, initial)
        schedule = learning_rate_share(self.config.training, self.update, self.progress, self.plateau_factor)
        rate = schedule * self.guard.rate
        loss, grad_norm, state = self._gradients(segment, before, noise)
        self.segments_read += 1
        if why := self.guard.objection(loss, grad_norm):
            self.elapsed_seconds += time.perf_counter() - started
            values = {"update": self.update, "tokens": self.tokens, "nats": loss, "grad_norm": grad_norm}
            return Record("skipped", {**values, "text": f"skipped a batch after update {self.update}: {why}"})
        self._optimizer.step(rate)
        self.state = state.detach()
        self.update += 1
        self.tokens += segment.num_targets
        seconds = time.perf_counter() - started
        self.elapsed_seconds += seconds
        values = {
            "update": self.update,
            "epoch": self.epoch,
            "tokens": self.tokens,
            "nats": loss,
            "grad_norm": grad_norm,
            "learning_rate": self.config.training.learning_rate * rate,
        }
        measured = {
            "seconds": seconds,
            "elapsed_seconds": self.elapsed_seconds,
            "tokens_per_second": segment.num_targets / seconds,
            "progress": self.progress,
        }
        return Record("update", values, measured)

    def _return(self) -> Record:
        """Go back to the last saved state, at a lower rate.

        Raises:
            TrainingError: there is none, or that has been tried often enough.
        """
        if self._last_saved is None or self.guard.gives_up:
            tried = f" after {MAX_RETURNS} returns to a saved state at half the rate each" * self.guard.gives_up
            raise TrainingError(
                f"{self.guard.num_in_a_row} batches in a row went wrong after update {self.update}{tried}; the weights "
                "before them are kept: lower training.learning_rate, or set training.max_grad_norm"
            )
        lost, elapsed_seconds = self.guard, self.elapsed_seconds
        self.guard = Guard(self.config.training.spike_deviations)
        update = self.update
        self.restore(self._last_saved())
        self.guard.returned_from(lost)
        self.elapsed_seconds = elapsed_seconds
        text = (
            f"{MAX_IN_A_ROW} batches in a row went wrong after update {update}: back to update {self.update}, with "
            f"{self.guard.rate:g} of the learning rate"
        )
        return Record("returned", {"update": self.update, "tokens": self.tokens, "text": text})

    def _gradients(self, segment: Segment, before: State, noise: Noise) -> tuple[float, float, State]:
        """Leave the clipped gradient of the mean loss in the parameters.

        Returns:
            The mean loss in nats per token, the norm of the gradient before clipping, and the state to carry on.
        """
        reset_BT = None if segment.reset_BT is None else segment.reset_BT.to(self.device)
        features_BTF, state = self.network.features(segment.tokens_BT.to(self.device), before, reset_BT, noise)
        weight_BT = segment.weight_BT.to(self.device, self.network.dtype)
        nats_BT = self.network.head.nll(features_BTF, segment.targets_BT.to(self.device), weight_BT)
        loss = nats_BT.sum() / segment.num_targets
        objective = loss
        for callback in self._callbacks:
            term = callback.loss(features_BTF, segment)
            objective = objective if term is None else objective + term
        self._optimizer.zero_grad()
        objective.backward()
        gradients = [p.grad for p in self._optimizer.parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.config.training.max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._optimizer.parameters, self.config.training.max_grad_norm, norm)
        return loss.item(), norm.item(), state

    def _observe(self) -> Iterator[Record]:
        """Evaluate, sample and save where it is due after this update and not yet done."""
        if self.update == 0:
            return
        ends = self.progress >= 1.0
        config = self.config
        evaluation_due = ends or self._due(config.evaluation.every_updates, self.segment_index == 0)
        if self.dataset.valid is not None and evaluation_due and self._evaluated_at != self.update:
            yield self._evaluate()
        if (ends or self._due(config.sampling.every_updates, evaluation_due)) and self._sampled_at != self.update:
            yield from self._sample_targets() if config.data.pairs else self._sample()
        self._poll()
        waited = time.monotonic() - self._saved_seconds
        by_time = config.checkpoint.every_seconds is not None and waited >= config.checkpoint.every_seconds
        if not ends and self._saved_at != self.update and self._due(config.checkpoint.every_updates, by_time):
            yield self._checkpoint_record()

    def _due(self, every_updates: int | None, otherwise: bool) -> bool:
        return otherwise if every_updates is None else self.update % every_updates == 0

    def _evaluate(self) -> Record:
        started = time.perf_counter()
        evaluation = self.estimate()
        nats = evaluation.score.nats_per_token
        is_best = nats < self.best_nats  # never true for NaN
        if is_best:
            self.best_nats, self.best_update = nats, self.update
        elif self.config.training.schedule == "plateau":
            self.plateau_factor /= self.config.training.plateau_divisor
        self._evaluated_at = self.update
        self.last_evaluation = evaluation.to_dict()
        values = {"update": self.update, "tokens": self.tokens, "split": "valid", "best": is_best}
        return Record("evaluation", values | self.last_evaluation, {"seconds": time.perf_counter() - started})

    def estimate(self) -> Evaluation:
        """Judge the model on the validation part, as often during training."""
        if self.dataset.valid is None:
            raise TrainingError("there is no validation part to estimate on: set data.valid_fraction above 0")
        if self.config.data.pairs:
            return evaluate_pairs(
                self.network,
                self.dataset.valid,
                self.dataset.tokenizer,
                reverse_source=self.config.data.reverse_source,
                num_rows=self.config.evaluation.num_streams,
                max_targets=self.config.evaluation.max_tokens,
                should_stop=self._should_stop,
            )
        return self._judge(self.dataset.valid, self.config.evaluation.max_tokens)

    def _judge(self, split: Split, max_tokens: int | None = None) -> Evaluation:
        return evaluate_split(
            self.network,
            split,
            self.dataset.tokenizer,
            state_policy="reset" if self.config.data.reset_at_documents else "carried",
            num_streams=self.config.evaluation.num_streams,
            max_tokens=max_tokens,
            should_stop=self._should_stop,
        )

    def _sample(self) -> Iterator[Record]:
        records = []
        sampling = self.config.sampling
        for prompt in sampling.prompts:
            for temperature in sampling.temperatures:
                started = time.perf_counter()
                generated = Sampler(
                    self.bundle,
                    prompt,
                    settings=sampling.model_copy(update={"temperature": temperature}),
                    seed=derived_seed(self.config.seed, "sample", self.update, prompt, str(temperature)),
                    should_stop=self._should_stop,
                ).run()
                self._poll()  # half a sample is no sample
                values = {
                    "update": self.update,
                    "prompt": prompt,
                    "temperature": temperature,
                    "text": generated.text,
                    "finish_reason": generated.finish_reason,
                    "valid_bits_per_char": (self.last_evaluation or {}).get("bits_per_char"),
                    "valid_nats_per_token": (self.last_evaluation or {}).get("nats_per_token"),
                }
                records.append(Record("sample", values, {"seconds": time.perf_counter() - started}))
        self._sampled_at = self.update
        yield from records

    def _sample_targets(self) -> Iterator[Record]:
        """What the model makes of some sources: those of the settings, or the first that were held out."""
        started = time.perf_counter()
        tokenizer = self.dataset.tokenizer
        sources = [tokenizer.encode(prompt) for prompt in self.config.sampling.prompts if prompt]
        if not sources:
            pairs = Pairs((self.dataset.valid or self.dataset.train).tokens, 1, tokenizer.boundary_id)
            sources = [pairs.source(example) for example in range(min(_SOURCES_SHOWN, pairs.num_examples))]
        written = write_targets(
            self.network,
            tokenizer,
            sources,
            reverse_source=self.config.data.reverse_source,
            max_new_tokens=self.config.sampling.max_new_tokens,
        )
        self._poll()
        seconds = time.perf_counter() - started
        self._sampled_at = self.update
        for source, target in zip(sources, written, strict=True):
            values = {
                "update": self.update,
                "prompt": f"{tokenizer.decode(source)}\t",
                "temperature": 0.0,
                "text": target.text,
                "finish_reason": "boundary" if target.finished else "length",
                "valid_bits_per_char": (self.last_evaluation or {}).get("bits_per_char"),
                "valid_nats_per_token": (self.last_evaluation or {}).get("nats_per_token"),
            }
            yield Record("sample", values, {"seconds": seconds / len(sources)})

    def has_observed(self, kind: Literal["evaluation", "sample"]) -> bool:
        """Whether the evaluation, or the samples, of the present update are done."""
        return (self._evaluated_at if kind == "evaluation" else self._sampled_at) == self.update

    def _checkpoint_record(self) -> Record:
        self._saved_at, self._saved_seconds = self.update, time.monotonic()
        return Record("checkpoint", {"update": self.update, "tokens": self.tokens})

    def checkpoint(self) -> Checkpoint:
        """Everything needed to go on, as it stands between two records."""
        tensors: dict[str, Tensor] = {f"model.{name}": tensor for name, tensor in self.network.tensors().items()}
        tensors |= {f"optimizer.{name}": tensor for name, tensor in self._optimizer.tensors().items()}
        tensors |= {f"state.{name}": tensor for name, tensor in self.state.tensors.items()}
        trainer = {
            "update": self.update,
            "tokens": self.tokens,
            "segments_read": self.segments_read,
            "guard": self.guard.to_dict(),
            "elapsed_seconds": self.elapsed_seconds,
            "plateau_factor": self.plateau_factor,
            "best_nats": self.best_nats if self.best_update is not None else None,
            "best_update": self.best_update,
            "last_evaluation": self.last_evaluation,
            "evaluated_at": self._evaluated_at,
            "sampled_at": self._sampled_at,
            "fixed": self._fixed(),
        }
        return Checkpoint(tensors, trainer)

    def _fixed(self) -> dict[str, Any]:
        """What must not change between a checkpoint and the run that goes on from it."""
        settings = self.config.to_dict()
        model = {key: value for key, value in settings["model"].items() if key != "kind"}  # a path may move
        training = {key: value for key, value in settings["training"].items() if key not in (*BUDGETS, "num_threads")}
        tokenizer = json.dumps(self.dataset.tokenizer.to_dict(), sort_keys=True)
        sections = {"model": model, "training": training}
        return {
            "corpus_sha256": self.dataset.sha256,
            "tokenizer_sha256": hashlib.sha256(tokenizer.encode("utf-8", "surrogateescape")).hexdigest(),
            "dtype": self.config.dtype,
            "seed": self.config.seed,
            **{
                f"data.{name}": getattr(self.config.data, name)
                for name in ("reset_at_documents", "pairs", "reverse_source")
            },
            **{f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()},
        }

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint of the same settings and corpus.

        Raises:
            ModelFileError: it belongs to another corpus, layout or model.
        """
        trainer = checkpoint.trainer
        for name, mine in self._fixed().items():
            if (theirs := trainer["fixed"].get(name)) != mine:
                raise ModelFileError(f"the checkpoint has {name} {theirs!r}, this run {mine!r}: put it back to go on")
        parts: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "state": {}}
        for name, tensor in checkpoint.tensors.items():
            part, _, rest = name.partition(".")
            # Copied: memory that comes from a file has another alignment, which changes the order of sums.
            parts[part][rest] = tensor.clone().to(self.device)
        if isinstance(self.network, CountedModel):
            self.network.load_tables(parts["model"])
        with torch.no_grad():
            for name, parameter in self.network.named_parameters():
                parameter.copy_(parts["model"][name])
        self._optimizer.load_tensors(parts["optimizer"])
        self.state = State(parts["state"])
        self.update, self.tokens = trainer["update"], trainer["tokens"]
        self.segments_read = trainer["segments_read"]
        self.guard.restore(trainer["guard"])
        self.elapsed_seconds = trainer["elapsed_seconds"]
        self.plateau_factor = trainer["plateau_factor"]
        self.best_update = trainer["best_update"]
        self.best_nats = math.inf if trainer["best_nats"] is None else trainer["best_nats"]
        self.last_evaluation = trainer["last_evaluation"]
        self._evaluated_at, self._sampled_at = trainer["evaluated_at"], trainer["sampled_at"]
        self._saved_at = self.update


def choose_device(name: str) -> torch.device:
    """The device of a name; ``auto`` takes CUDA, then MPS, then the CPU. Raises ConfigError where it is absent."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind, present in available.items() if present))
    if not available[name]:
        present = ", ".join(kind for kind, there in available.items() if there)
        raise ConfigError(f"device {name!r} is not present here; accepted: auto, {present}")
    return torch.device(name)


@contextmanager
def num_threads(count: int | None) -> Iterator[None]:
    """Use this many threads, and give the process its own number back."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
