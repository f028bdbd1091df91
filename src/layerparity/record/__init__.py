"""Record: a run on disk, a comparison on disk; each file's writer and reader side by side."""
