"""Stable import names for the losses inside other trainers; the code is in `gatespace.addons`."""
