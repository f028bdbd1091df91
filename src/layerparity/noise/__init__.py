"""Noise: how large and how structured the error of a clean computation is, by groups of numbers."""
