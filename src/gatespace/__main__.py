"""`python -m gatespace` is the command `gatespace`."""

from gatespace.cli.app import main

if __name__ == "__main__":
    main()
