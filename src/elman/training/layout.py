"""How the training text is laid out: in rows side by side, as many as it is long enough for, shared by processes."""

from __future__ import annotations

from collections.abc import Callable

from elman.config import CountedConfig
from elman.data.pairs import Pairs
from elman.data.prepare import Dataset
from elman.data.streams import Streams, fit_layout
from elman.errors import ConfigError
from elman.models.noise import derived_seed
from elman.settings import Config
from elman.training.distributed import Ranks


def lay_out(
    config: Config, dataset: Dataset, ranks: Ranks, num_rows: int, note: Callable[[str], None]
) -> Streams | Pairs:
    """The training text in so many rows, or in fewer where it is too short.

    Args:
        config: all settings.
        dataset: the text.
        ranks: the processes that share the rows.
        num_rows: those of all processes.
        note: told where the text is too short.

    Raises:
        ConfigError: it does not give every process a row, or is not to be shared.
    """
    if ranks.size == 1 and config.training.shard:
        raise ConfigError(
            "training.shard divides a model over several processes, and this is one: start it with torchrun "
            "--nproc-per-node N -m elman train ..., or leave it out"
        )
    if ranks.size > 1 and isinstance(config.model, CountedConfig):
        raise ConfigError(
            f"model.kind {config.model.kind!r} is counted by one process, and there are {ranks.size}: "
            "start it without torchrun"
        )
    if isinstance(config.model, CountedConfig):
        return Streams(dataset.train.tokens, 1, len(dataset.train.tokens) - 1)  # one segment, the whole text
    rows = "training.batch_size" if ranks.size == 1 else f"the batch of all {ranks.size} processes,"
    laid_out = _pairs(config, dataset, num_rows) if config.data.pairs else _streams(config, dataset, num_rows)
    size = laid_out.batch_size
    if isinstance(laid_out, Pairs) and size < num_rows:
        note(f"there are only {size} pairs to train on: {rows} {num_rows} becomes {size}")
    elif isinstance(laid_out, Streams) and (size, laid_out.bptt) != (num_rows, config.training.bptt):
        note(
            f"the training text has only {len(dataset.train.tokens) - 1} tokens: {rows} {num_rows} becomes {size}, "
            f"training.bptt {config.training.bptt} becomes {laid_out.bptt}"
        )
    if size < ranks.size:
        raise ConfigError(
            f"the training text is long enough for {size} rows side by side, and there are {ranks.size} processes: "
            "start fewer, or give a smaller training.bptt"
        )
    return laid_out


def _streams(config: Config, dataset: Dataset, num_rows: int) -> Streams:
    tokens, training = dataset.train.tokens, config.training
    batch_size, bptt = fit_layout(len(tokens) - 1, num_rows, training.bptt)
    return Streams(
        tokens,
        batch_size,
        bptt,
        trim=training.trim,
        reset_token=dataset.tokenizer.boundary_id if config.data.reset_at_documents else None,
        random_seed=derived_seed(config.seed, "bptt") if training.random_bptt else None,
    )


def _pairs(config: Config, dataset: Dataset, num_rows: int) -> Pairs:
    """Examples, in batches that are shuffled for every epoch."""
    train = dataset.train
    batch_size = min(num_rows, train.num_documents // 2)
    return Pairs(train.tokens, batch_size, dataset.tokenizer.boundary_id, config.data.reverse_source, seed=config.seed)
