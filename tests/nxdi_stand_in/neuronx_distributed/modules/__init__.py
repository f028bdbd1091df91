"""Modules that models share."""
