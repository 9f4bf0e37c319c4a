"""``elman sample``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from elman.cli.files import StateFile
from elman.cli.flags import OF_ONE_TEXT, OwnCell, SamplingFlags, Seed, Switch, given
from elman.errors import TextError, UserError

if TYPE_CHECKING:
    from elman.config import SamplingConfig
    from elman.generation import Sampler
    from elman.inspection.copies import Copied
    from elman.reading import Reading, Unknown


def sample(
    run: str,
    /,
    *,
    prompt: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    prompt_file: Path | None = None,
    seed: Seed | None = None,
    stop: Annotated[list[str] | None, Parameter(negative=(), allow_leading_hyphen=True)] = None,
    unknown: Literal["error", "skip"] = "error",
    load_state: Path | None = None,
    save_state: StateFile = None,
    interactive: Switch = False,
    engine: Literal["auto", "int8", "pytorch"] = "auto",
    check_copies: str | None = None,
    json: Switch = False,
    cell: OwnCell = None,
    flags: SamplingFlags | None = None,
) -> None:
    """Draw a text.

    Args:
        run: A run folder or a model.safetensors.
        prompt: How the text begins; none: from the boundary token alone.
        prompt_file: A UTF-8 file with the prompt, '-' for standard input; its last line end belongs to it.
        seed: The same seed gives the same text; none: 0.
        stop: A string that ends the text; repeat it for several.
        unknown: What to do with characters of a prompt, or of what you type, that the model never saw: refuse them, or
            leave them out.
        load_state: Go on from a place that --save-state saved; with the same seed as if nothing had come between.
        interactive: Write in turns with the model: see what may come next, choose, type, draw, take back.
        engine: Form of the step: compiled where it can be (auto), compiled with matrices of 8 bits, or PyTorch's.
        check_copies: A run folder, whose training text is meant, or a corpus: say what the text copies from it.
        json: Print one JSON object on standard output.
    """
    from elman.draft import OF_WHOLE_TEXTS
    from elman.engine import CannotLower, TorchStepper, stepper
    from elman.generation import Sampler
    from elman.models.file import load_model
    from elman.process import num_threads
    from elman.reading import Reading
    from elman.settings import resolve
    from elman.translation import is_of_pairs

    asked = given(flags)
    sampling = resolve(asked).sampling
    if interactive:
        if json or stop or engine != "auto" or check_copies:
            raise UserError("--interactive writes in turns: leave out --json, --stop, --engine and --check-copies")
        _refuse(OF_WHOLE_TEXTS, asked, "--interactive, where each draw says how far it goes")
    if sampling.num_beams > 1:
        _refuse(("temperature",), asked, "--num-beams, which draws nothing")
        if seed is not None:
            raise UserError("--seed has no meaning with --num-beams, which draws nothing: leave it out")
    if prompt is not None and prompt_file is not None:
        raise UserError("--prompt and --prompt-file are two prompts: give one")
    beginning = _read(prompt_file) if prompt_file is not None else prompt or ""
    bundle = load_model(run, cell=cell)
    if is_of_pairs(bundle):
        raise UserError(f"{run!r} was trained on pairs and writes targets of sources: elman translate {run} SOURCE")
    if "\r" in beginning and bundle.tokenizer.unknown_characters("\r"):
        beginning = beginning.replace("\r\n", "\n").replace("\r", "\n")  # as the training text was read
    start = Reading.load(load_state, bundle) if load_state is not None else None
    try:
        form = (
            TorchStepper(bundle.network)
            if interactive or engine == "pytorch"
            else stepper(bundle.network, precision="int8" if engine == "int8" else None)
        )
    except CannotLower as error:
        raise UserError(f"--engine int8: {error}; give --engine auto") from None
    # PyTorch's products of one step are too small to share: a second thread would cost more than it brings.
    with num_threads(1):
        if interactive:
            place = (start or Reading.start(bundle)).read(beginning, unknown=unknown)
            end: Reading | None = _write_in_turns(place, sampling, seed or 0, unknown)
        else:
            sampler = Sampler(
                bundle,
                beginning,
                start=start,
                settings=sampling,
                seed=seed or 0,
                stop=stop or (),
                unknown=unknown,
                stepper=form,
            )
            check = None if check_copies is None else partial(_copied, where=check_copies, cell=cell)
            updates = bundle.provenance.get("updates")
            _show(sampler, beginning, json=json, sampling=sampling, updates=updates, check=check)
            end = sampler.end
    if save_state is not None and end is not None:
        end.save(save_state)


def _refuse(names: Sequence[str], asked: Mapping[str, Mapping[str, object]], where: str) -> None:
    """Refuse settings that were given where they have no meaning."""
    for name in names:
        if name in asked.get("sampling", {}):
            raise UserError(f"--{name.replace('_', '-')} has no meaning with {where}: leave it out")


def _write_in_turns(place: Reading, sampling: SamplingConfig, seed: int, unknown: Unknown) -> Reading:
    from elman.cli.interactive import write_in_turns
    from elman.draft import Draft
    from elman.visible import clean

    draft = Draft(place, sampling, seed=seed)
    write_in_turns(draft, sys.stdin, clean if sys.stdout.isatty() else str, unknown=unknown)
    return draft.place


def _copied(text: str, *, where: str, cell: str | None) -> Copied:
    from elman.inspection.copies import find_copies

    return find_copies([text], where, cell=cell)[0]


def _show(
    sampler: Sampler,
    beginning: str,
    *,
    json: bool,
    sampling: SamplingConfig,
    updates: object,
    check: Callable[[str], Copied] | None,
) -> None:
    from elman.cli.output import print_json
    from elman.visible import clean

    if json:
        settings = {name: getattr(sampling, name) for name in OF_ONE_TEXT}
        result = sampler.run()
        seed = {"seed": None} if sampling.num_beams > 1 else {}
        copies = {} if check is None else {"copies": check(result.text).to_dict()}
        print_json({"prompt": beginning, **asdict(result), **seed, **copies, "updates": updates, "sampling": settings})
        return
    _stream(sampler, beginning, is_search=sampling.num_beams > 1)
    if check is not None and sampler.result is not None:
        found = check(sampler.result.text)
        verdict = "COPIED" if found.is_copied else "no copy"
        print(
            f"{verdict}: the longest piece that stands in the training text has {found.longest:,} characters "
            f"({found.share:.0%} of the text lie in pieces of 50 and more): {clean(repr(found.text))}",
            file=sys.stderr,
        )


def _stream(sampler: Sampler, beginning: str, *, is_search: bool) -> None:
    """Print a text while it is drawn; on a terminal, nothing in it moves the cursor."""
    from elman.visible import clean

    show = clean if sys.stdout.isatty() else str
    pieces = iter(sampler)
    first = next(pieces, "")  # before anything is printed, for the prompt may be refused
    print(show(beginning + first), end="", flush=True)
    for piece in pieces:
        print(show(piece), end="", flush=True)
    print(flush=True)
    result = sampler.result
    if result is not None:
        what = {"length": "the length asked for", "stop": "a stop string", "boundary": "the end of the document"}
        reason = what.get(result.finish_reason, result.finish_reason)
        how = "found by beam search" if is_search else f"seed {result.seed}"
        print(f"{len(result.tokens)} token{'s' * (len(result.tokens) != 1)}, {how}, ended by {reason}", file=sys.stderr)


def _read(path: Path) -> str:
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise TextError(f"the prompt file {str(path)!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise TextError(f"the prompt file {str(path)!r} is not UTF-8 at byte {error.start}: convert it") from None
