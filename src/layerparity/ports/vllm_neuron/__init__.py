"""port=vllm_neuron in a rank's process: a model of the vLLM Neuron plugin, in its CPU mode."""
