"""Stands in for AWS's native flavour: its import gives torch a device ``neuron``."""

import neuron_device

__version__ = "2.13.3.0"
neuron_device.register()
