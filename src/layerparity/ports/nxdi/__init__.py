"""port=nxdi in a rank's process: a model of NeuronX Distributed Inference, in NxD's CPU mode."""

# What a model asks to choose other code on CPUs.
CPU_MODE = "cpu_mode"
