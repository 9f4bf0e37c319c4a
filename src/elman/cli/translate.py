"""``elman translate``."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated, Literal

from cyclopts import Parameter

from elman.cli.flags import OwnCell, Switch
from elman.errors import TextError


def translate(
    run: str,
    /,
    *source: Annotated[str, Parameter(allow_leading_hyphen=True)],
    num_beams: int = 1,
    max_new_tokens: int = 300,
    length_penalty: float = 1.0,
    unknown: Literal["error", "skip", "token"] = "error",
    json: Switch = False,
    cell: OwnCell = None,
) -> None:
    """Write the target of each source, a line each.

    Args:
        run: A run folder or a model.safetensors, trained with --data.pairs.
        source: The sources; '-' or none: the lines of standard input.
        num_beams: 1 takes the most probable token at each step; more follow so many texts at once.
        max_new_tokens: Tokens of a target at most.
        length_penalty: Of beam search, which ranks texts of n tokens by log p / n^length_penalty.
        unknown: What to do with what the model never saw: refuse it, leave it out, or read it as <unk>.
        json: Print one JSON object on standard output.
    """
    from elman.cli.output import print_json
    from elman.models.file import load_model
    from elman.process import num_threads
    from elman.translation import translate
    from elman.visible import clean

    bundle = load_model(run, cell=cell)
    sources = _lines() if source in ((), ("-",)) else list(source)
    # The products of one step are too small to share: a second thread would cost more than it brings.
    with num_threads(1):
        targets = translate(
            bundle,
            sources,
            num_beams=num_beams,
            max_new_tokens=max_new_tokens,
            length_penalty=length_penalty,
            unknown=unknown,
        )
    if json:
        results = [{"source": text, **asdict(target)} for text, target in zip(sources, targets, strict=True)]
        print_json({"translations": results, "updates": bundle.provenance.get("updates"), "num_beams": num_beams})
        return
    show = clean if sys.stdout.isatty() else str
    for target in targets:
        print(" ".join(show(target.text).split("\n")))


def _lines() -> list[str]:
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise TextError(f"standard input is not UTF-8 at byte {error.start}: convert it") from None
    # By line ends alone: other characters that str.splitlines heeds belong to a text.
    return text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n").split("\n") if text else []
