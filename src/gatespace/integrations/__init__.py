"""The stable import names of our losses inside other trainers; the code is in `gatespace.addons`."""
