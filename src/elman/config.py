"""Every setting of Elman, in sections; the same names in TOML, on the command line and in Python.

Neither this module nor ``elman.settings``, which puts the sections together, imports torch, so that ``--help`` and a
mistyped setting answer at once. A section is frozen and strict: an unknown key, a wrong type or a value out of range
is an error that names the setting. The docstring below each field is its help text on the command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]

BUDGETS = ("max_updates", "max_epochs", "max_tokens", "max_seconds")
"""The settings of ``training`` that end it; the first reached counts."""

DEFAULT_EPOCHS = 10.0
"""Of a training to which none of them is given."""

EXECUTION = ("num_threads", "accumulate", "recompute_tokens", "compile", "shard")
"""The settings of ``training`` that say how its numbers are computed: they change no more than their rounding."""


class Section(BaseModel):
    """Base of all settings: frozen, strict about names, finite numbers only."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    meaningful: ClassVar[Mapping[str, tuple[str, tuple[str, ...]]]] = {}
    """Settings that have a meaning only for some values of another one: ``{name: (other, its values)}``."""

    @field_validator("*", mode="before")
    @classmethod
    def _none_by_name(cls, value: Any, info: ValidationInfo) -> Any:
        """TOML and the command line have no null: the word ``none`` stands for it where a setting may be unset."""
        optional = info.field_name is not None and type(None) in get_args(cls.model_fields[info.field_name].annotation)
        return None if optional and value == "none" else value

    @model_validator(mode="after")
    def _has_a_meaning(self) -> Self:
        for name, (other, accepted) in self.meaningful.items():
            value, default = getattr(self, name), type(self).model_fields[name].default
            if value != default and getattr(self, other) not in accepted:
                chosen = getattr(self, other)
                raise ValueError(f"{name} has no meaning for {other} {chosen!r}, only for {' and '.join(accepted)}")
        return self


def _as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str | Path) else value


def _as_names(value: Any) -> Any:
    """From one string, or from several, as the command line gives a setting that may be repeated."""
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list | tuple) or not all(isinstance(string, str) for string in strings):
        return value
    return tuple(name.strip() for string in strings for name in string.split(","))


def _as_width(value: Any) -> Any:
    """From ``true``, ``false`` or a number, as the command line gives a switch that may be a width."""
    typed = value.strip().lower() if isinstance(value, str) else value
    if typed in ("true", "false"):
        return typed == "true"
    width = int(typed) if isinstance(typed, str) and typed.isdecimal() else typed
    if isinstance(width, bool) or (isinstance(width, int) and width > 0):
        return width
    raise ValueError(f"{value!r} is no width: give true, false, or a number from 1 up")


class DataConfig(Section):
    """Which text, and how it is divided."""

    corpus: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = ("stdlib-prose",)
    """Files, folders, globs, '-' for standard input, or one name from `elman data list`."""
    field: str | None = None
    """The field of a .jsonl, or the column of a .csv, .tsv or .parquet, that holds the text; none: `text`."""
    valid_fraction: Fraction = 0.05
    """Share of the characters held out for validation, taken from just before the test part; 0: none."""
    test_fraction: Fraction = 0.05
    """Share of the characters held out for the final evaluation, taken from the end; 0: none."""
    reset_at_documents: bool = False
    """Put the state back to its initial value at every document border."""
    pairs: bool = False
    """The text is examples of a source and a target: the target is learned, each example from the initial state."""
    source_field: str | None = None
    """The field or column that holds the source of a pair; none: `source`, or the first column without a header."""
    target_field: str | None = None
    """The field or column that holds the target of a pair; none: `target`, or the second column without a header."""
    reverse_source: bool = False
    """Read the tokens of each source in reverse order (Sutskever et al. 2014)."""

    @model_validator(mode="after")
    def _pairs_are_asked_for(self) -> DataConfig:
        if not self.pairs:
            for name in ("source_field", "target_field", "reverse_source"):
                if value := getattr(self, name):
                    raise ValueError(f"{name} {value!r} has no meaning without pairs: set data.pairs true")
        elif (self.source_field or "source") == (self.target_field or "target"):
            raise ValueError("source_field and target_field name one field: give two")
        return self

    @model_validator(mode="after")
    def _leaves_something_to_train_on(self) -> DataConfig:
        if self.valid_fraction + self.test_fraction >= 1.0:
            raise ValueError("valid_fraction and test_fraction must sum to less than 1")
        return self


