"""Rooms of the gpu backend; imported only when it is built."""
