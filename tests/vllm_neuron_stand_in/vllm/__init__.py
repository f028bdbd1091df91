"""Stands in for vLLM, of which a model of the Neuron plugin asks its group and configuration."""
