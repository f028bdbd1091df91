"""Rooms of the neuron backend: runtimes, AWS's packages, the distributed environment, sharding."""