class TextConfig(Section):
    """How bytes become characters."""

    encoding: str = "utf-8"
    """Any encoding that Python knows; decoding is strict."""
    newlines: Literal["lf", "keep"] = "lf"
    """`lf` turns CR LF and lone CR into LF; `keep` leaves them."""
    bom: Literal["strip", "keep"] = "strip"
    """What becomes of a byte order mark at the start of a file."""
    document_separator: Annotated[str, Field(min_length=1)] | None = None
    """A string between documents inside a plain text file, no part of them; none: a file is a document."""


class TokenizerConfig(Section):
    """How characters become tokens."""

    level: Literal["char", "byte", "word", "bpe"] = "char"
    """The unit of the language model."""
    min_count: PositiveInt = 1
    """Characters or words rarer than this in the training part become `<unk>`."""
    max_size: PositiveInt | None = None
    """Largest vocabulary, special tokens counted; for bpe the size trained (8192 where none is given)."""
    sample_bytes: PositiveInt = 16 * 1024 * 1024
    """BPE merges are learned on at most this much of the training part, taken evenly from all of it."""
    path: str | None = None
    """An existing `tokenizer.json` of the Hugging Face format, used as it is."""

    meaningful = {
        "min_count": ("level", ("char", "word")),
        "max_size": ("level", ("char", "word", "bpe")),
        "sample_bytes": ("level", ("bpe",)),
    }

    @model_validator(mode="after")
    def _path_fits(self) -> TokenizerConfig:
        if self.path is not None and (self.level != "bpe" or self.max_size is not None):
            raise ValueError("path names a finished tokenizer: give it with level 'bpe' and max_size none")
        return self


class ModelConfig(Section):
    """What every kind of model has."""

    kind: str = "lstm"
    """The family; a cell's name is a recurrent stack, `./file.py:Class` or `package.module:Class` your own cell's."""


class EmbeddingConfig(ModelConfig):
    """What every model has that reads tokens through an embedding and ends in a linear output."""

    embedding_size: PositiveInt = 128
    """Width E of the token embedding."""
    dropout: Fraction = 0.0
    """Share of units dropped after the embedding, between the layers and before the output, in training only."""
    tie_weights: bool = False
    """Use the embedding matrix as the output matrix; needs the same width, or output_projection."""
    output_projection: Annotated[PositiveInt | bool, BeforeValidator(_as_width)] = False
    """A linear map before the output matrix, to embedding_size (`true`) or to this width, the rank of the output."""
    embedding_range: PositiveFloat | None = None
    """Embedding and output matrix drawn uniformly from +- this; none: N(0, 1/E) and +-1/sqrt(width)."""
    output: Literal["linear", "adaptive", "mixture"] = "linear"
    """The last part: one softmax, the adaptive softmax for many words, or a mixture of softmaxes."""
    output_cutoffs: Annotated[tuple[PositiveInt, ...], BeforeValidator(_as_names), Field(min_length=1)] = (2000, 10000)
    """Token ids at which the clusters of rarer words begin, as in `2000,10000`."""
    num_mixtures: Annotated[int, Field(ge=2)] = 4
    """Number K of softmaxes that are mixed."""

    meaningful = {"output_cutoffs": ("output", ("adaptive",)), "num_mixtures": ("output", ("mixture",))}

    @property
    def dropout_before_output(self) -> float:
        """The share of what the output reads that dropout takes away."""
        return self.dropout

    @model_validator(mode="after")
    def _output_fits(self) -> Self:
        if any(first >= second for first, second in pairwise(self.output_cutoffs)):
            raise ValueError(f"output_cutoffs {self.output_cutoffs} must rise, as in 2000,10000")
        if self.tie_weights and self.output == "adaptive":
            raise ValueError("tie_weights has no meaning for output 'adaptive', whose matrices have other shapes")
        if self.output_projection and self.output != "linear":
            raise ValueError(f"output_projection has no meaning for output {self.output!r}, which has its own")
        return self

    @model_validator(mode="after")
    def _tied_sizes_agree(self) -> Self:
        name, width = "hidden_size", getattr(self, "hidden_size", self.embedding_size)
        if self.output_projection is not False:
            name, width = "output_projection", self.output_projection
        fits = width is True or width == self.embedding_size or self.output == "mixture"
        if self.tie_weights and not fits:
            raise ValueError(
                f"tie_weights needs embedding_size ({self.embedding_size}) equal to {name} ({width}); "
                "set them equal, or set output_projection true"
            )
        return self


