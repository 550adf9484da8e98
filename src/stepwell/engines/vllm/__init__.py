"""The vLLM connector: `StepwellConnector`, named on vLLM's command line with this module's path."""

from stepwell.engines.vllm.connector import StepwellConnector

__all__ = ["StepwellConnector"]
