"""Machine: memory, GPUs, Neuron devices, and where a model's stages would go on them."""