class StackConfig(EmbeddingConfig):
    """Embedding, dropout, recurrent layers, output; what may stand around the cell of every layer."""

    residual: bool = False
    """Add each layer's input to its output; needs equal widths."""
    norm: Literal["none", "layer", "rms"] = "none"
    """Normalise what each cell and feed-forward network reads, and the last output: layer or root mean square."""
    convolution_size: NonNegativeInt = 0
    """Each cell reads a weighted sum, unit by unit, of its last so many inputs; 0: the input as it is."""
    feedforward_size: NonNegativeInt = 0
    """Width of a gated feed-forward network (SwiGLU) after each cell; 0: none."""
    locked_dropout: bool = False
    """Dropout's mask stays the same for all times of a segment (variational dropout)."""
    embedding_dropout: Fraction | None = None
    """Share of units dropped after the embedding; none: dropout."""
    output_dropout: Fraction | None = None
    """Share of units dropped before the output; none: dropout."""
    word_dropout: Fraction = 0.0
    """Share of the vocabulary whose embeddings are dropped at each update."""

    @property
    def dropout_before_output(self) -> float:
        return self.dropout if self.output_dropout is None else self.output_dropout

    @property
    def cell_names(self) -> tuple[str, ...]:
        """The cell of each layer, from the first."""
        raise NotImplementedError  # one name for all layers, or a list: the two stacks below say which

    @model_validator(mode="after")
    def _surroundings_fit(self) -> Self:
        if self.feedforward_size and not self.residual:
            raise ValueError("feedforward_size needs residual: set residual true as well")
        if self.convolution_size == 1:
            raise ValueError("convolution_size 1 would mix no inputs: give 0 for none, or 2 and more")
        return self


class UniformStackConfig(StackConfig):
    """A stack of one cell, which is the model's kind."""

    num_layers: PositiveInt = 1
    """Number of recurrent layers L."""

    @property
    def cell_names(self) -> tuple[str, ...]:
        return (self.kind,) * self.num_layers


class MixedStackConfig(StackConfig):
    """A stack of several cells."""

    layers: Annotated[tuple[str, ...], BeforeValidator(_as_names), Field(min_length=1)] = ("mingru", "lstm")
    """The cell of each layer, from the first, as in `lstm,mamba,lstm`; each cell's own settings hold for its layers."""

    @property
    def cell_names(self) -> tuple[str, ...]:
        return self.layers


class WindowConfig(EmbeddingConfig):
    """Embeddings of the last k tokens side by side, one hidden layer, output."""

    window_size: PositiveInt = 8
    """Number k of tokens that the next one is predicted from."""
    hidden_size: PositiveInt = 256
    """Width H of the hidden layer."""
    direct_connections: bool = False
    """A linear map from the embeddings of the window straight to the output, beside the hidden layer."""

    @model_validator(mode="after")
    def _direct_connections_fit(self) -> Self:
        if self.direct_connections and self.output != "linear":
            raise ValueError(f"direct_connections has no meaning for output {self.output!r}, only for linear")
        return self


