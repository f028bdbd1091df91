"""The packing formats that are known, one file each."""
