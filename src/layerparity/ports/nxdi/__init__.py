"""port=nxdi in a rank's process: a model of NeuronX Distributed Inference, in NxD's CPU mode."""