class Seq2SeqConfig(EmbeddingConfig):
    """An encoder that reads the source into a state of fixed size, and a decoder that writes the target from it."""

    cell: str = "lstm"
    """The cell of encoder and decoder, one that Elman brings, with that cell's default settings."""
    hidden_size: PositiveInt = 256
    """Width H of the layers of encoder and decoder."""
    num_layers: PositiveInt = 1
    """Number of layers L of the encoder, and of the decoder."""
    share_embedding: bool = True
    """Encoder and decoder read tokens through one embedding; if not, each has its own."""

    @field_validator("cell")
    @classmethod
    def _is_no_code(cls, value: str) -> str:
        if ":" in value:
            raise ValueError(f"cell {value!r} is a path; accepted: the name of a cell that Elman brings, such as lstm")
        return value


class CountedConfig(ModelConfig):
    """What every model has that is counted and not trained, for which most of ``training`` has no meaning."""


class NgramConfig(CountedConfig):
    """How often each sequence of up to ``order`` tokens occurs, made into probabilities by a smoothing."""

    order: Annotated[int, Field(ge=1, le=20)] = 6
    """Tokens of the longest n-gram, the predicted one counted: it is predicted from order - 1."""
    smoothing: Literal["kneser_ney", "add_k", "stupid_backoff"] = "kneser_ney"
    """What becomes of n-grams never seen; `kneser_ney` is the interpolated modified one, the others are lessons."""
    add_k: Annotated[float, Field(ge=1e-9, le=1e9)] = 0.1
    """What is added to every count."""

    meaningful = {"add_k": ("smoothing", ("add_k",))}


class CellConfig(Section):
    """What every recurrent cell has; each cell adds its own."""

    hidden_size: PositiveInt = 256
    """Width H of the output and of each part of the state."""


