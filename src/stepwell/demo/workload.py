"""What the demo asks: long documents and growing chats, made from a seed. Pure and deterministic.

The text is a waterworks' logbook: dull, readable, and different from the first words on, so that no two
documents share a prefix and every document's facts are its own.
"""

from collections.abc import Sequence
from enum import StrEnum
from random import Random

import msgspec

PLACES = ("Adlington", "Brambury", "Corvale", "Dunmere", "Eastholt", "Farrowby", "Glenmoor", "Hartwell")
KEEPERS = ("Agnes", "Bertram", "Clara", "Dorian", "Edith", "Florian", "Greta", "Hugo", "Ida", "Jasper")
PARTS = ("north well", "south well", "upper gallery", "lower gallery", "cistern", "spring house", "sluice")
WATERS = ("clear", "cloudy", "cold", "still", "rising", "falling", "tasting of iron", "covered with leaves")
WORKS = (
    "swept the steps",
    "oiled the gate",
    "replaced a cracked stone",
    "counted the buckets",
    "marked the level with chalk",
    "closed the sluice for the night",
    "let the travellers drink",
    "wrote to the council about the rope",
)
MONTHS = ("January", "March", "April", "June", "July", "September", "October", "December")
QUESTIONS = (
    "Who is named first in the logbook above? Answer in one short sentence.",
    "Which month is named most often in the logbook above? Answer in one short sentence.",
    "What did the keepers do most often? Answer in one short sentence.",
    "Was the water clear or cloudy? Answer in one short sentence.",
)
FOLLOW_UPS = (
    "Summarise the notes in one sentence.",
    "Which part of the well needs the most care, and why?",
    "What should the next keeper look at first?",
    "Write one polite sentence to the council about it.",
)


class Phase(StrEnum):
    """The parts of the demo."""

    DOCUMENTS = "documents"
    CHATS = "chats"
    RESTART = "restart"
    DISK = "disk"


class Sizes(msgspec.Struct, frozen=True):
    """How much the demo asks. An entry of a logbook has about 34 tokens in the demo's model."""

    documents: int
    rounds: int  # questions asked about every document, all documents in turn
    document_entries: int
    chats: int
    turns: int
    notes_entries: int  # in each chat's first message
    turn_entries: int  # in each later message


class Message(msgspec.Struct, frozen=True):
    """One message of a chat completion."""

    role: str
    content: str


class Request(msgspec.Struct, frozen=True):
    """One chat completion to ask for; the engine's answer ends it."""

    phase: Phase
    name: str
    messages: tuple[Message, ...]


class Chat(msgspec.Struct, frozen=True):
    """What the user of one chat says, turn by turn."""

    name: str
    says: tuple[str, ...]


def logbook(place: str, year: int, entries: int, random: Random) -> str:
    """A logbook of so many entries (about 34 tokens each)."""
    lines = (f"Entry {number}. {_entry(random)}" for number in range(1, entries + 1))
    return f"Logbook of the stepwell of {place}, year {year}.\n" + "\n".join(lines)


def document_requests(sizes: Sizes, seed: int) -> list[Request]:
    """Every document once with the first question, then every document with the second, and so on."""
    documents = [_document(number, sizes.document_entries, seed) for number in range(sizes.documents)]
    return [
        Request(
            phase=Phase.DOCUMENTS,
            name=f"document {number + 1}, question {round_ + 1}",
            messages=(Message("user", f"{text}\n\n{QUESTIONS[round_ % len(QUESTIONS)]}"),),
        )
        for round_ in range(sizes.rounds)
        for number, text in enumerate(documents)
    ]


def restart_requests(sizes: Sizes, seed: int, phase: Phase) -> list[Request]:
    """The first question about every document once more, word for word."""
    first_round = document_requests(sizes, seed)[: sizes.documents]
    return [msgspec.structs.replace(request, phase=phase) for request in first_round]


def chats(sizes: Sizes, seed: int) -> list[Chat]:
    """The users' side of every chat."""
    return [_chat(number, sizes, seed) for number in range(sizes.chats)]


def chat_request(chat: Chat, answers: Sequence[str]) -> Request:
    """The next turn of a chat after these answers of the engine: the whole history, then a message."""
    messages = []
    for said, answer in zip(chat.says, answers, strict=False):
        messages += [Message("user", said), Message("assistant", answer)]
    turn = len(answers)
    messages.append(Message("user", chat.says[turn]))
    return Request(phase=Phase.CHATS, name=f"{chat.name}, turn {turn + 1}", messages=tuple(messages))


def _chat(number: int, sizes: Sizes, seed: int) -> Chat:
    random = Random(f"chat {seed} {number}")
    place = PLACES[-1 - number % len(PLACES)]
    notes = logbook(place, 1900 + number, sizes.notes_entries, random)
    says = [f"Here are my notes.\n{notes}\n\n{FOLLOW_UPS[0]}"]
    for turn in range(1, sizes.turns):
        more = "\n".join(_entry(random) for _ in range(sizes.turn_entries))
        says.append(f"More notes:\n{more}\n\n{FOLLOW_UPS[turn % len(FOLLOW_UPS)]}")
    return Chat(name=f"chat {number + 1}", says=tuple(says))


def _document(number: int, entries: int, seed: int) -> str:
    random = Random(f"document {seed} {number}")
    return logbook(PLACES[number % len(PLACES)], 1800 + number, entries, random)


def _entry(random: Random) -> str:
    return (
        f"On {_number(random, 1, 28)} {_pick(random, MONTHS)} {_pick(random, KEEPERS)} "
        f"measured {_number(random, 20, 99)} buckets at the {_pick(random, PARTS)}, "
        f"found the water {_pick(random, WATERS)} and {_pick(random, WORKS)}."
    )


# Only `random()` promises the same numbers from the same seed in every version of Python.
def _pick(random: Random, words: Sequence[str]) -> str:
    return words[int(random.random() * len(words))]


def _number(random: Random, low: int, high: int) -> int:
    return low + int(random.random() * (high - low + 1))
