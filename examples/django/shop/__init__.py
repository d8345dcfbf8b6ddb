"""A small shop in Django."""
