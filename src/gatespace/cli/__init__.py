"""The command line: one module per command, and the only room that sees every other."""
