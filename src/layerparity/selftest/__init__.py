"""Self-test: does the verdict name every known fault, and stay silent about rounding?"""
