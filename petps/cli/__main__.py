"""`python -m petps.cli` is the `petps` command."""

from petps.cli import main

if __name__ == "__main__":
    main()
