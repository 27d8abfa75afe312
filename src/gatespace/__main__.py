"""Run the command `gatespace` as `python -m gatespace`."""

from gatespace.cli.app import main

if __name__ == "__main__":
    main()
