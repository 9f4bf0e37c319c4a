"""``elman sample --interactive``: a line of input, a step of the draft, and what may come next."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from elman.cli.files import check_state_file
from elman.cli.flags import OF_ONE_TEXT, OF_SEVERAL
from elman.draft import OF_WHOLE_TEXTS, Draft
from elman.errors import ElmanError, UserError, nearest
from elman.reading import Unknown

_HELP = """\
NUMBER         take the token of this number
draw [N]       let the model draw N tokens; an empty line draws one
type TEXT      put text of your own at the end
undo           take back the last step
show N         list N tokens from now on
SETTING VALUE  change how tokens are drawn: temperature 0.5, top-p 0.9, ...
SETTING [VALUES]  the same for bad-words, suppress-tokens and logit-bias, which take several, with quotes where one
               holds a space; none: no more
text           print the whole text
save FILE      save the place in the text, for --load-state
quit           leave; so does the end of the input
The probabilities shown are those of the next draw: after penalties, temperature and filters.
"""
_NUMBER = re.compile("[0-9]{1,9}")
_TAIL = 200  # characters of the text shown at every step


class _Quit(Exception):
    """The writer leaves."""


class _Desk:
    """The words of the writer, turned into steps of the draft."""

    def __init__(self, draft: Draft, show: Callable[[str], str], unknown: Unknown) -> None:
        self._draft, self._show, self._unknown, self._num_shown = draft, show, unknown, 9

    def turn(self, line: str) -> None:
        """Do what a line says."""
        word, _, rest = line.strip("\r\n").partition(" ")
        name = word.replace("-", "_")
        if _NUMBER.fullmatch(word):
            self._draft.choose(int(word))
        elif word in ("", "draw"):
            reason = self._draft.draw(_count(rest or "1"))
            if reason == "boundary":
                print("the model ends the text here")
        elif word == "type":
            self._draft.write(rest, unknown=self._unknown)
        elif word == "undo":
            self._draft.undo()
        elif word == "show":
            self._num_shown = _count(rest)
        elif word == "text":
            print(self._show(self._draft.text))
        elif word == "save":
            path = Path(_given(rest, "save"))
            check_state_file(path)
            self._draft.save(path)
            print(f"saved to {rest}")
        elif word == "help":
            print(_HELP, end="")
        elif word == "quit":
            raise _Quit
        elif name in OF_SEVERAL:
            self._draft.change(name, _split(rest))
        elif name in OF_ONE_TEXT:
            self._draft.change(name, _given(rest, word))
        else:
            settings = [name.replace("_", "-") for name in OF_ONE_TEXT if name not in OF_WHOLE_TEXTS]
            words = ("draw", "type", "undo", "show", "text", "save", "help", "quit", *settings)
            raise UserError(f"unknown word {word!r}{nearest(word.replace('_', '-'), words)}")

    def state(self) -> str:
        """The end of the text and what may come next."""
        text = self._draft.text
        lines = [self._show(("..." if len(text) > _TAIL else "") + text[-_TAIL:])]
        for number, option in enumerate(self._draft.options(self._num_shown), 1):
            what = "end of the text" if option.ends_text else repr(option.text)
            lines.append(f"{number:4} {option.probability:7.4f}  {self._show(what)}")
        return "\n".join(lines)


def write_in_turns(
    draft: Draft, lines: Iterable[str], show: Callable[[str], str], *, unknown: Unknown = "error"
) -> None:
    """Read lines and answer each until the writer leaves; a mistake is one line and changes nothing."""
    desk = _Desk(draft, show, unknown)
    print("help lists what can be said; probabilities are after temperature and filters")
    print(desk.state())
    remaining = iter(lines)
    while True:
        print("> ", end="", flush=True)
        line = next(remaining, None)
        if line is None:
            print()
            return
        try:
            desk.turn(line)
            print(desk.state())
        except _Quit:
            return
        except ElmanError as error:
            print(f"elman: {' '.join(str(error).split())}", file=sys.stderr)


def _count(word: str) -> int:
    if not _NUMBER.fullmatch(word.strip()):
        raise UserError(f"{word!r} is not a number of tokens: give one such as 20")
    return int(word)


def _split(rest: str) -> list[str]:
    try:
        return shlex.split(rest)
    except ValueError:
        raise UserError(f"{rest!r} opens a quote that nothing closes") from None


def _given(rest: str, word: str) -> str:
    if not rest.strip():
        raise UserError(f"{word} needs something behind it; help tells what")
    return rest.strip()
