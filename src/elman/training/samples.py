"""What a model writes while it is trained: texts after fixed prompts, or the targets of fixed sources."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from elman.data.pairs import Pairs
from elman.data.prepare import Dataset
from elman.generation import Sampler
from elman.models.file import Bundle
from elman.models.noise import derived_seed
from elman.settings import Config
from elman.translation import write_targets

_SOURCES_SHOWN = 3


class Sample(NamedTuple):
    """One of them."""

    values: dict[str, Any]
    """Prompt, temperature, text, and why it ends."""
    seconds: float


def draw_samples(
    bundle: Bundle, config: Config, dataset: Dataset, update: int, should_stop: Callable[[], bool]
) -> Iterator[Sample]:
    """The samples of an update, as the settings ask for them.

    Args:
        bundle: the model as it stands.
        config: all settings of the run.
        dataset: its text.
        update: the update, which is part of the seed.
        should_stop: once true, what is being written is cut short.
    """
    return _targets(bundle, config, dataset) if config.data.pairs else _texts(bundle, config, update, should_stop)


def _texts(bundle: Bundle, config: Config, update: int, should_stop: Callable[[], bool]) -> Iterator[Sample]:
    sampling = config.sampling
    for prompt in sampling.prompts:
        for temperature in sampling.temperatures:
            started = time.perf_counter()
            generated = Sampler(
                bundle,
                prompt,
                settings=sampling.model_copy(update={"temperature": temperature}),
                seed=derived_seed(config.seed, "sample", update, prompt, str(temperature)),
                should_stop=should_stop,
            ).run()
            values = {
                "prompt": prompt,
                "temperature": temperature,
                "text": generated.text,
                "finish_reason": generated.finish_reason,
            }
            yield Sample(values, time.perf_counter() - started)


def _targets(bundle: Bundle, config: Config, dataset: Dataset) -> Iterator[Sample]:
    """What the model makes of some sources: those of the settings, or the first that were held out."""
    started = time.perf_counter()
    tokenizer = bundle.tokenizer
    sources = [tokenizer.encode(prompt) for prompt in config.sampling.prompts if prompt]
    if not sources:
        pairs = Pairs((dataset.valid or dataset.train).tokens, 1, tokenizer.boundary_id)
        sources = [pairs.source(example) for example in range(min(_SOURCES_SHOWN, pairs.num_examples))]
    written = write_targets(
        bundle.network,
        tokenizer,
        sources,
        reverse_source=config.data.reverse_source,
        max_new_tokens=config.sampling.max_new_tokens,
    )
    seconds = time.perf_counter() - started
    for source, target in zip(sources, written, strict=True):
        values = {
            "prompt": f"{tokenizer.decode(source)}\t",
            "temperature": 0.0,
            "text": target.text,
            "finish_reason": "boundary" if target.finished else "length",
        }
        yield Sample(values, seconds / len(sources))
