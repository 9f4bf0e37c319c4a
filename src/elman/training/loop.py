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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from elman.config import BUDGETS, DEFAULT_EPOCHS, EXECUTION, TrainingConfig
from elman.data.prepare import Dataset, Split
from elman.data.streams import Segment, check_targets, share_of
from elman.errors import ConfigError, ModelFileError, TextError, TrainingError
from elman.evaluation import Evaluation, Interrupted, evaluate_pairs, evaluate_split
from elman.models.contract import CountedModel, LanguageModel
from elman.models.file import Bundle
from elman.models.kinds import build_model
from elman.models.noise import Noise
from elman.models.state import State
from elman.process import as_in_training, num_threads
from elman.settings import Config
from elman.training.advice import Advisor, remedy_of, unigram_nats
from elman.training.averaging import Average
from elman.training.checkpoint import Checkpoint
from elman.training.distillation import Teacher
from elman.training.distributed import Gathered, Ranks, choose_device, gather_tensors
from elman.training.gradients import Gradients
from elman.training.guard import MAX_IN_A_ROW, MAX_RETURNS, Guard
from elman.training.layout import lay_out
from elman.training.objective import proposal_of
from elman.training.optimizers import Optimizer, learning_rate_share
from elman.training.samples import draw_samples

if TYPE_CHECKING:
    from elman.training.sharding import Shards

RecordKind = Literal["notice", "update", "skipped", "returned", "evaluation", "sample", "checkpoint", "stopped", "end"]


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


def budgets_of(training: TrainingConfig) -> dict[str, float]:
    """The budgets that are given, by setting."""
    return {name: value for name in BUDGETS if (value := getattr(training, name)) is not None}


def _not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


