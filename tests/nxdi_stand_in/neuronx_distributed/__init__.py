"""A stand-in of NeuronX Distributed: as much of its interface as port=nxdi uses, over gloo."""