class TrainingConfig(Section):
    """How the model is fitted: truncated back-propagation through time over parallel streams."""

    batch_size: PositiveInt = 32
    """Number of streams B trained side by side; each is one contiguous part of the training text."""
    bptt: PositiveInt = 64
    """Tokens per segment T: the state is carried past a segment's end, its gradient is not."""
    trim: bool = False
    """Drop what does not divide evenly into streams, as PyTorch's word-level example does."""
    random_bptt: bool = False
    """Segments of random lengths around bptt, cut anew every epoch; the rate is scaled by the length."""
    reset_probability: Fraction = 0.01
    """Chance that a stream's state is put back to initial before a segment, so that beginnings are learned too."""
    optimizer: Literal["adamw", "sgd", "muon"] = "adamw"
    """`muon` orthogonalises the updates of the recurrent layers' matrices and uses AdamW for the rest."""
    learning_rate: PositiveFloat = 2e-3
    """Peak rate of AdamW or SGD, and of the AdamW part of Muon."""
    matrix_learning_rate: PositiveFloat = 0.02
    """Peak rate of Muon's orthogonalised updates."""
    momentum: Fraction = 0.0
    """Of SGD."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled decay of AdamW and Muon; of SGD the classical one."""
    adam_beta1: Fraction = 0.9
    """Decay of AdamW's mean of gradients."""
    adam_beta2: Fraction = 0.99
    """Decay of AdamW's mean of squared gradients."""
    schedule: Literal["constant", "cosine", "linear", "plateau"] = "cosine"
    """How the rate falls over the budget; `plateau` divides it when validation does not improve."""
    warmup_updates: NonNegativeInt = 50
    """Updates over which the rate rises linearly from zero."""
    final_rate: Annotated[float, Field(ge=0.0, le=1.0)] = 0.05
    """The share of the peak rate left at the end of `cosine` and `linear`."""
    plateau_divisor: Annotated[float, Field(gt=1.0)] = 4.0
    """What `plateau` divides the rate by."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Global gradient norm above which the gradient is scaled down to it; none: never."""
    label_smoothing: Fraction = 0.0
    """Share of the target's probability that is spread over the whole vocabulary."""
    num_negatives: NonNegativeInt = 0
    """Learn against so many random tokens in place of the whole vocabulary (sampled softmax); 0: against all."""
    activation_penalty: NonNegativeFloat = 0.0
    """Times the mean square of what the output reads, added to the loss (AR)."""
    temporal_penalty: NonNegativeFloat = 0.0
    """Times the mean square of its change from one time to the next, added to the loss (TAR)."""
    averaging: Literal["none", "exponential", "triggered"] = "none"
    """Judge and keep a mean of the weights; `triggered` begins when estimates stop improving (NT-ASGD)."""
    averaging_decay: Fraction = 0.999
    """What the exponential mean keeps at every update."""
    spike_deviations: PositiveFloat | None = 6.0
    """Skip a batch whose loss is so many standard deviations above the last 128; none: only what is not finite."""
    max_updates: PositiveInt | None = None
    """Budget in optimiser updates; the first budget reached ends training."""
    max_epochs: PositiveFloat | None = None
    """Budget in passes over the training part."""
    max_tokens: PositiveInt | None = None
    """Budget in trained tokens."""
    max_seconds: PositiveFloat | None = None
    """Budget in seconds of training, evaluation and sampling not counted."""
    num_threads: PositiveInt | None = None
    """Threads of PyTorch on the CPU, for the run alone; none: PyTorch's own choice."""
    accumulate: PositiveInt = 1
    """Pieces in which the rows of a batch are read for one update, one after the other: less memory, the same sums."""
    recompute_tokens: NonNegativeInt = 0
    """Keep only the states between pieces of so many tokens and compute the rest again for the gradient; 0: keep it."""
    precision: Literal["auto", "bfloat16", "float16"] | None = None
    """Of matrix products, by autocast; `auto`: bfloat16 where there is hardware for it; none: that of dtype."""
    compile: bool = False
    """Compile loss and gradient with torch.compile; where that cannot be done, training says so and goes without."""
    shard: bool = False
    """Divide weights and optimiser over the processes that torchrun starts (FSDP2); else each holds all of them."""

    meaningful = {
        "matrix_learning_rate": ("optimizer", ("muon",)),
        "momentum": ("optimizer", ("sgd",)),
        "adam_beta1": ("optimizer", ("adamw", "muon")),
        "adam_beta2": ("optimizer", ("adamw", "muon")),
        "final_rate": ("schedule", ("cosine", "linear")),
        "plateau_divisor": ("schedule", ("plateau",)),
        "averaging_decay": ("averaging", ("exponential",)),
    }

    @model_validator(mode="after")
    def _loss_and_averaging_fit(self) -> Self:
        if self.num_negatives and self.label_smoothing:
            raise ValueError("label_smoothing has no meaning with num_negatives, which never sees the whole vocabulary")
        if self.shard and self.averaging != "none":
            raise ValueError(f"averaging {self.averaging!r} needs whole weights, and shard divides them: leave one out")
        return self

    @model_validator(mode="after")
    def _execution_fits(self) -> Self:
        if self.accumulate > self.batch_size:
            raise ValueError(
                f"accumulate {self.accumulate} is more than batch_size {self.batch_size}: a piece has one row at least"
            )
        for name, value in (("optimizer", "muon"), ("compile", True)):
            if self.shard and getattr(self, name) == value:
                raise ValueError(f"{name} {value!r} needs whole parameters, and shard divides them: leave one out")
        return self

    @property
    def has_budget(self) -> bool:
        """Whether anything ends the training."""
        return any(getattr(self, name) for name in BUDGETS)


class EvaluationConfig(Section):
    """Estimates on the validation part during training."""

    every_updates: PositiveInt | None = None
    """Updates between two estimates; none: one at the end of every epoch. The end of training always has one."""
    num_streams: PositiveInt = 16
    """Parallel streams of the estimate, recorded with it; the final evaluation uses one."""
    max_tokens: PositiveInt | None = None
    """Estimate on the first tokens of the validation part only, recorded with it; none: on all of it."""


PositiveFraction = Annotated[float, Field(gt=0.0, le=1.0)]
OpenAIPenalty = Annotated[float, Field(ge=-2.0, le=2.0)]
BiasedText = Annotated[str, Field(min_length=1)]


