"""Migrations; a released file never changes."""
