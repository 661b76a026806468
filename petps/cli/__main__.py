"""Entry point: `python -m petps.cli` runs the `petps` command."""

from petps.cli import main

if __name__ == "__main__":
    main()
