"""A stand-in of NeuronX Distributed Inference: two right models, with mistakes to switch on."""
