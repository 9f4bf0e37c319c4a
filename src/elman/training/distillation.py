"""Learn from other models as well: their distribution beside the text's own next token (knowledge distillation).

Shape letters: B rows, T time, R positions one below the other, F features, V vocabulary.

    p = mean of the distributions of the teacher's models;   q the student's
    p_T proportional to p^(1/T);   q_T proportional to q^(1/T)
    objective = (1 - w) * cost of the target + w * T^2 * sum over v of -p_T(v) log q_T(v)

A temperature T above 1 makes both distributions flatter, so that what the teacher says of improbable tokens counts for
more; the factor T^2 keeps the gradient of the second part as large as it is at T = 1. A teacher reads what its student
reads, every model of it with a state of its own, carried and reset as the student's is. Their states are one: what
saves, divides or resets the state of a training does so to both.

Papers: Hinton, Vinyals and Dean 2015, https://arxiv.org/abs/1503.02531; word by word, as here: Kim and Rush 2016,
https://arxiv.org/abs/1606.07947.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from elman.errors import ConfigError, ModelFileError
from elman.files import write_atomically
from elman.models.contract import CountedModel, Head, LanguageModel
from elman.models.file import Bundle, load_model, model_bytes
from elman.models.state import State
from elman.settings import Config
from elman.text.tokenizers import Tokenizer

WEIGHT, TEMPERATURE = 0.5, 1.0
"""What w and T are where nobody says (docs/smaller.md has what others came to)."""
_TEMPERATURES = 0.01, 100.0
"""The lowest T and the highest: beyond them p_T is one token or all alike, and what is left of T is rounding."""
_ABOUT = "teacher.json"
_PART = "teacher"
"""How the names of its parts of a state begin."""
_LOGITS_AT_ONCE = 2**22
"""Of a piece: 16 MiB of float32, for the student and for each model of the teacher."""


class Lesson(NamedTuple):
    """What a teacher has made of a segment."""

    features: tuple[Tensor, ...]
    """What the head of each model reads, (B, T, F) each."""
    state: State
    """After the segment, of all models."""


class Teacher:
    """One trained model or several, whose distribution a student is to have as well.

    Args:
        models: of the student's tokens.
        weight: w, above 0; 1 leaves the text's own next token out.
        temperature: T, from 0.01 to 100.
        names: of the models, as a person gave them, for :meth:`summary`; none: they have none.

    Raises:
        ConfigError: the numbers are out of range.
    """

    def __init__(
        self,
        models: Sequence[Bundle],
        *,
        weight: float = WEIGHT,
        temperature: float = TEMPERATURE,
        names: Sequence[str | Path] = (),
    ) -> None:
        lowest, highest = _TEMPERATURES
        if not 0 < weight <= 1 or not lowest <= temperature <= highest:
            raise ConfigError(
                f"a teacher of weight {weight:g} at temperature {temperature:g}; accepted: a weight above 0 and up to "
                f"1, and a temperature from {lowest:g} to {highest:g}"
            )
        self.weight, self.temperature = weight, temperature
        self._models, self._names = tuple(models), tuple(map(str, names))
        self._sha256s = [hashlib.sha256(model_bytes(model)).hexdigest() for model in models]
        for model in models:
            model.network.requires_grad_(False)

    def to_dict(self) -> dict[str, Any]:
        """How it teaches, and which models it is made of, ready for JSON."""
        models = [
            {
                "sha256": sha256,
                "corpus": model.provenance.get("corpus"),
                "updates": model.provenance.get("updates"),
                "parameters": model.network.num_parameters,
            }
            for model, sha256 in zip(self._models, self._sha256s, strict=True)
        ]
        return {"weight": self.weight, "temperature": self.temperature, "models": models}

    def summary(self) -> str:
        """The same in one line."""
        named = []
        for number, model in enumerate(self.to_dict()["models"]):
            updates = model["updates"] or 0
            name = f"{self._names[number]!r}, " if self._names else ""
            after = f"after {updates:,} update{'s' * (updates != 1)}"
            named.append(f"{name}a model of {model['corpus'] or 'an unnamed text'} {after}")
        return f"learns from {' and '.join(named)} as well; weight {self.weight:g}, temperature {self.temperature:g}"

    def prepare(self, config: Config, student: LanguageModel, tokenizer: Tokenizer) -> None:
        """Go to the student's device.

        Raises:
            ConfigError: it cannot teach this student.
        """
        if isinstance(student, CountedModel):
            raise ConfigError(f"model.kind {config.model.kind!r} is counted and learns from no teacher: leave it out")
        why = {"num_negatives": "never sees the whole vocabulary", "shard": "divides the model"}
        if unfit := [name for name in why if getattr(config.training, name)]:
            raise ConfigError(
                f"a teacher says how probable every token is, and training.{unfit[0]} {why[unfit[0]]}: leave one of "
                "them out"
            )
        for model, about in zip(self._models, self.to_dict()["models"], strict=True):
            if model.tokenizer.to_dict() != tokenizer.to_dict():
                raise ConfigError(
                    f"the teacher of {about['corpus'] or 'an unnamed text'} has other tokens ({model.tokenizer.level}, "
                    f"{model.tokenizer.size:,} of them) than this training ({tokenizer.level}, {tokenizer.size:,}): "
                    "take its corpus with the same data and tokenizer settings, or another teacher"
                )
            model.network.to(student.device)

    def initial_state(self, batch_size: int) -> State:
        """The state of all models before the first token."""
        return _joined([model.network.initial_state(batch_size) for model in self._models])

    @torch.no_grad()
    def read(self, tokens_BT: Tensor, state: State, reset_BT: Tensor | None = None) -> Lesson:
        """Read what the student reads.

        Args:
            tokens_BT: the segment.
            state: before it, that of the student with it or without.
            reset_BT: where the state is put back before a token is read.
        """
        features, after = [], []
        for number, model in enumerate(self._models):
            start = _prefix(number)
            own = {name.removeprefix(start): part for name, part in state.tensors.items() if name.startswith(start)}
            features_BTF, own_state = model.network.features(tokens_BT, State(own), reset_BT)
            features.append(features_BTF)
            after.append(own_state)
        return Lesson(tuple(features), _joined(after))

    def log_probs(self, features: Sequence[Tensor]) -> Tensor:
        """The logarithm of the mean of the models' distributions.

        Args:
            features: of each model, (B, T, F).
        """
        found = [
            model.network.head.log_probs(features_BTF)
            for model, features_BTF in zip(self._models, features, strict=True)
        ]
        if len(found) == 1:
            return found[0]
        return torch.stack([log_probs.to(found[0]) for log_probs in found]).logsumexp(0) - math.log(len(found))

    def mixed(self, objective: Tensor, head: Head, features_BTF: Tensor, lesson: Lesson, weight_BT: Tensor) -> Tensor:
        """The objective with the teacher's part, summed over positions.

        Args:
            objective: the cost of the targets, summed, each times its weight.
            head: of the student.
            features_BTF: what it reads.
            lesson: what :meth:`read` gave for the same segment.
            weight_BT: of each position.
        """
        tensors = [tensor.flatten(0, 1) for tensor in (features_BTF, weight_BT, *lesson.features)]
        num_rows = max(1, _LOGITS_AT_ONCE // self._models[0].network.vocab_size)
        if torch.compiler.is_compiling() or len(tensors[0]) <= num_rows:  # a compiler cannot look into the other form
            soft = self._cross_entropy(head, *tensors)
        else:  # distributions of a piece are made again for its gradient, so that those of one piece are held at a time
            pieces = zip(*(tensor.split(num_rows) for tensor in tensors), strict=True)
            soft = torch.stack([
                checkpoint(self._cross_entropy, head, *piece, use_reentrant=False, preserve_rng_state=False)
                for piece in pieces
            ]).sum()  # fmt: skip
        return (1 - self.weight) * objective + self.weight * self.temperature**2 * soft

    def _cross_entropy(self, head: Head, x_RF: Tensor, weight_R: Tensor, *of_models: Tensor) -> Tensor:
        """Of the student's softened distribution to the teacher's, each position times its weight, summed."""
        log_q_RV = self._softened(head.log_probs(x_RF.unsqueeze(0)).squeeze(0))
        with torch.no_grad():
            log_p_RV = self._softened(self.log_probs([x.unsqueeze(0) for x in of_models]).squeeze(0))
            p_RV = log_p_RV.exp().to(log_q_RV.dtype)
        return -((p_RV * log_q_RV).sum(-1) * weight_R).sum()

    def _softened(self, log_probs: Tensor) -> Tensor:
        return log_probs if self.temperature == 1 else (log_probs / self.temperature).log_softmax(-1)

    def write(self, folder: Path) -> None:
        """Write down its models and how it teaches, so that a training goes on without the files that it came from."""
        folder.mkdir()
        for number, model in enumerate(self._models):
            write_atomically(_model_file(folder, number), model_bytes(model))
        write_atomically(folder / _ABOUT, json.dumps(self.to_dict(), indent=2).encode())


def load_teacher(
    names: Sequence[str | Path],
    *,
    weight: float | None = None,
    temperature: float | None = None,
    cell: str | None = None,
) -> Teacher:
    """The teacher that some models are together.

    Args:
        names: run folders or model files.
        weight: as :class:`Teacher` has it; none: :data:`WEIGHT`.
        temperature: the same; none: :data:`TEMPERATURE`.
        cell: the student's, where it is a person's own; it counts for models that were trained with it.

    Raises:
        ConfigError: a name is empty, or the numbers are out of range.
        ModelFileError: there is no such model.
    """
    if "" in names:
        raise ConfigError("a teacher's name is empty; accepted: a run folder or a model file")
    models = [_load(name, cell) for name in names]
    return Teacher(
        models,
        weight=WEIGHT if weight is None else weight,
        temperature=TEMPERATURE if temperature is None else temperature,
        names=names,
    )


def taught_by(folder: Path) -> Any:
    """What :meth:`Teacher.to_dict` said of the teacher that was written to a folder; none where there is none.

    Raises:
        ModelFileError: it is damaged.
    """
    path = folder / _ABOUT
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{str(path)!r} is damaged: {error}") from None


def read_teacher(folder: Path, *, cell: str | None = None) -> Teacher | None:
    """The teacher that was written to a folder; none where there is none.

    Raises:
        ModelFileError: it is damaged.
    """
    about = taught_by(folder)
    if about is None:
        return None
    files = copied_models(folder)
    try:
        teacher = load_teacher(files, weight=about["weight"], temperature=about["temperature"], cell=cell)
    except (KeyError, TypeError, ConfigError) as error:
        raise _damaged(folder, error) from None
    if teacher.to_dict() != about:
        raise ModelFileError(f"{str(folder)!r} is damaged: its models are not those that {_ABOUT} names")
    return teacher


def copied_models(folder: Path) -> list[Path]:
    """The files of the models that :meth:`Teacher.write` wrote to a folder, in their order.

    Raises:
        ModelFileError: it is damaged.
    """
    about = taught_by(folder)
    try:
        return [] if about is None else [_model_file(folder, number) for number in range(len(about["models"]))]
    except (KeyError, TypeError) as error:
        raise _damaged(folder, error) from None


def state_of_student(state: State) -> State:
    """A state without what a teacher's models have of it."""
    return State({name: tensor for name, tensor in state.tensors.items() if not name.startswith(_PART)})


def _joined(states: Sequence[State]) -> State:
    """The states of the models as one."""
    return State({
        _prefix(number) + name: tensor for number, state in enumerate(states) for name, tensor in state.tensors.items()
    })  # fmt: skip


def _prefix(number: int) -> str:
    return f"{_PART}{number}."


def _model_file(folder: Path, number: int) -> Path:
    return folder / f"{number + 1}.safetensors"


def _damaged(folder: Path, error: Exception) -> ModelFileError:
    return ModelFileError(f"{str(folder / _ABOUT)!r} is damaged ({type(error).__name__}: {error})")


def _load(name: str | Path, cell: str | None) -> Bundle:
    try:
        return load_model(name)
    except ModelFileError:
        if cell is None:
            raise
        return load_model(name, cell=cell)
