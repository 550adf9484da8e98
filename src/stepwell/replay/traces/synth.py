"""Made-up workloads from stated parameters, for what no recorded trace shows."""

import random
from collections.abc import Iterator, Sequence
from itertools import count, islice
from operator import itemgetter
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from stepwell.replay.traces.prefixes import Prefixes
from stepwell.replay.traces.row import Row, Trace

Workload: TypeAlias = Literal["chat", "agents", "rag"]

_Segment: TypeAlias = tuple[int, int]  # a text's number, its tokens


class Spec(msgspec.Struct, frozen=True):
    """What the traffic is made of; the descriptions are the command line's help.

    Tokens that are drawn come from exponential distributions (at least 1 token). Of things with a
    popularity, the k-th is used 1/k as often as the first.
    """

    workload: Annotated[
        Workload,
        Meta(description="chat, agents (that start sub-agents) or rag (documents first)."),
    ] = "chat"
    requests: Annotated[int, Meta(ge=0, description="How many.")] = 1_000
    seed: Annotated[int, Meta(ge=0, description="Another seed draws another trace.")] = 0
    block_tokens: Annotated[int, Meta(ge=1, description="Tokens a block.")] = 16
    sessions_per_s: Annotated[float, Meta(gt=0, description="Rate at which sessions begin (Poisson).")] = 1.0
    system_prompts: Annotated[int, Meta(ge=1, description="Different ones; sessions share them.")] = 4
    system_tokens: Annotated[int, Meta(ge=1, description="Tokens of each system prompt.")] = 1_000
    turns: Annotated[float, Meta(ge=1, description="Mean turns of a session (geometric).")] = 4.0
    pause_s: Annotated[float, Meta(gt=0, description="Mean seconds from a turn to the next.")] = 60.0
    user_tokens: Annotated[
        int, Meta(ge=1, description="Mean tokens that a turn adds: a question, or a tool's result.")
    ] = 200
    output_tokens: Annotated[int, Meta(ge=1, description="Mean tokens of an answer.")] = 200
    sub_agents: Annotated[
        float, Meta(ge=0, le=1, description="agents: probability that a turn starts one.")
    ] = 0.2
    documents: Annotated[int, Meta(ge=1, description="rag: documents in the store.")] = 1_000
    document_tokens: Annotated[int, Meta(ge=1, description="rag: tokens of each document.")] = 500
    documents_per_prompt: Annotated[int, Meta(ge=1, description="rag: documents that a session draws.")] = 4


def synthesize(spec: Spec) -> Trace:
    """The same trace for the same `spec`."""
    writer = _Writer(spec)
    arrivals = _arrivals(writer, spec)
    prompts = sorted(islice(arrivals, spec.requests), key=itemgetter(0))
    rows = [writer.row(*prompt) for prompt in prompts]
    start_s = rows[0].arrival_s if rows else 0.0
    return Trace(
        rows=tuple(msgspec.structs.replace(row, arrival_s=row.arrival_s - start_s) for row in rows),
        block_tokens=spec.block_tokens,
        blocks=len(writer.prefixes),
        sources=(f"synthetic: {msgspec.json.encode(spec).decode()}",),
        skipped_rows=0,
        warnings=(),
    )


_Prompt: TypeAlias = tuple[float, int, Sequence[_Segment], int]  # when, session, texts, output tokens


class _Writer:
    """Draws numbers, gives out texts, and turns texts into blocks."""

    def __init__(self, spec: Spec) -> None:
        self.random = random.Random(spec.seed)
        self.prefixes = Prefixes()
        self._block_tokens = spec.block_tokens
        self._contents: dict[tuple[tuple[int, int, int], ...], int] = {}
        self._texts = 0

    def text(self, tokens: int) -> _Segment:
        """One that no other prompt has, until it is used again."""
        self._texts += 1
        return self._texts, tokens

    def drawn(self, mean: float) -> int:
        """Tokens."""
        return max(1, round(self.random.expovariate(1 / mean)))

    def popular(self, texts: Sequence[_Segment], count: int = 1) -> list[_Segment]:
        """Of `texts`, the k-th 1/k as often as the first; they may repeat."""
        return self.random.choices(texts, [1 / (1 + rank) for rank in range(len(texts))], k=count)

    def row(self, arrival_s: float, session: int, texts: Sequence[_Segment], output_tokens: int) -> Row:
        tokens = sum(length for _, length in texts)
        blocks = self.prefixes.path("", list(self._ids(texts)))
        return Row(arrival_s, tokens, output_tokens, session, blocks)

    def _ids(self, texts: Sequence[_Segment]) -> Iterator[int]:
        """One for each whole block: equal contents, equal ids."""
        block: list[tuple[int, int, int]] = []  # text, from, to
        room = self._block_tokens
        for text, length in texts:
            start = 0
            while length - start >= room:
                block.append((text, start, start + room))
                yield self._contents.setdefault(tuple(block), len(self._contents))
                start += room
                block, room = [], self._block_tokens
            if start < length:
                block.append((text, start, length))
                room -= length - start


def _arrivals(writer: _Writer, spec: Spec) -> Iterator[_Prompt]:
    """Prompts of one session after another, endlessly; sessions overlap in time."""
    systems = [writer.text(spec.system_tokens) for _ in range(spec.system_prompts)]
    helpers = [writer.text(spec.system_tokens) for _ in range(spec.system_prompts)]
    documents = [writer.text(spec.document_tokens) for _ in range(spec.documents)]
    now_s = 0.0
    for session in count():
        now_s += writer.random.expovariate(spec.sessions_per_s)
        prompt = writer.popular(systems)
        if spec.workload == "rag":
            prompt += dict.fromkeys(writer.popular(documents, spec.documents_per_prompt))
        for turn_s, texts, output_tokens in _turns(writer, spec, now_s, prompt):
            yield turn_s, session, texts, output_tokens
            if spec.workload == "agents" and writer.random.random() < spec.sub_agents:
                helper_s = turn_s + writer.random.expovariate(1 / spec.pause_s)
                for helper_turn in _turns(writer, spec, helper_s, writer.popular(helpers)):
                    yield helper_turn[0], session, *helper_turn[1:]


def _turns(
    writer: _Writer, spec: Spec, start_s: float, prompt: list[_Segment]
) -> Iterator[tuple[float, Sequence[_Segment], int]]:
    """Of one conversation: when, texts, output tokens. Each has all of the one before in its prompt."""
    now_s = start_s
    while True:
        prompt = [*prompt, writer.text(writer.drawn(spec.user_tokens))]
        output_tokens = writer.drawn(spec.output_tokens)
        yield now_s, prompt, output_tokens
        if writer.random.random() >= 1 - 1 / spec.turns:
            return
        prompt = [*prompt, writer.text(output_tokens)]
        now_s += writer.random.expovariate(1 / spec.pause_s)
