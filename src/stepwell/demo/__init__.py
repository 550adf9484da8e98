"""The demo: the same requests to a real vLLM with and without Stepwell, measured and drawn."""
