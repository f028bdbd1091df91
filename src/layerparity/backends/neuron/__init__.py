"""Rooms of the neuron backend: runtimes, the distributed environment, sharding."""
