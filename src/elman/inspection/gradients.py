"""Gradients through time: how far back a model's loss reaches, on which way, and what would help where it does not.

Shape letters: B rows (places of a text), K lags, T time, U units.

Of each network: the norm of d loss_t / d state_(t-k) by lag, the gradient of each matrix as the sum of what its use at
each step adds, the singular values of the Jacobians of the state map and of their products, Lyapunov exponents, and
which gates stand open or shut. All in double precision, at places spread over a text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeAlias

import torch
from numpy import integer
from numpy.typing import NDArray
from torch import Tensor

from elman.config import DataConfig, ModelConfig, TextConfig, TokenizerConfig
from elman.data.prepare import prepare
from elman.errors import UserError
from elman.inspection.gates import Memory, Saturation, intermediates, memory, saturation
from elman.inspection.jacobians import Layout, Trajectory, check_has_gradient, log_growth, log_singular_values
from elman.inspection.lags import Flow, flow
from elman.inspection.watching import Places, in_float64, places
from elman.judge import SplitName, find_subject
from elman.models.contract import LanguageModel
from elman.models.file import load_model
from elman.models.kinds import build_model, section_of
from elman.models.state import grows
from elman.settings import Config, resolve
from elman.training.checkpoint import intact_checkpoints
from elman.training.folder import Run

Ids: TypeAlias = NDArray[integer[Any]]
Trend: TypeAlias = Literal["vanishes", "explodes", "is kept"]

MAX_LAG, NUM_PLACES = 400, 16
PRODUCTS = (1, 10, 100)
"""Of how many Jacobians in a row the singular values are taken."""

_JUDGED_LAG = 100
_VANISHED, _EXPLODED = 0.01, 10.0
"""What the gradient at the judged lag, or its largest, is of that one step back."""
_MAX_MATRIX = 1024
"""Numbers of a state up to which a whole Jacobian is written out."""
_NUM_DIRECTIONS = 32
"""Of a larger state, the singular values of products are the largest so many."""
_NUM_TRAJECTORIES, _NUM_MOMENTS = 2, 6
_NUM_EXPONENTS, _SETTLING_STEPS, _BLOCK = 8, 50, 25
_STUCK_MEMORY = 0.5
"""Share of the tokens at which a memory is saturated from which on that is why no gradient enters it."""
_NUM_POINTS = 200
_FIRST = "at initialisation"
_MAX_STAGES = 5
"""Times of their training at which several runs are held against each other."""


@dataclass(frozen=True)
class Spread:
    """Over the places of a text, for each lag from 0: the tenth part that is lowest ends, the middle, the highest."""

    low: tuple[float, ...]
    median: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True)
class Matrix:
    """The gradient of the mean loss by one matrix, as a sum over the steps at which it was used."""

    name: str
    norm: tuple[float, ...]
    """Of what the use k steps before the loss adds, from k = 0."""
    share: tuple[float, ...]
    """Of the whole that it makes up, in the direction of the whole: the shares sum to one."""
    whole: float
    """Norm of the whole gradient."""
    error: float
    """How far the sum is from the gradient as training computes it, relative to that."""


@dataclass(frozen=True)
class StateMap:
    """What reading a token does to small changes of the state."""

    size: int
    """Numbers of the state."""
    products: Mapping[int, tuple[float, ...]]
    """Singular values of the product of so many Jacobians, the largest first: logarithms to base 10."""
    is_complete: bool
    """Whether these are all singular values, and not the largest alone."""
    spectral_radius: float | None
    """Largest absolute eigenvalue of a Jacobian, median; none where a Jacobian is too large to be written out."""
    exponents: tuple[float, ...]
    """The largest Lyapunov exponents along the text, in nats per token."""
    errors: tuple[float, ...]
    """Their standard errors."""


@dataclass(frozen=True)
class Clipping:
    """What the log of a run says about its gradients, before clipping."""

    max_grad_norm: float | None
    num_updates: int
    num_clipped: int
    num_skipped: int
    """Batches whose numbers were not to be trusted."""
    median_norm: float
    largest_norm: float
    updates: tuple[int, ...]
    """The ends of stretches of equal length, for a picture."""
    median_norms: tuple[float, ...]
    """In each stretch."""
    largest_norms: tuple[float, ...]


@dataclass(frozen=True)
class Verdict:
    """Whether the gradient lives, and what would act where it does not."""

    trend: Trend
    lag: int
    ratio: float
    """The gradient at that lag over that one step back, median."""
    hundredth_left_at: int | None
    """The first lag at which a hundredth of that is left."""
    words: str


@dataclass(frozen=True)
class Study:
    """One network at one time of its life."""

    name: str
    kind: str
    gradient: Spread
    parts: Mapping[str, tuple[float, ...]]
    """Medians of each part of the state."""
    additive: tuple[float, ...] | None
    """Medians of what passes from lag 1 by the additive way alone: every gate and candidate held fixed."""
    rest: tuple[float, ...] | None
    """Medians of what is left without that."""
    matrices: tuple[Matrix, ...]
    state_map: StateMap | None
    saturation: tuple[Saturation, ...]
    memory: Memory | None
    """None of a kind that has no such memory."""
    verdict: Verdict

    @property
    def by_lag(self) -> tuple[float, ...]:
        """The median gradient at each lag over that one step back."""
        one = self.gradient.median[1]
        return tuple(norm / one if one else math.nan for norm in self.gradient.median)


@dataclass(frozen=True)
class Stage:
    """Several runs at one time of their training."""

    name: str
    by_lag: Mapping[str, tuple[float, ...]]
    """Of each run: the median gradient at each lag over that one step back."""


@dataclass(frozen=True)
class GradientReport:
    """Networks side by side, or one along its training: from its initial weights to the model."""

    corpus: str
    split: str
    num_places: int
    max_lag: int
    studies: tuple[Study, ...]
    clipping: Clipping | None
    """Of a run that is looked at alone."""
    stages: tuple[Stage, ...] = ()
    """Of several run folders: with their initial weights, and at checkpoints that all of them have kept."""
    notices: tuple[str, ...] = ()
    """What a reader of the figures should know about the text."""

    def to_dict(self) -> dict[str, Any]:
        """All of it by name, ready for JSON: what is not finite is none."""
        return finite(asdict(self))


def finite(value: Any) -> Any:
    """Nested values with none in place of numbers that are not finite."""
    if isinstance(value, Mapping):
        return {str(key): finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def inspect_gradients(
    runs: Sequence[str | Path],
    text: str | Path | Sequence[str | Path] | None = None,
    *,
    split: SplitName | None = None,
    max_lag: int = MAX_LAG,
    num_places: int = NUM_PLACES,
    cell: str | None = None,
) -> GradientReport:
    """Follow gradients back in time in trained models.

    Args:
        runs: run folders or model files. A run folder alone is followed along its training: at its initial weights, at
            every checkpoint that was kept, and as the model of the run. Several are held against each other; run
            folders also at the checkpoints that all have kept.
        text: files, a folder, a glob, ``-``, or the name of a corpus; none: the corpus of the first run.
        split: which part; none: the test part, else the validation part.
        max_lag: how many tokens to go back.
        num_places: of the text.
        cell: a person's own cell, where a model was trained with one.

    Raises:
        UserError: a model's state has no gradient, or there is no such text, or it is too short.
    """
    _check_sizes(max_lag, num_places)
    bundles = [load_model(where, cell=cell) for where in runs]
    for bundle in bundles:
        check_has_gradient(bundle.network)
    subjects = [
        find_subject(where, bundle, text, split=split, cell=cell) for where, bundle in zip(runs, bundles, strict=True)
    ]
    for where, subject in zip(runs, subjects, strict=True):
        if subject.sha256 != subjects[0].sha256:
            raise UserError(f"{str(where)!r} is of another corpus than {str(runs[0])!r}: give a TEXT for all of them")
    texts = [subject.tokens.tokens for subject in subjects]
    lives = []
    if all((Path(where) / "run.toml").is_file() for where in runs):
        folders = [Run.open(where) for where in runs]
        lives = [
            _Life(str(where), run, run.config(cell=cell), bundle.network, tokens)
            for where, run, bundle, tokens in zip(runs, folders, bundles, texts, strict=True)
        ]
    clipping: Clipping | None = None
    stages: tuple[Stage, ...] = ()
    if len(lives) == 1:
        (life,) = lives
        clipping = clipping_of(life.run, life.config)
        studies = [
            study(name, network, life.tokens, max_lag, num_places, whole=whole, config=life.config, clipping=clipping)
            for name, network, whole in life.stages()
        ]
    else:
        studies = [
            study(str(where), bundle.network, tokens, max_lag, num_places)
            for where, bundle, tokens in zip(runs, bundles, texts, strict=True)
        ]
        stages = _side_by_side(lives, max_lag, num_places)
    first = subjects[0]
    return GradientReport(
        corpus=first.corpus,
        split=first.split,
        num_places=num_places,
        max_lag=max_lag,
        studies=tuple(studies),
        clipping=clipping,
        stages=stages,
        notices=first.notices,
    )


def inspect_kinds(
    kinds: Sequence[str],
    text: str | Path | Sequence[str | Path] | None = None,
    *,
    hidden_size: int = 64,
    seed: int = 0,
    max_lag: int = MAX_LAG,
    num_places: int = NUM_PLACES,
) -> GradientReport:
    """The same for new networks of several kinds, with their initial weights, on the characters of a text.

    Args:
        kinds: names that ``model.kind`` takes.
        text: files, a folder, a glob, or the name of a corpus; none: ``stdlib-prose``.
        hidden_size: of each; embeddings have the same.
        seed: of the weights.
        max_lag: how many tokens to go back.
        num_places: of the text.
    """
    _check_sizes(max_lag, num_places)
    sizes = {"hidden_size": hidden_size, "embedding_size": hidden_size}
    configs = []
    for kind in kinds:
        fields = section_of({"kind": kind}).model_fields
        taken = {name: size for name, size in sizes.items() if name in fields}
        configs.append(resolve({"model": {"kind": kind, **taken}}).model)
        check_has_gradient(build_model(configs[-1], 2, seed=None, dtype=torch.float32))  # before a text is read
    data = DataConfig() if text is None else DataConfig(corpus=_names(text))
    dataset = prepare(data, TextConfig(), TokenizerConfig())
    studies = []
    for config in configs:
        # Drawn in single precision, as a training draws them: these are the weights that it would start from.
        size, boundary_id = dataset.tokenizer.size, dataset.tokenizer.boundary_id
        network = build_model(config, size, seed=seed, dtype=torch.float32, boundary_id=boundary_id)
        studies.append(study(config.kind, network, dataset.train.tokens, max_lag, num_places))
    return GradientReport(dataset.corpus_name, "train", num_places, max_lag, tuple(studies), None)


def _names(text: str | Path | Sequence[str | Path]) -> tuple[str, ...]:
    return (str(text),) if isinstance(text, str | Path) else tuple(map(str, text))


def _check_sizes(max_lag: int, num_places: int) -> None:
    if max_lag < 2 or num_places < 1:
        raise UserError(f"{max_lag} lags at {num_places} places; accepted: 2 lags and more, 1 place and more")


@dataclass(frozen=True)
class _Life:
    """A run that can be followed along its training."""

    name: str
    run: Run
    config: Config
    model: LanguageModel
    tokens: Ids

    def stages(self) -> Iterator[tuple[str, LanguageModel, bool]]:
        """Its network at each time, the model last and once, and whether all of it is to be looked at."""
        yield *self.initial(), True
        title = "the model"
        for name, network in self.checkpoints():
            if self.has_become(network):
                title = f"the model, {name}"
            else:
                yield name, network, False
        yield title, self.model, True

    def checkpoints(self) -> Iterator[tuple[str, LanguageModel]]:
        """Its network at every update that was kept."""
        seen = {0}
        for checkpoint in intact_checkpoints(self.run.checkpoints):
            if (update := checkpoint.trainer["update"]) not in seen:
                seen.add(update)
                stage = self._network(None)
                with torch.no_grad():
                    for name, parameter in stage.named_parameters():
                        parameter.copy_(checkpoint.tensors[f"model.{name}"])
                yield f"update {update:,}", stage

    def has_become(self, network: LanguageModel) -> bool:
        """Whether these are the weights of the model."""
        both = zip(network.parameters(), self.model.parameters(), strict=True)
        return all(torch.equal(mine, models.to(mine.dtype)) for mine, models in both)

    def initial(self) -> tuple[str, LanguageModel]:
        """Its network before the first update."""
        return _FIRST, self._network(self.config.seed)

    def _network(self, seed: int | None) -> LanguageModel:
        size, boundary_id = self.model.vocab_size, self.model.boundary_id
        dtype = getattr(torch, self.config.dtype)
        return build_model(self.config.model, size, seed=seed, dtype=dtype, boundary_id=boundary_id)


def _side_by_side(lives: Sequence[_Life], max_lag: int, num_places: int) -> tuple[Stage, ...]:
    """Several runs at the times that all of them have kept, before all had become their models."""
    if not lives:
        return ()
    kept = [{name: life.has_become(network) for name, network in life.checkpoints()} for life in lives]
    common = [_FIRST, *(name for name in kept[0] if all(name in one for one in kept))]
    common = [name for name in common if name == _FIRST or not all(one[name] for one in kept)]
    chosen = {common[round(at)] for at in torch.linspace(0, len(common) - 1, min(len(common), _MAX_STAGES)).tolist()}
    found: dict[str, dict[str, tuple[float, ...]]] = {name: {} for name in common if name in chosen}
    for life in lives:
        for name, network in (life.initial(), *life.checkpoints()):
            if name in found:
                seen = study(name, network, life.tokens, max_lag, num_places, whole=False)
                found[name][life.name] = seen.by_lag
    return tuple(Stage(name, by_lag) for name, by_lag in found.items())


def study(
    name: str,
    network: LanguageModel,
    tokens: Ids,
    max_lag: int = MAX_LAG,
    num_places: int = NUM_PLACES,
    *,
    whole: bool = True,
    config: Config | None = None,
    clipping: Clipping | None = None,
) -> Study:
    """Look at one network.

    Args:
        name: what to call it.
        network: of any kind whose state has a gradient; it stays as it is.
        tokens: a text, its boundary first.
        max_lag: how many tokens to go back.
        num_places: of the text.
        whole: matrices, state map and saturation too, and not the gradient by lag alone.
        config: of its training, which the verdict speaks of.
        clipping: in that training.
    """
    network = in_float64(network)
    chosen = places(network, tokens, num_places, max_lag)
    found = flow(network, chosen, _matrices(network) if whole else ())
    gradient = spread(found.norm)
    seen = intermediates(network, tokens) if whole else {}
    kept = memory(seen, min(_JUDGED_LAG, max_lag))
    has_fixed_state = not any(grows(tensor) for tensor in network.initial_state(1).tensors.values())
    return Study(
        name=name,
        kind=network.config.kind,
        gradient=gradient,
        parts={part: _medians(norm) for part, norm in found.parts.items()},
        additive=None if found.additive is None else _medians(found.additive),
        rest=None if found.rest is None else _medians(found.rest),
        matrices=tuple(
            Matrix(part, tuple(m.norm_K.tolist()), tuple(m.share_K.tolist()), m.whole, m.error)
            for part, m in found.matrices.items()
        ),
        state_map=state_map(network, chosen) if whole and has_fixed_state else None,
        saturation=saturation(seen),
        memory=kept,
        verdict=judge(gradient.median, found, network.config, config, kept, clipping),
    )


def spread(norms: Tensor) -> Spread:
    """Tenth, half and nine tenths of (K + 1, B) over B."""
    low, middle, high = norms.quantile(norms.new_tensor([0.1, 0.5, 0.9]), dim=1).tolist()
    return Spread(tuple(low), tuple(middle), tuple(high))


def _medians(norms: Tensor) -> tuple[float, ...]:
    return tuple(norms.quantile(0.5, dim=1).tolist())


def _matrices(network: LanguageModel) -> list[str]:
    """The names of the matrices into hidden layers."""
    wanted = {id(matrix) for matrix, _ in network.hidden_matrices()}
    return [name for name, parameter in network.named_parameters() if id(parameter) in wanted]


def state_map(network: LanguageModel, chosen: Places) -> StateMap:
    """Singular values, spectral radius and Lyapunov exponents, from the first places and along their tokens."""
    size = Layout.of(network).size
    num_steps = chosen.tokens_BT.shape[1]
    paths = [
        Trajectory.along(network, tokens_T, chosen.state.select([row]))
        for row, tokens_T in enumerate(chosen.tokens_BT[:_NUM_TRAJECTORIES])
    ]
    count = None if size <= _NUM_DIRECTIONS else _NUM_DIRECTIONS
    products: dict[int, tuple[float, ...]] = {}
    for steps in (steps for steps in PRODUCTS if steps <= num_steps):
        logs = [log_singular_values(path.part(slice(0, steps)), count) for path in paths]
        products[steps] = tuple((torch.stack(logs).median(0).values / math.log(10)).tolist())
    radius = None
    if size <= _MAX_MATRIX:
        moments = range(0, num_steps, max(1, num_steps // _NUM_MOMENTS))
        radii = [torch.linalg.eigvals(paths[0].jacobian(moment)).abs().max().item() for moment in moments]
        radius = median(radii)
    settled = min(_SETTLING_STEPS, num_steps // 2)
    growth_NM = log_growth(paths[0], _NUM_EXPONENTS)[settled:]
    blocks = torch.stack([block.mean(0) for block in growth_NM.split(_BLOCK) if len(block) == _BLOCK] or [growth_NM[0]])
    error = blocks.std(0) / math.sqrt(len(blocks)) if len(blocks) > 1 else blocks[0] * math.nan
    return StateMap(
        size=size,
        products=products,
        is_complete=count is None,
        spectral_radius=radius,
        exponents=tuple(growth_NM.mean(0).tolist()),
        errors=tuple(error.tolist()),
    )


def clipping_of(run: Run, config: Config) -> Clipping | None:
    """What the log of a run says about its gradients; none where it logged no update."""
    norms, updates, num_skipped = [], [], 0
    for record in run.records():
        num_skipped += record["kind"] == "skipped"
        if record["kind"] == "update" and isinstance(record.get("grad_norm"), float):
            norms.append(record["grad_norm"])
            updates.append(record["update"])
    if not norms:
        return None
    threshold = config.training.max_grad_norm
    size = -(-len(norms) // _NUM_POINTS)
    stretches = [slice(first, first + size) for first in range(0, len(norms), size)]
    return Clipping(
        max_grad_norm=threshold,
        num_updates=len(norms),
        num_clipped=0 if threshold is None else sum(norm > threshold for norm in norms),
        num_skipped=num_skipped,
        median_norm=median(norms),
        largest_norm=max(norms),
        updates=tuple(updates[stretch][-1] for stretch in stretches),
        median_norms=tuple(median(norms[stretch]) for stretch in stretches),
        largest_norms=tuple(max(norms[stretch]) for stretch in stretches),
    )


def judge(
    medians: Sequence[float],
    found: Flow,
    model: ModelConfig,
    config: Config | None = None,
    kept: Memory | None = None,
    clipping: Clipping | None = None,
) -> Verdict:
    """Say in words whether a gradient lives, what was measured on its way, and which mitigation would act on that.

    Args:
        medians: norms by lag, from 0.
        found: where it comes from.
        model: settings of the network.
        config: of its training.
        kept: what its forget gates would keep.
        clipping: in its training.
    """
    one = medians[1]
    lag = min(_JUDGED_LAG, len(medians) - 1)
    ratios = [norm / one if one else 0.0 for norm in medians]
    largest = max(ratios[1:])
    left = next((k for k, ratio in enumerate(ratios) if k and ratio < _VANISHED), None)
    fields = type(model).model_fields
    said: list[str] = []
    if largest >= _EXPLODED or not math.isfinite(largest):
        trend: Trend = "explodes"
        at = ratios.index(largest)
        said.append(f"it explodes: {at} steps back it is {largest:.3g} times that one step back")
        said.append(_against_explosion(clipping))
        said.append("a lower training.learning_rate keeps it from growing further")
    elif ratios[lag] < _VANISHED:
        trend = "vanishes"
        hundredth = "" if left is None else f"a hundredth is left {left} steps back, "
        said.append(f"it vanishes: {hundredth}{ratios[lag]:.2g} of it {lag} steps back")
        said.extend(_on_the_additive_way(found, lag, model, kept))
        if clipping is None:
            said.append("clipping does nothing against it: it only makes gradients smaller")
        elif clipping.num_clipped:
            said.append(f"clipping, in {_updates(clipping)}, does nothing against it: it only makes gradients smaller")
    else:
        trend = "is kept"
        said.append(f"it is kept: {ratios[lag]:.2g} of it is left {lag} steps back{_way_of(found, lag)}")
    if trend != "is kept" and "recurrent_init" in fields and getattr(model, "recurrent_init", "") == "uniform":
        said.append("model.recurrent_init orthogonal starts with singular values of one")
    if config is not None and not config.data.pairs and config.training.bptt < len(medians) - 1:
        said.append(f"training saw none of it beyond {config.training.bptt} steps, where training.bptt cuts it off")
    return Verdict(trend, lag, ratios[lag], left, "; ".join(said))


def _against_explosion(clipping: Clipping | None) -> str:
    """What clipping does, or did in the training, to gradients that explode."""
    if clipping is None:
        return "clipping bounds what it does to the weights"
    if clipping.max_grad_norm is None:
        return "nothing bounded what it did to the weights: training.max_grad_norm would"
    limit = f"training.max_grad_norm {clipping.max_grad_norm:g}"
    if not clipping.num_clipped:
        return f"{limit} was never reached and bounded nothing: the largest norm was {clipping.largest_norm:.3g}"
    return f"clipping bounds what it does to the weights, and did in {_updates(clipping)} ({limit})"


def _updates(clipping: Clipping) -> str:
    return f"{clipping.num_clipped:,} of {clipping.num_updates:,} updates"


def _on_the_additive_way(found: Flow, lag: int, model: ModelConfig, kept: Memory | None) -> Iterator[str]:
    """Where on the additive way a gradient is lost, and what would act there."""
    has_memory = "forget_bias" in type(model).model_fields  # a way that may be shut altogether
    if found.additive is None or not (found.additive[2:].any() or has_memory):
        yield "no additive way leads past the matrix: a gated kind (lstm, gru, mingru) has one"
        return
    norms = _medians(found.additive)
    entering = norms[2] / norms[1] if norms[1] else 0.0
    keeping = norms[lag] / norms[2] if norms[2] else 0.0
    yield (
        f"the additive way takes up {entering:.2g} of what is one token back and keeps {keeping:.2g} of that over "
        f"{lag - 2} steps"
    )
    if kept is None:
        if keeping < _VANISHED and not has_memory:
            yield "its gates have learned, or were drawn, to forget"
        return
    is_saturated = kept.saturated > _STUCK_MEMORY
    then = ""
    if 2 * kept.keeping >= kept.units:
        then = ", so that model.forget_bias is not what is missing"
    elif not is_saturated:
        bias = getattr(model, "forget_bias", None)
        more = "of 1 and more" if bias is None else f"above {bias:g}"
        then = f": a model.forget_bias {more} starts them further open, as long as training leaves them so"
    yield f"the forget gates of {kept.keeping:,} of {kept.units:,} units would keep more than a hundredth{then}"
    if is_saturated:
        yield (
            f"the tanh that these are read through is saturated at {kept.saturated:.1%} of the tokens and hardly lets "
            "a gradient in: a kind whose memory is a weighted mean of candidates (gru, qrnn) does not outgrow it"
        )


def _way_of(found: Flow, lag: int) -> str:
    """On which way it came, where there are two."""
    if found.additive is None or found.rest is None or not found.additive[2:].any():
        return ""
    is_additive = _medians(found.additive)[lag] > _medians(found.rest)[lag]
    return ", mostly by the additive way" if is_additive else ", mostly through the matrix, gates and candidates"
