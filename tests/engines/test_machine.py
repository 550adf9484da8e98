"""Everything at once, at random: never a wrong byte, the answers of an engine without cache, nothing kept."""

from typing import Any

import pytest
from engine_kit import Cache, GatedCopier
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from stepwell.engines.fake import FakeEngine, FakeRequest

B = 4


def _prompt(parts: list[int], cut: int) -> list[int]:
    tokens = [100 * part + n for part in parts for n in range(2 * B)]
    return tokens[: len(tokens) - cut]


# A small family: many share a beginning, of any length.
PROMPTS = st.builds(_prompt, st.lists(st.integers(0, 3), min_size=1, max_size=3), st.integers(0, 2 * B - 1))


class Machine(RuleBasedStateMachine):
    @initialize(
        slots=st.integers(1, 6),
        chunk_blocks=st.sampled_from([1, 2]),
        eviction=st.sampled_from(["lru", "s3fifo"]),
        blocks=st.integers(12, 20),
        caching=st.booleans(),
    )
    def start(self, slots: int, chunk_blocks: int, eviction: str, blocks: int, caching: bool) -> None:
        self.cache = Cache(slots * 4096, eviction)
        self.options: dict[str, Any] = {
            "block_tokens": B,
            "chunk_blocks": chunk_blocks,
            "num_blocks": blocks,
            "prefix_caching": caching,
            "step_tokens": 10,
            "copier": GatedCopier,
        }
        self.reference = FakeEngine(None, block_tokens=B, num_blocks=64)
        self.asked: list[FakeRequest] = []
        self.engines = [self.cache.engine(**self.options)]

    @rule(
        which=st.integers(0, 1),
        tokens=PROMPTS,
        new_tokens=st.integers(1, 9),
        options=st.sampled_from([(None, False), (None, False), ("x", False), (None, True)]),
    )
    def add(self, which: int, tokens: list[int], new_tokens: int, options: tuple[str | None, bool]) -> None:
        salt, bypass = options
        engine = self.engines[which % len(self.engines)]
        self.asked.append(engine.add(tokens, new_tokens, salt=salt, bypass=bypass))

    @rule(which=st.integers(0, 1), steps=st.integers(1, 4))
    def step(self, which: int, steps: int) -> None:
        for _ in range(steps):
            self.engines[which % len(self.engines)].step()

    @rule(which=st.integers(0, 1), victim=st.integers(0, 50))
    def abort_between_the_halves_of_a_step(self, which: int, victim: int) -> None:
        engine = self.engines[which % len(self.engines)]
        step = engine.schedule()
        alive = engine.waiting + engine.running
        if alive:
            engine.abort(alive[victim % len(alive)])
        engine.execute(step)

    @rule(which=st.integers(0, 1), victim=st.integers(0, 50))
    def abort(self, which: int, victim: int) -> None:
        engine = self.engines[which % len(self.engines)]
        alive = engine.waiting + engine.running
        if alive:
            engine.abort(alive[victim % len(alive)])

    @rule(which=st.integers(0, 1))
    def copies_run(self, which: int) -> None:
        engine = self.engines[which % len(self.engines)]
        assert engine.worker is not None
        assert isinstance(engine.worker._copier, GatedCopier)
        engine.worker._copier.open()

    @precondition(lambda self: len(self.engines) == 1)
    @rule()
    def second_engine(self) -> None:
        self.engines.append(self.cache.engine(**self.options))

    @rule(which=st.integers(0, 1))
    def engine_crashes(self, which: int) -> None:
        engine = self.engines.pop(which % len(self.engines))
        self.cache.stop(engine)
        if not self.engines:
            self.engines.append(self.cache.engine(**self.options))

    @rule()
    def clear(self) -> None:
        self.cache.clear()

    @rule(which=st.integers(0, 1))
    def reset(self, which: int) -> None:
        scheduler = self.engines[which % len(self.engines)].scheduler
        assert scheduler is not None
        scheduler.reset()

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for engine in self.engines:
            engine.run(2000)
            held_by_nobody = len(engine.layers[0]) - 1
            assert len(engine.free) == held_by_nobody
        self.cache.check_idle()
        for request in self.asked:
            if request.state == "finished":
                tokens = request.tokens[: request.num_prompt_tokens]
                expected = self.reference.ask(tokens, request.max_new_tokens, salt=request.salt)
                assert request.new_tokens == expected.new_tokens
                if not request.preemptions:
                    found = request.engine_hit_tokens + request.stepwell_hit_tokens
                    assert found + request.prompt_computed_tokens == request.num_prompt_tokens
        self.cache.close()


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=60,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.mark.soak
@pytest.mark.timeout(1800)
class TestMachineForLong(Machine.TestCase):
    settings = settings(TestMachine.settings, max_examples=600, stateful_step_count=60)
