"""Finds stop strings in text that arrives in pieces, and holds back as little of it as can be (rule R6)."""

from collections.abc import Sequence


class StopMatcher:
    """Watches one choice's text for any of several non-empty stop strings.

    Only the longest end of the text that could still become a stop string is held back. Where the
    pieces begin and end makes no difference: the stop string that is complete first counts, and of
    those complete at the same character the longest.
    """

    def __init__(self, stop: Sequence[str], include_stop_str: bool = False) -> None:
        self._stop = tuple(stop)
        self._borders = [_borders(text) for text in self._stop]
        self._lengths = [0] * len(self._stop)  # characters of each stop string that the text ends with
        self._first_chars = frozenset(text[0] for text in self._stop)
        self._include = include_stop_str
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Takes new text; gives the text that may go out now and the stop string found, or None.

        After a find the text goes no further than the stop string, or up to its end with
        ``include_stop_str``, and the matcher is done.
        """
        if not self._held and self._first_chars.isdisjoint(text):
            return text, None
        text = self._held + text
        for place in range(len(self._held), len(text)):
            found = self._advance(text[place])
            if found is not None:
                self._held = ""
                end = place + 1 if self._include else place + 1 - len(found)
                return text[:end], found
        cut = len(text) - max(self._lengths, default=0)
        self._held = text[cut:]
        return text[:cut], None

    def flush(self) -> str:
        """The text held back; it turned out not to become a stop string."""
        held, self._held = self._held, ""
        self._lengths = [0] * len(self._stop)
        return held

    def _advance(self, char: str) -> str | None:
        """One character through the Knuth-Morris-Pratt automaton of every stop string."""
        found: str | None = None
        for index, (stop, borders) in enumerate(zip(self._stop, self._borders, strict=True)):
            length = self._lengths[index]
            while length and stop[length] != char:
                length = borders[length - 1]
            if stop[length] == char:
                length += 1
            self._lengths[index] = length
            if length == len(stop) and (found is None or length > len(found)):
                found = stop
        return found


def _borders(text: str) -> list[int]:
    """For every prefix of a text: the length of its longest proper prefix that is also its end."""
    borders = [0] * len(text)
    length = 0
    for place in range(1, len(text)):
        while length and text[place] != text[length]:
            length = borders[length - 1]
        if text[place] == text[length]:
            length += 1
        borders[place] = length
    return borders
