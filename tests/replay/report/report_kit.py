"""A made-up workload and hardware that fits it."""

from stepwell.replay.sim.build import Hardware, build
from stepwell.replay.sim.spec import SimSpec
from stepwell.replay.traces.row import Trace
from stepwell.replay.traces.synth import Spec, synthesize


def chats() -> Trace:
    return synthesize(Spec(requests=300, block_tokens=64, turns=6.0, user_tokens=600, sessions_per_s=0.5))


def spec() -> SimSpec:
    tiers = ("memory=4GiB", "disk=100GiB@2GB/s")
    return build(Hardware("Llama-3.1-8B", "L40S", tiers=tiers), 64)