class Callback(Protocol):
    """Watches a training, and may take part in it. Derive from it and override what is needed."""

    def on_record(self, record: Record) -> Mapping[str, float] | None:
        """See a record. What is returned for an update is added to its values."""
        return None

    def loss(self, features_BTF: Tensor, segment: Segment) -> Tensor | None:
        """A term to add to the loss of an update, in nats per token.

        Where the rows of an update are read in pieces or by several processes, it is asked for each of them, and counts
        by the rows of the piece.
        """
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
        ranks: the processes that train together, each with a trainer of its own; none: this one alone.
        teacher: whose distribution the model learns as well; none: the text alone.
    """

    def __init__(
        self,
        config: Config,
        dataset: Dataset,
        *,
        callbacks: Sequence[Callback] = (),
        should_stop: Callable[[], bool] = lambda: False,
        last_saved: Callable[[], Checkpoint] | None = None,
        ranks: Ranks | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        self.config, self.dataset, self._teacher = config, dataset, teacher
        self._callbacks, self._should_stop, self._last_saved = callbacks, should_stop, last_saved
        self.ranks = Ranks() if ranks is None else ranks
        self.device = choose_device(config.device)
        self.notices = list(dataset.notices)
        num_rows = config.training.batch_size * self.ranks.size
        self.streams = lay_out(config, dataset, self.ranks, num_rows, self.notices.append)
        dtype = getattr(torch, config.dtype)
        self.network: LanguageModel = build_model(
            config.model,
            dataset.tokenizer.size,
            seed=config.seed,
            dtype=dtype,
            device="cpu" if config.training.shard else self.device,
            boundary_id=dataset.tokenizer.boundary_id,
        )
        self._shards = self._divided() if config.training.shard else None
        parts = None if self._shards is None else self._shards.parameters
        self._optimizer = Optimizer(self.network, config.training, parts)
        self._average = Average(self.network, config.training)
        training = config.training
        self._notes: list[str] = []
        # Who does not override it has nothing to add, and features need not be kept for him.
        terms = [callback.loss for callback in callbacks if type(callback).loss is not Callback.loss]
        proposal = proposal_of(training, dataset.train.tokens[1:], dataset.tokenizer.size)
        if teacher is not None:
            teacher.prepare(config, self.network, dataset.tokenizer)
            self.notices.append(teacher.summary())
        self._gradients = Gradients(
            self.network, training, self.ranks, self._shards, terms, self.note, proposal, teacher
        )
        if not training.has_budget and not isinstance(self.network, CountedModel):
            self.notices.append(f"no budget is given: training for {DEFAULT_EPOCHS:g} epochs")
        for name, how in (("schedule", "plateau"), ("averaging", "triggered")):
            if getattr(training, name) == how and dataset.valid is None:
                raise ConfigError(f"training.{name} {how!r} needs a validation part: set data.valid_fraction above 0")
        for prompt in config.sampling.prompts:
            if missing := dataset.tokenizer.unknown_characters(prompt):
                raise TextError(
                    f"sampling.prompts holds {prompt!r}, but the training text never has {missing}: give another"
                )
        self.of_this_start: list[Mapping[str, Any]] = []
        """Values of notices about how the training goes on, which say nothing of its text or model."""
        self.origin: Mapping[str, Any] | None = None
        """What was taken over from another model, for the record."""
        self._advisor = self._new_advisor()
        if not isinstance(self.network, CountedModel):
            self.notices += self._advisor.at_start()
        self.update = 0
        self.tokens = 0
        self.segments_read = 0
        self.guard = Guard(config.training.spike_deviations)
        self.elapsed_seconds = 0.0
        self.plateau_factor = 1.0
        self.best_nats = self._plateau_nats = math.inf
        """The lowest estimate, and the lowest since the state that the training last returned to."""
        self.best_update: int | None = None
        self.last_evaluation: dict[str, Any] | None = None
        self._evaluated_at = self._sampled_at = self._saved_at = 0
        self._now = self._saved_seconds = time.monotonic()
        self._is_amid = False
        """Whether some of an update or an estimate is done and some, its record at the last, is not."""
        self.num_told = 0
        """Records that were given to whoever reads them."""
        rows = range(self.streams.batch_size)[share_of(self.streams.batch_size, self.ranks.rank, self.ranks.size)]
        self.state: State = self._initial_state(len(rows))
        self._whole_network: LanguageModel | None = None
        """Of a divided model, in the first process: all of it, as it was when it was last brought together."""
        self._gathered: Gathered | None = None

    def _new_advisor(self) -> Advisor:
        return Advisor(
            self.config,
            batch_size=self.streams.batch_size,
            processes=self.ranks.size,
            updates_per_epoch=self.streams.num_segments,
            tokens_per_epoch=self.streams.num_targets,
            vocab_size=self.dataset.tokenizer.size,
            unigram_nats=lambda: unigram_nats(self.dataset),
        )

    def _divided(self) -> Shards:
        """The model, divided over all processes."""
        from elman.training.sharding import Shards  # takes long to import, and few need it

        return Shards(self.network, self.ranks, self.device)

    def _initial_state(self, num_rows: int) -> State:
        """The state before the first token, of the model and of its teacher's models in one."""
        state = self.network.initial_state(num_rows)
        if self._teacher is None:
            return state
        return State({**state.tensors, **self._teacher.initial_state(num_rows).tensors})

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
        used = {
            "max_updates": self.update,
            "max_tokens": self.tokens,
            "max_epochs": self.tokens / self.streams.num_targets,
            "max_seconds": self.elapsed_seconds,
        }
        return min(1.0, max(used[name] / limit for name, limit in self.budgets.items()))

    @property
    def budgets(self) -> dict[str, float]:
        """What ends the training, by setting: those that are given, or else the default."""
        given = budgets_of(self.config.training)
        return given or {"max_epochs": 1.0 if isinstance(self.network, CountedModel) else DEFAULT_EPOCHS}

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
        if self.origin is not None:
            provenance["from"] = self.origin
        if self._teacher is not None:
            provenance["teacher"] = self._teacher.to_dict()
        if self.config.data.pairs:
            provenance["pairs"] = {"reverse_source": self.config.data.reverse_source}
        return Bundle(self._judged, self.dataset.tokenizer, provenance)

    @property
    def _plain_network(self) -> LanguageModel:
        """The model in one piece."""
        return self.network if self._whole_network is None else self._whole_network

    @property
    def _judged(self) -> LanguageModel:
        """What is judged, sampled and kept: the mean of the weights where there is one."""
        return self._plain_network if self._average.network is self.network else self._average.network

    def records(self) -> Iterator[Record]:
        """Train until the budget is used up or the caller stops it."""
        with num_threads(self.config.training.num_threads), as_in_training():
            for record in self._records():
                self._notes += self._advisor.remarks(record.kind, record.values, record.measured)
                yield from self._told(record)
                while self._notes:
                    yield from self._told(Record("notice", {"text": self._notes.pop(0), "update": self.update}))

    def recall(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Let what advises know this log, and no more, so that it says what a run of just this log would hear."""
        self._advisor = self._new_advisor()
        for record in records:
            self._advisor.remarks(record["kind"], record, record.get("measured", {}))

    def note(self, text: str) -> None:
        """Have something said with the next record, by whoever reads the records."""
        self._notes.append(text)

    def _told(self, record: Record) -> Iterator[Record]:
        """The record, with what callbacks add to it."""
        try:
            added = self._added_by_callbacks(record)
        except BaseException:
            self.num_told, self._is_amid = self.num_told + 1, False
            yield record  # it happened, whatever a callback makes of it
            raise
        self.num_told, self._is_amid = self.num_told + 1, False
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
        self._saved_seconds, self._now = self.ranks.of_first(self._saved_seconds, self._now)
        try:
            for notice in self.notices:
                yield Record("notice", {"text": notice})
            for values in self.of_this_start:
                yield Record("notice", {**values, "passing": True})
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

    def _stops(self) -> bool:
        """Whether some process is to stop; all of them ask at the same places."""
        return self.ranks.any(self._should_stop())

    def _poll(self) -> None:
        if self._stops():
            raise Interrupted

    def _count(self, network: CountedModel) -> Iterator[Record]:
        """The one update of a counted model: all of the training text."""
        started = time.perf_counter()
        train = self.dataset.train
        notices = network.count(train.tokens, reset_at_documents=self.config.data.reset_at_documents, poll=self._poll)
        seconds = time.perf_counter() - started
        nats = self._judge(train).score.nats_per_token
        self._is_amid, self.update, self.tokens = True, 1, self.streams.num_targets
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
        whole = self.streams.segment(self.segments_read)
        data_seconds = time.perf_counter() - started
        segment = whole.part(self.ranks.rank, self.ranks.size)
        num_rows = len(segment.tokens_BT)
        if segment.starts_anew:
            check_targets(segment)
            self.state = self._initial_state(num_rows)
        before = self.state
        first_row = share_of(len(whole.tokens_BT), self.ranks.rank, self.ranks.size).start
        # What is added up or divided between processes has to be dense.
        sparse_rows = self._optimizer.takes_sparse_rows and self.ranks.size == 1
        noise = Noise(
            self.config.seed,
            self.update,
            self.streams.batch_size,
            first_row,
            sparse_rows=sparse_rows,
            num_skipped=self.guard.num_in_a_row,
        )
        if self.config.training.reset_probability:
            drawn_B = noise.uniform((num_rows,), "reset", self.device)
            initial = self._initial_state(num_rows)
            before = before.reset(drawn_B < self.config.training.reset_probability, initial)
        rate = self.rate_share() * self.guard.rate
        if self.config.training.random_bptt:
            rate *= whole.tokens_BT.shape[1] / self.config.training.bptt
        loss, grad_norm, state = self._gradients.compute(segment, whole, before, noise)
        # The state is that of the beginning for as long as all of the epoch so far was skipped. Pairs always begin.
        is_fresh = not self.config.data.pairs and self.streams.num_segments > 1
        is_fresh &= self.streams.num_segments <= MAX_IN_A_ROW or self.guard.num_in_a_row >= self.segment_index
        self._is_amid = True
        self.segments_read += 1
        if why := self.guard.objection(loss, grad_norm, is_fresh=is_fresh):
            self._take_time(started)
            values = {"update": self.update, "tokens": self.tokens, "nats": loss, "grad_norm": grad_norm}
            text = f"skipped a batch after update {self.update}: {why}"
            return Record("skipped", {**values, "segments_read": self.segments_read, "text": text})
        self._optimizer.step(rate)
        self._average.update()
        self.state = state
        self.update += 1
        self.tokens += whole.num_targets
        seconds = self._take_time(started)
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
            "tokens_per_second": whole.num_targets / seconds,
            "data_seconds": data_seconds,
            "progress": self.progress,
        }
        return Record("update", values, measured)

    def rate_share(self) -> float:
        """The share of the peak rate for the next update."""
        return learning_rate_share(self.config.training, self.update, self.progress, self.plateau_factor)

    def _take_time(self, started: float) -> float:
        """Count in the seconds since then; the clock of the first process is that of all."""
        seconds, self._now = self.ranks.of_first(time.perf_counter() - started, time.monotonic())
        self.elapsed_seconds += seconds
        return seconds

    def _return(self) -> Record:
        """Go back to the last saved state, at a lower rate.

        Raises:
            TrainingError: there is none, or that has been tried often enough.
        """
        wrong = f"{self.guard.num_in_a_row} batches in a row went wrong after update {self.update}"
        remedy = remedy_of(self.config.training)
        if self._last_saved is None:
            raise TrainingError(f"{wrong}, and there is no saved state to return to: {remedy}")
        lost, elapsed_seconds, best = self.guard, self.elapsed_seconds, (self.best_nats, self.best_update)
        self._is_amid = True
        self.guard = Guard(self.config.training.spike_deviations)
        self.restore(self._last_saved())
        self.guard.returned_from(lost)
        self.elapsed_seconds = elapsed_seconds
        self.best_nats, self.best_update = best  # its model is kept, be it of an update that will come again
        if lost.gives_up:
            self._is_amid = False
            kept = self.update if self.best_update is None else self.best_update
            raise TrainingError(
                f"{wrong}, after {MAX_RETURNS} returns to a saved state at half the rate each; "
                f"the weights of update {kept} are kept: {remedy}"
            )
        text = f"{wrong}: back to update {self.update}, with {self.guard.rate:g} of the learning rate"
        values = {"update": self.update, "tokens": self.tokens, "num_returns": self.guard.num_returns}
        return Record("returned", {**values, "text": text})

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
            yield from self._sample()
        self._poll()
        waited = self._now - self._saved_seconds
        by_time = config.checkpoint.every_seconds is not None and waited >= config.checkpoint.every_seconds
        if not ends and self._saved_at != self.update and self._due(config.checkpoint.every_updates, by_time):
            yield self._checkpoint_record()

    def _due(self, every_updates: int | None, otherwise: bool) -> bool:
        return otherwise if every_updates is None else self.update % every_updates == 0

    def _evaluate(self) -> Record:
        started = time.perf_counter()
        evaluation = self.estimate()
        nats = evaluation.score.nats_per_token
        self._is_amid = True
        is_best = nats < self.best_nats  # never true for NaN
        if is_best:
            self.best_nats, self.best_update = nats, self.update
            self._bring_weights_together()
        if nats < self._plateau_nats:
            self._plateau_nats = nats
        elif self.config.training.schedule == "plateau":
            self.plateau_factor /= self.config.training.plateau_divisor
        if self._average.judged(nats):
            self.note(f"from update {self.update} on the mean of the weights is what is judged and kept")
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
                self._average.network,
                self.dataset.valid,
                self.dataset.tokenizer,
                reverse_source=self.config.data.reverse_source,
                num_rows=self.config.evaluation.num_streams,
                max_targets=self.config.evaluation.max_tokens,
                should_stop=self._stops,
                team=self.ranks,
            )
        return self._judge(self.dataset.valid, self.config.evaluation.max_tokens)

    def _judge(self, split: Split, max_tokens: int | None = None) -> Evaluation:
        return evaluate_split(
            self._average.network,
            split,
            self.dataset.tokenizer,
            state_policy="reset" if self.config.data.reset_at_documents else "carried",
            num_streams=self.config.evaluation.num_streams,
            max_tokens=max_tokens,
            should_stop=self._stops,
            team=self.ranks,
        )

    def _sample(self) -> Iterator[Record]:
        """Samples, which the first process draws while the others wait."""
        self._bring_weights_together()
        estimate = self.last_evaluation or {}
        worth = {f"valid_{name}": estimate.get(name) for name in ("bits_per_char", "nats_per_token")}
        records, is_stopped = [], False
        if self.ranks.rank == 0:
            for sample in draw_samples(self.bundle, self.config, self.dataset, self.update, self._should_stop):
                if is_stopped := self._should_stop():
                    break
                values = {"update": self.update, **sample.values, **worth}
                records.append(Record("sample", values, {"seconds": sample.seconds}))
        if self.ranks.any(is_stopped):
            raise Interrupted  # half a sample is no sample
        yield from records
        self._sampled_at = self.update

    def has_observed(self, kind: Literal["evaluation", "sample"]) -> bool:
        """Whether the evaluation, or the samples, of the present update are done."""
        return (self._evaluated_at if kind == "evaluation" else self._sampled_at) == self.update

    def _checkpoint_record(self) -> Record:
        self._gather()
        self._saved_at, self._saved_seconds = self.update, self._now
        return Record("checkpoint", {"update": self.update, "tokens": self.tokens})

    def _bring_weights_together(self) -> None:
        """Of a divided model, have all in the first process."""
        if self._shards is None:
            return
        weights = self._shards.weights()
        if self.ranks.rank:
            return
        if self._whole_network is None:
            self._whole_network = build_model(
                self.config.model,
                self.network.vocab_size,
                seed=None,
                dtype=self.network.dtype,
                boundary_id=self.network.boundary_id,
            )
        with torch.no_grad():
            for name, parameter in self._whole_network.named_parameters():
                parameter.copy_(weights[name])

    def _gather(self) -> None:
        """Have in the first process what a checkpoint takes from the others."""
        if self.ranks.size == 1:
            return
        self._bring_weights_together()
        memory = {} if self._shards is None else self._shards.memory(self._optimizer)
        states = gather_tensors(self.ranks, self.state.tensors)
        if self.ranks.rank == 0:
            self._gathered = Gathered(self.segments_read, State.stack([State(state) for state in states]), memory)

    def checkpoint(self) -> Checkpoint:
        """Everything needed to go on, as it stands between two records; in the first process, after ``checkpoint``.

        Raises:
            TrainingError: an update was broken off, or the other processes have gone on since they handed in theirs.
        """
        if self._is_amid:
            raise TrainingError("an update was broken off: nothing is saved between")
        state = self.state
        memory: Mapping[str, Tensor] = self._optimizer.tensors()
        if self.ranks.size > 1:
            if self._gathered is None or self._gathered.segments_read != self.segments_read:
                raise TrainingError("the other processes have not handed in their part: nothing is saved between")
            state = self._gathered.state
            memory = memory if self._shards is None else self._gathered.memory
        tensors: dict[str, Tensor] = {f"model.{name}": tensor for name, tensor in self._plain_network.tensors().items()}
        tensors |= {f"optimizer.{name}": tensor for name, tensor in memory.items()}
        tensors |= {f"state.{name}": tensor for name, tensor in state.tensors.items()}
        tensors |= {f"average.{name}": tensor for name, tensor in self._average.tensors().items()}
        trainer = {
            "update": self.update,
            "tokens": self.tokens,
            "segments_read": self.segments_read,
            "num_rows": self.streams.batch_size,
            "loss_scale": None if self._gradients.scale is None else self._gradients.scale.to_dict(),
            "guard": self.guard.to_dict(),
            "average": self._average.to_dict(),
            "elapsed_seconds": self.elapsed_seconds,
            "plateau_factor": self.plateau_factor,
            "best_nats": self.best_nats if self.best_update is not None else None,
            "best_update": self.best_update,
            "plateau_nats": None if self._plateau_nats == math.inf else self._plateau_nats,
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
        training = {key: value for key, value in settings["training"].items() if key not in (*BUDGETS, *EXECUTION)}
        tokenizer = json.dumps(self.dataset.tokenizer.to_dict(), sort_keys=True)
        sections = {"model": model, "training": training}
        return {
            "corpus_sha256": self.dataset.sha256,
            "tokenizer_sha256": hashlib.sha256(tokenizer.encode("utf-8", "surrogateescape")).hexdigest(),
            "dtype": self.config.dtype,
            "seed": self.config.seed,
            "teacher": None if self._teacher is None else self._teacher.to_dict(),
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
            if (theirs := trainer["fixed"].get(name, mine)) != mine:  # an older one knows fewer settings
                raise ModelFileError(f"the checkpoint has {name} {theirs!r}, this run {mine!r}: put it back to go on")
        num_rows = trainer.get("num_rows", self.streams.batch_size)
        if num_rows != self.streams.batch_size:
            self.note(f"its {num_rows} rows are divided over {self.ranks.size} processes now")
            self.streams = lay_out(self.config, self.dataset, self.ranks, num_rows, self.note)
        parts: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "state": {}, "average": {}}
        for name, tensor in checkpoint.tensors.items():
            part, _, rest = name.partition(".")
            # Copied: memory that comes from a file has another alignment, which changes the order of sums.
            parts[part][rest] = tensor.clone().to(self.device)
        if isinstance(self.network, CountedModel):
            self.network.load_tables(parts["model"])
        if self._shards is not None:
            self._shards.load_weights(parts["model"])
            self._shards.load_memory(self._optimizer, parts["optimizer"])
        else:
            with torch.no_grad():
                for name, parameter in self.network.named_parameters():
                    parameter.copy_(parts["model"][name])
            self._optimizer.load_tensors(parts["optimizer"])
        rows = share_of(num_rows, self.ranks.rank, self.ranks.size)
        self.state = State(parts["state"]).map(lambda tensor: tensor[rows].clone())
        if self._gradients.scale is not None and trainer["loss_scale"] is not None:
            self._gradients.scale.restore(trainer["loss_scale"])
        self.update, self.tokens = trainer["update"], trainer["tokens"]
        self.segments_read = trainer["segments_read"]
        self.guard.restore(trainer["guard"])
        self._average.restore(parts["average"], trainer["average"])
        self.elapsed_seconds = trainer["elapsed_seconds"]
        self.plateau_factor = trainer["plateau_factor"]
        self.best_update = trainer["best_update"]
        self.best_nats = math.inf if trainer["best_nats"] is None else trainer["best_nats"]
        lowest = trainer.get("plateau_nats", trainer["best_nats"])  # an older checkpoint has one for both
        self._plateau_nats = math.inf if lowest is None else lowest
        self.last_evaluation = trainer["last_evaluation"]
        self._evaluated_at, self._sampled_at = trainer["evaluated_at"], trainer["sampled_at"]
        self._saved_at = self.update
