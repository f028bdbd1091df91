"""How the judge is measured: faults drawn by a seed, and what is said of each."""
