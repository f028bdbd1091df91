"""Stands in for AWS's vLLM Neuron plugin, which needs AWS's index: the same interface, in our way.

A model's class makes it of a configuration, it loads a folder by itself, attention reads and writes
a paged cache, and the ranks share the tokens of a prompt. ``mistake`` of a NeuronConfig is one that
the models make on purpose.
"""

import os

__version__ = "0.0.stand-in"

if os.environ.get("VLLM_NEURON_CPU_MODE") != "1":
    raise RuntimeError("the stand-in computes on the CPU alone: set VLLM_NEURON_CPU_MODE=1")
