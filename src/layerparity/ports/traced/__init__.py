"""Where the elements of a checkpoint went in the modules of a port: measured, not written."""