def _as_biases(value: Any) -> Any:
    """From ``TEXT=BIAS``, as the command line has it, or a mapping from texts or token ids to biases."""
    if isinstance(value, Mapping):
        return tuple(value.items())
    entries = (value,) if isinstance(value, str) else value
    if not isinstance(entries, list | tuple):
        return value
    return tuple(_as_bias(entry) for entry in entries)


def _as_bias(entry: Any) -> Any:
    if not isinstance(entry, str):
        return entry
    text, equals, bias = entry.rpartition("=")
    if not equals:
        raise ValueError(f"{entry!r} is no TEXT=BIAS, such as 'the=-2'")
    return text, bias


class SamplingConfig(Section):
    """Texts drawn during training and by `elman sample`."""

    every_updates: PositiveInt | None = None
    """Updates between two samples in training; none: with every estimate."""
    prompts: tuple[str, ...] = ("",)
    """Fixed beginnings of the samples in training; empty: the boundary token alone."""
    temperatures: tuple[NonNegativeFloat, ...] = (0.3, 0.8, 1.5)
    """Temperatures of the samples in training."""
    max_new_tokens: NonNegativeInt = 300
    """Tokens drawn at most."""
    min_new_tokens: NonNegativeInt = 0
    """Tokens before which the text does not end by itself."""
    logit_bias: Annotated[tuple[tuple[BiasedText | NonNegativeInt, float], ...], BeforeValidator(_as_biases)] = ()
    """TEXT=BIAS: added to the logit of the last token of a text where its others stand before it."""
    repetition_penalty: PositiveFloat = 1.0
    """Above 1 makes every token of the prompt and the text less probable, below 1 more."""
    frequency_penalty: OpenAIPenalty = 0.0
    """Subtracted from a token's logit for each time it was drawn."""
    presence_penalty: OpenAIPenalty = 0.0
    """Subtracted once from the logit of every token that was drawn."""
    no_repeat_ngram_size: NonNegativeInt = 0
    """No sequence of this many tokens comes a second time; 0: any may."""
    bad_words: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that are never completed."""
    suppress_tokens: tuple[NonNegativeInt, ...] = ()
    """Ids of tokens that are never drawn."""
    temperature: NonNegativeFloat = 0.8
    """Divides the logits; 0 takes the most probable token."""
    top_k: NonNegativeInt = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: PositiveFraction = 1.0
    """Keep the smallest set of most probable tokens whose probabilities reach p."""
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Keep tokens at least this times as probable as the most probable one; 0 keeps all."""
    typical_p: PositiveFraction = 1.0
    """Keep the tokens whose surprisal is nearest to the entropy, up to this probability; 1 keeps all."""
    epsilon_cutoff: Fraction = 0.0
    """Keep tokens of at least this probability; 0 keeps all."""
    eta_cutoff: Fraction = 0.0
    """The same with a threshold that falls with the entropy; 0 keeps all."""
    num_beams: PositiveInt = 1
    """Above 1: beam search over so many beams in place of drawing."""
    length_penalty: float = 1.0
    """Beams are compared by log-probability / length^penalty: above 0 favours longer texts."""

    @model_validator(mode="after")
    def _settings_fit_each_other(self) -> Self:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens ({self.min_new_tokens}) is more than max_new_tokens ({self.max_new_tokens})"
            )
        if self.num_beams == 1 and self.length_penalty != 1.0:
            raise ValueError("length_penalty has no meaning without num_beams of 2 or more")
        filters = ("top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
        given = [name for name in filters if getattr(self, name) != type(self).model_fields[name].default]
        if self.num_beams > 1 and given:
            raise ValueError(f"{given[0]} has no meaning for num_beams {self.num_beams}, only where tokens are drawn")
        return self


class CheckpointConfig(Section):
    """Resumable states in RUN/checkpoints."""

    every_updates: PositiveInt | None = None
    """Updates between two checkpoints; none: every_seconds alone decides."""
    every_seconds: PositiveFloat | None = 300.0
    """Seconds between two checkpoints."""
    keep: Annotated[int, Field(ge=2)] = 2
    """Newest checkpoints that stay; older ones go once the newest is verified."""
